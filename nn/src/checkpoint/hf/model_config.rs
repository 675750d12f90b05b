//! `ModelConfig`: the config of any model family, chosen by `model_type` of `config.json`.

use super::bert::BertConfig;
use super::config_check::config_text;
use super::config_fields::{TokenIds, parse_fields};
use super::gpt2::Gpt2Config;
use super::llama::{LlamaConfig, LlamaKind};
use crate::checkpoint::atomic::atomic_file::write_text;
use crate::checkpoint::atomic::disk::{file_error, read_text};
use crate::checkpoint::file_names::{CONFIG_BYTES_MAX, CONFIG_FILE, GENERATION_FILE};
use serde::Deserialize;
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// Config of a model of any family.
#[doc(alias = "AutoConfig")]
#[doc(alias = "PretrainedConfig")]
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// `gpt2`.
    Gpt2(Gpt2Config),
    /// `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`.
    Llama(LlamaConfig),
    /// `bert`, an encoder.
    Bert(BertConfig),
}

/// An expression for the config of any family, of which all have the same fields and methods.
macro_rules! of_any_family {
    ($model:expr, $config:ident => $value:expr) => {
        match $model {
            ModelConfig::Gpt2($config) => $value,
            ModelConfig::Llama($config) => $value,
            ModelConfig::Bert($config) => $value,
        }
    };
}

/// The field that names the family.
#[derive(Deserialize)]
struct Head {
    model_type: Option<String>,
}

/// The fields read from `generation_config.json`.
#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<TokenIds>,
}

