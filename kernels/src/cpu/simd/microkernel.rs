//! The innermost loops of a matrix product: tiles of sums held in registers.

use crate::cpu::simd::Level;
use crate::cpu::simd::transpose_tile::{self, TransposeTile};
use crate::dtype::{DType, Real};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rows of a: where they begin, and the distances of rows and columns.
pub(crate) type Rows<R> = (*const R, usize, usize);

/// Memory that later tiles will read: where it begins, and how far further each step of the depth asks for a cache line of it. It
/// may lie anywhere.
pub(crate) type Ahead<R> = (*const R, usize);

/// c (+)= a b for a tile of c. In this order: depth; a and the distances of its rows and columns; b and
/// the distance of its rows (columns lie side by side); c and the distance of its rows; whether to add to what c
/// holds; what to ask for ahead, of which only tiles in [`Tiles::asking`] take notice. Sums start at 0 and take one fused multiply-add per step of the depth.
///
/// # Safety
/// The extents lie inside of the memories, c is not read by anyone else, and the CPU has the level of the [`Tiles`].
pub(crate) type Tile<R> = unsafe fn(usize, Rows<R>, (*const R, usize), (*mut R, usize), bool, Ahead<R>);

/// No tile is higher.
pub(crate) const ROWS_MAX: usize = 14;
/// No tile is wider.
pub(crate) const COLS_MAX: usize = 32;

/// The tiles of one instruction set.
pub(crate) struct Tiles<R: 'static> {
    /// Columns of a tile one vector wide.
    pub(crate) lanes: usize,
    /// By height, from 1 row to the tallest, then one or two vectors wide.
    pub(crate) table: &'static [[Tile<R>; 2]],
    /// The same, which ask for memory ahead. What others do not ask for costs them nothing.
    pub(crate) asking: &'static [[Tile<R>; 2]],
    /// Rows that are transposed at a time, and how.
    pub(crate) turn: (usize, TransposeTile<R>),
}

impl<R: Real> Tiles<R> {
    /// The tiles for a level, which the CPU must have.
    pub(crate) fn at(level: Level) -> Tiles<R> {
        macro_rules! pick {
            ($t:ty, $avx512:expr, $avx2:expr, $plain:expr) => {{
                let tiles: Tiles<$t> = match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => $avx512,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => $avx2,
                    _ => $plain,
                };
                // SAFETY: R is this very type: `Real` is sealed, and its dtype tells the two implementors apart.
                unsafe { std::mem::transmute_copy(&tiles) }
            }};
        }
        match R::DTYPE {
            DType::F64 => pick!(f64, avx512_f64(), avx2_f64(), plain_f64()),
            _ => pick!(f32, avx512_f32(), avx2_f32(), plain_f32()),
        }
    }
}

/// One register of numbers.
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
    /// Asks for a cache line ahead of its use, wherever that may be.
    fn prefetch(at: *const Self::Item);
    /// The same, not further than into the second-level cache.
    fn expect_later(at: *const Self::Item);
    fn fma(self, a: Self, b: Self) -> Self;
    fn plus(self, a: Self) -> Self;
}

/// A row of c is asked for in one of so many steps: all at once they would fill the queue that rows of b have to pass, too.
const EXPECT_EVERY: usize = 4;

