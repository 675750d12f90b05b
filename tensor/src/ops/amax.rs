//! Maximum or minimum over some dims, which may be sharded.

use super::reduced_dims::{ReducedDims, ReducedDimsBackward};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float,
};
use crate::tensor::Tensor;
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{ReduceOp, Result};
use shardgrad_kernels::DType;
use shardgrad_kernels::op::amax_backward::{BACKWARD, COUNT_TIES};
use shardgrad_kernels::op::reduce::{MAX, MIN};
use smallvec::SmallVec;
use std::rc::Rc;

/// Maximum (or minimum) over some dims, which may be sharded: `a b c -> a c, a c`.
///
/// Any float dtype. The second output, saved for backward, counts the elements that equal the maximum. The maximum over
/// no element is -infinity (the minimum infinity); NaN if an element is NaN.
///
/// A maximum has no partial form, so the op has its own inference rule: over mesh axes that shard the reduced dims it
/// runs all-reduces inside the op, and the results are invariant (`=`) on these axes. A partial x is reduced first.
///
/// Gradient: dx = g / count where x equals y, else 0: tied elements share the cotangent equally. NaN where y is NaN, as
/// in PyTorch.
#[doc(alias = "max")]
#[doc(alias = "min")]
#[doc(alias = "amin")]
#[doc(alias = "reduce_max")]
#[derive(Debug)]
pub struct Amax {
    over: ReducedDims,
    is_max: bool,
}

/// Backward of [`Amax`] from x, y, the counts and the cotangent of y.
fn backward(over: ReducedDims) -> ReducedDimsBackward {
    ReducedDimsBackward { name: "amax_backward", over, linear_in: &[&[3]], kernel: &BACKWARD }
}

impl Amax {
    /// The maximum (`is_max`) or minimum over some dims of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if a dim is out of range or named twice.
    pub fn over(ndim: usize, dims: &[usize], is_max: bool) -> Result<Rc<dyn Op>> {
        let name = if is_max { "amax" } else { "amin" };
        Ok(Rc::new(Amax { over: ReducedDims::over(name, ndim, dims, 2)?, is_max }))
    }
}

impl Op for Amax {
    fn name(&self) -> &'static str {
        if self.is_max { "amax" } else { "amin" }
    }

    fn signature(&self) -> &str {
        self.over.forward()
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[0, 1] }
    }

    // A choice among elements has one result in any order.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        self.over.with_invariant_outputs(inferred, args[0])
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (mut y, mut count) = (local.output(0)?, local.output(1)?);
        let (kernel, reduce) = if self.is_max { (&MAX, ReduceOp::Max) } else { (&MIN, ReduceOp::Min) };
        launch(local.rank, kernel, &[&self.over.reduced_last(x[0])], &mut [&mut y], &[self.over.num_dims()])?;
        let axes = self.over.axes(&local.inputs[0]);
        let y = all_reduce(local.rank, local.with_lineage(x, y), axes, reduce, local.site)?;
        let (rows, length) = self.over.rows(local, x[0])?;
        launch(local.rank, &COUNT_TIES, &[&rows, &y], &mut [&mut count], &[length])?;
        let count = all_reduce(local.rank, local.with_lineage(x, count), axes, ReduceOp::Sum, local.site)?;
        Ok([y, count].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let args = [cx.input(0), cx.output(0), cx.output(1), &cx.grad(0)];
            Tensor::apply_one(backward(self.over.clone()), &args)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dims: &[usize], is_max| {
        let op = Amax::over(shape.len(), dims, is_max).expect("dims of the case");
        Case::new(op, vec![Input::real(shape)]).exact().tied()
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
    use crate::methods::reduction::Reduction;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 3.0, 3.0, -4.0, -6.0, -5.0])?;
            assert_eq!(x.amax(&[1]).to_host::<f32>()?, [3.0, -4.0]);
            assert_eq!(x.amin(&[0]).to_host::<f32>()?, [-4.0, -6.0, -5.0]);
            assert_eq!(x.amax(&[0, 1]).to_host::<f32>()?, [3.0]);
            let empty = Tensor::from_host::<f32>(rank, &[1, 0], &[])?;
            assert_eq!(empty.amax(&[1]).to_host::<f32>()?, [f32::NEG_INFINITY]);
            assert_eq!(empty.amin(&[1]).to_host::<f32>()?, [f32::INFINITY]);
            Ok(())
        })
        .unwrap();
        assert!(Amax::over(2, &[2], true).is_err() && Amax::over(2, &[1, 1], true).is_err());
    }

    #[test]
    fn ties_share_the_cotangent_across_shards() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[4@a]", rank.mesh())?;
            let x = Tensor::from_global(rank, &layout, &[7.0f64, 1.0, 7.0, 7.0])?;
            let over = ReducedDims::over("amax", 1, &[0], 2)?;
            let y = Tensor::apply(Amax { over: over.clone(), is_max: true }, &[&x]).remove(0);
            assert_eq!(y.layout().to_string(), "f64[]");
            let three = Tensor::full(rank, y.layout(), 3.0)?;
            let dx = Tensor::apply_one(backward(over), &[&x, &y, &three, &three]);
            assert_eq!(dx.layout(), &layout);
            assert_eq!(dx.to_f64()?, [1.0, 0.0, 1.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
