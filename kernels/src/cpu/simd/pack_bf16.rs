//! Lines of bf16 as dot products read them: cut along the depth into steps of [`STEP`] terms, two terms to a word of 32
//! bits, and filled up with zeros. Numbers of f32 are rounded on the way.

use crate::cpu::simd::{transpose_tile, vectorized};
use crate::dtype::{DType, Element, Float};
use half::bf16;

/// Terms of a step.
pub(crate) const STEP: usize = 32;
/// Words of a step.
pub(crate) const WORDS: usize = STEP / 2;
/// Lines of a strip: those of two tile registers.
pub(crate) const LINES: usize = 32;
/// Lines, or words, that are transposed at a time.
const TURNED: usize = 8;

/// The rows of a, or the columns of b: term p of line i lies at `i * across + p * along`. The caller vouches for what
/// it reaches.
#[derive(Clone, Copy)]
pub(crate) struct Lines {
    start: *const u8,
    across: usize,
    along: usize,
    /// Whether they are of f32, else of bf16.
    is_wide: bool,
}

/// The bits of bf16 that stand for a number.
trait Short: Copy {
    fn bits(self) -> u16;
}

impl Short for u16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self
    }
}

impl Short for f32 {
    #[inline(always)]
    fn bits(self) -> u16 {
        bf16::narrow(self).to_bits()
    }
}

// SAFETY: tasks on several threads only read through it.
unsafe impl Sync for Lines {}

/// How the words of a step of a strip lie: those of a line side by side, or those of all lines at one place of the
/// step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    ByLine,
    ByPlace,
}

/// How many lines a strip of `count` is filled up to.
pub(crate) fn filled(count: usize) -> usize {
    count.next_multiple_of(LINES / 2)
}

/// Some lines of a strip and some terms of a step: as many as there are.
#[derive(Clone, Copy)]
struct Block {
    count: usize,
    terms: usize,
}

impl Lines {
    /// # Panics
    /// If the numbers are neither bf16 nor f32.
    pub(crate) fn new<T: Element>(data: &[T], across: usize, along: usize) -> Lines {
        assert!(matches!(T::DTYPE, DType::BF16 | DType::F32), "lines are of bf16 or f32");
        Lines { start: data.as_ptr().cast(), across, along, is_wide: T::DTYPE == DType::F32 }
    }

    /// The same from another element on.
    pub(crate) fn moved(self, distance: usize) -> Lines {
        let size = if self.is_wide { size_of::<f32>() } else { size_of::<u16>() };
        Lines { start: self.start.wrapping_add(distance * size), ..self }
    }

    /// The same from line i on.
    pub(crate) fn from(self, i: usize) -> Lines {
        self.moved(i * self.across)
    }

    /// What it costs to pack an element, in about the time of a copy.
    pub(crate) fn price(self, order: Order) -> usize {
        match (self.along, self.across, order) {
            (1, _, Order::ByLine) => 2,
            (_, 1, Order::ByPlace) => 3,
            (1, _, Order::ByPlace) | (_, 1, Order::ByLine) => 5,
            _ => 20,
        }
    }

    /// Packs `count` lines of `depth` terms in strips of [`LINES`], the last of [`filled`] lines, strip after strip, each
    /// step after step. Without a term or a line nothing is touched.
    ///
    /// # Safety
    /// The lines lie inside of their memory; `to` has room; the CPU has AVX2.
    pub(crate) unsafe fn pack(self, order: Order, count: usize, depth: usize, to: *mut u32) {
        // SAFETY: as promised by the caller; lines know what they are of.
        unsafe {
            if self.is_wide {
                self.pack_as::<f32>(order, count, depth, to)
            } else {
                self.pack_as::<u16>(order, count, depth, to)
            }
        }
    }

    /// [`Lines::pack`] of numbers that lie as S.
    ///
    /// # Safety
    /// As there.
    unsafe fn pack_as<S: Short>(self, order: Order, count: usize, depth: usize, to: *mut u32) {
        let (strips, steps) = (count.div_ceil(LINES), depth.div_ceil(STEP));
        vectorized(
            #[inline(always)]
            || {
                for at in 0..strips * steps {
                    // What lies side by side is read in runs that are as long as can be.
                    let (strip, step) =
                        if self.across == 1 { (at % strips, at / strips) } else { (at / steps, at % steps) };
                    let block = Block {
                        count: LINES.min(count - strip * LINES),
                        terms: STEP.min(depth - step * STEP),
                    };
                    let from = self.from(strip * LINES).moved(step * STEP * self.along);
                    let lines = filled(block.count);
                    let to = to.wrapping_add((strip * LINES * steps + step * lines) * WORDS);
                    // SAFETY: as promised by the caller.
                    unsafe {
                        match self.across {
                            1 if self.along != 1 && block.count == LINES => {
                                from.weave::<S, true>(order, block, to)
                            }
                            1 if self.along != 1 => from.weave::<S, false>(order, block, to),
                            _ => from.copy::<S>(order, block, to),
                        }
                    }
                }
            },
        );
    }

