//! What a core can do at most, as work for a clock: the largest tile of a product, whose operands never change and so never
//! leave the nearest cache.

use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::{COLS_MAX, ROWS_MAX, Tiles};

/// Runs `depth` fused multiply-adds of f32 on every sum of a tile, by the best instruction set of this CPU: the number of
/// floating-point operations, two for each, and a sum, which is `depth`.
#[must_use]
pub fn multiply_adds(depth: usize) -> (usize, f32) {
    let tiles = Tiles::<f32>::at(level());
    let rows = tiles.table.len();
    let operands = [1.0f32; COLS_MAX];
    let mut sums = [0.0f32; ROWS_MAX * COLS_MAX];
    let a = (operands.as_ptr(), 0, 0);
    let c = (sums.as_mut_ptr(), COLS_MAX);
    // SAFETY: with distances of 0, one row of b and one element of a are read again and again; c has room for the highest
    // and widest tile; `level` has detected what the tiles need.
    unsafe { (tiles.table[rows - 1][1])(depth, a, (operands.as_ptr(), 0), c, false, (operands.as_ptr(), 0)) };
    (2 * depth * rows * 2 * tiles.lanes, sums[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_multiply_add_counts() {
        for depth in [0, 1, 1000] {
            let (flops, sum) = multiply_adds(depth);
            assert_eq!(sum, depth as f32);
            assert!(flops >= 2 * depth * 6 * 8 && flops <= 2 * depth * ROWS_MAX * COLS_MAX);
        }
    }
}
