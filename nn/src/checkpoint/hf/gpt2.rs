//! GPT-2's `config.json`, as `transformers` reads and writes it.

use super::config_check::{BlockCount, ExpectedShapes};
use super::config_fields::{ConfigErrors, TokenIds, dtype_name, merge_fields, parse_config};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// Config of a GPT-2 model.
///
/// Supported are GELU in its tanh form, `n_embd` a multiple of the heads, and attention scaled by the square root of the head size;
/// files with other settings are rejected.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The largest number of tokens of a sequence.
    pub n_positions: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// The number of blocks.
    pub n_layer: usize,
    /// The number of attention heads.
    pub n_head: usize,
    /// The number of hidden units of the MLP; `None` is `4 * n_embd`.
    pub n_inner: Option<usize>,
    /// The eps of layer norms, added to the variance.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// The dropout probability after the embeddings.
    pub embd_pdrop: f64,
    /// The dropout probability on attention weights.
    pub attn_pdrop: f64,
    /// The dropout probability before each addition to the residual stream.
    pub resid_pdrop: f64,
    /// Whether the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// The token that begins a text, if any.
    pub bos_token_id: Option<usize>,
    /// The token that ends a text, if any.
    pub eos_token_id: Option<usize>,
    /// More tokens that end a text.
    pub extra_eos_token_ids: Vec<usize>,
    /// The dtype of the weights in files.
    pub dtype: DType,
    /// Fields without effect here, written back as they were read.
    pub extra_fields: Map<String, Value>,
}

/// The preset names and their shapes: (name, vocabulary, positions, width, blocks, heads).
///
/// `nano` is for trying out options and `tiny` for a laptop, both for bytes of text; `s`, `m` and `l` are benchmark sizes; `gpt2-*`
/// are the published models, named by their parameter count.
const PRESETS: [(&str, usize, usize, usize, usize, usize); 9] = [
    ("nano", 256, 64, 32, 4, 4),
    ("tiny", 256, 64, 128, 4, 4),
    ("s", 512, 128, 256, 4, 4),
    ("m", 4096, 256, 384, 6, 6),
    ("l", 8192, 256, 768, 12, 12),
    ("gpt2-124m", 50257, 1024, 768, 12, 12),
    ("gpt2-355m", 50257, 1024, 1024, 24, 16),
    ("gpt2-774m", 50257, 1024, 1280, 36, 20),
    ("gpt2-1558m", 50257, 1024, 1600, 48, 25),
];

impl Gpt2Config {
    /// A config with GPT-2's remaining defaults, without dropout, in f32.
    #[must_use]
    pub fn new(
        vocab_size: usize,
        n_positions: usize,
        n_embd: usize,
        n_layer: usize,
        n_head: usize,
    ) -> Gpt2Config {
        Gpt2Config {
            vocab_size,
            n_positions,
            n_embd,
            n_layer,
            n_head,
            n_inner: None,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            resid_pdrop: 0.0,
            tie_word_embeddings: true,
            bos_token_id: None,
            eos_token_id: None,
            extra_eos_token_ids: Vec::new(),
            dtype: DType::F32,
            extra_fields: Map::new(),
        }
    }

