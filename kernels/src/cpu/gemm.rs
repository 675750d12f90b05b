//! Matrix products: one on one thread, or a stack of them on a pool.
//!
//! The order of a sum is part of the contract: every element of c is formed from blocks of [`DEPTH`] terms, each
//! block from 0 upwards by fused multiply-adds in the order of k, and the blocks are added to c in order. Nothing
//! else (shapes, strides, tiles, instruction set) has a say in the bits, so that a row's bits do not depend on
//! the rows around it.

use crate::cpu::Pool;
use crate::cpu::simd::pack::{DEPTH_MAX, Source, Strips, cols_of, pack_rows};
use crate::cpu::simd::tile::Tiles;
use crate::cpu::simd::{Level, level, vectorized};
use crate::dtype::{Element, Float, Real};
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
pub const DEPTH: usize = DEPTH_MAX;
/// Rows of a that are packed at a time: with [`DEPTH`] columns they fill a part of the second-level cache.
const ROWS: usize = 192;
/// Columns of b that are packed at a time.
const COLS: usize = 1024;
/// Up to so many rows of a, packing b does not pay.
const FEW_ROWS: usize = 24;

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
    product_at(level(), dims, a, b, accumulate, c);
}

/// A product by the tiles of a level that this CPU has.
fn product_at<A, B, R>(
    at: Level,
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
    assert!(at as u8 <= level() as u8, "this CPU has the level");
    let [m, n, k] = dims;
    assert!(reach([m, k], a.row_stride, a.col_stride) <= a.data.len(), "a lies inside of its memory");
    assert!(reach([k, n], b.row_stride, b.col_stride) <= b.data.len(), "b lies inside of its memory");
    assert!(reach([m, n], c.row_stride, c.col_stride) <= c.data.len(), "c lies inside of its memory");
    let a = Source::new(a.data, a.row_stride, a.col_stride);
    let b = Source::new(b.data, b.row_stride, b.col_stride);
    let c = Target { start: c.data.as_mut_ptr(), row: c.row_stride, col: c.col_stride };
    // SAFETY: the reaches and the level were checked above; strides of c that let two elements share memory make
    // the result arbitrary, on this one thread no worse.
    unsafe { either_way(&Tiles::at(at), dims, a, b, accumulate, c) }
}

/// Matrices of one shape that are read: element (i, j) of matrix p is at `p * strides[0] + i * strides[1] + j *
/// strides[2]`.
#[derive(Clone, Copy, Debug)]
pub struct Stack<'a, T> {
    /// The memory, from element (0, 0, 0) on.
    pub data: &'a [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// Matrices of one shape that are written.
#[derive(Debug)]
pub struct StackMut<'a, T> {
    /// The memory, from element (0, 0, 0) on.
    pub data: &'a mut [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// Below so many operations a task is not worth its hand-over.
const OPERATIONS_MIN: usize = 1 << 20;
/// More tasks than this do not help.
const TASKS_MAX: usize = 16;

/// How a stack of products is cut into tasks. It depends on the extents only.
#[derive(Debug, PartialEq, Eq)]
struct Split {
    /// Rows of c in one task.
    rows: usize,
    /// Columns of c in one task.
    cols: usize,
    /// Whole products in one task, where a product is a task.
    together: usize,
}

impl Split {
    fn of([g, m, n, k]: [usize; 4]) -> Split {
        let (mut rows, mut cols) = (m, n);
        let operations = |rows: usize, cols: usize| rows.saturating_mul(cols).saturating_mul(2 * k);
        let tasks = |rows: usize, cols: usize| g * m.div_ceil(rows.max(1)) * n.div_ceil(cols.max(1));
        while operations(rows, cols) >= 2 * OPERATIONS_MIN && 2 * tasks(rows, cols) <= TASKS_MAX {
            if cols >= rows && cols >= 128 {
                cols = (cols / 2).next_multiple_of(64);
            } else if rows >= 48 {
                rows = (rows / 2).next_multiple_of(24);
            } else {
                break;
            }
        }
        Split { rows, cols, together: (OPERATIONS_MIN / operations(m, n).max(1)).max(1) }
    }
}

