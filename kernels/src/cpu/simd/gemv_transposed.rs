//! gemv by a transposed matrix, whose columns are contiguous: the product of decoding one token with weights `[out, in]`. Squares of the
//! matrix are transposed in registers while loading, one lane per element of the result, so that nothing but the result is written and
//! every sum is taken in the order of k.
//!
//! The bits of the sums are those of [`crate::cpu::gemm`].

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "there are vectors of that one architecture only")
)]

use crate::cpu::simd::Level;
use crate::cpu::simd::microkernel::Vector;
use crate::cpu::simd::pack::KC;
use crate::dtype::{DType, Float, Real};
#[cfg(target_arch = "x86_64")]
use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// y = x b for a b of contiguous columns. Arguments: x and its length; the first column and the distance of columns in bytes; y and its
/// length.
///
/// # Safety
/// x and y are of the accumulator type; y.1 columns of x.1 elements are within the memory; the CPU has the instruction set.
type GemvFn = unsafe fn((*const u8, usize), (*const u8, usize), (*mut u8, usize));

/// Returns whether an instruction set has a kernel for a dtype.
pub(crate) fn is_supported(at: Level, dtype: DType) -> bool {
    gemv_fn(dtype, at).is_some()
}

/// y = x b for a `b` of y.len() columns of x.len() elements; column j begins at `j * stride`. Panics if the instruction set is not
/// [supported](is_supported).
pub(crate) fn gemv_column_major<T: Float>(at: Level, x: &[T::Acc], b: &[T], stride: usize, y: &mut [T::Acc]) {
    assert!(at as u8 <= super::level() as u8, "this CPU has the level");
    let gemv = gemv_fn(T::DTYPE, at).expect("the level has vectors for the dtype");
    if let Some(last) = y.len().checked_sub(1) {
        assert!(last * stride + x.len() <= b.len(), "b must be within its memory");
    }
    let (x, b) = ((x.as_ptr().cast(), x.len()), (b.as_ptr().cast(), stride * size_of::<T>()));
    // SAFETY: the reach and the level were checked above; `gemv` is those of the dtype.
    unsafe { gemv(x, b, (y.as_mut_ptr().cast(), y.len())) };
}

/// Returns the kernel for a dtype on an instruction set.
fn gemv_fn(dtype: DType, at: Level) -> Option<GemvFn> {
    #[cfg(target_arch = "x86_64")]
    match (at, dtype) {
        (Level::Avx512, DType::F32) => return Some(avx512_f32),
        (Level::Avx512, DType::F64) => return Some(avx512_f64),
        (Level::Avx512, DType::BF16) => return Some(avx512_bf16),
        (Level::Avx512, DType::F16) => return Some(avx512_f16),
        (Level::Avx2, DType::F32) => return Some(avx2_f32),
        (Level::Avx2, DType::F64) => return Some(avx2_f64),
        (Level::Avx2, DType::BF16) => return Some(avx2_bf16),
        (Level::Avx2, DType::F16) => return Some(avx2_f16),
        _ => {}
    }
    let _ = (dtype, at);
    None
}

/// A load that transposes: vectors of neighbours from as many columns as there are lanes.
trait LoadTransposed<T, const K: usize>: Vector {
    /// Loads the next K elements of `LANES` columns that are `step` bytes apart: vector p holds the p-th of each.
    ///
    /// # Safety
    /// They are within the memory.
    unsafe fn load_transposed(from: *const u8, step: usize) -> [Self; K];
}

/// Vectors of columns taken together: independent sums hide latency.
const GROUPS: usize = 2;
/// Transposed loads per cache line of a column.
const PIECES: usize = 4;
/// Prefetch distance in bytes.
const PREFETCH_BYTES: usize = 512;

