//! `config.json` of the Llama family (`llama`, `mistral`, `qwen2`, `qwen3`, `mixtral`, `qwen3_moe`), as `transformers` reads and writes
//! it.

mod experts;
mod sliding_window;

use super::config_check::{BlockCount, ExpectedShapes};
use super::config_fields::{ConfigErrors, deserialize_present, dtype_name, merge_fields, parse_config};
use super::rope::{Raw as RawRope, RopeConfig, RopeScaling};
pub use experts::ExpertsConfig;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The members of the Llama family; they differ in biases, norms, experts and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlamaKind {
    /// `llama`: optional biases in all four projections of attention.
    Llama,
    /// `mistral`: no biases.
    Mistral,
    /// `qwen2`: biases of queries, keys and values.
    Qwen2,
    /// `qwen3`: as `llama`, with QK-norm.
    Qwen3,
    /// `mixtral`: as `mistral`, with experts.
    Mixtral,
    /// `qwen3_moe`: as `qwen3`, with experts.
    Qwen3Moe,
}

/// Config of a model of the Llama family.
///
/// Supported are the activation SiLU and rotation of all channels of queries and keys; files with other settings are rejected.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The member of the family.
    pub kind: LlamaKind,
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The largest number of tokens of a sequence.
    pub max_position_embeddings: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The number of hidden units of the MLP.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key and value heads (GQA); each serves the same number of query heads.
    pub num_key_value_heads: usize,
    /// The number of channels per head.
    pub head_dim: usize,
    /// The eps of RMS norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// The rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// The dropout probability on attention weights.
    pub attention_dropout: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Whether the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// The dtype of the weights in files.
    pub dtype: DType,
    /// The sliding window of each block: the number of keys that a query attends to; empty if no block has a window.
    pub windows: Vec<Option<usize>>,
    /// Other fields of the file, such as token ids and the fields of windows: written back as they were read, unless a field above
    /// contradicts them.
    pub extra_fields: Map<String, Value>,
    /// The experts, for members with mixtures of experts.
    pub experts: Option<ExpertsConfig>,
}