/// c = a b for every matrix of a stack; `dims` is (g, m, n, k), a is (g, m, k), b is (g, k, n), c is (g, m, n).
/// 16-bit operands are summed in f32 and rounded once.
///
/// # Panics
/// If a stack reaches outside of its memory, or elements of c may share memory.
pub fn products<T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    a: Stack<'_, T>,
    b: Stack<'_, T>,
    c: StackMut<'_, T>,
) {
    let [g, m, n, k] = dims;
    assert!(reach3([g, m, k], a.strides) <= a.data.len(), "a lies inside of its memory");
    assert!(reach3([g, k, n], b.strides) <= b.data.len(), "b lies inside of its memory");
    assert!(reach3([g, m, n], c.strides) <= c.data.len(), "c lies inside of its memory");
    assert!(apart([g, m, n], c.strides), "elements of c share no memory");
    if g * m * n == 0 {
        return;
    }
    let split = Split::of(dims);
    let (row_tasks, col_tasks) = (m.div_ceil(split.rows), n.div_ceil(split.cols));
    let parts = row_tasks * col_tasks;
    let tiles = Tiles::at(level());
    let source = |x: Stack<'_, T>| Source::new(x.data, x.strides[1], x.strides[2]);
    let (sa, sb) = (source(a), source(b));
    let sc = Target { start: c.data.as_mut_ptr(), row: c.strides[1], col: c.strides[2] };
    pool.run((g * parts).div_ceil(split.together), &|task| {
        for part in task * split.together..((task + 1) * split.together).min(g * parts) {
            let (matrix, part) = (part / parts, part % parts);
            let (row, col) = (part / col_tasks * split.rows, part % col_tasks * split.cols);
            let (rows, cols) = (split.rows.min(m - row), split.cols.min(n - col));
            // SAFETY: the reaches were checked above; the parts of c that two tasks write share no memory; `tiles`
            // fit this CPU; an empty a or b (k = 0) is not touched.
            unsafe {
                let a = sa.moved(matrix * a.strides[0] + row * a.strides[1]);
                let b = sb.moved(matrix * b.strides[0] + col * b.strides[2]);
                let c = sc.moved(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
                rounded(&tiles, [rows, cols, k], a, b, c);
            }
        }
    });
}

/// One product, rounded to the type of its operands.
///
/// # Safety
/// As for [`blocks`].
unsafe fn rounded<T: Float>(
    tiles: &Tiles<T::Acc>,
    dims: [usize; 3],
    a: Source<T::Acc>,
    b: Source<T::Acc>,
    c: Target<T>,
) {
    let [m, n, _] = dims;
    if T::DTYPE == T::Acc::DTYPE {
        let c = Target { start: c.start.cast::<T::Acc>(), row: c.row, col: c.col };
        // SAFETY: as promised by the caller; T is its own accumulator.
        unsafe { either_way(tiles, dims, a, b, false, c) };
        return;
    }
    let mut wide = vec![T::Acc::ZERO; m * n];
    let to = Target { start: wide.as_mut_ptr(), row: n, col: 1 };
    // SAFETY: as promised by the caller; `wide` is m by n.
    unsafe { either_way(tiles, dims, a, b, false, to) };
    vectorized(
        #[inline(always)]
        || {
            for (i, row) in wide.chunks_exact(n).enumerate() {
                if c.col == 1 {
                    // SAFETY: row i of c lies inside of c, side by side, and nobody else uses it meanwhile.
                    let to = unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), n) };
                    to.iter_mut().zip(row).for_each(|(to, &sum)| *to = T::narrow(sum));
                } else {
                    for (j, &sum) in row.iter().enumerate() {
                        // SAFETY: (i, j) lies inside of c.
                        unsafe { *c.at(i, j) = T::narrow(sum) };
                    }
                }
            }
        },
    );
}

/// One past the furthest element of a stack.
fn reach3([g, m, n]: [usize; 3], strides: [usize; 3]) -> usize {
    match (g, reach([m, n], strides[1], strides[2])) {
        (0, _) | (_, 0) => 0,
        (_, reach) => reach + (g - 1) * strides[0],
    }
}

/// Whether no two elements share memory, as far as the strides tell: each steps over all that the smaller ones reach.
fn apart(extents: [usize; 3], strides: [usize; 3]) -> bool {
    let mut dims = [0, 1, 2].map(|d| (strides[d], extents[d]));
    dims.sort_unstable();
    let mut reach = 1;
    extents.contains(&0)
        || dims.into_iter().filter(|&(_, extent)| extent > 1).all(|(stride, extent)| {
            let steps_over = stride >= reach;
            reach += (extent - 1) * stride;
            steps_over
        })
}

/// Vectors run along the columns of c; a product is also that of the turned matrices.
///
/// # Safety
/// As for [`blocks`].
unsafe fn either_way<R: Real>(
    tiles: &Tiles<R>,
    [m, n, k]: [usize; 3],
    a: Source<R>,
    b: Source<R>,
    accumulate: bool,
    c: Target<R>,
) {
    let turn = if m.min(n) < tiles.lanes { n < m } else { c.row == 1 && c.col != 1 };
    let (dims, a, b, c) =
        if turn { ([n, m, k], b.turned(), a.turned(), c.turned()) } else { ([m, n, k], a, b, c) };
    // SAFETY: as promised by the caller; turning keeps what a matrix reaches.
    unsafe { blocks(tiles, dims, a, b, accumulate, c) }
}

/// One past the furthest element of a matrix.
fn reach([rows, cols]: [usize; 2], row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { 1 + (rows - 1) * row_stride + (cols - 1) * col_stride }
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

    fn moved(self, distance: usize) -> Self {
        Target { start: self.start.wrapping_add(distance), ..self }
    }

    /// # Safety
    /// The element lies inside of the memory.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> *mut T {
        // SAFETY: as promised by the caller.
        unsafe { self.start.add(i * self.row + j * self.col) }
    }
}

// SAFETY: tasks on several threads write disjoint parts of c only.
unsafe impl<T: Send> Sync for Target<T> {}

