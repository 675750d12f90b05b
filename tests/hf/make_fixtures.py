"""Makes the fixtures of tests/data/hf: small random transformers models with odd sizes, and their outputs.

    python tests/hf/make_fixtures.py [FOLDER [NAME..]]

writes FOLDER/<name>/{config.json, model.safetensors, expected.safetensors}.

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
    """Token ids by a formula that is also in the Rust test."""
    return table(lambda r, t: (r * 7 + t * 5 + r * t * 3 + t * t) % vocab)


def table(number):
    return torch.tensor([[number(r, t) for t in range(SEQ)] for r in range(ROWS)])


def encoder_input(vocab):
    """Padded rows with two token types, and labels at some positions."""
    mask = table(lambda r, t: int(t < SEQ - 2 * r))
    types = table(lambda r, t: int(t > 3 + r))
    labels = table(lambda r, t: (t * 11 + r) % vocab if (r + t) % 3 == 0 and mask[r][t] else -100)
    return dict(input_ids=ids(vocab), attention_mask=mask, token_type_ids=types), labels


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
    bert = dict(
        vocab_size=37,
        hidden_size=18,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=16,
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    half = dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)
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
        "mixtral": llama_like("Mixtral", num_local_experts=5, num_experts_per_tok=2),
        "qwen3-moe": llama_like("Qwen3Moe", num_experts=7, num_experts_per_tok=3, moe_intermediate_size=5),
        "qwen3-moe-normed": llama_like(
            "Qwen3Moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=9,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
        "mistral-window": llama_like("Mistral", sliding_window=4),
        "qwen2-window": llama_like("Qwen2", head_dim=None, hidden_size=24, **half),
        "gpt2-f16": transformers.GPT2Config(**gpt2, **off),
        "llama-bf16": llama_like("Llama"),
        "bert": transformers.BertConfig(**bert),
        "bert-untied": transformers.BertConfig(**bert, tie_word_embeddings=False, type_vocab_size=3),
        "bert-encoder": transformers.BertConfig(**bert),
    }


DTYPES = {"gpt2-f16": torch.float16, "llama-bf16": torch.bfloat16}


def has_experts(name):
    return name == "mixtral" or "moe" in name


def kind(name):
    """The transformers class of a model."""
    if name == "bert-encoder":
        return transformers.BertModel
    return transformers.BertForMaskedLM if name.startswith("bert") else None


@torch.no_grad()
def computed(name, model):
    """Outputs of a model for the token ids, in f32."""
    if has_experts(name):
        # Also the load-balancing loss.
        out = model(ids(model.config.vocab_size), output_router_logits=True)
        return {"logits": out.logits, "balance": out.aux_loss.reshape(1)}
    if kind(name) is None:
        return {"logits": model(ids(model.config.vocab_size)).logits}
    given, labels = encoder_input(model.config.vocab_size)
    # Outputs at padding positions are meaningless.
    real = given["attention_mask"].unsqueeze(-1)
    if name == "bert-encoder":
        out = model(**given)
        return {"hidden": out.last_hidden_state * real, "pooled": out.pooler_output}
    out = model(**given, labels=labels, output_hidden_states=True)
    return {"hidden": out.hidden_states[-1] * real, "logits": out.logits * real, "loss": out.loss.reshape(1)}


def fresh(name):
    """A model with random weights, biases and norms too: zeros and ones would hide errors."""
    torch.manual_seed(sum(name.encode()))
    config = configs()[name]
    model = kind(name)(config) if kind(name) else transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return plain(name, model).eval().to(DTYPES.get(name, torch.float32))


def plain(name, model):
    """Eager experts: grouped matmuls do not support odd widths."""
    if has_experts(name):
        model.set_experts_implementation("eager")
    return model


def reread(name, model, folder):
    """A saved model in f32, whose rotary tables were never rounded to the dtype of its weights."""
    return plain(name, type(model).from_pretrained(folder, dtype=torch.float32)).eval()


def make(folder, names):
    for name in names or configs():
        model, out = fresh(name), Path(folder) / name
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        results = computed(name, reread(name, model, out))
        save_file({key: value.contiguous() for key, value in results.items()}, out / "expected.safetensors")
        size = sum(f.stat().st_size for f in out.iterdir())
        print(f"{name}: {size} bytes, {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    make(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "hf", sys.argv[2:])
