//! Models: one file a family. They name no mesh axis and no rank.

mod gpt2;

pub use crate::hf::Gpt2Config;
pub use gpt2::Gpt2;
