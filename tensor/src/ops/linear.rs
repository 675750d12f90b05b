//! Linear layer: y = x w + b, optionally with a residual: y = (x w + b) + r, in one kernel where the sums are complete.

use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, Decomposition, ForwardContext, LocalTensors, NodeLeaves, Op, Operand,
    PlanKey, SavedForBackward, Vjp, common_float,
};
use crate::ops::add::Add;
use crate::ops::einsum::{self, Einsum};
use crate::ops::sum::Sum;
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::leaf_matmul::LEAF_MATMUL;
use shardgrad_kernels::op::linear::{LINEAR, LINEAR_ADD, MATMUL_ADD, MATMUL_BIAS_GRAD};
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::{DType, Dims, Scalar, Strides, SumTree};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::rc::Rc;

/// Linear layer with bias and residual in the epilogue of the product: y = (x w + b) + r.
///
/// `..m k!, k! n, n, ..m n -> ..m n` on x, w, b and r of one float dtype, where k and n may be several dims each, and b and r are
/// optional. The kernel does not take sharded k: a product over sharded k is a partial sum, to which bias and residual may be added
/// only once, after the all-reduce.
///
/// Decomposition: r + branch(out(x w) + b), with the points `out`, after the product, and `branch`, before the residual. The kernel
/// computes all of it where k is unsharded, no point changes a value, and r is sharded as the result is; x w + b where r is not. A
/// replicated r next to invariant x and w is added separately: the fusion would make the gradients of x and w partial.
///
/// Gradient: dx = g w^T, dw = x^T g, db = the sum of g over all rows, dr = g. dw and db come from one pass over g and
/// are partial sums over the axes that shard the rows; a partial db of 16-bit floats is in the accumulator dtype.
#[doc(alias = "addmm")]
#[doc(alias = "fused bias")]
#[doc(alias = "epilogue")]
#[doc(alias = "dense")]
#[derive(Clone, Debug)]
pub struct Linear {
    num_in: usize,
    num_out: usize,
    /// The first dims of the output that no mesh shards: queries, keys and values in one projection.
    num_packed: usize,
    has_bias: bool,
    has_residual: bool,
    /// Written at its first use: a cached plan needs no text.
    signature: OnceCell<String>,
}

/// Backward of [`Linear`] for its parameters: dw and db, linear in g.
#[derive(Debug)]
struct LinearParameterGrads {
    num_in: usize,
    num_out: usize,
    /// Whether db is in the accumulator dtype.
    is_wide: bool,
    /// Written at its first use: a cached plan needs no text.
    signature: OnceCell<String>,
}

impl Linear {
    /// The point after the product, before bias and residual.
    pub const OUT: usize = 0;
    /// The point after the bias, before the residual.
    pub const BRANCH: usize = 1;

    /// A layer from `num_in` to `num_out` dims, on x, w and b.
    #[must_use]
    pub fn new(num_in: usize, num_out: usize) -> Linear {
        Linear {
            num_in,
            num_out,
            num_packed: 0,
            has_bias: true,
            has_residual: false,
            signature: OnceCell::new(),
        }
    }

    /// Returns the same layer with or without a bias.
    #[must_use]
    pub fn with_bias(self, has_bias: bool) -> Linear {
        Linear { has_bias, signature: OnceCell::new(), ..self }
    }

    /// Returns the same layer with or without a residual, its last argument.
    #[must_use]
    pub fn with_residual(self, has_residual: bool) -> Linear {
        Linear { has_residual, signature: OnceCell::new(), ..self }
    }

    /// Returns the same layer, of whose output dims the first `num_packed` are never sharded, so that canonical sums over the output dims
    /// have leaves of the next one.
    #[must_use]
    pub fn with_packed_dims(self, num_packed: usize) -> Linear {
        Linear { num_packed, ..self }
    }

    /// The product alone.
    fn product(&self) -> Rc<dyn Op> {
        Rc::new(Einsum::of(self.product_signature(self.num_packed)))
    }

