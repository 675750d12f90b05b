//! GEMM by bf16 dot products of the CPU: blocking and the loops around the dot product kernels.
//!
//! All of b that fits [`B_ELEMENTS`] is packed, then all of a that fits [`A_ELEMENTS`]; each tile of c is then summed over its whole depth
//! and rounded to the type of c.

use crate::cpu::simd::blocked_gemm::MatrixPtrMut;
use crate::cpu::simd::leaf_schedule::{BlockRule, LeafSchedule, Slot, StepBlock, TileOp};
use crate::cpu::simd::pack_bf16::{DotOperand, K_STEP, PANEL, PairLayout, STEP_WORDS, padded};
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::tile_sums::{Tile, TileSums};
use crate::cpu::simd::vectorized;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Level, amx, avx512_bf16, level, limit};
use crate::dtype::{DType, Float};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::OnceLock;

/// Terms of a sum that are summed before they are added to the others (BLIS: KC). Changing this changes results.
pub(crate) const KC: usize = 1024;
/// The most elements of b packed at a time.
const B_ELEMENTS: usize = 1 << 21;
/// The most elements of a packed at a time: they stay in the L2 cache.
const A_ELEMENTS: usize = 1 << 18;
/// Rows up to which packed b is used at once, and should stay in the cache until then.
const FEW_ROWS: usize = 2 * PANEL;
/// Columns packed at a time if c has few rows.
const COLS_IF_FEW_ROWS: usize = 4 * PANEL;
/// Columns are prefetched up to this many terms: longer ones would evict a from the cache.
const PREFETCH_DEPTH_MAX: usize = 2048;

/// An instruction set for dot products of bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bf16Isa {
    /// Pair by pair, in vectors (AVX512-BF16).
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// In tile registers (AMX).
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Bf16Isa {
    /// Returns all that this CPU has, the fastest last (detected once); none if a limit is set ([`limit`]).
    pub(crate) fn available() -> &'static [Bf16Isa] {
        static AVAILABLE: OnceLock<&[Bf16Isa]> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            if limit().is_none() && level() == Level::Avx512 && is_x86_feature_detected!("avx512bf16") {
                return if amx::granted() {
                    &[Bf16Isa::Avx512Bf16, Bf16Isa::Amx]
                } else {
                    &[Bf16Isa::Avx512Bf16]
                };
            }
            &[]
        })
    }

    /// Returns the fastest that this CPU has, if faster than FMA on operands widened to f32 (decided once).
    ///
    /// AVX512-BF16 doubles the throughput of FMA on AMD's CPUs, and halves it on Intel's: 91 against 189 GFLOP/s on a core of family 6,
    /// model 207. The choice must not be timed, because bits depend on it.
    pub(crate) fn best() -> Option<Bf16Isa> {
        static BEST: OnceLock<Option<Bf16Isa>> = OnceLock::new();
        *BEST.get_or_init(|| {
            let best = Bf16Isa::available().last().copied()?;
            #[cfg(target_arch = "x86_64")]
            if best == Bf16Isa::Avx512Bf16 && by_intel() {
                return None;
            }
            Some(best)
        })
    }
}

