//! Application of an op: plan, redistribute the arguments, run the kernel, check the outputs.

use super::error_text::forward_error;
use super::validation::{catch_panics, check_outputs, matches_inference};
use super::{ForwardContext, GradAccumulator, LocalTensors, Op, Point, canonical_sum, decomposition, plan};
use crate::execution::anomaly::AnomalyDetector;
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, with_mapped};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use smallvec::SmallVec;
use std::panic::Location;
use std::rc::Rc;

/// An op, by value or shared. A plain tensor does not allocate an op that is passed by value.
pub trait OpHandle {
    /// The op.
    fn as_op(&self) -> &dyn Op;

    /// A shared handle of the op.
    fn into_shared(self) -> Rc<dyn Op>;
}

impl<O: Op> OpHandle for O {
    fn as_op(&self) -> &dyn Op {
        self
    }

    fn into_shared(self) -> Rc<dyn Op> {
        Rc::new(self)
    }
}

impl<O: Op> OpHandle for Rc<O> {
    fn as_op(&self) -> &dyn Op {
        &**self
    }

    fn into_shared(self) -> Rc<dyn Op> {
        self
    }
}

impl OpHandle for Rc<dyn Op> {
    fn as_op(&self) -> &dyn Op {
        &**self
    }

    fn into_shared(self) -> Rc<dyn Op> {
        self
    }
}

/// What a vjp states about the outputs of an op.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutputOptions<'a> {
    /// The layouts of outputs, which determine extent and sharding of labels that no argument has; none beyond the end.
    pub(crate) layouts: &'a [Option<Layout>],
    /// For each output a sum that the op may add the output to; none beyond the end.
    pub(crate) accumulators: &'a [Option<&'a GradAccumulator>],
}

/// Runs the kernel of an op on local arguments that have their target layouts, and returns all outputs.
///
/// # Errors
/// The errors of kernels and, for ops that communicate, of collectives.
pub fn run(
    op: &dyn Op,
    x: &[&LocalTensor],
    inference: &Rc<Inference>,
    rank_context: (&Rank, &Context),
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    run_and_take(op, (x, &[]), inference, rank_context, site, all_outputs)
}

/// Meta tensors for the outputs of an op: layouts without values. Nothing is computed or communicated.
#[must_use]
pub fn meta(inference: &Inference, rank: &Rank) -> SmallVec<[Tensor; 2]> {
    inference.outputs.iter().map(|layout| Tensor::meta(rank, layout)).collect()
}

/// Applies the kernel of an op to tensors without recording, with implicit redistribution of the arguments; a redistributed value is
/// cached with its tensor. Returns all outputs, including outputs saved for backward.
///
/// # Errors
/// The errors of [`plan`] and [`run`].
pub fn apply(
    op: &dyn Op,
    args: &[&Tensor],
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    apply_with_options(op, args, OutputOptions::default(), site)
}

/// [`apply`] with what a vjp states about the outputs.
pub(crate) fn apply_with_options(
    op: &dyn Op,
    args: &[&Tensor],
    options: OutputOptions<'_>,
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    apply_and_take(op, args, rank_context(args), options, site, all_outputs)
}

/// [`apply_with_options`] that returns the first output alone, and unwinds with the error.
pub(crate) fn apply_first(
    op: &dyn Op,
    args: &[&Tensor],
    options: OutputOptions<'_>,
    site: &'static Location<'static>,
) -> Tensor {
    first_output(op, args, rank_context(args), options, site)
}

/// [`apply_first`] for a caller that has the context of the rank already.
fn first_output(
    op: &dyn Op,
    args: &[&Tensor],
    rank_context: (&Rank, &Context),
    options: OutputOptions<'_>,
    site: &'static Location<'static>,
) -> Tensor {
    let first = |rank: &Rank, inference: &Rc<Inference>, outputs: &mut LocalTensors| {
        outputs.truncate(1);
        Tensor::output(rank, inference, 0, outputs.pop().expect("an op has an output"))
    };
    apply_and_take(op, args, rank_context, options, site, first).unwrap_or_else(|e| e.at(site).raise())
}

/// The rank of the arguments, and its context.
fn rank_context<'a>(args: &[&'a Tensor]) -> (&'a Rank, &'a Context) {
    let rank = args.first().expect("an op has at least one argument").rank();
    (rank, Context::of(rank))
}

impl Tensor {
    /// Applies an op, or its decomposition, with its points, if any, for the caller's line `site`, without recording. Returns the
    /// visible outputs.
    ///
    /// # Panics
    /// Unwinds with the error of [`apply`]; so do the functions below.
    #[must_use]
    pub fn apply_at(
        op: Rc<dyn Op>,
        args: &[&Tensor],
        points: &[&dyn Point<Tensor>],
        site: &'static Location<'static>,
    ) -> SmallVec<[Tensor; 2]> {
        let mut are_identities = SmallVec::<[bool; 4]>::new();
        points.iter().for_each(|point| are_identities.push(point.is_identity(args[0])));
        let (_, context) = rank_context(args);
        let decompose = |layouts: &[&Layout]| decomposition(&*op, context, layouts, &are_identities);
        if let Some(parts) = with_mapped(args, |t| t.layout(), decompose) {
            return parts.run(args, points, site, |op, args, points| {
                Tensor::apply_at(op.clone(), args, points, site)
            });
        }
        let mut outputs = apply(&*op, args, site).unwrap_or_else(|e| e.at(site).raise());
        outputs.truncate(outputs.len() - op.num_saved());
        outputs
    }

