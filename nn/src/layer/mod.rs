//! Layers: architecture only. They name no mesh axis and no rank; where a plan may want a say, they have a point.

mod dropout;
mod linear;
mod layer_norm;
mod rms_norm;
mod embedding;
mod mlp;
mod attention;
mod block;
mod gated_mlp;
mod experts;
mod feed_forward;
mod grouped_attention;
mod self_attention;

pub use attention::Attention;
pub use block::Block;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use experts::{Experts, Routes, Stacks};
pub use feed_forward::FeedForward;
pub use gated_mlp::GatedMlp;
pub use grouped_attention::GroupedAttention;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use mlp::Mlp;
pub use rms_norm::RmsNorm;
pub use self_attention::SelfAttention;
