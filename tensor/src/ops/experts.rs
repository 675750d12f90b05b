//! Mixture-of-experts (MoE) layer with gated experts, dropless: y_m = the sum over s of p_(m, s) E_e(x_m) with e =
//! index_(m, s), where E_e(x) = (silu(x wg_e) * (x wu_e)) wd_e. Shazeer et al., arXiv 1701.06538; no token is dropped,
//! whatever the load of the experts.

mod token_expert_pairs;
mod exchange;
mod rows_to_experts;

use super::embedding::check_index;
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp,
    common_float, refuse_order_of_ranks, sum_leaves,
};
use crate::tensor::Tensor;
use exchange::Exchange;
pub(crate) use exchange::exchange_axes;
pub use rows_to_experts::RowsToExperts;
pub(crate) use rows_to_experts::{cheaper_gathered, scattered};
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::binary::ADD;
use shardgrad_kernels::op::swiglu;
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;
use token_expert_pairs::{TokenExpertPairs, flatten_rows, transposed};

/// Dropless mixture-of-experts layer of SwiGLU experts, computed by grouped matrix products.
///
/// `..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!` on tokens x, expert indices (i64, each in 0..e),
/// router weights p, and the matrices wg, wu and wd of all experts; x, p and the matrices have one float dtype. y_m =
/// the sum over s of p_(m, s) E_e(x_m) with e = index_(m, s) and E_e(x) = (silu(x wg_e) * (x wu_e)) wd_e.
///
/// Token-expert pairs are sorted by expert on the device (token permutation), so no capacity is needed. A rank computes the
/// pairs whose expert it holds (expert parallelism). The experts of a token are added in their order in the accumulator dtype,
/// each rounded before.
///
/// - Where experts or hidden units are sharded, and rows are not, the result is a partial sum; no shape depends on the
///   routing.
/// - Where the axes of the experts also shard rows, pairs are exchanged: the ranks exchange the number of pairs of each
///   expert, then rows, and the results travel back, three all-to-alls in all. The rank of a token adds its experts in the
///   same order, so that the bits are those of one rank. Only local shapes inside of the op depend on the routing. The
///   backward exchanges rows, cotangents and weights in one all-to-all, and the cotangents of rows and weights in another. Refused
///   where sums are canonical: the gradients of the matrices would be sums over the tokens of all ranks, which have no leaves there.
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
#[derive(Debug, Default)]
pub struct Experts {
    /// The line of the caller, set by the forward: the collectives and errors of the backward name the same line.
    site: Cell<Option<&'static Location<'static>>>,
}

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

const SIGNATURE: &str = "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!";

/// Multiply-adds of the three products for all token-expert pairs.
fn volume(args: &[&Layout]) -> usize {
    let (gate, down) = (args[3], args[5]);
    let per_pair = gate.extent(2).saturating_mul(2 * gate.extent(1) + down.extent(2));
    args[1].numel().saturating_mul(per_pair)
}

impl Experts {
    /// The point of the rows, before the experts.
    pub const ROWS: usize = 0;
    /// The point of the indices of experts.
    pub const INDEX: usize = 1;
    /// The point of the router weights.
    pub const SHARES: usize = 2;
    /// The point after the experts.
    pub const OUT: usize = 3;
}

/// The result of its expert for each pair, in the order of the pairs.
fn expert_results(
    pairs: &TokenExpertPairs<'_>,
    rows: &LocalTensor,
    [gate, up, down]: [&LocalTensor; 3],
) -> Result<LocalTensor> {
    let (gates, ups) = (pairs.grouped_matmul(rows, gate)?, pairs.grouped_matmul(rows, up)?);
    pairs.grouped_matmul(&pairs.binary(&swiglu::FORWARD, &gates, &ups)?, down)
}

