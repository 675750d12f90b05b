//! Run-time SIMD dispatch: one body, compiled once per instruction set, selected at the call.
//!
//! Kernels are plain loops over slices. [`vectorized`] compiles such a loop for AVX-512, for AVX2 with FMA and for the baseline of the
//! target, and calls the best that this CPU supports. A loop that calls `mul_add` gives the same bits on each of them; the order of a
//! sum must not depend on the vector width.

pub mod scratch;
pub(crate) mod stream;
pub(crate) mod transpose;
pub(crate) mod transpose_tile;
pub(crate) mod microkernel;
pub(crate) mod transpose_block;
pub mod peak;
pub(crate) mod pack;
pub(crate) mod prepacked;
pub(crate) mod leaf_schedule;
pub(crate) mod tile_sums;
pub(crate) mod blocked_gemm;
pub(crate) mod leaf_gemm;
pub(crate) mod gemv;
pub(crate) mod gemv_transposed;
pub(crate) mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod bf16;

use std::sync::OnceLock;

/// The environment variable that limits the instruction sets of kernels: `baseline`, `avx2` or `avx512`.
///
/// Where it is set, bf16 dot products (AMX, AVX512-BF16) are not used either, so that products of bf16 have the same bits on every CPU.
#[doc(alias = "ATEN_CPU_CAPABILITY")]
#[doc(alias = "ONEDNN_MAX_CPU_ISA")]
#[doc(alias = "MKL_CBWR")]
pub const LIMIT_VARIABLE: &str = "SHARDGRAD_CPU_ISA";

/// An instruction set that a body is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The baseline of the target.
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// Returns the best instruction set of this CPU within the limit of [`LIMIT_VARIABLE`] (decided once).
///
/// # Panics
/// As [`limit`].
#[must_use]
#[inline]
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| limit().map_or(detected(), |limit| limit.min(detected())))
}

/// Returns the limit of [`LIMIT_VARIABLE`], if it is set (read once).
///
/// # Panics
/// If [`requested_limit`] is an error.
#[must_use]
pub fn limit() -> Option<Level> {
    static LIMIT: OnceLock<Option<Level>> = OnceLock::new();
    *LIMIT.get_or_init(|| requested_limit().unwrap_or_else(|why| panic!("{why}")))
}

/// Reads the limit from the environment.
///
/// # Errors
/// A text that names the variable, if its value is not an instruction set.
pub fn requested_limit() -> Result<Option<Level>, String> {
    let Some(value) = std::env::var_os(LIMIT_VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    match value.to_str() {
        Some("baseline") => Ok(Some(Level::Baseline)),
        Some("avx2") => Ok(Some(Level::Avx2)),
        Some("avx512") => Ok(Some(Level::Avx512)),
        _ => Err(format!("{LIMIT_VARIABLE}={} is not one of baseline, avx2, avx512", value.display())),
    }
}

/// Returns the best instruction set of this CPU (std caches the detection).
fn detected() -> Level {
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

/// Runs `body` compiled for the best instruction set of this CPU. Functions that it calls are included if they are `#[inline(always)]`.
#[inline]
pub fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: this CPU has every feature that `avx512` enables: `level` is at most what was detected.
        Level::Avx512 => return unsafe { avx512(body) },
        // SAFETY: as above, of `avx2`.
        Level::Avx2 => return unsafe { avx2(body) },
        Level::Baseline => {}
    }
    body()
}

/// Prefetch distance in a long sequential read: about the bytes that arrive during one cache miss.
const AHEAD_BYTES: usize = 4096;

/// Prefetches the cache lines of a slice.
#[inline(always)]
pub(crate) fn prefetch<T>(some: &[T]) {
    prefetch_bytes(some.as_ptr().cast(), size_of_val(some));
}

/// Prefetches the cache lines at the prefetch distance behind a slice of a sequential read.
#[inline(always)]
pub(crate) fn prefetch_ahead<T>(now: &[T]) {
    prefetch_after(now, AHEAD_BYTES);
}

/// Prefetches the cache lines `bytes` behind a slice, or at the prefetch distance if that is more.
#[inline(always)]
pub(crate) fn prefetch_after<T>(now: &[T], bytes: usize) {
    prefetch_bytes(now.as_ptr().cast::<i8>().wrapping_add(bytes.max(AHEAD_BYTES)), size_of_val(now));
}

/// Prefetches a range of bytes. Nothing is read, so any address is allowed.
#[inline(always)]
fn prefetch_bytes(start: *const i8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        // SAFETY: every CPU of this architecture has the instruction, and an invalid address has no effect.
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
