//! `config.json` of the Llama family: `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`, as `transformers` reads and writes it.

mod experts;
mod windows;

use super::disk::refuse;
use super::fields::{Faults, below, dtype_name, fields, present};
use super::fit::Claims;
use super::rotary::{Raw as RawRotary, Rotary, RotaryScaling};
pub use experts::ExpertsConfig;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// Which member of the family: they differ in biases, norms and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlamaKind {
    /// `llama`: biases, if any, in all four products of attention.
    Llama,
    /// `mistral`: no biases.
    Mistral,
    /// `qwen2`: biases of queries, keys and values.
    Qwen2,
    /// `qwen3`: as `llama`, with a norm of each query and key.
    Qwen3,
    /// `mixtral`: as `mistral`, with experts.
    Mixtral,
    /// `qwen3_moe`: as `qwen3`, with experts.
    Qwen3Moe,
}

/// The shape of a model of the Llama family and what else its config file tells.
///
/// The activation is SiLU, and all channels of queries and keys are turned; files that say otherwise are refused.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Which member of the family.
    pub kind: LlamaKind,
    /// The number of tokens.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the hidden layer of the MLP.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key and value heads, each of which serves as many query heads.
    pub num_key_value_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// What is added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// The angles of rotary positions.
    pub rotary: Rotary,
    /// Whether products of attention have biases.
    pub attention_bias: bool,
    /// Whether products of the MLP have biases.
    pub mlp_bias: bool,
    /// The dropout probability on attention weights.
    pub attention_dropout: f64,
    /// The standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Whether the output layer is the token embedding, transposed.
    pub tie_word_embeddings: bool,
    /// The dtype of the stored weights.
    pub dtype: DType,
    /// How many keys a query sees at most in each block, where there is a limit; empty if there is none in any.
    pub windows: Vec<Option<usize>>,
    /// Fields that are not told above (token numbers, and how windows were asked for): written back as they were read, where
    /// nothing above says otherwise.
    pub others: Map<String, Value>,
    /// The experts, of members that have some.
    pub experts: Option<ExpertsConfig>,
}

/// A preset: name, kind, vocabulary, positions, width, hidden units, blocks, query heads, key heads, channels of a head,
/// theta, tied.
type Preset = (&'static str, LlamaKind, [usize; 8], f64, bool);

/// `llama-tiny` and `mixtral-tiny` are made for bytes of text on a laptop; the others are the published models.
const PRESETS: [Preset; 11] = [
    ("llama-tiny", LlamaKind::Llama, [256, 64, 128, 352, 4, 4, 2, 32], 1e4, true),
    ("llama-1b", LlamaKind::Llama, [128_256, 131_072, 2048, 8192, 16, 32, 8, 64], 5e5, true),
    ("llama-8b", LlamaKind::Llama, [128_256, 131_072, 4096, 14_336, 32, 32, 8, 128], 5e5, false),
    ("llama-70b", LlamaKind::Llama, [128_256, 131_072, 8192, 28_672, 80, 64, 8, 128], 5e5, false),
    ("mistral-7b", LlamaKind::Mistral, [32_768, 32_768, 4096, 14_336, 32, 32, 8, 128], 1e6, false),
    ("qwen2-0.5b", LlamaKind::Qwen2, [151_936, 131_072, 896, 4864, 24, 14, 2, 64], 1e6, true),
    ("qwen3-0.6b", LlamaKind::Qwen3, [151_936, 40_960, 1024, 3072, 28, 16, 8, 128], 1e6, true),
    ("mixtral-tiny", LlamaKind::Mixtral, [256, 64, 128, 176, 4, 4, 2, 32], 1e4, true),
    ("mixtral-8x7b", LlamaKind::Mixtral, [32_000, 32_768, 4096, 14_336, 32, 32, 8, 128], 1e6, false),
    ("qwen3-30b-a3b", LlamaKind::Qwen3Moe, [151_936, 40_960, 2048, 6144, 48, 32, 4, 128], 1e6, false),
    ("qwen3-8b", LlamaKind::Qwen3, [151_936, 40_960, 4096, 12_288, 36, 32, 8, 128], 1e6, false),
];

impl LlamaKind {
    /// All members.
    pub const EVERY: [LlamaKind; 6] = [
        LlamaKind::Llama,
        LlamaKind::Mistral,
        LlamaKind::Qwen2,
        LlamaKind::Qwen3,
        LlamaKind::Mixtral,
        LlamaKind::Qwen3Moe,
    ];

    /// The value of `model_type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LlamaKind::Llama => "llama",
            LlamaKind::Mistral => "mistral",
            LlamaKind::Qwen2 => "qwen2",
            LlamaKind::Qwen3 => "qwen3",
            LlamaKind::Mixtral => "mixtral",
            LlamaKind::Qwen3Moe => "qwen3_moe",
        }
    }

    fn architecture(self) -> &'static str {
        match self {
            LlamaKind::Llama => "LlamaForCausalLM",
            LlamaKind::Mistral => "MistralForCausalLM",
            LlamaKind::Qwen2 => "Qwen2ForCausalLM",
            LlamaKind::Qwen3 => "Qwen3ForCausalLM",
            LlamaKind::Mixtral => "MixtralForCausalLM",
            LlamaKind::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// Whether queries and keys have norms.
    #[must_use]
    pub fn has_head_norms(self) -> bool {
        matches!(self, LlamaKind::Qwen3 | LlamaKind::Qwen3Moe)
    }
}