/// See [`Tile`].
#[inline(always)]
unsafe fn tile<V: Vector, const H: usize, const W: usize, const ASKS: bool>(
    depth: usize,
    (a, a_row, a_col): Rows<V::Item>,
    (mut b, b_step): (*const V::Item, usize),
    (c, c_step): (*mut V::Item, usize),
    add: bool,
    (mut later, later_step): Ahead<V::Item>,
) {
    // One pointer for three rows: as many as there are registers for, and each within reach of an address.
    let mut a: [_; ROWS_MAX.div_ceil(3)] = std::array::from_fn(|third| a.wrapping_add(3 * third * a_row));
    let mut sums = [[V::splat(V::Item::ZERO); W]; H];
    let mut ahead = c.cast_const();
    for step in 0..depth {
        if step % EXPECT_EVERY == 0 && step < EXPECT_EVERY * H {
            // The first and the last element of a row stand for all of its cache lines, of which there are at most three.
            (0..W).for_each(|w| V::prefetch(ahead.wrapping_add(w * V::LANES)));
            V::prefetch(ahead.wrapping_add(W * V::LANES - 1));
            ahead = ahead.wrapping_add(c_step);
        }
        // SAFETY: the caller vouches for `depth` columns of a and rows of b; `wrapping_add` may step past the last.
        let row: [V; W] = std::array::from_fn(|w| unsafe { V::load(b.wrapping_add(w * V::LANES)) });
        // Loops of few turns each, so that the compiler unrolls them all.
        for (third, a) in a.into_iter().enumerate() {
            for place in 0..3 {
                let h = 3 * third + place;
                if h < H {
                    // SAFETY: as above.
                    let x = V::splat(unsafe { *a.wrapping_add(place * a_row) });
                    for (sum, row) in sums[h].iter_mut().zip(row) {
                        *sum = x.fma(row, *sum);
                    }
                }
            }
        }
        a = a.map(|a| a.wrapping_add(a_col));
        b = b.wrapping_add(b_step);
        if ASKS {
            V::expect_later(later);
            later = later.wrapping_add(later_step);
        }
    }
    for (h, sums) in sums.into_iter().enumerate() {
        for (w, sum) in sums.into_iter().enumerate() {
            let to = c.wrapping_add(h * c_step + w * V::LANES);
            // SAFETY: the caller vouches for H rows of W vectors of c.
            unsafe { if add { V::load(to).plus(sum) } else { sum }.store(to) };
        }
    }
}

/// Plain arrays: for CPUs without the instruction sets below.
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
    fn expect_later(_: *const R) {}
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
                // SAFETY: used only inside of tiles compiled for this level.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                // SAFETY: as promised by the caller; used only inside of tiles compiled for this level.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                // SAFETY: as promised by the caller; used only inside of tiles compiled for this level.
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            fn prefetch(at: *const $t) {
                // SAFETY: nothing is read; every CPU of this architecture has the instruction.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
            }
            #[inline(always)]
            fn expect_later(at: *const $t) {
                // SAFETY: as above.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
            }
            #[inline(always)]
            fn fma(self, a: Self, b: Self) -> Self {
                // SAFETY: used only inside of tiles compiled for this level.
                unsafe { $fma(self, a, b) }
            }
            #[inline(always)]
            fn plus(self, a: Self) -> Self {
                // SAFETY: used only inside of tiles compiled for this level.
                unsafe { $plus(self, a) }
            }
        }
    };
}
vector!(__m512 of 16 f32: _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps);
vector!(__m512d of 8 f64: _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_fmadd_pd _mm512_add_pd);
vector!(__m256 of 8 f32: _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps);
vector!(__m256d of 4 f64: _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_fmadd_pd _mm256_add_pd);

macro_rules! tiles {
    ($(#[$attribute:meta])* $name:ident, $v:ty, $t:ty, $features:literal, [$($height:literal)*], $turn:expr) => {
        $(#[$attribute])*
        fn $name() -> Tiles<$t> {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = $features))]
            unsafe fn compiled<const H: usize, const W: usize, const ASKS: bool>(
                depth: usize,
                a: Rows<$t>,
                b: (*const $t, usize),
                c: (*mut $t, usize),
                add: bool,
                later: Ahead<$t>,
            ) {
                // SAFETY: as promised by the caller.
                unsafe { tile::<$v, H, W, ASKS>(depth, a, b, c, add, later) }
            }
            const TABLE: &[[Tile<$t>; 2]] = &[$([compiled::<$height, 1, false>, compiled::<$height, 2, false>]),*];
            const ASKING: &[[Tile<$t>; 2]] = &[$([compiled::<$height, 1, true>, compiled::<$height, 2, true>]),*];
            Tiles { lanes: <$v as Vector>::LANES, table: TABLE, asking: ASKING, turn: $turn }
        }
    };
}
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx512_f32,
    __m512,
    f32,
    "avx512f",
    [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    (8, transpose_tile::eight_f32)
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx512_f64,
    __m512d,
    f64,
    "avx512f",
    [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    (4, transpose_tile::four_f64)
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx2_f32,
    __m256,
    f32,
    "avx2,fma",
    [1 2 3 4 5 6],
    (8, transpose_tile::eight_f32)
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx2_f64,
    __m256d,
    f64,
    "avx2,fma",
    [1 2 3 4 5 6],
    (4, transpose_tile::four_f64)
);
tiles!(plain_f32, [f32; 8], f32, "sse2", [1 2 3 4 5 6], (8, transpose_tile::plain::<f32, 8>));
tiles!(plain_f64, [f64; 4], f64, "sse2", [1 2 3 4 5 6], (4, transpose_tile::plain::<f64, 4>));
