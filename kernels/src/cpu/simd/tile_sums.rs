//! Sums of partial tiles of a matrix product: rounding to the dtype of the operands, and joins of two tiles.

use crate::cpu::simd::vectorized;
use crate::dtype::{Element, Float, Real};

/// A tile: pointer and row stride.
pub(crate) type Tile<R> = (*mut R, usize);

/// The arithmetic of partial tiles for operands of one dtype, whose accumulator is R. Tiles have rows of 4, 8, 16 or 32 elements.
#[derive(Clone, Copy)]
pub(crate) struct TileSums<R> {
    /// Writes the sums of the elements of two tiles, rounded. Arguments: rows and columns; the result, which may be one of the tiles;
    /// the tiles.
    pub(crate) join: unsafe fn([usize; 2], Tile<R>, [Tile<R>; 2]),
    /// Writes the elements of a tile, rounded.
    pub(crate) round: unsafe fn([usize; 2], Tile<R>, Tile<R>),
    /// Copies the elements of a tile. Arguments as for `round`.
    pub(crate) copy: unsafe fn([usize; 2], Tile<R>, Tile<R>),
    /// Whether rounding changes anything.
    pub(crate) rounds: bool,
}

impl<R: Real> TileSums<R> {
    /// Returns the arithmetic for operands of type T.
    pub(crate) fn of<T: Float<Acc = R>>() -> TileSums<R> {
        let rounds = T::DTYPE != <R as Element>::DTYPE;
        TileSums { join: join::<T>, round: round::<T>, copy: round::<R>, rounds }
    }
}

macro_rules! by_width {
    ($cols:expr, $call:ident::<T>($($argument:expr),*)) => {
        match $cols {
            // SAFETY: as promised by the caller.
            4 => unsafe { $call::<T, 4>($($argument),*) },
            // SAFETY: as above.
            8 => unsafe { $call::<T, 8>($($argument),*) },
            // SAFETY: as above.
            16 => unsafe { $call::<T, 16>($($argument),*) },
            // SAFETY: as above.
            32 => unsafe { $call::<T, 32>($($argument),*) },
            cols => unreachable!("no tile is {cols} wide"),
        }
    };
}

/// See [`TileSums::join`].
///
/// # Safety
/// The tiles are within their memory, and no other thread uses the result.
unsafe fn join<T: Float>([rows, cols]: [usize; 2], to: Tile<T::Acc>, from: [Tile<T::Acc>; 2]) {
    vectorized(
        #[inline(always)]
        || by_width!(cols, join_rows::<T>(rows, to, from)),
    );
}

/// [`join`] for rows of N elements. Rows are read before they are written, since the result may be one of the tiles.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn join_rows<T: Float, const N: usize>(
    rows: usize,
    to: Tile<T::Acc>,
    [left, right]: [Tile<T::Acc>; 2],
) {
    for row in 0..rows {
        // SAFETY: the caller guarantees rows of N elements.
        let (mut sums, right) = unsafe { (row_of::<_, N>(left, row), row_of::<_, N>(right, row)) };
        // Builds with debug assertions would call a closure of `from_fn` for each element.
        for (sum, &right) in sums.iter_mut().zip(&right) {
            *sum = T::narrow(*sum + right).widen();
        }
        // SAFETY: as above.
        unsafe { *to.0.wrapping_add(row * to.1).cast::<[T::Acc; N]>() = sums };
    }
}

/// See [`TileSums::round`].
///
/// # Safety
/// As for [`join`].
unsafe fn round<T: Float>([rows, cols]: [usize; 2], to: Tile<T::Acc>, from: Tile<T::Acc>) {
    vectorized(
        #[inline(always)]
        || by_width!(cols, round_rows::<T>(rows, to, from)),
    );
}

/// [`round`] for rows of N elements.
///
/// # Safety
/// As for [`join`].
#[inline(always)]
unsafe fn round_rows<T: Float, const N: usize>(rows: usize, to: Tile<T::Acc>, from: Tile<T::Acc>) {
    for row in 0..rows {
        // SAFETY: the caller guarantees rows of N elements.
        let mut rounded = unsafe { row_of::<_, N>(from, row) };
        for x in &mut rounded {
            *x = T::narrow(*x).widen();
        }
        // SAFETY: as above.
        unsafe { *to.0.wrapping_add(row * to.1).cast::<[T::Acc; N]>() = rounded };
    }
}

/// Reads a row of N elements.
///
/// # Safety
/// The row is within its memory.
#[inline(always)]
unsafe fn row_of<R: Copy, const N: usize>(tile: Tile<R>, row: usize) -> [R; N] {
    // SAFETY: as promised by the caller; arrays are aligned like their elements.
    unsafe { *tile.0.wrapping_add(row * tile.1).cast::<[R; N]>() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn check<T: Float>() {
        for cols in [4, 8, 16, 32] {
            let (rows, stride) = (3, cols + 5);
            let value = |i: usize| T::from_f64(((i * 7919) % 1000) as f64 / 700.0 - 0.7).widen();
            let sums = TileSums::of::<T>();
            let mut tile: Vec<T::Acc> = (0..rows * stride).map(value).collect();
            let mut other: Vec<T::Acc> = (0..rows * cols).map(|i| value(i + 77)).collect();
            let expected: Vec<T::Acc> = (0..rows * stride)
                .map(|at| match (at / stride, at % stride) {
                    (i, j) if j < cols => T::narrow(tile[at] + other[i * cols + j]).widen(),
                    _ => tile[at],
                })
                .collect();
            let to = (tile.as_mut_ptr(), stride);
            // SAFETY: both tiles have the rows and columns.
            unsafe { (sums.join)([rows, cols], to, [to, (other.as_mut_ptr(), cols)]) };
            assert!(tile == expected, "{} {cols}", T::DTYPE);
            let third = T::Acc::ONE / (T::Acc::ONE + T::Acc::ONE + T::Acc::ONE);
            other.fill(third);
            // SAFETY: as above.
            unsafe { (sums.round)([rows, cols], (tile.as_mut_ptr(), stride), (other.as_mut_ptr(), cols)) };
            let rounded = T::narrow(third).widen();
            assert!((0..rows).all(|i| tile[i * stride..][..cols].iter().all(|x| *x == rounded)));
            assert_eq!(sums.rounds, rounded != third, "{}", T::DTYPE);
        }
    }

    #[test]
    fn tiles_are_joined_and_rounded_in_place() {
        check::<f32>();
        check::<f64>();
        check::<bf16>();
        check::<f16>();
    }
}
