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
use crate::step::{Step, adjoint, completed_together};
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
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
        let steps = completed_together(&from, steps);
        let op: Rc<dyn Op> = Rc::new(Redistribute { from, to, steps, site: self.site.clone() });
        let site = self.site.get().unwrap_or(Location::caller());
        cx.each(|i| {
            let grad = unwind(grad.clone().widened(wide));
            let outputs = unwind(apply(&*op, &[&grad], &[Some(cx.goal(i))], site));
            outputs.into_iter().next().expect("redistribute has one output")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};
    use std::cell::RefCell;

    #[test]
    fn a_value_is_rounded_before_it_moves_and_its_cotangent_widened() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let parse = |text| Layout::parse(text, rank.mesh());
            let (from, to) = (parse("f32[4@a]")?, parse("bf16[4] ~a")?);
            let x = Tensor::from_global(rank, &from, &[1.0f32, 1.0 + 2f32.powi(-9), 3.0, 257.0])?;
            let op = Redistribute::between(rank, &from, &to)?;
            rank.trace().enable();
            let y = Tensor::result(op.clone(), &[&x]);
            assert_eq!((y.layout(), y.to_local_f64()?), (&to, vec![1.0, 1.0, 3.0, 256.0]));
            // Each rank brings 256 and 1 for the first element: 257 is no number of bf16.
            let own = [[256.0f32, 1.0][rank.index()], 1.0, 2.0, 4.0];
            let g = Tensor::from_local(rank, &to.dual().with_dtype(DType::F32), &own)?;
            for (grad, first) in [(g.clone(), 257.0), (narrowed(&g)?, 257.0)] {
                let vjp = Vjp {
                    rank,
                    inputs: &[None],
                    outputs: &[None],
                    input_layouts: std::slice::from_ref(&from),
                    output_layouts: std::slice::from_ref(&to),
                    grads: &[Some(grad)],
                    wanted: &[true],
                    taken: RefCell::default(),
                    sums: &[],
                };
                let back = op.vjp(&vjp).into_iter().next().flatten().expect("it is wanted");
                assert_eq!((back.layout(), back.to_f64()?), (&from, vec![first, 2.0, 4.0, 8.0]));
            }
            let moved: Vec<_> = rank.trace().take().into_iter().map(|r| (r.op, r.dtype)).collect();
            assert!(
                moved.contains(&("all_gather", DType::BF16))
                    && !moved.contains(&("reduce_scatter", DType::BF16))
            );
            assert_eq!(
                moved.iter().filter(|m| **m == ("reduce_scatter", DType::F32)).count(),
                2,
                "{moved:?}"
            );
            Ok(())
        })
        .unwrap();
    }

    /// The numbers of a pending sum in bf16, as they are on each rank.
    fn narrowed(x: &Tensor) -> Result<Tensor> {
        let piece = x.piece().converted(x.rank(), DType::BF16)?;
        Ok(Tensor::assemble(x.rank(), x.layout().with_dtype(DType::BF16), piece))
    }

    #[test]
    fn a_route_neither_widens_nor_rounds_a_pending_sum() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let parse = |text| Layout::parse(text, rank.mesh()).unwrap();
            for (from, to) in [
                ("bf16[4]", "f32[4@a]"),
                ("bf16[4]", "f16[4]"),
                ("f32[4]", "i64[4]"),
                ("i64[4]", "f32[4]"),
                ("f32[4] +a", "bf16[4@a]"),
            ] {
                let refused = Redistribute::between(rank, &parse(from), &parse(to)).unwrap_err();
                assert_eq!(refused.kind(), Kind::Layout, "{from} to {to}");
            }
            Ok(())
        })
        .unwrap();
    }
}
