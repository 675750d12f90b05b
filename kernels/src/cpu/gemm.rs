//! Matrix products on one thread.
//!
//! The order of a sum is part of the contract: every element of c is formed from blocks of [`DEPTH`] terms, each
//! block from 0 upwards by fused multiply-adds in the order of k, and the blocks are added to c in order. Nothing
//! else (shapes, strides, tiles, instruction set) has a say in the bits, so that a row's bits do not depend on
//! the rows around it.

use crate::cpu::simd::{Level, level};
use crate::dtype::{DType, Float, Real};
use std::mem::MaybeUninit;

/// A matrix that is read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    /// The memory, from element (0, 0) on.
    pub data: &'a [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// A matrix that is written. No two of its elements share memory.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    /// The memory, from element (0, 0) on.
    pub data: &'a mut [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// Terms of a sum that are added up before they meet the rest. Changing this changes results.
pub const DEPTH: usize = 256;
/// Rows of a that are packed at a time: with [`DEPTH`] columns they fill a part of the second-level cache.
const ROWS: usize = 192;
/// Columns of b that are packed at a time.
const COLS: usize = 1024;

/// c = a b, or c += a b if `accumulate`; `dims` is (m, n, k), a is (m, k), b is (k, n), c is (m, n).
/// 16-bit operands are widened on the way in; c is in the accumulator type.
///
/// # Panics
/// If a matrix reaches outside of its memory.
pub fn product<A, B, R>(
    dims: [usize; 3],
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    accumulate: bool,
    c: MatrixMut<'_, R>,
) where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let [m, n, k] = dims;
    assert!(reach([m, k], a.row_stride, a.col_stride) <= a.data.len(), "a lies inside of its memory");
    assert!(reach([k, n], b.row_stride, b.col_stride) <= b.data.len(), "b lies inside of its memory");
    assert!(reach([m, n], c.row_stride, c.col_stride) <= c.data.len(), "c lies inside of its memory");
    let a = Source { start: a.data.as_ptr(), row: a.row_stride, col: a.col_stride };
    let b = Source { start: b.data.as_ptr(), row: b.row_stride, col: b.col_stride };
    let c = Target { start: c.data.as_mut_ptr(), row: c.row_stride, col: c.col_stride };
    // Vectors run along the columns of c; a product is also that of the turned matrices.
    if (c.row == 1 && c.col != 1) || n == 1 {
        // SAFETY: the reaches were checked above, and turning keeps them.
        unsafe { blocks([n, m, k], b.turned(), a.turned(), accumulate, c.turned()) }
    } else {
        // SAFETY: the reaches were checked above.
        unsafe { blocks(dims, a, b, accumulate, c) }
    }
}

/// One past the furthest element of a matrix.
fn reach([rows, cols]: [usize; 2], row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { 1 + (rows - 1) * row_stride + (cols - 1) * col_stride }
}

struct Source<T> {
    start: *const T,
    row: usize,
    col: usize,
}

impl<T> Clone for Source<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Source<T> {}

impl<T> Source<T> {
    fn turned(self) -> Self {
        Source { row: self.col, col: self.row, ..self }
    }

    /// # Safety
    /// The element lies inside of the memory.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> *const T {
        // SAFETY: as promised by the caller.
        unsafe { self.start.add(i * self.row + j * self.col) }
    }

    /// # Safety
    /// The element lies inside of the memory.
    unsafe fn from(self, i: usize, j: usize) -> Self {
        // SAFETY: as promised by the caller.
        Source { start: unsafe { self.at(i, j) }, ..self }
    }
}

struct Target<T> {
    start: *mut T,
    row: usize,
    col: usize,
}

impl<T> Clone for Target<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Target<T> {}

impl<T> Target<T> {
    fn turned(self) -> Self {
        Target { row: self.col, col: self.row, ..self }
    }
}

/// One cache line of scratch, so that packed vectors are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

struct Scratch(Vec<MaybeUninit<Line>>);

impl Scratch {
    fn new<T>(len: usize) -> Scratch {
        let lines = (len * size_of::<T>()).div_ceil(64);
        let mut memory = Vec::with_capacity(lines);
        // SAFETY: the capacity is there, and `MaybeUninit` needs no initial value.
        unsafe { memory.set_len(lines) };
        Scratch(memory)
    }

