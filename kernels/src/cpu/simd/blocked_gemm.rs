//! Blocked GEMM as in BLIS: the loops around the micro-kernel, which pack blocks of a and b.
//!
//! Blocks of [`KC`] steps of k, [`NC`] columns of b and [`MC_PANELS`] panels of rows of a are packed, then multiplied tile by tile. The
//! order in which the blocks of one sum are added is part of the contract of [`crate::cpu::gemm`]; the rest only affects speed.

use crate::cpu::simd::microkernel::{APanel, MR_MAX, MicroKernels, NR_MAX, PrefetchPtr};
use crate::cpu::simd::pack::{KC, MatrixPtr, PanelShape};
use crate::cpu::simd::prepacked::PackedB;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::Real;
use std::ops::Range;

/// Panels of a that are packed at a time (BLIS: MC): rows of a, if they are far apart, are then read in runs of useful length.
pub(super) const MC_PANELS: usize = 8;
/// Columns of b that are packed at a time (BLIS: NC): with [`KC`] rows they stay in the L2 cache, from which they are read once
/// for each panel of a.
const NC: usize = 768;
/// The most panels of the other operand for which packing an operand does not pay.
const UNPACKED_PANELS: usize = 2;
/// The same limit if steps of k are at most [`NEAR_STRIDE`] elements apart: half a page of f32.
const UNPACKED_PANELS_NEAR: usize = 4;
/// See [`UNPACKED_PANELS_NEAR`]: tiles that touch a new page in each step wait for its translation.
const NEAR_STRIDE: usize = 512;
/// Bytes of a block of b, gaps between its rows included, that stays in the L1 cache while all panels of a read it.
const NARROW_BYTES: usize = 32 << 10;

/// Returns the number of columns of c up to which a transposed a is read in place (see [`UNPACKED_PANELS_NEAR`]). `step` is the distance
/// of its columns, `lanes` the columns of a vector.
pub(crate) fn cols_in_place(lanes: usize, step: usize) -> usize {
    if step <= NEAR_STRIDE { UNPACKED_PANELS_NEAR * 2 * lanes } else { UNPACKED_PANELS * 2 * lanes }
}