impl LlamaConfig {
    /// A config of so many tokens, positions, blocks, and `[query heads, key heads]` of width `hidden_size / query heads`,
    /// whose MLP has `intermediate_size` hidden units; with theta 10000, untied, without biases and dropout, in f32.
    /// Members that have experts have 8 in each block, of which a token passes 2.
    #[must_use]
    pub fn new(
        kind: LlamaKind,
        vocab_size: usize,
        max_position_embeddings: usize,
        [hidden_size, intermediate_size]: [usize; 2],
        num_hidden_layers: usize,
        [num_attention_heads, num_key_value_heads]: [usize; 2],
    ) -> LlamaConfig {
        LlamaConfig {
            kind,
            vocab_size,
            max_position_embeddings,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: hidden_size / num_attention_heads.max(1),
            rms_norm_eps: 1e-6,
            rotary: Rotary::new(1e4),
            attention_bias: kind == LlamaKind::Qwen2,
            mlp_bias: false,
            attention_dropout: 0.0,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            dtype: DType::F32,
            windows: Vec::new(),
            others: Map::new(),
            experts: kind.has_experts().then(|| ExpertsConfig {
                norm_topk_prob: kind == LlamaKind::Mixtral,
                ..ExpertsConfig::new(8, 2, intermediate_size)
            }),
        }
    }