    /// The signature of the product, of whose output dims the first `num_packed` are never sharded; constant for usual layers.
    fn product_signature(&self, num_packed: usize) -> Cow<'static, str> {
        match (self.num_in, self.num_out, num_packed) {
            (1, 1, 0) => einsum::MATMUL.into(),
            (1, 2, 0) => "..m i0, i0 o0 o1 -> ..m o0 o1".into(),
            (1, 3, 0) => "..m i0, i0 o0 o1 o2 -> ..m o0 o1 o2".into(),
            (2, 1, 0) => "..m i0 i1, i0 i1 o0 -> ..m o0".into(),
            (num_in, num_out, num_packed) => format_product(num_in, num_out, num_packed).into(),
        }
    }

    /// Whether the product has no partial sums.
    pub(super) fn has_complete_sums(&self, x: &Layout, w: &Layout) -> bool {
        let summed =
            x.dims()[x.ndim().saturating_sub(self.num_in)..].iter().chain(w.dims().iter().take(self.num_in));
        summed.into_iter().all(|dim| dim.is_unsharded()) && x.partial().is_empty() && w.partial().is_empty()
    }

    /// Whether a residual in the epilogue of a product without partial sums is sharded as the result is, and leaves the states of
    /// the gradients of x and w unchanged.
    pub(super) fn can_add(&self, residual: &Layout, x: &Layout, w: &Layout) -> bool {
        let rows = &x.dims()[..x.ndim().saturating_sub(self.num_in)];
        let columns = w.dims().get(self.num_in..).unwrap_or_default();
        let replicate = x.replicate().union(w.replicate());
        residual.dims().split_at_checked(rows.len()) == Some((rows, columns))
            && residual.replicate().iter().all(|axis| replicate.contains(axis))
    }

    /// The decomposition, with bias and residual in the epilogue of the product where its sums are complete, as far as points permit.
    fn parts(&self, args: &[&Layout], points: &[bool], is_complete: bool) -> Option<Decomposition> {
        let (x_layout, w_layout) = (args[0], args[1]);
        let residual = self.has_residual.then(|| args.len() - 1);
        let can_add = |r: usize| {
            is_complete
                && points.iter().all(|is_identity| *is_identity)
                && self.can_add(args[r], x_layout, w_layout)
        };
        let fuses_residual = residual.is_some_and(can_add);
        let fuses_bias = self.has_bias && is_complete;
        if points.is_empty() && if self.has_residual { fuses_residual } else { fuses_bias } {
            return None;
        }
        let mut parts = Decomposition::new(points.len());
        let [x, w, bias] = [0, 1, 2].map(Operand::Arg);
        if fuses_residual {
            parts.enter(Linear::OUT);
            let all: SmallVec<[Operand; 4]> = (0..args.len()).map(Operand::Arg).collect();
            parts.apply(self.clone(), &all);
            return Some(parts);
        }
        let rows = &x_layout.extents()[..x_layout.ndim().saturating_sub(self.num_in)];
        let shape: Dims = rows.iter().chain(w_layout.extents().iter().skip(self.num_in)).copied().collect();
        let mut y = if fuses_bias {
            let layer = Linear::new(self.num_in, self.num_out).with_packed_dims(self.num_packed);
            let y = parts.apply(layer, &[x, w, bias]);
            parts.pass(y, Linear::OUT)
        } else {
            let y = parts.apply_with_points(self.product(), &[x, w], 0..0);
            let y = parts.pass(y, Linear::OUT);
            match self.has_bias {
                true => parts.apply(Add::between(&shape, args[2].extents()), &[y, bias]),
                false => y,
            }
        };
        y = parts.pass(y, Linear::BRANCH);
        if let Some(r) = residual {
            parts.apply(Add::residual(args[r].extents(), &shape), &[Operand::Arg(r), y]);
        }
        Some(parts)
    }

    /// The leaves of the first dim of k, which the product alone cuts too where the layer is one kernel ([`Op::decompose_canonical`]), for
    /// `LEAF_MATMUL`.
    fn leaf_scalars(&self, tree: SumTree, x: &Layout) -> SmallVec<[Scalar; 12]> {
        let [first, others @ ..] = &x.dims()[x.ndim() - self.num_in..] else { return SmallVec::new() };
        NodeLeaves::of_whole(tree, first).scalars(others.iter().map(|dim| dim.extent).product())
    }

    /// The cotangents where sums are canonical, with the bits of the decomposition.
    fn canonical_vjp(&self, cx: &Vjp<'_>, g: &Tensor) -> Cotangents {
        let product = |i: usize| Einsum::transpose_of(self.product_signature(self.num_packed), i);
        cx.cotangents(|i| match i {
            0 => cx.cotangent(0, product(0), &[g, cx.input(1)]),
            1 => cx.cotangent(1, product(1), &[cx.input(0), g]),
            2 if self.has_bias => {
                let num_rows = g.layout().ndim() - self.num_out;
                if num_rows == 0 {
                    g.clone()
                } else {
                    Tensor::apply_one(Sum::leading(g.layout().ndim(), num_rows), &[g])
                }
            }
            _ => g.clone(),
        })
    }

    /// The op for dw and db; `is_wide` if db is in the accumulator dtype.
    fn parameter_grads(&self, is_wide: bool) -> LinearParameterGrads {
        let &Linear { num_in, num_out, .. } = self;
        LinearParameterGrads { num_in, num_out, is_wide, signature: OnceCell::new() }
    }
}

