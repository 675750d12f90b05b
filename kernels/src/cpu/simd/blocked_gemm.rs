//! A product block by block: what is packed when, and in which order tiles are taken.
//!
//! Blocks of [`DEPTH_MAX`] steps, [`COLS`] columns of b and [`ROWS`] rows of a are packed, then multiplied tile by
//! tile. The order of the blocks of one sum is part of the contract of [`crate::cpu::gemm`]; the rest is a matter of
//! speed.

use crate::cpu::simd::microkernel::{Ahead, COLS_MAX, ROWS_MAX, Rows, Tiles};
use crate::cpu::simd::pack::{DEPTH_MAX, Source, Strips};
use crate::cpu::simd::prepacked::Packed;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::Real;
use std::ops::Range;

/// Strips of a that are packed at a time: its rows, if they lie apart, are then read in runs that are worth it.
const STRIPS: usize = 8;
/// Columns of b that are packed at a time: with [`DEPTH_MAX`] rows they stay in the second-level cache, from which they
/// are read once for each strip of a.
const COLS: usize = 768;
/// Up to so many strips of the other operand, packing does not pay.
const FEW: usize = 2;
/// Nor up to so many, where the steps of the depth lie no further apart than [`NEAR`] elements: half a page of f32.
const SOME: usize = 4;
/// See [`SOME`]: tiles that touch a new page in each step wait for its translation.
const NEAR: usize = 512;
/// A block of b of so many bytes, with what lies between its rows, stays in the first-level cache while all strips of a meet it.
const NARROW: usize = 32 << 10;

/// Up to so many columns of c, a transposed a is read where it lies, for the strips of that many columns are few (see [`SOME`]).
/// `step` is the distance of its columns, `lanes` how many columns a vector has.
pub(crate) fn cols_in_place(lanes: usize, step: usize) -> usize {
    if step <= NEAR { SOME * 2 * lanes } else { FEW * 2 * lanes }
}

/// A matrix that is written.
pub(crate) struct Target<T> {
    pub(crate) start: *mut T,
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl<T> Clone for Target<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Target<T> {}

impl<T> Target<T> {
    fn transposed(self) -> Self {
        Target { row: self.col, col: self.row, ..self }
    }

    /// The same memory as that of another type.
    pub(crate) fn cast<U>(self) -> Target<U> {
        Target { start: self.start.cast(), row: self.row, col: self.col }
    }

    pub(crate) fn moved(self, distance: usize) -> Self {
        Target { start: self.start.wrapping_add(distance), ..self }
    }

    /// The same from element (i, j) on.
    pub(crate) fn from(self, i: usize, j: usize) -> Self {
        self.moved(i * self.row + j * self.col)
    }

    /// # Safety
    /// The element lies inside of the memory.
    #[inline(always)]
    pub(crate) unsafe fn at(self, i: usize, j: usize) -> *mut T {
        // SAFETY: as promised by the caller.
        unsafe { self.start.add(i * self.row + j * self.col) }
    }
}

// SAFETY: tasks on several threads write disjoint parts of c only.
unsafe impl<T: Send> Sync for Target<T> {}

/// `len` elements cut into parts of at most `max`, as even as can be: how many, and the length of the first ones,
/// which may be one more than that of the others.
#[derive(Clone, Copy)]
struct Cut {
    count: usize,
    longer: usize,
    short: usize,
}

impl Cut {
    fn new(len: usize, max: usize) -> Cut {
        let count = len.div_ceil(max).max(1);
        Cut { count, longer: len % count, short: len / count }
    }

    fn start(self, i: usize) -> usize {
        i * self.short + i.min(self.longer)
    }

