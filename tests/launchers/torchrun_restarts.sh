#!/usr/bin/env bash
# torchrun --max-restarts: after a rank is killed, torchrun restarts all ranks, and they resume from the last checkpoint.
# shellcheck source-path=SCRIPTDIR source=setup.bash
source "$(dirname "$0")/setup.bash"
torchrun="${TORCHRUN:-torchrun}"
have "$torchrun" || skip "$torchrun is missing (PyPI: torch)"

steps="$scratch/steps"
echo "$endless" >"$steps"
# shellcheck disable=SC2016
launch restarted "$torchrun" --standalone --nproc-per-node 2 --max-restarts 2 --monitor-interval 0.5 --no-python \
    bash -c 'steps=$(cat "$0") && exec "$@" "$steps" '"${often[*]} --resume --out $scratch/restarted" "$steps" "${train[@]}"
for rank in 1 0; do
    step="$(last_step restarted)"
    wait_for_step restarted $((${step:-0} + 12))
    [ "$rank" -ne 0 ] || echo $(($(last_step restarted) + 100)) >"$steps"
    kill_rank restarted RANK "$rank"
    within 60 rank_with restarted TORCHELASTIC_RESTART_COUNT $((2 - rank)) >/dev/null || fail "torchrun did not start the ranks again"
done
await 120 torchrun
[ "$code" -eq 0 ] || fail "torchrun ended with $code"
same restarted