/// ` k0 k1` for the letter `k` and two dims, each with `mark` appended.
fn labels(letter: &str, count: usize, mark: &str) -> String {
    (0..count).map(|i| format!(" {letter}{i}{mark}")).collect()
}

/// The signature of the product of a layer, of whose output dims the first `num_packed` are never sharded.
fn format_product(num_in: usize, num_out: usize, num_packed: usize) -> String {
    let num_packed = num_packed.min(num_out);
    let (i, packed) = (labels("i", num_in, ""), labels("p", num_packed, "!"));
    let o = format!("{packed}{}", labels("o", num_out - num_packed, ""));
    format!("..m{i},{i}{o} -> ..m{o}")
}

/// A tensor as one matrix whose columns are the last `num_columns` dims; copied if the strides do not allow a view.
pub(super) fn to_matrix(rank: &Rank, x: &LocalTensor, num_columns: usize) -> Result<LocalTensor> {
    let at = x.view.ndim() - num_columns;
    let extent = |dims: &[usize]| dims.iter().product::<usize>();
    let shape = [1, extent(&x.view.shape[..at]), extent(&x.view.shape[at..])];
    match x.view.reshape(&shape) {
        Some(view) => Ok(x.with_view(view)),
        None => Ok(x.contiguous(rank)?.with_view(Strides::contiguous(&shape))),
    }
}

/// A view of a matrix, transposed.
pub(super) fn transposed(x: &LocalTensor) -> LocalTensor {
    x.with_view(x.view.permute(&[0, 2, 1]))
}

/// Calls `call` with a contiguous output viewed as one matrix whose columns are the last `num_columns` dims.
pub(super) fn with_matrix_view<T>(
    out: &mut LocalTensor,
    num_columns: usize,
    call: impl FnOnce(&mut LocalTensor) -> T,
) -> T {
    let view = out.view.clone();
    let at = view.ndim() - num_columns;
    let extent = |dims: &[usize]| dims.iter().product::<usize>();
    out.view = Strides::contiguous(&[1, extent(&view.shape[..at]), extent(&view.shape[at..])]).into();
    let result = call(out);
    out.view = view;
    result
}

/// A tensor as one contiguous dim.
pub(super) fn to_vector(rank: &Rank, x: &LocalTensor) -> Result<LocalTensor> {
    let x = x.contiguous(rank)?;
    Ok(x.with_view(Strides::contiguous(&[x.numel()]).at(x.view.offset)))
}

