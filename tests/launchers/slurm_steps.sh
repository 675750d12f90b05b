#!/usr/bin/env bash
# Uninterrupted SLURM steps: on one node, whose name does not resolve; with PMI2; on two nodes; two steps at once.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
start_slurm

# check NAME OPTION...: runs one step.
check() {
    local out="$1"
    shift
    launch "$out" srun --ntasks=2 "$@" "${train[@]}" 20 --out "$scratch/$out"
    await 60 "$out"
    [ "$code" -eq 0 ] || fail "$out ended with $code"
    same "$out"
}

check one_node --nodes=1
check pmi2 --nodes=1 --mpi=pmi2
MASTER_ADDR=127.0.0.1 check two_nodes --nodes=2
MASTER_ADDR=127.0.0.1 check two_nodes_pmi2 --nodes=2 --mpi=pmi2

step="srun --nodes=2 --ntasks=2 --overlap ${train[*]} 20 --out $scratch"
submit at_once "$step/first & first=\$!; $step/second & second=\$!; wait \$first && wait \$second && echo ended well"
finish "$job" 60
grep -qx "ended well" "$scratch/at_once.log" || fail "of two steps at once, one failed"
same first
same second