impl ModelConfig {
    /// The names of all presets, by family, smallest first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        Gpt2Config::preset_names().chain(LlamaConfig::preset_names()).chain(BertConfig::preset_names())
    }

    /// Returns the config of a preset; `None` for an unknown name.
    #[must_use]
    pub fn preset(name: &str) -> Option<ModelConfig> {
        let gpt2 = Gpt2Config::preset(name).map(ModelConfig::Gpt2);
        let llama = || LlamaConfig::preset(name).map(ModelConfig::Llama);
        gpt2.or_else(llama).or_else(|| BertConfig::preset(name).map(ModelConfig::Bert))
    }

    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if the file is missing, is not JSON, describes an unsupported model, or contradicts the headers of the
    /// weights in the folder; all missing and unsupported fields are listed at once. `Kind::Io` if the operating system reports an
    /// error. As [`Weights::open`](crate::checkpoint::Weights::open) if there are weights.
    pub fn read(dir: &Path) -> Result<ModelConfig> {
        let (path, text) = config_text(dir)?;
        let config = ModelConfig::parse(&path, &text)?;
        let expected_shapes = of_any_family!(&config, config => config.expected_shapes());
        expected_shapes.check(dir)?;
        Ok(config)
    }

    /// Parses the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn parse(path: &Path, text: &str) -> Result<ModelConfig> {
        let head: Head = parse_fields(path, text)?;
        let found = head.model_type.as_deref();
        if found == Some("gpt2") {
            return Gpt2Config::parse(path, text).map(ModelConfig::Gpt2);
        }
        if let Some(kind) = LlamaKind::ALL.into_iter().find(|kind| found == Some(kind.name())) {
            return LlamaConfig::parse(kind, path, text).map(ModelConfig::Llama);
        }
        if found == Some("bert") {
            return BertConfig::parse(path, text).map(ModelConfig::Bert);
        }
        let found = found.map_or("is missing".to_string(), |m| format!("is {m:?}"));
        let llamas = LlamaKind::ALL.map(LlamaKind::name).join(", ");
        Err(file_error(path, format_args!("`model_type` {found}; supported: gpt2, {llamas}, bert")))
    }

    /// Returns the text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        of_any_family!(self, config => config.to_json())
    }

    /// [`ModelConfig::to_json`], checked to give this config again when read.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the settings that the file cannot represent, or that reading would reject.
    pub(crate) fn lossless_json(&self) -> Result<String> {
        let (path, text) = (Path::new(CONFIG_FILE), self.to_json());
        let unrepresentable = match (self, &ModelConfig::parse(path, &text)?) {
            (ModelConfig::Llama(config), ModelConfig::Llama(read)) => config.unrepresentable(read),
            // The files of the other families have a field for every setting.
            _ => Vec::new(),
        };
        if unrepresentable.is_empty() {
            return Ok(text);
        }
        let error = file_error(path, "cannot represent this model");
        let error =
            unrepresentable.into_iter().fold(error, |error, error_text| error.detail("field", error_text));
        Err(error
            .detail("help", "save the weights without a config (Model::save_weights), or change the config"))
    }

    /// Writes `config.json` into a model folder atomically.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for settings that the file cannot represent; `Kind::Io` if the operating system reports an error, or if
    /// `config.json` exists but is not a regular file.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_text(&dir.join(CONFIG_FILE), &self.lossless_json()?)
    }

    /// The number of tokens in the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        of_any_family!(self, config => config.vocab_size)
    }

    /// The largest number of tokens of a sequence.
    #[doc(alias = "max_position_embeddings")]
    #[must_use]
    pub fn max_positions(&self) -> usize {
        match self {
            ModelConfig::Gpt2(config) => config.n_positions,
            ModelConfig::Llama(config) => config.max_position_embeddings,
            ModelConfig::Bert(config) => config.max_position_embeddings,
        }
    }

    /// Whether the model is a causal language model: predicts the next token from the tokens before it.
    #[must_use]
    pub fn is_causal(&self) -> bool {
        match self {
            ModelConfig::Gpt2(_) | ModelConfig::Llama(_) => true,
            ModelConfig::Bert(_) => false,
        }
    }

    /// Whether the model is a mixture of experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        match self {
            ModelConfig::Llama(config) => config.experts.is_some(),
            ModelConfig::Gpt2(_) | ModelConfig::Bert(_) => false,
        }
    }

    /// The number of token types.
    #[must_use]
    pub fn num_token_types(&self) -> usize {
        match self {
            ModelConfig::Gpt2(_) | ModelConfig::Llama(_) => 1,
            ModelConfig::Bert(config) => config.type_vocab_size,
        }
    }

    /// The token that ends a text, if the config names one; the first if it names several. The token may be outside the vocabulary.
    #[must_use]
    pub fn eos_token_id(&self) -> Option<usize> {
        self.eos_token_ids().first().copied()
    }

    /// All tokens that end a text, in the order of the file.
    #[must_use]
    pub fn eos_token_ids(&self) -> Vec<usize> {
        match self {
            ModelConfig::Gpt2(config) => {
                config.eos_token_id.iter().chain(&config.extra_eos_token_ids).copied().collect()
            }
            ModelConfig::Bert(_) => Vec::new(),
            ModelConfig::Llama(config) => {
                let named = config.extra_fields.get("eos_token_id").cloned();
                let ids = named.and_then(|named| serde_json::from_value::<TokenIds>(named).ok());
                ids.as_ref().map_or_else(Vec::new, TokenIds::list)
            }
        }
    }

    /// [`ModelConfig::eos_token_ids`] and those of `generation_config.json` in a folder, if present: generation stops at any of them.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a file that is not JSON or whose `eos_token_id` is not a token; `Kind::Io` if the operating system
    /// reports an error.
    pub fn eos_token_ids_in(&self, dir: &Path) -> Result<Vec<usize>> {
        let (mut ends, path) = (self.eos_token_ids(), dir.join(GENERATION_FILE));
        if path.symlink_metadata().is_ok() {
            let read: Generation = parse_fields(&path, &read_text(dir, GENERATION_FILE, CONFIG_BYTES_MAX)?)?;
            let more = read.eos_token_id.as_ref().map_or_else(Vec::new, TokenIds::list);
            ends.extend(more.into_iter().filter(|id| !ends.contains(id)).collect::<Vec<_>>());
        }
        Ok(ends)
    }

    /// The dtype of the weights in files.
    #[must_use]
    pub fn dtype(&self) -> DType {
        of_any_family!(self, config => config.dtype)
    }

    /// Returns the same config with another dtype of the weights.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> ModelConfig {
        of_any_family!(&mut self, config => config.dtype = dtype);
        self
    }

    /// Whether training drops elements at random anywhere.
    #[must_use]
    pub fn has_dropout(&self) -> bool {
        let all: &[f64] = match self {
            ModelConfig::Gpt2(config) => &[config.embd_pdrop, config.attn_pdrop, config.resid_pdrop],
            ModelConfig::Llama(config) => &[config.attention_dropout],
            ModelConfig::Bert(config) => &[config.hidden_dropout_prob, config.attention_probs_dropout_prob],
        };
        all.iter().any(|p| *p > 0.0)
    }

    /// Returns the same config with one dropout probability everywhere.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> ModelConfig {
        match self {
            ModelConfig::Gpt2(config) => ModelConfig::Gpt2(config.with_dropout(p)),
            ModelConfig::Llama(config) => ModelConfig::Llama(LlamaConfig { attention_dropout: p, ..config }),
            ModelConfig::Bert(config) => ModelConfig::Bert(config.with_dropout(p)),
        }
    }

    /// Returns the same config with biases that balance the experts, moved by `rate` in each training step
    /// ([`ExpertsConfig::router_bias_update_rate`](super::ExpertsConfig::router_bias_update_rate)); unchanged without experts.
    #[must_use]
    pub fn with_router_bias_update_rate(mut self, rate: f64) -> ModelConfig {
        if let ModelConfig::Llama(LlamaConfig { experts: Some(experts), .. }) = &mut self {
            experts.router_bias_update_rate = rate;
        }
        self
    }
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> ModelConfig {
        ModelConfig::Gpt2(config)
    }
}