    fn len(self, i: usize) -> usize {
        self.short + usize::from(i < self.longer)
    }
}

/// A product that is taken block by block.
pub(crate) struct BlockedGemm<'t, R: 'static> {
    tiles: &'t Tiles<R>,
    n: usize,
    k: usize,
    a: Source<R>,
    b: Source<R>,
    /// All of b, where it was packed before.
    packed: Option<Packed<'t, R>>,
    c: Target<R>,
    accumulate: bool,
    strips: Cut,
    /// Columns of a block.
    col_step: usize,
    in_place_a: bool,
    in_place_b: bool,
    /// Whether rows are columns of the c that was asked for.
    transposed: bool,
    whole: Option<Whole<'t>>,
}

/// Is told of each part of c that is whole: its rows and its columns.
pub(crate) type Whole<'t> = &'t (dyn Fn(Range<usize>, Range<usize>) + Sync);

/// Some columns of b and some steps of the depth.
#[derive(Clone, Copy)]
struct Block {
    first_col: usize,
    cols: usize,
    first_depth: usize,
    depth: usize,
}

impl<'t, R: Real> BlockedGemm<'t, R> {
    /// c = a b or c += a b; `dims` is (m, n, k). Vectors run along the columns of c; a product is also that of the transposed
    /// matrices.
    ///
    /// # Safety
    /// The matrices lie inside of their memories; c overlaps neither a nor b, nor itself; the CPU has the tiles. That
    /// holds for as long as the value is used.
    pub(crate) unsafe fn new(
        tiles: &'t Tiles<R>,
        [m, n, k]: [usize; 3],
        a: Source<R>,
        b: Source<R>,
        accumulate: bool,
        c: Target<R>,
    ) -> BlockedGemm<'t, R> {
        let transposed = if m.min(n) < tiles.lanes { n < m } else { c.row == 1 && c.col != 1 };
        let (m, n, a, b, c) =
            if transposed { (n, m, b.transposed(), a.transposed(), c.transposed()) } else { (m, n, a, b, c) };
        let wide = 2 * tiles.lanes;
        let strips = Cut::new(m, tiles.table.len());
        // What is packed for few rows is used at once, and should not leave the first-level cache before.
        let cols_max = if strips.count <= FEW { wide } else { COLS };
        let col_step = n.div_ceil(n.div_ceil(cols_max).max(1)).next_multiple_of(wide);
        let in_place_a = a.direct && (a.col == 1 || a.row == 1 && n <= cols_in_place(tiles.lanes, a.col));
        let is_narrow = b.row * k.min(DEPTH_MAX) * size_of::<R>() <= NARROW;
        // Rows no longer than those of packed strips lie as well as these.
        let in_place_b = b.direct && b.col == 1 && (strips.count <= FEW || b.row <= COLS_MAX || is_narrow);
        if k == 0 && !accumulate {
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                // SAFETY: (i, j) lies inside of c.
                unsafe { *c.at(i, j) = R::ZERO };
            }
        }
        let (packed, whole) = (None, None);
        BlockedGemm {
            tiles,
            n,
            k,
            a,
            b,
            packed,
            c,
            accumulate,
            strips,
            col_step,
            in_place_a,
            in_place_b,
            transposed,
            whole,
        }
    }

    /// Whether all of the b that was asked for is packed.
    pub(crate) fn packs_b(&self) -> bool {
        !self.transposed && !self.in_place_b
    }

    /// The same, of a b that is packed already, unless this is the product of the transposed matrices. Each step of it is as wide as b.
    pub(crate) fn of_packed(self, packed: Option<Packed<'t, R>>) -> Self {
        match packed {
            Some(packed) if !self.transposed => {
                BlockedGemm { packed: Some(packed), in_place_b: false, ..self }
            }
            _ => self,
        }
    }

    /// The same, where `whole` is told of each part of c once; of nothing if k is 0.
    pub(crate) fn telling(self, whole: Whole<'t>) -> Self {
        BlockedGemm { whole: Some(whole), ..self }
    }

    /// Elements of a packed block of b.
    fn room_b(&self) -> usize {
        if self.packed.is_some() {
            return 0;
        }
        self.col_step.min(self.n.next_multiple_of(self.tiles.lanes)) * self.k.min(DEPTH_MAX)
    }

    /// Elements of so many packed strips of a.
    fn room_a(&self, strips: usize) -> usize {
        if self.in_place_a { 0 } else { strips * self.tiles.table.len() * self.k.min(DEPTH_MAX) }
    }

    /// The blocks, in the order in which sums take them up.
    fn blocks(&self) -> impl Iterator<Item = Block> + use<R> {
        let (n, k, col_step) = (self.n, self.k, self.col_step);
        (0..n).step_by(col_step.max(1)).flat_map(move |first_col| {
            (0..k).step_by(DEPTH_MAX).map(move |first_depth| Block {
                first_col,
                cols: col_step.min(n - first_col),
                first_depth,
                depth: DEPTH_MAX.min(k - first_depth),
            })
        })
    }

    /// Packs a block of b, or only its last strip if the rest can stay where it is; nothing of what is packed already. Where it is.
    ///
    /// # Safety
    /// `to` has room for [`BlockedGemm::room_b`] elements.
    unsafe fn pack(&self, block: Block, to: *mut R) -> *const R {
        let Block { first_col, cols, first_depth, depth } = block;
        if let Some(packed) = self.packed {
            return packed.strips([first_depth, depth], first_col).as_ptr();
        }
        let first = self.packed_from(block);
        let from = self.b.from(first_depth, first_col + first);
        // SAFETY: as promised by the caller.
        unsafe { from.pack_columns(self.tiles, [depth, cols - first], to) };
        to
    }

    /// Columns before this one stay in b itself.
    fn packed_from(&self, block: Block) -> usize {
        let wide = 2 * self.tiles.lanes;
        if self.in_place_b { block.cols / wide * wide } else { 0 }
    }

    /// Brings a packed block into some strips of rows of c.
    ///
    /// # Safety
    /// `packed_b` holds the block; `packed_a` has room for these strips of a ([`BlockedGemm::room_a`]).
    unsafe fn multiply(&self, block: Block, rows: Range<usize>, packed_b: *const R, packed_a: *mut R) {
        let (strips, depth) = (self.strips, block.depth);
        let a = self.a.from(0, block.first_depth);
        let from = self.b.from(block.first_depth, block.first_col);
        let panel = Panel {
            depth,
            cols: block.cols,
            packed: packed_b,
            packed_from: self.packed_from(block),
            in_place: from.start.cast(),
            row: from.row,
            is_far: self.packed.is_some(),
        };
        let add = self.accumulate || block.first_depth > 0;
        // SAFETY: the strips lie inside of a, b and c; there is room for those of a.
        unsafe {
            let heights = match self.in_place_a {
                true => Heights::InPlace(a),
                false => pack_rows(self.tiles, a, (strips, rows.clone()), depth, packed_a),
            };
            tiles_of(
                self.tiles,
                (strips, rows.clone()),
                heights,
                panel,
                add,
                self.c.from(0, block.first_col),
            );
        }
        if let Some(whole) = self.whole
            && block.first_depth + depth == self.k
        {
            let rows = strips.start(rows.start)..strips.start(rows.end);
            let cols = block.first_col..block.first_col + block.cols;
            if self.transposed { whole(cols, rows) } else { whole(rows, cols) }
        }
    }

    /// The whole product, on this thread.
    ///
    /// # Safety
    /// As for [`BlockedGemm::new`].
    pub(crate) unsafe fn run(&self, scratch: &mut Scratch) {
        let count = self.strips.count;
        let room_b = scratch.room::<R>(self.room_b() + self.room_a(count.min(STRIPS)));
        let packed_a = room_b.wrapping_add(self.room_b());
        for block in self.blocks() {
            // SAFETY: there is room for both, and only this thread works on c.
            unsafe {
                let packed_b = self.pack(block, room_b);
                for first in (0..count).step_by(STRIPS) {
                    self.multiply(block, first..count.min(first + STRIPS), packed_b, packed_a);
                }
            }
        }
    }
}

