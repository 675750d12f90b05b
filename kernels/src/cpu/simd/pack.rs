//! Blocks of matrices as tiles read them: in strips, widened, with the elements of one step side by side.

use crate::cpu::simd::microkernel::Tiles;
use crate::cpu::simd::transpose_tile::starts;
use crate::cpu::simd::{level, vectorized};
use crate::dtype::{Element, Float, Real};
use std::mem::MaybeUninit;

/// The deepest block that is packed at a time.
pub(crate) const DEPTH_MAX: usize = 256;

/// A matrix that is read, of any float type that widens to R; the caller vouches for what it reaches.
pub(crate) struct Source<R: 'static> {
    pub(crate) start: *const u8,
    pub(crate) row: usize,
    pub(crate) col: usize,
    /// Bytes of an element.
    size: usize,
    /// Whether elements are of type R itself, so that tiles can read them where they lie.
    pub(crate) direct: bool,
    /// Copies a block of it.
    pack: Pack<R>,
}

/// Strips of `used` columns each and `depth` rows, every step filled up to `width` places.
#[derive(Clone, Copy)]
pub(crate) struct Strips {
    pub(crate) depth: usize,
    pub(crate) count: usize,
    pub(crate) used: usize,
    pub(crate) width: usize,
}

/// to[(s * depth + p) * width + j] = from(p, s * used + j) for j below `used`, else 0.
type Pack<R> = unsafe fn(&Tiles<R>, Source<R>, Strips, *mut R);

impl<R> Clone for Source<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Source<R> {}

// SAFETY: it points to floats, and tasks on several threads only read through it.
unsafe impl<R> Sync for Source<R> {}

impl<R: Real> Source<R> {
    pub(crate) fn new<T: Float<Acc = R>>(data: &[T], row: usize, col: usize) -> Source<R> {
        let direct = T::DTYPE == R::DTYPE;
        Source { start: data.as_ptr().cast(), row, col, size: size_of::<T>(), direct, pack: pack::<T> }
    }

    pub(crate) fn transposed(self) -> Self {
        Source { row: self.col, col: self.row, ..self }
    }

    /// The same from another element on.
    pub(crate) fn moved(self, distance: usize) -> Self {
        Source { start: self.start.wrapping_add(distance * self.size), ..self }
    }

    /// The same from element (i, j) on.
    pub(crate) fn from(self, i: usize, j: usize) -> Self {
        self.moved(i * self.row + j * self.col)
    }

    /// Packs `cols` columns of `depth` steps in strips two vectors wide; one, if the last holds no more.
    ///
    /// # Safety
    /// The columns lie inside of the memory, and `to` has room for their strips.
    pub(crate) unsafe fn pack_columns(self, tiles: &Tiles<R>, [depth, cols]: [usize; 2], to: *mut R) {
        let wide = 2 * tiles.lanes;
        let (count, rest) = (cols / wide, cols % wide);
        let whole = Strips { depth, count, used: wide, width: wide };
        let last =
            Strips { depth, count: rest.min(1), used: rest, width: rest.next_multiple_of(tiles.lanes) };
        // SAFETY: as promised by the caller.
        unsafe {
            self.pack(tiles, whole, to);
            self.from(0, count * wide).pack(tiles, last, to.wrapping_add(count * wide * depth));
        }
    }

    /// See [`Pack`].
    ///
    /// # Safety
    /// The strips lie inside of the memory, and `to` has room for them.
    pub(crate) unsafe fn pack(self, tiles: &Tiles<R>, strips: Strips, to: *mut R) {
        if strips.count > 0 {
            // SAFETY: as promised by the caller; `pack` is that of the type of the elements.
            unsafe { (self.pack)(tiles, self, strips, to) }
        }
    }
}

/// Strips of `width` of the rows, which have `depth` elements each and lie side by side, transposed: to[(s * depth + p) * width +
/// j] = rows[(s * width + j) * depth + p], for as many strips as `to` has room for.
///
/// # Panics
/// If `to` is not made of whole strips, or there are fewer rows, or rows of 16-bit elements are longer than [`DEPTH_MAX`].
pub(crate) fn strips_of_rows<T: Float>(rows: &[T], depth: usize, width: usize, to: &mut [T::Acc]) {
    let count = to.len() / (depth * width);
    assert!(to.len() == count * depth * width && to.len() <= rows.len(), "rows for whole strips");
    let strips = Strips { depth, count, used: width, width };
    // SAFETY: the assertion covers both memories, and the level is that of this CPU.
    unsafe { Source::new(rows, 1, depth).pack(&Tiles::at(level()), strips, to.as_mut_ptr()) }
}

