#!/usr/bin/env bash
# mpirun of Open MPI and mpiexec of MPICH: an uninterrupted run, a killed rank, and SIGTERM to the launcher; the last two resume.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"

# check PACKAGE RANK_VARIABLE LAUNCHER...: runs under one kind of launcher.
check() {
    local kind="$1" variable="$2"
    shift 2
    if ! have "$1"; then
        echo "$name: skipped: $1 is missing (Debian: $kind)"
        return
    fi
    local run=("$@" -n 2 "${train[@]}")

    launch "$kind" "${run[@]}" 20 --out "$scratch/$kind"
    await 60 "$kind"
    [ "$code" -eq 0 ] || fail "$kind ended with $code"
    same "$kind"

    launch "$kind.killed" "${run[@]}" "$endless" "${often[@]}" --out "$scratch/$kind.killed"
    wait_for_step "$kind.killed" 12
    kill_rank "$kind.killed" "$variable" 1
    await 30 "$kind after a rank was killed"
    [ "$code" -ne 0 ] || fail "$kind ended with 0 after a rank was killed"
    resume "$kind.killed"

    launch "$kind.stopped" "${run[@]}" "$endless" "${at_stop[@]}" --out "$scratch/$kind.stopped"
    wait_for_step "$kind.stopped" 7
    kill -TERM "$launched"
    await 60 "$kind after SIGTERM"
    must_be_saved "$kind.stopped"
    resume "$kind.stopped"
}

resume() {
    launch "$1" "${run[@]}" $(($(last_step "$1") + 10)) --resume --out "$scratch/$1"
    await 60 "the second run of $1"
    [ "$code" -eq 0 ] || fail "the second run of $1 ended with $code"
    same "$1"
}

# By default Open MPI kills its processes one second after SIGTERM. odls_base_sigkill_timeout sets both waits: from SIGTERM to mpirun
# until SIGTERM to the processes, and from there until SIGKILL.
check openmpi-bin OMPI_COMM_WORLD_RANK mpirun.openmpi --allow-run-as-root --oversubscribe --mca odls_base_sigkill_timeout 5
check mpich PMI_RANK mpiexec.hydra
