//! Run-time SIMD dispatch: one body, compiled once per instruction set, chosen at the call.
//!
//! Kernels are plain loops over slices. [`vectorized`] compiles such a loop for AVX-512, for AVX2 with FMA and for
//! the baseline of the target, and calls the best that this CPU has. A loop that calls `mul_add` gives the same
//! bits on each of them; loops must not depend on the vector width for the order of a sum.

pub mod scratch;
pub(crate) mod turn;
pub(crate) mod tile;
pub mod roof;
pub(crate) mod pack;
pub(crate) mod blocks;
pub(crate) mod thin;
pub(crate) mod turned;
pub(crate) mod pairs;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod bf16;

/// The instruction sets that a body is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What every CPU of the target has.
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// The best level of this CPU (std caches the detection).
#[must_use]
#[inline]
pub fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("f16c");
        if has_avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512cd")
        {
            return Level::Avx512;
        }
        if has_avx2 {
            return Level::Avx2;
        }
    }
    Level::Baseline
}

/// Runs `body` compiled for the best instruction set of this CPU. Functions that it calls take part if they are
/// `#[inline(always)]`.
#[inline]
pub fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: `level` has just detected every feature that `avx512` enables.
        Level::Avx512 => return unsafe { avx512(body) },
        // SAFETY: `level` has just detected every feature that `avx2` enables.
        Level::Avx2 => return unsafe { avx2(body) },
        Level::Baseline => {}
    }
    body()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,bmi2,f16c")]
fn avx512<R>(body: impl FnOnce() -> R) -> R {
    body()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2,f16c")]
fn avx2<R>(body: impl FnOnce() -> R) -> R {
    body()
}
