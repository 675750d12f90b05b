//! GEMM micro-kernels: tiles of c summed in registers (BLIS: MR rows, NR columns), for each instruction set.

use crate::cpu::simd::Level;
use crate::cpu::simd::transpose_tile::{self, TransposeTile};
use crate::dtype::{DType, Real};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A panel of rows of a: pointer, row stride, column stride.
pub(crate) type APanel<R> = (*const R, usize, usize);

/// Memory to prefetch for later tiles: pointer, and the distance by which each step of k advances to the next cache line. Any address is
/// allowed.
pub(crate) type PrefetchPtr<R> = (*const R, usize);

/// A micro-kernel: c = a b or c += a b for a tile of c. Arguments: k; the panel of a; b and its row stride (columns are contiguous); c
/// and its row stride; whether to add to c; memory to prefetch, which only kernels in [`MicroKernels::prefetching`] heed. Sums start at 0
/// and take one fused multiply-add per step of k.
///
/// # Safety
/// The extents are within the memory, no other thread reads c, and the CPU has the instruction set of the [`MicroKernels`].
pub(crate) type MicroKernel<R> =
    unsafe fn(usize, APanel<R>, (*const R, usize), (*mut R, usize), bool, PrefetchPtr<R>);

/// The most rows of a tile on any instruction set.
pub(crate) const MR_MAX: usize = 14;
/// The most columns of a tile on any instruction set.
pub(crate) const NR_MAX: usize = 32;

/// The micro-kernels of one instruction set.
pub(crate) struct MicroKernels<R: 'static> {
    /// Lanes of a vector: columns of a tile one vector wide.
    pub(crate) lanes: usize,
    /// Indexed by rows - 1, from 1 row to the tallest tile, then by width: one or two vectors.
    pub(crate) by_height: &'static [[MicroKernel<R>; 2]],
    /// The kernels with prefetches; the others omit them, which saves time.
    pub(crate) prefetching: &'static [[MicroKernel<R>; 2]],
    /// Rows transposed at a time, and the function that does.
    pub(crate) transpose: (usize, TransposeTile<R>),
}

impl<R: Real> MicroKernels<R> {
    /// Returns the micro-kernels for an instruction set, which the CPU must have.
    pub(crate) fn for_level(level: Level) -> MicroKernels<R> {
        macro_rules! pick {
            ($t:ty, $avx512:expr, $avx2:expr, $plain:expr) => {{
                let kernels: MicroKernels<$t> = match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => $avx512,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => $avx2,
                    _ => $plain,
                };
                // SAFETY: R is this very type: `Real` is sealed, and its dtype tells the two implementors apart.
                unsafe { std::mem::transmute_copy(&kernels) }
            }};
        }
        match R::DTYPE {
            DType::F64 => pick!(f64, avx512_f64(), avx2_f64(), plain_f64()),
            _ => pick!(f32, avx512_f32(), avx2_f32(), plain_f32()),
        }
    }
}

/// A vector register.
pub(super) trait Vector: Copy {
    type Item: Real;
    const LANES: usize;
    fn splat(x: Self::Item) -> Self;
    /// # Safety
    /// There are `LANES` elements to read.
    unsafe fn load(from: *const Self::Item) -> Self;
    /// # Safety
    /// There are `LANES` elements to write.
    unsafe fn store(self, to: *mut Self::Item);
    /// Prefetches a cache line into the L1 cache; any address is allowed.
    fn prefetch(at: *const Self::Item);
    /// Prefetches a cache line into the L2 cache; any address is allowed.
    fn prefetch_l2(at: *const Self::Item);
    fn fma(self, a: Self, b: Self) -> Self;
    fn plus(self, a: Self) -> Self;
}

/// Steps of k between prefetches of rows of c: all prefetches at once would fill the load queue, which loads of b need too.
const PREFETCH_EVERY: usize = 4;

/// See [`MicroKernel`].
#[expect(
    clippy::needless_range_loop,
    reason = "iterators and closures would be compiled anew for each of some 160 instances"
)]
#[inline(always)]
unsafe fn microkernel<V: Vector, const H: usize, const W: usize, const PREFETCHES: bool>(
    depth: usize,
    (a, a_row, a_col): APanel<V::Item>,
    (mut b, b_step): (*const V::Item, usize),
    (c, c_step): (*mut V::Item, usize),
    add: bool,
    (mut later, later_step): PrefetchPtr<V::Item>,
) {
    // One pointer for three rows: this saves registers, and an addressing mode reaches each row.
    let mut thirds = [a; MR_MAX.div_ceil(3)];
    for third in 0..thirds.len() {
        thirds[third] = a.wrapping_add(3 * third * a_row);
    }
    let mut sums = [[V::splat(V::Item::ZERO); W]; H];
    let mut ahead = c.cast_const();
    for step in 0..depth {
        if step % PREFETCH_EVERY == 0 && step < PREFETCH_EVERY * H {
            // The first and the last element of a row cover all of its cache lines, of which there are at most three.
            for w in 0..W {
                V::prefetch(ahead.wrapping_add(w * V::LANES));
            }
            V::prefetch(ahead.wrapping_add(W * V::LANES - 1));
            ahead = ahead.wrapping_add(c_step);
        }
        let mut row = [V::splat(V::Item::ZERO); W];
        for w in 0..W {
            // SAFETY: the caller guarantees `depth` columns of a and rows of b; `wrapping_add` may step past the last.
            row[w] = unsafe { V::load(b.wrapping_add(w * V::LANES)) };
        }
        // Loops of few iterations each, so that the compiler unrolls them all.
        for third in 0..thirds.len() {
            for place in 0..3 {
                let h = 3 * third + place;
                if h < H {
                    // SAFETY: as above.
                    let x = V::splat(unsafe { *thirds[third].wrapping_add(place * a_row) });
                    for w in 0..W {
                        sums[h][w] = x.fma(row[w], sums[h][w]);
                    }
                }
            }
        }
        for third in 0..thirds.len() {
            thirds[third] = thirds[third].wrapping_add(a_col);
        }
        b = b.wrapping_add(b_step);
        if PREFETCHES {
            V::prefetch_l2(later);
            later = later.wrapping_add(later_step);
        }
    }
    for h in 0..H {
        for w in 0..W {
            let (sum, to) = (sums[h][w], c.wrapping_add(h * c_step + w * V::LANES));
            // SAFETY: the caller guarantees H rows of W vectors of c.
            unsafe { if add { V::load(to).plus(sum) } else { sum }.store(to) };
        }
    }
}