    /// The names of all presets, smallest first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|p| p.0)
    }

    /// Returns the config of a preset; `None` for an unknown name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Gpt2Config> {
        let &(name, vocab, positions, width, blocks, heads) = PRESETS.iter().find(|p| p.0 == name)?;
        let mut config = Gpt2Config::new(vocab, positions, width, blocks, heads);
        // The benchmark sizes have an untied output layer, as the models of the peers have.
        config.tie_word_embeddings = !matches!(name, "s" | "m" | "l");
        if name.starts_with("gpt2-") {
            (config.bos_token_id, config.eos_token_id) = (Some(vocab - 1), Some(vocab - 1));
        }
        Some(config)
    }

    /// The number of hidden units of the MLP.
    #[must_use]
    pub fn mlp_hidden_size(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    /// Returns the same config with one dropout probability everywhere.
    #[must_use]
    pub fn with_dropout(mut self, p: f64) -> Gpt2Config {
        (self.embd_pdrop, self.attn_pdrop, self.resid_pdrop) = (p, p, p);
        self
    }

    /// The tensor shapes that the config implies.
    pub(super) fn expected_shapes(&self) -> ExpectedShapes {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("n_embd", self.n_embd));
        let mut matrices = vec![
            ("wte.weight", [vocab, width]),
            ("wpe.weight", [("n_positions", self.n_positions), width]),
            ("h.0.mlp.c_fc.weight", [width, ("n_inner", self.mlp_hidden_size())]),
        ];
        if !self.tie_word_embeddings {
            matrices.push(("lm_head.weight", [vocab, width]));
        }
        let blocks = BlockCount { field: "n_layer", count: self.n_layer, name_part: "h" };
        ExpectedShapes { prefix: "transformer.", blocks, matrices }
    }

    /// Parses the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`parse_config`].
    pub(super) fn parse(path: &Path, text: &str) -> Result<Gpt2Config> {
        parse_config(path, text, Raw::check)
    }

    /// Returns the text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let own = json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": self.attn_pdrop,
            "bos_token_id": self.bos_token_id,
            "embd_pdrop": self.embd_pdrop,
            "eos_token_id": self.eos_json(),
            "initializer_range": self.initializer_range,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "model_type": "gpt2",
            "n_embd": self.n_embd,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "n_layer": self.n_layer,
            "n_positions": self.n_positions,
            "resid_pdrop": self.resid_pdrop,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype_name(self.dtype),
            "vocab_size": self.vocab_size,
        });
        format!("{:#}\n", merge_fields(&self.extra_fields, own))
    }

    /// `eos_token_id`: one token or a list, as `transformers` writes it.
    fn eos_json(&self) -> Value {
        match (self.eos_token_id, &self.extra_eos_token_ids[..]) {
            (end, []) => json!(end),
            (end, others) => end.iter().chain(others).copied().collect(),
        }
    }
}

/// The raw fields of the file. Fields that affect computation are named; all others are kept as extra fields.
#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<u64>,
    n_positions: Option<u64>,
    n_embd: Option<u64>,
    n_layer: Option<u64>,
    n_head: Option<u64>,
    n_inner: Option<u64>,
    activation_function: Option<String>,
    layer_norm_epsilon: Option<f64>,
    initializer_range: Option<f64>,
    embd_pdrop: Option<f64>,
    attn_pdrop: Option<f64>,
    resid_pdrop: Option<f64>,
    tie_word_embeddings: Option<bool>,
    bos_token_id: Option<u64>,
    eos_token_id: Option<TokenIds>,
    torch_dtype: Option<String>,
    // The name in newer releases of `transformers`; some files have both.
    dtype: Option<String>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    add_cross_attention: Option<bool>,
    pruned_heads: Option<Value>,
    quantization_config: Option<Value>,
    #[serde(flatten)]
    extra_fields: Map<String, Value>,
}