/// Strips of b, two vectors wide (one, if the last holds no more): those from column `packed_from` on are packed,
/// those before lie in b itself.
#[derive(Clone, Copy)]
struct Panel<R> {
    depth: usize,
    cols: usize,
    packed: *const R,
    packed_from: usize,
    in_place: *const R,
    row: usize,
    /// Whether strips were packed so long ago that they are in no near cache.
    is_far: bool,
}

impl<R: Real> Panel<R> {
    /// The strip that begins at a column: where it lies, the distance of its rows, and how many columns it has.
    fn strip(&self, first_col: usize, lanes: usize) -> ((*const R, usize), usize) {
        let used = (2 * lanes).min(self.cols - first_col);
        if first_col < self.packed_from {
            return ((self.in_place.wrapping_add(first_col), self.row), used);
        }
        let at = self.packed.wrapping_add((first_col - self.packed_from) * self.depth);
        ((at, used.next_multiple_of(lanes)), used)
    }
}

/// Strips of a: where they lie, or packed from row `first` on.
#[derive(Clone, Copy)]
enum Heights<R: 'static> {
    InPlace(Source<R>),
    Packed { start: *const R, first: usize, depth: usize },
}

impl<R: Real> Heights<R> {
    /// The strip that starts at a row.
    fn strip(self, row: usize, height: usize) -> Rows<R> {
        match self {
            Heights::InPlace(a) => (a.from(row, 0).start.cast(), a.row, a.col),
            Heights::Packed { start, first, depth } => (start.wrapping_add((row - first) * depth), 1, height),
        }
    }
}