/// Arrays as vectors, for CPUs without the instruction sets below.
impl<R: Real, const N: usize> Vector for [R; N] {
    type Item = R;
    const LANES: usize = N;
    #[inline(always)]
    fn splat(x: R) -> Self {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(from: *const R) -> Self {
        // SAFETY: as promised by the caller; arrays are aligned like their elements.
        unsafe { *from.cast() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut R) {
        // SAFETY: as promised by the caller; arrays are aligned like their elements.
        unsafe { *to.cast() = self }
    }
    #[inline(always)]
    fn prefetch(_: *const R) {}
    #[inline(always)]
    fn prefetch_l2(_: *const R) {}
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| self[i].fma(a[i], b[i]))
    }
    #[inline(always)]
    fn plus(self, a: Self) -> Self {
        std::array::from_fn(|i| self[i] + a[i])
    }
}

macro_rules! vector {
    ($v:ident of $lanes:literal $t:ty: $splat:ident $load:ident $store:ident $fma:ident $plus:ident) => {
        #[cfg(target_arch = "x86_64")]
        impl Vector for $v {
            type Item = $t;
            const LANES: usize = $lanes;
            #[inline(always)]
            fn splat(x: $t) -> Self {
                // SAFETY: used only inside of kernels compiled for this level.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                // SAFETY: as promised by the caller; used only inside of kernels compiled for this level.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                // SAFETY: as promised by the caller; used only inside of kernels compiled for this level.
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            fn prefetch(at: *const $t) {
                // SAFETY: nothing is read; every CPU of this architecture has the instruction.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
            }
            #[inline(always)]
            fn prefetch_l2(at: *const $t) {
                // SAFETY: as above.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
            }
            #[inline(always)]
            fn fma(self, a: Self, b: Self) -> Self {
                // SAFETY: used only inside of kernels compiled for this level.
                unsafe { $fma(self, a, b) }
            }
            #[inline(always)]
            fn plus(self, a: Self) -> Self {
                // SAFETY: used only inside of kernels compiled for this level.
                unsafe { $plus(self, a) }
            }
        }
    };
}
vector!(__m512 of 16 f32: _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps);
vector!(__m512d of 8 f64: _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_fmadd_pd _mm512_add_pd);
vector!(__m256 of 8 f32: _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps);
vector!(__m256d of 4 f64: _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_fmadd_pd _mm256_add_pd);

macro_rules! microkernels {
    ($(#[$attribute:meta])* $name:ident, $v:ty, $t:ty, $features:literal, [$($height:literal)*], $transpose:expr) => {
        $(#[$attribute])*
        fn $name() -> MicroKernels<$t> {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = $features))]
            unsafe fn compiled<const H: usize, const W: usize, const PREFETCHES: bool>(
                depth: usize,
                a: APanel<$t>,
                b: (*const $t, usize),
                c: (*mut $t, usize),
                add: bool,
                later: PrefetchPtr<$t>,
            ) {
                // SAFETY: as promised by the caller.
                unsafe { microkernel::<$v, H, W, PREFETCHES>(depth, a, b, c, add, later) }
            }
            const TABLE: &[[MicroKernel<$t>; 2]] = &[$([compiled::<$height, 1, false>, compiled::<$height, 2, false>]),*];
            const PREFETCHING: &[[MicroKernel<$t>; 2]] = &[$([compiled::<$height, 1, true>, compiled::<$height, 2, true>]),*];
            MicroKernels { lanes: <$v as Vector>::LANES, by_height: TABLE, prefetching: PREFETCHING, transpose: $transpose }
        }
    };
}
microkernels!(
    #[cfg(target_arch = "x86_64")]
    avx512_f32,
    __m512,
    f32,
    "avx512f",
    [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    (8, transpose_tile::eight_f32)
);
microkernels!(
    #[cfg(target_arch = "x86_64")]
    avx512_f64,
    __m512d,
    f64,
    "avx512f",
    [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    (4, transpose_tile::four_f64)
);
microkernels!(
    #[cfg(target_arch = "x86_64")]
    avx2_f32,
    __m256,
    f32,
    "avx2,fma",
    [1 2 3 4 5 6],
    (8, transpose_tile::eight_f32)
);
microkernels!(
    #[cfg(target_arch = "x86_64")]
    avx2_f64,
    __m256d,
    f64,
    "avx2,fma",
    [1 2 3 4 5 6],
    (4, transpose_tile::four_f64)
);
microkernels!(plain_f32, [f32; 8], f32, "sse2", [1 2 3 4 5 6], (8, transpose_tile::plain::<f32, 8>));
microkernels!(plain_f64, [f64; 4], f64, "sse2", [1 2 3 4 5 6], (4, transpose_tile::plain::<f64, 4>));
