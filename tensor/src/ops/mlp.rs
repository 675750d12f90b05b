//! Two-layer perceptron with GELU in one op: y = gelu(x w1 + b1) w2, optionally + b2 and + residual. Bias, GELU and
//! residual are epilogues of the two products.

use super::linear::{
    matmul_epilogue, sum_rows, to_matrix, to_vector, transposed, weight_and_bias_grads, with_matrix_view,
};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::dim::Dim;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::op::{
    Cotangents, DTypes, Decomposition, ForwardContext, GradAccumulator, LocalTensors, Op, Operand, PlanKey,
    SavedForBackward, Vjp, common_float, infer_by_signature,
};
use crate::ops::add::Add;
use crate::ops::linear::Linear;
use crate::ops::unary::Gelu;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::linear::{LINEAR_GELU, MATMUL_GELU_GRAD};
use shardgrad_kernels::{DType, Dims, Strides};
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// Transformer feed-forward block with tanh GELU: y = gelu(x w1 + b1) w2, optionally + b2 and + residual r.
///
/// `..m d!, d! h, h, h e! -> ..m e!` on x, w1, b1 and w2 of one float dtype; z = x w1 + b1 and gelu(z) (`..m h`) are
/// saved for backward. Where h is sharded (tensor parallelism: w1 by columns, w2 by rows) the result is a partial sum.
/// The kernel with b2 (`e!`) or, as the last argument, r (`..m e!`) needs h unsharded, and each kernel needs b1. A partial w2
/// is reduced first, although y is linear in w2, since gelu(z) is not.
///
/// Decomposition: r + branch(out(linear(input(gelu(hidden(x w1 + b1))), w2) + b2), with a point after each product, before the
/// second product, and before the residual. One kernel computes both products where d and e are unsharded and nothing changes a value
/// between the products, [`Linear`]s otherwise.
///
/// Gradient, with u = (g w2^T) gelu'(z): dx = u w1^T, dw1 = x^T u, db1 = the sum of u over all rows, dw2 = gelu(z)^T g,
/// db2 = the sum of g over all rows, dr = g. One op computes all of them; partial cotangents of the biases are in the
/// accumulator dtype.
#[doc(alias = "feed-forward")]
#[doc(alias = "ffn")]
#[doc(alias = "fused mlp")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mlp {
    /// Whether there is a b1.
    pub has_first_bias: bool,
    /// Whether there is a b2.
    pub has_last_bias: bool,
    /// Whether there is an r.
    pub has_residual: bool,
}

/// Backward of [`Mlp`], linear in g.
///
/// A split backward requests the cotangent of x first and those of the parameters later; u is computed in both, with
/// the same bits.
#[derive(Debug)]
struct MlpBackward {
    has_last_bias: bool,
    part: GradPart,
    /// Whether db1 and db2 are in the accumulator dtype.
    is_wide: bool,
}

/// The cotangents that a backward computes: a split backward requests those of the input and of the parameters
/// separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GradPart {
    All,
    Inputs,
    Weights,
}