    /// The names that [`LlamaConfig::preset`] knows.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|p| p.0)
    }

    /// The config of a preset name.
    #[must_use]
    pub fn preset(name: &str) -> Option<LlamaConfig> {
        let &(name, kind, sizes, theta, tied) = PRESETS.iter().find(|p| p.0 == name)?;
        let [vocab, positions, width, hidden, blocks, heads, key_heads, channels] = sizes;
        let new = LlamaConfig::new(kind, vocab, positions, [width, hidden], blocks, [heads, key_heads]);
        let factor = match name {
            "llama-1b" => Some(32.0),
            "llama-8b" | "llama-70b" => Some(8.0),
            _ => None,
        };
        let scaling = factor.map_or(RotaryScaling::None, |factor| RotaryScaling::Llama3 {
            factor,
            low: 1.0,
            high: 4.0,
            original: 8192,
        });
        Some(LlamaConfig {
            head_dim: channels,
            rms_norm_eps: match kind {
                LlamaKind::Llama | LlamaKind::Mistral | LlamaKind::Mixtral => 1e-5,
                LlamaKind::Qwen2 | LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => 1e-6,
            },
            experts: match kind {
                LlamaKind::Qwen3Moe => Some(ExpertsConfig::new(128, 8, 768)),
                _ => new.experts.clone(),
            },
            rotary: Rotary { theta, scaling },
            // Narrow models start faster from wider weights.
            initializer_range: if name.ends_with("-tiny") { 0.05 } else { 0.02 },
            tie_word_embeddings: tied,
            ..new
        })
    }

    /// Whether the product that joins the heads has a bias.
    #[must_use]
    pub fn output_bias(&self) -> bool {
        self.attention_bias && self.kind != LlamaKind::Qwen2
    }

    /// How many keys a query of a block sees at most.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// The experts of a block, if it has some.
    #[must_use]
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.has(layer))
    }

    /// Query heads of each key head, of which a model has at least one.
    #[must_use]
    pub fn heads_per_key(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads.max(1)
    }

    /// Reads the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// `Kind::Checkpoint` if it is no JSON or describes a model that is not this one; all missing and unsupported fields
    /// are listed at once.
    pub(super) fn parse(kind: LlamaKind, path: &Path, text: &str) -> Result<LlamaConfig> {
        let raw: Raw = fields(path, text)?;
        raw.check(kind).map_err(|faults| {
            let error = refuse(path, "describes a model that this version does not run");
            faults.into_iter().fold(error, |error, fault| error.detail("field", fault))
        })
    }

    /// What the config tells of tensors in files.
    pub(super) fn claims(&self) -> Claims {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size));
        let queries = ("num_attention_heads` x `head_dim", self.num_attention_heads * self.head_dim);
        let keys = ("num_key_value_heads` x `head_dim", self.num_key_value_heads * self.head_dim);
        let mut matrices = vec![
            ("model.embed_tokens.weight", [vocab, width]),
            ("model.layers.0.self_attn.q_proj.weight", [queries, width]),
            ("model.layers.0.self_attn.k_proj.weight", [keys, width]),
        ];
        matrices.extend(self.hidden_claims(width));
        if !self.tie_word_embeddings {
            matrices.push(("lm_head.weight", [vocab, width]));
        }
        Claims { prefix: "", blocks: ("num_hidden_layers", self.num_hidden_layers, "layers"), matrices }
    }

    /// The text of the config file. Files of some members lack fields for what a config can say; a model with such a config is
    /// not saved.
    #[must_use]
    pub fn to_json(&self) -> String {
        let told = json!({
            "architectures": [self.kind.architecture()],
            "attention_dropout": self.attention_dropout,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": self.kind.name(),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": self.rotary.to_json(),
            "rope_theta": self.rotary.theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype_name(self.dtype),
            "vocab_size": self.vocab_size,
        });
        let mut value = below(&self.others, told);
        match self.kind {
            LlamaKind::Llama => {
                value["attention_bias"] = json!(self.attention_bias);
                value["mlp_bias"] = json!(self.mlp_bias);
            }
            LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => value["attention_bias"] = json!(self.attention_bias),
            LlamaKind::Mistral | LlamaKind::Qwen2 | LlamaKind::Mixtral => {}
        }
        windows::write(self, &mut value);
        experts::write(self, &mut value);
        format!("{value:#}\n")
    }

    /// What a config that was read of this one's text does not say as this one does: files of some members lack fields.
    pub(super) fn unsaid(&self, read: &LlamaConfig) -> Vec<String> {
        let kind = self.kind.name();
        let mut unsaid = Vec::new();
        if !windows::same(self, read) {
            let held = match self.kind {
                LlamaKind::Llama => "none",
                LlamaKind::Mistral | LlamaKind::Mixtral | LlamaKind::Qwen3Moe => "one, of all blocks",
                LlamaKind::Qwen2 | LlamaKind::Qwen3 => "one, of some blocks",
            };
            unsaid.push(format!("`windows` is {:?}; a {kind} file holds {held}", self.windows));
        }
        for (name, here, there) in [
            ("attention_bias", self.attention_bias, read.attention_bias),
            ("mlp_bias", self.mlp_bias, read.mlp_bias),
        ] {
            if here != there {
                unsaid.push(format!("`{name}` is {here}; a {kind} is read with {there}"));
            }
        }
        if self.experts != read.experts {
            let [here, there] = [self, read].map(|config| format!("{:?}", config.experts));
            unsaid.push(format!("`experts` is {here}; a {kind} is read with {there}"));
        }
        unsaid
    }
}