/// See [`Pack`].
///
/// # Safety
/// `from` is of type T; the strips lie inside of its memory, and `to` has room for them.
unsafe fn pack<T: Float>(tiles: &Tiles<T::Acc>, from: Source<T::Acc>, strips: Strips, to: *mut T::Acc) {
    let Strips { depth, count, used, width } = strips;
    let start = from.start.cast::<T>();
    let block = tiles.turn.0;
    // SAFETY: p is below `depth` and j below `used` or, where only `to` is touched, below `width`.
    unsafe {
        if from.row == 1 && from.col != 1 && depth >= block && used >= block {
            for s in 0..count {
                for j in starts(used, block) {
                    let from = (start.add((s * used + j) * from.col), from.col);
                    turn(tiles, from, depth, (to.add(s * depth * width + j), width));
                }
            }
        } else if from.col == 1 && used == width {
            copy((start, from.row), strips, to);
        } else {
            for (s, p) in (0..count).flat_map(|s| (0..depth).map(move |p| (s, p))) {
                for j in 0..used {
                    let x = *start.add(p * from.row + (s * used + j) * from.col);
                    *to.add((s * depth + p) * width + j) = x.widen();
                }
            }
        }
        for step in 0..if used < width { count * depth } else { 0 } {
            for j in used..width {
                *to.add(step * width + j) = T::Acc::ZERO;
            }
        }
    }
}

/// Turns a block's worth of rows of `depth` elements, widening them first if they are of 16 bits.
///
/// # Safety
/// The rows, and as many columns of `to`, lie inside of their memories.
unsafe fn turn<T: Float>(
    tiles: &Tiles<T::Acc>,
    (from, from_step): (*const T, usize),
    depth: usize,
    to: (*mut T::Acc, usize),
) {
    let (block, turn) = tiles.turn;
    let mut wide = [MaybeUninit::<T::Acc>::uninit(); 8 * DEPTH_MAX];
    let from = if T::DTYPE == <T::Acc as Element>::DTYPE {
        (from.cast::<T::Acc>(), from_step)
    } else {
        assert!(depth <= DEPTH_MAX && block <= 8, "a block of rows fits the scratch");
        vectorized(
            #[inline(always)]
            || {
                for (i, row) in wide.chunks_exact_mut(DEPTH_MAX).take(block).enumerate() {
                    for (p, to) in row[..depth].iter_mut().enumerate() {
                        // SAFETY: as promised by the caller.
                        to.write(unsafe { *from.add(i * from_step + p) }.widen());
                    }
                }
            },
        );
        (wide.as_ptr().cast::<T::Acc>(), DEPTH_MAX)
    };
    // SAFETY: as promised by the caller; of `wide`, what was just written is read.
    unsafe { turn(depth, from, to) };
}

/// Copies strips whose rows lie side by side: row after row of the source, so that it is read in long runs.
///
/// # Safety
/// As for [`pack`].
unsafe fn copy<T: Float>(from: (*const T, usize), strips: Strips, to: *mut T::Acc) {
    macro_rules! by_width {
        ($($width:literal)*) => {
            match strips.width {
                // SAFETY: as promised by the caller.
                $($width => unsafe { copy_rows::<T, $width>(from, strips, to) },)*
                width => unreachable!("no tile is {width} wide"),
            }
        };
    }
    by_width!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 16 32);
}

/// [`copy`] for rows of N elements.
///
/// # Safety
/// As for [`pack`].
unsafe fn copy_rows<T: Float, const N: usize>(
    (from, from_step): (*const T, usize),
    Strips { depth, count, .. }: Strips,
    to: *mut T::Acc,
) {
    vectorized(
        #[inline(always)]
        move || {
            for p in 0..depth {
                let (from, to) = (from.wrapping_add(p * from_step), to.wrapping_add(p * N));
                for s in 0..count {
                    // SAFETY: the caller vouches for N elements side by side.
                    let row = unsafe { *from.wrapping_add(s * N).cast::<[T; N]>() };
                    let to = to.wrapping_add(s * depth * N);
                    for (j, x) in row.into_iter().enumerate() {
                        // SAFETY: the caller vouches for the room.
                        unsafe { *to.wrapping_add(j) = x.widen() };
                    }
                }
            }
        },
    );
}
