//! Model families: GPT-2, Llama and its relatives, BERT. Their code names no mesh axis and no rank.

mod blocks;
mod gpt2;
mod llama;
mod bert;
mod language;

pub use crate::checkpoint::hf::{
    BertConfig, BertHead, Gpt2Config, HfModel, LlamaConfig, LlamaKind, ModelConfig,
};
pub use bert::{Bert, BertBlock, BertEmbeddings, MlmHead};
pub use gpt2::Gpt2;
pub use language::LanguageModel;
pub use llama::{Llama, LlamaBackbone, LlamaBlock};
