//! Models: one file a family. They name no mesh axis and no rank.

mod family;
mod gpt2;
mod language;

pub use crate::hf::{Gpt2Config, ModelConfig};
pub use family::Family;
pub use gpt2::Gpt2;
pub use language::LanguageModel;
