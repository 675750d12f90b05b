#!/usr/bin/env bash
# The time limit of a job: SLURM sends SIGTERM, twice within milliseconds; the run saves its state, and another job resumes it.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
start_slurm

run="srun ${train[*]}" options="${at_stop[*]} --resume --out $scratch/limited"
# The trap lets the batch script outlive SIGTERM and see the exit code.
submit limited "trap : TERM
$run $endless $options
echo \"exit code \$?\"" --time=1
wait_for_step limited 7
# Limits are whole minutes, and SLURM checks every 30 s for jobs past their end.
scontrol update job "$job" EndTime=now || fail "the end of the job cannot be changed"
finish "$job" 120
grep -q "DUE TO TIME LIMIT" "$scratch/limited.log" || fail "the job did not end by its time limit"
must_be_saved limited
grep -qx "exit code $stopped_by_term" "$scratch/limited.log" || fail "srun did not end with $stopped_by_term"

submit limited "$run $(($(last_step limited) + 10)) $options && echo ended well"
finish "$job" 60
grep -qx "ended well" "$scratch/limited.log" || fail "the second job failed"
same limited