/// See [`GemvFn`].
#[inline(always)]
unsafe fn gemv<V: LoadTransposed<T, K>, T: Float<Acc = V::Item>, const K: usize>(
    (x, k): (*const u8, usize),
    (b, step): (*const u8, usize),
    (y, n): (*mut u8, usize),
) {
    // SAFETY: the caller guarantees both.
    let (x, y) = unsafe {
        (std::slice::from_raw_parts(x.cast::<V::Item>(), k), std::slice::from_raw_parts_mut(y.cast(), n))
    };
    let (many, rest) = y.split_at_mut(n - n % (GROUPS * V::LANES));
    for (i, y) in many.chunks_exact_mut(GROUPS * V::LANES).enumerate() {
        let b = b.wrapping_add(i * GROUPS * V::LANES * step);
        for (block, x) in x.chunks(KC).enumerate() {
            let b = b.wrapping_add(block * KC * size_of::<T>());
            // SAFETY: all of these columns are within the memory.
            let sums = unsafe { sums::<V, T, K, GROUPS>(x, b, step) };
            for (y, sum) in y.chunks_exact_mut(V::LANES).zip(sums) {
                add(block, sum, y);
            }
        }
    }
    let b = b.wrapping_add(many.len() * step);
    for (i, y) in rest.chunks_mut(V::LANES).enumerate() {
        let b = b.wrapping_add(i * V::LANES * step);
        let mut copies = [T::from_f64(0.0); LANES_MAX * KC];
        for (block, x) in x.chunks(KC).enumerate() {
            let b = b.wrapping_add(block * KC * size_of::<T>()).cast::<T>();
            for (j, to) in copies.chunks_exact_mut(KC).take(y.len()).enumerate() {
                // SAFETY: the caller guarantees the column.
                to[..x.len()].copy_from_slice(unsafe {
                    std::slice::from_raw_parts(b.wrapping_byte_add(j * step), x.len())
                });
            }
            // SAFETY: the copies hold as many columns as there are lanes, the missing ones zeros.
            let [sum] = unsafe { sums::<V, T, K, 1>(x, copies.as_ptr().cast(), KC * size_of::<T>()) };
            add(block, sum, y);
        }
    }
}

/// The most lanes of a vector.
const LANES_MAX: usize = 16;

/// Adds the sums of a block of k to y, as many as y has; the first block stores them.
#[inline(always)]
fn add<V: Vector>(block: usize, sums: V, y: &mut [V::Item]) {
    let mut lanes = [V::Item::ZERO; LANES_MAX];
    // SAFETY: no vector has more lanes.
    unsafe { sums.store(lanes.as_mut_ptr()) };
    for (y, sum) in y.iter_mut().zip(lanes) {
        *y = if block == 0 { sum } else { *y + sum };
    }
}

/// Returns the sums of a block for G vectors of columns, from 0 upwards in the order of k.
///
/// # Safety
/// As many columns of x.len() elements are within the memory.
#[inline(always)]
unsafe fn sums<V: LoadTransposed<T, K>, T: Float<Acc = V::Item>, const K: usize, const G: usize>(
    x: &[V::Item],
    from: *const u8,
    step: usize,
) -> [V; G] {
    let mut sums = [V::splat(V::Item::ZERO); G];
    let lines = x.chunks_exact(PIECES * K);
    let mut at = from;
    let rest = lines.remainder();
    for x in lines {
        for column in 0..G * V::LANES {
            V::prefetch(at.wrapping_add(column * step + PREFETCH_BYTES).cast());
        }
        for piece in 0..PIECES {
            for (g, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller guarantees the columns.
                let transposed = unsafe {
                    V::load_transposed(
                        at.wrapping_add(g * V::LANES * step + piece * K * size_of::<T>()),
                        step,
                    )
                };
                for (x, b) in x[piece * K..][..K].iter().zip(transposed) {
                    *sum = V::splat(*x).fma(b, *sum);
                }
            }
        }
        at = at.wrapping_add(PIECES * K * size_of::<T>());
    }
    for (p, x) in rest.iter().enumerate() {
        for (g, sum) in sums.iter_mut().enumerate() {
            let mut lanes = [V::Item::ZERO; LANES_MAX];
            for (lane, to) in lanes.iter_mut().take(V::LANES).enumerate() {
                let place = at.wrapping_add((g * V::LANES + lane) * step).cast::<T>().wrapping_add(p);
                // SAFETY: the caller guarantees the columns.
                *to = unsafe { *place }.widen();
            }
            // SAFETY: no vector has more lanes.
            *sum = V::splat(*x).fma(unsafe { V::load(lanes.as_ptr()) }, *sum);
        }
    }
    sums
}

/// Loads 16 bytes each from four columns that are `apart` bytes apart into one vector, so that no later shuffle crosses these parts.
///
/// # Safety
/// They are within the memory; used only inside of functions compiled for this level.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn four_parts(from: *const u8, apart: usize) -> __m512 {
    // SAFETY: as promised by the caller.
    unsafe {
        let row = _mm512_castps128_ps512(_mm_loadu_ps(from.cast()));
        let row = _mm512_insertf32x4::<1>(row, _mm_loadu_ps(from.wrapping_add(apart).cast()));
        let row = _mm512_insertf32x4::<2>(row, _mm_loadu_ps(from.wrapping_add(2 * apart).cast()));
        _mm512_insertf32x4::<3>(row, _mm_loadu_ps(from.wrapping_add(3 * apart).cast()))
    }
}

