"""Compares shardgrad with transformers itself: logits, and losses, gradient norms and weights of 12 AdamW steps.

    python tests/hf/compare.py [--mesh MESH].. target/release/shardgrad [MODEL..]

For each model of make_fixtures.py (or those that are named) and each mesh: logits of a batch (within 2e-5 of their
scale), then training from the same weights on the same rows: losses (2e-4, relative), gradient norms and final weights
(2e-3); the weights are those of the saved folder, opened by transformers. Exits with 1 if anything is further apart.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from make_fixtures import configs, fresh, has_experts, kind, reread

MESHES = ["dp=1", "tp=2", "dp=2", "pp=2", "dp=2,tp=2", "pp=2,tp=2", "tp=3"]
# For models with experts.
EXPERT_MESHES = ["ep=2", "ep=3", "dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2"]
ROWS, SEQ, STEPS, LR = 4, 8, 12, 1e-3


def tokens(vocab):
    """Yields rows in order, repeated from the start."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocab, (3 * ROWS, SEQ + 1), generator=generator)


def data(name, model):
    """Tensors of the token file, and a function from its rows to arguments and targets of the model."""
    rows = tokens(model.config.vocab_size)
    if kind(name) is None:
        split = lambda at: (dict(input_ids=rows[at, :-1]), rows[at, 1:])
        return {"input_ids": rows}, split
    place = torch.arange(SEQ).expand(len(rows), SEQ)
    number = torch.arange(len(rows)).unsqueeze(1)
    given = dict(
        # transformers masks the embedding gradient of the padding token, which is 0.
        input_ids=rows[:, :-1].clamp_min(1).contiguous(),
        # Up to two positions at the end are padding. Rows have one or two targets, so the mean over a batch is not the mean over its
        # microbatches.
        attention_mask=(place < SEQ - number % 3).long(),
        token_type_ids=(place > 2 + number % 2).long(),
    )
    labels = torch.where((place + number) % (2 + number % 3) == 0, rows[:, 1:], -100)
    labels[(place >= SEQ - 2) | (place < 2)] = -100
    split = lambda at: ({key: value[at] for key, value in given.items()}, labels[at])
    return {**given, "labels": labels}, split


def train(model, count, split):
    """Losses, gradient norms and weights of some steps of transformers."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        given, targets = split([(step * ROWS + r) % count for r in range(ROWS)])
        logits = model(**given).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optim.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optim.step()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def largest(numbers):
    """Maximum of some numbers; infinite if one is NaN, which `max` may ignore."""
    numbers = list(numbers)
    return max(numbers) if all(map(math.isfinite, numbers)) else math.inf


def far(found, exact):
    """Maximum difference relative to the largest element."""
    return largest([((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()])


def worst_weight(found, exact):
    worst = (0.0, "")
    for name, weight in exact.items():
        other = found[name].detach()
        if name.endswith("attention.self.key.bias"):
            # A key bias has zero gradient (softmax shift invariance); Adam would amplify its rounding.
            continue
        if name == "cls.predictions.bias" and "cls.predictions.decoder.bias" in exact:
            # The other bias is unused with an untied head.
            continue
        if name.endswith("attn.c_attn.bias"):
            d = len(weight) // 3
            weight, other = [torch.cat([w[:d], w[2 * d :]]) for w in (weight, other)]
        worst = max(worst, (far(other, weight), name))
    return worst


def compare(binary, name, folder, meshes):
    model = fresh(name)
    start, file = folder / "start", folder / "tokens.safetensors"
    model.save_pretrained(start)
    model = reread(name, model, start)
    tensors, split = data(name, model)
    save_file(tensors, file)
    with torch.no_grad():
        logits = model(**split(list(range(ROWS)))[0]).logits
    losses, norms, weights = train(model, len(tensors["input_ids"]), split)
    common = ["--tokens", str(file), "--threads", "1"]
    good = True
    for mesh in meshes:
        out, file = folder / mesh, folder / f"{mesh}.safetensors"
        run = lambda *args: subprocess.run([binary, *map(str, args), *common], check=True, capture_output=True)
        run("eval", "--mesh", mesh, "--model", start, "--batch", ROWS, "--logits", file)
        run(
            *("train", "--mesh", mesh, "--model", start, "--out", out, "--no-shuffle", "--lr-schedule", "constant", "--warmup", 0),
            *("--steps", STEPS, "--batch", ROWS, "--lr", LR, "--weight-decay", 0.1, "--beta1", 0.9, "--beta2", 0.99),
            *("--eps", 1e-8, "--grad-clip", 1, "--json"),
        )
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        saved = type(model).from_pretrained(out / "model", dtype=torch.float32)
        found = {
            "logits": (far(load_file(file)["logits"], logits), 2e-5),
            "losses": (largest(abs(s["loss"] / x - 1) for s, x in zip(steps, losses, strict=True)), 2e-4),
            "norms": (largest(abs(s["grad_norm"] / x - 1) for s, x in zip(steps, norms, strict=True)), 2e-3),
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
        meshes = lambda name: MESHES + (EXPERT_MESHES if has_experts(name) else [])
        run = lambda name: compare(args.binary, name, Path(folder) / name, args.mesh or meshes(name))
        # An encoder without a language-model head cannot be trained; the fixtures compare its outputs.
        names = [name for name in configs() if name != "bert-encoder"]
        good = [run(name) for name in args.model or names]
    sys.exit(0 if all(good) else 1)
