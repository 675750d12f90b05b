//! Products of bf16 by dot products of the CPU, where it has them: what is packed when, and in which order.
//!
//! All of b that fits [`PANEL`] is packed, then all of a that fits [`BLOCK`]; each tile of c then takes up its whole
//! depth, and is rounded from where its sums lie.

use crate::cpu::simd::blocked_gemm::Target;
use crate::cpu::simd::pack_bf16::{LINES, Lines, Order, STEP, WORDS, filled};
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::vectorized;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Level, amx, avx512_bf16, level};
use crate::dtype::Float;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::OnceLock;

/// Terms of a sum that are added up before they meet the rest. Changing this changes results.
pub(crate) const DEPTH: usize = 1024;
/// Elements of b that are packed at a time.
const PANEL: usize = 1 << 21;
/// Elements of a that are packed at a time: they stay in the second-level cache.
const BLOCK: usize = 1 << 18;
/// Up to so many rows, what is packed of b is used at once, and should not leave the cache before.
const FEW: usize = 2 * LINES;
/// So many columns are then packed at a time.
const FEW_COLS: usize = 4 * LINES;
/// Columns of no more terms are asked for ahead of their use: longer ones would push a out of the cache.
const EXPECTED_DEPTH: usize = 2048;

/// How this CPU forms sums of products of bf16.
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
    /// All that this CPU has, the best last (detected once).
    pub(crate) fn all() -> &'static [Bf16Isa] {
        static FOUND: OnceLock<&[Bf16Isa]> = OnceLock::new();
        FOUND.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            if level() == Level::Avx512 && is_x86_feature_detected!("avx512bf16") {
                return if amx::granted() {
                    &[Bf16Isa::Avx512Bf16, Bf16Isa::Amx]
                } else {
                    &[Bf16Isa::Avx512Bf16]
                };
            }
            &[]
        })
    }

    /// The best that this CPU has, if it is faster than fused multiply-adds of what is widened to f32 (decided once).
    ///
    /// Dot products of AVX512-BF16 do twice the work of those on CPUs of AMD, and half of it on Intel's: 91 against 189
    /// GFLOP/s on a core of its family 6, model 207. Which one it is must not be timed, for bits depend on it.
    pub(crate) fn best() -> Option<Bf16Isa> {
        static BEST: OnceLock<Option<Bf16Isa>> = OnceLock::new();
        *BEST.get_or_init(|| {
            let best = Self::all().last().copied()?;
            #[cfg(target_arch = "x86_64")]
            if best == Bf16Isa::Avx512Bf16 && by_intel() {
                return None;
            }
            Some(best)
        })
    }
}

