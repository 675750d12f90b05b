//! GPT-2's `config.json`, as `transformers` reads and writes it.

use super::disk::{refuse, write_text};
use super::fields::{CONFIG_FILE, Faults, Ids, below, dtype_name, fields};
use super::fit::{Claims, config_text};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The shape of a GPT-2 model and what else its config file tells.
///
/// The activation is the tanh form of GELU, heads divide `n_embd` evenly, and attention is scaled by the
/// square root of the head size; files that say otherwise are refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// The number of tokens.
    pub vocab_size: usize,
    /// The longest sequence.
    pub n_positions: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// The number of blocks.
    pub n_layer: usize,
    /// The number of attention heads.
    pub n_head: usize,
    /// The width of the hidden layer of the MLP; `None` is `4 * n_embd`.
    pub n_inner: Option<usize>,
    /// What is added to the variance in layer norms.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of fresh weights.
    pub initializer_range: f64,
    /// The dropout probability after the embeddings.
    pub embd_pdrop: f64,
    /// The dropout probability on attention weights.
    pub attn_pdrop: f64,
    /// The dropout probability before each addition to the residual stream.
    pub resid_pdrop: f64,
    /// Whether the output layer is the token embedding, transposed.
    pub tie_word_embeddings: bool,
    /// The token that begins a text, if there is one.
    pub bos_token_id: Option<usize>,
    /// The token that ends a text, if there is one.
    pub eos_token_id: Option<usize>,
    /// Others that end a text too.
    pub other_eos_token_ids: Vec<usize>,
    /// The dtype of the stored weights.
    pub dtype: DType,
    /// Fields that change nothing here: written back as they were read.
    pub others: Map<String, Value>,
}

/// The preset names and their shapes: (name, vocabulary, positions, width, blocks, heads).
///
/// `tiny` is made for bytes of text on a laptop; `s`, `m` and `l` are measuring sizes; the `gpt2-` ones are
/// the published models, named by their parameter count.
const PRESETS: [(&str, usize, usize, usize, usize, usize); 8] = [
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
            other_eos_token_ids: Vec::new(),
            dtype: DType::F32,
            others: Map::new(),
        }
    }

    /// The names that [`Gpt2Config::preset`] knows, smallest first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|p| p.0)
    }

    /// The config of a preset name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Gpt2Config> {
        let &(name, vocab, positions, width, blocks, heads) = PRESETS.iter().find(|p| p.0 == name)?;
        let mut config = Gpt2Config::new(vocab, positions, width, blocks, heads);
        // The measuring sizes are those of peers, whose output layer is a matrix of its own.
        config.tie_word_embeddings = !matches!(name, "s" | "m" | "l");
        if name.starts_with("gpt2-") {
            (config.bos_token_id, config.eos_token_id) = (Some(vocab - 1), Some(vocab - 1));
        }
        Some(config)
    }

    /// The width of the hidden layer of the MLP.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    /// The same model with one dropout probability everywhere.
    #[must_use]
    pub fn with_dropout(mut self, p: f64) -> Gpt2Config {
        (self.embd_pdrop, self.attn_pdrop, self.resid_pdrop) = (p, p, p);
        self
    }

    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if the file is missing, is no JSON, or describes a model that is not this one, or not that of the
    /// weights beside it; all missing and unsupported fields are listed at once. `Kind::Io` if the system refuses. As
    /// [`Weights::open`](super::Weights::open) if there are weights.
    pub fn read(dir: &Path) -> Result<Gpt2Config> {
        let (path, text) = config_text(dir)?;
        let config = Gpt2Config::parse(&path, &text)?;
        config.claims().check(dir)?;
        Ok(config)
    }

    /// What the config tells of tensors in files.
    pub(super) fn claims(&self) -> Claims {
        let (vocab, width) = (("vocab_size", self.vocab_size), ("n_embd", self.n_embd));
        let mut matrices = vec![
            ("wte.weight", [vocab, width]),
            ("wpe.weight", [("n_positions", self.n_positions), width]),
            ("h.0.mlp.c_fc.weight", [width, ("n_inner", self.hidden())]),
        ];
        if !self.tie_word_embeddings {
            matrices.push(("lm_head.weight", [vocab, width]));
        }
        Claims { prefix: "transformer.", blocks: ("n_layer", self.n_layer, "h"), matrices }
    }

    /// Reads the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`Gpt2Config::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Gpt2Config> {
        let raw: Raw = fields(path, text)?;
        if raw.model_type.as_deref() != Some("gpt2") {
            let found = raw.model_type.map_or("is missing".to_string(), |m| format!("is {m:?}"));
            let error = refuse(path, format_args!("`model_type` {found}; this version reads \"gpt2\""));
            return Err(error.detail("help", "give the folder of a GPT-2 model with --model"));
        }
        raw.check().map_err(|faults| {
            let error = refuse(path, "describes a model that this version does not run");
            faults.into_iter().fold(error, |error, fault| error.detail("field", fault))
        })
    }

    /// The text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let told = json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": self.attn_pdrop,
            "bos_token_id": self.bos_token_id,
            "embd_pdrop": self.embd_pdrop,
            "eos_token_id": self.ends(),
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
        format!("{:#}\n", below(&self.others, told))
    }

    /// One token or a list, as `transformers` writes it.
    fn ends(&self) -> Value {
        match (self.eos_token_id, &self.other_eos_token_ids[..]) {
            (end, []) => json!(end),
            (end, others) => end.iter().chain(others).copied().collect(),
        }
    }

    /// Writes `config.json` into a model folder, whole or not at all.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_text(&dir.join(CONFIG_FILE), &self.to_json())
    }
}

