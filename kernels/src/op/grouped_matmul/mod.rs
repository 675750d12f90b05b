//! Grouped matrix products (mixture of experts): rows sorted by group times the matrix of each group, and the gradients of the matrices.
//! The starts of groups are read on the device, so that no shape depends on them.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{operands, read, write};
use crate::op::strided_iter::element_offset;

/// y_r = x_r w_g for every row r of group g, which are `starts_g .. starts_(g+1)`; zeros after the last group.
///
/// - in: x (n, k), contiguous; w (v, k, m), any strides; one float dtype; starts (v + 1), i64, from 0, not decreasing
/// - out: y (n, m), same dtype, contiguous
/// - scalars: Int v_global, the number of groups on all ranks
///
/// Sums are formed as those of [`BATCHED_MATMUL`](super::batched_matmul::BATCHED_MATMUL), on GPUs in the accumulator in the order of k: the
/// bits of a row do not depend on other rows. Counted: 2 n k m, times the share of the local groups.
#[doc(alias = "grouped_mm")]
#[doc(alias = "gmm")]
pub static FORWARD: Kernel = Kernel {
    name: "grouped_matmul",
    reference: plain_product,
    cpu: Some(cpu::product),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::product }),
    flops: |launch| {
        let (x, w) = (launch.inputs[0].view, launch.inputs[1].view);
        operations(x.numel(), w.shape[2], w.shape[0], launch.scalars)
    },
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// dw_g = the sum over the rows r of group g of x_r^T dy_r; zeros for a group without rows.
///
/// - in: x (n, k), dy (n, m), one float dtype, contiguous; starts as for [`FORWARD`]
/// - out: dw (v, k, m), same dtype, contiguous
/// - scalars: as for [`FORWARD`]
///
/// Sums over rows are formed as those over k in [`FORWARD`]. Counted: as there.
pub static WEIGHT_GRAD: Kernel = Kernel {
    name: "grouped_matmul_gradient",
    reference: plain_gradient,
    cpu: Some(cpu::gradient),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::gradient }),
    flops: |launch| {
        let (x, dw) = (launch.inputs[0].view, launch.outputs[0].view);
        operations(x.numel(), dw.shape[2], dw.shape[0], launch.scalars)
    },
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Returns the operations of n rows times matrices of `k` by `m`, assuming groups of equal size.
fn operations(elements: usize, m: usize, v: usize, scalars: &[Scalar]) -> u64 {
    let all = 2 * elements as u128 * m as u128 * v as u128;
    u64::try_from(all / scalars[0].int().max(1) as u128).unwrap_or(u64::MAX)
}

fn plain_product(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, starts], [y], _) = operands(launch);
    let [v, k, m] = w.view.shape[..] else { panic!("the contract asks for three dims") };
    let starts = read::<i64>(starts);
    match_float!(x.dtype, T => {
        let (x, matrices, y) = (read::<T>(x), w.buffer.as_slice::<T>(), write::<T>(y));
        let at = |g: usize, l: usize, j: usize| matrices[element_offset(w.view, (g * k + l) * m + j)].to_f64();
        for (r, j) in (0..y.len()).map(|i| (i / m, i % m)) {
            let group = (0..v).find(|g| (starts[*g]..starts[g + 1]).contains(&(r as i64)));
            let sum = |g| (0..k).map(|l| x[r * k + l].to_f64() * at(g, l, j)).sum();
            y[r * m + j] = T::from_f64(group.map_or(0.0, sum));
        }
    }, else return Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }));
    Ok(())
}

