//! Reverse-mode automatic differentiation: the tape, activation checkpointing, recorded programs and pipeline
//! schedules.
//!
//! The tape stores the order in which ops were applied. This crate names no op and no parameter and inspects no shapes:
//! the layouts of cotangents follow from the layouts of values (the dual layout).

#![forbid(unsafe_code)]

mod id;
pub mod program;
mod route;
mod regather;
mod node;
mod gathers_ahead;
mod leaf;
mod accumulate;
pub mod tape;
mod operators;
mod resharding;
pub mod pipeline;

pub use id::{Gradients, Key, Noise, ReplayNoise};
pub use leaf::{GatherMember, GatherOrder, GatherPolicy, GatheredLifetime};
pub use program::{AccumulationDType, ExternalInput, OpRecord, Program, Slot};
pub use shardgrad_tensor::tensor::reduce_buckets::BucketBytes;
pub use tape::{SavedBuffer, Tape, Values, Var};