/// Returns whether Intel made this CPU.
#[cfg(target_arch = "x86_64")]
fn by_intel() -> bool {
    let id = __cpuid(0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// The sums of a tile of c.
#[derive(Clone)]
#[repr(C, align(64))]
struct Sums([f32; PANEL * PANEL]);

impl Sums {
    const ZERO: Sums = Sums([0.0; PANEL * PANEL]);

    fn tile(&mut self) -> Tile<f32> {
        (self.0.as_mut_ptr(), PANEL)
    }
}

/// The order of the sums over k.
#[derive(Clone, Copy)]
enum SumOrder<'t> {
    /// Blocks of [`KC`] of so many terms.
    Blocks(usize),
    /// The leaves of a schedule of one block ([`leaf_rule`]).
    Leaves(&'t LeafSchedule),
}

impl<'t> SumOrder<'t> {
    fn num_steps(self) -> usize {
        match self {
            SumOrder::Blocks(k) => k.div_ceil(K_STEP),
            SumOrder::Leaves(schedule) => schedule.num_steps() / K_STEP,
        }
    }

    /// Packs all terms of some vectors.
    ///
    /// # Safety
    /// As for [`DotOperand::pack`].
    unsafe fn pack(self, operand: DotOperand, layout: PairLayout, count: usize, to: *mut u32) {
        match self {
            // SAFETY: as promised by the caller.
            SumOrder::Blocks(k) => unsafe { operand.pack(layout, count, k, to) },
            SumOrder::Leaves(schedule) => {
                for segment in schedule.blocks.iter().flat_map(|block| &block.segments) {
                    let steps = (segment.at / K_STEP, self.num_steps());
                    let from = operand.skip_terms(segment.from[1]);
                    // SAFETY: as promised by the caller.
                    unsafe { from.pack_steps(layout, [count, segment.len], steps, to) };
                }
            }
        }
    }
}

/// Returns the rule of the schedule of a product of [`gemm_of_leaves`]: each leaf begins at a step.
pub(crate) fn leaf_rule<T: Float>() -> BlockRule {
    BlockRule { part: KC, depth_max: usize::MAX, alignment: K_STEP, rounds: T::DTYPE != DType::F32 }
}

/// Packed panels of operand vectors.
#[derive(Clone, Copy)]
struct PackedPanels {
    start: *const u32,
    count: usize,
}

/// Returns the number of 32-bit words of packed vectors.
fn packed_words(count: usize, steps: usize) -> usize {
    padded(count) * steps * STEP_WORDS
}

/// c = a b, or c += a b if `accumulate`, rounded once; `dims` is (m, n, k); the vectors of a are its rows, those of b its columns.
///
/// # Safety
/// The matrices are within their memory; c overlaps neither a nor b; the CPU has the isa.
pub(crate) unsafe fn gemm<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    scratch: &mut Scratch,
    dims: [usize; 3],
    factors: [DotOperand; 2],
    accumulate: bool,
    c: MatrixPtrMut<T>,
) {
    // SAFETY: as promised by the caller.
    unsafe { gemm_in_order(isa, scratch, (dims, SumOrder::Blocks(dims[2])), factors, accumulate, c) }
}

/// c = a b, with sums over the leaves of a schedule by [`leaf_rule`], for a single step of k0.
///
/// # Safety
/// As for [`gemm`], for all terms of the schedule.
pub(crate) unsafe fn gemm_of_leaves<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    scratch: &mut Scratch,
    (dims, schedule): ([usize; 3], &LeafSchedule),
    factors: [DotOperand; 2],
    c: MatrixPtrMut<T>,
) {
    // SAFETY: as promised by the caller.
    unsafe { gemm_in_order(isa, scratch, (dims, SumOrder::Leaves(schedule)), factors, false, c) }
}

/// See [`gemm`].
///
/// # Safety
/// As there.
unsafe fn gemm_in_order<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    scratch: &mut Scratch,
    (dims, order): ([usize; 3], SumOrder<'_>),
    [a, b]: [DotOperand; 2],
    accumulate: bool,
    c: MatrixPtrMut<T>,
) {
    let ([m, n, _], [a, b], c) = cheaper_orientation(dims, [a, b], c);
    let steps = order.num_steps();
    let fits = |elements: usize| (elements / (PANEL * K_STEP) / steps.max(1)).max(1) * PANEL;
    let cols = fits(B_ELEMENTS).min(if m <= FEW_ROWS { COLS_IF_FEW_ROWS } else { usize::MAX }).min(n);
    let rows = fits(A_ELEMENTS).min(m);
    let packed_b = scratch.room::<f32>(packed_words(cols, steps) + packed_words(rows, steps)).cast::<u32>();
    let packed_a = packed_b.wrapping_add(packed_words(cols, steps));
    // SAFETY: the CPU has the isa.
    #[cfg(target_arch = "x86_64")]
    let _registers = (isa == Bf16Isa::Amx).then(|| unsafe { amx::Registers::new() });
    for first_col in (0..n).step_by(cols.max(1)) {
        let panel = PackedPanels { start: packed_b, count: cols.min(n - first_col) };
        // SAFETY: there is room, and a CPU with the isa has AVX2.
        unsafe { order.pack(b.skip_vectors(first_col), PairLayout::PairMajor, panel.count, packed_b) };
        for first_row in (0..m).step_by(rows.max(1)) {
            let block = PackedPanels { start: packed_a, count: rows.min(m - first_row) };
            // SAFETY: as above; both are packed, and this thread has the registers.
            unsafe {
                order.pack(a.skip_vectors(first_row), PairLayout::VectorMajor, block.count, packed_a);
                let c = c.offset_by(first_row * c.row_stride + first_col * c.col_stride);
                vectorized(
                    #[inline(always)]
                    || macro_kernel(isa, order, [block, panel], accumulate, c),
                );
            }
        }
    }
}

