//! The CPU: a pool of threads, run-time SIMD dispatch, and vector maths.

pub mod gemm;
pub mod math;
pub mod pool;
pub mod simd;

pub use pool::Pool;
pub use simd::vectorized;
