//! Device meshes, process groups and collectives of shardgrad: the layer that `torch.distributed` is for PyTorch.
//!
//! A [`Mesh`] names the axes of a grid of ranks (PyTorch: `DeviceMesh`). A [`World`] starts the ranks, as threads of this process
//! ([`World::launch`]) or as one rank per process, over TCP ([`World::join`], feature `processes`), and gives each a [`Rank`]: the handle for
//! all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send, recv and barrier over any set of axes. The crate moves
//! flat buffers; it knows nothing of shapes, ops or gradients.
//!
//! Guarantees:
//! - Every collective carries a description (number, op, reduction, root, dtype, counts, axes, path, line of code, origin of its
//!   elements). Ranks whose calls differ get an error that names both calls, before anything is computed.
//! - No wait is endless: a mismatch, a deadlock over any groups, a rank that returned or failed, and a wait beyond
//!   [`World::timeout`] are each an error on every rank. [`World::launch`] returns the first cause.
//! - Results are deterministic: sums are formed in a fixed balanced tree over the group ranks, independent of timing, of the
//!   algorithm (direct or chunked) and of the transport (threads or TCP; NCCL with `World::tree_sums`).
//! - When a collective returns, no other rank holds a buffer that was passed to it.
//! - A [`Rank`] exists only while its function runs; it neither crosses threads nor lives in a global.
//! - There is no `unsafe` code: ranks share memory through reference-counted buffers that are read-only while shared.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "processes"),
    allow(dead_code, reason = "some items serve the connections of processes alone")
)]

mod encoding;
pub mod error;
pub mod mesh;
pub mod call;
pub mod trace;
mod issue_order;
pub mod process;
mod sync;
mod spin_condvar;
mod group_sync;
mod world_state;
mod report;
mod transport;
pub mod rank;
pub mod launch;

pub use call::{Call, Origin, Phase, ReduceOp};
pub use error::{Error, Kind, Result};
pub use issue_order::check_issue_order;
pub use launch::World;
pub use mesh::{Axis, AxisSet, Mesh};
pub use process::{Process, Token};
pub use rank::{PendingBuffer, Rank};
pub use trace::{MEMBER_SEPARATOR, Record, Trace};
#[cfg(feature = "processes")]
pub use transport::tcp::Rendezvous;
#[cfg(feature = "processes")]
#[doc(hidden)]
pub use transport::tcp::wire_fuzz::decode_untrusted;
