//! Optimizers: a step in place on what each rank stores, the global gradient norm, learning-rate schedules.

mod norm;
mod schedule;
mod loss_scale;
mod adamw;
mod sgd;

pub use adamw::{AdamW, Group, Report, StepArgs};
pub use loss_scale::LossScale;
pub use norm::{Norm, grad_norm};
pub use schedule::Schedule;
pub use sgd::Sgd;
