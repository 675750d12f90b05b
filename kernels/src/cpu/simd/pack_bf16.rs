//! Packing for bf16 dot products: operand vectors cut along k into steps of [`K_STEP`] terms, two terms to a 32-bit word (VNNI pairs),
//! padded with zeros. f32 operands are rounded to bf16 while packing.

use crate::cpu::simd::{transpose_tile, vectorized};
use crate::dtype::{DType, Element, Float};
use half::bf16;

/// Terms of a step of k.
pub(crate) const K_STEP: usize = 32;
/// Words of a step: pairs of terms.
pub(crate) const STEP_WORDS: usize = K_STEP / 2;
/// Operand vectors of a panel: those of two tile registers.
pub(crate) const PANEL: usize = 32;
/// Vectors, or words, that are transposed at a time.
const TRANSPOSED: usize = 8;

/// An operand of dot products, as vectors along k: the rows of a, or the columns of b. Term p of vector i is at
/// `i * vector_stride + p * term_stride`. The caller vouches for the memory.
#[derive(Clone, Copy)]
pub(crate) struct DotOperand {
    start: *const u8,
    vector_stride: usize,
    term_stride: usize,
    /// Whether terms are f32, else bf16.
    is_f32: bool,
}

/// An element type that converts to the bits of a bf16.
trait ToBf16: Copy {
    fn bits(self) -> u16;
}

impl ToBf16 for u16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self
    }
}

impl ToBf16 for f32 {
    #[inline(always)]
    fn bits(self) -> u16 {
        bf16::narrow(self).to_bits()
    }
}

// SAFETY: tasks on several threads only read through it.
unsafe impl Sync for DotOperand {}

/// The order of the words of one step of a panel: the words of each vector contiguous, or the words of all vectors for each pair of
/// terms contiguous (the VNNI layout of a right operand).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PairLayout {
    VectorMajor,
    PairMajor,
}

/// Returns the number of vectors to which a panel of `count` is padded.
pub(crate) fn padded(count: usize) -> usize {
    count.next_multiple_of(PANEL / 2)
}

/// Some vectors of a panel and some terms of a step.
#[derive(Clone, Copy)]
struct Block {
    count: usize,
    terms: usize,
}

impl DotOperand {
    /// # Panics
    /// If the numbers are neither bf16 nor f32.
    pub(crate) fn new<T: Element>(data: &[T], vector_stride: usize, term_stride: usize) -> DotOperand {
        assert!(matches!(T::DTYPE, DType::BF16 | DType::F32), "lines are of bf16 or f32");
        DotOperand { start: data.as_ptr().cast(), vector_stride, term_stride, is_f32: T::DTYPE == DType::F32 }
    }

    /// Returns the operand with the origin moved by `distance` elements.
    pub(crate) fn offset_by(self, distance: usize) -> DotOperand {
        let size = if self.is_f32 { size_of::<f32>() } else { size_of::<u16>() };
        DotOperand { start: self.start.wrapping_add(distance * size), ..self }
    }

    /// Returns the operand from vector i on.
    pub(crate) fn skip_vectors(self, i: usize) -> DotOperand {
        self.offset_by(i * self.vector_stride)
    }

    /// Returns the operand from term p on.
    pub(crate) fn skip_terms(self, p: usize) -> DotOperand {
        self.offset_by(p * self.term_stride)
    }

    /// Returns the cost of packing an element; 1 is about the time to copy it.
    pub(crate) fn packing_cost(self, layout: PairLayout) -> usize {
        match (self.term_stride, self.vector_stride, layout) {
            (1, _, PairLayout::VectorMajor) => 2,
            (_, 1, PairLayout::PairMajor) => 3,
            (1, _, PairLayout::PairMajor) | (_, 1, PairLayout::VectorMajor) => 5,
            _ => 20,
        }
    }

    /// Packs `count` vectors of `depth` terms into panels of [`PANEL`] (the last [`padded`]), panel after panel, each step after step.
    /// Touches nothing if there is no term or no vector.
    ///
    /// # Safety
    /// The vectors are within their memory; `to` has room; the CPU has AVX2.
    pub(crate) unsafe fn pack(self, layout: PairLayout, count: usize, depth: usize, to: *mut u32) {
        // SAFETY: as promised by the caller.
        unsafe { self.pack_steps(layout, [count, depth], (0, depth.div_ceil(K_STEP)), to) }
    }