    fn start<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

/// # Safety
/// The matrices lie inside of their memories; c overlaps neither a nor b, nor itself.
unsafe fn blocks<A, B, R>([m, n, k]: [usize; 3], a: Source<A>, b: Source<B>, accumulate: bool, c: Target<R>)
where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let tiles = tiles::<R>();
    let wide = 2 * tiles.lanes;
    let (rows_max, cols_max, depth_max) = (m.min(ROWS), n.min(COLS).next_multiple_of(tiles.lanes), k.min(DEPTH));
    let mut scratch_a = Scratch::new::<R>(rows_max * depth_max);
    let mut scratch_b = Scratch::new::<R>(cols_max * depth_max);
    let (packed_a, packed_b) = (scratch_a.start::<R>(), scratch_b.start::<R>());
    if k == 0 && !accumulate {
        for i in 0..m {
            for j in 0..n {
                // SAFETY: (i, j) lies inside of c.
                unsafe { *c.start.add(i * c.row + j * c.col) = R::ZERO };
            }
        }
    }
    for first_col in (0..n).step_by(COLS) {
        let cols = COLS.min(n - first_col);
        for first_depth in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - first_depth);
            // SAFETY: the block lies inside of b; the scratch holds a whole block.
            unsafe { pack_cols(b.from(first_depth, first_col), [depth, cols], [wide, tiles.lanes], packed_b) };
            for first_row in (0..m).step_by(ROWS) {
                let rows = ROWS.min(m - first_row);
                // SAFETY: the block lies inside of a; the scratch holds a whole block.
                unsafe { pack_rows(a.from(first_row, first_depth), [rows, depth], packed_a) };
                let add = accumulate || first_depth > 0;
                // SAFETY: both blocks are packed; the block of c lies inside of c.
                unsafe {
                    let start = c.start.add(first_row * c.row + first_col * c.col);
                    multiply(&tiles, [rows, cols, depth], packed_a, packed_b, add, Target { start, ..c });
                }
            }
        }
    }
}

/// Rows of a tile, tallest first: a strip of any height is cut into these.
const HEIGHTS: [usize; 5] = [12, 8, 4, 2, 1];
const TALLEST: usize = HEIGHTS[0];

/// Packs strips of `TALLEST` rows (fewer in the last), each column after column.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
unsafe fn pack_rows<T: Float>(from: Source<T>, [rows, depth]: [usize; 2], to: *mut T::Acc) {
    let mut to = to;
    for first in (0..rows).step_by(TALLEST) {
        let height = TALLEST.min(rows - first);
        // SAFETY: as promised by the caller.
        unsafe {
            pack(from.from(first, 0).turned(), [depth, height], height, to);
            to = to.add(depth * height);
        }
    }
}

/// Packs strips of `wide` columns (`narrow` in the last, if it holds no more), each row after row, filled up with 0.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
unsafe fn pack_cols<T: Float>(
    from: Source<T>,
    [depth, cols]: [usize; 2],
    [wide, narrow]: [usize; 2],
    to: *mut T::Acc,
) {
    let mut to = to;
    for first in (0..cols).step_by(wide) {
        let used = wide.min(cols - first);
        let width = if used > narrow { wide } else { narrow };
        // SAFETY: as promised by the caller.
        unsafe {
            pack(from.from(0, first), [depth, used], width, to);
            to = to.add(depth * width);
        }
    }
}

/// to[p * width + j] = from(p, j), and 0 for j from `used` to `width`.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
#[inline(always)]
unsafe fn pack<T: Float>(from: Source<T>, [depth, used]: [usize; 2], width: usize, to: *mut T::Acc) {
    for p in 0..depth {
        for j in 0..width {
            // SAFETY: as promised by the caller.
            unsafe { *to.add(p * width + j) = if j < used { (*from.at(p, j)).widen() } else { T::Acc::ZERO } };
        }
    }
}

/// c = a b or c += a b for packed blocks.
///
/// # Safety
/// `a` and `b` are packed as above, and c lies inside of its memory.
unsafe fn multiply<R: Real>(
    tiles: &Tiles<R>,
    [rows, cols, depth]: [usize; 3],
    a: *const R,
    b: *const R,
    add: bool,
    c: Target<R>,
) {
    let wide = 2 * tiles.lanes;
    let mut edge = [R::ZERO; TALLEST * 32];
    for first_col in (0..cols).step_by(wide) {
        let used = wide.min(cols - first_col);
        let vectors = used.div_ceil(tiles.lanes);
        let width = vectors * tiles.lanes;
        for first_row in (0..rows).step_by(TALLEST) {
            let strip = TALLEST.min(rows - first_row);
            let mut done = 0;
            while done < strip {
                let h = HEIGHTS.iter().position(|&h| h <= strip - done).unwrap_or(HEIGHTS.len() - 1);
                let tile = tiles.table[h][vectors - 1];
                // SAFETY: as promised by the caller.
                unsafe {
                    let (a, b) = (a.add(first_row * depth + done), b.add(first_col * depth));
                    let at = c.start.add((first_row + done) * c.row + first_col * c.col);
                    if used == width && c.col == 1 {
                        tile(depth, (a, strip), (b, width), (at, c.row), add);
                    } else {
                        tile(depth, (a, strip), (b, width), (edge.as_mut_ptr(), width), false);
                        for i in 0..HEIGHTS[h] {
                            for j in 0..used {
                                let to = at.add(i * c.row + j * c.col);
                                let sum = edge[i * width + j];
                                *to = if add { *to + sum } else { sum };
                            }
                        }
                    }
                }
                done += HEIGHTS[h];
            }
        }
    }
}

