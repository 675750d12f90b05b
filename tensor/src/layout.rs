//! How a global tensor lies on a mesh: which axes split which dim, which axes hold a pending sum, and which of the
//! rest hold a copy of their own.

use crate::dim::Dim;
use crate::state::State;
use shardgrad_dist::{Axis, AxisSet, Error, Kind, Mesh, Result};
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// The layout of a tensor. Axes of size 1 never stand in one, so a world of one rank has one layout per shape.
///
/// Its text form (`Display` and [`Layout::parse`]) is `f32[32@dp, 1024, 4096:128@tp] +cp`: per dim the extent, the
/// grain where it is not 1, and the axes that split it, outer first; then the pending and the replicated axes.
///
/// Cloning copies a handle, and handles of one layout are equal at a glance: every tensor has one, few differ.
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
        // The mesh is left out: its names are long to hash, and one program has few meshes.
        (self.0.dtype, self.0.partial, self.0.replicate).hash(hasher);
        self.0.dims.hash(hasher);
    }
}

impl Parts {
    /// Makes the parts legal and says what was wrong with it first.
    fn mend(&mut self) -> Option<String> {
        let mut faults = Vec::new();
        let (mut seen, mesh) = (AxisSet::EMPTY, self.mesh.clone());
        let mut first_time = |axis: Axis, faults: &mut Vec<String>| {
            let fresh = !seen.contains(axis);
            if !fresh {
                faults.push(format!("axis `{}` is named twice in a layout", mesh.name(axis)));
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
            faults.push(format!(
                "truth values have no sum that could be pending over axis `{}`",
                mesh.name(axis)
            ));
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

/// What is said of layouts that are not addressable.
pub(crate) const BEYOND_MEMORY: &str = "has more elements than memory has addresses";

impl Layout {
    /// A layout. Axes of size 1 are dropped; axes that are not named are invariant.
    ///
    /// # Errors
    /// `Kind::Layout` (code `create`) for an axis that is named twice or is not on the mesh, a grain that does not
    /// divide its extent, truth values that are pending, and more elements than memory has addresses; the help line gives the
    /// nearest layout.
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
            let text = format!("a layout names axis number {}, but there is none on {mesh}", axis.0);
            return Err(Error::new(Kind::Layout, text));
        }
        let shape = dims.iter().map(|d| d.extent).collect();
        let mut parts = Parts { mesh: mesh.clone(), dtype, partial, replicate, dims, shape };
        let fault = parts.mend();
        parts.drop_trivial_axes();
        let layout = Layout(Arc::new(parts));
        if let Some(fault) = fault {
            return Err(
                Error::new(Kind::Layout, fault).detail("help", format!("the nearest layout is {layout}"))
            );
        }
        if layout.is_addressable() {
            return Ok(layout);
        }
        Err(Error::new(Kind::Layout, format!("{layout} {BEYOND_MEMORY}")))
    }

    /// Where this handle points: a hint for tables, as equal layouts may lie at two places.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The layout of a tensor that every rank holds in full, invariant on every axis. That memory has addresses for so many
    /// elements is the caller's word; where nothing says so yet, ask [`Layout::checked_invariant`].
    #[must_use]
    pub fn invariant(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Layout {
        let dims = shape.iter().map(|&n| Dim::whole(n)).collect();
        Layout::assemble(mesh, dtype, dims, AxisSet::EMPTY, AxisSet::EMPTY)
    }

    /// [`Layout::invariant`] for a shape that nobody has looked at.
    ///
    /// # Errors
    /// `Kind::Shape` for more elements than memory has addresses.
    pub fn checked_invariant(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Result<Layout> {
        let layout = Layout::invariant(mesh, dtype, shape);
        layout.check_addressable().map(|()| layout)
    }

    /// Refuses more elements than memory has addresses.
    ///
    /// # Errors
    /// `Kind::Shape`.
    pub(crate) fn check_addressable(&self) -> Result<()> {
        if self.is_addressable() {
            return Ok(());
        }
        Err(Error::new(Kind::Shape, format!("{self} {BEYOND_MEMORY}"))
            .detail("help", "extents are counted in elements; one of them is too large"))
    }

    /// Whether memory has addresses for all elements, counting an extent of 0 as 1, so that no product of extents overflows.
    pub(crate) fn is_addressable(&self) -> bool {
        let bytes = self.dims().iter().try_fold(self.dtype().size(), |n, d| n.checked_mul(d.extent.max(1)));
        bytes.is_some_and(|bytes| bytes <= isize::MAX as usize)
    }

    /// The mesh.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// The dtype.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The number of dims.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.0.dims.len()
    }

    /// The dims.
    #[must_use]
    pub fn dims(&self) -> &[Dim] {
        &self.0.dims
    }

    /// The global extent of a dim.
    #[must_use]
    pub fn extent(&self, d: usize) -> usize {
        self.0.dims[d].extent
    }

    /// The global shape.
    #[must_use]
    pub fn shape(&self) -> Dims {
        Dims::from_slice(self.extents())
    }

    /// The global shape, lent.
    #[must_use]
    pub fn extents(&self) -> &[usize] {
        &self.0.shape
    }

    /// The global number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.extents().iter().product()
    }

    /// The axes that hold a pending sum.
    #[must_use]
    pub fn partial(&self) -> AxisSet {
        self.0.partial
    }

    /// The axes whose copies are each rank's own.
    #[must_use]
    pub fn replicate(&self) -> AxisSet {
        self.0.replicate
    }

    /// The axes that split some dim.
    #[must_use]
    pub fn sharded_axes(&self) -> AxisSet {
        self.0.dims.iter().flat_map(|d| d.axes.iter()).collect()
    }

    /// The shape of what the rank at a coordinate holds.
    #[must_use]
    pub fn local_shape(&self, coordinate: &[usize]) -> Dims {
        self.0.dims.iter().map(|d| d.range(&self.0.mesh, coordinate).len()).collect()
    }

    /// What the rank at a coordinate holds of dim `d`.
    #[must_use]
    pub fn range(&self, d: usize, coordinate: &[usize]) -> Range<usize> {
        self.0.dims[d].range(&self.0.mesh, coordinate)
    }

    /// The state of an axis. Axes of size 1 are invariant.
    #[must_use]
    pub fn state(&self, axis: Axis) -> State {
        if self.0.partial.contains(axis) {
            State::Partial
        } else if self.0.replicate.contains(axis) {
            State::Replicate
        } else {
            self.0.dims.iter().position(|d| d.axes.contains(axis)).map_or(State::Invariant, State::Shard)
        }
    }

    /// The layout with an axis in another state; a shard becomes the innermost of its dim. That the axis was the
    /// innermost of the dim it leaves is the caller's word.
    #[must_use]
    pub fn with_state(&self, axis: Axis, state: State) -> Layout {
        let mut layout = self.clone();
        layout.set_state(axis, state);
        layout
    }

    /// [`Layout::with_state`] in place.
    pub(crate) fn set_state(&mut self, axis: Axis, state: State) {
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
        match state {
            State::Invariant => {}
            State::Replicate => parts.replicate = parts.replicate.with(axis),
            State::Partial => parts.partial = parts.partial.with(axis),
            State::Shard(d) => parts.dims[d].axes = parts.dims[d].axes.with(axis),
        }
    }

    /// Counts a dim in another grain. That its cuts stay where they are is the caller's word.
    pub(crate) fn set_grain(&mut self, d: usize, grain: usize) {
        debug_assert!(
            self.0.dims[d].same_cuts(grain, &self.0.mesh),
            "a new grain of dim {d} of {self} moves no cut"
        );
        Arc::make_mut(&mut self.0).dims[d].grain = grain;
    }

    /// The layout with other dims, whose legality is the caller's word.
    pub(crate) fn with_dims(&self, dims: SmallVec<[Dim; 6]>) -> Layout {
        Layout::assemble(self.mesh(), self.dtype(), dims, self.partial(), self.replicate())
    }

    /// A layout from parts whose legality is the caller's word.
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

    /// The layout of the gradient: pending and replicated axes change places.
    #[must_use]
    pub fn dual(&self) -> Layout {
        if self.partial() == self.replicate() {
            return self.clone(); // There are none of either: no axis is both.
        }
        Layout(Arc::new(Parts { partial: self.replicate(), replicate: self.partial(), ..(*self.0).clone() }))
    }

    /// Whether this is the layout of the gradient of a value of the other.
    #[must_use]
    pub fn is_dual_of(&self, other: &Layout) -> bool {
        if other.partial() == other.replicate() { self == other } else { *self == other.dual() }
    }

    /// The same layout of another dtype.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Layout {
        if dtype == self.dtype() {
            return self.clone();
        }
        Layout(Arc::new(Parts { dtype, ..(*self.0).clone() }))
    }

    /// Whether every rank holds the same elements under both layouts, so that one may be renamed to the other: they
    /// are equal but for grains that cut at the same places.
    #[must_use]
    pub fn agrees(&self, other: &Layout) -> bool {
        let same =
            |a: &Dim, b: &Dim| a.extent == b.extent && a.axes == b.axes && a.same_cuts(b.grain, &self.0.mesh);
        (self.dtype(), self.partial(), self.replicate())
            == (other.dtype(), other.partial(), other.replicate())
            && self.ndim() == other.ndim()
            && self.dims().iter().zip(other.dims()).all(|(a, b)| same(a, b))
            && self.mesh() == other.mesh()
    }

    /// Whether tensors that live beyond a step may lie so: only shards and invariant copies, then the layout of the
    /// gradient is that of the value and replicas stay bit-equal.
    #[must_use]
    pub fn is_storable(&self) -> bool {
        self.0.partial.is_empty() && self.0.replicate.is_empty()
    }

    /// Refuses a layout that is not storable.
    ///
    /// # Errors
    /// `Kind::Layout` (code `create`); the help line gives the nearest layout.
    pub fn check_storable(&self) -> Result<()> {
        if self.is_storable() {
            return Ok(());
        }
        let dims = self.0.dims.clone();
        let nearest = Layout::assemble(self.mesh(), self.dtype(), dims, AxisSet::EMPTY, AxisSet::EMPTY);
        let text = format!("a stored tensor holds only shards and invariant copies, got {self}");
        Err(Error::new(Kind::Layout, text).detail("help", format!("the nearest layout is {nearest}")))
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
    fn axes_of_size_one_vanish() {
        let (mesh, one) = (mesh(), Axis(1));
        let dims = [Dim::split(4, [one, Axis(0)]), Dim::whole(3)];
        let layout = Layout::new(&mesh, DType::F32, dims, AxisSet::one(Axis(2)), AxisSet::EMPTY).unwrap();
        assert_eq!(layout.to_string(), "f32[4@a, 3] +b");
        assert_eq!(layout.with_state(one, State::Partial), layout);
        assert_eq!(layout.state(one), State::Invariant);
        assert_eq!(layout.sharded_axes(), AxisSet::one(Axis(0)));
    }

    #[test]
    fn truth_values_are_never_pending() {
        let error = Layout::parse("bool[4@b] +a", &mesh()).unwrap_err();
        assert_eq!(error.kind(), Kind::Layout);
        assert_eq!(error.message(), "truth values have no sum that could be pending over axis `a`");
        assert_eq!(error.details(), [("help", "the nearest layout is bool[4@b]".to_string())]);
        assert!(
            Layout::parse("bool[4@b] +one", &mesh()).is_ok() && Layout::parse("i64[4] +a", &mesh()).is_ok()
        );
    }

    #[test]
    fn local_shapes_and_duals_by_hand() {
        let layout = Layout::parse("f32[7@a@b, 5] ", &mesh());
        assert!(layout.is_err(), "a blank at the end is no layout");
        let layout = Layout::parse("f32[7@b, 5] +a", &mesh()).unwrap();
        assert_eq!(layout.local_shape(&[0, 0, 2]).as_slice(), [3, 5]);
        assert_eq!((layout.range(0, &[1, 0, 1]), layout.numel()), (2..4, 35));
        assert_eq!((layout.extents(), layout.shape().as_slice()), ([7, 5].as_slice(), [7, 5].as_slice()));
        assert_eq!(layout.dual().to_string(), "f32[7@b, 5] ~a");
        assert!(layout.dual().is_dual_of(&layout) && !layout.is_dual_of(&layout));
        let stored = layout.with_state(Axis(0), State::Invariant);
        assert!(stored.is_dual_of(&stored) && !layout.is_dual_of(&stored));
        assert!(!layout.is_storable() && layout.with_state(Axis(0), State::Invariant).is_storable());
        assert!(layout.check_storable().unwrap_err().to_string().contains("f32[7@b, 5]"));
    }

    #[test]
    fn faults_are_named_with_the_nearest_layout() {
        let make = |dims: [Dim; 2], p| Layout::new(&mesh(), DType::F32, dims, p, AxisSet::EMPTY);
        let twice = make([Dim::split(4, [Axis(0)]), Dim::split(3, [Axis(0)])], AxisSet::EMPTY).unwrap_err();
        assert_eq!(twice.message(), "axis `a` is named twice in a layout");
        assert_eq!(twice.details(), [("help", "the nearest layout is f32[4@a, 3]".to_string())]);
        let grain = make([Dim::whole(6).in_grains(4), Dim::whole(3)], AxisSet::EMPTY).unwrap_err();
        assert_eq!(grain.message(), "a grain of 4 does not divide the extent 6");
        assert_eq!(grain.details()[0].1, "the nearest layout is f32[6:2, 3]");
        assert!(make([Dim::split(4, [Axis(3)]), Dim::whole(3)], AxisSet::EMPTY).is_err());
        assert!(make([Dim::whole(usize::MAX), Dim::whole(3)], AxisSet::EMPTY).is_err());
    }

    #[test]
    fn grains_that_cut_alike_agree() {
        let parse = |t| Layout::parse(t, &mesh()).unwrap();
        assert!(parse("f32[8:4@a, 6:2]").agrees(&parse("f32[8@a, 6]")));
        assert!(!parse("f32[12:4@a, 6]").agrees(&parse("f32[12@a, 6]")));
        assert!(!parse("f32[8@a] +b").agrees(&parse("f32[8@a]")));
    }
}
