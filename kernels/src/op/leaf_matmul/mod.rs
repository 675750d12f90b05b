//! Matrix products whose sums are canonical: joined over leaves of the summed dims in a tree.

use crate::cpu::Pool;
use crate::cpu::gemm::leaves::{LeafMatrixRef, batched_gemm_of_leaves, packed_cut_of_leaves};
use crate::cpu::gemm::{BatchedMatrixMut, Epilogue};
use crate::cpu::vectorized;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{leaves_of, read};
use crate::op::strided_iter::element_offset;
use crate::strides::Strides;
use crate::sum_tree::{SumTree, TreeSums};
use std::convert::Infallible;
use std::sync::Arc;

/// c_gij = (the sum of a_gipl b_gplj over p and l, in the order of a [`SumTree`]) + bias_j + r_gij.
///
/// - in: a (g, m, k0, k1), b (g, k0, k1, n), any strides; then, if there is one, bias (n), contiguous; then, if there is one, r (g, m, n),
///   contiguous; one float dtype
/// - out: c (g, m, n), same dtype; any strides without overlap, contiguous if there is a bias or an r
/// - scalars: Int leaves of the tree, Int first leaf, then the borders of the leaves in k1: from 0 to the extent of k1, not decreasing
///
/// Leaf i has all of k0 and the range from border i to border i + 1 of k1. Its sum is that of
/// [`BATCHED_MATMUL`](super::batched_matmul::BATCHED_MATMUL) over p, then l, rounded; sums of leaves are joined in the tree, of which they
/// are one node, and each node is rounded; a leaf without terms is absent. Zeros if all are. The bits are those of one product for each
/// leaf and of additions. Bias and r are added to the rounded sum, one after the other, each rounded. Counted: 2 g m n k0 k1.
pub static LEAF_MATMUL: Kernel = Kernel {
    name: "leaf_matmul",
    reference: plain,
    cpu: Some(fast),
    gpu: None,
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64 * launch.outputs[0].view.shape[2] as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Returns where the packed form of b is cut ([`OperandView::cut`](crate::cpu::pack_cache::OperandView::cut)) that a launch on one matrix
/// caches if b is a cached operand.
pub(crate) fn packed_cut(launch: &Launch<'_>) -> Option<Arc<[usize]>> {
    let a = &launch.inputs[0];
    let leaves = leaves_of(launch.scalars, a.view.shape[2]);
    match_float!(a.dtype, T => Some(packed_cut_of_leaves::<T>(&leaves)), else None)
}

/// Returns bias and r of a launch.
fn addends<'a>(launch: &Launch<'a>) -> [Option<&'a Arg<'a>>; 2] {
    let inputs: &'a [Arg<'a>] = launch.inputs;
    [1, 3].map(|ndim| inputs[2..].iter().find(|x| x.view.ndim() == ndim))
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let [a, b] = [&launch.inputs[0], &launch.inputs[1]];
    let (leaves, [bias, r]) = (leaves_of(launch.scalars, a.view.shape[2]), addends(launch));
    let c = &mut launch.outputs[0];
    let [g, m, n] = c.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let strides: [usize; 3] = c.view.strides[..].try_into().expect("three dims");
    match_float!(a.dtype, T => {
        let bias = bias.map(|bias| read::<T>(bias));
        let r = r.map(|r| read::<T>(r));
        let add = |[row, col]: [usize; 2], c: &mut [T], _: &mut [T]| {
            vectorized(#[inline(always)] || {
                if let Some(bias) = bias {
                    c.iter_mut().zip(&bias[col..]).for_each(|(c, x)| *c = T::narrow(c.widen() + x.widen()));
                }
                if let Some(r) = r {
                    let r = &r[row * n + col..];
                    c.iter_mut().zip(r).for_each(|(c, x)| *c = T::narrow(c.widen() + x.widen()));
                }
            });
        };
        let epilogue: Option<&Epilogue<'_, T>> = (bias.is_some() || r.is_some()).then_some(&add as _);
        let memory = c.buffer.as_mut::<T>().expect("an output buffer has one handle");
        let data = if c.view.reach() == 0 { &mut [] } else { &mut memory[c.view.offset..] };
        let factors = [matrices::<T>(a, [0, 1, 2, 3]), matrices::<T>(b, [0, 3, 1, 2])];
        batched_gemm_of_leaves(pool, [g, m, n], &leaves, factors, BatchedMatrixMut { data, strides }, epilogue);
    }, else return Err(KernelError::DType { kernel: LEAF_MATMUL.name, dtype: a.dtype }));
    Ok(())
}

