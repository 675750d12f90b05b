//! Optimizers: AdamW and SGD updates in place on the shards of each rank, the global gradient norm, clipping, loss
//! scaling and learning-rate schedules.

mod grad_norm;
mod lr_scheduler;
mod loss_scale;
mod hyperparameter;
mod param_group;
mod optimizer;
mod adamw;
mod sgd;

pub use adamw::AdamW;
pub(crate) use grad_norm::PartialLoss;
pub use grad_norm::{GradNorm, grad_norm};
pub(crate) use hyperparameter::check_clip;
pub use loss_scale::LossScale;
pub use lr_scheduler::LrScheduler;
pub use optimizer::{Optimizer, OptimizerState, StepArgs, UpdateReport};
pub(crate) use optimizer::{OptimizerStep, step};
pub use param_group::ParamGroup;
pub use sgd::Sgd;
pub use shardgrad_tensor::{HostStep, OverflowCheck};