/// What is read. A field that changes what the model computes is named here; all others are kept.
#[derive(Deserialize)]
struct Raw {
    model_type: Option<String>,
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
    eos_token_id: Option<Ids>,
    torch_dtype: Option<String>,
    // What newer releases of `transformers` write for it; some write both.
    dtype: Option<String>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    add_cross_attention: Option<bool>,
    pruned_heads: Option<Value>,
    quantization_config: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Raw {
    fn check(mut self) -> Result<Gpt2Config, Vec<String>> {
        let mut faults = Faults(self.unsupported());
        let mut config = Gpt2Config::new(
            faults.extent("vocab_size", self.vocab_size, None),
            faults.extent("n_positions", self.n_positions, None),
            faults.extent("n_embd", self.n_embd, None),
            faults.blocks("n_layer", self.n_layer),
            faults.extent("n_head", self.n_head, None),
        );
        config.n_inner = self.n_inner.map(|n| faults.extent("n_inner", Some(n), None));
        if let (Some(width @ 1..), Some(heads @ 1..)) = (self.n_embd, self.n_head)
            && width % heads != 0
        {
            faults.add(format!("`n_embd` is {width}, which {heads} heads (`n_head`) do not divide"));
        }
        // Where the file is silent, GPT-2's own defaults hold.
        config.layer_norm_epsilon = faults.number("layer_norm_epsilon", self.layer_norm_epsilon, 1e-5, 1.0);
        config.initializer_range = faults.number("initializer_range", self.initializer_range, 0.02, 1e3);
        config.embd_pdrop = faults.number("embd_pdrop", self.embd_pdrop, 0.1, 1.0);
        config.attn_pdrop = faults.number("attn_pdrop", self.attn_pdrop, 0.1, 1.0);
        config.resid_pdrop = faults.number("resid_pdrop", self.resid_pdrop, 0.1, 1.0);
        config.tie_word_embeddings = self.tie_word_embeddings.unwrap_or(true);
        // Not an index into anything here: `generate` in `transformers` may name a token that the vocabulary lacks.
        config.bos_token_id = self.bos_token_id.and_then(|id| usize::try_from(id).ok());
        let mut ends = self.eos_token_id.as_ref().map_or_else(Vec::new, Ids::list).into_iter();
        (config.eos_token_id, config.other_eos_token_ids) = (ends.next(), ends.collect());
        config.dtype = faults.dtype(self.torch_dtype.as_deref(), self.dtype.as_deref());
        self.others.remove("architectures");
        config.others = self.others;
        faults.none_or(config)
    }

    /// Fields whose value asks for something that the model text does not do.
    fn unsupported(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let activation = self.activation_function.as_deref().unwrap_or("gelu_new");
        // Two words for the same function.
        if !["gelu_new", "gelu_pytorch_tanh"].contains(&activation) {
            faults.push(format!("`activation_function` is {activation:?}; run is \"gelu_new\""));
        }
        for (name, value, usual) in [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("add_cross_attention", self.add_cross_attention, false),
        ] {
            if value.is_some_and(|v| v != usual) {
                faults.push(format!("`{name}` is {}; run is {usual}", !usual));
            }
        }
        if self.pruned_heads.as_ref().is_some_and(|v| v.as_object().is_none_or(|map| !map.is_empty())) {
            faults.push("`pruned_heads` is not empty".to_string());
        }
        if self.quantization_config.as_ref().is_some_and(|v| !v.is_null()) {
            faults.push("`quantization_config` is set; quantized weights are not read".to_string());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::disk::scratch::Scratch;
    use crate::hf::fields::CONFIG_BYTES_MAX;
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

    fn fault(from: &str, to: &str) -> String {
        let error = changed(from, to);
        assert_eq!(error.message(), "config.json: describes a model that this version does not run");
        error.details()[0].1.clone()
    }

    #[test]
    fn the_published_config_is_the_preset() {
        let preset = Gpt2Config::preset("gpt2-124m").unwrap();
        let read = parse(PUBLISHED).unwrap();
        assert_eq!(Gpt2Config { others: Map::new(), ..read }, preset.with_dropout(0.1));
        assert!(Gpt2Config::preset_names().all(|name| {
            let config = Gpt2Config::preset(name).unwrap();
            config.n_embd.is_multiple_of(config.n_head) && parse(&config.to_json()).unwrap() == config
        }));
        assert_eq!(Gpt2Config::preset("huge"), None);
    }

    #[test]
    fn what_is_written_is_read_back() {
        let dir = Scratch::new();
        let mut config = Gpt2Config::new(256, 64, 32, 2, 4).with_dropout(0.25);
        config.n_inner = Some(96);
        config.tie_word_embeddings = false;
        config.eos_token_id = Some(3);
        config.dtype = DType::BF16;
        config.write(&dir.path("")).unwrap();
        assert_eq!(Gpt2Config::read(&dir.path("")).unwrap(), config);
        assert_eq!(config.hidden(), 96);
        let value: Value = serde_json::from_str(&config.to_json()).unwrap();
        assert_eq!(value["architectures"][0], "GPT2LMHeadModel");
        assert_eq!(value["torch_dtype"], "bfloat16");
        assert_eq!(value["bos_token_id"], Value::Null);
        assert_eq!(value["layer_norm_epsilon"], 1e-5);
    }

    #[test]
    fn fields_that_change_nothing_here_are_written_back() {
        let kept = [
            ("pad_token_id", json!(50256)),
            ("use_cache", json!(false)),
            ("task_specific_params", json!({"text-generation": {"do_sample": true}})),
            ("id2label", json!({"0": "good"})),
        ];
        let told: String = kept.iter().map(|(name, value)| format!(", \"{name}\": {value}")).collect();
        let own = Gpt2Config::new(8, 4, 4, 1, 2).to_json();
        let read = parse(&format!("{}{told}}}", own.trim_end().strip_suffix('}').unwrap())).unwrap();
        assert_eq!(read.others.len(), kept.len(), "{:?}", read.others);
        let mut read = Gpt2Config { n_layer: 3, ..read };
        // No field that is kept takes the place of one that is told.
        read.others.insert("n_embd".to_string(), json!(1));
        let written: Value = serde_json::from_str(&read.to_json()).unwrap();
        for (name, value) in kept.into_iter().chain([("n_layer", json!(3)), ("n_embd", json!(4))]) {
            assert_eq!(written[name], value, "{name}");
        }
    }

    #[test]
    fn several_tokens_may_end_a_text() {
        let read = |ends: &str| parse(&PUBLISHED.replacen("\"eos_token_id\": 50256", ends, 1)).unwrap();
        for (field, first, others) in [
            ("\"eos_token_id\": [0, 1]", Some(0), vec![1]),
            ("\"eos_token_id\": [7]", Some(7), vec![]),
            ("\"eos_token_id\": []", None, vec![]),
            ("\"eos_token_id\": null", None, vec![]),
        ] {
            let config = read(field);
            assert_eq!((config.eos_token_id, &config.other_eos_token_ids), (first, &others), "{field}");
            assert_eq!(parse(&config.to_json()).unwrap(), config);
        }
    }

    #[test]
    fn newer_spellings_and_silent_defaults_are_read() {
        let text = r#"{"model_type":"gpt2","vocab_size":8,"n_positions":4,"n_embd":4,"n_layer":1,"n_head":2,
            "dtype":"torch.float16","activation_function":"gelu_pytorch_tanh","pruned_heads":{}}"#;
        let config = parse(text).unwrap();
        assert_eq!((config.dtype, config.attn_pdrop, config.hidden()), (DType::F16, 0.1, 16));
        assert!(config.tie_word_embeddings);
    }

    #[test]
    fn other_models_are_refused() {
        let told = |from: &str, to: &str| changed(from, to).message().to_string();
        assert_eq!(
            told("\"gpt2\"", "\"llama\""),
            "config.json: `model_type` is \"llama\"; this version reads \"gpt2\""
        );
        assert_eq!(
            told("\"model_type\": \"gpt2\",", ""),
            "config.json: `model_type` is missing; this version reads \"gpt2\""
        );
        assert!(told("768", "-768").contains("expected u64"));
        assert!(told("768", "768.5").contains("expected u64"));
        assert_eq!(
            told("768", "\"768\""),
            "config.json: `n_embd` cannot be read: invalid type: string \"768\", expected u64"
        );
        let field = format!("\"gpt2\", \"n_inner\": {:?}", "x".repeat(1000));
        let long = told("\"gpt2\"", &field);
        assert!(long.starts_with("config.json: `n_inner` cannot be read: ") && long.len() < 300, "{long}");
        assert!(told("0.1", "1e999").contains("number out of range at line 2"));
        assert!(told("{", "[").contains("cannot be read as a model config"));
        assert!(told("768", "768, \"n_embd\": 8").contains("duplicate field `n_embd`"));
    }

    #[test]
    fn each_unsupported_field_is_named() {
        assert_eq!(
            fault("\"gelu_new\"", "\"relu\""),
            "`activation_function` is \"relu\"; run is \"gelu_new\""
        );
        assert_eq!(fault("\"n_embd\": 768,", ""), "`n_embd` is missing");
        assert_eq!(fault("768", "770"), "`n_embd` is 770, which 12 heads (`n_head`) do not divide");
        assert_eq!(
            fault("\"n_layer\": 12", "\"n_layer\": 0"),
            "`n_layer` is 0, which is outside of 1..=4096"
        );
        assert_eq!(
            fault("\"n_layer\": 12", "\"n_layer\": 1000000000"),
            "`n_layer` is 1000000000, which is outside of 1..=4096"
        );
        assert_eq!(
            fault("\"n_ctx\": 1024", "\"n_inner\": 0"),
            "`n_inner` is 0, which is outside of 1..=16777216"
        );
        assert_eq!(
            fault("\"attn_pdrop\": 0.1", "\"attn_pdrop\": 1"),
            "`attn_pdrop` is 1, which is not in [0, 1)"
        );
        assert_eq!(fault("1e-05", "-1e-05"), "`layer_norm_epsilon` is -0.00001, which is not in [0, 1)");
        let add = |field: &str| fault("\"n_ctx\": 1024", field);
        assert_eq!(add("\"scale_attn_weights\": false"), "`scale_attn_weights` is false; run is true");
        assert_eq!(
            add("\"scale_attn_by_inverse_layer_idx\": true"),
            "`scale_attn_by_inverse_layer_idx` is true; run is false"
        );
        assert_eq!(add("\"add_cross_attention\": true"), "`add_cross_attention` is true; run is false");
        assert_eq!(add("\"pruned_heads\": {\"0\": [1]}"), "`pruned_heads` is not empty");
        assert!(add("\"quantization_config\": {}").starts_with("`quantization_config` is set"));
        assert_eq!(
            add("\"torch_dtype\": \"float32\", \"dtype\": \"bfloat16\""),
            "`torch_dtype` is \"float32\", but `dtype` is \"bfloat16\""
        );
        assert!(add("\"torch_dtype\": \"int8\"").starts_with("`torch_dtype` is \"int8\"; held are float64"));
        assert!(add("\"dtype\": \"int8\"").starts_with("`dtype` is \"int8\"; held are float64"));
    }

    #[test]
    fn all_faults_are_told_at_once() {
        let error =
            parse(r#"{"model_type":"gpt2","n_embd":0,"n_head":3,"activation_function":"silu"}"#).unwrap_err();
        let faults: Vec<&str> = error.details().iter().map(|d| d.1.split('`').nth(1).unwrap()).collect();
        assert_eq!(faults, ["activation_function", "vocab_size", "n_positions", "n_embd", "n_layer"]);
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = Scratch::new();
        let error = Gpt2Config::read(&dir.path("")).unwrap_err();
        assert!(error.message().ends_with("config.json: there is no such file"), "{error}");
        assert_eq!(error.details()[0].1, "a model folder holds config.json and model.safetensors");
        dir.file(CONFIG_FILE, &vec![b' '; CONFIG_BYTES_MAX as usize + 1]);
        assert!(Gpt2Config::read(&dir.path("")).unwrap_err().message().contains("at most 1048576 are read"));
    }
}
