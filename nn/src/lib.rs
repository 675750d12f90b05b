//! The study of shardgrad: parameters, layers, models, plans and optimizers.
//!
//! A model is a plain struct of layers whose fields are its names. It is written as if for one device; a [`Plan`] says
//! which mesh axes split which parameters and activations, and [`Model::new`] brings the two together on a rank.
//!
//! What always holds:
//! - `layer` and `model` name no mesh axis, no rank and no collective.
//! - A parameter's name, its initial value and its file form are functions of the model text, not of the mesh.
//! - What is stored holds only shards and invariant copies; optimizer state lies as its parameter does.
//! - A rule of a plan that matches nothing is an error.

#![forbid(unsafe_code)]

pub mod name;
pub mod precision;
pub mod point;
pub mod param;
pub mod module;
pub mod plan;
pub mod placed;
pub mod loss;
pub mod cache;
pub mod layer;
pub mod optim;
pub mod hf;
pub mod model;
pub mod cast;
pub mod checkpoint;
pub mod resume;
pub mod reading;
mod staged;
pub mod rescue;
mod captured;
pub mod trainer;

pub use cache::{Cache, Past};
pub use cast::{Cast, Casts};
pub use hf::{BertConfig, BertHead, Gpt2Config, LlamaConfig, LlamaKind, ModelConfig};
pub use layer::{
    Attention, Block, Dropout, Embedding, Experts, FeedForward, GatedMlp, GroupedAttention, LayerNorm,
    Linear, Mlp, RmsNorm, SelfAttention,
};
pub use loss::{CrossEntropy, balance, bce_with_logits, cross_entropy, mse};
pub use model::{Bert, Family, Gpt2, LanguageModel, Llama};
pub use module::{Leaf, Module};
pub use optim::{AdamW, LossScale, Optimizer, Report, Schedule, Sgd, StepArgs};
pub use param::{Init, Param};
pub use placed::Model;
pub use plan::Plan;
pub use point::Point;
pub use precision::Precision;
pub use reading::Reading;
pub use rescue::Rescued;
pub use resume::RunState;
pub use trainer::{Settings, StepReport, Trainer};
