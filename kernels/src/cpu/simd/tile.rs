//! The innermost loops of a matrix product: tiles of sums held in registers, and turned blocks.

use crate::cpu::simd::Level;
use crate::dtype::{DType, Real};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// c (+)= a b for a tile of c. In this order: depth; a and the distance of its columns (rows lie side by side); b and
/// the distance of its rows (columns lie side by side); c and the distance of its rows; whether to add to what c
/// holds. Sums start at 0 and take one fused multiply-add per step of the depth.
///
/// # Safety
/// The extents lie inside of the memories, c is not read by anyone else, and the CPU has the level of the [`Tiles`].
pub(crate) type Tile<R> = unsafe fn(usize, (*const R, usize), (*const R, usize), (*mut R, usize), bool);

/// to[j][i] = from[i][j] for i, j below [`Tiles::block`]; pointers and the distances of rows.
///
/// # Safety
/// As for [`Tile`].
pub(crate) type Turn<R> = unsafe fn((*const R, usize), (*mut R, usize));

/// The tiles of one instruction set.
pub(crate) struct Tiles<R> {
    /// Columns of a tile one vector wide.
    pub(crate) lanes: usize,
    /// Rows of a tile, tallest first; the last is 1.
    pub(crate) heights: [usize; 5],
    /// By height, then one or two vectors wide.
    pub(crate) table: [[Tile<R>; 2]; 5],
    /// Extent of a turned block.
    pub(crate) block: usize,
    /// Turns a block.
    pub(crate) turn: Turn<R>,
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
trait Vector: Copy {
    type Item: Real;
    const LANES: usize;
    fn splat(x: Self::Item) -> Self;
    /// # Safety
    /// There are `LANES` elements to read.
    unsafe fn load(from: *const Self::Item) -> Self;
    /// # Safety
    /// There are `LANES` elements to write.
    unsafe fn store(self, to: *mut Self::Item);
    fn fma(self, a: Self, b: Self) -> Self;
    fn plus(self, a: Self) -> Self;
}

/// See [`Tile`].
#[inline(always)]
unsafe fn tile<V: Vector, const H: usize, const W: usize>(
    depth: usize,
    (mut a, a_step): (*const V::Item, usize),
    (mut b, b_step): (*const V::Item, usize),
    (c, c_step): (*mut V::Item, usize),
    add: bool,
) {
    let mut sums = [[V::splat(V::Item::ZERO); W]; H];
    for _ in 0..depth {
        // SAFETY: the caller vouches for `depth` columns of a and rows of b; `wrapping_add` may step past the last.
        let row: [V; W] = std::array::from_fn(|w| unsafe { V::load(b.wrapping_add(w * V::LANES)) });
        for (h, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let x = V::splat(unsafe { *a.wrapping_add(h) });
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = x.fma(row, *sum);
            }
        }
        (a, b) = (a.wrapping_add(a_step), b.wrapping_add(b_step));
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
    fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| self[i].fma(a[i], b[i]))
    }
    #[inline(always)]
    fn plus(self, a: Self) -> Self {
        std::array::from_fn(|i| self[i] + a[i])
    }
}

