//! lse = ln(sum_j exp(z_j)) and picked = z_target over the last dim, which may be split: what a cross-entropy is made of. The
//! loss per row is lse - picked.

use super::amax::unsettled;
use super::embedding::check_index;
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{
    Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float, infer_by_signature, unwind,
};
use crate::piece::{Piece, launch};
use crate::redistribute::combine;
use crate::refusal::Refusal;
use crate::state::State;
use crate::tensor::Tensor;
use shardgrad_dist::{AxisSet, ReduceOp, Result};
use shardgrad_kernels::op::cross_entropy::{BACKWARD, TERMS};
use shardgrad_kernels::op::log_sum_exp::{FINISH, SUM_EXP};
use shardgrad_kernels::{DType, Scalar};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// `..m [v], ..m -> ..m, ..m` on logits z (any float) and targets (i64, each in 0..v); both results are in the accumulator
/// of z. z is read once.
///
/// Differentiable in z: dz_j = exp(z_j - lse) dlse + (dpicked where j is the target). Picked is pending over the axes that
/// split v. Logarithms have no pending form, so there the op states its own rule: lse ends as `=`, by two all-reduces of one
/// number a row over all of those axes inside the op, of the largest lse of a shard and of the sum of exp(lse - largest). A
/// pending z is completed before.
#[derive(Debug)]
pub struct CrossEntropyTerms;

/// The cotangent of z, linear in those of the two results jointly. It is made once, in the place of z.
struct CrossEntropyBackward {
    z: Cell<Option<Piece>>,
}

impl fmt::Debug for CrossEntropyBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CrossEntropyBackward")
    }
}

/// Where this rank's columns begin, and how many there are in all.
fn columns(local: &Local<'_>) -> [Scalar; 2] {
    let (count, range) = local.label("v");
    [Scalar::Int(range.start as i64), Scalar::Int(count as i64)]
}

/// The axes that split v.
fn axes(inference: &Inference) -> AxisSet {
    inference.label_dim("v").expect("the signature has the label v").axes.iter().collect()
}

impl Op for CrossEntropyTerms {
    fn name(&self) -> &'static str {
        "cross_entropy_terms"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m -> ..m, ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[0] }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        Ok(SmallVec::from_elem(common_float(&inputs[..1])?.accumulator(), num_outputs))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let mut inference = Rc::unwrap_or_clone(infer_by_signature(self, context, args, dtypes, want)?);
        let split = axes(&inference);
        let lse = &mut inference.outputs[0];
        *lse = split.iter().fold(lse.clone(), |layout, axis| layout.with_state(axis, State::Invariant));
        Ok(Rc::new(inference))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        let mut terms = local.launch(&TERMS, &[&x[0], &x[1]], &columns(local))?;
        let axes = axes(local.inference);
        if axes.is_empty() {
            return Ok(terms);
        }
        let (mut sum, mut lse) = (local.output(0)?, local.output(0)?);
        let of = [&x[0], &x[1]];
        let largest =
            combine(local.rank, local.made_of(&of, terms[0].clone()), axes, ReduceOp::Max, local.site)?;
        // Rows of one element each.
        launch(local.rank, &SUM_EXP, &[&terms[0], &largest], &mut [&mut sum], &[Scalar::Int(1)])?;
        let sum = combine(local.rank, local.made_of(&of, sum), axes, ReduceOp::Sum, local.site)?;
        launch(local.rank, &FINISH, &[&largest, &sum], &mut [&mut lse], &[])?;
        terms[0] = lse;
        Ok(terms)
    }

    fn consumes(&self) -> Option<usize> {
        Some(0)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let z = cx.take(0);
            // Who watches ops looks at what they were given.
            let is_seen = Context::of(cx.rank).is_watched();
            let shown = if is_seen { z.clone() } else { Tensor::outline(cx.rank, z.layout()) };
            let op = CrossEntropyBackward { z: Cell::new(Some(unwind(z.into_own_piece()))) };
            let args = [&shown, cx.input(1), cx.output(0), &cx.grad(0), &cx.grad(1)];
            Tensor::results(Rc::new(op), &args).remove(0)
        })
    }
}

impl Op for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy_backward"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m, ..m, ..m, ..m -> ..m [v]"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3, 4]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, false, true, true]
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
        let inference = infer_by_signature(self, context, args, dtypes, want)?;
        let split = axes(&inference);
        Ok(unsettled(inference, split))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(&x[1..])?;
        let mut z = self.z.take().expect("bug: the cotangent of logits is made once");
        let inputs = [&x[0], &x[1], &x[2], &x[3]];
        launch(local.rank, &BACKWARD, &inputs, &mut [&mut z], &columns(local))?;
        Ok(smallvec![z])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(CrossEntropyTerms);
    let case = |rows: &[usize], v: usize, centre: f64| {
        let logits: Vec<usize> = rows.iter().copied().chain([v]).collect();
        Case::new(op.clone(), vec![Input::offset(&logits, centre), Input::index(rows, v)])
    };
    vec![case(&[5], 7, 0.0), case(&[2, 3], 4, 0.0), case(&[5], 7, 1000.0), case(&[5], 7, -1000.0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};
    use std::cell::RefCell;

    #[test]
    fn a_row_by_hand() {
        World::run(Mesh::single(), |rank| {
            let z = Tensor::from_host(rank, &[1, 3], &[2f64.ln(), 0.0, 4f64.ln()])?;
            let target = Tensor::from_host(rank, &[1], &[2i64])?;
            let (lse, picked) = z.cross_entropy_terms(&target);
            assert!((lse.item()? - 7f64.ln()).abs() < 1e-15);
            assert_eq!(picked.item()?, 4f64.ln());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn the_cotangent_takes_the_place_of_logits_that_nobody_holds() {
        World::run(Mesh::single(), |rank| {
            let z = || Tensor::from_host(rank, &[2, 3], &[0.0, 1.0, 2.0, -1.0, 3.0, 0.5]);
            let target = Tensor::from_host(rank, &[2], &[2i64, 0])?;
            let ones = Tensor::from_host(rank, &[2], &[1.0, -2.0])?;
            let (logits, lse) = (z()?.layout().clone(), z()?.cross_entropy_terms(&target).0);
            let dual = ones.layout().clone();
            let back = |kept: Option<Tensor>, taken: Option<Tensor>| {
                let cotangents = CrossEntropyTerms.vjp(&Vjp {
                    rank,
                    inputs: &[kept, Some(target.clone())],
                    outputs: &[Some(lse.clone()), None],
                    input_layouts: &[logits.clone(), target.layout().clone()],
                    output_layouts: &[dual.clone(), dual.clone()],
                    grads: &[Some(ones.clone()), Some(ones.clone())],
                    wanted: &[true, false],
                    taken: RefCell::new(taken),
                    sums: &[],
                });
                cotangents.into_iter().next().flatten().expect("it is wanted")
            };
            let owned = z()?;
            let place = owned.piece().buffer.address();
            let made = back(None, Some(owned));
            assert_eq!(made.piece().buffer.address(), place, "nobody else holds the logits");
            let held = z()?;
            let view = Tensor::assemble(rank, logits.clone(), held.piece().clone());
            for other in
                [back(None, Some(held.clone())), back(Some(held.clone()), None), back(None, Some(view))]
            {
                assert_ne!(other.piece().buffer.address(), held.piece().buffer.address());
                assert_eq!(other.to_host::<f64>()?, made.to_host::<f64>()?);
            }
            assert_eq!(held.to_host::<f64>()?, z()?.to_host::<f64>()?, "what is held stays");
            Ok(())
        })
        .unwrap();
    }
}
