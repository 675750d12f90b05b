//! One-hot encoding: indices as rows of a (possibly sharded) unit matrix.

mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_dtype;
use crate::op::rows::{check_indices, operands, read, rows_per_task, write};

/// y_(n, j) = 1 where index_n = v_start + j, else 0.
///
/// - in: index `(n..)`, i64, contiguous
/// - out: y `(n.., v)`, any dtype, contiguous
/// - scalars: Int v_start, the global number of the first local column; Int v_global, the columns of the whole dim
///
/// An index outside of `0..v_global` is [`KernelError::Index`]. Exact. Counted: no operations.
pub static ONE_HOT: Kernel = Kernel {
    name: "one_hot",
    reference: plain,
    cpu: Some(fast),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index], [y], scalars) = operands(launch);
    let (index, start) = (read::<i64>(index), scalars[0].int());
    check_indices(ONE_HOT.name, index, scalars[1].int())?;
    let v = *y.view.shape.last().expect("the contract asks for a dim of columns");
    match_dtype!(y.dtype, T => {
        for (at, y) in write::<T>(y).iter_mut().enumerate() {
            *y = T::from_f64(f64::from(u8::from(index[at / v] == start + (at % v) as i64)));
        }
    });
    Ok(())
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index], [y], scalars) = operands(launch);
    let (index, start) = (read::<i64>(index), scalars[0].int());
    check_indices(ONE_HOT.name, index, scalars[1].int())?;
    let v = *y.view.shape.last().expect("the contract asks for a dim of columns");
    if v == 0 {
        return Ok(());
    }
    match_dtype!(y.dtype, T => {
        let rows = rows_per_task(v);
        pool.chunks(write::<T>(y), rows * v, |i, y| {
            for (y, &index) in y.chunks_exact_mut(v).zip(&index[i * rows..]) {
                y.fill(T::default());
                if let Some(y) = usize::try_from(index - start).ok().and_then(|at| y.get_mut(at)) {
                    *y = T::from_f64(1.0);
                }
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
    use crate::op::kernel_check::{Case, Kind};

    #[test]
    fn matches_known_values() {
        // Columns 1 and 2 of 4.
        let index = Value::index(&[3], &[2.0, 0.0, 1.0]);
        let scalars = [Scalar::Int(1), Scalar::Int(4)];
        assert_eq!(evaluate(&ONE_HOT, &[index], &[&[3, 2]], &scalars)[0], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (n, v) in [(1, 1), (40, 7), (0, 3), (3, 0), (500, 90)] {
            let index: Vec<f64> = (0..n).map(|i| ((i * i + 1) % (v + 9)) as f64).collect();
            let case = Case::new(&ONE_HOT).input_as(Kind::Fixed(DType::I64), &[n], &index).output(&[n, v]);
            case.scalars(&[Scalar::Int(3), Scalar::Int(400)]).run_for(&DType::ALL);
        }
    }

    #[test]
    fn index_out_of_range_is_an_error() {
        let case = Case::new(&ONE_HOT).input_as(Kind::Fixed(DType::I64), &[2], &[0.0, 5.0]).output(&[2, 5]);
        let error = case.scalars(&[Scalar::Int(0), Scalar::Int(5)]).verify(&[DType::F32]).unwrap_err();
        assert!(error.contains("index 5 at position 1 is outside of 0..5"), "{error}");
    }
}