/// Product with epilogue: y = a b, plus a bias, plus a residual, whose columns are the last `num_columns` dims.
pub(super) fn matmul_epilogue(
    rank: &Rank,
    factors: [&LocalTensor; 2],
    [bias, residual]: [Option<&LocalTensor>; 2],
    y: &mut LocalTensor,
    num_columns: usize,
) -> Result<()> {
    let [a, b] = factors;
    let bias = bias.map(|x| to_vector(rank, x)).transpose()?;
    let residual = residual.map(|x| to_matrix(rank, &x.contiguous(rank)?, num_columns)).transpose()?;
    with_matrix_view(y, num_columns, |y| match (&bias, &residual) {
        (None, None) => launch(rank, &BATCHED_MATMUL, &[a, b], &mut [y], &[]),
        (Some(bias), None) => launch(rank, &LINEAR, &[a, b, bias], &mut [y], &[]),
        (None, Some(r)) => launch(rank, &MATMUL_ADD, &[a, b, r], &mut [y], &[]),
        (Some(bias), Some(r)) => launch(rank, &LINEAR_ADD, &[a, b, bias, r], &mut [y], &[]),
    })
}

/// [`matmul_epilogue`] where sums are canonical: over leaves of k ([`NodeLeaves::scalars`]).
fn leaf_matmul_epilogue(
    rank: &Rank,
    [a, b]: [&LocalTensor; 2],
    [bias, residual]: [Option<&LocalTensor>; 2],
    y: &mut LocalTensor,
    num_columns: usize,
    leaves: &[Scalar],
) -> Result<()> {
    // The other summed dim has extent 1.
    let with_unit_dim = |x: &LocalTensor, d: usize| {
        let mut view = x.view.geometry();
        view.shape.insert(d, 1);
        view.strides.insert(d, 0);
        x.with_view(Strides::from(view))
    };
    let (a, b) = (with_unit_dim(a, 2), with_unit_dim(b, 1));
    let bias = bias.map(|x| to_vector(rank, x)).transpose()?;
    let residual = residual.map(|x| to_matrix(rank, &x.contiguous(rank)?, num_columns)).transpose()?;
    let inputs: SmallVec<[&LocalTensor; 4]> = [&a, &b].into_iter().chain(&bias).chain(&residual).collect();
    with_matrix_view(y, num_columns, |y| launch(rank, &LEAF_MATMUL, &inputs, &mut [y], leaves))
}

/// Writes dw = x^T g, plus `sum` if there is one, and db = the sum of the rows of g, in the dtype of g or its accumulator dtype.
pub(super) fn weight_and_bias_grads(
    rank: &Rank,
    [x, g]: [&LocalTensor; 2],
    sum: Option<&LocalTensor>,
    dw: &mut LocalTensor,
    db: &mut LocalTensor,
    num_out: usize,
) -> Result<()> {
    let x = transposed(x);
    // The fused kernel for both cannot accumulate, and writes both in the dtype of g.
    if sum.is_some() || db.dtype != g.dtype {
        matmul_epilogue(rank, [&x, g], [None, sum], dw, num_out)?;
        return sum_rows(rank, g, db);
    }
    let shape = db.view.clone();
    db.view = Strides::contiguous(&[shape.numel()]).into();
    with_matrix_view(dw, num_out, |dw| launch(rank, &MATMUL_BIAS_GRAD, &[&x, g], &mut [dw, &mut *db], &[]))?;
    db.view = shape;
    Ok(())
}

