//! y = the largest, or the smallest, element over some dims, which may be split.

use super::labels::{check_dim, check_ndim, full_and_kept, misuse};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float, infer_by_signature};
use crate::piece::{Piece, launch};
use crate::redistribute::combine;
use crate::refusal::Refusal;
use crate::state::State;
use crate::tensor::Tensor;
use shardgrad_dist::{AxisSet, ReduceOp, Result};
use shardgrad_kernels::op::amax_backward::{BACKWARD, COUNT_TIES};
use shardgrad_kernels::op::reduce::{MAX, MIN};
use shardgrad_kernels::{DType, Dims, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `a b c -> a c, a c`: any float; the largest (smallest) over some dims, and how many elements equal it, which is kept for
/// the vjp. Negative infinity (infinity) over nothing; not-a-number wins.
///
/// Max has no pending form. So the op states its own rule: axes that split the reduced dims end as `=`, by all-reduces over
/// all of them inside the op. A pending x is completed before. dx = g / count where x equals y, else 0: elements that tie share
/// the cotangent equally. Where y is not a number, so is dx, as in PyTorch.
#[derive(Debug)]
pub struct Amax {
    over: Reduced,
    largest: bool,
}

/// The cotangent of x from x, y, the counts and the cotangent of y, in which it is linear.
#[derive(Debug)]
struct AmaxBackward {
    over: Reduced,
}

/// Dims that disappear although an axis may split them: what ops share that end them by all-reduces of their own.
#[derive(Clone, Debug)]
pub(super) struct Reduced {
    /// x to y and one value that is kept for the vjp.
    forward: String,
    /// x, kept values and the cotangent of y to that of x.
    backward: String,
    dims: Dims,
    /// The dims that stay, then those that are reduced.
    order: Dims,
}

/// The rule of the signature for the way back, but that the values beside x stay `=` on the axes that split what is
/// reduced: x is split there, and so is its cotangent.
pub(super) fn unsettled(inferred: Rc<Inference>, axes: AxisSet) -> Rc<Inference> {
    let mut inference = Rc::unwrap_or_clone(inferred);
    inference.steps.retain(|step| !(axes.contains(step.1) && step.2 == State::Replicate));
    if inference.steps.is_empty() {
        inference.targets.iter_mut().for_each(|target| *target = None);
    }
    Rc::new(inference)
}

impl Reduced {
    /// Some dims of a tensor of `ndim` dims, for a vjp that reads `num_kept` values beside x.
    pub(super) fn over(name: &str, ndim: usize, dims: &[usize], num_kept: usize) -> Result<Reduced> {
        let mut sorted: Dims = dims.into();
        sorted.sort_unstable();
        check_ndim(name, ndim)?;
        for &d in dims {
            check_dim(name, ndim, d)?;
        }
        if sorted.windows(2).any(|w| w[0] == w[1]) {
            return misuse(format!("{name}: a dim is named twice in {dims:?}"));
        }
        let [full, kept] = full_and_kept(ndim, &sorted);
        let stay = (0..ndim).filter(|d| !sorted.contains(d));
        Ok(Reduced {
            forward: format!("{full} -> {kept}, {kept}"),
            backward: format!("{full}{} -> {full}", format!(", {kept}").repeat(num_kept + 1)),
            order: stay.chain(sorted.iter().copied()).collect(),
            dims: sorted,
        })
    }

    pub(super) fn forward(&self) -> &str {
        &self.forward
    }

    pub(super) fn backward(&self) -> &str {
        &self.backward
    }

    /// How many dims are reduced.
    pub(super) fn count(&self) -> Scalar {
        Scalar::Int(self.dims.len() as i64)
    }

    /// The axes that split what is reduced.
    pub(super) fn axes(&self, x: &Layout) -> AxisSet {
        self.dims.iter().flat_map(|&d| x.dims()[d].axes.iter()).collect()
    }

    /// The rule of the signature, but that results are `=` on the axes that split what is reduced.
    pub(super) fn settled(&self, inferred: Rc<Inference>, x: &Layout) -> Rc<Inference> {
        let mut inference = Rc::unwrap_or_clone(inferred);
        let axes = self.axes(inference.targets[0].as_ref().unwrap_or(x));
        for output in &mut inference.outputs {
            *output =
                axes.iter().fold(output.clone(), |layout, axis| layout.with_state(axis, State::Invariant));
        }
        Rc::new(inference)
    }

    /// [`unsettled`] for the axes that split what is reduced.
    pub(super) fn unsettled(&self, inferred: Rc<Inference>, x: &Layout) -> Rc<Inference> {
        unsettled(inferred, self.axes(x))
    }

    /// x with the reduced dims last; a view.
    pub(super) fn turned(&self, x: &Piece) -> Piece {
        x.viewed(x.view.permute(&self.order))
    }

    /// x as rows one after another, and how many elements a row has.
    pub(super) fn rows(&self, local: &Local<'_>, x: &Piece) -> Result<(Piece, Scalar)> {
        let count: usize = self.dims.iter().map(|&d| x.view.shape[d]).product();
        Ok((self.turned(x).contiguous(local.rank)?, Scalar::Int(count as i64)))
    }

    /// Rows seen with the dims in the order of x.
    pub(super) fn back(&self, rows: &Piece) -> Piece {
        let mut back = Dims::from_elem(0, self.order.len());
        for (to, &from) in self.order.iter().enumerate() {
            back[from] = to;
        }
        rows.viewed(rows.view.permute(&back))
    }
}

impl Amax {
    /// The largest over some dims of a tensor of `ndim` dims, or the smallest.
    ///
    /// # Errors
    /// `Kind::Shape` if one of them is no dim, or is named twice.
    pub fn over(ndim: usize, dims: &[usize], largest: bool) -> Result<Rc<dyn Op>> {
        let name = if largest { "amax" } else { "amin" };
        Ok(Rc::new(Amax { over: Reduced::over(name, ndim, dims, 2)?, largest }))
    }
}

impl Op for Amax {
    fn name(&self) -> &'static str {
        if self.largest { "amax" } else { "amin" }
    }

    fn signature(&self) -> &str {
        self.over.forward()
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[0, 1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        Ok(self.over.settled(infer_by_signature(self, context, args, dtypes, want)?, args[0]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let (mut y, mut count) = (local.output(0)?, local.output(1)?);
        let (kernel, reduce) = if self.largest { (&MAX, ReduceOp::Max) } else { (&MIN, ReduceOp::Min) };
        launch(local.rank, kernel, &[&self.over.turned(x[0])], &mut [&mut y], &[self.over.count()])?;
        let axes = self.over.axes(&local.inputs[0]);
        let y = combine(local.rank, local.made_of(x, y), axes, reduce, local.site)?;
        let (rows, length) = self.over.rows(local, x[0])?;
        launch(local.rank, &COUNT_TIES, &[&rows, &y], &mut [&mut count], &[length])?;
        let count = combine(local.rank, local.made_of(x, count), axes, ReduceOp::Sum, local.site)?;
        Ok([y, count].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let args = [cx.input(0), cx.output(0), cx.output(1), &cx.grad(0)];
            Tensor::result(Rc::new(AmaxBackward { over: self.over.clone() }), &args)
        })
    }
}

impl Op for AmaxBackward {
    fn name(&self) -> &'static str {
        "amax_backward"
    }

    fn signature(&self) -> &str {
        self.over.backward()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        Ok(self.over.unsettled(infer_by_signature(self, context, args, dtypes, want)?, args[0]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let (rows, length) = self.over.rows(local, x[0])?;
        let values = local.contiguous(&x[1..])?;
        let mut dx = Piece::alloc(local.rank, rows.dtype, &rows.view.shape)?;
        let inputs = [&rows, &values[0], &values[1], &values[2]];
        launch(local.rank, &BACKWARD, &inputs, &mut [&mut dx], &[length])?;
        Ok([self.over.back(&dx)].into_iter().collect())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dims: &[usize], largest| {
        let op = Amax::over(shape.len(), dims, largest).expect("dims of the case");
        Case::new(op, vec![Input::real(shape)]).exact().sharing()
    };
    vec![
        case(&[5, 7], &[1], true),
        case(&[5, 4], &[0], false),
        case(&[2, 5, 3], &[1], true),
        case(&[2, 5, 3], &[0, 2], false),
        case(&[5, 3], &[0, 1], true),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduction::Reduction;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 3.0, 3.0, -4.0, -6.0, -5.0])?;
            assert_eq!(x.amax(&[1]).to_host::<f32>()?, [3.0, -4.0]);
            assert_eq!(x.amin(&[0]).to_host::<f32>()?, [-4.0, -6.0, -5.0]);
            assert_eq!(x.amax(&[0, 1]).to_host::<f32>()?, [3.0]);
            let none = Tensor::from_host::<f32>(rank, &[1, 0], &[])?;
            assert_eq!(none.amax(&[1]).to_host::<f32>()?, [f32::NEG_INFINITY]);
            assert_eq!(none.amin(&[1]).to_host::<f32>()?, [f32::INFINITY]);
            Ok(())
        })
        .unwrap();
        assert!(Amax::over(2, &[2], true).is_err() && Amax::over(2, &[1, 1], true).is_err());
    }

    #[test]
    fn those_who_tie_share_the_cotangent_wherever_they_lie() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[4@a]", rank.mesh())?;
            let x = Tensor::from_global(rank, &layout, &[7.0f64, 1.0, 7.0, 7.0])?;
            let over = Reduced::over("amax", 1, &[0], 2)?;
            let y = Tensor::results(Rc::new(Amax { over: over.clone(), largest: true }), &[&x]).remove(0);
            assert_eq!(y.layout().to_string(), "f64[]");
            let three = Tensor::full(rank, y.layout(), 3.0)?;
            let dx = Tensor::result(Rc::new(AmaxBackward { over }), &[&x, &y, &three, &three]);
            assert_eq!(dx.layout(), &layout);
            assert_eq!(dx.to_f64()?, [1.0, 0.0, 1.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