/// [`four_parts`] from two columns.
///
/// # Safety
/// As [`four_parts`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn two_parts(from: *const u8, apart: usize) -> __m256 {
    // SAFETY: as promised by the caller.
    unsafe { _mm256_loadu2_m128(from.wrapping_add(apart).cast(), from.cast()) }
}

macro_rules! load_transposed {
    ($v:ident: $($half:ident $widened:ident),*) => {$(
        /// Transposes pairs of 16-bit neighbours as 32-bit elements.
        #[cfg(target_arch = "x86_64")]
        impl LoadTransposed<$half, 8> for $v {
            #[inline(always)]
            unsafe fn load_transposed(from: *const u8, step: usize) -> [$v; 8] {
                // SAFETY: as promised by the caller; used only inside of functions compiled for this level.
                unsafe {
                    let [a, b, c, d] = <$v as LoadTransposed<f32, 4>>::load_transposed(from, step);
                    let ([a, e], [b, f], [c, g], [d, h]) = ($widened(a), $widened(b), $widened(c), $widened(d));
                    [a, e, b, f, c, g, d, h]
                }
            }
        }
    )*};
    ($v:ident $wide:ident: $parts:ident, $low:ident $high:ident $mix:ident, $to_wide:ident $low_wide:ident $high_wide:ident,
     bf16 $bf16:ident, f16 $f16:ident) => {
        #[cfg(target_arch = "x86_64")]
        impl LoadTransposed<f32, 4> for $v {
            #[inline(always)]
            unsafe fn load_transposed(from: *const u8, step: usize) -> [$v; 4] {
                // SAFETY: as promised by the caller; used only inside of functions compiled for this level.
                unsafe {
                    let r0 = $parts(from, 4 * step);
                    let r1 = $parts(from.wrapping_add(step), 4 * step);
                    let r2 = $parts(from.wrapping_add(2 * step), 4 * step);
                    let r3 = $parts(from.wrapping_add(3 * step), 4 * step);
                    let (low, high, low2, high2) = ($low(r0, r1), $high(r0, r1), $low(r2, r3), $high(r2, r3));
                    [
                        $mix::<0x44>(low, low2),
                        $mix::<0xee>(low, low2),
                        $mix::<0x44>(high, high2),
                        $mix::<0xee>(high, high2),
                    ]
                }
            }
        }

        #[cfg(target_arch = "x86_64")]
        impl LoadTransposed<f64, 2> for $wide {
            #[inline(always)]
            unsafe fn load_transposed(from: *const u8, step: usize) -> [$wide; 2] {
                // SAFETY: as above.
                unsafe {
                    let r0 = $to_wide($parts(from, 2 * step));
                    let r1 = $to_wide($parts(from.wrapping_add(step), 2 * step));
                    [$low_wide(r0, r1), $high_wide(r0, r1)]
                }
            }
        }

        load_transposed!($v: bf16 $bf16, f16 $f16);
    };
}
load_transposed!(__m512 __m512d: four_parts, _mm512_unpacklo_ps _mm512_unpackhi_ps _mm512_shuffle_ps,
    _mm512_castps_pd _mm512_unpacklo_pd _mm512_unpackhi_pd, bf16 bf16_512, f16 f16_512);
load_transposed!(__m256 __m256d: two_parts, _mm256_unpacklo_ps _mm256_unpackhi_ps _mm256_shuffle_ps,
    _mm256_castps_pd _mm256_unpacklo_pd _mm256_unpackhi_pd, bf16 bf16_256, f16 f16_256);

macro_rules! widened {
    ($($name:ident $v:ident: |$pairs:ident| $first:expr, $second:expr;)*) => {$(
        /// Widens the first and the second of pairs of 16-bit floats.
        ///
        /// # Safety
        /// Used only inside of functions compiled for this level.
        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn $name($pairs: $v) -> [$v; 2] {
            // SAFETY: as promised by the caller.
            unsafe { [$first, $second] }
        }
    )*};
}
widened! {
    bf16_512 __m512: |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(x))),
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(!0xffff)));
    bf16_256 __m256: |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x))),
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(!0xffff)));
    f16_512 __m512: |x| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(x))),
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(x))));
    f16_256 __m256: |x| _mm256_cvtph_ps(narrowed_256(_mm256_slli_epi32::<16>(_mm256_castps_si256(x)))),
        _mm256_cvtph_ps(narrowed_256(_mm256_castps_si256(x)));
}

