//! Model families: GPT-2, Llama and its relatives, BERT. Their code names no mesh axis and no rank.

mod hf_model;
mod gpt2;
mod llama;
mod bert;
mod language;

pub use crate::hf::{BertConfig, BertHead, Gpt2Config, LlamaConfig, LlamaKind, ModelConfig};
pub use bert::{Bert, BertBlock, BertEmbeddings, MlmHead};
pub use gpt2::Gpt2;
pub use hf_model::HfModel;
pub use language::LanguageModel;
pub use llama::{Llama, LlamaBackbone, LlamaBlock};
