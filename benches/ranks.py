"""Training steps of the same GPT in f32 on two ranks of one core each: shardgrad, and PyTorch over gloo, alternating.

    cargo build --release
    python benches/ranks.py --rounds 3 > table.md

Prints a table of tokens per second of both ranks together: the median over rounds of each round's median, with minimum and maximum. `alone` are
two independent programs of one rank each on half of the batch: the limit without communication and waiting. Memory is the peak resident size of
both ranks together, without what PyTorch's processes hold before the model is built. Without PyTorch only shardgrad is measured. Run it on an
otherwise idle machine.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import SHAPES, STEPS_BEFORE, STEPS_MIN

# Parallelism: its PyTorch implementation, and options of shardgrad.
SPLITS = {
    "data": ("ddp", ["--mesh", "dp=2"]),
    "sharded data": ("fsdp", ["--mesh", "fsdp=2"]),
    "tensor": ("tp", ["--mesh", "tp=2"]),
    "tensor, sequence": ("sp", ["--mesh", "tp=2", "--sequence-parallel"]),
    "pipeline": ("pp", ["--mesh", "pp=2"]),
}
RANKS = 2


def peer_step(split, shape, rank, microbatches):
    """A training step of PyTorch on one rank."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
    from torch.nn import functional as F

    blocks, width, heads, seq, rows, vocab = shape

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            # Separate query, key and value layers: a column shard of a fused one would mix them.
            self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            normed = self.norms[0](x)
            if split == "sp":  # one gather for all three layers
                normed = normed.redistribute(placements=[Replicate()])
            per_head = (head(normed).unflatten(-1, (-1, width // heads)).transpose(1, 2) for head in self.heads)
            mixed = F.scaled_dot_product_attention(*per_head, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Part(nn.Module):
        """A pipeline stage: some blocks, with the embeddings on the first and the output layer on the last."""

        def __init__(self, first, last):
            super().__init__()
            self.begins, self.ends = first == 0, last == blocks
            if self.begins:
                self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(seq, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(first, last)))
            if self.ends:
                self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, x):
            x = self.blocks(self.tokens(x) + self.places.weight if self.begins else x)
            return self.head(self.norm(x)) if self.ends else x

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    ids, targets = torch.randint(vocab, (2, rows, seq))
    if split == "pp":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        model = Part(rank * blocks // RANKS, (rank + 1) * blocks // RANKS)
        stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
        schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
        optimizers = [optimizer(model.parameters())]

        def loss():
            losses = []
            schedule.step(*([ids] if rank == 0 else []), **({"target": targets, "losses": losses} if rank else {}))
            return sum(one.item() for one in losses) / max(len(losses), 1)

    elif split in ("tp", "sp"):
        mesh, model = init_device_mesh("cpu", (RANKS,)), Part(0, blocks)
        column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
        # Sequence parallelism: activations between the products are sharded along the tokens.
        along = {"output_layouts": Shard(1), "use_local_output": False} if split == "sp" else {}
        for block in model.blocks:
            plan = {f"heads.{i}": column() for i in range(3)} | {"out": row(**along), "down": row(**along)}
            if split == "sp":
                plan |= {f"norms.{i}": parallel.SequenceParallel() for i in range(2)}
            up = column(input_layouts=Shard(1)) if split == "sp" else column()
            parallel.parallelize_module(block, mesh, plan | {"up": up})
        head = {"output_layouts": Shard(-1), "use_local_output": False}
        plan = {"head": column(**head)}
        if split == "sp":
            head["input_layouts"] = Shard(1)
            plan = {
                "tokens": row(input_layouts=Replicate(), **along),
                "norm": parallel.SequenceParallel(),
                "head": column(**head),
            }
            places = distribute_tensor(model.places.weight.detach(), mesh, [Shard(0)])
            model.places.weight = nn.Parameter(places)
        parallel.parallelize_module(model, mesh, plan)
        kinds = {True: [], False: []}
        for weight in model.parameters():
            kinds[isinstance(weight, DTensor)].append(weight)
        optimizers = [optimizer(each) for each in kinds.values() if each]

        def loss():
            with parallel.loss_parallel():
                loss = loss_of(model(ids), targets)
                loss.backward()
            return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    else:
        model = Part(0, blocks)
        mine = slice(rank * rows // RANKS, (rank + 1) * rows // RANKS)
        whole = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if split == "ddp" else model
        if split == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (RANKS,))
            for each in [*model.blocks, model]:
                fully_shard(each, mesh=mesh)
        optimizers = [optimizer(model.parameters())]

        def loss():
            loss = loss_of(whole(ids[mine]), targets[mine])
            loss.backward()
            return loss.item()

    def step():
        found = loss()
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=True)
        return found

    return step


def work(split, name, rank, port, microbatches, seconds):
    """One PyTorch rank; the last one prints the rates of all."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    shape = SHAPES[name]
    # Modules that a split imports are not memory of the model.
    for module in ("fsdp", "pipelining", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{module}")
    before = resident("VmRSS")
    step = peer_step(split, shape, rank, microbatches)
    losses = [step() for _ in range(STEPS_BEFORE)]
    began = time.perf_counter()
    losses.append(step())
    # Rank 0 determines the number of steps of all ranks.
    count = torch.tensor([max(STEPS_MIN, round(seconds / (time.perf_counter() - began)))])
    distributed.broadcast(count, 0)
    rates = []
    for _ in range(int(count)):
        began = time.perf_counter()
        losses.append(step())
        rates.append(shape[3] * shape[4] / (time.perf_counter() - began))
    memory = torch.tensor([resident("VmHWM") - before])
    distributed.all_reduce(memory)
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == RANKS - 1:
        print(json.dumps({"rates": rates, "losses": [losses[0], losses[-1]], "mib": int(memory) / 1024}))


def resident(field):
    """A resident size of this process in KiB: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def run_of_peer(split, name, microbatches, seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--work", split, name]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(microbatches), str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]
    found = [rank.communicate(timeout=600) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"PyTorch, {split}, failed:\n" + "\n".join(err for _, err in found))
    found = json.loads(found[-1][0].splitlines()[-1])
    if not found["losses"][1] < found["losses"][0]:
        raise SystemExit(f"PyTorch, {split}, does not learn on {name}: losses {found['losses']}")
    return statistics.median(found["rates"]), found["mib"]


def ours(binary, name, rows, steps, options, core=None, threads=1):
    """Starts `shardgrad train` with some threads a rank; returns the process and its output folder."""
    seq = SHAPES[name][3]
    out = tempfile.TemporaryDirectory()
    command = [
        binary, "train", "--preset", name, "--seq", str(seq), "--batch", str(rows), "--steps", str(steps),
        "--eval-every", "0", "--lr", "1e-3", "--threads", str(threads), "--json", "--out", out.name, *options,
    ]
    pinned = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=pinned), out


def run_of_ours(program):
    """Median rate of a program, and the peak of its resident size in MiB."""
    process, out = program
    with process.stdout, process.stderr:
        stdout, stderr = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    out.cleanup()
    if process.returncode:
        raise SystemExit(f"shardgrad failed:\n{stderr}")
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return statistics.median(line["tokens_per_s"] for line in lines[STEPS_BEFORE:]), usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="of steps, for each program in each round")
    parser.add_argument("--shapes", default="s,m")
    parser.add_argument("--microbatches", default="4,8", help="of pipelines")
    parser.add_argument("--binary", default=Path("target/release/shardgrad"))
    args = parser.parse_args()
    has_peer = importlib.util.find_spec("torch") is not None
    if not has_peer:
        print("skipped: PyTorch is not installed", file=sys.stderr)
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    print("| shape | split | shardgrad | rounds | of alone | PyTorch | rounds | shardgrad over it | MiB | MiB of PyTorch |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.shapes.split(","):
        rows, tokens = SHAPES[name][4], SHAPES[name][3] * SHAPES[name][4]
        cases = [("alone", "alone", 1, [])]
        for split, (peer, options) in SPLITS.items():
            counts = map(int, args.microbatches.split(",")) if split == "pipeline" else [1]
            for count in counts:
                title = f"{split}, {count} microbatches" if count > 1 else split
                cases.append((title, peer, count, [*options, "--microbatches", str(count)]))
        found = {title: ([], []) for title, *_ in cases}
        expected = 1000.0
        for _ in range(args.rounds):
            for title, peer, count, options in cases:
                steps = STEPS_BEFORE + max(STEPS_MIN, round(args.seconds * expected / tokens))
                if title == "alone":
                    both = [ours(args.binary, name, rows // RANKS, steps, ["--mesh", "dp=1"], core) for core in cores]
                    run = tuple(map(sum, zip(*map(run_of_ours, both))))
                else:
                    run = run_of_ours(ours(args.binary, name, rows, steps, options))
                expected = run[0]
                found[title][0].append(run)
                if has_peer:
                    found[title][1].append(run_of_peer(peer, name, count, args.seconds))
        alone = statistics.median(rate for rate, _ in found["alone"][0])
        for title, (own, theirs) in found.items():
            (rate, rates, mib), cells = summary(own), ["", "", "", ""]
            if theirs:
                peer, peer_rates, peer_mib = summary(theirs)
                cells = [f"{peer:.0f}", peer_rates, f"{rate / peer:.2f}", f"{peer_mib:.0f}"]
            cells = [name, title, f"{rate:.0f}", rates, f"{rate / alone:.2f}", *cells[:3], f"{mib:.0f}", cells[3]]
            print("| " + " | ".join(cells) + " |", flush=True)


def summary(runs):
    """Median rate, smallest and largest rate, and largest memory of runs."""
    rates = [rate for rate, _ in runs]
    return statistics.median(rates), f"{min(rates):.0f}..{max(rates):.0f}", max(mib for _, mib in runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        split, name, *numbers, seconds = sys.argv[2:]
        work(split, name, *map(int, numbers), float(seconds))
    else:
        main()