/// See [`Turn`].
unsafe fn turn_plain<R: Real, const N: usize>(
    (from, from_step): (*const R, usize),
    (to, to_step): (*mut R, usize),
) {
    for i in 0..N {
        for j in 0..N {
            // SAFETY: the caller vouches for N rows and columns on both sides.
            unsafe { *to.add(j * to_step + i) = *from.add(i * from_step + j) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn turn_f32((from, from_step): (*const f32, usize), (to, to_step): (*mut f32, usize)) {
    // SAFETY: the caller vouches for 8 rows of 8 elements.
    let r: [__m256; 8] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * from_step)) });
    let mut quarters = [_mm256_setzero_ps(); 8];
    for half in [0, 4] {
        let (low, high) =
            (_mm256_unpacklo_ps(r[half], r[half + 1]), _mm256_unpackhi_ps(r[half], r[half + 1]));
        let (low2, high2) =
            (_mm256_unpacklo_ps(r[half + 2], r[half + 3]), _mm256_unpackhi_ps(r[half + 2], r[half + 3]));
        quarters[half] = _mm256_shuffle_ps::<0x44>(low, low2);
        quarters[half + 1] = _mm256_shuffle_ps::<0xee>(low, low2);
        quarters[half + 2] = _mm256_shuffle_ps::<0x44>(high, high2);
        quarters[half + 3] = _mm256_shuffle_ps::<0xee>(high, high2);
    }
    for j in 0..4 {
        let first = _mm256_permute2f128_ps::<0x20>(quarters[j], quarters[j + 4]);
        let second = _mm256_permute2f128_ps::<0x31>(quarters[j], quarters[j + 4]);
        // SAFETY: the caller vouches for 8 rows of 8 elements.
        unsafe {
            _mm256_storeu_ps(to.add(j * to_step), first);
            _mm256_storeu_ps(to.add((j + 4) * to_step), second);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn turn_f64((from, from_step): (*const f64, usize), (to, to_step): (*mut f64, usize)) {
    // SAFETY: the caller vouches for 4 rows of 4 elements.
    let r: [__m256d; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_pd(from.add(i * from_step)) });
    let even = [_mm256_unpacklo_pd(r[0], r[1]), _mm256_unpacklo_pd(r[2], r[3])];
    let odd = [_mm256_unpackhi_pd(r[0], r[1]), _mm256_unpackhi_pd(r[2], r[3])];
    let turned = [
        _mm256_permute2f128_pd::<0x20>(even[0], even[1]),
        _mm256_permute2f128_pd::<0x20>(odd[0], odd[1]),
        _mm256_permute2f128_pd::<0x31>(even[0], even[1]),
        _mm256_permute2f128_pd::<0x31>(odd[0], odd[1]),
    ];
    for (j, row) in turned.into_iter().enumerate() {
        // SAFETY: the caller vouches for 4 rows of 4 elements.
        unsafe { _mm256_storeu_pd(to.add(j * to_step), row) };
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
    ($(#[$attribute:meta])* $name:ident, $v:ty, $t:ty, $features:literal, [$($height:literal),*], $block:literal, $turn:expr) => {
        $(#[$attribute])*
        fn $name() -> Tiles<$t> {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = $features))]
            unsafe fn compiled<const H: usize, const W: usize>(
                depth: usize,
                a: (*const $t, usize),
                b: (*const $t, usize),
                c: (*mut $t, usize),
                add: bool,
            ) {
                // SAFETY: as promised by the caller.
                unsafe { tile::<$v, H, W>(depth, a, b, c, add) }
            }
            Tiles {
                lanes: <$v as Vector>::LANES,
                heights: [$($height),*],
                table: [$([compiled::<$height, 1>, compiled::<$height, 2>]),*],
                block: $block,
                turn: $turn,
            }
        }
    };
}
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx512_f32,
    __m512,
    f32,
    "avx512f",
    [12, 8, 4, 2, 1],
    8,
    turn_f32
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx512_f64,
    __m512d,
    f64,
    "avx512f",
    [12, 8, 4, 2, 1],
    4,
    turn_f64
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx2_f32,
    __m256,
    f32,
    "avx2,fma",
    [6, 4, 3, 2, 1],
    8,
    turn_f32
);
tiles!(
    #[cfg(target_arch = "x86_64")]
    avx2_f64,
    __m256d,
    f64,
    "avx2,fma",
    [6, 4, 3, 2, 1],
    4,
    turn_f64
);
tiles!(plain_f32, [f32; 8], f32, "sse2", [6, 4, 3, 2, 1], 8, turn_plain::<f32, 8>);
tiles!(plain_f64, [f64; 4], f64, "sse2", [6, 4, 3, 2, 1], 4, turn_plain::<f64, 4>);