/// Writes the sum of the rows of a matrix, in its dtype or its accumulator dtype.
pub(super) fn sum_rows(rank: &Rank, g: &LocalTensor, sums: &mut LocalTensor) -> Result<()> {
    let line = Strides::contiguous(&[sums.numel()]).into();
    let shape = std::mem::replace(&mut sums.view, line);
    let columns = g.with_view(g.view.permute(&[2, 0, 1]));
    launch(rank, &SUM, &[&columns], &mut [&mut *sums], &[Scalar::Int(2), Scalar::Real(1.0)])?;
    sums.view = shape;
    Ok(())
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn signature(&self) -> &str {
        self.signature.get_or_init(|| {
            let (k, n) = (labels("k", self.num_in, "!"), labels("n", self.num_out, ""));
            let bias = if self.has_bias { format!(",{n}") } else { String::new() };
            let residual = if self.has_residual { format!(", ..m{n}") } else { String::new() };
            format!("..m{k},{k}{n}{bias}{residual} -> ..m{n}")
        })
    }

    fn plan_key(&self) -> Option<PlanKey> {
        let flags = usize::from(self.has_bias) + 2 * usize::from(self.has_residual);
        Some(PlanKey::of_fields::<Linear>(self.num_in * 4 + flags, self.num_out))
    }

    fn decompose(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        self.parts(args, points, self.has_complete_sums(args[0], args[1]))
    }

    /// Without rows the product alone cuts the second dim of k, and without k there are no leaves: neither is one kernel.
    fn decompose_canonical(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        let cuts_first = self.num_in == 1 || self.num_in > 0 && args[0].ndim() > self.num_in;
        self.parts(args, points, cuts_first && self.has_complete_sums(args[0], args[1]))
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        // The cotangent of the residual is g itself and needs no saved value.
        SavedForBackward::for_product(&needs_input_grad[..2 + usize::from(self.has_bias)])
    }

    fn estimate_work(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let rank = local.rank;
        let (a, w) = (to_matrix(rank, x[0], self.num_in)?, to_matrix(rank, x[1], self.num_out)?);
        let (b, residual) = x[2..].split_at(usize::from(self.has_bias));
        let mut y = local.output(0)?;
        if let Some(tree) = Context::of(rank).sum_tree() {
            let addends = [b, residual].map(|x| x.first().copied());
            let leaves = self.leaf_scalars(tree, &local.inputs[0]);
            leaf_matmul_epilogue(rank, [&a, &w], addends, &mut y, self.num_out, &leaves)?;
            return Ok(smallvec![y]);
        }
        matmul_epilogue(rank, [&a, &w], [b, residual].map(|x| x.first().copied()), &mut y, self.num_out)?;
        Ok(smallvec![y])
    }

    fn accumulates_in_place(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        if Context::of(cx.rank).sum_tree().is_some() {
            return self.canonical_vjp(cx, &g);
        }
        let parameters = (self.has_bias && (cx.needs_input_grad[1] || cx.needs_input_grad[2])).then(|| {
            let grads = self.parameter_grads(!cx.input_layouts[2].replicate().is_empty());
            cx.apply(&grads, &[cx.input(0), &g], &[cx.accumulator(1)])
        });
        let product = |i: usize| Einsum::transpose_of(self.product_signature(0), i);
        cx.cotangents(|i| match (i, &parameters) {
            (0, _) => cx.cotangent(0, product(0), &[&g, cx.input(1)]),
            (1 | 2, Some(both)) => both[i - 1].clone(),
            (1, None) => cx.cotangent(1, product(1), &[cx.input(0), &g]),
            _ => g.clone(),
        })
    }
}

