//! Layer normalization over the last dim: y = (x - mean) rstd w + b with rstd = 1 / sqrt(mean((x - mean)^2) + eps).

mod heads;

use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LeafCut, LocalTensors, Op, PlanKey, SavedForBackward,
    Vjp, common_float,
};
use shardgrad_dist::Result;
use shardgrad_kernels::op::layer_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Kernel, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

const SIGNATURE: &str = "..m d!, d!, d! -> ..m d!, ..m, ..m";

/// Layer normalization over the last dim: y = (x - mean) rstd w + b with rstd = 1 / sqrt(mean((x - mean)^2) + eps).
///
/// `..m d!, d!, d! -> ..m d!` on x, w and b of one float dtype; mean and rstd (`..m`, in the accumulator dtype) are
/// saved for backward. The last dim must not be sharded.
///
/// Gradient, with h = (x - mean) rstd and u = g w: dx = rstd (u - mean(u) - h mean(u h)), dw = the sum of g h and db =
/// the sum of g over the rows; dw and db are partial sums over the axes that shard the rows, and then in the
/// accumulator dtype. One backward kernel computes all three and adds dx to the gradient of x from its other uses, such as a
/// residual connection. For that a partial w or b is reduced first, although y is linear in both.
///
/// Source: Ba et al., arXiv 1607.06450.
#[derive(Debug)]
pub struct LayerNorm {
    /// Epsilon, added to the variance.
    pub eps: f64,
}

/// Backward of a norm: dx, then the gradients of the parameters, from the saved values and the cotangent g. One kernel computes all.
#[derive(Debug)]
pub(crate) struct NormBackward {
    pub(super) name: &'static str,
    /// The rows of x come first, g last.
    pub(super) signature: &'static str,
    /// The argument g.
    pub(super) linear_in: &'static [&'static [usize]],
    pub(super) kernel: &'static Kernel,
    /// Whether the gradients of the parameters are in the accumulator dtype.
    pub(super) is_wide: bool,
    /// Whether rows have dims after the second, tokens: heads. Canonical sums over both have a form of their own.
    pub(super) has_heads: bool,
}

/// The dtypes of a norm of one float dtype that saves statistics of rows in the accumulator dtype.
pub(super) fn norm_dtypes(inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
    let dtype = common_float(inputs)?;
    Ok((0..num_outputs).map(|i| if i == 0 { dtype } else { dtype.accumulator() }).collect())
}

/// Whether the rows of a norm of an x of `ndim` dims have dims after rows and tokens: heads.
pub(super) fn has_heads(ndim: usize) -> bool {
    ndim > 3
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<LayerNorm>(SIGNATURE))
    }

    fn num_saved(&self) -> usize {
        2
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[1, 2] }
    }

    fn accumulates_in_place(&self) -> bool {
        true
    }

    fn rounds_sums_once(&self) -> bool {
        true
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        norm_dtypes(inputs, num_outputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &x.iter().collect::<SmallVec<[_; 3]>>(), &[Scalar::Real(self.eps)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = NormBackward::of_layer_norm(cx.widens_partial_sums(1), cx.input(0).layout().ndim());
        let args = [cx.input(0), cx.input(1), cx.output(1), cx.output(2), &cx.grad(0)];
        let grads = cx.apply(&op, &args, &[cx.accumulator(0)]);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl NormBackward {
    /// dx, dw and db, linear in g, for an x of `ndim` dims.
    pub(crate) fn of_layer_norm(is_wide: bool, ndim: usize) -> NormBackward {
        NormBackward {
            name: "layer_norm_backward",
            signature: "..m d!, d!, ..m, ..m, ..m d! -> ..m d!, d!, d!",
            linear_in: &[&[4]],
            kernel: &BACKWARD,
            is_wide,
            has_heads: has_heads(ndim),
        }
    }
}

impl Op for NormBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn signature(&self) -> &str {
        self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        self.linear_in
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = inputs[0];
        let sums = if self.is_wide { dtype.accumulator() } else { dtype };
        Ok((0..num_outputs).map(|i| if i == 0 { dtype } else { sums }).collect())
    }

    fn canonical_form(&self) -> CanonicalForm {
        if self.has_heads { CanonicalForm::Own } else { CanonicalForm::Leaves }
    }

    /// Adds dx to the sum that output 0 may be added to, and rounds once.
    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        if self.has_heads
            && let Some(tree) = Context::of(local.rank).sum_tree()
        {
            return heads::backward(self.kernel, tree, local, x);
        }
        let mut inputs = local.contiguous(x)?;
        inputs.extend(local.take_accumulator(0));
        local.launch(self.kernel, &inputs.iter().collect::<SmallVec<[_; 6]>>(), &[])
    }

    fn forward_of_leaves(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        cut: &LeafCut,
    ) -> Option<Result<LocalTensors>> {
        // The kernel counts rows, of whose last dim the leaves are.
        let launch = |inputs: SmallVec<[LocalTensor; 6]>| {
            local.launch(self.kernel, &inputs.iter().collect::<SmallVec<[_; 6]>>(), &cut.leaves.scalars(1))
        };
        Some(local.contiguous(x).and_then(launch))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = || Rc::new(LayerNorm { eps: 0.5 });
    vec![
        Case::new(op(), vec![real(&[5, 8]), real(&[8]), real(&[8])]),
        Case::new(op(), vec![real(&[2, 3, 4]), real(&[4]), real(&[4])]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_a_row_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Mean 3, variance 3.5; with eps = 0.5 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, 2.0, 3.0, 6.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[4], &[10.0f64, 20.0, 30.0, 40.0])?;
            assert_eq!(x.layer_norm(&w, &b, 0.5).to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            Ok(())
        })
        .unwrap();
    }
}
