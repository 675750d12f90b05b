//! Optimizers: a step in place on what each rank stores, the global gradient norm, learning-rate schedules.

mod norm;
mod schedule;
mod loss_scale;
mod step;
mod adamw;
mod sgd;

pub use adamw::AdamW;
pub use loss_scale::LossScale;
pub(crate) use norm::LossParts;
pub use norm::{Norm, grad_norm};
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use shardgrad_tensor::{GatedStep, Taken};
pub use step::{Group, Kept, Optimizer, Report, StepArgs};
pub(crate) use step::{Update, check_clip, step};