/// A pointer to a strided matrix to write.
pub(crate) struct MatrixPtrMut<T> {
    pub(crate) start: *mut T,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<T> Clone for MatrixPtrMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for MatrixPtrMut<T> {}

impl<T> MatrixPtrMut<T> {
    fn transposed(self) -> Self {
        MatrixPtrMut { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Returns the same pointer with another element type.
    pub(crate) fn cast<U>(self) -> MatrixPtrMut<U> {
        MatrixPtrMut { start: self.start.cast(), row_stride: self.row_stride, col_stride: self.col_stride }
    }

    pub(crate) fn offset_by(self, distance: usize) -> Self {
        MatrixPtrMut { start: self.start.wrapping_add(distance), ..self }
    }

    /// Returns the submatrix from element (i, j) on.
    pub(crate) fn submatrix(self, i: usize, j: usize) -> Self {
        self.offset_by(i * self.row_stride + j * self.col_stride)
    }

    /// # Safety
    /// The element is within the memory.
    #[inline(always)]
    pub(crate) unsafe fn at(self, i: usize, j: usize) -> *mut T {
        // SAFETY: as promised by the caller.
        unsafe { self.start.add(i * self.row_stride + j * self.col_stride) }
    }
}

// SAFETY: tasks on several threads write disjoint parts of c only.
unsafe impl<T: Send> Sync for MatrixPtrMut<T> {}

/// `len` elements cut into parts of at most `max`, as evenly as possible: `num_longer` parts of `short_len` + 1 elements, then parts of
/// `short_len`.
#[derive(Clone, Copy)]
pub(super) struct EvenPartition {
    pub(super) count: usize,
    num_longer: usize,
    short_len: usize,
}

impl EvenPartition {
    fn new(len: usize, max: usize) -> EvenPartition {
        let count = len.div_ceil(max).max(1);
        EvenPartition { count, num_longer: len % count, short_len: len / count }
    }

    pub(super) fn start(self, i: usize) -> usize {
        i * self.short_len + i.min(self.num_longer)
    }

    pub(super) fn len(self, i: usize) -> usize {
        self.short_len + usize::from(i < self.num_longer)
    }
}

/// One blocked matrix product.
pub(crate) struct BlockedGemm<'t, R: 'static> {
    pub(super) kernels: &'t MicroKernels<R>,
    pub(super) n: usize,
    k: usize,
    pub(super) a: MatrixPtr<R>,
    pub(super) b: MatrixPtr<R>,
    /// All of b, if prepacked.
    pub(super) packed: Option<PackedB<'t, R>>,
    pub(super) c: MatrixPtrMut<R>,
    accumulate: bool,
    pub(super) panels: EvenPartition,
    /// Columns of a block.
    pub(super) block_cols: usize,
    pub(super) reads_a_in_place: bool,
    pub(super) reads_b_in_place: bool,
    /// Whether this is the product of the transposed matrices: rows here are columns of the caller's c.
    pub(super) transposed: bool,
    whole: Option<OnFinished<'t>>,
}

/// Called once for each finished part of c: its rows and its columns.
pub(crate) type OnFinished<'t> = &'t (dyn Fn(Range<usize>, Range<usize>) + Sync);

/// A block of columns of b and of steps of k.
#[derive(Clone, Copy)]
struct Block {
    first_col: usize,
    cols: usize,
    first_depth: usize,
    depth: usize,
}

impl<'t, R: Real> BlockedGemm<'t, R> {
    /// Prepares c = a b or c += a b; `dims` is (m, n, k). Vectors run along the columns of c; computes the product of the transposed
    /// matrices if that is faster.
    ///
    /// # Safety
    /// The matrices are within their memory; c overlaps neither a nor b, nor itself; the CPU has the kernels. That
    /// holds for as long as the value is used.
    pub(crate) unsafe fn new(
        kernels: &'t MicroKernels<R>,
        [m, n, k]: [usize; 3],
        a: MatrixPtr<R>,
        b: MatrixPtr<R>,
        accumulate: bool,
        c: MatrixPtrMut<R>,
    ) -> BlockedGemm<'t, R> {
        let transposed =
            if m.min(n) < kernels.lanes { n < m } else { c.row_stride == 1 && c.col_stride != 1 };
        let (m, n, a, b, c) =
            if transposed { (n, m, b.transposed(), a.transposed(), c.transposed()) } else { (m, n, a, b, c) };
        let wide = 2 * kernels.lanes;
        let panels = EvenPartition::new(m, kernels.by_height.len());
        // For few panels of a, packed b is used at once, and should stay in the L1 cache until then.
        let cols_max = if panels.count <= UNPACKED_PANELS { wide } else { NC };
        let block_cols = n.div_ceil(n.div_ceil(cols_max).max(1)).next_multiple_of(wide);
        let reads_a_in_place = a.direct
            && (a.col_stride == 1 || a.row_stride == 1 && n <= cols_in_place(kernels.lanes, a.col_stride));
        let is_narrow = b.row_stride * k.min(KC) * size_of::<R>() <= NARROW_BYTES;
        // Rows no longer than those of packed panels are as good in place.
        let reads_b_in_place = b.direct
            && b.col_stride == 1
            && (panels.count <= UNPACKED_PANELS || b.row_stride <= NR_MAX || is_narrow);
        if k == 0 && n > 0 && !accumulate {
            for i in 0..m {
                if c.col_stride == 1 {
                    // SAFETY: row i of c is `n` consecutive elements, which overlap nothing that is in use.
                    unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), n) }.fill(R::ZERO);
                    continue;
                }
                // SAFETY: (i, j) is within c.
                (0..n).for_each(|j| unsafe { *c.at(i, j) = R::ZERO });
            }
        }
        let (packed, whole) = (None, None);
        BlockedGemm {
            kernels,
            n,
            k,
            a,
            b,
            packed,
            c,
            accumulate,
            panels,
            block_cols,
            reads_a_in_place,
            reads_b_in_place,
            transposed,
            whole,
        }
    }

    /// Returns whether all of the caller's b would be packed.
    pub(crate) fn packs_b(&self) -> bool {
        !self.transposed && !self.reads_b_in_place
    }

    /// Uses a prepacked b, unless this is the product of the transposed matrices. Each of its steps is as wide as b.
    pub(crate) fn with_packed_b(self, packed: Option<PackedB<'t, R>>) -> Self {
        match packed {
            Some(packed) if !self.transposed => {
                BlockedGemm { packed: Some(packed), reads_b_in_place: false, ..self }
            }
            _ => self,
        }
    }

    /// Calls `on_finished` once for each finished part of c; never if k is 0.
    pub(crate) fn on_finished(self, whole: OnFinished<'t>) -> Self {
        BlockedGemm { whole: Some(whole), ..self }
    }

    /// Returns the elements of a packed block of b.
    pub(super) fn packed_b_len(&self) -> usize {
        if self.packed.is_some() {
            return 0;
        }
        self.block_cols.min(self.n.next_multiple_of(self.kernels.lanes)) * self.k.min(KC)
    }

    /// Returns the number of elements of packed panels of a.
    pub(super) fn packed_a_len(&self, panels: usize) -> usize {
        if self.reads_a_in_place { 0 } else { panels * self.kernels.by_height.len() * self.k.min(KC) }
    }

    /// Iterates over the blocks, in the order in which they are accumulated.
    fn blocks(&self) -> impl Iterator<Item = Block> + use<R> {
        let (n, k, block_cols) = (self.n, self.k, self.block_cols);
        (0..n).step_by(block_cols.max(1)).flat_map(move |first_col| {
            (0..k).step_by(KC).map(move |first_depth| Block {
                first_col,
                cols: block_cols.min(n - first_col),
                first_depth,
                depth: KC.min(k - first_depth),
            })
        })
    }

    /// Packs a block of b and returns a pointer to its panels: only the last panel if the others are read in place, nothing if b is
    /// prepacked.
    ///
    /// # Safety
    /// `to` has room for [`BlockedGemm::packed_b_len`] elements.
    unsafe fn pack(&self, block: Block, to: *mut R) -> *const R {
        let Block { first_col, cols, first_depth, depth } = block;
        if let Some(packed) = self.packed {
            return packed.panels([first_depth, depth], first_col).as_ptr();
        }
        let first = self.first_packed_col(cols);
        let from = self.b.submatrix(first_depth, first_col + first);
        // SAFETY: as promised by the caller.
        unsafe { from.pack_columns(self.kernels, [depth, cols - first], to) };
        to
    }

    /// Returns the first of the columns of a block that is packed; columns before it are read in place.
    pub(super) fn first_packed_col(&self, cols: usize) -> usize {
        let wide = 2 * self.kernels.lanes;
        if self.reads_b_in_place { cols / wide * wide } else { 0 }
    }

    /// Calls the function for finished parts with panels of rows and with columns.
    pub(super) fn finish(&self, rows: Range<usize>, cols: Range<usize>) {
        let Some(whole) = self.whole else { return };
        let rows = self.panels.start(rows.start)..self.panels.start(rows.end);
        if self.transposed { whole(cols, rows) } else { whole(rows, cols) }
    }

    /// Multiplies some panels of rows of a with a packed block of b and adds the result to c.
    ///
    /// # Safety
    /// `packed_b` holds the block; `packed_a` has room for these panels of a ([`BlockedGemm::packed_a_len`]).
    unsafe fn multiply_block(&self, block: Block, rows: Range<usize>, packed_b: *const R, packed_a: *mut R) {
        let (panels, depth) = (self.panels, block.depth);
        let a = self.a.submatrix(0, block.first_depth);
        let from = self.b.submatrix(block.first_depth, block.first_col);
        let panel = BPanels {
            depth,
            cols: block.cols,
            packed: packed_b,
            first_packed_col: self.first_packed_col(block.cols),
            in_place: from.start.cast(),
            row_stride: from.row_stride,
            is_far: self.packed.is_some(),
        };
        let add = self.accumulate || block.first_depth > 0;
        // SAFETY: the panels are within a, b and c; there is room for those of a.
        unsafe {
            let a_panels = match self.reads_a_in_place {
                true => APanels::InPlace(a),
                false => pack_rows(self.kernels, a, (panels, rows.clone()), [depth, 0, depth], packed_a),
            };
            macro_kernel(
                self.kernels,
                (panels, rows.clone()),
                a_panels,
                panel,
                add,
                self.c.submatrix(0, block.first_col),
            );
        }
        if block.first_depth + depth == self.k {
            self.finish(rows, block.first_col..block.first_col + block.cols);
        }
    }

    /// Computes the whole product on this thread.
    ///
    /// # Safety
    /// As for [`BlockedGemm::new`].
    pub(crate) unsafe fn run(&self, scratch: &mut Scratch) {
        let count = self.panels.count;
        let packed_b = scratch.room::<R>(self.packed_b_len() + self.packed_a_len(count.min(MC_PANELS)));
        let packed_a = packed_b.wrapping_add(self.packed_b_len());
        for block in self.blocks() {
            // SAFETY: there is room for both, and only this thread works on c.
            unsafe {
                let packed_b = self.pack(block, packed_b);
                for first in (0..count).step_by(MC_PANELS) {
                    self.multiply_block(block, first..count.min(first + MC_PANELS), packed_b, packed_a);
                }
            }
        }
    }
}

