"""f32 matmuls by shardgrad, PyTorch and the gemm crate, alternating, in the 78 shapes of `shardgrad bench products`.

    cargo build --release
    (cd benches/peers && cargo build --release -p peer-gemm)
    python benches/products.py --rounds 2 --threads 1,2 > table.md

For each number of threads, prints the geometric mean over shapes of each program's rate, of shardgrad relative to it, the number of shapes
below 0.9 of it, and the worst shapes. Of each shape the median over rounds counts. Each program checks its results against f64 sums before
timing. Programs that are not installed or not built are skipped with a message.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import building, on_cores, programs

GEMM = "peer-gemm"
# FLOPs per sample and number of samples, as in `shardgrad bench products`.
SAMPLE = 5e6
SAMPLES_MIN, SAMPLES_MAX = 5, 101
CHECKED = 64
TOLERANCE = 1e-5
# Shapes below this fraction of the other program's rate are counted; so many of the worst are named.
SLOWER_BELOW = 0.9
WORST = 5


def torch_rates(threads, seconds):
    """Times the matmuls listed on standard input with PyTorch in this process, and prints a rate for each."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)

    def random(rows, cols, transposed):
        return (torch.rand(cols, rows).t() if transposed else torch.rand(rows, cols)) * 2 - 1

    for shape in map(str.strip, sys.stdin):
        *extents, transposed = shape.split(" ", 3)
        m, k, n = map(int, extents)
        a, b, c = random(m, k, transposed == "a transposed"), random(k, n, transposed == "b transposed"), torch.empty(m, n)
        assert a.stride() == ((1, m) if transposed == "a transposed" else (k, 1)), "operand layouts"
        torch.mm(a, b, out=c)
        rows, cols = torch.randint(m, (CHECKED,)), torch.randint(n, (CHECKED,))
        sums = (a[rows].double() * b[:, cols].t().double()).sum(1)
        if not (c[rows, cols] - sums).abs().max() <= TOLERANCE * max(1, sums.abs().max()):
            raise SystemExit(f"{shape} is wrong; not timed")
        flops = 2 * m * k * n
        calls = math.ceil(SAMPLE / flops)

        def sample():
            started = time.perf_counter()
            for _ in range(calls):
                torch.mm(a, b, out=c)
            return (time.perf_counter() - started) / calls

        count = max(SAMPLES_MIN, min(SAMPLES_MAX, int(seconds / (sample() * calls))))
        median = statistics.median(sample() for _ in range(count))
        print(json.dumps({"shape": shape, "gflops": flops / median / 1e9}), flush=True)


def lines_of(command, threads, shapes=()):
    """Runs a program on as many cores as threads, with the shapes as input, and returns the JSON objects it prints."""
    env = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    words, text = list(map(str, command)), "".join(f"{shape}\n" for shape in shapes)
    pin = lambda: on_cores(threads)
    found = subprocess.run(words, input=text, capture_output=True, text=True, timeout=3600, env=env, preexec_fn=pin)
    if found.returncode:
        raise SystemExit(f"{words[0]} failed:\n{found.stderr}")
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def rates_of_ours(binary, threads, seconds):
    """GFLOP/s by shape, such as `128 64 128 b transposed`: m, k, n and which operand is transposed."""
    rates = {}
    for row in lines_of([binary, "bench", "products", "--json", "--seconds", seconds], threads):
        if row["bench"] == "products" and int(row["mesh"].split()[0]) == threads:
            transposed, extents = row["case"].rsplit(" ", 1)
            rates[f"{extents.replace('x', ' ')} {transposed}"] = row["rate"]
    if not rates:
        raise SystemExit(f"{binary} has no results on {threads} threads: use one, or as many as there are cores")
    return rates


def rates_of_peer(command, threads, seconds, shapes):
    rows = lines_of([*command, threads, seconds], threads, shapes)
    return {row["shape"]: row["gflops"] for row in rows}


def mean(numbers):
    return math.exp(statistics.fmean(map(math.log, numbers)))


def row_of(threads, program, ours, theirs):
    """A row of the table; that of shardgrad has no comparison columns."""
    head = f"| {threads} | {program} | {mean(theirs.values()):.1f} |"
    if theirs is ours:
        return f"{head} | | |"
    ratios = sorted((ours[shape] / theirs[shape], shape) for shape in ours)
    slower = sum(ratio < SLOWER_BELOW for ratio, _ in ratios)
    worst = ", ".join(f"{shape}: {ratio:.2f}" for ratio, shape in ratios[:WORST])
    return f"{head} {mean(ratio for ratio, _ in ratios):.3f} | {slower} of {len(ratios)} | {worst} |"


def peers_here(folder):
    """Commands of the other programs that can run, without threads and seconds; prints why others cannot."""
    here = {}
    if importlib.util.find_spec("torch"):
        here["torch.mm"] = [sys.executable, __file__, "--work"]
    else:
        print("skipped: torch is not installed", file=sys.stderr)
    if (folder / GEMM).exists():
        here["gemm"] = [folder / GEMM]
    else:
        print(f"skipped: gemm is not built: {building(GEMM)}", file=sys.stderr)
    return here


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.05, help="of samples, for each shape in each round")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--binary", type=Path, default=Path("target/release/shardgrad"))
    parser.add_argument("--programs", type=Path, default=programs(), help="the folder of the peers' programs")
    args = parser.parse_args()
    peers = peers_here(args.programs)
    print(f"| threads | program | GFLOP/s | shardgrad over it | shapes below {SLOWER_BELOW} | the worst |\n|---|---|---|---|---|---|")
    for threads in map(int, args.threads.split(",")):
        rounds = {program: [] for program in ["shardgrad", *peers]}
        for _ in range(args.rounds):
            ours = rates_of_ours(args.binary, threads, args.seconds)
            rounds["shardgrad"].append(ours)
            for peer, command in peers.items():
                rounds[peer].append(rates_of_peer(command, threads, args.seconds, ours))
        medians = {
            program: {shape: statistics.median(each[shape] for each in all_) for shape in all_[0]}
            for program, all_ in rounds.items()
        }
        for program, rates in medians.items():
            print(row_of(threads, program, medians["shardgrad"], rates), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        torch_rates(int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
