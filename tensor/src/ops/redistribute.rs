//! The same value in another layout, and perhaps in a narrower float. Routes need a mesh, so this op has no cases on the list. The vjp takes the adjoint steps backwards (algebra, section 3).
//!
//! A value is rounded before its first step, so that what moves is narrow; its cotangent is widened before the first step back, so
//! that sums over ranks are formed in the wider dtype.

use super::cast::is_exact;
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, apply, unwind};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::step::{Step, adjoint};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;

/// A chosen route between two layouts. Any dtype; a float can become a narrower one that it holds.
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
    /// `Kind::Layout` if the layouts are of different tensors or meshes, the dtype is another than the same or a narrower float,
    /// and for a pending sum that would be rounded.
    pub fn between(rank: &Rank, from: &Layout, to: &Layout) -> Result<Rc<dyn Op>> {
        let start = rounded(from, to)?;
        let route = Context::of(rank).routes.route(&start, to, from.dtype().is_float())?;
        let (from, to, steps) = (from.clone(), to.clone(), route.steps.to_vec());
        Ok(Rc::new(Redistribute { from, to, steps, site: Cell::new(None) }))
    }
}

/// Where the steps start: the layout in the dtype of the goal, where that is a narrower float.
fn rounded(from: &Layout, to: &Layout) -> Result<Layout> {
    if from.dtype() == to.dtype() || !is_exact(to.dtype(), from.dtype()) {
        return Ok(from.clone());
    }
    if !from.partial().is_empty() {
        let text = format!("a pending sum, {from}, would be rounded before it is formed");
        return Err(Error::new(Kind::Layout, text).detail("help", "complete it first, or cast it"));
    }
    Ok(from.with_dtype(to.dtype()))
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

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(self.to.dtype(), 1))
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
        let (from, dtype) = (self.from.with_dtype(self.to.dtype()), self.to.dtype());
        let start = if x[0].dtype == dtype { x[0].clone() } else { x[0].converted(local.rank, dtype)? };
        let value = Tensor::assemble(local.rank, from, start);
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
        // Cotangents of a leaf may have been added up in a wider dtype than either layout has.
        let grad = cx.grad(0);
        let wide = [grad.dtype(), self.from.dtype()].into_iter().max_by_key(|d| d.size());
        let wide = wide.expect("there are two");
        let (from, to) = (self.to.dual().with_dtype(wide), self.from.dual().with_dtype(wide));
        let op: Rc<dyn Op> = Rc::new(Redistribute { from, to, steps, site: self.site.clone() });
        let site = self.site.get().unwrap_or(Location::caller());
        cx.each(|i| {
            let grad = unwind(grad.clone().widened(wide));
            let outputs = unwind(apply(&op, &[&grad], &[Some(cx.goal(i))], site));
            outputs.into_iter().next().expect("redistribute has one output")
        })
    }
}