/// A preset: name, kind, vocabulary, positions, width, hidden units, blocks, query heads, key heads, channels of a head,
/// theta, tied.
type Preset = (&'static str, LlamaKind, [usize; 8], f64, bool);

/// `*-nano` are for trying out options and `*-tiny` for a laptop, both for bytes of text; the others are published models.
const PRESETS: [Preset; 13] = [
    ("llama-nano", LlamaKind::Llama, [256, 64, 32, 88, 4, 4, 2, 8], 1e4, true),
    ("llama-tiny", LlamaKind::Llama, [256, 64, 128, 352, 4, 4, 2, 32], 1e4, true),
    ("llama-1b", LlamaKind::Llama, [128_256, 131_072, 2048, 8192, 16, 32, 8, 64], 5e5, true),
    ("llama-8b", LlamaKind::Llama, [128_256, 131_072, 4096, 14_336, 32, 32, 8, 128], 5e5, false),
    ("llama-70b", LlamaKind::Llama, [128_256, 131_072, 8192, 28_672, 80, 64, 8, 128], 5e5, false),
    ("mistral-7b", LlamaKind::Mistral, [32_768, 32_768, 4096, 14_336, 32, 32, 8, 128], 1e6, false),
    ("qwen2-0.5b", LlamaKind::Qwen2, [151_936, 131_072, 896, 4864, 24, 14, 2, 64], 1e6, true),
    ("qwen3-0.6b", LlamaKind::Qwen3, [151_936, 40_960, 1024, 3072, 28, 16, 8, 128], 1e6, true),
    ("mixtral-nano", LlamaKind::Mixtral, [256, 64, 32, 44, 4, 4, 2, 8], 1e4, true),
    ("mixtral-tiny", LlamaKind::Mixtral, [256, 64, 128, 176, 4, 4, 2, 32], 1e4, true),
    ("mixtral-8x7b", LlamaKind::Mixtral, [32_000, 32_768, 4096, 14_336, 32, 32, 8, 128], 1e6, false),
    ("qwen3-30b-a3b", LlamaKind::Qwen3Moe, [151_936, 40_960, 2048, 6144, 48, 32, 4, 128], 1e6, false),
    ("qwen3-8b", LlamaKind::Qwen3, [151_936, 40_960, 4096, 12_288, 36, 32, 8, 128], 1e6, false),
];

impl LlamaKind {
    /// All members of the family.
    pub const ALL: [LlamaKind; 6] = [
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

    /// Whether queries and keys have norms (QK-norm).
    #[must_use]
    pub fn has_head_norms(self) -> bool {
        matches!(self, LlamaKind::Qwen3 | LlamaKind::Qwen3Moe)
    }
}

impl LlamaConfig {
    /// A config with `[query heads, key heads]` of `hidden_size / query heads` channels, theta 10000, an untied output layer, without
    /// biases and dropout, in f32. Members with experts get 8 experts per block, of which a token uses 2.
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
            rope: RopeConfig::new(1e4),
            attention_bias: kind == LlamaKind::Qwen2,
            mlp_bias: false,
            attention_dropout: 0.0,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            dtype: DType::F32,
            windows: Vec::new(),
            extra_fields: Map::new(),
            experts: kind.has_experts().then(|| ExpertsConfig {
                norm_topk_prob: kind == LlamaKind::Mixtral,
                ..ExpertsConfig::new(8, 2, intermediate_size)
            }),
        }
    }

    /// The names of all presets.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|p| p.0)
    }

    /// Returns the config of a preset; `None` for an unknown name.
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
        let scaling = factor.map_or(RopeScaling::None, |factor| RopeScaling::Llama3 {
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
            rope: RopeConfig { theta, scaling },
            // Narrow models train faster from larger initial weights.
            initializer_range: if name.ends_with("-tiny") { 0.05 } else { 0.02 },
            tie_word_embeddings: tied,
            ..new
        })
    }

    /// Whether the output projection of attention has a bias.
    #[must_use]
    pub fn output_bias(&self) -> bool {
        self.attention_bias && self.kind != LlamaKind::Qwen2
    }

    /// The sliding window of a block; `None` for full attention.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// The experts of a block, if it has any.
    #[must_use]
    pub fn layer_experts(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.is_moe_layer(layer))
    }

    /// The number of query heads per key head.
    #[must_use]
    pub fn heads_per_kv_head(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads.max(1)
    }

    /// Parses the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`parse_config`].
    pub(super) fn parse(kind: LlamaKind, path: &Path, text: &str) -> Result<LlamaConfig> {
        parse_config(path, text, |raw: Raw| raw.check(kind))
    }

    /// The tensor shapes that the config implies.
    pub(super) fn expected_shapes(&self) -> ExpectedShapes {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size));
        let queries = ("num_attention_heads` x `head_dim", self.num_attention_heads * self.head_dim);
        let keys = ("num_key_value_heads` x `head_dim", self.num_key_value_heads * self.head_dim);
        let mut matrices = vec![
            ("model.embed_tokens.weight", [vocab, width]),
            ("model.layers.0.self_attn.q_proj.weight", [queries, width]),
            ("model.layers.0.self_attn.k_proj.weight", [keys, width]),
        ];
        matrices.extend(self.mlp_shapes(width));
        if !self.tie_word_embeddings {
            matrices.push(("lm_head.weight", [vocab, width]));
        }
        let blocks =
            BlockCount { field: "num_hidden_layers", count: self.num_hidden_layers, name_part: "layers" };
        ExpectedShapes { prefix: "", blocks, matrices }
    }

    /// Returns the text of the config file. Files of some members lack fields for settings that a config can have; a model with such
    /// settings cannot be saved with a config.
    #[must_use]
    pub fn to_json(&self) -> String {
        let own = json!({
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
            "rope_scaling": self.rope.to_json(),
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype_name(self.dtype),
            "vocab_size": self.vocab_size,
        });
        let mut value = merge_fields(&self.extra_fields, own);
        match self.kind {
            LlamaKind::Llama => {
                value["attention_bias"] = json!(self.attention_bias);
                value["mlp_bias"] = json!(self.mlp_bias);
            }
            LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => value["attention_bias"] = json!(self.attention_bias),
            LlamaKind::Mistral | LlamaKind::Qwen2 | LlamaKind::Mixtral => {}
        }
        sliding_window::write(self, &mut value);
        experts::write(self, &mut value);
        format!("{value:#}\n")
    }

    /// Lists the settings of this config that differ in `read`, the config read back from its text.
    pub(super) fn unrepresentable(&self, read: &LlamaConfig) -> Vec<String> {
        let kind = self.kind.name();
        let mut unrepresentable = Vec::new();
        if !sliding_window::same_windows(self, read) {
            let held = match self.kind {
                LlamaKind::Llama => "no window",
                LlamaKind::Mistral | LlamaKind::Mixtral | LlamaKind::Qwen3Moe => "one window, of all blocks",
                LlamaKind::Qwen2 | LlamaKind::Qwen3 => "one window, of some blocks",
            };
            unrepresentable.push(format!("`windows` is {:?}; a {kind} config can hold {held}", self.windows));
        }
        for (name, here, there) in [
            ("attention_bias", self.attention_bias, read.attention_bias),
            ("mlp_bias", self.mlp_bias, read.mlp_bias),
        ] {
            if here != there {
                unrepresentable.push(format!("`{name}` is {here}, but a {kind} config is read as {there}"));
            }
        }
        if self.experts != read.experts {
            let [here, there] = [self, read].map(|config| format!("{:?}", config.experts));
            unrepresentable.push(format!("`experts` is {here}, but a {kind} config is read as {there}"));
        }
        unrepresentable
    }
}

