//! Decompositions: a fused op as a composition of simpler ops, for the layouts that its kernel does not compute.

use super::Op;
use crate::execution::context::Context;
use crate::layout::Layout;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// A place between the parts of a fused op, through which the value there passes: a model may state its layout, or drop elements.
///
/// A kernel computes beyond a point only if values pass the point unchanged.
pub trait Point<V> {
    /// Whether values pass unchanged. `x` is an argument of the op.
    fn is_identity(&self, x: &V) -> bool;

    /// Passes the value at this point, for the caller's line `site`.
    fn pass(&self, value: &V, site: &'static Location<'static>) -> V;

    /// Makes the point the place in the model of a kernel that computes beyond the point. `x` is an argument of the kernel.
    fn enter(&self, x: &V);
}

/// No point: values pass unchanged.
impl<V: Clone> Point<V> for () {
    fn is_identity(&self, _: &V) -> bool {
        true
    }

    fn pass(&self, value: &V, _: &'static Location<'static>) -> V {
        value.clone()
    }

    fn enter(&self, _: &V) {}
}

/// A value inside of a decomposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// An argument of the decomposed op.
    Arg(usize),
    /// An output of a step, by step and number.
    Output(usize, usize),
}

/// One step of a decomposition.
#[derive(Debug)]
enum Step {
    /// Applies an op, with some of the points.
    Apply { op: Rc<dyn Op>, args: SmallVec<[Operand; 6]>, points: Range<usize> },
    /// Passes a value through a point.
    Pass { value: Operand, point: usize },
    /// Makes a point the place of the next op.
    Enter { point: usize },
}

/// The decomposition of an op on arguments of some layouts, as [`Op::decompose`] states it, or [`Op::decompose_canonical`] where sums
/// are canonical.
#[must_use]
pub fn decomposition(
    op: &dyn Op,
    context: &Context,
    args: &[&Layout],
    points: &[bool],
) -> Option<Decomposition> {
    match context.sum_tree() {
        Some(_) => op.decompose_canonical(args, points),
        None => op.decompose(args, points),
    }
}

/// A composition of simpler ops. Its outputs are those of the last step.
#[doc(alias = "torch._decomp")]
#[doc(alias = "lowering")]
#[derive(Debug)]
pub struct Decomposition {
    num_points: usize,
    steps: Vec<Step>,
}

impl Decomposition {
    /// A decomposition without steps, for a call with `num_points` points.
    #[must_use]
    pub fn new(num_points: usize) -> Decomposition {
        Decomposition { num_points, steps: Vec::new() }
    }

    /// Adds an op and returns its first output.
    pub fn apply<O: Op>(&mut self, op: O, args: &[Operand]) -> Operand {
        self.apply_with_points(Rc::new(op), args, 0..0)
    }

    /// [`Decomposition::apply`] of an op that may itself be decomposed and takes some of the points of the call.
    pub fn apply_with_points(&mut self, op: Rc<dyn Op>, args: &[Operand], points: Range<usize>) -> Operand {
        let points = points.start.min(self.num_points)..points.end.min(self.num_points);
        self.push(Step::Apply { op, args: SmallVec::from_slice(args), points })
    }

    /// Passes a value through a point, and returns the value after the point. A call without this point changes nothing.
    pub fn pass(&mut self, value: Operand, point: usize) -> Operand {
        if point < self.num_points { self.push(Step::Pass { value, point }) } else { value }
    }

    /// Makes a point the place in the model of the next op, which computes beyond the point.
    pub fn enter(&mut self, point: usize) {
        if point < self.num_points {
            self.push(Step::Enter { point });
        }
    }

    fn push(&mut self, step: Step) -> Operand {
        self.steps.push(step);
        Operand::Output(self.steps.len() - 1, 0)
    }

    /// Runs the steps: `apply` applies an op to values, with some points.
    pub fn run<V: Clone>(
        &self,
        args: &[&V],
        points: &[&dyn Point<V>],
        site: &'static Location<'static>,
        apply: impl Fn(&Rc<dyn Op>, &[&V], &[&dyn Point<V>]) -> SmallVec<[V; 2]>,
    ) -> SmallVec<[V; 2]> {
        let mut outputs: SmallVec<[SmallVec<[V; 2]>; 6]> = SmallVec::new();
        for step in &self.steps {
            let value = |operand: Operand| match operand {
                Operand::Arg(i) => args[i],
                Operand::Output(step, i) => &outputs[step][i],
            };
            let made = match step {
                Step::Apply { op, args, points: own } => {
                    let args: SmallVec<[&V; 6]> = args.iter().map(|operand| value(*operand)).collect();
                    apply(op, &args, &points[own.clone()])
                }
                Step::Pass { value: x, point } => smallvec![points[*point].pass(value(*x), site)],
                Step::Enter { point } => {
                    points[*point].enter(args[0]);
                    SmallVec::new()
                }
            };
            outputs.push(made);
        }
        outputs.pop().expect("a decomposition has a step")
    }
}
