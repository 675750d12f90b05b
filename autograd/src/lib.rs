//! Reverse-mode automatic differentiation: the tape, activation checkpointing, recorded programs and pipeline
//! schedules.
//!
//! The tape stores the order in which ops were applied. This crate names no op and no parameter and inspects no shapes:
//! the layouts of cotangents follow from the layouts of values (the dual layout).

#![forbid(unsafe_code)]

mod id;
pub mod program;
pub mod tape;
mod gathered;
mod leaf;
pub mod var;
pub mod replay;
mod activation_checkpoint;
mod split_backward;
pub mod pipeline;

pub use id::{Gradients, Key, Noise, ReplayNoise};
pub use program::{AccumulationDType, ExternalInput, OpRecord, Program, Slot};
pub use replay::Values;
pub use tape::Tape;
pub use var::Var;