impl Raw {
    fn check(mut self) -> Result<Gpt2Config, Vec<String>> {
        let mut errors = ConfigErrors(self.unsupported());
        let mut config = Gpt2Config::new(
            errors.extent("vocab_size", self.vocab_size, None),
            errors.extent("n_positions", self.n_positions, None),
            errors.extent("n_embd", self.n_embd, None),
            errors.blocks("n_layer", self.n_layer),
            errors.extent("n_head", self.n_head, None),
        );
        config.n_inner = self.n_inner.map(|n| errors.extent("n_inner", Some(n), None));
        if let (Some(width @ 1..), Some(heads @ 1..)) = (self.n_embd, self.n_head)
            && width % heads != 0
        {
            errors.add(format!("`n_embd` is {width}, not a multiple of {heads} heads (`n_head`)"));
        }
        // Missing fields get the defaults of GPT-2.
        config.layer_norm_epsilon = errors.number("layer_norm_epsilon", self.layer_norm_epsilon, 1e-5, 1.0);
        config.initializer_range = errors.number("initializer_range", self.initializer_range, 0.02, 1e3);
        config.embd_pdrop = errors.number("embd_pdrop", self.embd_pdrop, 0.1, 1.0);
        config.attn_pdrop = errors.number("attn_pdrop", self.attn_pdrop, 0.1, 1.0);
        config.resid_pdrop = errors.number("resid_pdrop", self.resid_pdrop, 0.1, 1.0);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(true);
        // Not checked against the vocabulary: files for `generate` of `transformers` may name a token outside it.
        config.bos_token_id = self.bos_token_id.and_then(|id| usize::try_from(id).ok());
        let mut ends = self.eos_token_id.as_ref().map_or_else(Vec::new, TokenIds::list).into_iter();
        (config.eos_token_id, config.extra_eos_token_ids) = (ends.next(), ends.collect());
        config.dtype = errors.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        self.extra_fields.remove("architectures");
        self.extra_fields.remove("model_type");
        config.extra_fields = self.extra_fields;
        errors.into_result(config)
    }

