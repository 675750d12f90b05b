//! Distributed tensors: layouts, einsum-like signatures, layout inference, redistribution, and the ops.
//!
//! This crate contains everything that deals with a shape or a layout, and nothing about tapes or parameters. A
//! [`Tensor`] is a global tensor with a [`Layout`] on a mesh, like PyTorch's `DTensor` or a sharded `jax.Array`. Every
//! op is one file, or one row of a table of ops, that states its index signature, its dtype rule, its forward and its
//! vjp; the layout rule, the shape check, the error text and the exhaustive tests are derived from them.
//! [`tensor::redistribute::run`] makes all collective calls except those of ops that exchange by a rule of their own, of [`training_step::control`] and of
//! [`training_step::consistency`].

#![forbid(unsafe_code)]

pub mod layout;
pub mod execution;
pub mod tensor;
pub mod training_step;
pub mod op;
pub mod ops;
pub mod methods;
pub mod op_table;

pub use execution::context::Context;
pub use execution::local_tensor::{LocalTensor, View, launch};
pub use execution::plan_cache::PlanKey;
pub use layout::Layout;
pub use layout::dim::{AxisList, Dim};
pub use layout::infer::{ImplicitStep, Inference, Rule, infer};
pub use layout::lineage::Lineage;
pub use layout::placement::Placement;
pub use layout::refusal::Refusal;
pub use layout::repair::{ArgChange, Infer, Repair, RepairAction, repairs};
pub use layout::reshape_rule::reshape_layout;
pub use layout::route::{Route, RouteCache, route};
pub use layout::signature::{Labels, Mark, Signature, Term};
pub use layout::step::{Step, adjoint, elements_moved, elements_moved_backward};
pub use methods::contraction::Contraction;
pub use methods::elementwise::Elementwise;
pub use methods::indexing::Indexing;
pub use methods::local_map::{LocalMapLayouts, local_map};
pub use methods::reduction::Reduction;
pub use methods::resharding::Resharding;
pub use methods::shaping::Shaping;
pub use methods::value::Value;
pub use op::{
    Cotangents, Decomposition, ForwardContext, LocalTensors, Op, Operand, Point, SavedForBackward, Vjp,
    unwind,
};
pub use ops::experts::RowsToExperts;
pub use shardgrad_dist::{
    Axis, AxisSet, Call, Error, Kind, Mesh, Origin, Phase, Rank, Record, Result, World,
};
pub use shardgrad_kernels::host_vec::try_zeroed;
pub use shardgrad_kernels::{DType, Dims, Element, PackCacheGuard};
pub use tensor::Tensor;
pub use tensor::bytes::DetachedBytes;
pub use tensor::growable::GrowableTensor;
pub use training_step::graph_capture::{CapturedGraph, capture};
pub use training_step::overflow_check::{Hyperparameters, OverflowCheck};
pub use training_step::state_hash::StateHash;
pub use training_step::{Auxiliary, AuxiliaryDivisor, AuxiliaryVector, ControlFlags, StepArgs, StepReport};