    /// [`DotOperand::pack`] into panels of `panel_steps` steps, from step `first` of the panels on.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn pack_steps(
        self,
        layout: PairLayout,
        extents: [usize; 2],
        steps: (usize, usize),
        to: *mut u32,
    ) {
        // SAFETY: as promised by the caller; `is_f32` states the element type.
        unsafe {
            if self.is_f32 {
                self.pack_as::<f32>(layout, extents, steps, to)
            } else {
                self.pack_as::<u16>(layout, extents, steps, to)
            }
        }
    }

    /// [`DotOperand::pack_steps`] for elements of type S.
    ///
    /// # Safety
    /// As for [`DotOperand::pack`].
    unsafe fn pack_as<S: ToBf16>(
        self,
        layout: PairLayout,
        [count, depth]: [usize; 2],
        (first, panel_steps): (usize, usize),
        to: *mut u32,
    ) {
        let (panels, steps) = (count.div_ceil(PANEL), depth.div_ceil(K_STEP));
        vectorized(
            #[inline(always)]
            || {
                for at in 0..panels * steps {
                    // Contiguous elements are read in runs that are as long as possible.
                    let (panel, step) = if self.vector_stride == 1 {
                        (at % panels, at / panels)
                    } else {
                        (at / steps, at % steps)
                    };
                    let block = Block {
                        count: PANEL.min(count - panel * PANEL),
                        terms: K_STEP.min(depth - step * K_STEP),
                    };
                    let from = self.skip_vectors(panel * PANEL).offset_by(step * K_STEP * self.term_stride);
                    let vectors = padded(block.count);
                    let at = panel * PANEL * panel_steps + (first + step) * vectors;
                    let to = to.wrapping_add(at * STEP_WORDS);
                    // SAFETY: as promised by the caller.
                    unsafe {
                        match self.vector_stride {
                            1 if self.term_stride != 1 && block.count == PANEL => {
                                from.interleave::<S, true>(layout, block, to)
                            }
                            1 if self.term_stride != 1 => from.interleave::<S, false>(layout, block, to),
                            _ => from.copy::<S>(layout, block, to),
                        }
                    }
                }
            },
        );
    }

    /// Packs a block whose terms are contiguous, or one with arbitrary strides.
    ///
    /// # Safety
    /// As for [`DotOperand::pack`].
    #[inline(always)]
    unsafe fn copy<S: ToBf16>(self, layout: PairLayout, block: Block, to: *mut u32) {
        let vectors = padded(block.count);
        for first in (0..vectors).step_by(TRANSPOSED) {
            let mut rows = [[0u16; K_STEP]; TRANSPOSED];
            for (i, row) in rows.iter_mut().enumerate().take(block.count.saturating_sub(first)) {
                let from = self.skip_vectors(first + i).start.cast::<S>();
                // SAFETY: the vector and the terms belong to the block.
                unsafe {
                    if self.term_stride == 1 && block.terms == K_STEP {
                        let terms = *from.cast::<[S; K_STEP]>();
                        (0..K_STEP).for_each(|p| row[p] = terms[p].bits());
                    } else {
                        for (p, x) in row.iter_mut().enumerate().take(block.terms) {
                            *x = (*from.add(p * self.term_stride)).bits();
                        }
                    }
                }
            }
            // SAFETY: there is room for these vectors; a row has `STEP_WORDS` words; the caller guarantees AVX2.
            unsafe {
                match layout {
                    PairLayout::VectorMajor => {
                        to.add(first * STEP_WORDS).cast::<[[u16; K_STEP]; TRANSPOSED]>().write_unaligned(rows)
                    }
                    PairLayout::PairMajor => transpose_words(
                        STEP_WORDS,
                        (rows.as_ptr().cast(), STEP_WORDS),
                        (to.add(first), vectors),
                    ),
                }
            }
        }
    }

    /// Packs a block in which each term of all vectors is contiguous: interleaves each term with the next one. A `WHOLE` block has
    /// [`PANEL`] vectors, which are moved in SIMD registers, without a call.
    ///
    /// # Safety
    /// As for [`DotOperand::pack`].
    #[inline(always)]
    unsafe fn interleave<S: ToBf16, const WHOLE: bool>(self, layout: PairLayout, block: Block, to: *mut u32) {
        let vectors = if WHOLE { PANEL } else { padded(block.count) };
        for first in (0..STEP_WORDS).step_by(TRANSPOSED) {
            let mut words = [[0u32; PANEL]; TRANSPOSED];
            for (w, words) in words.iter_mut().enumerate() {
                for half in 0..2 {
                    let term = 2 * (first + w) + half;
                    if term < block.terms {
                        let from = self.offset_by(term * self.term_stride).start.cast::<S>();
                        let place = |x: S| u32::from(x.bits()) << (16 * half);
                        // SAFETY: the term and the vectors belong to the block.
                        unsafe {
                            if WHOLE {
                                let row = *from.cast::<[S; PANEL]>();
                                (0..PANEL).for_each(|i| words[i] |= place(row[i]));
                            } else {
                                (0..block.count).for_each(|i| words[i] |= place(*from.add(i)));
                            }
                        }
                    }
                }
            }
            // SAFETY: there is room for these words; a row of `words` has at least as many words as there are vectors; the caller
            // guarantees AVX2.
            unsafe {
                match layout {
                    PairLayout::PairMajor if WHOLE => {
                        to.add(first * PANEL).cast::<[[u32; PANEL]; TRANSPOSED]>().write_unaligned(words);
                    }
                    PairLayout::PairMajor => {
                        for (w, words) in words.iter().enumerate() {
                            to.add((first + w) * vectors).copy_from_nonoverlapping(words.as_ptr(), vectors);
                        }
                    }
                    PairLayout::VectorMajor => {
                        transpose_words(vectors, (words.as_ptr().cast(), PANEL), (to.add(first), STEP_WORDS))
                    }
                }
            }
        }
    }
}