impl Op for LinearParameterGrads {
    fn name(&self) -> &'static str {
        "linear_grads"
    }

    fn signature(&self) -> &str {
        self.signature.get_or_init(|| {
            let (k, n) = (labels("k", self.num_in, "!"), labels("n", self.num_out, ""));
            format!("..m{k}, ..m{n} ->{k}{n},{n}")
        })
    }

    fn plan_key(&self) -> Option<PlanKey> {
        let first = 2 * self.num_in + usize::from(self.is_wide);
        Some(PlanKey::of_fields::<LinearParameterGrads>(first, self.num_out))
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, if self.is_wide { dtype.accumulator() } else { dtype }]))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let rank = local.rank;
        let (a, g) = (to_matrix(rank, x[0], self.num_in)?, to_matrix(rank, x[1], self.num_out)?);
        let (mut dw, mut db) = (local.output(0)?, local.output(1)?);
        weight_and_bias_grads(
            rank,
            [&a, &g],
            local.take_product_accumulator(0).as_ref(),
            &mut dw,
            &mut db,
            self.num_out,
        )?;
        Ok(smallvec![dw, db])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let case = |num_in, num_out, shapes: [&[usize]; 3]| {
        Case::new(Rc::new(Linear::new(num_in, num_out)), shapes.map(real).to_vec()).exact()
    };
    let residual = |num_in, num_out, shapes: &[&[usize]]| {
        let op = Rc::new(Linear::new(num_in, num_out).with_bias(shapes.len() == 4).with_residual(true));
        Case::new(op, shapes.iter().map(|shape| real(shape)).collect()).exact()
    };
    vec![
        case(1, 1, [&[5, 7], &[7, 4], &[4]]),
        case(1, 2, [&[2, 3, 5], &[5, 3, 2], &[3, 2]]),
        case(2, 1, [&[2, 3, 2], &[3, 2, 4], &[4]]),
        residual(1, 1, &[&[5, 7], &[7, 4], &[4], &[5, 4]]),
        residual(2, 1, &[&[2, 3, 2], &[3, 2, 4], &[4], &[2, 4]]),
        residual(1, 1, &[&[5, 7], &[7, 4], &[5, 4]]),
        residual(1, 2, &[&[3, 5], &[5, 3, 2], &[3, 3, 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn canonical_sums_of_a_layer_are_those_of_the_product_and_an_addition() {
        let numbers = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| (((i * 7919 + seed * 104_729) % 1009) as f32 - 504.0) / 37.0).collect()
        };
        World::run(Mesh::single(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(Some(SumTree::new(8)));
            for (num_in, num_out, x, w) in [
                (1, 1, &[5, 70][..], &[70, 4][..]),
                (1, 2, &[2, 3, 70], &[70, 3, 2]),
                (2, 1, &[3, 13, 7], &[13, 7, 4]),
                // No rows.
                (1, 1, &[70], &[70, 4]),
                (2, 1, &[13, 7], &[13, 7, 4]),
                (3, 2, &[5, 13, 7], &[5, 13, 7, 2, 2]),
                (0, 1, &[5], &[4]),
            ] {
                for dtype in DType::FLOATS {
                    let tensor = |shape: &[usize], seed: usize| {
                        Tensor::from_host(rank, shape, &numbers(shape.iter().product(), seed))?
                            .into_dtype(dtype)
                    };
                    let layer = Linear::new(num_in, num_out);
                    let (x, w, b) = (tensor(x, 0)?, tensor(w, 1)?, tensor(&w[num_in..], 2)?);
                    let product = Tensor::apply_one(layer.product(), &[&x, &w]);
                    let add = Add::between(product.layout().extents(), b.layout().extents());
                    let expected = Tensor::apply_one(add, &[&product, &b]);
                    let found = Tensor::apply_one(layer, &[&x, &w, &b]);
                    let shapes = [x.layout().shape(), w.layout().shape()];
                    assert_eq!(found.to_f64()?, expected.to_f64()?, "{dtype}, {shapes:?}");
                }
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn constant_signatures_of_products_are_those_of_their_dims() {
        for (num_in, num_out) in [(1, 2), (1, 3), (2, 1)] {
            let signature = Linear::new(num_in, num_out).product_signature(0);
            assert_eq!(signature, format_product(num_in, num_out, 0));
            assert!(matches!(signature, Cow::Borrowed(_)) && Einsum::of(signature).plan_key().is_some());
        }
    }

    #[test]
    fn matches_layers_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2, 3], &[1.0f64, 0.0, -1.0, 2.0, 1.0, 0.0])?;
            let b = Tensor::from_host(rank, &[3], &[10.0f64, 20.0, 30.0])?;
            let y = |bias, residual| x.linear(&w, bias, residual).to_host::<f64>();
            assert_eq!(y(Some(&b), None)?, [15.0, 22.0, 29.0, 21.0, 24.0, 27.0]);
            let r = Tensor::from_host(rank, &[2, 3], &[1.0f64, 2.0, 3.0, -1.0, -2.0, -3.0])?;
            assert_eq!(y(Some(&b), Some(&r))?, [16.0, 24.0, 32.0, 20.0, 22.0, 24.0]);
            assert_eq!(y(None, Some(&r))?, [6.0, 4.0, 2.0, 10.0, 2.0, -6.0]);
            assert_eq!(y(None, None)?, [5.0, 2.0, -1.0, 11.0, 4.0, -3.0]);
            Ok(())
        })
        .unwrap();
    }
}
