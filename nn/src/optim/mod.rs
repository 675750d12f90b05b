//! Optimizers: AdamW and SGD updates in place on the shards of each rank, Muon on whole matrices, several optimizers by
//! parameter names, averages of weights; the global gradient norm, clipping, loss scaling and learning-rate schedules.

mod grad_norm;
mod lr_scheduler;
mod loss_scale;
mod hyperparameter;
mod param_group;
mod matrices;
mod copies;
mod optimizer;
mod adamw;
mod velocities;
mod sgd;
mod muon;
mod optimizers;
mod ema;

pub use adamw::AdamW;
pub use ema::{Ema, EmaSwap, EmaWithOptimizer};
pub use grad_norm::grad_norm;
pub(crate) use hyperparameter::check_clip;
pub use loss_scale::LossScale;
pub use lr_scheduler::LrScheduler;
pub use matrices::Matrix;
pub use muon::{Muon, MuonScale};
pub(crate) use optimizer::OptimizerStep;
pub use optimizer::{Optimizer, OptimizerState};
pub use optimizers::Optimizers;
pub use param_group::ParamGroup;
pub use sgd::Sgd;
pub use shardgrad_tensor::{Hyperparameters, OverflowCheck};