/// Transposes [`TRANSPOSED`] rows of `len` words.
///
/// # Safety
/// As for [`transpose_tile::TransposeTile`].
#[inline(always)]
unsafe fn transpose_words(
    len: usize,
    (from, from_step): (*const u32, usize),
    (to, to_step): (*mut u32, usize),
) {
    let (from, to) = ((from.cast::<f32>(), from_step), (to.cast::<f32>(), to_step));
    // SAFETY: as promised by the caller; words are moved as floats, which changes no bit.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        transpose_tile::eight_f32(len, from, to);
        #[cfg(not(target_arch = "x86_64"))]
        transpose_tile::plain::<f32, TRANSPOSED>(len, from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{Level, level};

    #[test]
    fn packed_words_are_at_their_positions() {
        if level() == Level::Baseline && cfg!(target_arch = "x86_64") {
            return;
        }
        let numbers: Vec<bf16> = (0..20_000u16).map(|i| bf16::from_bits(i + 1)).collect();
        check_positions(&numbers, &numbers);
        // A little more than a bf16 each, so that rounding changes something.
        let wide: Vec<f32> = numbers.iter().map(|x| f32::from_bits(x.widen().to_bits() + 7)).collect();
        check_positions(&wide, &numbers);
    }

    /// Checks that the packed words of `numbers` are those of `rounded`.
    fn check_positions<T: Element>(numbers: &[T], rounded: &[bf16]) {
        for (count, depth) in [(1, 1), (15, 32), (16, 33), (17, 2), (32, 64), (33, 31), (70, 97)] {
            for (vector_stride, term_stride) in
                [(depth, 1), (depth + 3, 1), (1, count), (1, count + 7), (2, 2 * count)]
            {
                let vectors = DotOperand::new(numbers, vector_stride, term_stride);
                let steps = depth.div_ceil(K_STEP);
                for layout in [PairLayout::VectorMajor, PairLayout::PairMajor] {
                    let mut words = vec![u32::MAX; count.next_multiple_of(PANEL) * steps * STEP_WORDS];
                    // SAFETY: there are more numbers than the operand reaches; the CPU's level was checked.
                    unsafe { vectors.pack(layout, count, depth, words.as_mut_ptr()) };
                    for i in 0..count / PANEL * PANEL + padded(count % PANEL) {
                        let (panel, line) = (i / PANEL, i % PANEL);
                        let height = padded(PANEL.min(count - panel * PANEL));
                        for p in 0..steps * K_STEP {
                            let (step, word) = (p / K_STEP, p % K_STEP / 2);
                            let place = match layout {
                                PairLayout::VectorMajor => line * STEP_WORDS + word,
                                PairLayout::PairMajor => word * height + line,
                            };
                            let found = words[(panel * PANEL * steps + step * height) * STEP_WORDS + place];
                            let inside = i < count && p < depth;
                            let want = if inside {
                                rounded[i * vector_stride + p * term_stride].to_bits()
                            } else {
                                0
                            };
                            let half = (found >> (16 * (p % 2))) as u16;
                            assert_eq!(
                                half, want,
                                "{count} {depth} {vector_stride} {term_stride} {layout:?} {i} {p}"
                            );
                        }
                    }
                }
            }
        }
    }
}
