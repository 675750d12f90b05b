//! Canonical sums over the trailing dims: joined over leaves of one of them in a tree.

use super::cpu;
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, Kernel};
use crate::match_float;
use crate::op::rows::{join_leaves, leaves_of, operands, write};
use crate::op::strided_iter::element_offset;

/// y = c (sum of x over the trailing dims), in the order of a [`SumTree`](crate::SumTree) over leaves of one of these dims.
///
/// - in: x (kept dims.., reduced dims..), any float, any strides
/// - out: y (kept dims), contiguous, the dtype of x
/// - scalars: \[Int number of reduced dims, Real c, Int the dim that is cut, Int leaves of the tree, Int first leaf\], then the borders of
///   the leaves in the dim: from 0 to its extent, not decreasing
///
/// The sum of a leaf is that of [`SUM`](super::SUM) over the range of the leaf; leaves are joined in the tree, of which they are one node,
/// and each node is rounded. A leaf without elements is absent. 0 if all are.
pub static LEAF_SUM: Kernel = Kernel {
    name: "leaf_sum",
    reference: |_, launch| {
        let ([x], [y], scalars) = operands(launch);
        let [num_reduced, c, dim, leaves @ ..] = scalars else {
            unreachable!("the contract asks for leaves")
        };
        let (dim, num_kept) = (dim.int() as usize, x.view.ndim() - num_reduced.int() as usize);
        let leaves = leaves_of(leaves, 1);
        match_float!(x.dtype, T => {
            let memory = x.buffer.as_slice::<T>();
            let y = write::<T>(y);
            for (at, y) in y.iter_mut().enumerate() {
                join_leaves::<T>(&leaves, std::slice::from_mut(y), |leaf, sum| {
                    let view = x.view.narrow(dim, leaves.borders[leaf], leaves.borders[leaf + 1]);
                    let each: usize = view.shape[num_kept..].iter().product();
                    let terms = (0..each).map(|i| memory[element_offset(&view, at * each + i)].to_f64());
                    sum[0] = T::from_f64(c.real() * terms.sum::<f64>());
                });
            }
        }, else return Err(KernelError::DType { kernel: LEAF_SUM.name, dtype: x.dtype }));
        Ok(())
    },
    cpu: Some(|pool, launch| {
        let ([x], [y], scalars) = operands(launch);
        let [num_reduced, c, dim, leaves @ ..] = scalars else {
            unreachable!("the contract asks for leaves")
        };
        let (dim, num_reduced) = (dim.int() as usize, num_reduced.int() as usize);
        let leaves = leaves_of(leaves, 1);
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            let c = Acc::lit(c.real());
            join_leaves::<T>(&leaves, write(y), |leaf, sum| {
                let view = x.view.narrow(dim, leaves.borders[leaf], leaves.borders[leaf + 1]);
                let part = Arg { view: &view, ..*x };
                cpu::reduce::<cpu::Sum<Acc>, T, T>(pool, &part, num_reduced, sum, &|sum| T::narrow(c * sum));
            });
        }, else return Err(KernelError::DType { kernel: LEAF_SUM.name, dtype: x.dtype }));
        Ok(())
    }),
    gpu: None,
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::kernel_check::{Case, values};
    use crate::op::reduce::SUM;

    fn scalars(num_reduced: i64, c: f64, more: &[i64]) -> Vec<Scalar> {
        [Scalar::Int(num_reduced), Scalar::Real(c)]
            .into_iter()
            .chain(more.iter().map(|n| Scalar::Int(*n)))
            .collect()
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (shape, dim, borders) in [
            (&[5, 3, 16][..], 2, &[0, 4, 4, 9, 16][..]),
            (&[40, 3, 7], 2, &[0, 1, 3, 5, 7]),
            (&[4, 600, 2], 1, &[0, 100, 250, 300, 600]),
            (&[3, 0, 2], 1, &[0, 0, 0, 0, 0]),
        ] {
            let all = scalars(2, 0.5, &[&[dim, 4, 0], borders].concat());
            let case = Case::new(&LEAF_SUM).input(shape, &values(1, shape.iter().product())).scale(1.0);
            case.output(&shape[..1]).scalars(&all).strided().run_for(&[DType::F32, DType::F64]);
        }
    }

    #[test]
    fn bits_are_those_of_sums_of_leaves_and_of_additions() {
        let (borders, x) = ([0, 3, 3, 10, 20], values(2, 6 * 20));
        for dtype in DType::FLOATS {
            let case = Case::new(&LEAF_SUM).input(&[6, 20], &x).output(&[6]);
            let got =
                case.scalars(&scalars(1, 1.0, &[&[1, 4, 0][..], &borders].concat())).fast(dtype).remove(0);
            let leaf = |range: std::ops::Range<i64>| {
                let part: Vec<f64> = (0..6)
                    .flat_map(|i| range.clone().map(move |j| i * 20 + j))
                    .map(|at| x[at as usize])
                    .collect();
                let case = Case::new(&SUM).input(&[6, range.clone().count()], &part).output(&[6]);
                case.scalars(&scalars(1, 1.0, &[])).fast(dtype).remove(0)
            };
            let sums = [leaf(0..3), leaf(3..10), leaf(10..20)];
            let add = |x: f64, y: f64| crate::op::kernel_check::round(dtype, x + y);
            for i in 0..6 {
                assert_eq!(got[i], add(sums[0][i], add(sums[1][i], sums[2][i])), "{dtype}");
            }
        }
    }
}
