//! Layouts: how a global tensor is distributed over a mesh (PyTorch DTensor's `placements`, JAX's `NamedSharding`).

pub mod placement;
pub mod dim;
mod text;
pub(crate) mod fast_hasher;
pub mod lineage;
pub mod refusal;
pub mod signature;
mod unify;
pub mod infer;
pub mod step;
pub mod route;
pub mod reshape_rule;
pub mod repair;

use crate::layout::dim::Dim;
use crate::layout::placement::Placement;
use shardgrad_dist::{Axis, AxisSet, Error, Kind, Mesh, Result};
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// The layout of a distributed tensor: mesh, dtype, the mesh axes that shard each dim, the axes that hold a partial sum,
/// and the axes with independent replicas. It is what `(DeviceMesh, placements)` is in PyTorch DTensor and
/// `NamedSharding(mesh, PartitionSpec)` in JAX. Axes of size 1 are dropped, so a world of one rank has one layout per
/// shape.
///
/// The text form (`Display` and [`Layout::parse`]) is `f32[32@dp, 1024, 4096:128@tp] +cp`: for each dim the extent, the
/// grain where it is not 1, and the axes that shard the dim, outermost first; then the partial (`+`) and the replicated
/// (`~`) axes.
///
/// Cloning copies a reference-counted handle, and two handles of one layout compare equal by address: every tensor has a
/// layout, and few layouts differ.
#[doc(alias = "placements")]
#[doc(alias = "DTensorSpec")]
#[doc(alias = "NamedSharding")]
#[doc(alias = "PartitionSpec")]
#[doc(alias = "Shard")]
#[doc(alias = "Replicate")]
#[doc(alias = "Partial")]
#[doc(alias = "sharding")]
#[derive(Clone, PartialEq, Eq)]
pub struct Layout(Arc<Parts>);

#[derive(Clone, PartialEq, Eq)]
struct Parts {
    mesh: Mesh,
    dtype: DType,
    partial: AxisSet,
    replicate: AxisSet,
    dims: SmallVec<[Dim; 6]>,
    /// The extents of the dims.
    shape: Dims,
}

impl Hash for Layout {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        // The hash skips the mesh: axis names are long, and one program has few meshes.
        (self.0.dtype, self.0.partial, self.0.replicate).hash(hasher);
        self.0.dims.hash(hasher);
    }
}

impl Parts {
    /// Makes the parts legal, and returns the first fault found.
    fn repair(&mut self) -> Option<String> {
        let mut faults = Vec::new();
        let (mut seen, mesh) = (AxisSet::EMPTY, self.mesh.clone());
        let mut first_time = |axis: Axis, faults: &mut Vec<String>| {
            let fresh = !seen.contains(axis);
            if !fresh {
                faults.push(format!("axis `{}` appears twice in a layout", mesh.name(axis)));
            }
            seen = seen.with(axis);
            fresh
        };
        for dim in &mut self.dims {
            if dim.grain == 0 || dim.extent % dim.grain != 0 {
                faults.push(format!("a grain of {} does not divide the extent {}", dim.grain, dim.extent));
                dim.grain = gcd(dim.extent, dim.grain).max(1);
            }
            dim.axes = dim.axes.iter().filter(|a| first_time(*a, &mut faults)).collect();
        }
        self.partial = self.partial.iter().filter(|a| first_time(*a, &mut faults)).collect();
        self.replicate = self.replicate.iter().filter(|a| first_time(*a, &mut faults)).collect();
        let pending = self.partial.iter().find(|a| mesh.size(*a) > 1);
        if let (DType::Bool, Some(axis)) = (self.dtype, pending) {
            faults.push(format!("a bool tensor cannot be a partial sum over axis `{}`", mesh.name(axis)));
            self.partial = AxisSet::EMPTY;
        }
        faults.into_iter().next()
    }

