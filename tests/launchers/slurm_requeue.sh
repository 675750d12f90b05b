#!/usr/bin/env bash
# Requeue: a job stopped by SIGTERM requeues itself, then an operator requeues it; the run resumes each time.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
start_slurm

echo "$endless" >"$scratch/steps"
submit requeued "srun ${train[*]} \$(cat $scratch/steps) ${at_stop[*]} --resume --out $scratch/requeued
code=\$?
echo \"exit code \$code\"
if [ \$code -eq $stopped_by_term ]; then scontrol requeue \$SLURM_JOB_ID; fi" --requeue

requeued() {
    [[ "$(scontrol show job "$job")" == *"JobState=PENDING"*" Restarts=$1 "* ]]
}

# await_requeue TIMES: waits until the job has been requeued this many times.
await_requeue() {
    within 60 requeued "$1" || fail "the job was not requeued: $(grep 'exit code' "$scratch/requeued.log")"
    must_be_saved requeued
}

# start_again: starts the requeued job, which SLURM holds for two minutes. Nodes reject a job that restarts within the second in which
# it ended.
start_again() {
    sleep 2
    scontrol update job "$job" StartTime=now
}

wait_for_step requeued 7
scancel --signal=TERM "$job"
await_requeue 1
start_again
wait_for_step requeued $(($(last_step requeued) + 7))
scontrol requeue "$job"
await_requeue 2
echo $(($(last_step requeued) + 10)) >"$scratch/steps"
start_again
finish "$job" 90
grep -qx "exit code 0" "$scratch/requeued.log" || fail "the last run failed"
same requeued
