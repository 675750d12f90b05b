"""Cost of `--deterministic mesh`: training steps in this mode and in `--deterministic run`, alternating, on one rank of two threads and on two
ranks of one thread each.

    cargo build --release
    python benches/determinism.py > table.md

Prints a table of tokens per second: the median over rounds of each round's median, with minimum and maximum; the time of a step in the mode over
that of a run; and the peak resident size of all ranks together. Both modes have the same options otherwise: each pipeline has as many
microbatches as there are leaves of rows. Run it on an otherwise idle machine: alternating programs share slow and fast phases of the machine, but not its cores.
"""

import argparse
import statistics
from pathlib import Path

from peers import SHAPES, STEPS_BEFORE, STEPS_MIN
from ranks import ours, run_of_ours, summary

MESHES = ["dp=1", "dp=2", "tp=2", "pp=2"]
MODES = ["run", "mesh"]
CORES = 2
# Leaves of rows, as `--batch-leaves` by default.
BATCH_LEAVES = 8


def options(mesh, rows, mode):
    leaves = min(BATCH_LEAVES, rows)
    microbatches = ["--microbatches", str(leaves)] if mesh.startswith("pp") else []
    return ["--mesh", mesh, "--deterministic", mode, *microbatches]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="of steps, for each program in each round")
    parser.add_argument("--shapes", default="s,m,l")
    parser.add_argument("--meshes", default=";".join(MESHES), help="with semicolons between")
    parser.add_argument("--binary", default=Path("target/release/shardgrad"))
    args = parser.parse_args()
    print("| shape | mesh | run | rounds | mode mesh | rounds | time over run | MiB | MiB of mode mesh |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.shapes.split(","):
        rows, tokens = SHAPES[name][4], SHAPES[name][3] * SHAPES[name][4]
        for mesh in args.meshes.split(";"):
            found = {mode: [] for mode in MODES}
            threads, expected = CORES if mesh == "dp=1" else 1, 1000.0
            for _ in range(args.rounds):
                for mode in MODES:
                    steps = STEPS_BEFORE + max(STEPS_MIN, round(args.seconds * expected / tokens))
                    program = ours(args.binary, name, rows, steps, options(mesh, rows, mode), threads=threads)
                    found[mode].append(run_of_ours(program))
                    expected = found[mode][-1][0]
            (run, runs, mib), (exact, exacts, exact_mib) = (summary(found[mode]) for mode in MODES)
            cells = [name, mesh, f"{run:.0f}", runs, f"{exact:.0f}", exacts, f"{run / exact:.2f}", f"{mib:.0f}", f"{exact_mib:.0f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