/// Packs some of the strips of rows.
///
/// # Safety
/// The rows lie inside of their memory, and `to` has room for them.
unsafe fn pack_rows<R: Real>(
    tiles: &Tiles<R>,
    from: Source<R>,
    (cut, some): (Cut, Range<usize>),
    depth: usize,
    to: *mut R,
) -> Heights<R> {
    let first = cut.start(some.start);
    let (from, height) = (from.from(first, 0).transposed(), cut.short);
    let longer = cut.longer.clamp(some.start, some.end) - some.start;
    let tall = Strips { depth, count: longer, used: height + 1, width: height + 1 };
    let rest = Strips { depth, count: some.len() - longer, used: height, width: height };
    // SAFETY: as promised by the caller.
    unsafe {
        from.pack(tiles, tall, to);
        from.from(0, longer * (height + 1)).pack(tiles, rest, to.add(longer * (height + 1) * depth));
    }
    Heights::Packed { start: to, first, depth }
}

/// c = a b or c += a b for some strips of a and a panel of b.
///
/// # Safety
/// `a` and `b` are laid out as above, and c lies inside of its memory.
unsafe fn tiles_of<R: Real>(
    tiles: &Tiles<R>,
    (cut, some): (Cut, Range<usize>),
    a: Heights<R>,
    b: Panel<R>,
    add: bool,
    c: Target<R>,
) {
    let (lanes, depth) = (tiles.lanes, b.depth);
    let first_cols = (0..b.cols).step_by(2 * lanes);
    let tile = |strip: usize, first_col: usize, ahead: Option<usize>| {
        let (first_row, height) = (cut.start(strip), cut.len(strip));
        let (columns, used) = b.strip(first_col, lanes);
        let ahead = ahead.map(|at| (columns.0.wrapping_add(at), lanes));
        let (rows, c) = (a.strip(first_row, height), c.from(first_row, first_col));
        // SAFETY: as promised by the caller.
        unsafe { write(tiles, [height, used, depth], rows, columns, add, c, ahead) };
    };
    if b.is_far {
        // A strip of b that comes from far away meets all these strips of a. The first two ask for the strip behind it, a half each.
        for first_col in first_cols {
            for strip in some.clone() {
                let half = strip - some.start;
                tile(strip, first_col, (half < 2).then_some((2 + half) * depth * lanes));
            }
        }
    } else {
        some.for_each(|strip| first_cols.clone().for_each(|first_col| tile(strip, first_col, None)));
    }
}

/// One tile of c, whose last columns may be missing and whose columns may lie apart.
///
/// # Safety
/// As for [`tiles_of`].
#[inline(always)]
unsafe fn write<R: Real>(
    tiles: &Tiles<R>,
    [height, used, depth]: [usize; 3],
    a: Rows<R>,
    b: (*const R, usize),
    add: bool,
    c: Target<R>,
    ahead: Option<Ahead<R>>,
) {
    let width = used.next_multiple_of(tiles.lanes);
    let table = if ahead.is_some() { tiles.asking } else { tiles.table };
    let (tile, ahead) = (table[height - 1][width / tiles.lanes - 1], ahead.unwrap_or((b.0, 0)));
    if used == width && c.col == 1 {
        // SAFETY: as promised by the caller; `tiles` fits this CPU.
        unsafe { tile(depth, a, b, (c.start, c.row), add, ahead) };
        return;
    }
    let mut whole = [R::ZERO; ROWS_MAX * COLS_MAX];
    // SAFETY: no tile is larger than `whole`.
    unsafe { tile(depth, a, b, (whole.as_mut_ptr(), width), false, ahead) };
    for i in 0..height {
        for j in 0..used {
            // SAFETY: (i, j) lies inside of the tile of c.
            let to = unsafe { &mut *c.at(i, j) };
            let sum = whole[i * width + j];
            *to = if add { *to + sum } else { sum };
        }
    }
}
