"""Compares shardgrad with transformers itself: logits, and losses, gradient norms and weights of 12 AdamW steps.

    python tests/hf/compare.py [--mesh MESH].. target/release/shardgrad [MODEL..]

For each model of make_fixtures.py (or those that are named) and each mesh: logits of a batch (within 2e-5 of their
scale), then training from the same weights on the same rows: losses (2e-4, relative), gradient norms and final weights
(2e-3); the weights are those of the saved folder, opened by transformers. Exits with 1 if anything is further apart.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from make_fixtures import configs, fresh

MESHES = ["dp=1", "tp=2", "dp=2", "pp=2", "dp=2,tp=2", "pp=2,tp=2", "tp=3"]
ROWS, SEQ, STEPS, LR = 4, 8, 12, 1e-3


def tokens(vocab):
    """Rows that are used in order, again from the start where they end."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocab, (3 * ROWS, SEQ + 1), generator=generator)


def train(model, rows):
    """Losses, gradient norms and weights of some steps by transformers."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        batch = rows[[(step * ROWS + r) % len(rows) for r in range(ROWS)]]
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optim.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optim.step()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def far(found, exact):
    """The largest difference in units of the largest number."""
    return ((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()


def worst_weight(found, exact):
    worst = (0.0, "")
    for name, weight in exact.items():
        other = found[name].detach()
        if name.endswith("attn.c_attn.bias"):
            # Softmax does not see what is added to every key: Adam makes steps of the rounding of zero.
            d = len(weight) // 3
            weight, other = [torch.cat([w[:d], w[2 * d :]]) for w in (weight, other)]
        worst = max(worst, (far(other, weight), name))
    return worst


def compare(binary, name, folder, meshes):
    model = fresh(name)
    start, data = folder / "start", folder / "tokens.safetensors"
    model.save_pretrained(start)
    rows = tokens(model.config.vocab_size)
    save_file({"input_ids": rows}, data)
    with torch.no_grad():
        logits = model(rows[:ROWS, :-1]).logits
    losses, norms, weights = train(model, rows)
    common = ["--tokens", str(data), "--threads", "1"]
    good = True
    for mesh in meshes:
        out, file = folder / mesh, folder / f"{mesh}.safetensors"
        run = lambda *args: subprocess.run([binary, *map(str, args), "--mesh", mesh, *common], check=True, capture_output=True)
        run("eval", "--model", start, "--batch", ROWS, "--logits", file)
        run(
            *("train", "--model", start, "--out", out, "--no-shuffle", "--lr-schedule", "constant", "--warmup", 0),
            *("--steps", STEPS, "--batch", ROWS, "--lr", LR, "--weight-decay", 0.1, "--beta1", 0.9, "--beta2", 0.99),
            *("--eps", 1e-8, "--grad-clip", 1, "--json"),
        )
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        saved = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        found = {
            "logits": (far(load_file(file)["logits"], logits), 2e-5),
            "losses": (max(abs(s["loss"] / x - 1) for s, x in zip(steps, losses, strict=True)), 2e-4),
            "norms": (max(abs(s["grad_norm"] / x - 1) for s, x in zip(steps, norms, strict=True)), 2e-3),
            "weights": (worst_weight(dict(saved.named_parameters()), weights)[0], 2e-3),
        }
        fits = all(x <= bound for x, bound in found.values())
        good &= fits
        print(f"{name:13} {mesh:10}", "  ".join(f"{k} {x:.1e}" for k, (x, _) in found.items()), "" if fits else "FAR")
        if not fits:
            print("  furthest weight:", worst_weight(dict(saved.named_parameters()), weights))
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", action="append")
    parser.add_argument("binary")
    parser.add_argument("model", nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = lambda name: compare(args.binary, name, Path(folder) / name, args.mesh or MESHES)
        good = [run(name) for name in args.model or configs()]
    sys.exit(0 if all(good) else 1)