    fn drop_trivial_axes(&mut self) {
        let mesh = self.mesh.clone();
        for dim in &mut self.dims {
            dim.axes = dim.axes.iter().filter(|a| mesh.size(*a) > 1).collect();
        }
        self.partial = self.partial.iter().filter(|a| mesh.size(*a) > 1).collect();
        self.replicate = self.replicate.iter().filter(|a| mesh.size(*a) > 1).collect();
    }
}

/// The end of the error text for a layout whose elements exceed the address space.
pub(crate) const BEYOND_MEMORY: &str = "has more elements than memory can address";

impl Layout {
    /// Makes a layout from its parts. Axes of size 1 are dropped; axes that appear nowhere are invariant (`=`).
    ///
    /// # Errors
    /// `Kind::Layout` for an axis that appears twice or is not on the mesh, a grain that does not divide its extent,
    /// a partial sum of bools, and more elements than memory can address; the help line gives the nearest valid
    /// layout.
    #[doc(alias = "NamedSharding")]
    #[doc(alias = "placements")]
    pub fn new(
        mesh: &Mesh,
        dtype: DType,
        dims: impl IntoIterator<Item = Dim>,
        partial: AxisSet,
        replicate: AxisSet,
    ) -> Result<Layout> {
        let dims: SmallVec<[Dim; 6]> = dims.into_iter().collect();
        let named = dims.iter().flat_map(|d| d.axes.iter()).chain(partial.iter()).chain(replicate.iter());
        if let Some(axis) = named.into_iter().find(|a| a.0 as usize >= mesh.num_axes()) {
            let text = format!("a layout uses axis number {}, which {mesh} does not have", axis.0);
            return Err(Error::new(Kind::Layout, text));
        }
        let shape = dims.iter().map(|d| d.extent).collect();
        let mut parts = Parts { mesh: mesh.clone(), dtype, partial, replicate, dims, shape };
        let fault = parts.repair();
        parts.drop_trivial_axes();
        let layout = Layout(Arc::new(parts));
        if let Some(fault) = fault {
            return Err(Error::new(Kind::Layout, fault)
                .detail("help", format!("the nearest valid layout is {layout}")));
        }
        if layout.is_addressable() {
            return Ok(layout);
        }
        Err(Error::new(Kind::Layout, format!("{layout} {BEYOND_MEMORY}")))
    }

    /// The address of the shared parts: a hint for lookup tables only, since equal layouts may have different
    /// addresses.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The layout of an unsharded tensor: every rank holds all of it, invariant (`=`) on every axis. The caller
    /// guarantees that memory can address the elements; use [`Layout::checked_invariant`] for a shape that is not
    /// checked yet.
    #[doc(alias = "replicated")]
    #[must_use]
    pub fn invariant(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Layout {
        let dims = shape.iter().map(|&n| Dim::unsharded(n)).collect();
        Layout::assemble(mesh, dtype, dims, AxisSet::EMPTY, AxisSet::EMPTY)
    }

    /// [`Layout::invariant`] for an unchecked shape.
    ///
    /// # Errors
    /// `Kind::Shape` for more elements than memory can address.
    pub fn checked_invariant(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Result<Layout> {
        let layout = Layout::invariant(mesh, dtype, shape);
        layout.check_addressable().map(|()| layout)
    }

    /// Checks that memory can address all elements.
    ///
    /// # Errors
    /// `Kind::Shape`.
    pub(crate) fn check_addressable(&self) -> Result<()> {
        if self.is_addressable() {
            return Ok(());
        }
        Err(Error::new(Kind::Shape, format!("{self} {BEYOND_MEMORY}"))
            .detail("help", "extents are counted in elements: make the largest one smaller"))
    }

    /// Whether memory can address all elements, counting an extent of 0 as 1 so that no product of extents
    /// overflows.
    pub(crate) fn is_addressable(&self) -> bool {
        let bytes = self.dims().iter().try_fold(self.dtype().size(), |n, d| n.checked_mul(d.extent.max(1)));
        bytes.is_some_and(|bytes| bytes <= isize::MAX as usize)
    }

    /// Returns the mesh.
    #[doc(alias = "device_mesh")]
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// Returns the dtype.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Returns the number of dims.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.0.dims.len()
    }

    /// Returns the dims.
    #[must_use]
    pub fn dims(&self) -> &[Dim] {
        &self.0.dims
    }

    /// Returns the global extent of dim `d`.
    #[must_use]
    pub fn extent(&self, d: usize) -> usize {
        self.0.dims[d].extent
    }

    /// Returns the global shape.
    #[must_use]
    pub fn shape(&self) -> Dims {
        Dims::from_slice(self.extents())
    }

    /// Returns the global shape as a slice.
    #[must_use]
    pub fn extents(&self) -> &[usize] {
        &self.0.shape
    }

    /// Returns the global number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.extents().iter().product()
    }

