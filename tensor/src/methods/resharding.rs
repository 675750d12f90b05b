//! Changes of layout of every [`Value`]: to a stated layout, to whole dims, to the whole value on every rank.

use crate::layout::Layout;
use crate::layout::placement::Placement;
use crate::methods::value::Value;
use crate::op::unwind;
use crate::ops::redistribute::Redistribute;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind};

/// Changes of layout. Each is a collective call unless the layout is the same: every rank calls it together. A misuse unwinds with the
/// error that names layouts and source line.
pub trait Resharding: Value {
    /// The same value in another layout, along the cheapest route. On a tape the collectives are recorded, and their adjoints run in the
    /// backward pass. A layout with a narrower float rounds the value before it is moved; its gradient is moved and accumulated in the
    /// wider one.
    ///
    /// # Panics
    /// Unwinds with the error if there is no route to the layout.
    #[doc(alias = "redistribute")]
    #[doc(alias = "reshard")]
    #[doc(alias = "with_sharding_constraint")]
    #[doc(alias = "device_put")]
    #[doc(alias = "autocast")]
    #[track_caller]
    #[must_use]
    fn to_layout(&self, to: &Layout) -> Self;

    /// The same value with every rank holding all indices of a dim: the mesh axes that shard the dim become `=` (an all-gather), other
    /// axes keep their placements. To get `~` on these axes, whose adjoint is a reduce-scatter, state the layout ([`Resharding::to_layout`]).
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if there is no such dim.
    #[doc(alias = "all_gather")]
    #[track_caller]
    #[must_use]
    fn whole_along(&self, dim: usize) -> Self {
        let layout = self.layout();
        if dim >= layout.ndim() {
            let text = format!("whole_along: dim {dim} is out of range for {layout}");
            unwind(Err::<(), _>(Error::new(Kind::Shape, text).detail("help", "dims count from 0")));
        }
        // Innermost first, as they leave the dim.
        let axes: Vec<_> = layout.dims()[dim].axes.iter().collect();
        let unsharded = |layout: Layout, axis: &_| layout.with_placement(*axis, Placement::Invariant);
        self.to_layout(&axes.iter().rev().fold(layout.clone(), unsharded))
    }

    /// The whole value on every rank, `=` on every axis: partial sums are reduced, shards gathered.
    #[doc(alias = "full_tensor")]
    #[doc(alias = "replicate")]
    #[track_caller]
    #[must_use]
    fn gathered(&self) -> Self {
        let layout = self.layout();
        self.to_layout(&Layout::invariant(layout.mesh(), layout.dtype(), layout.extents()))
    }
}

impl Resharding for Tensor {
    #[track_caller]
    fn to_layout(&self, to: &Layout) -> Tensor {
        if self.layout() == to {
            return self.clone();
        }
        Tensor::result(unwind(Redistribute::between(self.rank(), self.layout(), to)), &[self])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn layouts_and_values_match_hand_computed_ones() {
        let mesh = Mesh::parse("a=2,b=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let x = Tensor::arange(rank, &Layout::parse("f64[5@b@a, 3]", &mesh)?, 0.0, 1.0)?;
            let values = x.to_host::<f64>()?;
            let sharded = x.to_layout(&Layout::parse("f64[5@a, 3@b]", &mesh)?);
            assert_eq!(sharded.to_local_f64()?.len(), [2, 4, 3, 6][rank.index()]);
            for (y, layout) in [
                (sharded.whole_along(0), "f64[5, 3@b]"),
                (sharded.whole_along(1), "f64[5@a, 3]"),
                (x.whole_along(0), "f64[5, 3]"),
                (x.whole_along(1), "f64[5@b@a, 3]"),
                (sharded.gathered(), "f64[5, 3]"),
            ] {
                assert_eq!((y.layout().to_string().as_str(), y.to_host::<f64>()?), (layout, values.clone()));
            }
            let sum = Tensor::full(rank, &Layout::parse("f64[4@a] +b", &mesh)?, 2.5)?;
            assert_eq!(sum.whole_along(0).layout().to_string(), "f64[4] +b");
            assert_eq!(sum.gathered().to_local_f64()?, [2.5; 4]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn misuse_is_refused_with_the_source_line() {
        type Case = fn(&Tensor) -> Tensor;
        let cases: [(u32, Case); 2] = [
            (line!(), |x| x.whole_along(1)),
            (line!(), |x| x.to_layout(&Layout::invariant(x.layout().mesh(), x.dtype(), &[3]))),
        ];
        for (line, case) in cases {
            let error = World::run(Mesh::single(), |rank| {
                Ok(case(&Tensor::from_host(rank, &[2], &[0.0, 1.0])?).dtype())
            })
            .unwrap_err();
            assert_eq!(error.site().map(|site| site.line()), Some(line), "{error}");
        }
    }
}
