"""Makes the recorded fixtures of tests/data/hf: small random models of transformers with odd sizes, and their logits.

    python tests/hf/make_fixtures.py [FOLDER]     writes FOLDER/<name>/{config.json, model.safetensors, expected.safetensors}

Needs torch, transformers (5 or newer) and safetensors.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SEQ = 9
ROWS = 3


def ids(vocab):
    """Tokens that any language computes alike."""
    return torch.tensor([[(r * 7 + t * 5 + r * t * 3 + t * t) % vocab for t in range(SEQ)] for r in range(ROWS)])


def llama_like(kind, **changes):
    shape = dict(
        vocab_size=37,
        hidden_size=18,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=6,
        max_position_embeddings=16,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    fields = {k: v for k, v in {**shape, **changes}.items() if k != "head_dim" or v is not None}
    return getattr(transformers, kind + "Config")(**fields)


def configs():
    llama3 = dict(
        rope_type="llama3",
        rope_theta=500.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8,
    )
    linear = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
    gpt2 = dict(vocab_size=37, n_positions=16, n_embd=15, n_layer=2, n_head=3, initializer_range=0.3)
    off = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    return {
        "gpt2": transformers.GPT2Config(**gpt2, **off),
        "gpt2-untied": transformers.GPT2Config(**{**gpt2, "n_inner": 22}, **off, tie_word_embeddings=False),
        "llama": llama_like("Llama", rope_parameters=llama3),
        "llama-biased": llama_like(
            "Llama",
            num_key_value_heads=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=linear,
        ),
        "mistral": llama_like("Mistral", sliding_window=None),
        "qwen2": llama_like("Qwen2", head_dim=None, hidden_size=24, num_attention_heads=4, num_key_value_heads=2),
        "qwen3": llama_like("Qwen3", tie_word_embeddings=True, num_key_value_heads=1),
    }


def logits(model):
    with torch.no_grad():
        return model(ids(model.config.vocab_size)).logits.float()


def fresh(name):
    """A model with random weights; biases and norms too, which as zeros and ones would hide mistakes."""
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(configs()[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make(folder):
    for name in configs():
        model, out = fresh(name), Path(folder) / name
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        save_file({"logits": logits(model).contiguous()}, out / "expected.safetensors")
        size = sum(f.stat().st_size for f in out.iterdir())
        print(f"{name}: {size} bytes, {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    make(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "hf")