/// Returns the operands as given, or those of the transposed product if that is cheaper to pack and to store.
fn cheaper_orientation<T>(
    [m, n, k]: [usize; 3],
    [a, b]: [DotOperand; 2],
    c: MatrixPtrMut<T>,
) -> ([usize; 3], [DotOperand; 2], MatrixPtrMut<T>) {
    let cost = |m: usize, n: usize, a: DotOperand, b: DotOperand, apart: bool| {
        let packing = (m * a.packing_cost(PairLayout::VectorMajor))
            .saturating_add(n * b.packing_cost(PairLayout::PairMajor));
        packing.saturating_mul(k).saturating_add(if apart { 16 * m * n } else { 0 })
    };
    if cost(n, m, b, a, c.row_stride != 1) < cost(m, n, a, b, c.col_stride != 1) {
        ([n, m, k], [b, a], MatrixPtrMut { row_stride: c.col_stride, col_stride: c.row_stride, ..c })
    } else {
        ([m, n, k], [a, b], c)
    }
}

/// The macro-kernel: computes all tiles of c for a packed block of a and a packed block of b.
///
/// # Safety
/// Both are packed, c has room for their product, this thread has the registers and the CPU the isa.
#[inline(always)]
unsafe fn macro_kernel<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    order: SumOrder<'_>,
    [block, panel]: [PackedPanels; 2],
    accumulate: bool,
    c: MatrixPtrMut<T>,
) {
    let steps = order.num_steps();
    let num_cached = if let SumOrder::Leaves(schedule) = order { schedule.num_cached } else { 0 };
    let (mut sums, mut later) = (Sums::ZERO, Sums::ZERO);
    let mut cached = vec![Sums::ZERO; num_cached];
    for first_col in (0..panel.count).step_by(PANEL) {
        for first_row in (0..block.count).step_by(PANEL) {
            let (rows, cols) = (PANEL.min(block.count - first_row), PANEL.min(panel.count - first_col));
            let extents = [padded(rows), padded(cols)];
            if first_col + PANEL < panel.count && steps * K_STEP <= PREFETCH_DEPTH_MAX {
                let next = panel.start.wrapping_add((first_col + PANEL) * steps * STEP_WORDS);
                let part = |row: usize| PANEL * steps * STEP_WORDS * row.min(block.count) / block.count;
                prefetch(next, part(first_row)..part(first_row + PANEL));
            }
            let starts = [(block, first_row), (panel, first_col)];
            let [a, b] = starts.map(|(panels, first)| panels.start.wrapping_add(first * steps * STEP_WORDS));
            let dot = |first: usize, some: usize, to: Tile<f32>| {
                let [a, b] = [(a, extents[0]), (b, extents[1])]
                    .map(|(start, lines)| start.wrapping_add(first * lines * STEP_WORDS));
                // SAFETY: as promised by the caller.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Bf16Isa::Avx512Bf16 => avx512_bf16::dot_panel(some, a, b, extents, to.0),
                        #[cfg(target_arch = "x86_64")]
                        Bf16Isa::Amx => amx::dot_panel(some, a, b, extents, to.0),
                    }
                }
            };
            match order {
                SumOrder::Blocks(_) => {
                    for first in (0..steps.max(1)).step_by(KC / K_STEP) {
                        let to = if first == 0 { &mut sums } else { &mut later };
                        dot(first, (steps - first).min(KC / K_STEP), to.tile());
                        if first > 0 {
                            sums.0.iter_mut().zip(&later.0).for_each(|(sum, later)| *sum += *later);
                        }
                    }
                }
                SumOrder::Leaves(schedule) => {
                    for block in &schedule.blocks {
                        // SAFETY: the slots of the schedule are there.
                        unsafe { run_ops::<T>(block, &dot, &mut cached, [&mut sums, &mut later]) };
                    }
                }
            }
            // SAFETY: the tile is within c.
            unsafe {
                store(
                    &sums,
                    [rows, cols],
                    accumulate,
                    c.offset_by(first_row * c.row_stride + first_col * c.col_stride),
                )
            };
        }
    }
}