/// Whether Intel made this CPU.
#[cfg(target_arch = "x86_64")]
fn by_intel() -> bool {
    let id = __cpuid(0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// Sums of a tile of c.
#[repr(align(64))]
struct Sums([f32; LINES * LINES]);

/// Packed strips of lines.
#[derive(Clone, Copy)]
struct Strips {
    start: *const u32,
    count: usize,
}

/// Words of so many packed lines.
fn words(count: usize, steps: usize) -> usize {
    filled(count) * steps * WORDS
}

/// c = a b, or c += a b if `accumulate`, rounded once; `dims` is (m, n, k), the lines of a are its rows, those of b its
/// columns.
///
/// # Safety
/// The matrices lie inside of their memories; c overlaps neither a nor b; the CPU has the isa.
pub(crate) unsafe fn product<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    scratch: &mut Scratch,
    dims: [usize; 3],
    [a, b]: [Lines; 2],
    accumulate: bool,
    c: Target<T>,
) {
    let ([m, n, k], [a, b], c) = oriented(dims, [a, b], c);
    let steps = k.div_ceil(STEP);
    let fits = |elements: usize| (elements / (LINES * STEP) / steps.max(1)).max(1) * LINES;
    let cols = fits(PANEL).min(if m <= FEW { FEW_COLS } else { usize::MAX }).min(n);
    let rows = fits(BLOCK).min(m);
    let packed_b = scratch.room::<f32>(words(cols, steps) + words(rows, steps)).cast::<u32>();
    let packed_a = packed_b.wrapping_add(words(cols, steps));
    // SAFETY: the CPU has the isa.
    #[cfg(target_arch = "x86_64")]
    let _registers = (isa == Bf16Isa::Amx).then(|| unsafe { amx::Registers::new() });
    for first_col in (0..n).step_by(cols.max(1)) {
        let panel = Strips { start: packed_b, count: cols.min(n - first_col) };
        // SAFETY: there is room, and a CPU with the isa has AVX2.
        unsafe { b.from(first_col).pack(Order::ByPlace, panel.count, k, packed_b) };
        for first_row in (0..m).step_by(rows.max(1)) {
            let block = Strips { start: packed_a, count: rows.min(m - first_row) };
            // SAFETY: as above; both are packed, and this thread has the registers.
            unsafe {
                a.from(first_row).pack(Order::ByLine, block.count, k, packed_a);
                let c = c.moved(first_row * c.row + first_col * c.col);
                vectorized(
                    #[inline(always)]
                    || tiles(isa, steps, [block, panel], accumulate, c),
                );
            }
        }
    }
}

/// The product, or that of the transposed matrices if it is cheaper to pack and to store.
fn oriented<T>(
    [m, n, k]: [usize; 3],
    [a, b]: [Lines; 2],
    c: Target<T>,
) -> ([usize; 3], [Lines; 2], Target<T>) {
    let price = |m: usize, n: usize, a: Lines, b: Lines, apart: bool| {
        let packing = (m * a.price(Order::ByLine)).saturating_add(n * b.price(Order::ByPlace));
        packing.saturating_mul(k).saturating_add(if apart { 16 * m * n } else { 0 })
    };
    if price(n, m, b, a, c.row != 1) < price(m, n, a, b, c.col != 1) {
        ([n, m, k], [b, a], Target { row: c.col, col: c.row, ..c })
    } else {
        ([m, n, k], [a, b], c)
    }
}

/// All tiles of a block and a panel.
///
/// # Safety
/// Both are packed, c has room for their product, this thread has the registers and the CPU the isa.
#[inline(always)]
unsafe fn tiles<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    steps: usize,
    [block, panel]: [Strips; 2],
    accumulate: bool,
    c: Target<T>,
) {
    let mut sums = Sums([0.0; LINES * LINES]);
    let mut later = Sums([0.0; LINES * LINES]);
    for first_col in (0..panel.count).step_by(LINES) {
        for first_row in (0..block.count).step_by(LINES) {
            let (rows, cols) = (LINES.min(block.count - first_row), LINES.min(panel.count - first_col));
            let extents = [filled(rows), filled(cols)];
            if first_col + LINES < panel.count && steps * STEP <= EXPECTED_DEPTH {
                let next = panel.start.wrapping_add((first_col + LINES) * steps * WORDS);
                let part = |row: usize| LINES * steps * WORDS * row.min(block.count) / block.count;
                prefetch(next, part(first_row)..part(first_row + LINES));
            }
            let starts = [(block, first_row), (panel, first_col)];
            let [a, b] = starts.map(|(strips, first)| strips.start.wrapping_add(first * steps * WORDS));
            for first in (0..steps.max(1)).step_by(DEPTH / STEP) {
                let some = (steps - first).min(DEPTH / STEP);
                let [a, b] = [(a, extents[0]), (b, extents[1])]
                    .map(|(start, lines)| start.wrapping_add(first * lines * WORDS));
                let to = if first == 0 { &mut sums } else { &mut later };
                // SAFETY: as promised by the caller.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Bf16Isa::Avx512Bf16 => avx512_bf16::strip(some, a, b, extents, to.0.as_mut_ptr()),
                        #[cfg(target_arch = "x86_64")]
                        Bf16Isa::Amx => amx::strip(some, a, b, extents, to.0.as_mut_ptr()),
                    }
                }
                if first > 0 {
                    sums.0.iter_mut().zip(&later.0).for_each(|(sum, later)| *sum += *later);
                }
            }
            // SAFETY: the tile lies inside of c.
            unsafe { store(&sums, [rows, cols], accumulate, c.moved(first_row * c.row + first_col * c.col)) };
        }
    }
}

/// Asks for some words ahead of their use: each strip of rows brings its part of the next columns closer.
#[inline(always)]
fn prefetch(start: *const u32, words: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    for word in words.step_by(WORDS) {
        // SAFETY: nothing is read; every CPU of this architecture has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(word).cast()) };
    }
}

/// Rounds a tile of sums into c.
///
/// # Safety
/// The tile lies inside of c.
#[inline(always)]
unsafe fn store<T: Float<Acc = f32>>(sums: &Sums, [rows, cols]: [usize; 2], accumulate: bool, c: Target<T>) {
    let put = |to: &mut T, sum: f32| *to = T::narrow(if accumulate { to.widen() + sum } else { sum });
    for (i, sums) in sums.0.chunks_exact(LINES).enumerate().take(rows) {
        if c.col == 1 {
            // SAFETY: row i of the tile lies inside of c, side by side, and nobody else uses it meanwhile.
            let to = unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), cols) };
            match <&mut [T; LINES]>::try_from(&mut *to) {
                // Whole vectors, without a rest to ask for.
                Ok(to) => to.iter_mut().zip(sums).for_each(|(to, &sum)| put(to, sum)),
                Err(_) => to.iter_mut().zip(sums).for_each(|(to, &sum)| put(to, sum)),
            }
        } else {
            for (j, &sum) in sums.iter().enumerate().take(cols) {
                // SAFETY: (i, j) lies inside of c.
                put(unsafe { &mut *c.at(i, j) }, sum);
            }
        }
    }
}
