//! Neural networks of shardgrad: parameters, layers, models, parallelism plans, optimizers, the trainer, checkpoints and
//! Hugging Face folders.
//!
//! A model is a plain struct of layers, and the names of its fields are the names of its parameters. Its code is written for
//! one device. A [`Plan`] states which mesh axes shard which parameters and activations (data, tensor, pipeline, context and
//! expert parallelism), and [`Model::new`] applies the plan to the model on each rank.
//!
//! Invariants:
//! - `layer` and `model` name no mesh axis, no rank and no collective.
//! - The name of a parameter, its initial value and its form in files depend on the model alone, not on the mesh.
//! - Stored parameters are shards or identical copies, never partial sums; optimizer state has the layout of its parameter.
//! - A plan rule that matches nothing is an error.

#![forbid(unsafe_code)]

pub mod module;
pub mod plan;
pub mod sharded_model;
mod inspection;
pub mod loss;
pub mod metric;
mod expert_load;
pub mod layer;
pub mod optim;
mod pipelined_model;
pub mod checkpoint;
mod state_hash;
pub mod model;
pub mod inference;
pub mod trainer;
mod log;

pub use checkpoint::hf::{
    BertConfig, BertHead, ExpertsConfig, Gpt2Config, LlamaConfig, LlamaKind, ModelConfig,
};
pub use checkpoint::{CastCounts, CastRule, LoadFilter, RunState, WeightSnapshot};
pub use expert_load::ExpertLoad;
pub use inference::decoding::DecodingSession;
pub use inference::inference_model::{InferenceModel, ResultRanks};
pub use layer::kv_cache::{KvCache, LayerKvCache};
pub use layer::{
    Attention, Block, DocumentPoints, Dropout, Embedding, EncoderAttention, FeedForward, GatedMlp,
    GroupedQueryAttention, LayerNorm, Linear, Lora, MixtureOfExperts, Mlp, PackedDocuments, Residual,
    RmsNorm, document_ids, zigzag_order,
};
pub use log::{Log, Scalar};
pub use loss::{
    CrossEntropy, Loss, MicrobatchLosses, PartialLoss, bce_with_logits, cross_entropy, expert_imbalance,
    load_balancing_loss, mse,
};
pub use metric::accuracy;
pub use model::{Bert, Gpt2, HfModel, LanguageModel, Llama};
pub use module::activation_point::ActivationPoint;
pub use module::adapter::{Adaptable, Adapter, AdapterSlot};
pub use module::param::{Init, Param};
pub use module::precision::Precision;
pub use module::{Module, ModuleLeaf};
pub use optim::{AdamW, Ema, LossScale, LrScheduler, Muon, Optimizer, Optimizers, Sgd};
pub use pipelined_model::{GatheringReason, StageGathering};
pub use plan::Plan;
pub use sharded_model::Model;
pub use shardgrad_tensor::{ControlFlags, StateHash, StepArgs, StepReport};
pub use state_hash::state_hash;
pub use trainer::{Deterministic, Trainer, TrainerConfig};
