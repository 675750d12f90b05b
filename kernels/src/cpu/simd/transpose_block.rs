//! Transposition of small blocks of constant extents, which stay in the L1 cache.

use super::level;
use super::microkernel::MicroKernels;
use crate::dtype::Real;

/// Rows, and columns, of a block are transposed in multiples of this, on every instruction set.
pub(crate) const SQUARE: usize = 8;

/// to[j][i] = from[i][j] for the first rows i and columns j, of which there are multiples of [`SQUARE`].
///
/// # Panics
/// If the block has fewer rows or columns, or the numbers are no such multiples.
pub(crate) fn transpose_block<R: Real, const ROWS: usize, const COLS: usize>(
    from: &[[R; COLS]; ROWS],
    to: &mut [[R; ROWS]; COLS],
    extents: [usize; 2],
) {
    transpose_with(&MicroKernels::<R>::for_level(level()), from, to, extents);
}

/// [`transpose_block`] by the transposition of an instruction set that this CPU has.
fn transpose_with<R: Real, const ROWS: usize, const COLS: usize>(
    kernels: &MicroKernels<R>,
    from: &[[R; COLS]; ROWS],
    to: &mut [[R; ROWS]; COLS],
    [rows, cols]: [usize; 2],
) {
    assert!(rows <= ROWS && cols <= COLS, "the block has {rows} rows and {cols} columns");
    assert!(rows.is_multiple_of(SQUARE) && cols.is_multiple_of(SQUARE), "rows and columns form squares");
    if cols == 0 {
        return;
    }
    let (from, to) = (from.as_flattened(), to.as_flattened_mut());
    let (side, transpose) = kernels.transpose;
    for row in (0..rows).step_by(side) {
        let (from, to) = (from[row * COLS..].as_ptr(), to[row..].as_mut_ptr());
        // SAFETY: a square divides `SQUARE`, so `side` rows from `row` on and `cols` columns, at least a square, are within both blocks; the
        // CPU has the instructions.
        unsafe { transpose(cols, (from, COLS), (to, ROWS)) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn matches_the_definition<R: Real>(level: Level) {
        let number = |i: usize, j: usize| R::lit((100 * i + j) as f64);
        let from: [[R; 24]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| number(i, j)));
        for [rows, cols] in [[16, 24], [8, 24], [16, 8], [0, 24], [16, 0]] {
            let mut to = [[R::NEG_INFINITY; 16]; 24];
            transpose_with(&MicroKernels::for_level(level), &from, &mut to, [rows, cols]);
            for (j, column) in to.iter().enumerate() {
                for (i, &found) in column.iter().enumerate() {
                    let is_inside = i < rows && j < cols;
                    let expected = if is_inside { number(i, j) } else { R::NEG_INFINITY };
                    assert!(found == expected, "{level:?}, {rows} rows, {cols} columns: {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_transposes() {
        let levels = match level() {
            Level::Baseline => &[Level::Baseline][..],
            Level::Avx2 => &[Level::Baseline, Level::Avx2],
            Level::Avx512 => &[Level::Baseline, Level::Avx2, Level::Avx512],
        };
        for &level in levels {
            matches_the_definition::<f32>(level);
            matches_the_definition::<f64>(level);
        }
    }
}