/// Returns an operand whose dims, in this order, are matrix, vector, k0 and k1.
fn matrices<'a, T: Element>(x: &Arg<'a>, order: [usize; 4]) -> LeafMatrixRef<'a, T> {
    let data = if x.view.reach() == 0 { &[] } else { &x.buffer.as_slice()[x.view.offset..] };
    LeafMatrixRef { data, strides: order.map(|d| x.view.strides[d]) }
}

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let [a, b] = [&launch.inputs[0], &launch.inputs[1]];
    let (leaves, addends) = (leaves_of(launch.scalars, a.view.shape[2]), addends(launch));
    let c = &mut launch.outputs[0];
    let n = c.view.shape[2];
    match_float!(a.dtype, T => {
        let (x, y) = (a.buffer.as_slice::<T>(), b.buffer.as_slice::<T>());
        let to = c.buffer.as_mut::<T>().expect("an output buffer has one handle");
        let place = |v: &Strides, i: [usize; 4]| v.offset + (0..4).map(|d| i[d] * v.strides[d]).sum::<usize>();
        for at in 0..c.view.numel() {
            let (p, i, j) = (at / n / c.view.shape[1], at / n % c.view.shape[1], at % n);
            let mut sums = TreeSums::new(leaves.tree);
            for (leaf, pair) in leaves.borders.windows(2).enumerate() {
                let steps = (0..leaves.outer).flat_map(|o| (pair[0]..pair[1]).map(move |l| (o, l)));
                let terms: Vec<f64> = steps
                    .map(|(o, l)| x[place(a.view, [p, i, o, l])].to_f64() * y[place(b.view, [p, o, l, j])].to_f64())
                    .collect();
                let sum = (!terms.is_empty()).then(|| T::from_f64(terms.iter().sum()));
                let join = |left: T, right: T| Ok::<_, Infallible>(T::from_f64(left.to_f64() + right.to_f64()));
                let Ok(()) = sums.add(SumTree::leaf(leaves.first + leaf), sum, join);
            }
            let mut sum = sums.into_roots().next().and_then(|(_, sum)| sum).unwrap_or_default();
            for (addend, position) in addends.into_iter().zip([j, at]) {
                let Some(addend) = addend else { continue };
                let x = addend.buffer.as_slice::<T>()[element_offset(addend.view, position)];
                sum = T::from_f64(sum.to_f64() + x.to_f64());
            }
            to[element_offset(c.view, at)] = sum;
        }
    }, else return Err(KernelError::DType { kernel: LEAF_MATMUL.name, dtype: a.dtype }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, values};

    fn scalars(num_leaves: i64, first: i64, borders: &[i64]) -> Vec<Scalar> {
        [&[num_leaves, first], borders].concat().into_iter().map(Scalar::Int).collect()
    }

    #[test]
    fn matches_known_values() {
        // Two leaves: 1 * 10 + 3 * 30 and 2 * 20 + 4 * 40.
        let a = Value::real(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let b = Value::real(&[1, 2, 2, 1], &[10.0, 20.0, 30.0, 40.0]);
        let bias = Value::real(&[1], &[0.5]);
        let r = Value::real(&[1, 1, 1], &[1000.0]);
        let of = |inputs: &[Value]| {
            evaluate(&LEAF_MATMUL, inputs, &[&[1, 1, 1]], &scalars(2, 0, &[0, 1, 2])).remove(0)
        };
        assert_eq!(of(&[a.clone(), b.clone()]), [300.0]);
        assert_eq!(of(&[a.clone(), b.clone(), bias.clone()]), [300.5]);
        assert_eq!(of(&[a.clone(), b.clone(), r.clone()]), [1300.0]);
        assert_eq!(of(&[a, b, bias, r]), [1300.5]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        // Leaves round, in 16 bits too, where the tests of `cpu::gemm::leaves` compare bits.
        let dtypes = [DType::F32, DType::F64];
        for [g, m, n, k0, k1] in [
            [1, 1, 1, 1, 1],
            [2, 5, 7, 1, 9],
            [1, 33, 17, 3, 65],
            [1, 1, 130, 1, 40],
            [2, 3, 4, 2, 0],
            [1, 0, 5, 1, 9],
        ] {
            let borders: Vec<i64> = (0..=5).map(|leaf| (leaf * k1 / 5) as i64).collect();
            let case = Case::new(&LEAF_MATMUL).scale(1.0).scalars(&scalars(5, 0, &borders));
            let case = case.input(&[g, m, k0, k1], &values(1, g * m * k0 * k1));
            let case = case.input(&[g, k0, k1, n], &values(2, g * k0 * k1 * n));
            case.clone().output(&[g, m, n]).strided().run_for(&dtypes);
            let (bias, r) = (values(3, n), values(4, g * m * n));
            case.clone().input(&[n], &bias).output(&[g, m, n]).run_for(&dtypes);
            case.clone().input(&[g, m, n], &r).output(&[g, m, n]).run_for(&dtypes);
            case.input(&[n], &bias).input(&[g, m, n], &r).output(&[g, m, n]).run_for(&dtypes);
        }
    }
}
