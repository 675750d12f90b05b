//! `config.json` of any family that there is, told apart by its `model_type`.

use super::bert::BertConfig;
use super::disk::{read_text, refuse, write_text};
use super::fields::{CONFIG_BYTES_MAX, CONFIG_FILE, GENERATION_FILE, Ids, fields};
use super::fit::config_text;
use super::gpt2::Gpt2Config;
use super::llama::{LlamaConfig, LlamaKind};
use serde::Deserialize;
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The shape of a model of some family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// `gpt2`.
    Gpt2(Gpt2Config),
    /// `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`.
    Llama(LlamaConfig),
    /// `bert`, an encoder.
    Bert(BertConfig),
}

/// The field that says which family a file describes.
#[derive(Deserialize)]
struct Head {
    model_type: Option<String>,
}

/// What is read of `generation_config.json`.
#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<Ids>,
}

impl ModelConfig {
    /// The names that [`ModelConfig::preset`] knows, family by family, smallest first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        Gpt2Config::preset_names().chain(LlamaConfig::preset_names()).chain(BertConfig::preset_names())
    }

    /// The config of a preset name.
    #[must_use]
    pub fn preset(name: &str) -> Option<ModelConfig> {
        let gpt2 = Gpt2Config::preset(name).map(ModelConfig::Gpt2);
        let llama = || LlamaConfig::preset(name).map(ModelConfig::Llama);
        gpt2.or_else(llama).or_else(|| BertConfig::preset(name).map(ModelConfig::Bert))
    }

    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if the file is missing, is no JSON, or describes a model that no family here is, or another one than
    /// the headers of the weights beside it; all missing and unsupported fields are listed at once. `Kind::Io` if the system
    /// refuses. As [`Weights::open`](super::Weights::open) if there are weights.
    pub fn read(dir: &Path) -> Result<ModelConfig> {
        let (path, text) = config_text(dir)?;
        let config = ModelConfig::parse(&path, &text)?;
        let claims = match &config {
            ModelConfig::Gpt2(config) => config.claims(),
            ModelConfig::Llama(config) => config.claims(),
            ModelConfig::Bert(config) => config.claims(),
        };
        claims.check(dir)?;
        Ok(config)
    }

    /// Reads the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn parse(path: &Path, text: &str) -> Result<ModelConfig> {
        let head: Head = fields(path, text)?;
        let found = head.model_type.as_deref();
        if found == Some("gpt2") {
            return Gpt2Config::parse(path, text).map(ModelConfig::Gpt2);
        }
        if let Some(kind) = LlamaKind::EVERY.into_iter().find(|kind| found == Some(kind.name())) {
            return LlamaConfig::parse(kind, path, text).map(ModelConfig::Llama);
        }
        if found == Some("bert") {
            return BertConfig::parse(path, text).map(ModelConfig::Bert);
        }
        let found = found.map_or("is missing".to_string(), |m| format!("is {m:?}"));
        let llamas = LlamaKind::EVERY.map(LlamaKind::name).join(", ");
        Err(refuse(path, format_args!("`model_type` {found}; this version reads gpt2, {llamas}, bert")))
    }

    /// The text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        match self {
            ModelConfig::Gpt2(config) => config.to_json(),
            ModelConfig::Llama(config) => config.to_json(),
            ModelConfig::Bert(config) => config.to_json(),
        }
    }

    /// [`ModelConfig::to_json`], of which every reader makes this model again.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming what the file cannot say, or would be refused for.
    pub(crate) fn faithful_json(&self) -> Result<String> {
        let (path, text) = (Path::new(CONFIG_FILE), self.to_json());
        let unsaid = match (self, &ModelConfig::parse(path, &text)?) {
            (ModelConfig::Llama(config), ModelConfig::Llama(read)) => config.unsaid(read),
            // The other families have a field for all that they tell.
            _ => Vec::new(),
        };
        if unsaid.is_empty() {
            return Ok(text);
        }
        let error = refuse(path, "cannot say all of what this model is");
        let error = unsaid.into_iter().fold(error, |error, fault| error.detail("field", fault));
        Err(error.detail("help", "save the weights alone (Model::save_weights), or change the config"))
    }

    /// Writes `config.json` into a model folder, whole or not at all.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a model of which the file cannot say all; `Kind::Io` if the system refuses, or what stands there
    /// is no file.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_text(&dir.join(CONFIG_FILE), &self.faithful_json()?)
    }

    /// The number of tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Gpt2(config) => config.vocab_size,
            ModelConfig::Llama(config) => config.vocab_size,
            ModelConfig::Bert(config) => config.vocab_size,
        }
    }

    /// The longest sequence.
    #[must_use]
    pub fn positions(&self) -> usize {
        match self {
            ModelConfig::Gpt2(config) => config.n_positions,
            ModelConfig::Llama(config) => config.max_position_embeddings,
            ModelConfig::Bert(config) => config.max_position_embeddings,
        }
    }

    /// Whether the model predicts the next token from those before it.
    #[must_use]
    pub fn is_causal(&self) -> bool {
        match self {
            ModelConfig::Gpt2(_) | ModelConfig::Llama(_) => true,
            ModelConfig::Bert(_) => false,
        }
    }

    /// Whether blocks have experts, of which each token passes some.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        match self {
            ModelConfig::Llama(config) => config.experts.is_some(),
            ModelConfig::Gpt2(_) | ModelConfig::Bert(_) => false,
        }
    }

    /// The number of types that a token may have.
    #[must_use]
    pub fn token_types(&self) -> usize {
        match self {
            ModelConfig::Gpt2(_) | ModelConfig::Llama(_) => 1,
            ModelConfig::Bert(config) => config.type_vocab_size,
        }
    }

    /// The number of the token that ends a text, if the file names one; the first where it names several. It may lie outside of
    /// the vocabulary.
    #[must_use]
    pub fn end_of_text(&self) -> Option<usize> {
        self.ends_of_text().first().copied()
    }

    /// The numbers of all tokens that end a text, as the file names them.
    #[must_use]
    pub fn ends_of_text(&self) -> Vec<usize> {
        match self {
            ModelConfig::Gpt2(config) => {
                config.eos_token_id.iter().chain(&config.other_eos_token_ids).copied().collect()
            }
            ModelConfig::Bert(_) => Vec::new(),
            ModelConfig::Llama(config) => {
                let named = config.others.get("eos_token_id").cloned();
                let ids = named.and_then(|named| serde_json::from_value::<Ids>(named).ok());
                ids.as_ref().map_or_else(Vec::new, Ids::list)
            }
        }
    }

    /// [`ModelConfig::ends_of_text`], and those that `generation_config.json` of a folder names, if it is there: a text that is
    /// continued ends with any of them.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a file that is no JSON, or names something else than tokens; `Kind::Io` if the system refuses.
    pub fn ends_of_text_in(&self, dir: &Path) -> Result<Vec<usize>> {
        let (mut ends, path) = (self.ends_of_text(), dir.join(GENERATION_FILE));
        if path.symlink_metadata().is_ok() {
            let read: Generation = fields(&path, &read_text(dir, GENERATION_FILE, CONFIG_BYTES_MAX)?)?;
            let more = read.eos_token_id.as_ref().map_or_else(Vec::new, Ids::list);
            ends.extend(more.into_iter().filter(|id| !ends.contains(id)).collect::<Vec<_>>());
        }
        Ok(ends)
    }

    /// The dtype of the stored weights.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            ModelConfig::Gpt2(config) => config.dtype,
            ModelConfig::Llama(config) => config.dtype,
            ModelConfig::Bert(config) => config.dtype,
        }
    }

    /// The same model with weights of another dtype.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> ModelConfig {
        match &mut self {
            ModelConfig::Gpt2(config) => config.dtype = dtype,
            ModelConfig::Llama(config) => config.dtype = dtype,
            ModelConfig::Bert(config) => config.dtype = dtype,
        }
        self
    }

    /// The same model with one dropout probability wherever its family has dropout.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> ModelConfig {
        match self {
            ModelConfig::Gpt2(config) => ModelConfig::Gpt2(config.with_dropout(p)),
            ModelConfig::Llama(config) => ModelConfig::Llama(LlamaConfig { attention_dropout: p, ..config }),
            ModelConfig::Bert(config) => ModelConfig::Bert(config.with_dropout(p)),
        }
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
    use super::super::disk::scratch::Scratch;
    use super::*;

    #[test]
    fn a_family_that_is_not_here_is_named() {
        let told = |text: &str| ModelConfig::parse(Path::new("c"), text).unwrap_err().message().to_string();
        let read = "; this version reads gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, bert";
        assert_eq!(told(r#"{"model_type": "t5"}"#), format!("c: `model_type` is \"t5\"{read}"));
        assert_eq!(told("{}"), format!("c: `model_type` is missing{read}"));
        assert!(told("[]").contains("cannot be read as a model config"));
        let typed = "c: `model_type` cannot be read: invalid type: integer `3`, expected a string";
        assert_eq!(told(r#"{"model_type": 3}"#), typed);
        let wrong = |kind: &str, field: &str| told(&format!(r#"{{"model_type": "{kind}", {field}}}"#));
        let number = "invalid type: string \"x\", expected u64";
        for (kind, field) in [("llama", "num_hidden_layers"), ("bert", "vocab_size"), ("gpt2", "n_layer")] {
            let text = format!(r#""a": {{}}, "{field}": "x""#);
            assert_eq!(wrong(kind, &text), format!("c: `{field}` cannot be read: {number}"));
        }
        let nested = wrong("llama", r#""rope_scaling": {"factor": "x"}"#);
        assert!(nested.starts_with("c: `rope_scaling` cannot be read: invalid type: string"), "{nested}");
    }

    #[test]
    fn all_tokens_that_end_a_text_are_known() {
        let dir = Scratch::new();
        let mut config = LlamaConfig::preset("llama-tiny").unwrap();
        config.others.insert("eos_token_id".to_string(), serde_json::json!([5, 7]));
        let config = ModelConfig::from(config);
        assert_eq!((config.end_of_text(), config.ends_of_text()), (Some(5), vec![5, 7]));
        let ends = || config.ends_of_text_in(&dir.path(""));
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
        config.other_eos_token_ids = vec![4];
        assert_eq!(ModelConfig::from(config).ends_of_text(), [2, 4]);
        assert_eq!(ModelConfig::preset("bert-base").unwrap().end_of_text(), None);
    }

    #[test]
    fn presets_are_read_back_as_they_were_written() {
        for name in ModelConfig::preset_names() {
            let config = ModelConfig::preset(name).unwrap().with_dtype(DType::BF16);
            assert_eq!(config.dtype(), DType::BF16);
            let mut read = ModelConfig::parse(Path::new("c"), &config.to_json()).unwrap();
            if let ModelConfig::Llama(read) = &mut read {
                read.others.clear();
            }
            assert_eq!(read, config, "{name}");
        }
        assert_eq!(ModelConfig::preset("huge"), None);
    }
}