fn plain_gradient(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, dy, starts], [dw], _) = operands(launch);
    let [v, k, m] = dw.view.shape[..] else { panic!("the contract asks for three dims") };
    let starts = read::<i64>(starts);
    match_float!(x.dtype, T => {
        let (x, dy, dw) = (read::<T>(x), read::<T>(dy), write::<T>(dw));
        for (g, i, j) in (0..v * k * m).map(|at| (at / (k * m), at / m % k, at % m)) {
            let rows = starts[g] as usize..starts[g + 1] as usize;
            let sum: f64 = rows.map(|r| x[r * k + i].to_f64() * dy[r * m + j].to_f64()).sum();
            dw[(g * k + i) * m + j] = T::from_f64(sum);
        }
    }, else return Err(KernelError::DType { kernel: WEIGHT_GRAD.name, dtype: x.dtype }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;

    const INDEX: Kind = Kind::Fixed(DType::I64);

    fn all(v: usize) -> [Scalar; 1] {
        [Scalar::Int(v as i64)]
    }

    /// A product of n rows in groups with these starts.
    fn product(starts: &[f64], [n, k, m]: [usize; 3]) -> Case<'static> {
        let v = starts.len() - 1;
        let case = Case::new(&FORWARD).input(&[n, k], &values(1, n * k)).scale(1.0);
        let case = case.input(&[v, k, m], &values(2, v * k * m)).input_as(INDEX, &[v + 1], starts);
        case.output(&[n, m]).scalars(&all(v))
    }

    fn gradient(starts: &[f64], [n, k, m]: [usize; 3]) -> Case<'static> {
        let v = starts.len() - 1;
        let case = Case::new(&WEIGHT_GRAD).input(&[n, k], &values(3, n * k)).scale(1.0);
        let case = case.input(&[n, m], &values(4, n * m)).input_as(INDEX, &[v + 1], starts);
        case.output(&[v, k, m]).scalars(&all(v))
    }

    #[test]
    fn matches_known_values() {
        // Two rows of group 0, none of group 1, one of group 2, one of no local group.
        let x = Value::real(&[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let w = Value::real(&[3, 2, 1], &[1.0, 10.0, 0.5, 0.5, -1.0, 1.0]);
        let starts = Value::index(&[4], &[0.0, 2.0, 2.0, 3.0]);
        let y = evaluate(&FORWARD, &[x.clone(), w, starts.clone()], &[&[4, 1]], &all(3)).remove(0);
        assert_eq!(y, [21.0, 43.0, 1.0, 0.0]);
        let dy = Value::real(&[4, 1], &[1.0, -1.0, 2.0, 100.0]);
        let dw = evaluate(&WEIGHT_GRAD, &[x, dy, starts], &[&[3, 2, 1]], &all(3)).remove(0);
        assert_eq!(dw, [-2.0, -2.0, 0.0, 0.0, 10.0, 12.0]);
    }

    #[test]
    fn fast_paths_match_the_reference() {
        let starts: [&[f64]; 6] = [
            &[0.0],
            &[0.0, 7.0],
            &[0.0, 0.0, 3.0, 3.0, 6.0],
            &[0.0, 40.0, 41.0, 110.0, 110.0, 150.0],
            &[0.0, 64.0, 128.0, 192.0],
            &[0.0, 0.0, 0.0],
        ];
        for starts in starts {
            let n = starts[starts.len() - 1] as usize;
            for dims in [[n, 5, 7], [n + 3, 33, 18], [n + 70, 17, 66], [n, 0, 3], [n, 3, 0], [n + 1, 1, 1]] {
                product(starts, dims).run();
                gradient(starts, dims).run();
            }
        }
    }

    #[test]
    fn transposed_and_strided_matrices() {
        let (starts, [n, v, k, m]) = ([0.0, 3.0, 3.0, 20.0], [22, 3, 19, 35]);
        let transposed = Strides::contiguous(&[v, m, k]).permute(&[0, 2, 1]);
        let narrow =
            Strides::contiguous(&[v + 1, k + 2, 2 * m]).narrow(0, 1, v).narrow(1, 1, k).narrow(2, 3, m + 3);
        for view in [transposed, narrow] {
            let memory = values(5, view.reach());
            let case = Case::new(&FORWARD).input(&[n, k], &values(1, n * k)).scale(1.0);
            let case = case.input_view(Kind::Tested, view, &memory).input_as(INDEX, &[v + 1], &starts);
            case.output(&[n, m]).scalars(&all(v)).run();
        }
    }

    /// A row has the same bits alone and among other rows and groups.
    #[test]
    fn bits_of_a_row_do_not_depend_on_other_rows() {
        let [n, k, m] = [90, 300, 40];
        let (x, w) = (values(1, n * k), values(2, 3 * k * m));
        let of = |rows: std::ops::Range<usize>, starts: [f64; 4], dtype| {
            let case = Case::new(&FORWARD).input(&[rows.len(), k], &x[rows.start * k..rows.end * k]);
            let case = case.input(&[3, k, m], &w).input_as(INDEX, &[4], &starts);
            case.output(&[rows.len(), m]).scalars(&all(3)).fast(dtype).remove(0)
        };
        for dtype in DType::FLOATS {
            let together = of(0..n, [0.0, 1.0, 60.0, 88.0], dtype);
            for row in [0, 1, 30, 59, 60, 87] {
                let starts = [(0, 1), (1, 60), (60, 88)]
                    .map(|(from, to)| f64::from(u8::from(row >= from && row < to)));
                let ends = [0.0, starts[0], starts[0] + starts[1], 1.0];
                assert_eq!(of(row..row + 1, ends, dtype), together[row * m..][..m], "{dtype}, row {row}");
            }
            assert!(together[88 * m..].iter().all(|y| *y == 0.0));
        }
    }

    #[test]
    fn backward_matches_finite_differences() {
        let (starts, [n, v, k, m]) = (Value::index(&[4], &[0.0, 2.0, 2.0, 4.0]), [5, 3, 2, 3]);
        let inputs =
            [Value::real(&[n, k], &values(6, n * k)), Value::real(&[v, k, m], &values(7, v * k * m)), starts];
        let dy = Value::real(&[n, m], &values(8, n * m));
        let given = [inputs[0].clone(), dy.clone(), inputs[2].clone()];
        let dw = evaluate(&WEIGHT_GRAD, &given, &[&[v, k, m]], &all(v)).remove(0);
        let loss = |x: &[Value]| dot(&evaluate(&FORWARD, x, &[&[n, m]], &all(v))[0], &dy.data);
        check_gradients(&inputs, &[(1, dw)], loss).unwrap();
    }

    #[test]
    fn flops_count_the_local_groups() {
        assert_eq!(operations(6 * 4, 5, 2, &all(8)), 2 * 6 * 4 * 5 / 4);
        assert_eq!(operations(6 * 4, 5, 0, &all(0)), 0);
    }
}
