#!/usr/bin/env bash
# A killed rank under srun: the other rank ends at once with an error, and another step resumes from the last checkpoint.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
start_slurm

export MASTER_ADDR=127.0.0.1
run=(srun --nodes=2 --ntasks=2 "${train[@]}") options=("${often[@]}" --resume --out "$scratch/killed")
launch killed "${run[@]}" "$endless" "${options[@]}"
wait_for_step killed 12
kill_rank killed SLURM_PROCID 1
await 30 "srun after a rank was killed"
[ "$code" -ne 0 ] || fail "srun ended with 0 after a rank was killed"
grep -q "rank 1" "$scratch/killed.log" || fail "rank 0 does not name rank 1"

launch resumed "${run[@]}" $(($(last_step killed) + 10)) "${options[@]}"
await 90 "the second step"
[ "$code" -eq 0 ] || fail "the second step ended with $code"
same killed