    /// Returns the axes over which the value is a partial sum (`+`).
    #[doc(alias = "Partial")]
    #[must_use]
    pub fn partial(&self) -> AxisSet {
        self.0.partial
    }

    /// Returns the axes with independent replicas (`~`).
    #[doc(alias = "Replicate")]
    #[must_use]
    pub fn replicate(&self) -> AxisSet {
        self.0.replicate
    }

    /// Returns the axes that shard some dim (`@`).
    #[doc(alias = "Shard")]
    #[must_use]
    pub fn sharded_axes(&self) -> AxisSet {
        self.0.dims.iter().flat_map(|d| d.axes.iter()).collect()
    }

    /// Returns the shape of the local tensor on the rank at a coordinate.
    #[must_use]
    pub fn local_shape(&self, coordinate: &[usize]) -> Dims {
        self.0.dims.iter().map(|d| d.range(&self.0.mesh, coordinate).len()).collect()
    }

    /// Returns the range of dim `d` that the rank at a coordinate holds.
    #[must_use]
    pub fn range(&self, d: usize, coordinate: &[usize]) -> Range<usize> {
        self.0.dims[d].range(&self.0.mesh, coordinate)
    }

    /// Returns the placement of the tensor along an axis. Axes of size 1 are invariant.
    #[must_use]
    pub fn placement(&self, axis: Axis) -> Placement {
        if self.0.partial.contains(axis) {
            Placement::Partial
        } else if self.0.replicate.contains(axis) {
            Placement::Replicate
        } else {
            self.0
                .dims
                .iter()
                .position(|d| d.axes.contains(axis))
                .map_or(Placement::Invariant, Placement::Shard)
        }
    }

    /// Returns the layout with an axis in another placement; a shard becomes the innermost of its dim. The caller
    /// guarantees that the axis was the innermost of the dim that it leaves.
    #[must_use]
    pub fn with_placement(&self, axis: Axis, placement: Placement) -> Layout {
        let mut layout = self.clone();
        layout.set_placement(axis, placement);
        layout
    }

    /// [`Layout::with_placement`] in place.
    pub(crate) fn set_placement(&mut self, axis: Axis, placement: Placement) {
        if self.0.mesh.size(axis) == 1 {
            return;
        }
        let parts = Arc::make_mut(&mut self.0);
        parts.partial = parts.partial.without(axis);
        parts.replicate = parts.replicate.without(axis);
        for dim in &mut parts.dims {
            if dim.axes.contains(axis) {
                dim.axes = dim.axes.without(axis);
            }
        }
        match placement {
            Placement::Invariant => {}
            Placement::Replicate => parts.replicate = parts.replicate.with(axis),
            Placement::Partial => parts.partial = parts.partial.with(axis),
            Placement::Shard(d) => parts.dims[d].axes = parts.dims[d].axes.with(axis),
        }
    }