/// The sums over the hidden units of some outputs: `part` computes them from the matrices of a range of hidden units, of each leaf of a
/// canonical sum, or of all.
fn sum_over_hidden(
    local: &ForwardContext<'_>,
    [gate, up, down]: [&LocalTensor; 3],
    part: impl Fn([&LocalTensor; 3]) -> Result<LocalTensors>,
) -> Result<LocalTensors> {
    let Some(tree) = Context::of(local.rank).sum_tree() else { return part([gate, up, down]) };
    let hidden = local.inference.label_dim("h").expect("the signature has the label h");
    let outputs = || (0..local.inference.outputs.len()).map(|i| local.output(i)).collect();
    sum_leaves(local, &[gate, up, down], (tree, &hidden), outputs, |leaves| {
        leaves.sum_each(local.rank, |range| {
            let of = |x: &LocalTensor, dim| x.with_view(x.view.narrow(dim, range.start, range.end));
            part([&of(gate, 2), &of(up, 2), &of(down, 1)])
        })
    })
}

impl Op for Experts {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    /// The line of the caller determines no layout.
    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<Experts>(SIGNATURE))
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, true, true, true, true]
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
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

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        exchange::infer(self, context, args, dtypes, want, 0..0)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        self.site.set(Some(local.site));
        let exchange_axes = exchange_axes(&local.inputs.iter().collect::<SmallVec<[&Layout; 6]>>());
        if exchange_axes.is_some() {
            // Before any collective, and by the layouts alone: on all ranks. The backward has the same layouts.
            refuse_order_of_ranks("experts with an exchange of tokens", local.rank)?;
        }
        let (own, stacks) = (TokenExpertPairs::of(local, x[1])?, [x[3], x[4], x[5]]);
        let rows = own.gather_rows(&flatten_rows(local.rank, x[0])?)?;
        let combine = |results: &LocalTensor| -> Result<LocalTensors> {
            let mut y = local.output(0)?;
            own.combine(&own.scale_rows(results, &own.permute(x[2])?)?, &mut y)?;
            Ok(smallvec![y])
        };
        match exchange_axes {
            None => sum_over_hidden(local, stacks, |stacks| combine(&expert_results(&own, &rows, stacks)?)),
            Some(axes) => {
                let exchange = Exchange::of(local, x, axes, &own)?;
                let rows = exchange.dispatch(rows)?;
                combine(&exchange.combine(&expert_results(&exchange.pairs, &rows, stacks)?)?)
            }
        }
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let is_canonical = Context::of(cx.rank).sum_tree().is_some();
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
        let site = self.site.get().unwrap_or(Location::caller());
        let run = |part| Tensor::apply_at(Rc::new(ExpertsBackward(part)), &args, &[], site);
        let grads = match part {
            // Those of the inputs are sums over hidden units, those of the matrices over tokens.
            GradPart::All if is_canonical => {
                run(GradPart::Inputs).into_iter().chain(run(GradPart::Weights)).collect()
            }
            part => run(part),
        };
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

    /// The gradients of the stacks are sums over leaves of tokens.
    fn canonical_form(&self) -> CanonicalForm {
        if self.0 == GradPart::Inputs { CanonicalForm::Own } else { CanonicalForm::Leaves }
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

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let stacks = self.num_input_grads()..dtypes.len();
        exchange::infer(self, context, args, dtypes, want, stacks)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (rank, own) = (local.rank, TokenExpertPairs::of(local, x[1])?);
        let gather_rows = |x: &LocalTensor| own.gather_rows(&flatten_rows(rank, x)?);
        let (rows, g, p) = (gather_rows(x[0])?, gather_rows(x[6])?, own.permute(x[2])?);
        let stacks = [x[3], x[4], x[5]];
        if self.0 == GradPart::Inputs {
            return sum_over_hidden(local, stacks, |stacks| {
                self.part(local, x, (&own, [&rows, &g, &p]), stacks)
            });
        }
        self.part(local, x, (&own, [&rows, &g, &p]), stacks)
    }
}

