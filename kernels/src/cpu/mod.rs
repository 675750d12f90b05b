//! CPU execution: thread pool, SIMD dispatch, vector maths and GEMM.

pub mod simd;
pub mod cores;
mod imbalance;
mod sync;
mod worker_slot;
pub(crate) mod pack_cache;
mod job;
pub mod pool;
pub mod math;
pub mod gemm;

pub use pool::Pool;
pub use simd::vectorized;
