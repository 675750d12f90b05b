//! `config.json` of BERT, as `transformers` reads and writes it.

use super::disk::refuse;
use super::fields::{Faults, below, dtype_name, fields};
use super::fit::Claims;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// What stands behind the blocks of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertHead {
    /// `BertModel`: a product of the first token's vector, or nothing.
    Pooler,
    /// `BertForMaskedLM`: scores of the token at each place.
    Tokens,
}

/// The shape of a BERT encoder and what else its config file tells.
///
/// Positions are learned, every token sees all others, GELU is the exact one; files that say otherwise are refused.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// What stands behind the blocks.
    pub head: BertHead,
    /// The number of tokens.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// The number of types that a token may have: of the first sentence, of the second.
    pub type_vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the hidden layer of the MLP.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of heads.
    pub num_attention_heads: usize,
    /// What is added to the variance in norms.
    pub layer_norm_eps: f64,
    /// The dropout probability behind embeddings and in both halves of a block.
    pub hidden_dropout_prob: f64,
    /// The dropout probability on attention weights.
    pub attention_probs_dropout_prob: f64,
    /// The standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Whether the scores of tokens are products with the token embedding.
    pub tie_word_embeddings: bool,
    /// The dtype of the stored weights.
    pub dtype: DType,
    /// Fields that change nothing here: written back as they were read.
    pub others: Map<String, Value>,
}

impl BertHead {
    fn architecture(self) -> &'static str {
        match self {
            BertHead::Pooler => "BertModel",
            BertHead::Tokens => "BertForMaskedLM",
        }
    }
}

impl BertConfig {
    /// A config of so many tokens, positions and blocks, `[width, hidden units]`, and heads; with two types, eps 1e-12, the
    /// tied head of tokens, without dropout, in f32.
    #[must_use]
    pub fn new(
        vocab_size: usize,
        max_position_embeddings: usize,
        [hidden_size, intermediate_size]: [usize; 2],
        num_hidden_layers: usize,
        num_attention_heads: usize,
    ) -> BertConfig {
        BertConfig {
            head: BertHead::Tokens,
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
            others: Map::new(),
        }
    }

    /// The names that [`BertConfig::preset`] knows.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.0)
    }

    /// The config of a preset name.
    #[must_use]
    pub fn preset(name: &str) -> Option<BertConfig> {
        let (_, [vocab, positions, width, hidden, blocks, heads]) = *PRESETS.iter().find(|p| p.0 == name)?;
        Some(BertConfig::new(vocab, positions, [width, hidden], blocks, heads))
    }

    /// The same model with one dropout probability everywhere.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> BertConfig {
        BertConfig { hidden_dropout_prob: p, attention_probs_dropout_prob: p, ..self }
    }

    /// Reads the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// `Kind::Checkpoint` if it is no JSON or describes a model that is not this one; all missing and unsupported fields
    /// are listed at once.
    pub(super) fn parse(path: &Path, text: &str) -> Result<BertConfig> {
        let raw: Raw = fields(path, text)?;
        raw.check().map_err(|faults| {
            let error = refuse(path, "describes a model that this version does not run");
            faults.into_iter().fold(error, |error, fault| error.detail("field", fault))
        })
    }

    /// What the config tells of tensors in files.
    pub(super) fn claims(&self) -> Claims {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size));
        let positions = ("max_position_embeddings", self.max_position_embeddings);
        let hidden = ("intermediate_size", self.intermediate_size);
        let matrices = vec![
            ("embeddings.word_embeddings.weight", [vocab, width]),
            ("embeddings.position_embeddings.weight", [positions, width]),
            ("embeddings.token_type_embeddings.weight", [("type_vocab_size", self.type_vocab_size), width]),
            ("encoder.layer.0.intermediate.dense.weight", [hidden, width]),
        ];
        Claims { prefix: "bert.", blocks: ("num_hidden_layers", self.num_hidden_layers, "layer"), matrices }
    }

    /// The text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let told = json!({
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
        format!("{:#}\n", below(&self.others, told))
    }
}

/// A preset: name, and vocabulary, positions, width, hidden units, blocks, heads.
type Preset = (&'static str, [usize; 6]);

/// The published models.
const PRESETS: [Preset; 2] =
    [("bert-base", [30_522, 512, 768, 3072, 12, 12]), ("bert-large", [30_522, 512, 1024, 4096, 24, 16])];

/// What is read. A field that changes what the model computes is named here; all others are kept.
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
    others: Map<String, Value>,
}

