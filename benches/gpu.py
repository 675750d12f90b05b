"""PyTorch on an NVIDIA GPU, on the cases of `shardgrad bench card-steps card-kernels`, with the same names.

    cargo build --release --features cuda
    target/release/shardgrad bench card-steps card-llama card-kernels --json > ours.jsonl
    python benches/gpu.py > theirs.jsonl
    python benches/gpu.py --table ours.jsonl theirs.jsonl

Kernels run in eager mode, attention with the fastest of PyTorch's implementations, models eagerly and compiled. Each case is warmed up, then
timed on the host around calls that end with a synchronization; the median counts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from torch_gpt import Shape, training_step

ROWS, WIDTH, TOKENS, VOCAB, PARAMETERS = 65536, 1024, 32768, 50304, 128 << 20


def table(ours, theirs):
    """Prints the seconds of both by case, and their ratio."""
    read = lambda path: {row["case"]: row for row in map(json.loads, Path(path).read_text().splitlines())}
    ours, theirs = read(ours), read(theirs)
    print("| work | shardgrad | | PyTorch | PyTorch's time over ours |\n|---|---|---|---|---|")
    for name, row in ours.items():
        if not row["bench"].startswith("card_"):
            continue
        mine = f"| {name} | {row['seconds'] * 1e3:.3f} ms | {row['rate']:,.0f} {row['unit']} |"
        peers = [key for key in theirs if key == name or key.startswith(name + ", ")]
        for key in peers or [""]:
            peer = theirs.get(key)
            kind = key[len(name) + 2 :]
            text = f"{peer['seconds'] * 1e3:.3f} ms {kind}".strip() if peer else "not measured"
            print(mine, f"{text} | {peer['seconds'] / row['seconds']:.2f} |" if peer else f"{text} | |")


def timed(call, seconds=0.2):
    """Median seconds of a call, over samples of ten calls and a synchronization."""
    import torch

    def sample(calls):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / calls

    for _ in range(3):
        sample(1)
    once = sample(10) * 10
    return statistics.median(sample(10) for _ in range(max(5, min(101, int(seconds / once)))))


def kernels():
    """Name and call of each kernel."""
    import torch
    from torch.nn import functional as F

    aten, bf16 = torch.ops.aten, torch.bfloat16
    new = lambda *shape, dtype=bf16: torch.rand(*shape, device="cuda", dtype=torch.float32).mul(2).sub(1).to(dtype)
    x, dy, w, b = new(ROWS, WIDTH), new(ROWS, WIDTH), new(WIDTH), new(WIDTH)
    square = new(8192, 8192)
    yield "copy bf16", lambda: x.clone()
    yield "cast bf16 to f32", lambda: x.float()
    yield "transpose bf16 8192x8192", lambda: square.t().contiguous()
    yield "add bf16", lambda: x + dy
    yield "add row bf16", lambda: x + w
    yield "gelu bf16", lambda: F.gelu(x, approximate="tanh")
    yield "gelu gradient bf16", lambda: aten.gelu_backward(dy, x, approximate="tanh")
    _, mean, rstd = aten.native_layer_norm(x, [WIDTH], w, b, 1e-5)
    yield "layer_norm bf16", lambda: aten.native_layer_norm(x, [WIDTH], w, b, 1e-5)
    yield "layer_norm gradient bf16", lambda: aten.native_layer_norm_backward(dy, x, [WIDTH], mean, rstd, w, b, [True] * 3)
    _, rstd = aten._fused_rms_norm(x, [WIDTH], w, 1e-5)
    yield "rms_norm bf16", lambda: aten._fused_rms_norm(x, [WIDTH], w, 1e-5)
    yield "rms_norm gradient bf16", lambda: aten._fused_rms_norm_backward(dy, x, [WIDTH], rstd, w, [True] * 2)
    y = F.softmax(x, -1)
    yield "softmax bf16", lambda: F.softmax(x, -1)
    yield "softmax gradient bf16", lambda: aten._softmax_backward_data(dy, y, -1, bf16)
    yield "sum of rows bf16", lambda: x.sum(-1)
    yield "sum of columns bf16", lambda: x.sum(0)
    z, targets = new(TOKENS // 4, VOCAB), torch.randint(VOCAB, (TOKENS // 4,), device="cuda")
    yield "max of rows bf16, vocabulary", lambda: z.amax(-1)
    del z
    table_, index = new(VOCAB, WIDTH), torch.randint(VOCAB, (ROWS,), device="cuda")
    yield "embedding bf16", lambda: F.embedding(index, table_)
    yield "embedding gradient bf16", lambda: aten.embedding_dense_backward(dy, index, VOCAB, -1, False)
    p, g = new(PARAMETERS, dtype=torch.float32), new(PARAMETERS, dtype=torch.float32)
    p.grad = g
    optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
    yield "adamw f32", optimizer.step
    yield "sum of squares f32", lambda: g.square().sum()
    del p, g, optimizer, x, dy, y, table_
    products = [
        (8192, 8192, 8192, "nn"), (4096, 4096, 4096, "nn"), (TOKENS, 768, 2304, "nn"), (TOKENS, 768, 3072, "nn"),
        (TOKENS, 3072, 768, "nn"), (TOKENS, 3072, 768, "nt"), (768, TOKENS, 3072, "tn"), (TOKENS, 768, VOCAB, "nt"),
    ]
    for m, k, n, form in products:
        left = new(m, k) if form[0] == "n" else new(k, m).t()
        right = new(k, n) if form[1] == "n" else new(n, k).t()
        yield f"matmul bf16 {m}x{k}x{n} {form}", lambda: left @ right
    for b, t, g, r, c in [(32, 1024, 12, 1, 64), (4, 4096, 16, 1, 128), (4, 4096, 8, 4, 128), (1, 16384, 16, 1, 128)]:
        q, k, v = new(b, g * r, t, c), new(b, g, t, c), new(b, g, t, c)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=r > 1)
        for backend in ("cudnn", "flash"):
            kinds = {"cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION, "flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION}
            with torch.nn.attention.sdpa_kernel(kinds[backend]):
                name = f"bf16 {b}x{t}x{g * r}x{c}, {g} key heads, causal"
                yield f"attention {name}, {backend}", run
                o = run()
                do = torch.rand_like(o)
                yield f"attention gradient {name}, {backend}", lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def models():
    """Name and call of each training step."""
    shape = Shape(blocks=12, width=768, heads=12, seq=1024, rows=32, vocab=VOCAB)
    for compiled in (False, True):
        step = training_step(shape, "cuda", tied=True, autocast=True, compiled=compiled)
        yield f"gpt2-124m bf16, 32 x 1024 tokens, {'compiled' if compiled else 'eager'}", step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", nargs=2, metavar="FILE")
    parser.add_argument("--only", choices=["kernels", "models"])
    arguments = parser.parse_args()
    if arguments.table:
        return table(*arguments.table)
    import torch

    torch.set_float32_matmul_precision("high")
    for part, cases in (("kernels", kernels), ("models", models)):
        if arguments.only not in (None, part):
            continue
        for name, call in cases():
            try:
                print(json.dumps({"case": name, "seconds": timed(call), "device": torch.cuda.get_device_name()}), flush=True)
            except RuntimeError as error:
                print(f"skipped: {name}: {error}"[:300], file=sys.stderr)


if __name__ == "__main__":
    main()