    /// Packs a block whose terms lie side by side, or anyhow.
    ///
    /// # Safety
    /// As for [`Lines::pack`].
    #[inline(always)]
    unsafe fn copy<S: Short>(self, order: Order, block: Block, to: *mut u32) {
        let lines = filled(block.count);
        for first in (0..lines).step_by(TURNED) {
            let mut rows = [[0u16; STEP]; TURNED];
            for (i, row) in rows.iter_mut().enumerate().take(block.count.saturating_sub(first)) {
                let from = self.from(first + i).start.cast::<S>();
                // SAFETY: the line is one of the block, and so are the terms.
                unsafe {
                    if self.along == 1 && block.terms == STEP {
                        let terms = *from.cast::<[S; STEP]>();
                        (0..STEP).for_each(|p| row[p] = terms[p].bits());
                    } else {
                        for (p, x) in row.iter_mut().enumerate().take(block.terms) {
                            *x = (*from.add(p * self.along)).bits();
                        }
                    }
                }
            }
            // SAFETY: there is room for these lines; a row is one of `WORDS` words; the caller vouches for AVX2.
            unsafe {
                match order {
                    Order::ByLine => {
                        to.add(first * WORDS).cast::<[[u16; STEP]; TURNED]>().write_unaligned(rows)
                    }
                    Order::ByPlace => {
                        turn_words(WORDS, (rows.as_ptr().cast(), WORDS), (to.add(first), lines))
                    }
                }
            }
        }
    }

    /// Packs a block whose lines lie side by side: pairs each term with the next. A `WHOLE` block has [`LINES`] lines, which
    /// are then moved in vectors, without a call.
    ///
    /// # Safety
    /// As for [`Lines::pack`].
    #[inline(always)]
    unsafe fn weave<S: Short, const WHOLE: bool>(self, order: Order, block: Block, to: *mut u32) {
        let lines = if WHOLE { LINES } else { filled(block.count) };
        for first in (0..WORDS).step_by(TURNED) {
            let mut words = [[0u32; LINES]; TURNED];
            for (w, words) in words.iter_mut().enumerate() {
                for half in 0..2 {
                    let term = 2 * (first + w) + half;
                    if term < block.terms {
                        let from = self.moved(term * self.along).start.cast::<S>();
                        let place = |x: S| u32::from(x.bits()) << (16 * half);
                        // SAFETY: the term is one of the block, and so are the lines.
                        unsafe {
                            if WHOLE {
                                let row = *from.cast::<[S; LINES]>();
                                (0..LINES).for_each(|i| words[i] |= place(row[i]));
                            } else {
                                (0..block.count).for_each(|i| words[i] |= place(*from.add(i)));
                            }
                        }
                    }
                }
            }
            // SAFETY: there is room for these words; a row of `words` has as many as there are lines or more; the caller
            // vouches for AVX2.
            unsafe {
                match order {
                    Order::ByPlace if WHOLE => {
                        to.add(first * LINES).cast::<[[u32; LINES]; TURNED]>().write_unaligned(words);
                    }
                    Order::ByPlace => {
                        for (w, words) in words.iter().enumerate() {
                            to.add((first + w) * lines).copy_from_nonoverlapping(words.as_ptr(), lines);
                        }
                    }
                    Order::ByLine => {
                        turn_words(lines, (words.as_ptr().cast(), LINES), (to.add(first), WORDS))
                    }
                }
            }
        }
    }
}

/// Turns [`TURNED`] rows of `len` words.
///
/// # Safety
/// As for [`transpose_tile::TransposeTile`].
#[inline(always)]
unsafe fn turn_words(len: usize, (from, from_step): (*const u32, usize), (to, to_step): (*mut u32, usize)) {
    let (from, to) = ((from.cast::<f32>(), from_step), (to.cast::<f32>(), to_step));
    // SAFETY: as promised by the caller; words are moved as floats, which changes no bit.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        transpose_tile::eight_f32(len, from, to);
        #[cfg(not(target_arch = "x86_64"))]
        transpose_tile::plain::<f32, TURNED>(len, from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{Level, level};

    #[test]
    fn every_word_has_its_place() {
        if level() == Level::Baseline && cfg!(target_arch = "x86_64") {
            return;
        }
        let numbers: Vec<bf16> = (0..20_000u16).map(|i| bf16::from_bits(i + 1)).collect();
        places(&numbers, &numbers);
        // A little more than a bf16 each, so that rounding has something to do.
        let wide: Vec<f32> = numbers.iter().map(|x| f32::from_bits(x.widen().to_bits() + 7)).collect();
        places(&wide, &numbers);
    }

    /// Looks for the words of `numbers`, which should be those of `rounded`.
    fn places<T: Element>(numbers: &[T], rounded: &[bf16]) {
        for (count, depth) in [(1, 1), (15, 32), (16, 33), (17, 2), (32, 64), (33, 31), (70, 97)] {
            for (across, along) in [(depth, 1), (depth + 3, 1), (1, count), (1, count + 7), (2, 2 * count)] {
                let lines = Lines::new(numbers, across, along);
                let steps = depth.div_ceil(STEP);
                for order in [Order::ByLine, Order::ByPlace] {
                    let mut words = vec![u32::MAX; count.next_multiple_of(LINES) * steps * WORDS];
                    // SAFETY: the numbers are more than the lines reach; the CPU was asked.
                    unsafe { lines.pack(order, count, depth, words.as_mut_ptr()) };
                    for i in 0..count / LINES * LINES + filled(count % LINES) {
                        let (strip, line) = (i / LINES, i % LINES);
                        let height = filled(LINES.min(count - strip * LINES));
                        for p in 0..steps * STEP {
                            let (step, word) = (p / STEP, p % STEP / 2);
                            let place = match order {
                                Order::ByLine => line * WORDS + word,
                                Order::ByPlace => word * height + line,
                            };
                            let found = words[(strip * LINES * steps + step * height) * WORDS + place];
                            let inside = i < count && p < depth;
                            let want = if inside { rounded[i * across + p * along].to_bits() } else { 0 };
                            let half = (found >> (16 * (p % 2))) as u16;
                            assert_eq!(half, want, "{count} {depth} {across} {along} {order:?} {i} {p}");
                        }
                    }
                }
            }
        }
    }
}
