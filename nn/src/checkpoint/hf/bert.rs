//! `config.json` of BERT, as `transformers` reads and writes it.

use super::config_check::{BlockCount, ExpectedShapes};
use super::config_fields::{ConfigErrors, dtype_name, merge_fields, parse_config};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The head of a BERT encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertHead {
    /// `BertModel`: a pooler of the first token.
    Pooler,
    /// `BertForMaskedLM`: logits of the token at each position.
    MaskedLm,
}

/// Config of a BERT encoder.
///
/// Supported are learned positions, bidirectional attention and exact GELU; files with other settings are rejected.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// The head.
    pub head: BertHead,
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The largest number of tokens of a sequence.
    pub max_position_embeddings: usize,
    /// The number of token types (first sentence, second sentence).
    pub type_vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The number of hidden units of the MLP.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of attention heads.
    pub num_attention_heads: usize,
    /// The eps of layer norms, added to the variance.
    pub layer_norm_eps: f64,
    /// The dropout probability after the embeddings, attention and the MLP.
    pub hidden_dropout_prob: f64,
    /// The dropout probability on attention weights.
    pub attention_probs_dropout_prob: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Whether the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// The dtype of the weights in files.
    pub dtype: DType,
    /// Fields without effect here, written back as they were read.
    pub extra_fields: Map<String, Value>,
}

impl BertHead {
    fn architecture(self) -> &'static str {
        match self {
            BertHead::Pooler => "BertModel",
            BertHead::MaskedLm => "BertForMaskedLM",
        }
    }
}

impl BertConfig {
    /// A config with two token types, eps 1e-12 and a tied masked language modeling head, without dropout, in f32.
    #[must_use]
    pub fn new(
        vocab_size: usize,
        max_position_embeddings: usize,
        [hidden_size, intermediate_size]: [usize; 2],
        num_hidden_layers: usize,
        num_attention_heads: usize,
    ) -> BertConfig {
        BertConfig {
            head: BertHead::MaskedLm,
            vocab_size,
            max_position_embeddings,
            type_vocab_size: 2,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            layer_norm_eps: 1e-12,
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            dtype: DType::F32,
            extra_fields: Map::new(),
        }
    }

    /// The names of all presets.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.0)
    }

    /// Returns the config of a preset; `None` for an unknown name.
    #[must_use]
    pub fn preset(name: &str) -> Option<BertConfig> {
        let (_, [vocab, positions, width, hidden, blocks, heads]) = *PRESETS.iter().find(|p| p.0 == name)?;
        Some(BertConfig::new(vocab, positions, [width, hidden], blocks, heads))
    }

    /// Returns the same config with one dropout probability everywhere.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> BertConfig {
        BertConfig { hidden_dropout_prob: p, attention_probs_dropout_prob: p, ..self }
    }

    /// Parses the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`parse_config`].
    pub(super) fn parse(path: &Path, text: &str) -> Result<BertConfig> {
        parse_config(path, text, Raw::check)
    }

    /// The tensor shapes that the config implies.
    pub(super) fn expected_shapes(&self) -> ExpectedShapes {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size));
        let positions = ("max_position_embeddings", self.max_position_embeddings);
        let hidden = ("intermediate_size", self.intermediate_size);
        let matrices = vec![
            ("embeddings.word_embeddings.weight", [vocab, width]),
            ("embeddings.position_embeddings.weight", [positions, width]),
            ("embeddings.token_type_embeddings.weight", [("type_vocab_size", self.type_vocab_size), width]),
            ("encoder.layer.0.intermediate.dense.weight", [hidden, width]),
        ];
        let blocks =
            BlockCount { field: "num_hidden_layers", count: self.num_hidden_layers, name_part: "layer" };
        ExpectedShapes { prefix: "bert.", blocks, matrices }
    }

    /// Returns the text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let own = json!({
            "add_cross_attention": false,
            "architectures": [self.head.architecture()],
            "attention_probs_dropout_prob": self.attention_probs_dropout_prob,
            "hidden_act": "gelu",
            "hidden_dropout_prob": self.hidden_dropout_prob,
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "is_decoder": false,
            "layer_norm_eps": self.layer_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "bert",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype_name(self.dtype),
            "type_vocab_size": self.type_vocab_size,
            "vocab_size": self.vocab_size,
        });
        format!("{:#}\n", merge_fields(&self.extra_fields, own))
    }
}

