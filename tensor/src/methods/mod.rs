//! The methods of tensors and variables: one trait for each group of ops, with one implementation for [`Tensor`](crate::Tensor) and
//! one for variables of a tape.

pub mod value;
mod operators;
pub mod resharding;
pub mod shaping;
pub mod indexing;
pub mod contraction;
pub mod elementwise;
pub mod reduction;
pub mod local_map;