/// A tile of c: depth, a and the distance of its columns, b and the distance of its rows, c and the distance of
/// its rows, whether to add to what c holds.
type Tile<R> = unsafe fn(usize, (*const R, usize), (*const R, usize), (*mut R, usize), bool);

/// The tiles of one instruction set: by height (as in [`HEIGHTS`]) and by width in vectors.
struct Tiles<R> {
    lanes: usize,
    table: [[Tile<R>; 2]; 5],
}

fn tiles<R: Real>() -> Tiles<R> {
    macro_rules! pick {
        ($t:ty, $avx512:ident, $avx2:ident, $plain:ty) => {{
            let tiles: Tiles<$t> = match level() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => $avx512(),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => $avx2(),
                _ => todo!()
            };
            // SAFETY: R is this very type, as its dtype says (`Real` is sealed).
            unsafe { std::mem::transmute_copy(&tiles) }
        }};
    }
    match R::DTYPE {
        DType::F64 => pick!(f64, avx512_f64, avx2_f64, f64),
        _ => pick!(f32, avx512_f32, avx2_f32, f32),
    }
}

/// A register of numbers.
trait Vector: Copy {
    type Item: Real;
    const LANES: usize;
    unsafe fn splat(x: Self::Item) -> Self;
    unsafe fn load(from: *const Self::Item) -> Self;
    unsafe fn store(self, to: *mut Self::Item);
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn plus(self, a: Self) -> Self;
}

#[inline(always)]
unsafe fn tile<V: Vector, const H: usize, const W: usize>(
    depth: usize,
    (mut a, a_step): (*const V::Item, usize),
    (mut b, b_step): (*const V::Item, usize),
    (c, c_step): (*mut V::Item, usize),
    add: bool,
) {
    unsafe {
        let mut sums = [[V::splat(V::Item::ZERO); W]; H];
        for _ in 0..depth {
            let mut row = [V::splat(V::Item::ZERO); W];
            for w in 0..W {
                row[w] = V::load(b.add(w * V::LANES));
            }
            for h in 0..H {
                let x = V::splat(*a.add(h));
                for w in 0..W {
                    sums[h][w] = x.fma(row[w], sums[h][w]);
                }
            }
            a = a.add(a_step);
            b = b.add(b_step);
        }
        for h in 0..H {
            for w in 0..W {
                let to = c.add(h * c_step + w * V::LANES);
                let sum = if add { V::load(to).plus(sums[h][w]) } else { sums[h][w] };
                sum.store(to);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

macro_rules! x86 {
    ($v:ident, $t:ty, $lanes:expr, $features:literal, $tiles:ident, $splat:ident $load:ident $store:ident $fma:ident $add:ident) => {
        #[cfg(target_arch = "x86_64")]
        impl Vector for $v {
            type Item = $t;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            unsafe fn fma(self, a: Self, b: Self) -> Self {
                unsafe { $fma(self, a, b) }
            }
            #[inline(always)]
            unsafe fn plus(self, a: Self) -> Self {
                unsafe { $add(self, a) }
            }
        }
        #[cfg(target_arch = "x86_64")]
        fn $tiles() -> Tiles<$t> {
            #[target_feature(enable = $features)]
            unsafe fn fixed<const H: usize, const W: usize>(
                depth: usize,
                a: (*const $t, usize),
                b: (*const $t, usize),
                c: (*mut $t, usize),
                add: bool,
            ) {
                unsafe { tile::<$v, H, W>(depth, a, b, c, add) }
            }
            Tiles {
                lanes: $lanes,
                table: [
                    [fixed::<12, 1>, fixed::<12, 2>],
                    [fixed::<8, 1>, fixed::<8, 2>],
                    [fixed::<4, 1>, fixed::<4, 2>],
                    [fixed::<2, 1>, fixed::<2, 2>],
                    [fixed::<1, 1>, fixed::<1, 2>],
                ],
            }
        }
    };
}
x86!(__m512, f32, 16, "avx512f,fma", avx512_f32, _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps);
x86!(__m512d, f64, 8, "avx512f,fma", avx512_f64, _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_fmadd_pd _mm512_add_pd);
x86!(__m256, f32, 8, "avx2,fma", avx2_f32, _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps);
x86!(__m256d, f64, 4, "avx2,fma", avx2_f64, _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_fmadd_pd _mm256_add_pd);