impl Op for Mlp {
    fn name(&self) -> &'static str {
        "mlp"
    }

    fn signature(&self) -> &str {
        self.static_signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<Mlp>(self.static_signature()))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if !self.has_first_bias {
            let refusal = Refusal::new("whole", "there is no kernel without a first bias".into(), &[]);
            return Err(refusal.hint("apply the decomposition: linear, gelu, linear"));
        }
        infer_by_signature(self, context, args, dtypes, want)
    }

    fn decompose(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        self.parts(args, points, true)
    }

    fn decompose_canonical(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        self.parts(args, points, false)
    }

    fn num_saved(&self) -> usize {
        2
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1, 3], outputs: &[1, 2] }
    }

    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        match self.part(needs_input_grad) {
            Some(GradPart::All) => self.saved_for_backward(),
            Some(GradPart::Inputs) => SavedForBackward { inputs: &[1, 3], outputs: &[1] },
            Some(GradPart::Weights) => SavedForBackward { inputs: &[0, 3], outputs: &[1, 2] },
            None => SavedForBackward::default(),
        }
    }

    fn estimate_work(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        let (width, hidden) = (args[1].extent(0), args[1].extent(1));
        let rows = args[0].numel() / width.max(1);
        rows.saturating_mul(hidden).saturating_mul(width + args[3].extent(1))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let rank = local.rank;
        let (a, w1, w2) = (to_matrix(rank, x[0], 1)?, to_matrix(rank, x[1], 1)?, to_matrix(rank, x[3], 1)?);
        let b1 = to_vector(rank, x[2])?;
        let [mut y, mut z, mut hidden] = [local.output(0)?, local.output(1)?, local.output(2)?];
        with_matrix_view(&mut hidden, 1, |hidden| {
            with_matrix_view(&mut z, 1, |z| {
                launch(rank, &LINEAR_GELU, &[&a, &w1, &b1], &mut [hidden, z], &[])
            })
        })?;
        let hidden_matrix = to_matrix(rank, &hidden, 1)?;
        let (b2, residual) = x[4..].split_at(usize::from(self.has_last_bias));
        matmul_epilogue(rank, [&hidden_matrix, &w2], [b2, residual].map(|x| x.first().copied()), &mut y, 1)?;
        Ok(smallvec![y, z, hidden])
    }

    fn accumulates_in_place(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let Some(part) = self.part(cx.needs_input_grad) else { return cx.cotangents(|_| g.clone()) };
        let [x, w1, w2] = [0, 1, 3].map(|i| cx.inputs[i].as_ref());
        let [z, hidden] = [1, 2].map(|i| cx.outputs[i].as_ref());
        let read = match part {
            GradPart::All => [x, w1, w2, z, hidden].to_vec(),
            GradPart::Inputs => vec![w1, w2, z],
            GradPart::Weights => vec![x, w2, z, hidden],
        };
        let saved =
            read.into_iter().map(|t| t.expect("saved_for_backward_of names the values that the part reads"));
        let args: Vec<&Tensor> = saved.chain([&g]).collect();
        let first = usize::from(part == GradPart::Weights);
        let sums: Vec<Option<&GradAccumulator>> =
            (first..self.num_layer_args()).map(|i| cx.accumulator(i)).collect();
        let is_wide = !cx.input_layouts[2].replicate().is_empty();
        let backward = MlpBackward { has_last_bias: self.has_last_bias, part, is_wide };
        let grads = cx.apply(&backward, &args, &sums);
        cx.cotangents(|i| match i < self.num_layer_args() {
            true => grads[i - first].clone(),
            false => g.clone(),
        })
    }
}

impl Mlp {
    /// The point after the first product and its bias, before GELU.
    pub const HIDDEN: usize = 0;
    /// The point before the second product.
    pub const INPUT: usize = 1;
    /// The point after the second product.
    pub const OUT: usize = 2;
    /// The point after the second bias, before the residual.
    pub const BRANCH: usize = 3;

    /// The decomposition, which has one kernel for both products only if `fuses`.
    fn parts(self, args: &[&Layout], points: &[bool], fuses: bool) -> Option<Decomposition> {
        let is_identity = |point: usize| points.get(point).copied().unwrap_or(true);
        let operands: SmallVec<[Operand; 6]> = (0..args.len()).map(Operand::Arg).collect();
        let (first_args, last_args) = operands.split_at(2 + usize::from(self.has_first_bias));
        let (w2, epilogue) = last_args.split_first()?;
        let (b2, r) = epilogue.split_at(usize::from(self.has_last_bias));
        let layout = |operand: Operand| match operand {
            Operand::Arg(i) => args[i],
            Operand::Output(..) => unreachable!("an argument"),
        };
        let (x_layout, w1_layout, w2_layout) = (args[0], args[1], layout(*w2));
        let first = Linear::new(1, 1).with_bias(self.has_first_bias);
        let last = Linear::new(1, 1).with_bias(self.has_last_bias).with_residual(self.has_residual);
        let mut parts = Decomposition::new(points.len());
        let is_one_kernel = fuses
            && self.has_first_bias
            && is_identity(Mlp::HIDDEN)
            && is_identity(Mlp::INPUT)
            && first.has_complete_sums(x_layout, w1_layout)
            && w2_layout.partial().is_empty()
            && w2_layout.dims().get(1).is_none_or(Dim::is_unsharded);
        if !is_one_kernel {
            let z = parts.apply_with_points(Rc::new(first), first_args, Mlp::HIDDEN..Mlp::INPUT);
            let hidden = parts.apply(Gelu, &[z]);
            let hidden = parts.pass(hidden, Mlp::INPUT);
            let args: SmallVec<[Operand; 4]> = [hidden].iter().chain(last_args).copied().collect();
            parts.apply_with_points(Rc::new(last), &args, Mlp::OUT..Mlp::BRANCH + 1);
            return Some(parts);
        }
        let hidden = [w1_layout.dims().get(1), w2_layout.dims().first()];
        let is_complete = hidden.into_iter().flatten().all(Dim::is_unsharded);
        let adds_residual = |r: &Operand| {
            is_complete
                && is_identity(Mlp::OUT)
                && is_identity(Mlp::BRANCH)
                && last.can_add(layout(*r), x_layout, w2_layout)
        };
        let kernel = Mlp {
            has_last_bias: self.has_last_bias && is_complete,
            has_residual: r.first().is_some_and(adds_residual),
            ..self
        };
        if points.is_empty() && kernel == self {
            return None;
        }
        let of_kernel =
            |present: bool, operand: &'_ [Operand]| if present { operand.to_vec() } else { Vec::new() };
        let kernel_args =
            [first_args, &[*w2], &of_kernel(kernel.has_last_bias, b2), &of_kernel(kernel.has_residual, r)]
                .concat();
        parts.enter(Mlp::HIDDEN);
        let y = parts.apply(kernel, &kernel_args);
        let mut y = parts.pass(y, Mlp::OUT);
        let rows = &x_layout.extents()[..x_layout.ndim().saturating_sub(1)];
        let shape: Dims = rows.iter().chain(w2_layout.extents().get(1)).copied().collect();
        if let ([b2], false) = (b2, kernel.has_last_bias) {
            y = parts.apply(Add::between(&shape, layout(*b2).extents()), &[y, *b2]);
        }
        if let ([r], false) = (r, kernel.has_residual) {
            y = parts.pass(y, Mlp::BRANCH);
            parts.apply(Add::residual(layout(*r).extents(), &shape), &[*r, y]);
        }
        Some(parts)
    }

