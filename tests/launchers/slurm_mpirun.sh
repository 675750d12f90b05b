#!/usr/bin/env bash
# mpirun within a SLURM job: ranks on two nodes connect at the first node of the job, without MASTER_ADDR.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
have mpirun.openmpi || have mpiexec.hydra || skip "mpirun.openmpi and mpiexec.hydra are missing (Debian: openmpi-bin, mpich)"

# The names of the nodes resolve only in a mount namespace of the daemons.
printf '127.0.0.1 localhost %s n1 n2\n' "$(hostname)" >"$scratch/hosts"
# shellcheck disable=SC2016
named=(unshare --mount bash -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$scratch/hosts")
"${named[@]}" true 2>/dev/null || skip "names of nodes need a mount namespace, which is not permitted here"
start_slurm "${named[@]}"
run="${train[*]} 20 --out $scratch"

# check NAME KIND LAUNCHER...: runs under one kind of mpirun.
check() {
    local out="$1" package="$2"
    shift 2
    if ! have "$1"; then
        echo "$name: skipped: $1 is missing (Debian: $package)"
        return
    fi
    submit "$out" "unset MASTER_ADDR
$* -n 2 bash -c 'echo \$SLURM_NODEID' && $* -n 2 $run/$out && echo ended well"
    finish "$job" 60
    grep -qx "ended well" "$scratch/$out.log" || fail "$* failed"
    { grep -qx 0 "$scratch/$out.log" && grep -qx 1 "$scratch/$out.log"; } || fail "$*: both ranks are on one node"
    same "$out"
}

check openmpi openmpi-bin mpirun.openmpi --allow-run-as-root --oversubscribe --map-by node
check mpich mpich mpiexec.hydra -ppn 1