/// One cache line of scratch, so that packed vectors are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Lines of scratch on the stack: small products need no allocation.
const NEAR: usize = 256;

/// Room for `len` elements with arbitrary contents.
fn room<R>(len: usize, near: &mut [MaybeUninit<Line>; NEAR], far: &mut Vec<MaybeUninit<Line>>) -> *mut R {
    let lines = (len * size_of::<R>()).div_ceil(64);
    if lines <= NEAR {
        return near.as_mut_ptr().cast();
    }
    far.reserve_exact(lines);
    far.as_mut_ptr().cast()
}

/// Block by block, in the order that the module states.
///
/// # Safety
/// The matrices lie inside of their memories; c overlaps neither a nor b, nor itself.
unsafe fn blocks<R: Real>(
    tiles: &Tiles<R>,
    [m, n, k]: [usize; 3],
    a: Source<R>,
    b: Source<R>,
    accumulate: bool,
    c: Target<R>,
) {
    let (rows_max, cols_max, depth_max) =
        (m.min(ROWS), n.min(COLS).next_multiple_of(tiles.lanes), k.min(DEPTH));
    let few_rows = m <= FEW_ROWS;
    let mut near = [MaybeUninit::uninit(); NEAR];
    let mut far = Vec::new();
    let room_b = cols_max * depth_max;
    let packed_b = room::<R>(room_b + rows_max * depth_max, &mut near, &mut far);
    // SAFETY: the room was asked for just above.
    let packed_a = unsafe { packed_b.add(room_b) };
    if k == 0 && !accumulate {
        for i in 0..m {
            for j in 0..n {
                // SAFETY: (i, j) lies inside of c.
                unsafe { *c.at(i, j) = R::ZERO };
            }
        }
    }
    for first_col in (0..n).step_by(COLS) {
        let cols = COLS.min(n - first_col);
        for first_depth in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - first_depth);
            // SAFETY: the block lies inside of b; there is room for it.
            let strips =
                unsafe { cols_of(tiles, b.from(first_depth, first_col), [depth, cols], few_rows, packed_b) };
            for first_row in (0..m).step_by(ROWS) {
                let rows = ROWS.min(m - first_row);
                let add = accumulate || first_depth > 0;
                // SAFETY: the block lies inside of a, and there is room for it; the block of c lies inside of c.
                unsafe {
                    pack_rows(tiles, a.from(first_row, first_depth), [rows, depth], packed_a);
                    let start = c.at(first_row, first_col);
                    multiply(tiles, [rows, cols, depth], packed_a, strips, add, Target { start, ..c });
                }
            }
        }
    }
}

/// c = a b or c += a b for packed a and strips of b.
///
/// # Safety
/// `a` and `b` are laid out as above, and c lies inside of its memory.
unsafe fn multiply<R: Real>(
    tiles: &Tiles<R>,
    [rows, cols, depth]: [usize; 3],
    a: *const R,
    b: Strips<R>,
    add: bool,
    c: Target<R>,
) {
    let (wide, tallest) = (2 * tiles.lanes, tiles.heights[0]);
    for first_col in (0..cols).step_by(wide) {
        let used = wide.min(cols - first_col);
        let strip_b = if first_col < b.packed_from {
            (b.direct.wrapping_add(first_col), b.direct_row)
        } else {
            let width = used.next_multiple_of(tiles.lanes);
            (b.packed.wrapping_add((first_col - b.packed_from) * depth), width)
        };
        for first_row in (0..rows).step_by(tallest) {
            let strip = tallest.min(rows - first_row);
            let mut done = 0;
            for (h, height) in tiles.heights.into_iter().enumerate() {
                while height <= strip - done {
                    // SAFETY: as promised by the caller.
                    unsafe {
                        let a = (a.add(first_row * depth + done), strip);
                        let start = c.at(first_row + done, first_col);
                        let to = Target { start, ..c };
                        write(tiles, h, [used, depth], a, strip_b, add, to);
                    }
                    done += height;
                }
            }
        }
    }
}

/// One tile of c, whose last columns may be missing and whose columns may lie apart.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn write<R: Real>(
    tiles: &Tiles<R>,
    h: usize,
    [used, depth]: [usize; 2],
    a: (*const R, usize),
    b: (*const R, usize),
    add: bool,
    c: Target<R>,
) {
    let width = used.next_multiple_of(tiles.lanes);
    let tile = tiles.table[h][width / tiles.lanes - 1];
    if used == width && c.col == 1 {
        // SAFETY: as promised by the caller; `tiles` fits this CPU.
        unsafe { tile(depth, a, b, (c.start, c.row), add) };
        return;
    }
    let mut whole = [R::ZERO; 12 * 32];
    // SAFETY: no tile is larger than `whole`.
    unsafe { tile(depth, a, b, (whole.as_mut_ptr(), width), false) };
    for i in 0..tiles.heights[h] {
        for j in 0..used {
            // SAFETY: (i, j) lies inside of the tile of c.
            let to = unsafe { &mut *c.at(i, j) };
            let sum = whole[i * width + j];
            *to = if add { *to + sum } else { sum };
        }
    }
}

#[cfg(test)]
mod tests;
