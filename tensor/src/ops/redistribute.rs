//! Redistribution of a tensor to another layout, optionally in a narrower float dtype. Routes need a mesh, so this op
//! has no cases in the list. The vjp takes the adjoint steps in reverse order.
//!
//! A value is rounded before its first step, so that the narrow dtype is communicated; its cotangent is widened before
//! the first adjoint step, so that sums over ranks are in the wider dtype.

use super::cast::is_exact;
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::layout::step::{Step, adjoint, merge_all_reduces};
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputOptions, Vjp, apply_first,
    unwind,
};
use crate::tensor::Tensor;
use crate::tensor::redistribute::{complete_partial_sum, join_axes_of_partial_sum};
use crate::tensor::reduce_buckets::ReductionRequest;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;

/// Moves a tensor from one layout to another along a chosen route of collectives (`DTensor.redistribute`, resharding).
///
/// Any dtype; a float can be converted to a narrower float on the way. Linear.
#[doc(alias = "reshard")]
#[doc(alias = "with_sharding_constraint")]
#[doc(alias = "all_gather")]
#[doc(alias = "reduce_scatter")]
#[derive(Debug)]
pub struct Redistribute {
    from: Layout,
    to: Layout,
    steps: Vec<Step>,
    is_regathered: bool,
    /// The line of the caller, set by the forward: errors of the adjoint steps name the same line.
    site: Cell<Option<&'static Location<'static>>>,
}

impl Redistribute {
    /// The cheapest route between two layouts, including the backward if the tensor is a float.
    ///
    /// # Errors
    /// `Kind::Layout` if the layouts differ in shape or mesh, the target dtype is neither the same nor a narrower float, or a partial
    /// sum would be rounded.
    pub fn between(rank: &Rank, from: &Layout, to: &Layout) -> Result<Rc<Redistribute>> {
        Ok(Rc::new(Redistribute::along_cheapest_route(rank, from, to)?))
    }

    /// [`Redistribute::between`] that the backward pass runs again, so that no op keeps its output.
    ///
    /// # Errors
    /// As [`Redistribute::between`].
    pub fn regathered(rank: &Rank, from: &Layout, to: &Layout) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(Redistribute {
            is_regathered: true,
            ..Redistribute::along_cheapest_route(rank, from, to)?
        }))
    }

    fn along_cheapest_route(rank: &Rank, from: &Layout, to: &Layout) -> Result<Redistribute> {
        let start = rounded(from, to)?;
        let route = Context::of(rank).routes.route(&start, to, from.dtype().is_float())?;
        let (from, to, steps) = (from.clone(), to.clone(), route.steps.to_vec());
        Ok(Redistribute { from, to, steps, is_regathered: false, site: Cell::new(None) })
    }

    /// The adjoint of the route, for a cotangent of this dtype: in the wider of this dtype and that of the start.
    fn adjoint(&self, cotangent: DType) -> Redistribute {
        let mut steps = Vec::with_capacity(self.steps.len());
        let mut layout = self.from.clone();
        for step in &self.steps {
            steps.push(adjoint(&layout, step));
            layout = layout.after(step);
        }
        steps.reverse();
        // The gradient of a leaf may be accumulated in a wider dtype than both layouts have.
        let wide = [cotangent, self.from.dtype()].into_iter().max_by_key(|d| d.size());
        let wide = wide.expect("two dtypes are compared");
        let (from, to) = (self.to.dual().with_dtype(wide), self.from.dual().with_dtype(wide));
        let steps = merge_all_reduces(&from, steps);
        Redistribute { from, to, steps, is_regathered: false, site: self.site.clone() }
    }

    /// The way of a cotangent back along the route, for [buckets](crate::tensor::reduce_buckets): the same steps as those of the vjp.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn reduction(
        &self,
        cotangent: Tensor,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Result<ReductionRequest> {
        let Redistribute { to, steps, .. } = self.adjoint(cotangent.dtype());
        let site = self.site.get().unwrap_or(site);
        let gradient = widened(cotangent, to.dtype(), site)?;
        let gradient = join_axes_of_partial_sum(gradient, &steps, site)?;
        Ok(ReductionRequest { gradient, steps, to, path, site })
    }
}