    fn static_signature(self) -> &'static str {
        match (self.has_first_bias, self.has_last_bias, self.has_residual) {
            (true, false, false) => "..m d!, d! h, h, h e! -> ..m e!, ..m h, ..m h",
            (true, true, false) => "..m d!, d! h!, h!, h! e!, e! -> ..m e!, ..m h!, ..m h!",
            (true, false, true) => "..m d!, d! h!, h!, h! e!, ..m e! -> ..m e!, ..m h!, ..m h!",
            (true, true, true) => "..m d!, d! h!, h!, h! e!, e!, ..m e! -> ..m e!, ..m h!, ..m h!",
            (false, false, false) => "..m d!, d! h, h e! -> ..m e!, ..m h, ..m h",
            (false, true, false) => "..m d!, d! h!, h! e!, e! -> ..m e!, ..m h!, ..m h!",
            (false, false, true) => "..m d!, d! h!, h! e!, ..m e! -> ..m e!, ..m h!, ..m h!",
            (false, true, true) => "..m d!, d! h!, h! e!, e!, ..m e! -> ..m e!, ..m h!, ..m h!",
        }
    }

    /// The number of arguments before the residual.
    fn num_layer_args(&self) -> usize {
        4 + usize::from(self.has_last_bias)
    }

    /// The requested cotangents of the layer; `None` if only the cotangent of the residual is requested.
    fn part(&self, needs_input_grad: &[bool]) -> Option<GradPart> {
        match (needs_input_grad[0], needs_input_grad[1..self.num_layer_args()].contains(&true)) {
            (true, true) => Some(GradPart::All),
            (true, false) => Some(GradPart::Inputs),
            (false, true) => Some(GradPart::Weights),
            (false, false) => None,
        }
    }
}