/// Runs the operations of a block of steps on a tile of c, for which `dot` computes products of steps of k: the first step, their number,
/// and the result. `sums` is slot 0 in the end.
///
/// # Safety
/// `cached` has the slots of the schedule.
#[inline(always)]
unsafe fn run_ops<T: Float<Acc = f32>>(
    block: &StepBlock,
    dot: &impl Fn(usize, usize, Tile<f32>),
    cached: &mut [Sums],
    [sums, later]: [&mut Sums; 2],
) {
    let arithmetic = TileSums::<f32>::of::<T>();
    let (cached, sums, later) = (cached.as_mut_ptr(), sums.tile(), later.tile());
    let place = |slot: Slot| match slot {
        Slot::Cached(slot) => (cached.wrapping_add(slot).cast::<f32>(), PANEL),
        // There is one block, so that only slot 0 outlives it.
        Slot::Held(_) => sums,
    };
    for op in &block.ops {
        // SAFETY: each tile has so many elements.
        unsafe {
            match *op {
                TileOp::Multiply { first, depth, to, add } => {
                    dot(first / K_STEP, depth.div_ceil(K_STEP), if add { later } else { place(to) });
                    if add {
                        // The terms of one leaf, and whole leaves where nothing is rounded.
                        (TileSums::<f32>::of::<f32>().join)([PANEL; 2], place(to), [place(to), later]);
                    }
                }
                TileOp::Round { to, from } => (arithmetic.round)([PANEL; 2], place(to), place(from)),
                TileOp::Join { to, left, right } => {
                    (arithmetic.join)([PANEL; 2], place(to), [place(left), place(right)]);
                }
                TileOp::Copy { to, from } => (arithmetic.copy)([PANEL; 2], place(to), place(from)),
            }
        }
    }
}

/// Prefetches some words: each panel of rows prefetches its part of the next columns.
#[inline(always)]
fn prefetch(start: *const u32, words: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    for word in words.step_by(STEP_WORDS) {
        // SAFETY: nothing is read; every CPU of this architecture has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(word).cast()) };
    }
}

/// Rounds a tile of sums into c.
///
/// # Safety
/// The tile is within c.
#[inline(always)]
unsafe fn store<T: Float<Acc = f32>>(
    sums: &Sums,
    [rows, cols]: [usize; 2],
    accumulate: bool,
    c: MatrixPtrMut<T>,
) {
    let put = |to: &mut T, sum: f32| *to = T::narrow(if accumulate { to.widen() + sum } else { sum });
    for (i, sums) in sums.0.chunks_exact(PANEL).enumerate().take(rows) {
        if c.col_stride == 1 {
            // SAFETY: row i of the tile is contiguous inside of c, and no other thread uses it meanwhile.
            let to = unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), cols) };
            match <&mut [T; PANEL]>::try_from(&mut *to) {
                // A known length, so that no loop remainder is compiled.
                Ok(to) => to.iter_mut().zip(sums).for_each(|(to, &sum)| put(to, sum)),
                Err(_) => to.iter_mut().zip(sums).for_each(|(to, &sum)| put(to, sum)),
            }
        } else {
            for (j, &sum) in sums.iter().enumerate().take(cols) {
                // SAFETY: (i, j) is within c.
                put(unsafe { &mut *c.at(i, j) }, sum);
            }
        }
    }
}