    /// Reports fields with unsupported values.
    fn unsupported(&self) -> Vec<String> {
        let mut errors = Vec::new();
        let activation = self.activation_function.as_deref().unwrap_or("gelu_new");
        // Two names of the same function.
        if !["gelu_new", "gelu_pytorch_tanh"].contains(&activation) {
            errors.push(format!("`activation_function` is {activation:?}; supported: \"gelu_new\""));
        }
        for (name, value, usual) in [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("add_cross_attention", self.add_cross_attention, false),
        ] {
            if value.is_some_and(|v| v != usual) {
                errors.push(format!("`{name}` is {}; supported: {usual}", !usual));
            }
        }
        if self.pruned_heads.as_ref().is_some_and(|v| v.as_object().is_none_or(|map| !map.is_empty())) {
            errors.push("`pruned_heads` is not empty; pruned heads are not supported".to_string());
        }
        if self.quantization_config.as_ref().is_some_and(|v| !v.is_null()) {
            errors.push("`quantization_config` is set; quantized weights are not supported".to_string());
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use crate::checkpoint::file_names::{CONFIG_BYTES_MAX, CONFIG_FILE};
    use crate::checkpoint::hf::ModelConfig;
    use shardgrad_tensor::{Error, Kind};

    /// The fields of the published 124M model that matter, and some that do not.
    const PUBLISHED: &str = r#"{
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
    }"#;

    fn parse(text: &str) -> Result<Gpt2Config> {
        Gpt2Config::parse(Path::new("config.json"), text)
    }

    fn changed(from: &str, to: &str) -> Error {
        assert!(PUBLISHED.contains(from), "{from}");
        let error = parse(&PUBLISHED.replacen(from, to, 1)).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        error
    }

    fn error_text(from: &str, to: &str) -> String {
        let error = changed(from, to);
        assert_eq!(error.message(), "config.json: describes a model that this version does not support");
        error.details()[0].1.clone()
    }

    #[test]
    fn the_published_config_equals_the_preset() {
        let preset = Gpt2Config::preset("gpt2-124m").unwrap();
        let read = parse(PUBLISHED).unwrap();
        assert_eq!(Gpt2Config { extra_fields: Map::new(), ..read }, preset.with_dropout(0.1));
        assert!(Gpt2Config::preset_names().all(|name| {
            let config = Gpt2Config::preset(name).unwrap();
            config.n_embd.is_multiple_of(config.n_head) && parse(&config.to_json()).unwrap() == config
        }));
        assert_eq!(Gpt2Config::preset("huge"), None);
    }

    #[test]
    fn written_configs_are_read_back() {
        let dir = Scratch::new();
        let mut config = Gpt2Config::new(256, 64, 32, 2, 4).with_dropout(0.25);
        config.n_inner = Some(96);
        config.tie_word_embeddings = false;
        config.eos_token_id = Some(3);
        config.dtype = DType::BF16;
        ModelConfig::from(config.clone()).write(&dir.path("")).unwrap();
        assert_eq!(ModelConfig::read(&dir.path("")).unwrap(), ModelConfig::from(config.clone()));
        assert_eq!(config.mlp_hidden_size(), 96);
        let value: Value = serde_json::from_str(&config.to_json()).unwrap();
        assert_eq!(value["architectures"][0], "GPT2LMHeadModel");
        assert_eq!(value["torch_dtype"], "bfloat16");
        assert_eq!(value["bos_token_id"], Value::Null);
        assert_eq!(value["layer_norm_epsilon"], 1e-5);
    }

    #[test]
    fn extra_fields_are_written_back() {
        let kept = [
            ("pad_token_id", json!(50256)),
            ("use_cache", json!(false)),
            ("task_specific_params", json!({"text-generation": {"do_sample": true}})),
            ("id2label", json!({"0": "good"})),
        ];
        let fields: String = kept.iter().map(|(name, value)| format!(", \"{name}\": {value}")).collect();
        let own = Gpt2Config::new(8, 4, 4, 1, 2).to_json();
        let read = parse(&format!("{}{fields}}}", own.trim_end().strip_suffix('}').unwrap())).unwrap();
        assert_eq!(read.extra_fields.len(), kept.len(), "{:?}", read.extra_fields);
        let mut read = Gpt2Config { n_layer: 3, ..read };
        // An extra field never overrides a field of the config.
        read.extra_fields.insert("n_embd".to_string(), json!(1));
        let written: Value = serde_json::from_str(&read.to_json()).unwrap();
        for (name, value) in kept.into_iter().chain([("n_layer", json!(3)), ("n_embd", json!(4))]) {
            assert_eq!(written[name], value, "{name}");
        }
    }

    #[test]
    fn eos_token_id_may_be_a_list() {
        let read = |ends: &str| parse(&PUBLISHED.replacen("\"eos_token_id\": 50256", ends, 1)).unwrap();
        for (field, first, others) in [
            ("\"eos_token_id\": [0, 1]", Some(0), vec![1]),
            ("\"eos_token_id\": [7]", Some(7), vec![]),
            ("\"eos_token_id\": []", None, vec![]),
            ("\"eos_token_id\": null", None, vec![]),
        ] {
            let config = read(field);
            assert_eq!((config.eos_token_id, &config.extra_eos_token_ids), (first, &others), "{field}");
            assert_eq!(parse(&config.to_json()).unwrap(), config);
        }
    }

    #[test]
    fn newer_field_names_and_defaults_are_read() {
        let text = r#"{"model_type":"gpt2","vocab_size":8,"n_positions":4,"n_embd":4,"n_layer":1,"n_head":2,
            "dtype":"torch.float16","activation_function":"gelu_pytorch_tanh","pruned_heads":{}}"#;
        let config = parse(text).unwrap();
        assert_eq!((config.dtype, config.attn_pdrop, config.mlp_hidden_size()), (DType::F16, 0.1, 16));
        assert!(config.tie_word_embeddings);
    }

    #[test]
    fn fields_of_a_wrong_type_are_rejected() {
        let message = |from: &str, to: &str| changed(from, to).message().to_string();
        assert!(message("768", "-768").contains("expected u64"));
        assert!(message("768", "768.5").contains("expected u64"));
        assert_eq!(
            message("768", "\"768\""),
            "config.json: `n_embd` cannot be read: invalid type: string \"768\", expected u64"
        );
        let field = format!("\"gpt2\", \"n_inner\": {:?}", "x".repeat(1000));
        let long = message("\"gpt2\"", &field);
        assert!(long.starts_with("config.json: `n_inner` cannot be read: ") && long.len() < 300, "{long}");
        assert!(message("0.1", "1e999").contains("number out of range at line 2"));
        assert!(message("{", "[").contains("cannot be read as a model config"));
        assert!(message("768", "768, \"n_embd\": 8").contains("duplicate field `n_embd`"));
    }

