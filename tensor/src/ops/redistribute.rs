//! The same value in another layout. Routes need a mesh, so this op has no cases on the list. The vjp takes the adjoint steps backwards (algebra, section 3).

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, apply, unwind};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::step::{Step, adjoint};
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::DType;
use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;

/// A chosen route between two layouts. Any dtype.
#[derive(Debug)]
pub struct Redistribute {
    from: Layout,
    to: Layout,
    steps: Vec<Step>,
    /// The line that asked, noted on the way forward: the adjoint belongs to it too.
    site: Cell<Option<&'static Location<'static>>>,
}

impl Redistribute {
    /// The cheapest route, backward included if the value carries a gradient.
    ///
    /// # Errors
    /// `Kind::Layout` if the layouts are of different tensors or meshes.
    pub fn between(rank: &Rank, from: &Layout, to: &Layout) -> Result<Rc<dyn Op>> {
        let route = Context::of(rank).routes.route(from, to, from.dtype().is_float())?;
        let (from, to, steps) = (from.clone(), to.clone(), route.steps.to_vec());
        Ok(Rc::new(Redistribute { from, to, steps, site: Cell::new(None) }))
    }
}

impl Op for Redistribute {
    fn name(&self) -> &'static str {
        "redistribute"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        debug_assert_eq!(args[0], &self.from, "a route starts where it was planned to start");
        Ok(Rc::new(Inference::direct(args.len(), [self.to.clone()])))
    }

    fn forward(&self, local: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
        self.site.set(Some(local.site));
        let value = Tensor::assemble(local.rank, self.from.clone(), x[0].clone());
        let moved = crate::redistribute::run(&value, &self.steps, &self.to, local.site)?;
        Ok([moved.piece().clone()].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let mut steps = Vec::with_capacity(self.steps.len());
        let mut layout = self.from.clone();
        for step in &self.steps {
            steps.push(adjoint(&layout, step));
            layout = layout.after(step);
        }
        steps.reverse();
        let (from, to) = (self.to.dual(), self.from.dual());
        let op: Rc<dyn Op> = Rc::new(Redistribute { from, to, steps, site: self.site.clone() });
        let site = self.site.get().unwrap_or(Location::caller());
        cx.each(|i| {
            let outputs = unwind(apply(&op, &[&cx.grad(0)], &[Some(cx.goal(i))], site));
            outputs.into_iter().next().expect("redistribute has one output")
        })
    }
}
