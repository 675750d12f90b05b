//! A matrix product whose sums are canonical: the loops of [`BlockedGemm`], with the sums of the leaves of k joined in the tree while
//! partial tiles are in the cache.

use crate::cpu::simd::blocked_gemm::{APanels, BPanels, BlockedGemm, MC_PANELS, pack_rows};
use crate::cpu::simd::leaf_schedule::{LeafSchedule, Slot, StepBlock, TileOp};
use crate::cpu::simd::microkernel::{MR_MAX, NR_MAX};
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::tile_sums::{Tile, TileSums};
use crate::dtype::Real;
use std::ops::Range;

/// Elements of a slot in the cache.
const TILE: usize = MR_MAX * NR_MAX;

/// One blocked matrix product over leaves of k.
pub(crate) struct LeafGemm<'t, R: 'static> {
    gemm: BlockedGemm<'t, R>,
    schedule: &'t LeafSchedule,
    /// Distance of the steps of k0 in a and in b; those of k1 are the column stride of a and the row stride of b.
    outer_strides: [usize; 2],
    sums: TileSums<R>,
}

/// Memory of a product on one thread.
#[derive(Clone, Copy)]
struct Room<R> {
    packed_b: *mut R,
    packed_a: *mut R,
    /// Slots of the tile that is computed.
    cached: *mut R,
    /// Slots of a block of columns: each has all rows.
    held: *mut R,
    /// The first slot there: 1 if c itself has the columns of every tile.
    first_held: usize,
    /// Elements of a row of a held slot.
    held_width: usize,
}

/// Columns of c that are computed from one packed block of b.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    count: usize,
}