/// What is read. A field that changes what the model computes is named here; all others are kept.
#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<u64>,
    max_position_embeddings: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    // A null says something else than silence.
    #[serde(default, deserialize_with = "present")]
    num_key_value_heads: Option<Option<u64>>,
    head_dim: Option<u64>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRotary>,
    // What releases from 5 on write for both.
    rope_parameters: Option<RawRotary>,
    partial_rotary_factor: Option<f64>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    attention_dropout: Option<f64>,
    initializer_range: Option<f64>,
    tie_word_embeddings: Option<bool>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    quantization_config: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Raw {
    fn check(mut self, kind: LlamaKind) -> Result<LlamaConfig, Vec<String>> {
        let mut faults = Faults(self.unsupported(kind));
        // Without a number of key heads each query head has its own. A llama's file may be silent, that of another member says
        // so by a null: without the field, it has a number that is not told.
        let is_null = self.num_key_value_heads == Some(None);
        let key_heads = self.num_attention_heads.filter(|_| kind == LlamaKind::Llama || is_null);
        let mut config = LlamaConfig::new(
            kind,
            faults.extent("vocab_size", self.vocab_size, None),
            faults.extent("max_position_embeddings", self.max_position_embeddings, None),
            [
                faults.extent("hidden_size", self.hidden_size, None),
                faults.extent("intermediate_size", self.intermediate_size, None),
            ],
            faults.blocks("num_hidden_layers", self.num_hidden_layers),
            [
                faults.extent("num_attention_heads", self.num_attention_heads, None),
                faults.extent("num_key_value_heads", self.num_key_value_heads.flatten(), key_heads),
            ],
        );
        config.head_dim = self.head_dim(&config, &mut faults);
        let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
        if heads % key_heads != 0 {
            faults.add(format!(
                "`num_attention_heads` is {heads}, which {key_heads} key heads (`num_key_value_heads`) do not divide"
            ));
        }
        config.windows = windows::read(&self.others, &config, &mut faults);
        config.experts = kind.has_experts().then(|| experts::read(&self.others, &config, &mut faults));
        config.rms_norm_eps = faults.number("rms_norm_eps", self.rms_norm_eps, 1e-6, 1.0);
        config.attention_dropout = faults.number("attention_dropout", self.attention_dropout, 0.0, 1.0);
        config.initializer_range = faults.number("initializer_range", self.initializer_range, 0.02, 1e3);
        let objects = [self.rope_parameters.take(), self.rope_scaling.take()];
        config.rotary = RawRotary::check(objects, self.rope_theta, &mut faults);
        if kind == LlamaKind::Llama || kind.has_head_norms() {
            config.attention_bias = self.attention_bias.unwrap_or(false);
        }
        config.mlp_bias = kind == LlamaKind::Llama && self.mlp_bias.unwrap_or(false);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(false);
        config.dtype = faults.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        for name in ["model_type", "architectures"] {
            self.others.remove(name);
        }
        config.others = self.others;
        faults.none_or(config)
    }

    fn head_dim(&self, config: &LlamaConfig, faults: &mut Faults) -> usize {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let default = match config.kind {
            LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => 128,
            _ if self.head_dim.is_none() && width % heads != 0 => {
                faults.add(format!(
                    "`hidden_size` is {width}, which {heads} heads (`num_attention_heads`) do not divide"
                ));
                2
            }
            _ => (width / heads) as u64,
        };
        let channels = faults.extent("head_dim", self.head_dim, Some(default));
        if !channels.is_multiple_of(2) {
            faults.add(format!("heads of {channels} channels; channels are turned in pairs"));
        }
        channels
    }

    /// Fields whose value asks for something that the model text does not do.
    fn unsupported(&self, kind: LlamaKind) -> Vec<String> {
        let mut faults = Vec::new();
        let activation = self.hidden_act.as_deref().unwrap_or("silu");
        // Two words for the same function.
        if !["silu", "swish"].contains(&activation) {
            faults.push(format!("`hidden_act` is {activation:?}; run is \"silu\""));
        }
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            faults.push("`partial_rotary_factor` is not 1; all channels are turned".to_string());
        }
        if matches!(kind, LlamaKind::Mistral | LlamaKind::Mixtral) && self.attention_bias == Some(true) {
            faults.push(format!("`attention_bias` is true; a {} has none", kind.name()));
        }
        if self.quantization_config.as_ref().is_some_and(|v| !v.is_null()) {
            faults.push("`quantization_config` is set; quantized weights are not read".to_string());
        }
        faults
    }
}

#[cfg(test)]
mod tests;
