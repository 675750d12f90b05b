//! triu and tril: one side of a diagonal of (possibly sharded) matrices, zeros on the other.

mod gpu;

use crate::cpu::Pool;
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_dtype;
use crate::op::rows::{operands, read, rows_per_task, width, write};
use std::ops::Range;

/// y_(.., i, j) = x_(.., i, j) where j - i is at least d (the upper side) or at most d (the lower one), else zero; i and
/// j are global.
///
/// - in: x `(.., r, c)`, any dtype, contiguous
/// - out: y like x, contiguous
/// - scalars: Int 1 for the upper side, 0 for the lower one; Int d; Int the global number of the first local row; Int that
///   of the first column
///
/// Masked elements are zero even if x is NaN. Exact. Counted: no operations.
#[doc(alias = "triu")]
#[doc(alias = "tril")]
pub static TRIANGULAR: Kernel = Kernel {
    name: "triangle",
    reference: plain,
    cpu: Some(fast),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |_| 0,
    bytes: Some(|launch| {
        // Masked elements are not read.
        let (x, sides) = (&launch.inputs[0], Sides::new(&launch.inputs[0], launch.scalars));
        let kept: usize = (0..sides.rows).map(|row| sides.of(row).0.len()).sum();
        let num_kept = x.view.numel() / (sides.rows * sides.cols).max(1) * kept;
        launch.operand_bytes() - x.bytes() + (num_kept * x.dtype.size()) as u64
    }),
    bound: Bound { ulps: 0.0 },
};

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (cols, rows) = (width(x), x.view.shape[x.view.ndim() - 2]);
    let [upper, d, row_start, col_start] = [0, 1, 2, 3].map(|i| scalars[i].int());
    match_dtype!(x.dtype, T => {
        let (x, y) = (read::<T>(x), write::<T>(y));
        for (at, (x, y)) in x.iter().zip(y).enumerate() {
            let by = (col_start + (at % cols) as i64) - (row_start + (at / cols % rows) as i64);
            *y = if by == d || (by > d) == (upper == 1) { *x } else { T::default() };
        }
    });
    Ok(())
}

/// The position of the diagonal in the rows of a launch.
struct Sides {
    rows: usize,
    cols: usize,
    upper: bool,
    /// The offset of the first row.
    first: i64,
}

impl Sides {
    fn new(x: &Arg<'_>, scalars: &[Scalar]) -> Sides {
        let [upper, d, row_start, col_start] = [0, 1, 2, 3].map(|i| scalars[i].int());
        // The first local column with j - i >= d; one further for the lower side, which keeps the columns before.
        let first = row_start + d - col_start + i64::from(upper == 0);
        Sides { rows: x.view.shape[x.view.ndim() - 2], cols: width(x), upper: upper == 1, first }
    }

    /// Returns the columns of a row that are kept, and those that become zero.
    fn of(&self, row: usize) -> (Range<usize>, Range<usize>) {
        let edge = (self.first + row as i64).clamp(0, self.cols as i64) as usize;
        if self.upper { (edge..self.cols, 0..edge) } else { (0..edge, edge..self.cols) }
    }
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let sides = Sides::new(x, scalars);
    let Sides { rows, cols, .. } = sides;
    if cols == 0 || rows == 0 {
        return Ok(());
    }
    match_dtype!(x.dtype, T => {
        let (x, per_task) = (read::<T>(x), rows_per_task(cols));
        pool.chunks(write::<T>(y), per_task * cols, |i, y| {
            for (row, y) in (i * per_task..).zip(y.chunks_exact_mut(cols)) {
                let x = &x[row * cols..][..cols];
                let (kept, zeroed) = sides.of(row % rows);
                y[kept.clone()].copy_from_slice(&x[kept]);
                y[zeroed].fill(T::default());
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, values};

    fn scalars(upper: i64, d: i64, row: i64, col: i64) -> [Scalar; 4] {
        [upper, d, row, col].map(Scalar::Int)
    }

    #[test]
    fn matches_known_values() {
        let x = Value::real(&[2, 3], &[1.0, 2.0, 3.0, f64::NAN, 5.0, 6.0]);
        let run = |s: [Scalar; 4]| evaluate(&TRIANGULAR, std::slice::from_ref(&x), &[&[2, 3]], &s).remove(0);
        assert_eq!(run(scalars(1, 0, 0, 0)), [1.0, 2.0, 3.0, 0.0, 5.0, 6.0]);
        assert_eq!(run(scalars(1, 1, 0, 0)), [0.0, 2.0, 3.0, 0.0, 0.0, 6.0]);
        // Rows 3 and 4, columns 3 to 5 of a larger matrix.
        assert_eq!(run(scalars(0, 0, 3, 3))[..3], [1.0, 0.0, 0.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for shape in [&[5, 7][..], &[3, 40, 30], &[2, 3, 200, 300], &[0, 4], &[4, 0], &[1, 1]] {
            let x = values(1, shape.iter().product());
            for (upper, d, row, col) in
                [(1, 0, 0, 0), (0, 0, 0, 0), (1, -3, 2, 9), (0, 4, 30, 3), (0, -900, 0, 0), (1, 900, 0, 0)]
            {
                Case::new(&TRIANGULAR)
                    .input(shape, &x)
                    .output(shape)
                    .scalars(&scalars(upper, d, row, col))
                    .run_for(&[DType::F32, DType::F16, DType::I64, DType::Bool]);
            }
        }
    }
}
