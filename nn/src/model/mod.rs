//! Models: one file a family. They name no mesh axis and no rank.

mod family;
mod gpt2;
mod llama;
mod bert;
mod language;

pub use crate::hf::{BertConfig, BertHead, Gpt2Config, LlamaConfig, LlamaKind, ModelConfig};
pub use bert::{Bert, BertBlock, BertEmbeddings, TokenHead};
pub use family::Family;
pub use gpt2::Gpt2;
pub use language::LanguageModel;
pub use llama::{Llama, LlamaBlock, LlamaTrunk};
