//! Model-parallel deep learning: tensors, reverse-mode autodiff and training on a device mesh.
//!
//! You write a model once, as if for one device. A [`Plan`](nn::Plan) states which mesh axes shard which tensors, and the
//! [`Tape`](autograd::Tape) inserts the collectives, forward and backward. Data parallelism (DDP), sharded parameters (FSDP, ZeRO), tensor,
//! sequence, context, expert and pipeline parallelism are rules of a plan; losses do not depend on the mesh.
//!
//! The same program runs on one core, on ranks that are threads or processes, on an NVIDIA GPU (feature `cuda`), and as a dry run without
//! data that lists every collective with its bytes.
//!
//! # Example
//!
//! A two-layer network under tensor parallelism over two ranks (threads):
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
//!     let plan = Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down");
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
//! # Where to start
//!
//! - [`nn::Plan`]: how parameters and activations are sharded, with ready-made plans such as
//!   [`data_parallel`](nn::Plan::data_parallel), [`tensor_parallel`](nn::Plan::tensor_parallel) and
//!   [`pipeline_parallel`](nn::Plan::pipeline_parallel);
//! - [`nn::Trainer`]: training steps with microbatches (gradient accumulation), pipelines, clipping, mixed precision and checkpoints;
//! - [`dist::World`]: launches ranks as threads or joins processes; [`dist::Mesh`] names the axes;
//! - [`tensor::Tensor`] and [`autograd::Var`]: ops on values, and on recorded values with gradients.
//!
//! # Features
//!
//! - `cli` (default): the command line. A program that disables default features compiles 24 packages in place of 99;
//! - `processes` (default): ranks as processes ([`World::join`](dist::World::join)), on one machine or several, and the cryptography of
//!   their connections, 32 packages. Without it ranks are threads of one process;
//! - `cuda`: the back end for NVIDIA GPUs, whose libraries are loaded at run time;
//! - `nccl`: collectives of processes with a GPU each by NCCL, loaded at run time; with `cuda` and `processes`;
//! - `ndarray`: tensors from and to arrays of the crate ndarray;
//! - `tokenizers`: text in the tokens of `tokenizer.json`, in the command line.
//!
//! # Crates
//!
//! | crate | contents |
//! |---|---|
//! | [`kernels`] | dtypes, buffers, compute kernels for CPU and CUDA |
//! | [`dist`] | mesh, ranks, collectives, errors |
//! | [`tensor`] | sharded tensors, layouts, ops, redistribution |
//! | [`autograd`] | tape, gradients, pipeline schedules |
//! | [`nn`] | modules, models, plans, optimizers, the trainer, Hugging Face files, checkpoints |
//!
//! Each crate depends only on those above it. [`prelude`] exports what a training program needs. Tests of your own ops and models use
//! the crate `shardgrad-testing`, a dev-dependency.
//!
//! The command line (`shardgrad train`, `eval`, `generate`, `explain`, ...) is the binary of this package.

#![forbid(unsafe_code)]

pub use shardgrad_autograd as autograd;
pub use shardgrad_dist as dist;
pub use shardgrad_kernels as kernels;
#[cfg(feature = "nccl")]
pub use shardgrad_nccl as nccl;
pub use shardgrad_nn as nn;
pub use shardgrad_tensor as tensor;

pub use shardgrad_dist::{Error, Kind, Result};

/// The types, traits and macros of a training program: `use shardgrad::prelude::*`.
pub mod prelude {
    pub use shardgrad_autograd::{Gradients, Noise, Tape, Var};
    pub use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
    pub use shardgrad_kernels::DType;
    pub use shardgrad_nn::checkpoint::{self, Checkpoints, RunState, resume};
    pub use shardgrad_nn::optim::{OverflowCheck, ParamGroup};
    pub use shardgrad_nn::{
        ActivationPoint, AdamW, Attention, ControlFlags, CrossEntropy, Dropout, Embedding, Init, LayerNorm,
        Linear, Log, Lora, Loss, LrScheduler, MicrobatchLosses, Mlp, Model, Module, Optimizer, Param, Plan,
        Precision, RmsNorm, Sgd, StepArgs, StepReport, Trainer, TrainerConfig, cross_entropy, module,
    };
    pub use shardgrad_nn::{Ema, Muon, Optimizers};
    pub use shardgrad_tensor::{
        Contraction, Elementwise, Indexing, Layout, Placement, Reduction, Resharding, Shaping, Tensor, Value,
    };
    // Methods stay in scope where a program imports another type of the same name, such as `serde_json::Value`.
    pub use shardgrad_tensor::{
        Contraction as _, Elementwise as _, Indexing as _, Reduction as _, Resharding as _, Shaping as _,
        Value as _,
    };
}

/// Runs the code of the README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the code of the tutorial as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/tutorial.md")]
struct Tutorial;

/// Runs the code of the page on exact means as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/exact-mean.md")]
struct ExactMean;