    /// Changes the grain of a dim. The caller guarantees that the shard boundaries stay the same.
    pub(crate) fn set_grain(&mut self, d: usize, grain: usize) {
        debug_assert!(
            self.0.dims[d].has_same_boundaries(grain, &self.0.mesh),
            "a new grain of dim {d} of {self} moves no shard boundary"
        );
        Arc::make_mut(&mut self.0).dims[d].grain = grain;
    }

    /// Returns the layout with other dims; the caller guarantees that they are valid.
    pub(crate) fn with_dims(&self, dims: SmallVec<[Dim; 6]>) -> Layout {
        Layout::assemble(self.mesh(), self.dtype(), dims, self.partial(), self.replicate())
    }

    /// Makes a layout from parts; the caller guarantees that they are valid.
    pub(crate) fn assemble(
        mesh: &Mesh,
        dtype: DType,
        dims: SmallVec<[Dim; 6]>,
        partial: AxisSet,
        replicate: AxisSet,
    ) -> Layout {
        let shape = dims.iter().map(|d| d.extent).collect();
        Layout(Arc::new(Parts { mesh: mesh.clone(), dtype, partial, replicate, dims, shape }))
    }

    /// Returns the layout of the gradient: partial and replicated axes swap.
    #[must_use]
    pub fn dual(&self) -> Layout {
        if self.partial() == self.replicate() {
            return self.clone(); // No axis is both, so both sets are empty.
        }
        Layout(Arc::new(Parts { partial: self.replicate(), replicate: self.partial(), ..(*self.0).clone() }))
    }

    /// Whether this is the layout of the gradient of a value with the other layout.
    #[must_use]
    pub fn is_dual_of(&self, other: &Layout) -> bool {
        if other.partial() == other.replicate() { self == other } else { *self == other.dual() }
    }

    /// Returns the same layout with another dtype.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Layout {
        if dtype == self.dtype() {
            return self.clone();
        }
        Layout(Arc::new(Parts { dtype, ..(*self.0).clone() }))
    }

    /// Whether every rank holds the same elements under both layouts, so that one can stand for the other: they are
    /// equal except for grains that give the same shard boundaries.
    #[must_use]
    pub fn is_equivalent_to(&self, other: &Layout) -> bool {
        let same = |a: &Dim, b: &Dim| {
            a.extent == b.extent && a.axes == b.axes && a.has_same_boundaries(b.grain, &self.0.mesh)
        };
        (self.dtype(), self.partial(), self.replicate())
            == (other.dtype(), other.partial(), other.replicate())
            && self.ndim() == other.ndim()
            && self.dims().iter().zip(other.dims()).all(|(a, b)| same(a, b))
            && self.mesh() == other.mesh()
    }

    /// Whether the layout suits tensors that outlive a step (parameters, optimizer state): only shards and invariant
    /// copies. Then the gradient has the layout of the value, and replicas stay bit-equal.
    #[must_use]
    pub fn is_storable(&self) -> bool {
        self.0.partial.is_empty() && self.0.replicate.is_empty()
    }

    /// Checks that the layout is storable ([`Layout::is_storable`]).
    ///
    /// # Errors
    /// `Kind::Layout`; the help line gives the nearest storable layout.
    pub fn check_storable(&self) -> Result<()> {
        if self.is_storable() {
            return Ok(());
        }
        let dims = self.0.dims.clone();
        let nearest = Layout::assemble(self.mesh(), self.dtype(), dims, AxisSet::EMPTY, AxisSet::EMPTY);
        let text = format!("a stored tensor cannot be partial (+) or replicated (~), got {self}");
        Err(Error::new(Kind::Layout, text).detail("help", format!("the nearest valid layout is {nearest}")))
    }
}

