//! Layers, written for one device: they name no mesh axis and no rank. Where a plan may constrain the layout of an activation, a
//! layer has an [`ActivationPoint`](crate::ActivationPoint).

pub mod kv_cache;
mod documents;
mod dropout;
mod linear;
mod lora;
mod layer_norm;
mod rms_norm;
mod embedding;
mod mlp;
mod attention;
mod block;
mod gated_mlp;
mod mixture_of_experts;
mod feed_forward;
mod grouped_query_attention;
mod encoder_attention;

pub use attention::Attention;
pub use block::Block;
pub use documents::{DocumentPoints, PackedDocuments, document_ids, zigzag_order};
pub use dropout::{Dropout, Residual};
pub use embedding::Embedding;
pub use encoder_attention::EncoderAttention;
pub use feed_forward::FeedForward;
pub use gated_mlp::GatedMlp;
pub use grouped_query_attention::GroupedQueryAttention;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use lora::Lora;
pub use mixture_of_experts::{GroupedExperts, MixtureOfExperts, Routing};
pub use mlp::Mlp;
pub use rms_norm::RmsNorm;
