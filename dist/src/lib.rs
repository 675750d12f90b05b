//! The corridors of shardgrad: who talks to whom.
//!
//! This crate knows bytes, ranks and named axes; nothing of shapes, ops or gradients. A [`World`] launches
//! one thread per rank of a [`Mesh`]; each gets a [`Rank`], the one handle through which it meets the others.
//!
//! What always holds:
//! - Every collective carries what it is (number, op, reduction, root, dtype, counts, axes, path, line) and what its
//!   elements come from, and ranks that called different things get an error naming both. Nothing is computed from unlike calls.
//! - No wait is endless: a mismatch, a circle of waits over any groups, a rank that left and a wait beyond
//!   [`World::timeout`] all end in an error on every rank, and [`World::launch`] returns the first cause.
//! - Results are functions of the inputs and the mesh: sums are formed in a fixed balanced tree over the place
//!   in the group, whatever the timing and whichever algorithm ran.
//! - When a collective returns, no other rank holds a buffer that was passed to it.
//! - A [`Rank`] exists only inside a launch, and neither crosses threads nor is reached through a global.
//! - There is no `unsafe` code here: ranks share memory through ref-counted buffers that nobody can write
//!   while they are shared.

#![forbid(unsafe_code)]

mod bytes;
pub mod error;
pub mod mesh;
pub mod call;
pub mod trace;
pub mod process;
mod sync;
mod park;
mod group;
mod table;
mod report;
mod transport;
pub mod rank;
pub mod launch;

pub use call::{Call, Origin, Phase, ReduceOp};
pub use error::{Error, Kind, Result};
pub use launch::World;
pub use mesh::{Axis, AxisSet, Mesh};
pub use process::Process;
pub use rank::Rank;
pub use trace::{Record, Trace};
pub use transport::wire::Rendezvous;