pub(crate) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        Mesh::new(&[("a", 2), ("one", 1), ("b", 3)]).unwrap()
    }

    #[test]
    fn axes_of_size_one_are_dropped() {
        let (mesh, one) = (mesh(), Axis(1));
        let dims = [Dim::sharded(4, [one, Axis(0)]), Dim::unsharded(3)];
        let layout = Layout::new(&mesh, DType::F32, dims, AxisSet::one(Axis(2)), AxisSet::EMPTY).unwrap();
        assert_eq!(layout.to_string(), "f32[4@a, 3] +b");
        assert_eq!(layout.with_placement(one, Placement::Partial), layout);
        assert_eq!(layout.placement(one), Placement::Invariant);
        assert_eq!(layout.sharded_axes(), AxisSet::one(Axis(0)));
    }

    #[test]
    fn partial_bool_layouts_are_refused() {
        let error = Layout::parse("bool[4@b] +a", &mesh()).unwrap_err();
        assert_eq!(error.kind(), Kind::Layout);
        assert_eq!(error.message(), "a bool tensor cannot be a partial sum over axis `a`");
        assert_eq!(error.details(), [("help", "the nearest valid layout is bool[4@b]".to_string())]);
        assert!(
            Layout::parse("bool[4@b] +one", &mesh()).is_ok() && Layout::parse("i64[4] +a", &mesh()).is_ok()
        );
    }

    #[test]
    fn local_shapes_and_duals_match_hand_computed_values() {
        let layout = Layout::parse("f32[7@a@b, 5] ", &mesh());
        assert!(layout.is_err(), "a trailing space is refused");
        let layout = Layout::parse("f32[7@b, 5] +a", &mesh()).unwrap();
        assert_eq!(layout.local_shape(&[0, 0, 2]).as_slice(), [3, 5]);
        assert_eq!((layout.range(0, &[1, 0, 1]), layout.numel()), (2..4, 35));
        assert_eq!((layout.extents(), layout.shape().as_slice()), ([7, 5].as_slice(), [7, 5].as_slice()));
        assert_eq!(layout.dual().to_string(), "f32[7@b, 5] ~a");
        assert!(layout.dual().is_dual_of(&layout) && !layout.is_dual_of(&layout));
        let stored = layout.with_placement(Axis(0), Placement::Invariant);
        assert!(stored.is_dual_of(&stored) && !layout.is_dual_of(&stored));
        assert!(!layout.is_storable() && layout.with_placement(Axis(0), Placement::Invariant).is_storable());
        assert!(layout.check_storable().unwrap_err().to_string().contains("f32[7@b, 5]"));
    }

    #[test]
    fn errors_name_the_fault_and_the_nearest_valid_layout() {
        let make = |dims: [Dim; 2], p| Layout::new(&mesh(), DType::F32, dims, p, AxisSet::EMPTY);
        let twice =
            make([Dim::sharded(4, [Axis(0)]), Dim::sharded(3, [Axis(0)])], AxisSet::EMPTY).unwrap_err();
        assert_eq!(twice.message(), "axis `a` appears twice in a layout");
        assert_eq!(twice.details(), [("help", "the nearest valid layout is f32[4@a, 3]".to_string())]);
        let grain = make([Dim::unsharded(6).with_grain(4), Dim::unsharded(3)], AxisSet::EMPTY).unwrap_err();
        assert_eq!(grain.message(), "a grain of 4 does not divide the extent 6");
        assert_eq!(grain.details()[0].1, "the nearest valid layout is f32[6:2, 3]");
        assert!(make([Dim::sharded(4, [Axis(3)]), Dim::unsharded(3)], AxisSet::EMPTY).is_err());
        assert!(make([Dim::unsharded(usize::MAX), Dim::unsharded(3)], AxisSet::EMPTY).is_err());
    }

    #[test]
    fn layouts_with_equal_shard_boundaries_are_equivalent() {
        let parse = |t| Layout::parse(t, &mesh()).unwrap();
        assert!(parse("f32[8:4@a, 6:2]").is_equivalent_to(&parse("f32[8@a, 6]")));
        assert!(!parse("f32[12:4@a, 6]").is_equivalent_to(&parse("f32[12@a, 6]")));
        assert!(!parse("f32[8@a] +b").is_equivalent_to(&parse("f32[8@a]")));
    }
}
