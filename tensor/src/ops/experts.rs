//! Mixture-of-experts (MoE) layer with gated experts, dropless: y_m = the sum over s of p_(m, s) E_e(x_m) with e =
//! index_(m, s), where E_e(x) = (silu(x wg_e) * (x wu_e)) wd_e. Shazeer et al., arXiv 1701.06538; no token is dropped,
//! whatever the load of the experts.

use super::embedding::check_index;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float};
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::binary::{ADD, MUL};
use shardgrad_kernels::op::grouped_matmul::{FORWARD, WEIGHT_GRAD};
use shardgrad_kernels::op::index::{GATHER, SCATTER_ADD};
use shardgrad_kernels::op::sort_by_group::SORT_BY_GROUP;
use shardgrad_kernels::op::swiglu;
use shardgrad_kernels::{DType, Kernel, Scalar, Strides};
use smallvec::SmallVec;
use std::rc::Rc;

/// Dropless mixture-of-experts layer of SwiGLU experts, computed by grouped matrix products.
///
/// `..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!` on tokens x, expert indices (i64, each in 0..e),
/// router weights p, and the matrices wg, wu and wd of all experts; x, p and the matrices have one float dtype. y_m =
/// the sum over s of p_(m, s) E_e(x_m) with e = index_(m, s) and E_e(x) = (silu(x wg_e) * (x wu_e)) wd_e.
///
/// Token-expert pairs are sorted by expert on the device (token permutation), so no shape depends on the routing and no
/// capacity is needed. A rank computes the pairs whose expert it holds (expert parallelism); where experts or hidden
/// units are sharded the result is a partial sum. The experts of a token are added in their order in the accumulator
/// dtype, each rounded before.
///
/// Gradient, with h = silu(x wg) * (x wu) of a pair and g' = g wd^T: dp = g' h; dwd = the sum of p h^T g; dh = p g',
/// from which the cotangents of both products follow as for [`SwiGlu`](super::swiglu::SwiGlu), and from these dx, dwg
/// and dwu. Only the arguments are saved; intermediates, which each rank would hold for the pairs of all experts, are
/// recomputed.
///
/// Source: Shazeer et al., arXiv 1701.06538; dropless as in Gale et al., arXiv 2211.15841 (MegaBlocks).
#[doc(alias = "MoE")]
#[doc(alias = "mixture of experts")]
#[doc(alias = "dropless")]
#[doc(alias = "grouped_gemm")]
#[doc(alias = "grouped_mm")]
#[doc(alias = "ragged_dot")]
#[doc(alias = "expert parallelism")]
#[derive(Debug)]
pub struct Experts;

/// Backward of [`Experts`]: the cotangents that its part names, linear in g.
#[derive(Debug)]
struct ExpertsBackward(GradPart);

/// The cotangents that a backward computes: a split backward requests those of inputs and of weights separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GradPart {
    All,
    /// Of x and p.
    Inputs,
    /// Of wg, wu and wd.
    Weights,
}

/// The token-expert pairs of this rank, sorted by expert (token permutation).
struct TokenExpertPairs<'a> {
    rank: &'a Rank,
    /// The index of each sorted pair in the order of rows.
    order: LocalTensor,
    /// The row (token) of each sorted pair.
    row: LocalTensor,
    /// The position in sorted order of each pair: the inverse of `order`.
    inverse_order: LocalTensor,
    /// The first sorted pair of each local expert.
    starts: LocalTensor,
    num_rows: usize,
    /// The number of experts on all ranks.
    num_experts: usize,
}

impl<'a> TokenExpertPairs<'a> {
    fn of(local: &ForwardContext<'a>, index: &LocalTensor) -> Result<TokenExpertPairs<'a>> {
        let (rank, count) = (local.rank, index.numel());
        let [num_rows, per_row] = rows_and_width(index);
        let (num_experts, here) = local.label("e");
        let index = flatten(&index.contiguous(rank)?);
        let line = |n: usize| LocalTensor::alloc(rank, DType::I64, &[n]);
        let [mut order, mut row, mut inverse_order] = [line(count)?, line(count)?, line(count)?];
        let mut starts = line(here.len() + 1)?;
        let scalars = [here.start, num_experts, per_row.max(1)].map(|n| Scalar::Int(n as i64));
        launch(
            rank,
            &SORT_BY_GROUP,
            &[&index],
            &mut [&mut order, &mut row, &mut inverse_order, &mut starts],
            &scalars,
        )?;
        Ok(TokenExpertPairs { rank, order, row, inverse_order, starts, num_rows, num_experts })
    }

    fn count(&self) -> usize {
        self.order.numel()
    }

    /// The row of a matrix for each pair, in sorted order.
    fn gather_rows(&self, x: &LocalTensor) -> Result<LocalTensor> {
        self.gather(x, &self.row)
    }

    /// Reorders one number per pair from the order of rows to sorted order.
    fn permute(&self, p: &LocalTensor) -> Result<LocalTensor> {
        let column = flatten(&p.contiguous(self.rank)?);
        self.gather(&column.with_view(column.view.unsqueeze(1)), &self.order)
    }

    /// Reorders one number per pair from sorted order to the order of rows.
    fn unpermute(&self, p: &LocalTensor) -> Result<LocalTensor> {
        self.gather(p, &self.inverse_order)
    }

    fn gather(&self, x: &LocalTensor, index: &LocalTensor) -> Result<LocalTensor> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let mut y = LocalTensor::alloc(self.rank, x.dtype, &[1, index.numel(), width])?;
        let x = x.with_view(Strides::contiguous(&[1, n, width]).at(x.view.offset));
        let scalars = [Scalar::Int(0), Scalar::Int(n as i64)];
        launch(self.rank, &GATHER, &[&x, index], &mut [&mut y], &scalars)?;
        Ok(y.with_view(Strides::contiguous(&[index.numel(), width])))
    }