impl From<BertConfig> for ModelConfig {
    fn from(config: BertConfig) -> ModelConfig {
        ModelConfig::Bert(config)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> ModelConfig {
        ModelConfig::Llama(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;

    #[test]
    fn an_unsupported_model_type_is_named() {
        let message =
            |text: &str| ModelConfig::parse(Path::new("c"), text).unwrap_err().message().to_string();
        let read = "; supported: gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, bert";
        assert_eq!(message(r#"{"model_type": "t5"}"#), format!("c: `model_type` is \"t5\"{read}"));
        assert_eq!(message("{}"), format!("c: `model_type` is missing{read}"));
        assert!(message("[]").contains("cannot be read as a model config"));
        let typed = "c: `model_type` cannot be read: invalid type: integer `3`, expected a string";
        assert_eq!(message(r#"{"model_type": 3}"#), typed);
        let wrong = |kind: &str, field: &str| message(&format!(r#"{{"model_type": "{kind}", {field}}}"#));
        let number = "invalid type: string \"x\", expected u64";
        for (kind, field) in [("llama", "num_hidden_layers"), ("bert", "vocab_size"), ("gpt2", "n_layer")] {
            let text = format!(r#""a": {{}}, "{field}": "x""#);
            assert_eq!(wrong(kind, &text), format!("c: `{field}` cannot be read: {number}"));
        }
        let nested = wrong("llama", r#""rope_scaling": {"factor": "x"}"#);
        assert!(nested.starts_with("c: `rope_scaling` cannot be read: invalid type: string"), "{nested}");
    }

    #[test]
    fn eos_token_ids_include_those_of_generation_config() {
        let dir = Scratch::new();
        let mut config = LlamaConfig::preset("llama-tiny").unwrap();
        config.extra_fields.insert("eos_token_id".to_string(), serde_json::json!([5, 7]));
        let config = ModelConfig::from(config);
        assert_eq!((config.eos_token_id(), config.eos_token_ids()), (Some(5), vec![5, 7]));
        let ends = || config.eos_token_ids_in(&dir.path(""));
        assert_eq!(ends().unwrap(), [5, 7]);
        for (text, all) in [
            (r#"{"eos_token_id": [7, 9], "top_p": 0.9}"#, &[5, 7, 9][..]),
            (r#"{"eos_token_id": 3}"#, &[5, 7, 3]),
            ("{}", &[5, 7]),
        ] {
            dir.file(GENERATION_FILE, text.as_bytes());
            assert_eq!(ends().unwrap(), all, "{text}");
        }
        for bad in ["", r#"{"eos_token_id": "x"}"#, "[]"] {
            dir.file(GENERATION_FILE, bad.as_bytes());
            let error = ends().unwrap_err();
            assert!(error.message().contains("generation_config.json: "), "{error}");
        }
        let mut config = Gpt2Config::preset("tiny").unwrap();
        config.eos_token_id = Some(2);
        config.extra_eos_token_ids = vec![4];
        assert_eq!(ModelConfig::from(config).eos_token_ids(), [2, 4]);
        assert_eq!(ModelConfig::preset("bert-base").unwrap().eos_token_id(), None);
    }

    #[test]
    fn written_presets_are_read_back() {
        for name in ModelConfig::preset_names() {
            let config = ModelConfig::preset(name).unwrap().with_dtype(DType::BF16);
            assert_eq!(config.dtype(), DType::BF16);
            let mut read = ModelConfig::parse(Path::new("c"), &config.to_json()).unwrap();
            if let ModelConfig::Llama(read) = &mut read {
                read.extra_fields.clear();
            }
            assert_eq!(read, config, "{name}");
        }
        assert_eq!(ModelConfig::preset("huge"), None);
    }
}
