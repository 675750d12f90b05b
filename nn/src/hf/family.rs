//! `config.json` of any family that there is, told apart by its `model_type`.

use super::config::{CONFIG_BYTES_MAX, CONFIG_FILE, Gpt2Config, WEIGHTS_FILE};
use super::disk::{read_text, refuse, write_text};
use serde::Deserialize;
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The shape of a language model of some family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// `gpt2`.
    Gpt2(Gpt2Config),
}

/// The field that says which family a file describes.
#[derive(Deserialize)]
struct Kind {
    model_type: Option<String>,
}

/// The values of `model_type` that are read.
const MODEL_TYPES: [&str; 1] = ["gpt2"];

impl ModelConfig {
    /// The names that [`ModelConfig::preset`] knows, family by family, smallest first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        Gpt2Config::preset_names()
    }

    /// The config of a preset name.
    #[must_use]
    pub fn preset(name: &str) -> Option<ModelConfig> {
        Gpt2Config::preset(name).map(ModelConfig::Gpt2)
    }

    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if the file is missing, is no JSON, or describes a model that no family here is; all missing
    /// and unsupported fields are listed at once. `Kind::Io` if the system refuses.
    pub fn read(dir: &Path) -> Result<ModelConfig> {
        let path = dir.join(CONFIG_FILE);
        let help = format!("a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}");
        let text = read_text(&path, CONFIG_BYTES_MAX).map_err(|e| e.detail("help", help))?;
        ModelConfig::parse(&path, &text)
    }

    /// Reads the text of the config file at `path` (named in errors).
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn parse(path: &Path, text: &str) -> Result<ModelConfig> {
        let kind: Kind = serde_json::from_str(text)
            .map_err(|e| refuse(path, format_args!("cannot be read as a model config: {e}")))?;
        match kind.model_type.as_deref() {
            Some("gpt2") => Ok(ModelConfig::Gpt2(Gpt2Config::parse(path, text)?)),
            other => {
                let found = other.map_or("is missing".to_string(), |m| format!("is {m:?}"));
                let types = MODEL_TYPES.join(", ");
                Err(refuse(path, format_args!("`model_type` {found}; this version reads {types}")))
            }
        }
    }

    /// The text of the config file.
    #[must_use]
    pub fn to_json(&self) -> String {
        match self {
            ModelConfig::Gpt2(config) => config.to_json(),
        }
    }

    /// Writes `config.json` into a model folder, whole or not at all.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_text(&dir.join(CONFIG_FILE), &self.to_json())
    }

    /// The number of tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Gpt2(config) => config.vocab_size,
        }
    }

    /// The longest sequence.
    #[must_use]
    pub fn positions(&self) -> usize {
        match self {
            ModelConfig::Gpt2(config) => config.n_positions,
        }
    }

    /// The dtype of the stored weights.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            ModelConfig::Gpt2(config) => config.dtype,
        }
    }

    /// The same model with weights of another dtype.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> ModelConfig {
        match &mut self {
            ModelConfig::Gpt2(config) => config.dtype = dtype,
        }
        self
    }

    /// The same model with one dropout probability wherever its family has dropout.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> ModelConfig {
        match self {
            ModelConfig::Gpt2(config) => ModelConfig::Gpt2(config.with_dropout(p)),
        }
    }
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> ModelConfig {
        ModelConfig::Gpt2(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_is_not_here_is_named() {
        let told = |text: &str| ModelConfig::parse(Path::new("c"), text).unwrap_err().message().to_string();
        assert_eq!(told(r#"{"model_type": "bert"}"#), "c: `model_type` is \"bert\"; this version reads gpt2");
        assert_eq!(told("{}"), "c: `model_type` is missing; this version reads gpt2");
        assert!(told("[]").contains("cannot be read as a model config"));
    }

    #[test]
    fn presets_are_read_back_as_they_were_written() {
        for name in ModelConfig::preset_names() {
            let config = ModelConfig::preset(name).unwrap().with_dtype(DType::BF16);
            assert_eq!(config.dtype(), DType::BF16);
            assert_eq!(ModelConfig::parse(Path::new("c"), &config.to_json()).unwrap(), config, "{name}");
        }
        assert_eq!(ModelConfig::preset("huge"), None);
    }
}