/// The panels of a block of b, two vectors wide (one vector, if the last holds no more): packed from column `first_packed_col` on, in place
/// before.
#[derive(Clone, Copy)]
pub(super) struct BPanels<R> {
    pub(super) depth: usize,
    pub(super) cols: usize,
    pub(super) packed: *const R,
    pub(super) first_packed_col: usize,
    pub(super) in_place: *const R,
    pub(super) row_stride: usize,
    /// Whether the panels were packed long ago (prepacked), so that no near cache holds them.
    pub(super) is_far: bool,
}

impl<R: Real> BPanels<R> {
    /// Returns the panel that begins at a column: its pointer and row stride, and its number of columns.
    pub(super) fn panel(&self, first_col: usize, lanes: usize) -> ((*const R, usize), usize) {
        let used = (2 * lanes).min(self.cols - first_col);
        if first_col < self.first_packed_col {
            return ((self.in_place.wrapping_add(first_col), self.row_stride), used);
        }
        let at = self.packed.wrapping_add((first_col - self.first_packed_col) * self.depth);
        ((at, used.next_multiple_of(lanes)), used)
    }

    /// Calls `tile` for some panels of rows and each panel of columns. Arguments: panel of rows, first column, and the distance from the
    /// panel of columns to what the tile prefetches, if it does.
    #[inline(always)]
    pub(super) fn for_each_tile(
        &self,
        some: Range<usize>,
        lanes: usize,
        tile: impl Fn(usize, usize, Option<usize>),
    ) {
        let first_cols = (0..self.cols).step_by(2 * lanes);
        if self.is_far {
            // Each panel of b, read from far away, multiplies all these panels of a. The first two prefetch a half each of the next panel of b.
            for first_col in first_cols {
                for panel in some.clone() {
                    let half = panel - some.start;
                    tile(panel, first_col, (half < 2).then_some((2 + half) * self.depth * lanes));
                }
            }
        } else {
            some.for_each(|panel| first_cols.clone().for_each(|first_col| tile(panel, first_col, None)));
        }
    }
}