    /// [`Tensor::apply_at`] without points.
    #[track_caller]
    #[must_use]
    pub fn apply(op: impl OpHandle, args: &[&Tensor]) -> SmallVec<[Tensor; 2]> {
        Tensor::apply_at(op.into_shared(), args, &[], Location::caller())
    }

    /// [`Tensor::apply`] of an op with one visible output.
    #[track_caller]
    #[must_use]
    pub fn apply_one(op: impl OpHandle, args: &[&Tensor]) -> Tensor {
        let (site, rank_context) = (Location::caller(), rank_context(args));
        let is_decomposed = with_mapped(
            args,
            |t| t.layout(),
            |layouts| decomposition(op.as_op(), rank_context.1, layouts, &[]).is_some(),
        );
        match is_decomposed {
            true => Tensor::apply_at(op.into_shared(), args, &[], site).swap_remove(0),
            false => first_output(op.as_op(), args, rank_context, OutputOptions::default(), site),
        }
    }
}

/// The outputs as tensors.
fn all_outputs(rank: &Rank, inference: &Rc<Inference>, outputs: &mut LocalTensors) -> SmallVec<[Tensor; 2]> {
    let tensor = |(i, output)| Tensor::output(rank, inference, i, output);
    if outputs.len() == 1
        && let Some(output) = outputs.pop()
    {
        return smallvec::smallvec![tensor((0, output))];
    }
    outputs.drain(..).enumerate().map(tensor).collect()
}

/// Plans an op on tensors, redistributes its arguments, runs its kernel, and calls `take` with rank, plan and outputs.
#[inline]
fn apply_and_take<R>(
    op: &dyn Op,
    args: &[&Tensor],
    rank_context: (&Rank, &Context),
    options: OutputOptions<'_>,
    site: &'static Location<'static>,
    take: impl Fn(&Rank, &Rc<Inference>, &mut LocalTensors) -> R,
) -> Result<R> {
    let inference =
        with_mapped(args, |t| t.layout(), |layouts| plan(op, rank_context, layouts, options.layouts, site))?;
    let run = |x: &[&LocalTensor]| {
        run_and_take(op, (x, options.accumulators), &inference, rank_context, site, &take)
    };
    if !inference.changes_inputs() {
        return with_mapped(args, |t| t.local(), run);
    }
    let redistributed = |(t, target): (&&Tensor, &Option<Layout>)| match target {
        None => Ok((*t).clone()),
        Some(layout) => crate::tensor::redistribute::redistribute_cached(t, layout, site),
    };
    let args: SmallVec<[Tensor; 4]> =
        args.iter().zip(&inference.targets).map(redistributed).collect::<Result<_>>()?;
    with_mapped(&args, Tensor::local, run)
}

/// Runs the kernel of an op on local arguments and accumulators, checks its outputs and calls `take` with rank, plan and outputs.
#[inline]
fn run_and_take<R>(
    op: &dyn Op,
    (x, accumulators): (&[&LocalTensor], &[Option<&GradAccumulator>]),
    inference: &Rc<Inference>,
    (rank, context): (&Rank, &Context),
    site: &'static Location<'static>,
    take: impl FnOnce(&Rank, &Rc<Inference>, &mut LocalTensors) -> R,
) -> Result<R> {
    let sum_tree = context.sum_tree();
    // An accumulator would be one more term of the sum of a leaf.
    let accumulators = if sum_tree.is_some() { &[] } else { accumulators };
    let local =
        ForwardContext { rank, inputs: inference.inputs(), inference, site, accumulators, leaf: None };
    // The outputs stay in place and are not moved: moving memory that was just written is slow.
    let go = || match sum_tree {
        None => op.forward(&local, x),
        Some(tree) => canonical_sum::forward(op, tree, &local, x),
    };
    let mut result = if cfg!(debug_assertions) { catch_panics(op, &local, go) } else { go() };
    let Ok(outputs) = &mut result else {
        return Err(forward_error(result.expect_err("the forward failed"), op, &local));
    };
    if !matches_inference(outputs, &local) {
        check_outputs(outputs, op, &local)?;
    }
    let lineage = local.lineage(x);
    for (i, output) in outputs.iter_mut().enumerate() {
        let accumulator = accumulators.get(i).copied().flatten();
        output.lineage = accumulator.map_or(lineage, |accumulator| accumulator.lineage(lineage));
    }
    if context.detects_anomalies() {
        AnomalyDetector::inspect(rank, op.name(), x, &outputs.iter().collect::<Vec<_>>(), site)?;
    }
    Ok(take(rank, inference, outputs))
}
