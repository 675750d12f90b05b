//! One call of an op, forward and backward: all that a tape does with it.

use super::Global;
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{self, Cotangents, Offer, Op, Vjp, differentiable_args};
use crate::ops::redistribute::Redistribute;
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// Inferred and run forward and, where there is something to differentiate, backward.
pub(super) struct Run {
    pub(super) inference: Rc<Inference>,
    pub(super) outputs: SmallVec<[Tensor; 2]>,
    /// In the duals of the arguments' layouts after their steps.
    pub(super) cotangents: Option<Cotangents>,
}

/// One call on tensors that lie as they may.
pub(super) struct Call<'a> {
    pub(super) op: &'a Rc<dyn Op>,
    pub(super) rank: &'a Rank,
    /// Whether cotangents are given on views with gaps.
    pub(super) is_strided: bool,
    pub(super) site: &'static Location<'static>,
}

impl Call<'_> {
    /// Everything that a tape does with one op; `seeds` has the cotangents of the visible outputs, `None` for one that
    /// has no use.
    pub(super) fn run(
        &self,
        args: &[Tensor],
        seeds: &[Option<Global>],
        wanted: Option<&[bool]>,
    ) -> Result<Run> {
        let layouts: Vec<&Layout> = args.iter().map(Tensor::layout).collect();
        let context = Context::of(self.rank);
        let inference = op::plan(&**self.op, (self.rank, context), &layouts, &[], self.site)?;
        let mut moved = Vec::new();
        for (x, target) in args.iter().zip(&inference.targets) {
            moved.push(match target {
                None => x.clone(),
                Some(to) => {
                    let op = Redistribute::between(self.rank, x.layout(), to)?;
                    op::apply(&*op, &[x], &[], self.site)?.remove(0)
                }
            });
        }
        let given: Vec<&Piece> = moved.iter().map(Tensor::piece).collect();
        let outputs = op::run(&**self.op, &given, &inference, (self.rank, context), self.site)?;
        let differentiable = differentiable_args(&**self.op, &layouts);
        let visible = outputs.len() - self.op.num_saved();
        let floats = outputs[..visible].iter().any(|t| t.dtype().is_float());
        if !floats || !differentiable.iter().any(|d| *d) {
            return Ok(Run { inference, outputs, cotangents: None });
        }
        let grads: Vec<Option<Tensor>> = outputs[..visible]
            .iter()
            .zip(seeds)
            .map(|(y, seed)| seed.as_ref().map(|s| self.place(s, &y.layout().dual())).transpose())
            .collect::<Result<_>>()?;
        let wanted = wanted.unwrap_or(&differentiable);
        let keeps = self.op.keeps_for(wanted);
        let kept = |list: &[Tensor], which: &[usize]| -> Vec<Option<Tensor>> {
            list.iter().enumerate().map(|(i, t)| which.contains(&i).then(|| t.clone())).collect()
        };
        let vjp = Vjp {
            rank: self.rank,
            inputs: &kept(&moved, keeps.inputs),
            outputs: &kept(&outputs, keeps.outputs),
            input_layouts: &moved.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            output_layouts: &outputs.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            grads: &grads,
            wanted,
            taken: RefCell::default(),
            sums: &[],
        };
        let closed = context.set_closed(true);
        let cotangents = self.op.vjp(&vjp);
        let added = self.check_sums(vjp, &cotangents);
        context.set_closed(closed);
        added?;
        op::check_given(&**self.op, &cotangents, wanted)?;
        Ok(Run { inference, outputs, cotangents: Some(cotangents) })
    }

    pub(super) fn place(&self, x: &Global, layout: &Layout) -> Result<Tensor> {
        if self.is_strided { x.place_strided(self.rank, layout) } else { x.place(self.rank, layout) }
    }

    /// A cotangent brought back over the step that its argument took.
    pub(super) fn back(&self, x: &Layout, target: &Layout, cotangent: Tensor) -> Result<Tensor> {
        if x == target {
            return Ok(cotangent);
        }
        let op = Redistribute::between(self.rank, x, target)?;
        let grads = [Some(cotangent)];
        let back = op.vjp(&Vjp {
            rank: self.rank,
            inputs: &[None],
            outputs: &[None],
            input_layouts: std::slice::from_ref(x),
            output_layouts: std::slice::from_ref(target),
            grads: &grads,
            wanted: &[true],
            taken: RefCell::default(),
            sums: &[],
        });
        Ok(back.into_iter().next().flatten().expect("redistribution has a vjp"))
    }

    /// Looks whether the vjp gives the bits of what was added up before plus its cotangents where it takes that up, which it must not
    /// write over while somebody holds it.
    fn check_sums(&self, vjp: Vjp<'_>, cotangents: &Cotangents) -> Result<()> {
        let before = |cotangent: &Tensor| {
            // Some zeros are negative.
            let local = cotangent.piece().view.shape.clone();
            let values: Vec<f64> = (0..local.iter().product()).map(|at| -((at % 7) as f64) / 3.0).collect();
            let piece = Piece::upload(self.rank, &local, &values)?.converted(self.rank, cotangent.dtype())?;
            Ok(Tensor::assemble(self.rank, cotangent.layout().clone(), piece))
        };
        let sums = cotangents.iter().map(|c| c.as_ref().map(before).transpose());
        let sums: Vec<Option<Tensor>> = sums.collect::<Result<_>>()?;
        let offers: Vec<Offer> = sums.iter().cloned().map(Offer::new).collect();
        let added = self.op.vjp(&Vjp { sums: &offers, ..vjp });
        for (i, (sum, offer)) in sums.iter().zip(&offers).enumerate() {
            let (Some(sum), Some(one), Some(both)) = (sum, &cotangents[i], &added[i]) else { continue };
            let untouched = before(one)?;
            let expected = untouched.clone().accumulate(one)?;
            let left = offer.take();
            if left.is_none() && !self.op.takes_sums() {
                let text = format!("{:?} takes up sums without saying so: none will be offered", self.op);
                return Err(Error::new(Kind::Unsupported, text));
            }
            let got = left.map_or_else(|| Ok(both.clone()), |sum| sum.accumulate(both))?;
            let bits = |t: &Tensor| -> Result<Vec<u64>> {
                let canonical = |x: &f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
                Ok(t.to_local_f64()?.iter().map(canonical).collect())
            };
            let same = |a: &Tensor, b: &Tensor| Ok::<bool, Error>(bits(a)? == bits(b)?);
            let (of_got, of_expected) = (got.piece().lineage, expected.piece().lineage);
            if !same(sum, &untouched)? || !same(&got, &expected)? || of_got != of_expected {
                let text =
                    format!("{:?}: the cotangent of argument {i} is not added to {}", self.op, sum.layout());
                return Err(Error::new(Kind::Unsupported, text));
            }
        }
        Ok(())
    }
}