/// The raw fields of the file. Fields that affect computation are named; all others are kept as extra fields.
#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<u64>,
    max_position_embeddings: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    // Null and a missing field have different meanings.
    #[serde(default, deserialize_with = "deserialize_present")]
    num_key_value_heads: Option<Option<u64>>,
    head_dim: Option<u64>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    // Releases from 5 on write this instead of `rope_theta` and `rope_scaling`.
    rope_parameters: Option<RawRope>,
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
    extra_fields: Map<String, Value>,
}

impl Raw {
    fn check(mut self, kind: LlamaKind) -> Result<LlamaConfig, Vec<String>> {
        let mut errors = ConfigErrors(self.unsupported(kind));
        // Without `num_key_value_heads` each query head has its own key head. For llama the field may be missing; for other members
        // only null means this, and a missing field is an error.
        let is_null = self.num_key_value_heads == Some(None);
        let key_heads = self.num_attention_heads.filter(|_| kind == LlamaKind::Llama || is_null);
        let mut config = LlamaConfig::new(
            kind,
            errors.extent("vocab_size", self.vocab_size, None),
            errors.extent("max_position_embeddings", self.max_position_embeddings, None),
            [
                errors.extent("hidden_size", self.hidden_size, None),
                errors.extent("intermediate_size", self.intermediate_size, None),
            ],
            errors.blocks("num_hidden_layers", self.num_hidden_layers),
            [
                errors.extent("num_attention_heads", self.num_attention_heads, None),
                errors.extent("num_key_value_heads", self.num_key_value_heads.flatten(), key_heads),
            ],
        );
        config.head_dim = self.head_dim(&config, &mut errors);
        let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
        if heads % key_heads != 0 {
            errors.add(format!(
                "`num_attention_heads` is {heads}, not a multiple of {key_heads} key heads (`num_key_value_heads`)"
            ));
        }
        config.windows = sliding_window::read(&self.extra_fields, &config, &mut errors);
        config.experts = kind.has_experts().then(|| experts::read(&self.extra_fields, &config, &mut errors));
        config.rms_norm_eps = errors.number("rms_norm_eps", self.rms_norm_eps, 1e-6, 1.0);
        config.attention_dropout = errors.number("attention_dropout", self.attention_dropout, 0.0, 1.0);
        config.initializer_range = errors.number("initializer_range", self.initializer_range, 0.02, 1e3);
        let objects = [self.rope_parameters.take(), self.rope_scaling.take()];
        config.rope = RawRope::check(objects, self.rope_theta, &mut errors);
        if kind == LlamaKind::Llama || kind.has_head_norms() {
            config.attention_bias = self.attention_bias.unwrap_or(false);
        }
        config.mlp_bias = kind == LlamaKind::Llama && self.mlp_bias.unwrap_or(false);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(false);
        config.dtype = errors.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        for name in ["model_type", "architectures"] {
            self.extra_fields.remove(name);
        }
        config.extra_fields = self.extra_fields;
        errors.into_result(config)
    }

    fn head_dim(&self, config: &LlamaConfig, errors: &mut ConfigErrors) -> usize {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let default = match config.kind {
            LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => 128,
            _ if self.head_dim.is_none() && width % heads != 0 => {
                errors.add(format!(
                    "`hidden_size` is {width}, not a multiple of {heads} heads (`num_attention_heads`)"
                ));
                2
            }
            _ => (width / heads) as u64,
        };
        let channels = errors.extent("head_dim", self.head_dim, Some(default));
        if !channels.is_multiple_of(2) {
            errors.add(format!("heads have {channels} channels, but rotary positions need an even number"));
        }
        channels
    }

    /// Reports fields with unsupported values.
    fn unsupported(&self, kind: LlamaKind) -> Vec<String> {
        let mut errors = Vec::new();
        let activation = self.hidden_act.as_deref().unwrap_or("silu");
        // Two names of the same function.
        if !["silu", "swish"].contains(&activation) {
            errors.push(format!("`hidden_act` is {activation:?}; supported: \"silu\""));
        }
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            errors.push("`partial_rotary_factor` is not 1; partial rotation is not supported, all channels are rotated".to_string());
        }
        if matches!(kind, LlamaKind::Mistral | LlamaKind::Mixtral) && self.attention_bias == Some(true) {
            errors.push(format!("`attention_bias` is true; {} has no attention biases", kind.name()));
        }
        if self.quantization_config.as_ref().is_some_and(|v| !v.is_null()) {
            errors.push("`quantization_config` is set; quantized weights are not supported".to_string());
        }
        errors
    }
}

#[cfg(test)]
mod tests;
