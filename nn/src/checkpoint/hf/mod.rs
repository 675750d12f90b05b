//! Model families in the Hugging Face layout: `config.json`, and the names of parameters in files.

mod config_fields;
mod config_check;
mod rope;
mod gpt2;
mod llama;
mod bert;
mod model_config;
mod hf_model;

pub use bert::{BertConfig, BertHead};
pub use gpt2::Gpt2Config;
pub use hf_model::HfModel;
pub use llama::{ExpertsConfig, LlamaConfig, LlamaKind};
pub use model_config::ModelConfig;
pub use rope::{RopeConfig, RopeScaling};