impl Op for MlpBackward {
    fn name(&self) -> &'static str {
        "mlp_backward"
    }

    fn signature(&self) -> &str {
        match (self.part, self.has_last_bias) {
            (GradPart::All, false) => "..m d!, d! h, h e!, ..m h, ..m h, ..m e! -> ..m d!, d! h, h, h e!",
            (GradPart::All, true) => {
                "..m d!, d! h!, h! e!, ..m h!, ..m h!, ..m e! -> ..m d!, d! h!, h!, h! e!, e!"
            }
            (GradPart::Inputs, false) => "d! h, h e!, ..m h, ..m e! -> ..m d!",
            (GradPart::Inputs, true) => "d! h!, h! e!, ..m h!, ..m e! -> ..m d!",
            (GradPart::Weights, false) => "..m d!, h e!, ..m h, ..m h, ..m e! -> d! h, h, h e!",
            (GradPart::Weights, true) => "..m d!, h! e!, ..m h!, ..m h!, ..m e! -> d! h!, h!, h! e!, e!",
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        match self.part {
            GradPart::All => &[&[5]],
            GradPart::Inputs => &[&[3]],
            GradPart::Weights => &[&[4]],
        }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        // dx if it is computed, then weights and biases alternately.
        let first = usize::from(self.part != GradPart::Weights);
        let is_bias = |i: usize| i > first && (i - first) % 2 == 1;
        let of = |i| if self.is_wide && is_bias(i) { dtype.accumulator() } else { dtype };
        Ok((0..num_outputs).map(of).collect())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let rank = local.rank;
        let matrices = x.iter().map(|x| to_matrix(rank, x, 1)).collect::<Result<Vec<_>>>()?;
        let (x, w1, [w2, z], hidden, g) = match (self.part, &matrices[..]) {
            (GradPart::All, [x, w1, w2, z, hidden, g]) => (Some(x), Some(w1), [w2, z], Some(hidden), g),
            (GradPart::Inputs, [w1, w2, z, g]) => (None, Some(w1), [w2, z], None, g),
            (GradPart::Weights, [x, w2, z, hidden, g]) => (Some(x), None, [w2, z], Some(hidden), g),
            _ => unreachable!("the signature fixes the number of arguments"),
        };
        let z = z.contiguous(rank)?;
        let mut outputs: LocalTensors =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let mut u = LocalTensor::alloc(rank, g.dtype, &z.view.shape)?;
        let num_before = usize::from(w1.is_some());
        let (dx, params) = outputs.split_at_mut(num_before);
        // The kernel always writes the sums of u, in the dtype of the product; they are unused if only dx is computed.
        let num_hidden = z.view.shape[2];
        let mut unused = None;
        let sums = match params.get_mut(1) {
            Some(db1) if db1.dtype == g.dtype => db1,
            _ => unused.insert(LocalTensor::alloc(rank, g.dtype, &[num_hidden])?),
        };
        let shape = std::mem::replace(&mut sums.view, Strides::contiguous(&[num_hidden]).into());
        launch(rank, &MATMUL_GELU_GRAD, &[g, &transposed(w2), &z], &mut [&mut u, &mut *sums], &[])?;
        sums.view = shape;
        if let Some(db1) = params.get_mut(1).filter(|db1| db1.dtype != g.dtype) {
            sum_rows(rank, &u, db1)?;
        }
        if let (Some(w1), [dx]) = (w1, dx) {
            matmul_epilogue(
                rank,
                [&u, &transposed(w1)],
                [None, local.take_product_accumulator(0).as_ref()],
                dx,
                1,
            )?;
        }
        if let (Some(x), Some(hidden), [dw1, _, rest @ ..]) = (x, hidden, params) {
            let [sum1, sum2] = [0, 2].map(|i| local.take_product_accumulator(num_before + i));
            matmul_epilogue(rank, [&transposed(x), &u], [None, sum1.as_ref()], dw1, 1)?;
            match rest {
                [dw2, db2] => weight_and_bias_grads(rank, [hidden, g], sum2.as_ref(), dw2, db2, 1)?,
                [dw2] => matmul_epilogue(rank, [&transposed(hidden), g], [None, sum2.as_ref()], dw2, 1)?,
                _ => unreachable!("a layer has three or four parameters"),
            }
        }
        Ok(outputs)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let case = |has_last_bias, has_residual, shapes: &[&[usize]]| {
        let op = Rc::new(Mlp { has_first_bias: true, has_last_bias, has_residual });
        Case::new(op, shapes.iter().map(|shape| real(shape)).collect())
    };
    vec![
        case(false, false, &[&[4, 3], &[3, 5], &[5], &[5, 2]]),
        case(false, false, &[&[2, 3, 4], &[4, 3], &[3], &[3, 5]]),
        case(true, false, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[2]]),
        case(false, true, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[4, 2]]),
        case(true, true, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[2], &[4, 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use crate::op;
    use crate::ops::embedding::Embedding;
    use crate::ops::layer_norm::LayerNorm;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;
    use std::panic::Location;

    #[test]
    fn matches_saturated_units_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Beyond +-16 gelu(x) is x or 0.
            let x = Tensor::from_host(rank, &[1, 1], &[1.0f64])?;
            let w1 = Tensor::from_host(rank, &[1, 3], &[20.0f64, -20.0, 10.0])?;
            let b1 = Tensor::from_host(rank, &[3], &[10.0f64, 0.0, 10.0])?;
            let w2 = Tensor::from_host(rank, &[3, 2], &[1.0f64, 2.0, 5.0, 7.0, 0.5, 0.25])?;
            let b2 = Tensor::from_host(rank, &[2], &[-1.0f64, 1.0])?;
            let r = Tensor::from_host(rank, &[1, 2], &[0.5f64, -6.0])?;
            let y = |b2, residual| x.mlp(&w1, &b1, &w2, b2, residual).to_host::<f64>();
            assert_eq!(y(None, None)?, [40.0, 65.0]);
            assert_eq!(y(Some(&b2), None)?, [39.0, 66.0]);
            assert_eq!(y(Some(&b2), Some(&r))?, [39.5, 60.0]);
            assert_eq!(y(None, Some(&r))?, [40.5, 59.0]);
            let unbiased = x.mlp_general([&w1, &w2], [None, Some(&b2)], Some(&r), &[]);
            assert_eq!(unbiased.to_host::<f64>()?, [24.5, 37.5]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn work_estimates_match_hand_counts() {
        World::run(Mesh::single(), |rank| {
            let layout = |shape: &[usize]| Layout::invariant(rank.mesh(), DType::F32, shape);
            let volume = |op: &dyn Op, args: &[&[usize]], outputs: &[&[usize]]| {
                let [args, outputs] =
                    [args, outputs].map(|s| s.iter().map(|s| layout(s)).collect::<Vec<_>>());
                op::estimate_work(op, rank, &args.iter().collect::<Vec<_>>(), &outputs)
            };
            let of_mlp: [&[usize]; 4] = [&[2, 3, 4], &[4, 16], &[16], &[16, 5]];
            let mlp = Mlp { has_first_bias: true, has_last_bias: false, has_residual: false };
            // Six rows of 16 hidden units, each with 4 inputs and 5 outputs.
            assert_eq!(volume(&mlp, &of_mlp, &[&[2, 3, 5]]), 6 * 16 * 9, "with the visible output only");
            assert_eq!(volume(&Linear::new(1, 1), &[&[2, 3, 4], &[4, 5], &[5]], &[&[2, 3, 5]]), 6 * 4 * 5);
            let rows: [&[usize]; 2] = [&[50_000, 8], &[2, 3]];
            assert_eq!(
                volume(&Embedding, &rows, &[&[2, 3, 8]]),
                48,
                "only the selected rows of the table are read"
            );
            assert_eq!(volume(&LayerNorm { eps: 1.0 }, &[&[6, 8], &[8], &[8]], &[&[6, 8], &[6], &[6]]), 48);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn split_backward_computes_only_the_requested_cotangents() {
        World::run(Mesh::single(), |rank| {
            let real = |shape: &[usize], stream| {
                Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, shape), 1, stream, 1.0)
            };
            let (m, d, h) = (6, 64, 64);
            let inputs =
                [real(&[m, d], 0)?, real(&[d, h], 1)?, real(&[h], 2)?, real(&[h, d], 3)?, real(&[d], 4)?];
            let op = Mlp { has_first_bias: true, has_last_bias: true, has_residual: false };
            let outputs = op::apply(&op, &inputs.each_ref(), Location::caller())?;
            let g = real(&[m, d], 5)?;
            let layouts = |tensors: &[Tensor]| tensors.iter().map(|t| t.layout().clone()).collect::<Vec<_>>();
            let backward = |requested: [bool; 5]| {
                let saved = op.saved_for_backward_of(&requested);
                let only = |all: &[Tensor], which: &[usize]| -> Vec<Option<Tensor>> {
                    all.iter().enumerate().map(|(i, t)| which.contains(&i).then(|| t.clone())).collect()
                };
                let before = rank.backend().cost().flops;
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &only(&inputs, saved.inputs),
                    outputs: &only(&outputs, saved.outputs),
                    input_layouts: &layouts(&inputs),
                    output_layouts: &layouts(&outputs),
                    grads: &[Some(g.clone())],
                    needs_input_grad: &requested,
                    donated: std::cell::RefCell::default(),
                    accumulators: &[],
                });
                let values: Vec<Option<Vec<f64>>> =
                    cotangents.iter().map(|c| c.as_ref().map(|c| c.to_f64().unwrap())).collect();
                (values, rank.backend().cost().flops - before)
            };
            let (all, of_all) = backward([true; 5]);
            let (input, of_input) = backward([true, false, false, false, false]);
            let (params, of_params) = backward([false, true, true, true, true]);
            assert_eq!((&input[0], &params[1..]), (&all[0], &all[1..]), "the same bits");
            assert!(input[1..].iter().chain(&params[..1]).all(Option::is_none));
            // dx needs two of the four products, the parameters three.
            let product = 2 * (m * d * h) as u64;
            let products = [of_all, of_input, of_params].map(|flops| flops / product);
            assert_eq!(products, [4, 2, 3], "{of_all} {of_input} {of_params}, {product} in a product");
            Ok(())
        })
        .unwrap();
    }
}