/// A preset: name, and vocabulary, positions, width, hidden units, blocks, heads.
type Preset = (&'static str, [usize; 6]);

/// The published sizes.
const PRESETS: [Preset; 2] =
    [("bert-base", [30_522, 512, 768, 3072, 12, 12]), ("bert-large", [30_522, 512, 1024, 4096, 24, 16])];

/// The raw fields of the file. Fields that affect computation are named; all others are kept as extra fields.
#[derive(Deserialize)]
struct Raw {
    architectures: Option<Vec<String>>,
    vocab_size: Option<u64>,
    max_position_embeddings: Option<u64>,
    type_vocab_size: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    hidden_dropout_prob: Option<f64>,
    attention_probs_dropout_prob: Option<f64>,
    initializer_range: Option<f64>,
    tie_word_embeddings: Option<bool>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    position_embedding_type: Option<String>,
    is_decoder: Option<bool>,
    add_cross_attention: Option<bool>,
    quantization_config: Option<Value>,
    #[serde(flatten)]
    extra_fields: Map<String, Value>,
}

impl Raw {
    fn check(mut self) -> Result<BertConfig, Vec<String>> {
        let mut errors = ConfigErrors(self.unsupported());
        let mut config = BertConfig::new(
            errors.extent("vocab_size", self.vocab_size, None),
            errors.extent("max_position_embeddings", self.max_position_embeddings, None),
            [
                errors.extent("hidden_size", self.hidden_size, None),
                errors.extent("intermediate_size", self.intermediate_size, None),
            ],
            errors.blocks("num_hidden_layers", self.num_hidden_layers),
            errors.extent("num_attention_heads", self.num_attention_heads, None),
        );
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        if self.num_attention_heads.is_some() && width % heads != 0 {
            errors.add(format!(
                "`hidden_size` is {width}, not a multiple of {heads} heads (`num_attention_heads`)"
            ));
        }
        config.type_vocab_size = errors.extent("type_vocab_size", self.type_vocab_size, Some(2));
        config.layer_norm_eps = errors.number("layer_norm_eps", self.layer_norm_eps, 1e-12, 1.0);
        config.hidden_dropout_prob = errors.number("hidden_dropout_prob", self.hidden_dropout_prob, 0.1, 1.0);
        config.attention_probs_dropout_prob =
            errors.number("attention_probs_dropout_prob", self.attention_probs_dropout_prob, 0.1, 1.0);
        config.initializer_range = errors.number("initializer_range", self.initializer_range, 0.02, 1e3);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(true);
        config.dtype = errors.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        config.head = match self.architectures.as_deref().and_then(|names| names.first()).map(String::as_str)
        {
            None | Some("BertModel") => BertHead::Pooler,
            // The next sentence prediction head of pretraining is ignored.
            Some("BertForMaskedLM" | "BertForPreTraining") => BertHead::MaskedLm,
            Some(other) => {
                errors.add(format!("`architectures` names {other:?}; supported: BertModel, BertForMaskedLM"));
                BertHead::Pooler
            }
        };
        self.extra_fields.remove("model_type");
        config.extra_fields = self.extra_fields;
        errors.into_result(config)
    }

    /// Reports fields with unsupported values.
    fn unsupported(&self) -> Vec<String> {
        let mut errors = Vec::new();
        let activation = self.hidden_act.as_deref().unwrap_or("gelu");
        if activation != "gelu" {
            errors.push(format!("`hidden_act` is {activation:?}; supported: \"gelu\""));
        }
        let positions = self.position_embedding_type.as_deref().unwrap_or("absolute");
        if positions != "absolute" {
            errors.push(format!("`position_embedding_type` is {positions:?}; supported: \"absolute\""));
        }
        for (name, value) in
            [("is_decoder", self.is_decoder), ("add_cross_attention", self.add_cross_attention)]
        {
            if value == Some(true) {
                errors.push(format!("`{name}` is true; only encoders are supported"));
            }
        }
        if self.quantization_config.as_ref().is_some_and(|q| !q.is_null()) {
            errors.push("`quantization_config` is set; quantized weights are not supported".to_string());
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The config of a published sentence encoder.
    const PUBLISHED: &str = r#"{
        "_name_or_path": "x", "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": false, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 384,
        "initializer_range": 0.02, "intermediate_size": 1536, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
        "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 6, "pad_token_id": 0,
        "position_embedding_type": "absolute", "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": true,
        "vocab_size": 30522
    }"#;

    fn parse(text: &str) -> Result<BertConfig> {
        BertConfig::parse(Path::new("config.json"), text)
    }

    #[test]
    fn a_published_config_is_read_and_written_back() {
        let read = parse(PUBLISHED).unwrap();
        assert_eq!((read.head, read.hidden_size, read.num_hidden_layers), (BertHead::Pooler, 384, 6));
        assert_eq!((read.layer_norm_eps, read.hidden_dropout_prob), (1e-12, 0.1));
        assert_eq!(parse(&read.to_json()).unwrap(), read);
        let written: Map<String, Value> = serde_json::from_str(&read.to_json()).unwrap();
        assert_eq!(written["_name_or_path"], "x");
        assert_eq!(written["architectures"], json!(["BertModel"]));
    }

    #[test]
    fn unsupported_fields_are_named() {
        let error_text = |from: &str, to: &str| {
            assert!(PUBLISHED.contains(from), "{from}");
            parse(&PUBLISHED.replacen(from, to, 1)).unwrap_err().details()[0].1.clone()
        };
        assert_eq!(error_text("\"gelu\"", "\"relu\""), "`hidden_act` is \"relu\"; supported: \"gelu\"");
        assert_eq!(
            error_text("\"absolute\"", "\"relative_key\""),
            "`position_embedding_type` is \"relative_key\"; supported: \"absolute\""
        );
        assert_eq!(
            error_text("\"use_cache\": true", "\"is_decoder\": true"),
            "`is_decoder` is true; only encoders are supported"
        );
        assert_eq!(
            error_text("\"BertModel\"", "\"BertForTokenClassification\""),
            "`architectures` names \"BertForTokenClassification\"; supported: BertModel, BertForMaskedLM"
        );
        assert_eq!(
            error_text("\"hidden_size\": 384", "\"hidden_size\": 385"),
            "`hidden_size` is 385, not a multiple of 12 heads (`num_attention_heads`)"
        );
        assert!(error_text("\"use_cache\": true", "\"quantization_config\": {}").contains("quantized"));
        assert_eq!(error_text("\"vocab_size\": 30522", "\"x\": 1"), "`vocab_size` is missing");
        assert_eq!(parse("{}").unwrap_err().details().len(), 6);
    }
}