    #[test]
    fn unsupported_fields_are_named() {
        assert_eq!(
            error_text("\"gelu_new\"", "\"relu\""),
            "`activation_function` is \"relu\"; supported: \"gelu_new\""
        );
        assert_eq!(error_text("\"n_embd\": 768,", ""), "`n_embd` is missing");
        assert_eq!(error_text("768", "770"), "`n_embd` is 770, not a multiple of 12 heads (`n_head`)");
        assert_eq!(
            error_text("\"n_layer\": 12", "\"n_layer\": 0"),
            "`n_layer` is 0, but must be in 1..=4096"
        );
        assert_eq!(
            error_text("\"n_layer\": 12", "\"n_layer\": 1000000000"),
            "`n_layer` is 1000000000, but must be in 1..=4096"
        );
        assert_eq!(
            error_text("\"n_ctx\": 1024", "\"n_inner\": 0"),
            "`n_inner` is 0, but must be in 1..=16777216"
        );
        assert_eq!(
            error_text("\"attn_pdrop\": 0.1", "\"attn_pdrop\": 1"),
            "`attn_pdrop` is 1, but must be in [0, 1)"
        );
        assert_eq!(error_text("1e-05", "-1e-05"), "`layer_norm_epsilon` is -0.00001, but must be in [0, 1)");
        let add = |field: &str| error_text("\"n_ctx\": 1024", field);
        assert_eq!(add("\"scale_attn_weights\": false"), "`scale_attn_weights` is false; supported: true");
        assert_eq!(
            add("\"scale_attn_by_inverse_layer_idx\": true"),
            "`scale_attn_by_inverse_layer_idx` is true; supported: false"
        );
        assert_eq!(add("\"add_cross_attention\": true"), "`add_cross_attention` is true; supported: false");
        assert_eq!(
            add("\"pruned_heads\": {\"0\": [1]}"),
            "`pruned_heads` is not empty; pruned heads are not supported"
        );
        assert!(add("\"quantization_config\": {}").starts_with("`quantization_config` is set"));
        assert_eq!(
            add("\"torch_dtype\": \"float32\", \"dtype\": \"bfloat16\""),
            "`torch_dtype` is \"float32\", but `dtype` is \"bfloat16\""
        );
        assert!(
            add("\"torch_dtype\": \"int8\"").starts_with("`torch_dtype` is \"int8\"; supported: float64")
        );
        assert!(add("\"dtype\": \"int8\"").starts_with("`dtype` is \"int8\"; supported: float64"));
    }

    #[test]
    fn all_errors_are_reported_at_once() {
        let error =
            parse(r#"{"model_type":"gpt2","n_embd":0,"n_head":3,"activation_function":"silu"}"#).unwrap_err();
        let errors: Vec<&str> = error.details().iter().map(|d| d.1.split('`').nth(1).unwrap()).collect();
        assert_eq!(errors, ["activation_function", "vocab_size", "n_positions", "n_embd", "n_layer"]);
    }

    #[test]
    fn a_missing_config_file_is_named() {
        let dir = Scratch::new();
        let error = ModelConfig::read(&dir.path("")).unwrap_err();
        assert!(error.message().ends_with("config.json: no such file"), "{error}");
        assert_eq!(error.details()[0].1, "a model folder holds config.json and model.safetensors");
        dir.file(CONFIG_FILE, &vec![b' '; CONFIG_BYTES_MAX as usize + 1]);
        assert!(ModelConfig::read(&dir.path("")).unwrap_err().message().contains("at most 1048576 are read"));
    }
}