    /// Sums the pairs of each row.
    fn combine(&self, x: &LocalTensor, y: &mut LocalTensor) -> Result<()> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let x = x.with_view(Strides::contiguous(&[1, n, width]));
        let view = std::mem::replace(&mut y.view, Strides::contiguous(&[1, self.num_rows, width]).into());
        let scalars = [Scalar::Int(0), Scalar::Int(self.num_rows as i64)];
        launch(self.rank, &SCATTER_ADD, &[&self.row, &x], &mut [&mut *y], &scalars)?;
        y.view = view;
        Ok(())
    }

    /// Multiplies each pair with the matrix of its expert (grouped GEMM).
    fn grouped_matmul(&self, x: &LocalTensor, w: &LocalTensor) -> Result<LocalTensor> {
        let mut y = LocalTensor::alloc(self.rank, x.dtype, &[self.count(), w.view.shape[2]])?;
        launch(self.rank, &FORWARD, &[x, w, &self.starts], &mut [&mut y], &self.scalars())?;
        Ok(y)
    }

    /// The gradients of the matrices of a grouped product.
    fn weight_gradient(&self, x: &LocalTensor, dy: &LocalTensor, dw: &mut LocalTensor) -> Result<()> {
        launch(self.rank, &WEIGHT_GRAD, &[x, dy, &self.starts], &mut [dw], &self.scalars())
    }

    fn scalars(&self) -> [Scalar; 1] {
        [Scalar::Int(self.num_experts as i64)]
    }

    /// Runs an elementwise kernel on two tensors of one shape.
    fn binary(&self, kernel: &Kernel, a: &LocalTensor, b: &LocalTensor) -> Result<LocalTensor> {
        let mut y = LocalTensor::alloc(self.rank, a.dtype, &a.view.shape)?;
        launch(self.rank, kernel, &[a, b], &mut [&mut y], &[])?;
        Ok(y)
    }

    /// Multiplies each row with a number.
    fn scale_rows(&self, x: &LocalTensor, by: &LocalTensor) -> Result<LocalTensor> {
        let repeated = by.view.broadcast(&x.view.shape).expect("a column repeats to any width");
        self.binary(&MUL, x, &by.with_view(repeated))
    }

    /// The dot product of each row of a with the same row of b.
    fn row_dots(&self, a: &LocalTensor, b: &LocalTensor) -> Result<LocalTensor> {
        let (n, width) = (a.view.shape[0], a.view.shape[1]);
        let mut y = LocalTensor::alloc(self.rank, a.dtype, &[n, 1, 1])?;
        let (a, b) = (a.with_view(a.view.unsqueeze(1)), b.with_view(b.view.unsqueeze(2)));
        debug_assert_eq!(b.view.shape[..], [n, width, 1], "both are (n, width)");
        launch(self.rank, &BATCHED_MATMUL, &[&a, &b], &mut [&mut y], &[])?;
        Ok(y.with_view(Strides::contiguous(&[n, 1])))
    }
}

/// The number of rows and the extent of the last dim.
fn rows_and_width(x: &LocalTensor) -> [usize; 2] {
    let (width, dims) = x.view.shape.split_last().expect("the signature names a last dim");
    [dims.iter().product(), *width]
}

/// A contiguous tensor as one dim.
fn flatten(x: &LocalTensor) -> LocalTensor {
    x.with_view(Strides::contiguous(&[x.numel()]).at(x.view.offset))
}

/// A tensor as a contiguous matrix of rows of its last dim.
fn flatten_rows(rank: &Rank, x: &LocalTensor) -> Result<LocalTensor> {
    let x = x.contiguous(rank)?;
    Ok(x.with_view(Strides::contiguous(&rows_and_width(&x)).at(x.view.offset)))
}

