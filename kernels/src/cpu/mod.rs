//! The CPU: a pool of threads, run-time SIMD dispatch, and vector maths.

pub mod simd;
pub mod cores;
mod pace;
mod sync;
mod seat;
pub(crate) mod recurring;
mod job;
pub mod pool;
pub mod math;
pub mod gemm;

pub use pool::Pool;
pub use simd::vectorized;
