//! One call of an op, forward and backward, as a tape makes it.

use crate::global_tensor::GlobalTensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::op::{self, Cotangents, GradAccumulator, Op, Vjp, differentiable_args};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Context, Inference, Layout, LocalTensor, Tensor};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// The results of a call: inference, outputs and, for differentiable ops, cotangents.
pub(super) struct Run {
    pub(super) inference: Rc<Inference>,
    pub(super) outputs: SmallVec<[Tensor; 2]>,
    /// In the dual layouts of the arguments after their steps.
    pub(super) cotangents: Option<Cotangents>,
}

/// One call of an op on tensors with any layouts and strides.
pub(super) struct OpCall<'a> {
    pub(super) op: &'a Rc<dyn Op>,
    pub(super) rank: &'a Rank,
    /// Whether cotangents are strided views with gaps.
    pub(super) is_strided: bool,
    pub(super) site: &'static Location<'static>,
}

impl OpCall<'_> {
    /// Runs all that a tape does with one op; `seeds` are the cotangents of the visible outputs, `None` for an
    /// unused output.
    pub(super) fn run(
        &self,
        args: &[Tensor],
        seeds: &[Option<GlobalTensor>],
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
                    op::apply(&*op, &[x], self.site)?.remove(0)
                }
            });
        }
        let given: Vec<&LocalTensor> = moved.iter().map(Tensor::local).collect();
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
            .map(|(y, seed)| seed.as_ref().map(|s| self.distribute(s, &y.layout().dual())).transpose())
            .collect::<Result<_>>()?;
        let wanted = wanted.unwrap_or(&differentiable);
        let saved_for_backward = self.op.saved_for_backward_of(wanted);
        let saved = |list: &[Tensor], which: &[usize]| -> Vec<Option<Tensor>> {
            list.iter().enumerate().map(|(i, t)| which.contains(&i).then(|| t.clone())).collect()
        };
        let vjp = Vjp {
            rank: self.rank,
            inputs: &saved(&moved, saved_for_backward.inputs),
            outputs: &saved(&outputs, saved_for_backward.outputs),
            input_layouts: &moved.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            output_layouts: &outputs.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            grads: &grads,
            needs_input_grad: wanted,
            donated: RefCell::default(),
            accumulators: &[],
        };
        let in_vjp = context.enter_vjp();
        let cotangents = self.op.vjp(&vjp);
        let added = self.check_sums(vjp, &cotangents);
        drop(in_vjp);
        added?;
        op::check_cotangents_present(&**self.op, &cotangents, wanted)?;
        Ok(Run { inference, outputs, cotangents: Some(cotangents) })
    }

    pub(super) fn distribute(&self, x: &GlobalTensor, layout: &Layout) -> Result<Tensor> {
        if self.is_strided {
            x.distribute_strided(self.rank, layout)
        } else {
            x.distribute(self.rank, layout)
        }
    }

    /// Brings a cotangent back over the step that its argument took.
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
            needs_input_grad: &[true],
            donated: RefCell::default(),
            accumulators: &[],
        });
        Ok(back.into_iter().next().flatten().expect("redistribution has a vjp"))
    }

    /// Checks gradient accumulation: a vjp that takes an accumulator must return the bits of accumulator plus
    /// cotangent, and must not overwrite the accumulator while it is shared.
    fn check_sums(&self, vjp: Vjp<'_>, cotangents: &Cotangents) -> Result<()> {
        let before = |cotangent: &Tensor| {
            // Some zeros are negative.
            let local = cotangent.local().view.shape.clone();
            let values: Vec<f64> = (0..local.iter().product()).map(|at| -((at % 7) as f64) / 3.0).collect();
            let local =
                LocalTensor::upload(self.rank, &local, &values)?.to_dtype(self.rank, cotangent.dtype())?;
            Ok(Tensor::assemble(self.rank, cotangent.layout().clone(), local))
        };
        let sums = cotangents.iter().map(|c| c.as_ref().map(before).transpose());
        let sums: Vec<Option<Tensor>> = sums.collect::<Result<_>>()?;
        let accumulators: Vec<GradAccumulator> = sums.iter().cloned().map(GradAccumulator::new).collect();
        let added = self.op.vjp(&Vjp { accumulators: &accumulators, ..vjp });
        for (i, (sum, accumulator)) in sums.iter().zip(&accumulators).enumerate() {
            let (Some(sum), Some(one), Some(both)) = (sum, &cotangents[i], &added[i]) else { continue };
            let untouched = before(one)?;
            let expected = untouched.clone().accumulate(one)?;
            let left = accumulator.take();
            if left.is_none() && !self.op.accumulates_in_place() {
                let text = format!(
                    "{:?} takes an accumulator, but Op::accumulates_in_place is false, so it never gets one",
                    self.op
                );
                return Err(Error::new(Kind::Unsupported, text));
            }
            let got = left.map_or_else(|| Ok(both.clone()), |sum| sum.accumulate(both))?;
            let bits = |t: &Tensor| -> Result<Vec<u64>> {
                let canonical = |x: &f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
                Ok(t.to_local_f64()?.iter().map(canonical).collect())
            };
            let same = |a: &Tensor, b: &Tensor| Ok::<bool, Error>(bits(a)? == bits(b)?);
            let (of_got, of_expected) = (got.local().lineage, expected.local().lineage);
            if !same(sum, &untouched)? || !same(&got, &expected)? || of_got != of_expected {
                let text = format!(
                    "{:?}: the cotangent of argument {i} is not added to the accumulator {}",
                    self.op,
                    sum.layout()
                );
                return Err(Error::new(Kind::Unsupported, text));
            }
        }
        Ok(())
    }
}
