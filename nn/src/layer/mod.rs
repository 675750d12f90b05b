//! Layers: architecture only. They name no mesh axis and no rank; where a plan may want a say, they have a point.

mod attention;
mod block;
mod dropout;
mod embedding;
mod layer_norm;
mod linear;
mod mlp;
mod rms_norm;

pub use attention::Attention;
pub use block::Block;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use mlp::Mlp;
pub use rms_norm::RmsNorm;
