//! Distributed tensors: layouts, einsum-like signatures, layout inference, redistribution, and the ops.
//!
//! This crate contains everything that deals with a shape or a layout, and nothing about tapes or parameters. A
//! [`Tensor`] is a global tensor with a [`Layout`] on a mesh, like PyTorch's `DTensor` or a sharded `jax.Array`. Every
//! op is one file, or one row of a table of ops, that states its index signature, its dtype rule, its forward and its
//! vjp; the layout rule, the shape check, the error text and the exhaustive tests are derived from them.
//! [`redistribute::run`] makes all collective calls except those of ops that override [`Op::infer`], of [`control`] and of
//! [`consistency`].

#![forbid(unsafe_code)]

pub mod placement;
pub mod dim;
pub mod layout;
mod layout_text;
pub mod lineage;
pub mod refusal;
pub mod signature;
mod unify;
pub mod infer;
pub mod step;
pub mod route;
pub mod reshape_rule;
pub mod repair;
mod direct_mapped_cache;
mod inference_cache;
pub mod plan_cache;
pub mod context;
pub mod local_tensor;
mod anomaly;
pub mod tensor;
pub mod redistribute;
pub mod host;
pub mod compare;
#[cfg(feature = "ndarray")]
pub mod ndarray_interop;
pub mod fill;
pub mod bytes;
pub mod control;
pub mod anomaly_report;
pub mod grad_norm;
pub mod overflow_check;
pub mod graph_capture;
pub mod consistency;
pub mod optimizer_step;
pub mod growable;
pub mod op;
pub mod ops;
pub mod value;
pub mod shaping;
pub mod indexing;
pub mod contraction;
pub mod elementwise;
pub mod reduction;
pub mod local_map;
pub mod op_table;
pub mod check;

pub use bytes::DetachedBytes;
pub use context::Context;
pub use contraction::Contraction;
pub use dim::{AxisList, Dim};
pub use elementwise::Elementwise;
pub use graph_capture::{CapturedGraph, capture};
pub use growable::GrowableTensor;
pub use indexing::Indexing;
pub use infer::{ImplicitStep, Inference, Rule, infer};
pub use layout::Layout;
pub use lineage::Lineage;
pub use local_map::{LocalMapLayouts, local_map};
pub use local_tensor::{LocalTensor, View, launch};
pub use op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, unwind};
pub use overflow_check::{HostStep, OverflowCheck, StepInputs, StepOutcome};
pub use placement::Placement;
pub use plan_cache::PlanKey;
pub use reduction::Reduction;
pub use refusal::Refusal;
pub use repair::{ArgChange, Infer, Repair, RepairAction, repairs};
pub use reshape_rule::reshape_layout;
pub use route::{Route, RouteCache, route};
pub use shaping::Shaping;
pub use shardgrad_dist::{
    Axis, AxisSet, Call, Error, Kind, Mesh, Origin, Phase, Rank, Record, Result, World,
};
pub use shardgrad_kernels::{DType, Dims, Element, PackCacheGuard};
pub use signature::{Labels, Mark, Signature, Term};
pub use step::{Step, adjoint, elements_moved, elements_moved_backward};
pub use tensor::Tensor;
pub use value::{Residual, Value};