impl<'t, R: Real> LeafGemm<'t, R> {
    /// Prepares a product over the leaves of a schedule for blocks of [`KC`](crate::cpu::simd::pack::KC) steps: `gemm` does not
    /// accumulate, and `outer_strides` are those of its caller's a and b if k0 has several steps.
    pub(crate) fn new(
        mut gemm: BlockedGemm<'t, R>,
        schedule: &'t LeafSchedule,
        outer_strides: Option<[usize; 2]>,
        sums: TileSums<R>,
    ) -> LeafGemm<'t, R> {
        let Some([a, b]) = outer_strides else {
            return LeafGemm { gemm, schedule, outer_strides: [0; 2], sums };
        };
        let outer_strides = if gemm.transposed { [b, a] } else { [a, b] };
        // Steps of a block have no one distance.
        (gemm.reads_a_in_place, gemm.reads_b_in_place) = (false, false);
        LeafGemm { gemm, schedule, outer_strides, sums }
    }

    /// Computes the whole product on this thread.
    ///
    /// # Safety
    /// As for [`BlockedGemm::new`], for all steps of the schedule.
    pub(crate) unsafe fn run(&self, scratch: &mut Scratch) {
        let (gemm, count) = (&self.gemm, self.gemm.panels.count);
        let lanes = gemm.kernels.lanes;
        let held_width = gemm.block_cols.min(gemm.n.next_multiple_of(lanes));
        let first_held = usize::from(gemm.c.col_stride == 1 && gemm.n.is_multiple_of(lanes));
        let num_held = self.schedule.num_held.saturating_sub(first_held);
        let lens = [
            gemm.packed_b_len(),
            gemm.packed_a_len(count.min(MC_PANELS)),
            self.schedule.num_cached * TILE,
            num_held * gemm.panels.start(count) * held_width,
        ];
        // A slot begins at a cache line.
        let lens = lens.map(|len| len.next_multiple_of(64));
        let packed_b = scratch.room::<R>(lens.iter().sum());
        let packed_a = packed_b.wrapping_add(lens[0]);
        let cached = packed_a.wrapping_add(lens[1]);
        let held = cached.wrapping_add(lens[2]);
        let room = Room { packed_b, packed_a, cached, held, first_held, held_width };
        for first in (0..gemm.n).step_by(gemm.block_cols.max(1)) {
            let columns = Columns { first, count: gemm.block_cols.min(gemm.n - first) };
            for (number, block) in self.schedule.blocks.iter().enumerate() {
                let is_last = number + 1 == self.schedule.blocks.len();
                // SAFETY: there is room for all, and only this thread works on c.
                unsafe {
                    let packed_b = self.pack(block, columns, room.packed_b);
                    for first in (0..count).step_by(MC_PANELS) {
                        let rows = first..count.min(first + MC_PANELS);
                        self.multiply_block((block, is_last), columns, rows, packed_b, room);
                    }
                }
            }
        }
    }

    /// Packs a block of b and returns a pointer to its panels, as [`BlockedGemm`] does.
    ///
    /// # Safety
    /// `to` has room for the block.
    unsafe fn pack(&self, block: &StepBlock, columns: Columns, to: *mut R) -> *const R {
        let gemm = &self.gemm;
        if let Some(packed) = gemm.packed {
            return packed.panels([block.first, block.depth], columns.first).as_ptr();
        }
        let first = gemm.first_packed_col(columns.count);
        for segment in &block.segments {
            let [outer, inner] = segment.from;
            let from =
                gemm.b.submatrix(inner, columns.first + first).offset_by(outer * self.outer_strides[1]);
            let extents = [segment.len, columns.count - first];
            // SAFETY: as promised by the caller.
            unsafe { from.pack_steps_of_columns(gemm.kernels, extents, (segment.at, block.depth), to) };
        }
        to
    }

    /// Packs some panels of rows of a for a block of steps, unless they are read in place.
    ///
    /// # Safety
    /// `to` has room for the panels.
    unsafe fn a_panels(&self, block: &StepBlock, rows: Range<usize>, to: *mut R) -> APanels<R> {
        let gemm = &self.gemm;
        let mut panels = APanels::InPlace(gemm.a.submatrix(0, block.segments[0].from[1]));
        if gemm.reads_a_in_place {
            debug_assert!(block.segments.len() == 1, "steps that are read in place have one distance");
            return panels;
        }
        for segment in &block.segments {
            let [outer, inner] = segment.from;
            let from = gemm.a.submatrix(0, inner).offset_by(outer * self.outer_strides[0]);
            let steps = [segment.len, segment.at, block.depth];
            // SAFETY: as promised by the caller.
            panels = unsafe { pack_rows(gemm.kernels, from, (gemm.panels, rows.clone()), steps, to) };
        }
        panels
    }

    /// Runs the operations of a block for some panels of rows of a and a packed block of b.
    ///
    /// # Safety
    /// `packed_b` holds the block; there is room.
    unsafe fn multiply_block(
        &self,
        (block, is_last): (&StepBlock, bool),
        columns: Columns,
        rows: Range<usize>,
        packed_b: *const R,
        room: Room<R>,
    ) {
        let (gemm, lanes) = (&self.gemm, self.gemm.kernels.lanes);
        // SAFETY: as promised by the caller.
        let a = unsafe { self.a_panels(block, rows.clone(), room.packed_a) };
        let in_place = gemm.b.submatrix(block.segments[0].from[1], columns.first);
        let b = BPanels {
            depth: block.depth,
            cols: columns.count,
            packed: packed_b,
            first_packed_col: gemm.first_packed_col(columns.count),
            in_place: in_place.start.cast(),
            row_stride: in_place.row_stride,
            is_far: gemm.packed.is_some(),
        };
        b.for_each_tile(rows.clone(), lanes, |panel, first_col, prefetch| {
            let (first_row, height) = (gemm.panels.start(panel), gemm.panels.len(panel));
            let ((b_start, b_step), used) = b.panel(first_col, lanes);
            let (a_start, a_row, a_col) = a.panel(first_row, height);
            let extents = [height, used.next_multiple_of(lanes)];
            let c = gemm.c.submatrix(first_row, columns.first + first_col);
            let is_direct = used == extents[1] && c.col_stride == 1;
            let place = |slot: Slot| -> Tile<R> {
                match slot {
                    Slot::Cached(slot) => (room.cached.wrapping_add(slot * TILE), extents[1]),
                    Slot::Held(0) if is_direct => (c.start, c.row_stride),
                    Slot::Held(slot) => {
                        let slot = slot - room.first_held;
                        let row = slot * gemm.panels.start(gemm.panels.count) + first_row;
                        (room.held.wrapping_add(row * room.held_width + first_col), room.held_width)
                    }
                }
            };
            let table = if prefetch.is_some() { gemm.kernels.prefetching } else { gemm.kernels.by_height };
            let microkernel = table[height - 1][extents[1] / lanes - 1];
            let later = b_start.wrapping_add(prefetch.unwrap_or(0));
            for op in &block.ops {
                // SAFETY: the steps are within the packed block, and tiles within c and the room; `kernels` fits this CPU.
                unsafe {
                    match *op {
                        TileOp::Multiply { first, depth, to, add } => {
                            let a = (a_start.wrapping_add(first * a_col), a_row, a_col);
                            let b = (b_start.wrapping_add(first * b_step), b_step);
                            let later = (
                                later.wrapping_add(first * lanes),
                                if prefetch.is_some() { lanes } else { 0 },
                            );
                            microkernel(depth, a, b, place(to), add, later);
                        }
                        TileOp::Round { to, from } => (self.sums.round)(extents, place(to), place(from)),
                        TileOp::Join { to, left, right } => {
                            (self.sums.join)(extents, place(to), [place(left), place(right)]);
                        }
                        TileOp::Copy { to, from } => (self.sums.copy)(extents, place(to), place(from)),
                    }
                }
            }
            if is_last && !is_direct {
                let (from, width) = place(Slot::Held(0));
                for (i, j) in (0..height).flat_map(|i| (0..used).map(move |j| (i, j))) {
                    // SAFETY: (i, j) is within the tile and within c.
                    unsafe { *c.at(i, j) = *from.wrapping_add(i * width + j) };
                }
            }
        });
        if is_last {
            gemm.finish(rows, columns.first..columns.first + columns.count);
        }
    }
}
