//! Peak throughput of a core, to be timed by a benchmark: the largest micro-kernel on operands that stay in the nearest cache.

use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::{MR_MAX, MicroKernels, NR_MAX};

/// Runs `depth` f32 fused multiply-adds on every sum of a tile, on the best instruction set of this CPU. Returns the number of
/// floating-point operations, two per multiply-add, and one sum, which equals `depth`.
#[must_use]
pub fn multiply_adds(depth: usize) -> (usize, f32) {
    let kernels = MicroKernels::<f32>::for_level(level());
    let rows = kernels.by_height.len();
    let operands = [1.0f32; NR_MAX];
    let mut sums = [0.0f32; MR_MAX * NR_MAX];
    let a = (operands.as_ptr(), 0, 0);
    let c = (sums.as_mut_ptr(), NR_MAX);
    // SAFETY: with strides of 0, one row of b and one element of a are read again and again; c has room for the highest and widest tile;
    // `level` has detected what the micro-kernels need.
    unsafe {
        (kernels.by_height[rows - 1][1])(depth, a, (operands.as_ptr(), 0), c, false, (operands.as_ptr(), 0))
    };
    (2 * depth * rows * 2 * kernels.lanes, sums[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_every_multiply_add() {
        for depth in [0, 1, 1000] {
            let (flops, sum) = multiply_adds(depth);
            assert_eq!(sum, depth as f32);
            assert!(flops >= 2 * depth * 6 * 8 && flops <= 2 * depth * MR_MAX * NR_MAX);
        }
    }
}