/// A view of batched matrices, transposed.
fn transposed(w: &LocalTensor) -> LocalTensor {
    w.with_view(w.view.permute(&[0, 2, 1]))
}

/// Multiply-adds of the three products for all token-expert pairs.
fn volume(args: &[&Layout]) -> usize {
    let (gate, down) = (args[3], args[5]);
    let per_pair = gate.extent(2).saturating_mul(2 * gate.extent(1) + down.extent(2));
    args[1].numel().saturating_mul(per_pair)
}

impl Op for Experts {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn signature(&self) -> &str {
        "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, true, true, true, true]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1, 2, 3, 4, 5], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        let floats: SmallVec<[DType; 6]> =
            inputs.iter().enumerate().filter(|(i, _)| *i != 1).map(|(_, dtype)| *dtype).collect();
        Ok(SmallVec::from_slice(&[common_float(&floats)?]))
    }

    fn estimate_work(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        volume(args)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let pairs = TokenExpertPairs::of(local, x[1])?;
        let rows = pairs.gather_rows(&flatten_rows(local.rank, x[0])?)?;
        let hidden = pairs.binary(
            &swiglu::FORWARD,
            &pairs.grouped_matmul(&rows, x[3])?,
            &pairs.grouped_matmul(&rows, x[4])?,
        )?;
        let weighted = pairs.scale_rows(&pairs.grouped_matmul(&hidden, x[5])?, &pairs.permute(x[2])?)?;
        let mut y = local.output(0)?;
        pairs.combine(&weighted, &mut y)?;
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let part = match (
            cx.needs_input_grad[0] || cx.needs_input_grad[2],
            cx.needs_input_grad[3..].contains(&true),
        ) {
            (true, false) => GradPart::Inputs,
            (false, true) => GradPart::Weights,
            _ => GradPart::All,
        };
        let (saved, g): (Vec<&Tensor>, _) = ((0..6).map(|i| cx.input(i)).collect(), cx.grad(0));
        let args: Vec<&Tensor> = saved.into_iter().chain([&g]).collect();
        let grads = Tensor::apply(ExpertsBackward(part), &args);
        // The cotangents of x and p come first, if they are computed.
        let first = if part == GradPart::Weights { 0 } else { 2 };
        cx.cotangents(|i| match i {
            0 => grads[0].clone(),
            2 => grads[1].clone(),
            i => grads[first + i - 3].clone(),
        })
    }
}

