//! shardgrad: a model-parallel tensor framework with autodiff.
//!
//! A model is written once, as if for one device. A [`Plan`](nn::Plan) says which mesh axes split which tensors; the
//! tape inserts the collectives. The same program runs on one core, on ranks as threads of one process, and on no
//! device at all (shapes only) to be explained before it is launched.
//!
//! ```
//! use shardgrad::prelude::*;
//!
//! module! { struct Mlp { up: Linear, down: Linear } }
//!
//! impl Mlp {
//!     fn forward(&self, x: &Var) -> Var {
//!         self.down.forward(&self.up.forward(x).gelu())
//!     }
//! }
//!
//! let losses = World::run(Mesh::parse("tp=2")?, |rank| {
//!     let mlp = Mlp { up: Linear::new(3, 8), down: Linear::new(8, 1) };
//!     let plan = Plan::tensor("tp").column("up").row("down");
//!     let model = Model::new(rank, mlp, &plan, 1)?;
//!     let tape = model.tape();
//!     let x = tape.constant(Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, -1.0, 0.0, 1.0])?);
//!     let loss = model.forward(&x).square().mean();
//!     loss.backward()?;
//!     assert_eq!(tape.gradients().len(), 4);
//!     loss.item()
//! })?;
//! assert_eq!(losses[0], losses[1]);
//! # Ok::<(), shardgrad::Error>(())
//! ```
//!
//! The crates below are rooms of one house; each states what it knows and what it must not know.

#![forbid(unsafe_code)]

pub use shardgrad_autograd as autograd;
pub use shardgrad_dist as dist;
pub use shardgrad_kernels as kernels;
pub use shardgrad_nn as nn;
pub use shardgrad_tensor as tensor;

pub use shardgrad_autograd::fuzz_model;
pub use shardgrad_dist::{Error, Kind, Result};
pub use shardgrad_tensor::check_op;

/// What a program that trains a model needs, in one `use`.
pub mod prelude {
    pub use shardgrad_autograd::{Gradients, Noise, Tape, Var};
    pub use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
    pub use shardgrad_kernels::DType;
    pub use shardgrad_nn::{
        AdamW, Attention, Dropout, Embedding, LayerNorm, Linear, Mlp, Model, Module, Optimizer, Param, Plan,
        Point, Precision, Settings, Sgd, StepArgs, Trainer, module,
    };
    pub use shardgrad_tensor::{
        Contraction, Elementwise, Indexing, Layout, Reduction, Residual, Shaping, State, Tensor, Value,
    };
}

/// Compiles and runs the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles and runs the code of the tutorial.
#[cfg(doctest)]
#[doc = include_str!("../docs/tutorial.md")]
struct Tutorial;