impl Raw {
    fn check(mut self) -> Result<BertConfig, Vec<String>> {
        let mut faults = Faults(self.unsupported());
        let mut config = BertConfig::new(
            faults.extent("vocab_size", self.vocab_size, None),
            faults.extent("max_position_embeddings", self.max_position_embeddings, None),
            [
                faults.extent("hidden_size", self.hidden_size, None),
                faults.extent("intermediate_size", self.intermediate_size, None),
            ],
            faults.blocks("num_hidden_layers", self.num_hidden_layers),
            faults.extent("num_attention_heads", self.num_attention_heads, None),
        );
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        if self.num_attention_heads.is_some() && width % heads != 0 {
            faults.add(format!(
                "`hidden_size` is {width}, which {heads} heads (`num_attention_heads`) do not divide"
            ));
        }
        config.type_vocab_size = faults.extent("type_vocab_size", self.type_vocab_size, Some(2));
        config.layer_norm_eps = faults.number("layer_norm_eps", self.layer_norm_eps, 1e-12, 1.0);
        config.hidden_dropout_prob = faults.number("hidden_dropout_prob", self.hidden_dropout_prob, 0.1, 1.0);
        config.attention_probs_dropout_prob =
            faults.number("attention_probs_dropout_prob", self.attention_probs_dropout_prob, 0.1, 1.0);
        config.initializer_range = faults.number("initializer_range", self.initializer_range, 0.02, 1e3);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(true);
        config.dtype = faults.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        config.head = match self.architectures.as_deref().and_then(|names| names.first()).map(String::as_str)
        {
            None | Some("BertModel") => BertHead::Pooler,
            // The second head of a pre-training judges pairs of sentences; it is passed over.
            Some("BertForMaskedLM" | "BertForPreTraining") => BertHead::Tokens,
            Some(other) => {
                faults.add(format!("`architectures` names {other:?}; run are BertModel, BertForMaskedLM"));
                BertHead::Pooler
            }
        };
        self.others.remove("model_type");
        config.others = self.others;
        faults.none_or(config)
    }

    /// Fields whose value asks for something that the model text does not do.
    fn unsupported(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let activation = self.hidden_act.as_deref().unwrap_or("gelu");
        if activation != "gelu" {
            faults.push(format!("`hidden_act` is {activation:?}; run is \"gelu\""));
        }
        let positions = self.position_embedding_type.as_deref().unwrap_or("absolute");
        if positions != "absolute" {
            faults.push(format!("`position_embedding_type` is {positions:?}; run is \"absolute\""));
        }
        for (name, value) in
            [("is_decoder", self.is_decoder), ("add_cross_attention", self.add_cross_attention)]
        {
            if value == Some(true) {
                faults.push(format!("`{name}` is true; run are encoders"));
            }
        }
        if self.quantization_config.as_ref().is_some_and(|q| !q.is_null()) {
            faults.push("`quantization_config`: weights are quantized; run are floats".to_string());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A published encoder of sentences.
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
    fn each_unsupported_field_is_named() {
        let fault = |from: &str, to: &str| {
            assert!(PUBLISHED.contains(from), "{from}");
            parse(&PUBLISHED.replacen(from, to, 1)).unwrap_err().details()[0].1.clone()
        };
        assert_eq!(fault("\"gelu\"", "\"relu\""), "`hidden_act` is \"relu\"; run is \"gelu\"");
        assert_eq!(
            fault("\"absolute\"", "\"relative_key\""),
            "`position_embedding_type` is \"relative_key\"; run is \"absolute\""
        );
        assert_eq!(
            fault("\"use_cache\": true", "\"is_decoder\": true"),
            "`is_decoder` is true; run are encoders"
        );
        assert_eq!(
            fault("\"BertModel\"", "\"BertForTokenClassification\""),
            "`architectures` names \"BertForTokenClassification\"; run are BertModel, BertForMaskedLM"
        );
        assert_eq!(
            fault("\"hidden_size\": 384", "\"hidden_size\": 385"),
            "`hidden_size` is 385, which 12 heads (`num_attention_heads`) do not divide"
        );
        assert!(fault("\"use_cache\": true", "\"quantization_config\": {}").contains("quantized"));
        assert_eq!(fault("\"vocab_size\": 30522", "\"x\": 1"), "`vocab_size` is missing");
        assert_eq!(parse("{}").unwrap_err().details().len(), 6);
    }
}