impl Op for ExpertsBackward {
    fn name(&self) -> &'static str {
        "experts_backward"
    }

    fn signature(&self) -> &str {
        match self.0 {
            GradPart::All => {
                "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> ..m d!, ..m s!, [e] d! h, [e] d! h, [e] h o!"
            }
            GradPart::Inputs => {
                "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> ..m d!, ..m s!"
            }
            GradPart::Weights => {
                "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> [e] d! h, [e] d! h, [e] h o!"
            }
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[6]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn estimate_work(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        volume(args).saturating_mul(2)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (rank, pairs) = (local.rank, TokenExpertPairs::of(local, x[1])?);
        let (rows, g) =
            (pairs.gather_rows(&flatten_rows(rank, x[0])?)?, pairs.gather_rows(&flatten_rows(rank, x[6])?)?);
        let (gate, up) = (pairs.grouped_matmul(&rows, x[3])?, pairs.grouped_matmul(&rows, x[4])?);
        let hidden = pairs.binary(&swiglu::FORWARD, &gate, &up)?;
        let (p, back) = (pairs.permute(x[2])?, pairs.grouped_matmul(&g, &transposed(x[5]))?);
        let dh = pairs.scale_rows(&back, &p)?;
        let [mut dgate, mut dup] = [gate.alloc_like(rank, gate.dtype)?, up.alloc_like(rank, up.dtype)?];
        launch(rank, &swiglu::BACKWARD, &[&gate, &up, &dh], &mut [&mut dgate, &mut dup], &[])?;
        let mut outputs: LocalTensors =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let (of_inputs, of_weights) = outputs.split_at_mut(if self.0 == GradPart::Weights { 0 } else { 2 });
        if let [dx, dp] = of_inputs {
            let (a, b) = (
                pairs.grouped_matmul(&dgate, &transposed(x[3]))?,
                pairs.grouped_matmul(&dup, &transposed(x[4]))?,
            );
            pairs.combine(&pairs.binary(&ADD, &a, &b)?, dx)?;
            let dp_rows = pairs.unpermute(&pairs.row_dots(&hidden, &back)?)?;
            *dp = LocalTensor { lineage: dp.lineage, ..dp_rows.with_view(dp.view.clone()) };
        }
        if let [dwg, dwu, dwd] = of_weights {
            pairs.weight_gradient(&rows, &dgate, dwg)?;
            pairs.weight_gradient(&rows, &dup, dwu)?;
            pairs.weight_gradient(&pairs.scale_rows(&hidden, &p)?, &g, dwd)?;
        }
        Ok(outputs)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |rows: &[usize], per_row: usize, [e, d, h, o]: [usize; 4]| {
        let of = |last: usize| [rows, &[last]].concat();
        let real = Input::real;
        let inputs = vec![
            real(&of(d)),
            Input::index(&of(per_row), e),
            real(&of(per_row)),
            real(&[e, d, h]),
            real(&[e, d, h]),
            real(&[e, h, o]),
        ];
        Case::new(Rc::new(Experts), inputs)
    };
    vec![case(&[5], 2, [3, 4, 7, 6]), case(&[2, 3], 1, [5, 4, 7, 6])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::contraction::Contraction;
    use crate::op;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Kind, Mesh, World};
    use std::panic::Location;

    /// Two rows of width 1 and three experts of one hidden unit with gate ln 3: silu(ln 3) = 3/4 ln 3.
    fn by_hand(rank: &Rank) -> Result<[Tensor; 6]> {
        let unit = 4.0 / (3.0 * 3f64.ln());
        let host = |shape: &[usize], x: &[f64]| Tensor::from_host(rank, shape, x);
        Ok([
            host(&[2, 1], &[1.0, 1.0])?,
            Tensor::from_host(rank, &[2, 2], &[2i64, 0, 0, 1])?,
            host(&[2, 2], &[0.5, 0.25, 1.0, 2.0])?,
            host(&[3, 1, 1], &[3f64.ln(); 3])?,
            host(&[3, 1, 1], &[unit, 2.0 * unit, 4.0 * unit])?,
            host(&[3, 1, 2], &[1.0, 0.0, 0.0, 1.0, 10.0, -1.0])?,
        ])
    }

    #[test]
    fn matches_sums_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let [x, index, p, gate, up, down] = by_hand(rank)?;
            let y = x.experts(&index, &p, &gate, &up, &down).to_host::<f64>()?;
            // The experts return 1 (1, 0), 2 (0, 1) and 4 (10, -1).
            let right = [0.5 * 40.0 + 0.25, -2.0, 1.0, 4.0];
            assert_abs_diff_eq!(y[..], right[..], epsilon = 1e-14);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn expert_index_out_of_range_is_an_error_with_index_and_range() {
        let error = World::run(Mesh::single(), |rank| {
            let [x, _, p, gate, up, down] = by_hand(rank)?;
            let index = Tensor::from_host(rank, &[2, 2], &[2i64, 0, 3, 1])?;
            let _ = x.experts(&index, &p, &gate, &up, &down);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert_eq!(error.message(), "experts: index 3 at position 2 is outside of 0..3");
    }

    #[test]
    fn split_backward_computes_only_the_requested_cotangents() {
        World::run(Mesh::single(), |rank| {
            let real = |shape: &[usize], stream| {
                Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, shape), 1, stream, 1.0)
            };
            let index = Tensor::from_host(rank, &[3, 2], &[2i64, 0, 0, 1, 2, 1])?;
            let inputs = [
                real(&[3, 4], 0)?,
                index,
                real(&[3, 2], 1)?,
                real(&[3, 4, 5], 2)?,
                real(&[3, 4, 5], 3)?,
                real(&[3, 5, 2], 4)?,
            ];
            let g = real(&[3, 2], 5)?;
            let outputs = op::apply(&Experts, &inputs.each_ref(), Location::caller())?;
            let layouts = |tensors: &[Tensor]| tensors.iter().map(|t| t.layout().clone()).collect::<Vec<_>>();
            let backward = |requested: [bool; 6]| -> Vec<Option<Vec<f64>>> {
                let cotangents = Experts.vjp(&Vjp {
                    rank,
                    inputs: &inputs.clone().map(Some),
                    outputs: &[],
                    input_layouts: &layouts(&inputs),
                    output_layouts: &layouts(&outputs),
                    grads: &[Some(g.clone())],
                    needs_input_grad: &requested,
                    donated: std::cell::RefCell::default(),
                    accumulators: &[],
                });
                cotangents.iter().map(|c| c.as_ref().map(|c| c.to_f64().unwrap())).collect()
            };
            let all = backward([true, false, true, true, true, true]);
            let rows = backward([true, false, true, false, false, false]);
            let matrices = backward([false, false, false, true, true, true]);
            assert_eq!((&rows[0], &rows[2]), (&all[0], &all[2]), "the same bits");
            assert_eq!(matrices[3..], all[3..]);
            assert!(matrices[..3].iter().chain(&rows[3..]).all(Option::is_none));
            Ok(())
        })
        .unwrap();
    }
}
