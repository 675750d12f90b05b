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
pub use grad_norm::grad_norm;
pub(crate) use hyperparameter::check_clip;
pub use loss_scale::LossScale;
pub use lr_scheduler::LrScheduler;
pub(crate) use optimizer::OptimizerStep;
pub use optimizer::{Optimizer, OptimizerState};
pub use param_group::ParamGroup;
pub use sgd::Sgd;
pub use shardgrad_tensor::{Hyperparameters, OverflowCheck};
