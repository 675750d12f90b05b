# Shared setup of the launcher tests in this folder; each script starts with `source "$(dirname "$0")/setup.bash"`.
#
# A script trains a small model under a launcher, interrupts the run, resumes it, and compares weights, losses and gradient norms with
# those of an uninterrupted run on threads, byte for byte. If its launcher is missing, it prints a line and exits with 0. Servers
# listen on this machine and are stopped with the script. Environment variables:
#   SHARDGRAD        the program (default: target/release/shardgrad)
#   TORCHRUN         the program torchrun (default: the one in PATH)
#   STOPPED_BY_TERM  the exit code of a run that SIGTERM stopped after saving its state (default: 143)
# shellcheck disable=SC2034,SC2120  # Variables and arguments are used by the scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

name="$(basename "$0" .sh)"
program="$(realpath "${SHARDGRAD:-${CARGO_TARGET_DIR:-target}/release/shardgrad}")"
stopped_by_term="${STOPPED_BY_TERM:-143}"
scratch="$(mktemp -d)"
# Slurm and Munge run as other users, which need access to the folder.
chmod 755 "$scratch"
launched=""

fail() {
    echo "$name: $*" >&2
    exit 1
}

skip() {
    echo "$name: skipped: $*"
    exit 0
}

have() {
    command -v "$1" >/dev/null
}

clean_up() {
    local status=$? pid file servers=()
    trap - EXIT
    if [ "$status" -ne 0 ]; then
        for file in "$scratch"/*.log; do
            if [ -s "$file" ]; then printf -- '--- %s\n' "$(basename "$file")" && sed '/^{"step":/d' "$file" | tail -n 20; fi
        done >&2
    fi
    if [ -n "$launched" ]; then kill "$launched" 2>/dev/null || true; fi
    if [ -s "$scratch/slurmctld.pid" ]; then
        scancel --quiet --user="$(id -un)" 2>/dev/null || true
        within 10 no_job || true
    fi
    for file in "$scratch"/slurmd-*.pid "$scratch"/slurmctld.pid "$scratch"/munged.pid; do
        if [ -s "$file" ]; then servers+=("$(cat "$file")"); fi
    done
    for pid in ${servers[@]+"${servers[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${servers[@]+"${servers[@]}"}; do within 10 ended "$pid" || kill -KILL "$pid" 2>/dev/null || true; done
    rm -rf "$scratch"
    exit "$status"
}

no_job() {
    [ -z "$(squeue --noheader)" ]
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ended() {
    ! kill -0 "$1" 2>/dev/null
}

# launch NAME COMMAND...: starts a command in the background; its standard error goes to NAME.log.
launch() {
    local log="$scratch/$1.log"
    shift
    "$@" >/dev/null 2>>"$log" &
    launched=$!
}

# await SECONDS WHAT: waits for the command that `launch` started, and sets `code` to its exit code.
await() {
    within "$1" ended "$launched" || fail "$2 has not ended within $1 s"
    code=0
    wait "$launched" || code=$?
    launched=""
}

# within SECONDS COMMAND...: repeats a command until it succeeds or the time is over.
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

[ -x "$program" ] || fail "there is no program $program: build it, or set SHARDGRAD"
# Unset the variables of a pod or job in which this script itself may run.
while read -r variable; do unset "$variable"; done < <(
    compgen -e | grep -E '^(SLURM|OMPI|PMI|PMIX|MPI|LWS|AWS_BATCH|TORCHELASTIC|SHARDGRAD|TPU|SM)_' || true
)
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK JOB_COMPLETION_INDEX

seq -f '%g bottles of beer on the wall, take one down and pass it around.' 3000 >"$scratch/text.txt"
# The training command, up to the number of steps. The learning rate is constant, so that steps do not depend on their number.
train=("$program" train --data "$scratch/text.txt" --mesh "dp=2" --threads 1 --seq 32 --batch 8
    --lr-schedule constant --eval-every 0 --json --steps)
endless=1000000
# Options of a run that saves often, and of a run that saves only when it is stopped.
often=(--save-every 5 --keep 2)
at_stop=(--save-every "$endless")

# last_step OUT: the last step of a run.
last_step() {
    sed -n '$s/^{"step":\([0-9]*\),.*/\1/p' "$scratch/$1/metrics.jsonl" 2>/dev/null || true
}

at_step() {
    local step
    step="$(last_step "$1")"
    [ "${step:-0}" -ge "$2" ]
}

# wait_for_step OUT STEP: waits until a run has finished a step.
wait_for_step() {
    within 60 at_step "$1" "$2" || fail "$1 has not reached step $2 within 60 s"
}

# newest_checkpoint OUT: the step of the newest checkpoint.
newest_checkpoint() {
    # shellcheck disable=SC2012
    ls "$scratch/$1" | sed -n 's/^checkpoint-0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -1
}

numbers() {
    sed -n 's/^\({"step":[0-9]*,"loss":[^,]*,"grad_norm":[^,]*\),.*/\1/p' "$scratch/$1/metrics.jsonl"
}

