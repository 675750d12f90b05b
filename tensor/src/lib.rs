//! The living room of shardgrad: layouts, signatures, redistribution, and the ops.
//!
//! This crate owns every sentence in which a shape or a placement occurs. It knows no tape and no parameter. Every op is
//! one file that states its index signature, its dtype rule, its forward and its vjp; the layout rule, the shape check,
//! the error text and the exhaustive tests are derived from them. Collectives have one general door,
//! [`redistribute::run`]; ops that override [`Op::infer`] and [`control`] are the others.

#![forbid(unsafe_code)]

pub mod state;
pub mod dim;
pub mod layout;
mod text;
pub mod lineage;
pub mod refusal;
pub mod signature;
mod join;
pub mod infer;
pub mod step;
pub mod route;
pub mod reshape_rule;
pub mod repair;
mod recent;
mod memo;
pub mod plans;
pub mod context;
pub mod piece;
mod watch;
pub mod tensor;
pub mod redistribute;
pub mod host;
pub mod compare;
#[cfg(feature = "ndarray")]
pub mod interchange;
pub mod fill;
pub mod bytes;
pub mod control;
pub mod gate;
pub mod capture;
pub mod agreement;
pub mod update;
pub mod growing;
pub mod op;
pub mod ops;
pub mod value;
mod plain;
pub mod residual;
pub mod shaping;
pub mod indexing;
pub mod contraction;
pub mod elementwise;
pub mod reduction;
pub mod local_map;
pub mod catalog;
pub mod quotient;
pub mod check;

pub use bytes::DetachedBytes;
pub use capture::{Captured, capture};
pub use context::Context;
pub use contraction::Contraction;
pub use dim::{AxisList, Dim};
pub use elementwise::Elementwise;
pub use gate::{Found, GatedStep, StepTold, Taken};
pub use growing::Growing;
pub use indexing::Indexing;
pub use infer::{Implied, Inference, Rule, infer};
pub use layout::Layout;
pub use lineage::Lineage;
pub use local_map::{MapLayouts, local_map};
pub use op::{Cotangents, Keeps, Local, Op, Pieces, Vjp, unwind};
pub use piece::{Piece, View, launch};
pub use plans::Fixed;
pub use reduction::Reduction;
pub use refusal::Refusal;
pub use repair::{Change, Infer, Move, Repair, repairs};
pub use reshape_rule::reshape_layout;
pub use residual::Residual;
pub use route::{Route, RouteCache, route};
pub use shaping::Shaping;
pub use shardgrad_dist::{
    Axis, AxisSet, Call, Error, Kind, Mesh, Origin, Phase, Rank, Record, Result, World,
};
pub use shardgrad_kernels::{DType, Dims, Element, PackCacheGuard};
pub use signature::{Labels, Mark, Signature, Term};
pub use state::State;
pub use step::{Step, adjoint, moved, moved_back};
pub use tensor::Tensor;
pub use value::Value;