/// The panels of a: in place, or packed from row `first` on.
#[derive(Clone, Copy)]
pub(super) enum APanels<R: 'static> {
    InPlace(MatrixPtr<R>),
    Packed { start: *const R, first: usize, depth: usize },
}

impl<R: Real> APanels<R> {
    /// Returns the panel that begins at a row.
    pub(super) fn panel(self, row: usize, height: usize) -> APanel<R> {
        match self {
            APanels::InPlace(a) => (a.submatrix(row, 0).start.cast(), a.row_stride, a.col_stride),
            APanels::Packed { start, first, depth } => (start.wrapping_add((row - first) * depth), 1, height),
        }
    }
}

/// Packs `depth` steps of some panels of rows of a, each of `panel_depth` steps, from step `at` of the panels on.
///
/// # Safety
/// The rows are within their memory, and `to` has room for them.
pub(super) unsafe fn pack_rows<R: Real>(
    kernels: &MicroKernels<R>,
    from: MatrixPtr<R>,
    (cut, some): (EvenPartition, Range<usize>),
    [depth, at, panel_depth]: [usize; 3],
    to: *mut R,
) -> APanels<R> {
    let first = cut.start(some.start);
    let (from, height) = (from.submatrix(first, 0).transposed(), cut.short_len);
    let num_longer = cut.num_longer.clamp(some.start, some.end) - some.start;
    let tall = PanelShape { depth, panel_depth, count: num_longer, used: height + 1, width: height + 1 };
    let rest = PanelShape { depth, panel_depth, count: some.len() - num_longer, used: height, width: height };
    let to_rest = to.wrapping_add(num_longer * (height + 1) * panel_depth + at * height);
    // SAFETY: as promised by the caller.
    unsafe {
        from.pack(kernels, tall, to.wrapping_add(at * (height + 1)));
        from.submatrix(0, num_longer * (height + 1)).pack(kernels, rest, to_rest);
    }
    APanels::Packed { start: to, first, depth: panel_depth }
}