/// A cotangent in the dtype of the adjoint steps. Where sums are canonical, a partial sum is completed in its own dtype first.
fn widened(cotangent: Tensor, dtype: DType, site: &'static Location<'static>) -> Result<Tensor> {
    match cotangent.dtype() == dtype {
        true => Ok(cotangent),
        false => complete_partial_sum(cotangent, site)?.widen(dtype),
    }
}

/// The layout where the steps start: in the target dtype, if that is a narrower float.
fn rounded(from: &Layout, to: &Layout) -> Result<Layout> {
    if from.dtype() == to.dtype() || !is_exact(to.dtype(), from.dtype()) {
        return Ok(from.clone());
    }
    if !from.partial().is_empty() {
        let text = format!("a partial sum, {from}, would be rounded to {} before the all-reduce", to.dtype());
        return Err(Error::new(Kind::Layout, text)
            .detail("help", "redistribute it to a layout without partial axes first, or cast it"));
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

    fn is_regathered(&self) -> bool {
        self.is_regathered
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
        debug_assert_eq!(args[0], &self.from, "a route is applied to the layout that it was planned for");
        Ok(Rc::new(Inference::direct(args.len(), [self.to.clone()])))
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        self.site.set(Some(local.site));
        let (from, dtype) = (self.from.with_dtype(self.to.dtype()), self.to.dtype());
        let start = if x[0].dtype == dtype { x[0].clone() } else { x[0].to_dtype(local.rank, dtype)? };
        let value = Tensor::assemble(local.rank, from, start);
        let moved = crate::tensor::redistribute::run(&value, &self.steps, &self.to, local.site)?;
        Ok([moved.local().clone()].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let grad = cx.grad(0);
        let adjoint = self.adjoint(grad.dtype());
        let (wide, op): (DType, Rc<dyn Op>) = (adjoint.to.dtype(), Rc::new(adjoint));
        let site = self.site.get().unwrap_or(Location::caller());
        cx.cotangents(|i| {
            let grad = unwind(widened(grad.clone(), wide, site));
            let options =
                OutputOptions { layouts: &[Some(cx.cotangent_layout(i))], ..OutputOptions::default() };
            apply_first(&*op, &[&grad], options, site)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};
    use std::cell::RefCell;

    #[test]
    fn values_are_rounded_before_and_cotangents_widened_before_communication() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let parse = |text| Layout::parse(text, rank.mesh());
            let (from, to) = (parse("f32[4@a]")?, parse("bf16[4] ~a")?);
            let x = Tensor::from_global(rank, &from, &[1.0f32, 1.0 + 2f32.powi(-9), 3.0, 257.0])?;
            let op = Redistribute::between(rank, &from, &to)?;
            rank.trace().enable();
            let y = Tensor::apply_one(op.clone(), &[&x]);
            assert_eq!((y.layout(), y.to_local_f64()?), (&to, vec![1.0, 1.0, 3.0, 256.0]));
            // The ranks contribute 256 and 1 to the first element: bf16 cannot represent 257.
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
                    needs_input_grad: &[true],
                    donated: RefCell::default(),
                    accumulators: &[],
                };
                let back = op.vjp(&vjp).into_iter().next().flatten().expect("the cotangent was requested");
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

    /// The local terms of a partial sum, rounded to bf16 on each rank.
    fn narrowed(x: &Tensor) -> Result<Tensor> {
        let local = x.local().to_dtype(x.rank(), DType::BF16)?;
        Ok(Tensor::assemble(x.rank(), x.layout().with_dtype(DType::BF16), local))
    }

    #[test]
    fn routes_that_widen_or_round_a_partial_sum_are_refused() {
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
