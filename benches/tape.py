"""Overhead of a small op in shardgrad, PyTorch and candle, alternating: an add of 16 floats on one core.

    cargo build --release
    (cd benches/peers && cargo build --release -p peer-candle)
    python benches/tape.py --rounds 3 > table.md

Prints microseconds per call: forward, forward with autograd, and with sum and backward. Each figure is the best sample of all rounds, the least
disturbed one. Frameworks that are not installed or not built are skipped with a message.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

from peers import building, on_cores, programs

CANDLE = "peer-candle-ops"
CASES = ["forward", "forward, on a tape", "with backward"]
# As `shardgrad bench tape`; fewer if a call takes tens of microseconds.
CALLS = 500
SAMPLES = 101


def best(call):
    """Seconds per call in the best sample."""

    def sample():
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - started) / CALLS

    return min(sample() for _ in range(SAMPLES))


def torch_seconds():
    """Times PyTorch in this process, and prints one line per case."""
    import torch

    torch.set_num_threads(1)
    x, y = (torch.arange(16.0).add(first).requires_grad_() for first in (1, -3))
    plain_x, plain_y = x.detach(), y.detach()
    assert torch.equal(torch.autograd.grad((x + y).sum(), (x, y))[0], torch.ones(16)), "what is timed is right"
    calls = [lambda: plain_x + plain_y, lambda: x + y, lambda: torch.autograd.grad((x + y).sum(), (x, y))]
    for case, call in zip(CASES, calls):
        print(json.dumps({"case": case, "seconds": best(call)}))


def seconds_of(command):
    """Runs a program on one core; returns the seconds by case."""
    words = list(map(str, command))
    found = subprocess.run(words, capture_output=True, text=True, timeout=600, preexec_fn=lambda: on_cores(1))
    if found.returncode:
        raise SystemExit(f"{words[0]} failed:\n{found.stderr}")
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    named = [(row["case"].removeprefix("add of 16 floats, "), row) for row in rows if not row.get("mesh")]
    return {case: row["seconds"] for case, row in named if case in CASES}


def programs_here(binary, folder):
    """Commands of the programs that can run; prints why others cannot."""
    here = {"shardgrad": [binary, "bench", "tape", "--json", "--seconds", "0.1"]}
    if importlib.util.find_spec("torch"):
        here["PyTorch"] = [sys.executable, __file__, "--work"]
    else:
        print("skipped: torch is not installed", file=sys.stderr)
    if (folder / CANDLE).exists():
        here["candle"] = [folder / CANDLE]
    else:
        print(f"skipped: candle is not built: {building('peer-candle')}", file=sys.stderr)
    return here


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--binary", type=Path, default=Path("target/release/shardgrad"))
    parser.add_argument("--programs", type=Path, default=programs(), help="the folder of the peers' programs")
    args = parser.parse_args()
    here = programs_here(args.binary, args.programs)
    rounds = {program: [] for program in here}
    for _ in range(args.rounds):
        for program, command in here.items():
            rounds[program].append(seconds_of(command))
    print(f"| program | {' | '.join(CASES)} |\n|---|---|---|---|")
    for program, all_ in rounds.items():
        figures = (f"{min(each[case] for each in all_) * 1e6:.3f}" for case in CASES)
        print(f"| {program} | {' | '.join(figures)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        torch_seconds()
    else:
        main()