/// The macro-kernel: c = a b or c += a b for some panels of a and a block of panels of b.
///
/// # Safety
/// `a` and `b` are laid out as above, and c is within its memory.
unsafe fn macro_kernel<R: Real>(
    kernels: &MicroKernels<R>,
    (cut, some): (EvenPartition, Range<usize>),
    a: APanels<R>,
    b: BPanels<R>,
    add: bool,
    c: MatrixPtrMut<R>,
) {
    let (lanes, depth) = (kernels.lanes, b.depth);
    let tile = |panel: usize, first_col: usize, prefetch: Option<usize>| {
        let (first_row, height) = (cut.start(panel), cut.len(panel));
        let (columns, used) = b.panel(first_col, lanes);
        let prefetch = prefetch.map(|at| (columns.0.wrapping_add(at), lanes));
        let (rows, c) = (a.panel(first_row, height), c.submatrix(first_row, first_col));
        // SAFETY: as promised by the caller.
        unsafe { run_tile(kernels, [height, used, depth], rows, columns, add, c, prefetch) };
    };
    b.for_each_tile(some, lanes, tile);
}

/// Computes one tile of c, which may have fewer columns than a vector, or columns that are not contiguous.
///
/// # Safety
/// As for [`macro_kernel`].
#[inline(always)]
unsafe fn run_tile<R: Real>(
    kernels: &MicroKernels<R>,
    [height, used, depth]: [usize; 3],
    a: APanel<R>,
    b: (*const R, usize),
    add: bool,
    c: MatrixPtrMut<R>,
    prefetch: Option<PrefetchPtr<R>>,
) {
    let width = used.next_multiple_of(kernels.lanes);
    let table = if prefetch.is_some() { kernels.prefetching } else { kernels.by_height };
    let (microkernel, prefetch) =
        (table[height - 1][width / kernels.lanes - 1], prefetch.unwrap_or((b.0, 0)));
    if used == width && c.col_stride == 1 {
        // SAFETY: as promised by the caller; `kernels` fits this CPU.
        unsafe { microkernel(depth, a, b, (c.start, c.row_stride), add, prefetch) };
        return;
    }
    let mut full = [R::ZERO; MR_MAX * NR_MAX];
    // SAFETY: no tile is larger than `full`.
    unsafe { microkernel(depth, a, b, (full.as_mut_ptr(), width), false, prefetch) };
    for i in 0..height {
        for j in 0..used {
            // SAFETY: (i, j) is within the tile of c.
            let to = unsafe { &mut *c.at(i, j) };
            let sum = full[i * width + j];
            *to = if add { *to + sum } else { sum };
        }
    }
}