# same OUT: checks that a run has the weights, losses and gradient norms of an uninterrupted run on threads with as many steps.
same() {
    local steps reference
    steps="$(last_step "$1")" reference="reference-$(last_step "$1")"
    if [ ! -e "$scratch/$reference" ]; then
        "${train[@]}" "$steps" --out "$scratch/$reference" >/dev/null 2>"$scratch/reference.log" || fail "the run on threads failed"
    fi
    [ "$(numbers "$reference" | wc -l)" = "$steps" ] || fail "the run on threads has no losses"
    diff <(numbers "$reference") <(numbers "$1") >&2 || fail "$1: losses differ from those of the uninterrupted run"
    cmp "$scratch/$reference/model/model.safetensors" "$scratch/$1/model/model.safetensors" >&2 ||
        fail "$1: weights differ from those of the uninterrupted run"
    echo "$name: $1: $steps steps, bit-identical to the uninterrupted run"
}

# must_be_saved OUT: checks that a stopped run has saved the state of its last step.
must_be_saved() {
    local saved
    saved="$(newest_checkpoint "$1")"
    [ "$saved" = "$(last_step "$1")" ] || fail "$1: the last step is $(last_step "$1"), the newest checkpoint of step ${saved:-none}"
}

# rank_pids OUT: the processes that train into a folder.
rank_pids() {
    local proc
    for proc in /proc/[0-9]*; do
        if [ "$(readlink "$proc/exe" 2>/dev/null)" = "$program" ] &&
            tr '\0' '\n' 2>/dev/null <"$proc/cmdline" | grep -qxF "$scratch/$1"; then
            basename "$proc"
        fi
    done
}

# rank_with OUT VARIABLE VALUE: the process that trains into a folder and has a launcher variable of this value.
rank_with() {
    local pid
    for pid in $(rank_pids "$1"); do
        if tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qx "$2=$3"; then
            echo "$pid"
            return
        fi
    done
    return 1
}

# kill_rank OUT VARIABLE RANK: kills one rank with SIGKILL, found by its launcher variable.
kill_rank() {
    local pid
    pid="$(rank_with "$@")" || fail "there is no process with $2=$3 in $1"
    kill -KILL "$pid"
}

# start_slurm [COMMAND...]: starts a SLURM cluster of two nodes, n1 and n2, on this machine; the names do not resolve. The daemons of
# the nodes run under the command, if any.
start_slurm() {
    local command host node
    for command in srun sbatch slurmctld slurmd munged mungekey; do
        have "$command" || skip "$command is missing (Debian: slurm-wlm and munge)"
    done
    host="$(hostname)"
    mungekey --create --keyfile="$scratch/munge.key"
    munged --force --socket="$scratch/munge.socket" --key-file="$scratch/munge.key" --pid-file="$scratch/munged.pid" \
        --log-file="$scratch/munged.daemon" --seed-file="$scratch/munge.seed" 2>>"$scratch/daemons.log"
    export SLURM_CONF="$scratch/slurm.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$scratch/munge.socket
SlurmdParameters=config_overrides
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=16817
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmctldLogFile=$scratch/slurmctld.daemon
StateSaveLocation=$scratch/state
SlurmdPidFile=$scratch/slurmd-%n.pid
SlurmdLogFile=$scratch/slurmd-%n.daemon
SlurmdSpoolDir=$scratch/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=30
ReturnToService=2
SwitchType=switch/none
MailProg=/bin/true
JobRequeue=1
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=16821 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=16822 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverSubscribe=NO
CONF
    # Daemons must listen on the loopback address only, if the name of this machine resolves to it.
    if [ "$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')" = 127.0.0.1 ]; then
        echo "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" >>"$SLURM_CONF"
    fi
    mkdir "$scratch/state" "$scratch/spool-n1" "$scratch/spool-n2"
    slurmctld 2>>"$scratch/daemons.log" || skip "slurmctld does not start here: $(tail -n 1 "$scratch/daemons.log")"
    for node in n1 n2; do
        "$@" slurmd -N "$node" 2>>"$scratch/daemons.log" || skip "slurmd does not start here: $(tail -n 1 "$scratch/daemons.log")"
    done
    within 30 slurm_is_idle || fail "the nodes are not idle: $(sinfo --noheader)"
}

slurm_is_idle() {
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ]
}

# submit OUT COMMANDS [OPTION...]: submits a batch script for two nodes, one rank each; sets `job`. Rank 0 is on this machine.
submit() {
    local out="$1" commands="$2"
    shift 2
    printf '#!/bin/bash\nexport MASTER_ADDR=127.0.0.1\n%s\n' "$commands" >"$scratch/$out.job"
    job="$(sbatch --parsable --nodes=2 --ntasks=2 --open-mode=append --output="$scratch/$out.log" "$@" "$scratch/$out.job")"
}

job_is_gone() {
    ! squeue --noheader --job="$1" --format=%T 2>/dev/null | grep -q .
}

# finish JOB SECONDS: waits for the end of a job.
finish() {
    within "$2" job_is_gone "$1" || fail "job $1 has not ended within $2 s"
}
