//! The memory of shardgrad: what happened on the way forward, and its replay backwards.
//!
//! This crate knows the order in which ops were applied. It names no op and no parameter, and it asks no
//! question about shapes: layouts of cotangents follow from layouts of values (the gradient law).

#![forbid(unsafe_code)]

mod id;
pub mod program;
pub mod tape;
mod leaf;
pub mod var;
pub mod replay;
mod remat;
mod halves;
pub mod pipeline;
pub mod fuzz;

pub use id::{Draw, Gradients, Key, Noise};
pub use program::{OpRecord, Outer, Program, Slot, SumDType};
pub use replay::Values;
pub use tape::Tape;
pub use var::Var;
