#!/usr/bin/env bash
# scancel: the run saves its state, and another job resumes it.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
start_slurm

run="srun ${train[*]}" options="${at_stop[*]} --resume --out $scratch/canceled"
submit canceled "$run $endless $options"
wait_for_step canceled 7
scancel "$job"
finish "$job" 60
must_be_saved canceled

submit canceled "$run $(($(last_step canceled) + 10)) $options && echo ended well"
finish "$job" 60
grep -qx "ended well" "$scratch/canceled.log" || fail "the second job failed"
same canceled