impl ExpertsBackward {
    /// The cotangents from the matrices of some hidden units: `rows`, `g` and `p` are those of this rank's pairs.
    fn part(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        (own, [rows, g, p]): (&TokenExpertPairs<'_>, [&LocalTensor; 3]),
        stacks: [&LocalTensor; 3],
    ) -> Result<LocalTensors> {
        let mut outputs: LocalTensors =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let (of_inputs, of_weights) = outputs.split_at_mut(self.num_input_grads());
        let grads = match exchange_axes(&local.inputs.iter().collect::<SmallVec<[&Layout; 7]>>()) {
            None => self.pair_grads(own, [rows, g, p], stacks, of_weights)?,
            Some(axes) => {
                let exchange = Exchange::of(local, x, axes, own)?;
                let widths = [rows, g, p].map(|part| part.view.shape[1]);
                let received = exchange.dispatch(own.join_columns(&[rows, g, p])?)?;
                let [rows, g, p] = exchange.pairs.split_columns(&received, widths)?;
                let grads = self.pair_grads(&exchange.pairs, [&rows, &g, &p], stacks, of_weights)?;
                grads
                    .map(|[dx, dp]| {
                        let returned = exchange.combine(&exchange.pairs.join_columns(&[&dx, &dp])?)?;
                        own.split_columns(&returned, [widths[0], 1])
                    })
                    .transpose()?
            }
        };
        if let ([dx, dp], Some([dx_pairs, dp_pairs])) = (of_inputs, grads) {
            own.combine(&dx_pairs, dx)?;
            let dp_rows = own.unpermute(&dp_pairs)?;
            *dp = LocalTensor { lineage: dp.lineage, ..dp_rows.with_view(dp.view.clone()) };
        }
        Ok(outputs)
    }

    /// The number of outputs that are cotangents of x and p.
    fn num_input_grads(&self) -> usize {
        if self.0 == GradPart::Weights { 0 } else { 2 }
    }

    /// Writes the gradients of the stacks, if `of_weights` asks for them, and returns the cotangents of the rows and weights of the
    /// pairs, if the op asks for them. `rows`, `g` and `p` are those of the pairs, in their order.
    fn pair_grads(
        &self,
        pairs: &TokenExpertPairs<'_>,
        [rows, g, p]: [&LocalTensor; 3],
        [gate, up, down]: [&LocalTensor; 3],
        of_weights: &mut [LocalTensor],
    ) -> Result<Option<[LocalTensor; 2]>> {
        let rank = pairs.rank();
        let (gates, ups) = (pairs.grouped_matmul(rows, gate)?, pairs.grouped_matmul(rows, up)?);
        let hidden = pairs.binary(&swiglu::FORWARD, &gates, &ups)?;
        let back = pairs.grouped_matmul(g, &transposed(down))?;
        let dh = pairs.scale_rows(&back, p)?;
        let [mut dgate, mut dup] = [gates.alloc_like(rank, gates.dtype)?, ups.alloc_like(rank, ups.dtype)?];
        launch(rank, &swiglu::BACKWARD, &[&gates, &ups, &dh], &mut [&mut dgate, &mut dup], &[])?;
        if let [dwg, dwu, dwd] = of_weights {
            pairs.weight_gradient(rows, &dgate, dwg)?;
            pairs.weight_gradient(rows, &dup, dwu)?;
            pairs.weight_gradient(&pairs.scale_rows(&hidden, p)?, g, dwd)?;
        }
        if self.num_input_grads() == 0 {
            return Ok(None);
        }
        let dx = {
            let of_gate = pairs.grouped_matmul(&dgate, &transposed(gate))?;
            pairs.binary(&ADD, &of_gate, &pairs.grouped_matmul(&dup, &transposed(up))?)?
        };
        Ok(Some([dx, pairs.row_dots(&hidden, &back)?]))
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
        Case::new(Rc::new(Experts::default()), inputs)
    };
    vec![case(&[5], 2, [3, 4, 7, 6]), case(&[2, 3], 1, [5, 4, 7, 6])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::contraction::Contraction;
    use crate::op;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Kind, Mesh, Rank, World};
    use shardgrad_kernels::SumTree;

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
    fn sums_of_a_token_depend_on_its_experts_and_not_on_the_order_of_its_slots() {
        const ROWS: usize = 6;
        const K: usize = 4;
        const E: usize = 9;
        const D: usize = 5;
        // Experts of each token in ascending order, or in an order that differs from token to token, with their weights.
        let slots = |mesh: &str, is_sorted: bool| {
            let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let layout = |text: &str| Layout::parse(text, rank.mesh());
                let (rows, stacks) = if mesh.is_empty() { ("", "") } else { ("@ep", "@ep") };
                let normal = |text: String, stream| Tensor::normal(rank, &layout(&text)?, 3, stream, 1.0);
                let slot = |row: usize, at: usize| if is_sorted { at } else { (at + row + 1) % K };
                let pairs = || (0..ROWS).flat_map(|row| (0..K).map(move |at| (row, slot(row, at))));
                let index: Vec<i64> = pairs().map(|(row, s)| ((2 * s + row) % E) as i64).collect();
                let p: Vec<f32> =
                    pairs().map(|(row, s)| 0.1 + (s as f32 + row as f32 * 0.7).sin().abs()).collect();
                let x = normal(format!("f32[{ROWS}{rows}, {D}]"), 0)?;
                let index = Tensor::from_global(rank, &layout(&format!("i64[{ROWS}{rows}, {K}]"))?, &index)?;
                let p = Tensor::from_global(rank, &layout(&format!("f32[{ROWS}{rows}, {K}]"))?, &p)?;
                let stack = |stream| normal(format!("f32[{E}{stacks}, {D}, {D}]"), stream);
                let (gate, up, down) = (stack(1)?, stack(2)?, stack(3)?);
                let points: [&dyn crate::op::Point<Tensor>; 4] = [&(), &(), &(), &()];
                let y = x.experts_general([&index, &p], [&gate, &up, &down], RowsToExperts::AsStated, points);
                y.to_f64()
            });
            made.unwrap().swap_remove(0)
        };
        let right = slots("", true);
        for mesh in ["", "ep=2", "ep=4"] {
            assert_eq!(slots(mesh, false), right, "{mesh}: other bits");
        }
    }

    #[test]
    fn exchange_of_tokens_is_refused_where_sums_are_canonical() {
        let errors = World::run(Mesh::parse("ep=2").unwrap(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(Some(SumTree::new(8)));
            let tensor =
                |text: &str, value: f64| Tensor::full(rank, &Layout::parse(text, rank.mesh())?, value);
            let (x, p) = (tensor("f32[1@ep, 3]", 0.5)?, tensor("f32[1@ep, 2]", 0.5)?);
            let (index, stack) = (tensor("i64[1@ep, 2]", 1.0)?, tensor("f32[4@ep, 3, 3]", 0.5)?);
            let args = [&x, &index, &p, &stack, &stack, &stack];
            let error = op::apply(&Experts::default(), &args, Location::caller()).unwrap_err();
            Ok((error.kind(), error.to_string()))
        });
        for (kind, text) in errors.unwrap() {
            assert_eq!(kind, Kind::Unsupported);
            assert!(
                text.contains("experts with an exchange of tokens adds terms of several ranks"),
                "{text}"
            );
        }
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
            let outputs = op::apply(&Experts::default(), &inputs.each_ref(), Location::caller())?;
            let layouts = |tensors: &[Tensor]| tensors.iter().map(|t| t.layout().clone()).collect::<Vec<_>>();
            let backward = |requested: [bool; 6]| -> Vec<Option<Vec<f64>>> {
                let cotangents = Experts::default().vjp(&Vjp {
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
