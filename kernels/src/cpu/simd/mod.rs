//! Run-time SIMD dispatch: one body, compiled once per instruction set, chosen at the call.
//!
//! Kernels are plain loops over slices. [`vectorized`] compiles such a loop for AVX-512, for AVX2 with FMA and for
//! the baseline of the target, and calls the best that this CPU has. A loop that calls `mul_add` gives the same
//! bits on each of them; loops must not depend on the vector width for the order of a sum.

pub mod scratch;
pub(crate) mod stream;
pub(crate) mod transpose;
pub(crate) mod transpose_tile;
pub(crate) mod microkernel;
pub mod peak;
pub(crate) mod pack;
pub(crate) mod prepacked;
pub(crate) mod blocked_gemm;
pub(crate) mod gemv;
pub(crate) mod gemv_transposed;
pub(crate) mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
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

/// How far ahead memory is asked for that is read in one long run: about what arrives while a miss is waited for.
const AHEAD_BYTES: usize = 4096;

/// Asks for the cache lines of some elements ahead of their use.
#[inline(always)]
pub(crate) fn prefetch<T>(some: &[T]) {
    lines(some.as_ptr().cast(), size_of_val(some));
}

/// Asks for the cache lines that will be read some time after these elements, if the run goes on.
#[inline(always)]
pub(crate) fn prefetch_ahead<T>(now: &[T]) {
    prefetch_after(now, AHEAD_BYTES);
}

/// Asks for the cache lines that lie so many bytes behind these elements, or as far as memory is asked for ahead if that is more.
#[inline(always)]
pub(crate) fn prefetch_after<T>(now: &[T], bytes: usize) {
    lines(now.as_ptr().cast::<i8>().wrapping_add(bytes.max(AHEAD_BYTES)), size_of_val(now));
}

/// Nothing is read, so that lines may lie anywhere.
#[inline(always)]
fn lines(start: *const i8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        // SAFETY: every CPU of this architecture has the instruction, and an address that is none does nothing.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(start.wrapping_add(line))
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes);
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
