"""Training steps of the same GPT in f32 by shardgrad and other frameworks that are installed, alternating.

    cargo build --release
    (cd benches/peers && cargo build --release)
    python benches/peers.py --rounds 4 --threads 1,2 > table.md

Prints a table of tokens per second: the median over rounds of each round's median, with minimum and maximum, and the ratio of shardgrad.
Frameworks that cannot be imported or are not built are skipped with a message. Run it on an otherwise idle machine: alternating programs share
slow and fast phases of the machine, but not its cores.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch_gpt import Shape, training_step

# Shape of each preset, as `shardgrad train --preset NAME`.
SHAPES = {
    "s": Shape(4, 256, 4, 128, 8, 512),
    "m": Shape(6, 384, 6, 256, 8, 4096),
    "l": Shape(12, 768, 12, 256, 2, 8192),
}
# Python framework: its module, and settings of matmul precision and compilation.
MODULES = {
    "torch": ("torch", {}),
    "torch, medium": ("torch", {"precision": "medium"}),
    "torch.compile": ("torch", {"compile": True}),
    "torch.compile, medium": ("torch", {"precision": "medium", "compile": True}),
    "torch, bf16 autocast": ("torch", {"autocast": True}),
    "jax": ("jax", {}),
}
# Rust framework: its package and program in `benches/peers`.
PACKAGES = {"candle": "peer-candle", "burn": "peer-burn"}
OURS = {
    "shardgrad": [],
    "shardgrad, medium": ["--matmul-precision", "medium"],
    "shardgrad, bf16": ["--dtype", "bf16"],
}
STEPS_BEFORE = 2
STEPS_MIN = 4


def programs():
    """Folder of the built programs of `benches/peers`."""
    chosen = os.environ.get("CARGO_TARGET_DIR")
    return (Path(chosen) if chosen else Path(__file__).parent.parent / "target/peers") / "release"


def building(package):
    """Command that builds a program of `benches/peers`."""
    return f"(cd {os.path.relpath(Path(__file__).parent / 'peers')} && cargo build --release -p {package})"


def on_cores(threads):
    """Pins this process to as many cores as it has threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def torch_step(shape, threads, precision=None, compile=False, autocast=False):
    """A training step in PyTorch, with an untied output layer."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if precision:
        torch.set_float32_matmul_precision(precision)
    return training_step(shape, "cpu", tied=False, autocast=autocast, compiled=compile)


def jax_step(shape, threads):
    """The same in JAX, as one jitted function with donated state."""
    flags = "--xla_cpu_multi_thread_eigen=" + ("false intra_op_parallelism_threads=1" if threads == 1 else "true")
    os.environ["XLA_FLAGS"] = flags
    on_cores(threads)
    import jax
    from jax import numpy as np

    blocks, width, heads, seq, rows, vocab = shape
    keys = iter(jax.random.split(jax.random.key(0), 8 * blocks + 8))
    weight = lambda *dims: 0.02 * jax.random.normal(next(keys), dims)
    linear = lambda fan_in, fan_out: {"w": weight(fan_in, fan_out), "b": np.zeros(fan_out)}
    norm = lambda: {"w": np.ones(width), "b": np.zeros(width)}
    block = lambda: {
        "norm1": norm(), "fused": linear(width, 3 * width), "out": linear(width, width),
        "norm2": norm(), "up": linear(width, 4 * width), "down": linear(4 * width, width),
    }
    weights = {
        "tokens": weight(vocab, width), "places": weight(seq, width), "blocks": [block() for _ in range(blocks)],
        "norm": norm(), "head": weight(width, vocab),
    }

    def normed(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["w"] + p["b"]

    through = lambda p, x: x @ p["w"] + p["b"]

    def loss_of(p, ids, targets):
        x = p["tokens"][ids] + p["places"]
        for b in p["blocks"]:
            split = through(b["fused"], normed(b["norm1"], x)).reshape(rows, seq, 3, heads, -1)
            mixed = jax.nn.dot_product_attention(split[:, :, 0], split[:, :, 1], split[:, :, 2], is_causal=True)
            x = x + through(b["out"], mixed.reshape(rows, seq, width))
            x = x + through(b["down"], jax.nn.gelu(through(b["up"], normed(b["norm2"], x))))
        logs = jax.nn.log_softmax(normed(p["norm"], x) @ p["head"])
        return -np.take_along_axis(logs, targets[..., None], -1).mean()

    def update(state, ids, targets):
        p, m, v, t = state
        loss, g = jax.value_and_grad(loss_of)(p, ids, targets)
        tree = jax.tree.map
        m = tree(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = tree(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        c1, c2 = 1 - 0.9**t, 1 - 0.999**t
        p = tree(lambda p, m, v: p * (1 - 1e-4) - 1e-3 * (m / c1) / (np.sqrt(v / c2) + 1e-8), p, m, v)
        return (p, m, v, t + 1), loss

    update = jax.jit(update, donate_argnums=0)
    ids, targets = jax.random.randint(next(keys), (2, rows, seq), 0, vocab)
    zeros = lambda: jax.tree.map(np.zeros_like, weights)
    state = [(weights, zeros(), zeros(), 1.0)]

    def step():
        state[0], loss = update(state[0], ids, targets)
        return float(loss)

    return step


def work(peer, name, threads, seconds):
    """Runs one Python framework in this process and prints its rates."""
    module, how = MODULES[peer]
    shape = SHAPES[name]
    step = {"torch": torch_step, "jax": jax_step}[module](shape, threads, **how)
    losses = [step() for _ in range(STEPS_BEFORE)]
    rates, began = [], time.perf_counter()
    while len(rates) < STEPS_MIN or time.perf_counter() - began < seconds:
        started = time.perf_counter()
        losses.append(step())
        rates.append(shape.seq * shape.rows / (time.perf_counter() - started))
    print(json.dumps({"rates": rates, "losses": [losses[0], losses[-1]]}))


def lacking(peer, folder):
    """What is missing to run a framework, if anything."""
    if peer not in PACKAGES:
        return None if importlib.util.find_spec(MODULES[peer][0]) else "is not installed"
    return None if (folder / PACKAGES[peer]).exists() else f"is not built: {building(PACKAGES[peer])}"


def rates_of_peer(peer, folder, name, threads, seconds):
    command = [sys.executable, __file__, "--work", peer, name, str(threads), str(seconds)]
    how = {}
    if peer in PACKAGES:
        command = [str(n) for n in (folder / PACKAGES[peer], *SHAPES[name], STEPS_BEFORE, STEPS_MIN, seconds)]
        how = {"env": os.environ | {"RAYON_NUM_THREADS": str(threads)}, "preexec_fn": lambda: on_cores(threads)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, **how)
    if found.returncode:
        raise SystemExit(f"{peer} failed:\n{found.stderr}")
    found = json.loads(found.stdout.splitlines()[-1])
    if not found["losses"][1] < found["losses"][0]:
        raise SystemExit(f"{peer} does not learn on {name}: losses {found['losses']}")
    return found["rates"]


def rates_of_ours(binary, options, name, threads, seconds, expected):
    """Runs `shardgrad train` for about as long as the others, on the source files of the working directory."""
    _, _, _, seq, rows, _ = SHAPES[name]
    steps = STEPS_BEFORE + max(STEPS_MIN, round(seconds * expected / (rows * seq)))
    with tempfile.TemporaryDirectory() as out:
        command = [
            binary, "train", "--preset", name, "--seq", str(seq), "--batch", str(rows), "--steps", str(steps),
            "--eval-every", "0", "--lr", "1e-3", "--mesh", "dp=1", "--threads", str(threads), "--json", "--out", out,
            *options,
        ]
        found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if found.returncode:
        raise SystemExit(f"shardgrad failed:\n{found.stderr}")
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return [line["tokens_per_s"] for line in lines[STEPS_BEFORE:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3, help="of steps, for each program in each round")
    parser.add_argument("--shapes", default="s,m,l")
    parser.add_argument("--threads", default="1,2")
    known = [*MODULES, *PACKAGES]
    parser.add_argument("--peers", default=";".join(known), help="their names, with semicolons between")
    parser.add_argument("--programs", type=Path, default=programs(), help="the folder of the peers' programs")
    parser.add_argument("--ours", default=";".join(OURS))
    parser.add_argument("--binary", type=Path, default=Path("target/release/shardgrad"))
    args = parser.parse_args()
    peers = []
    for peer in filter(None, args.peers.split(";")):
        if peer not in known:
            parser.error(f"there is no peer `{peer}`; there are {'; '.join(known)}")
        if lack := lacking(peer, args.programs):
            print(f"skipped: {peer} {lack}", file=sys.stderr)
        else:
            peers.append(peer)
    ours = args.ours.split(";")
    print("| shape | threads | program | tokens/s | rounds | shardgrad over it |\n|---|---|---|---|---|---|")
    for name in args.shapes.split(","):
        for threads in map(int, args.threads.split(",")):
            medians = {program: [] for program in [*ours, *peers]}
            expected = 1000.0
            for _ in range(args.rounds):
                for program in medians:
                    if program in OURS:
                        binary = str(args.binary)
                        rates = rates_of_ours(binary, OURS[program], name, threads, args.seconds, expected)
                        expected = statistics.median(rates)
                    else:
                        rates = rates_of_peer(program, args.programs, name, threads, args.seconds)
                    medians[program].append(statistics.median(rates))
            first = statistics.median(medians[ours[0]])
            for program, each in medians.items():
                rate = statistics.median(each)
                spread = f"{min(each):.0f}..{max(each):.0f}"
                print(f"| {name} | {threads} | {program} | {rate:.0f} | {spread} | {first / rate:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