/// Returns the upper 16 bits of each 32.
///
/// # Safety
/// Used only inside of functions compiled for this level.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn narrowed_256(x: __m256i) -> __m128i {
    // SAFETY: as promised by the caller.
    unsafe {
        let x = _mm256_srli_epi32::<16>(x);
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x))
    }
}

macro_rules! compiled {
    ($($name:ident $v:ident $t:ident $k:literal $features:literal;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        unsafe fn $name(x: (*const u8, usize), b: (*const u8, usize), y: (*mut u8, usize)) {
            // SAFETY: as promised by the caller.
            unsafe { gemv::<$v, $t, $k>(x, b, y) }
        }
    )*};
}
compiled! {
    avx512_f32 __m512 f32 4 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
    avx512_f64 __m512d f64 2 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
    avx512_bf16 __m512 bf16 8 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
    avx512_f16 __m512 f16 8 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
    avx2_f32 __m256 f32 4 "avx2,fma,f16c";
    avx2_f64 __m256d f64 2 "avx2,fma,f16c";
    avx2_bf16 __m256 bf16 8 "avx2,fma,f16c";
    avx2_f16 __m256 f16 8 "avx2,fma,f16c";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::level;
    #[cfg(not(target_arch = "x86_64"))]
    use half::{bf16, f16};

    /// Checks on every instruction set the bits of the definition, and that nothing is read or written outside: column counts that are
    /// whole vectors and not, depths around those of cache lines and blocks, columns close together and apart.
    fn check<T: Float>() {
        for at in [Level::Avx2, Level::Avx512].into_iter().filter(|at| *at as u8 <= level() as u8) {
            for n in [1, 2, 7, 8, 15, 16, 17, 31, 33, 65, 100] {
                for k in [1, 2, 3, 5, 8, 15, 16, 17, 31, 40, 255, 256, 257, 300, 513] {
                    for stride in [k, k + 1, k + 7] {
                        let number = |i: usize| ((i * 7919) % 1000) as f64 / 700.0 - 0.7;
                        let b: Vec<T> = (0..(n - 1) * stride + k).map(|i| T::from_f64(number(i))).collect();
                        let x: Vec<T::Acc> = (0..k).map(|i| T::from_f64(number(i + 5)).widen()).collect();
                        let mut y = vec![T::Acc::ONE; n + 1];
                        gemv_column_major(at, &x, &b, stride, &mut y[..n]);
                        assert!(y[n] == T::Acc::ONE, "memory behind y is not written");
                        for (j, y) in y[..n].iter().enumerate() {
                            let right = x.chunks(KC).enumerate().fold(T::Acc::ZERO, |all, (block, x)| {
                                let b = &b[j * stride + block * KC..];
                                let sum =
                                    x.iter().zip(b).fold(T::Acc::ZERO, |sum, (x, b)| x.fma(b.widen(), sum));
                                if block == 0 { sum } else { all + sum }
                            });
                            assert!(
                                *y == right,
                                "{} {at:?} n {n} k {k} stride {stride}, column {j}",
                                T::DTYPE
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bits_are_those_of_the_definition() {
        check::<f32>();
        check::<f64>();
        check::<bf16>();
        check::<f16>();
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_f16_is_widened_exactly() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for at in [Level::Avx2, Level::Avx512].into_iter().filter(|at| *at as u8 <= level() as u8) {
            let mut y = vec![0.0; all.len()];
            gemv_column_major(at, &[1.0], &all, 1, &mut y);
            let same = |(half, y): (&f16, &f32)| half.to_f32() == *y || half.is_nan() && y.is_nan();
            assert!(all.iter().zip(&y).all(same));
        }
    }

    #[test]
    #[should_panic(expected = "b must be within its memory")]
    fn short_memory_is_refused() {
        assert!(is_supported(level(), DType::F32), "b must be within its memory, as nothing reads it");
        gemv_column_major(level(), &[1f32; 4], &[0f32; 11], 4, &mut [0.0; 3]);
    }
}
