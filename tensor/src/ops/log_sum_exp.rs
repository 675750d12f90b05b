//! Logarithm of the sum of exponentials over some dims, which may be sharded: y = ln(sum of exp(x)), finite for every
//! finite x.

use super::reduced_dims::{ReducedDims, ReducedDimsBackward};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float,
    sum_ranges,
};
use crate::tensor::Tensor;
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{ReduceOp, Result};
use shardgrad_kernels::op::log_sum_exp::{BACKWARD, FINISH, SUM_EXP};
use shardgrad_kernels::op::reduce::MAX;
use shardgrad_kernels::{DType, SumTree};
use smallvec::SmallVec;
use std::rc::Rc;

/// Logarithm of the sum of exponentials over some dims: y = ln(sum of exp(x)); `a b c -> a c, a c`.
///
/// Any float dtype. The second output, saved for backward, is y before it is rounded to the dtype of x. -infinity over
/// no element and where every x is -infinity (dx is 0 there). Infinity where an x is infinity.
///
/// The op has its own inference rule, as [`Amax`](super::amax::Amax): over mesh axes that shard the reduced dims it
/// runs two all-reduces, of the maxima and of the sums, and the results are invariant (`=`) on these axes.
///
/// Gradient: dx = g exp(x - y); NaN where x is infinity.
#[doc(alias = "logsumexp")]
#[derive(Debug)]
pub struct LogSumExp {
    over: ReducedDims,
}

/// Backward of [`LogSumExp`] from x, y and the cotangent of y.
fn backward(over: ReducedDims) -> ReducedDimsBackward {
    ReducedDimsBackward { name: "log_sum_exp_backward", over, linear_in: &[&[2]], kernel: &BACKWARD }
}

impl LogSumExp {
    /// The op over some dims of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if a dim is out of range or named twice.
    pub fn over(ndim: usize, dims: &[usize]) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(LogSumExp { over: ReducedDims::over("log_sum_exp", ndim, dims, 1)? }))
    }
}

impl LogSumExp {
    /// The sums of this rank, over leaves of the last reduced dim.
    fn canonical_sum(
        &self,
        tree: SumTree,
        local: &ForwardContext<'_>,
        x: &LocalTensor,
        max: &LocalTensor,
    ) -> Result<LocalTensor> {
        let sum_exp = |x: &LocalTensor| {
            let (mut sum, (rows, length)) = (local.output(1)?, self.over.rows(local, x)?);
            launch(local.rank, &SUM_EXP, &[&rows, max], &mut [&mut sum], &[length])?;
            Ok(sum)
        };
        let Some(dim) = self.over.last_dim(&local.inputs[0])? else { return sum_exp(x) };
        sum_ranges(local, x, (tree, &local.inputs[0].dims()[dim]), max, |range| {
            sum_exp(&x.with_view(x.view.narrow(dim, range.start, range.end)))
        })
    }
}

impl Op for LogSumExp {
    fn name(&self) -> &'static str {
        "log_sum_exp"
    }

    fn signature(&self) -> &str {
        self.over.forward()
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        self.over.with_invariant_outputs(inferred, args[0])
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (mut max, mut sum, mut wide) = (local.output(1)?, local.output(1)?, local.output(1)?);
        launch(local.rank, &MAX, &[&self.over.reduced_last(x[0])], &mut [&mut max], &[self.over.num_dims()])?;
        let axes = self.over.axes(&local.inputs[0]);
        let max = all_reduce(local.rank, local.with_lineage(x, max), axes, ReduceOp::Max, local.site)?;
        match Context::of(local.rank).sum_tree() {
            None => {
                let (rows, length) = self.over.rows(local, x[0])?;
                launch(local.rank, &SUM_EXP, &[&rows, &max], &mut [&mut sum], &[length])?;
            }
            Some(tree) => sum = self.canonical_sum(tree, local, x[0], &max)?,
        }
        let sum = all_reduce(local.rank, local.with_lineage(x, sum), axes, ReduceOp::Sum, local.site)?;
        launch(local.rank, &FINISH, &[&max, &sum], &mut [&mut wide], &[])?;
        let y = if x[0].dtype == wide.dtype { wide.clone() } else { wide.to_dtype(local.rank, x[0].dtype)? };
        Ok([y, wide].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            Tensor::apply_one(backward(self.over.clone()), &[cx.input(0), cx.output(1), &cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dims: &[usize], centre: f64| {
        let op = LogSumExp::over(shape.len(), dims).expect("dims of the case");
        Case::new(op, vec![Input::offset(shape, centre)])
    };
    vec![
        case(&[5, 7], &[1], 0.0),
        case(&[5, 4], &[0], 0.0),
        case(&[2, 5, 3], &[1], 0.0),
        case(&[5, 3], &[0, 1], 0.0),
        case(&[5, 7], &[1], 1000.0),
        case(&[5, 3], &[0, 1], -1000.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::reduction::Reduction;
    use approx::{assert_abs_diff_eq, assert_relative_eq};
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let (inf, none) = (f64::INFINITY, f64::NEG_INFINITY);
            let x = [0.0, 3f64.ln(), 800.0, 800.0, none, none, none, inf];
            let x = Tensor::from_host(rank, &[4, 2], &x)?;
            let y = x.log_sum_exp(&[1]);
            let right = [4f64.ln(), 800.0 + 2f64.ln(), none, inf];
            assert_relative_eq!(y.to_f64()?[..], right[..], epsilon = 1e-12);
            let over = ReducedDims::over("log_sum_exp", 2, &[1], 1)?;
            let ones = Tensor::full(rank, y.layout(), 1.0)?;
            let dx = Tensor::apply_one(backward(over), &[&x, &y, &ones]).to_f64()?;
            let right = [0.25, 0.75, 0.5, 0.5, 0.0, 0.0, 0.0];
            assert_abs_diff_eq!(dx[..7], right[..], epsilon = 1e-12);
            assert!(dx.len() == 8 && dx[7].is_nan(), "{dx:?}");
            Ok(())
        })
        .unwrap();
    }
}
