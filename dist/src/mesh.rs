//! Device mesh: named axes over ranks. Pure arithmetic on coordinates, no communication.

use crate::error::{Error, Kind};
use std::fmt;
use std::sync::Arc;

/// An axis (mesh dimension) by its index in the mesh; 0 is the outermost.
#[doc(alias = "mesh_dim")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Axis(pub u8);

/// A set of axes of one mesh, iterated in mesh order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AxisSet(u16);

impl AxisSet {
    /// The empty set.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// The set of one axis.
    #[must_use]
    pub const fn one(axis: Axis) -> AxisSet {
        AxisSet(1 << axis.0)
    }

    /// Whether the axis is in the set.
    #[must_use]
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis.0) != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of axes in the set.
    #[must_use]
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The set with an axis added.
    #[must_use]
    pub const fn with(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 | (1 << axis.0))
    }

    /// The set with an axis removed.
    #[must_use]
    pub const fn without(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 & !(1 << axis.0))
    }

    /// The union of two sets.
    #[must_use]
    pub const fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }

    /// The set as a bit mask, the outermost axis in bit 0: a small dense number for indexing tables.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The axes, outermost first.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let first = (rest != 0).then(|| Axis(rest.trailing_zeros() as u8));
            rest &= rest.wrapping_sub(1);
            first
        })
    }
}

impl FromIterator<Axis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> AxisSet {
        axes.into_iter().fold(AxisSet::EMPTY, AxisSet::with)
    }
}

#[derive(PartialEq, Eq, Hash)]
struct Axes {
    names: Vec<String>,
    sizes: Vec<usize>,
}

/// A grid of ranks with named axes, the first axis outermost: rank = ((c0 * n1 + c1) * n2 + c2) ...
#[doc(alias = "DeviceMesh")]
#[doc(alias = "init_device_mesh")]
#[doc(alias = "jax.sharding.Mesh")]
#[derive(Clone)]
pub struct Mesh(Arc<Axes>);

impl PartialEq for Mesh {
    fn eq(&self, other: &Mesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}
impl Eq for Mesh {}

impl std::hash::Hash for Mesh {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Mesh {
    /// The most axes of one mesh.
    pub const MAX_AXES: usize = 8;

    /// Creates a mesh of the given axes, outermost first.
    ///
    /// # Errors
    /// `Kind::Mesh` for more than [`Mesh::MAX_AXES`] axes, a size of zero, a duplicate name, a name that is not an identifier
    /// (`[A-Za-z_][A-Za-z0-9_]*`), and for more than 2^31 ranks.
    pub fn new(axes: &[(&str, usize)]) -> Result<Mesh, Error> {
        let refuse = |why: String| Err(Error::new(Kind::Mesh, why));
        if axes.len() > Mesh::MAX_AXES {
            return refuse(format!("a mesh has at most {} axes, got {}", Mesh::MAX_AXES, axes.len()));
        }
        let mut ranks = 1usize;
        for (i, (name, size)) in axes.iter().enumerate() {
            let word = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
            if !word {
                return refuse(format!(
                    "`{name}` is not an axis name: use letters, digits and `_`, and start with a letter or `_`"
                ));
            }
            if axes[..i].iter().any(|(other, _)| other == name) {
                return refuse(format!("axis `{name}` is named twice in the mesh"));
            }
            if *size == 0 {
                return refuse(format!("axis `{name}` has size 0; leave it out or give it size 1"));
            }
            ranks = match ranks.checked_mul(*size) {
                Some(n) if n <= 1 << 31 => n,
                _ => {
                    return refuse(format!(
                        "axis `{name}` of size {size} makes the mesh larger than 2^31 ranks"
                    ));
                }
            };
        }
        Ok(Mesh(Arc::new(Axes {
            names: axes.iter().map(|a| a.0.to_string()).collect(),
            sizes: axes.iter().map(|a| a.1).collect(),
        })))
    }

    /// The mesh of one rank and no axes.
    #[must_use]
    pub fn single() -> Mesh {
        Mesh(Arc::new(Axes { names: vec![], sizes: vec![] }))
    }

    /// Parses a mesh such as `dp=2,tp=4`; an empty text is [`Mesh::single`].
    ///
    /// # Errors
    /// `Kind::Mesh` naming the part that is not `axis=size`, and the errors of [`Mesh::new`].
    pub fn parse(text: &str) -> Result<Mesh, Error> {
        let mut axes = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (name, size) = part
                .split_once('=')
                .and_then(|(n, s)| Some((n.trim(), s.trim().parse::<usize>().ok()?)))
                .ok_or_else(|| {
                    Error::new(
                        Kind::Mesh,
                        format!("`{part}` is not a mesh axis: write axis=size, as in dp=2,tp=2"),
                    )
                })?;
            axes.push((name, size));
        }
        Mesh::new(&axes)
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> impl Iterator<Item = Axis> + use<> {
        (0..self.0.sizes.len() as u8).map(Axis)
    }

    /// The number of axes.
    #[must_use]
    pub fn num_axes(&self) -> usize {
        self.0.sizes.len()
    }

    /// The number of ranks along an axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> usize {
        self.0.sizes[axis.0 as usize]
    }

    /// The name of an axis.
    #[must_use]
    pub fn name(&self, axis: Axis) -> &str {
        &self.0.names[axis.0 as usize]
    }

    /// The axis with a name, if there is one.
    #[must_use]
    pub fn axis(&self, name: &str) -> Option<Axis> {
        self.0.names.iter().position(|n| n == name).map(|i| Axis(i as u8))
    }

    /// The number of ranks: the product of all sizes.
    #[doc(alias = "world_size")]
    #[doc(alias = "get_world_size")]
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.0.sizes.iter().product()
    }

    /// The number of ranks in a group over a set of axes: the product of their sizes.
    #[must_use]
    pub fn group_size(&self, axes: AxisSet) -> usize {
        axes.iter().map(|a| self.size(a)).product()
    }

    /// The coordinate of a rank on each axis.
    #[must_use]
    pub fn coordinate(&self, rank: usize) -> Vec<usize> {
        let mut rest = rank;
        let mut at = vec![0; self.num_axes()];
        for (i, &size) in self.0.sizes.iter().enumerate().rev() {
            at[i] = rest % size;
            rest /= size;
        }
        at
    }

    /// The rank at a coordinate.
    #[must_use]
    pub fn rank_at(&self, coordinate: &[usize]) -> usize {
        coordinate.iter().zip(&self.0.sizes).fold(0, |r, (c, size)| r * size + c)
    }

    /// The members of the group of `rank` over `axes`: the ranks, itself included, that differ from `rank` only in the coordinates on
    /// `axes`, in mixed-radix order of these axes (mesh order, outermost first). A rank's index in this list is its group rank.
    #[doc(alias = "new_group")]
    #[doc(alias = "ProcessGroup")]
    #[doc(alias = "get_process_group_ranks")]
    #[must_use]
    pub fn group(&self, rank: usize, axes: AxisSet) -> Vec<usize> {
        let mut members = vec![self.first_in_group(rank, axes)];
        for axis in axes.iter() {
            let (size, stride) = (self.size(axis), self.stride(axis));
            members = members.iter().flat_map(|first| (0..size).map(move |c| first + c * stride)).collect();
        }
        members
    }

    /// The first rank of [`Mesh::group`].
    pub(crate) fn first_in_group(&self, rank: usize, axes: AxisSet) -> usize {
        let own = |axis: Axis| rank / self.stride(axis) % self.size(axis) * self.stride(axis);
        rank - axes.iter().map(own).sum::<usize>()
    }

    /// The difference between the rank numbers of two neighbours on an axis.
    fn stride(&self, axis: Axis) -> usize {
        self.0.sizes[axis.0 as usize + 1..].iter().product()
    }

    /// The set of all axes of the mesh.
    #[must_use]
    pub fn all_axes(&self) -> AxisSet {
        self.axes().collect()
    }

    /// A rank with its coordinates, as error messages name it: `5 (dp=1, tp=1) of mesh(dp=2, tp=4)`.
    #[must_use]
    pub fn describe(&self, rank: usize) -> String {
        let coordinate = self.coordinate(rank);
        let at: Vec<String> =
            self.axes().map(|a| format!("{}={}", self.name(a), coordinate[a.0 as usize])).collect();
        format!("{rank} ({}) of {self}", at.join(", "))
    }

    /// The names of a set of axes, joined by `,` (for error messages).
    #[must_use]
    pub fn names(&self, axes: AxisSet) -> String {
        axes.iter().map(|a| self.name(a)).collect::<Vec<_>>().join(",")
    }

    /// The mesh without an axis: the sub-mesh of the ranks with the same coordinate on that axis.
    ///
    /// # Panics
    /// If the mesh has no such axis.
    #[doc(alias = "submesh")]
    #[must_use]
    pub fn without(&self, axis: Axis) -> Mesh {
        let mut axes = Axes { names: self.0.names.clone(), sizes: self.0.sizes.clone() };
        axes.names.remove(usize::from(axis.0));
        axes.sizes.remove(usize::from(axis.0));
        Mesh(Arc::new(axes))
    }

    /// Splits one axis into an outer and an inner axis. Rank numbers stay.
    ///
    /// # Errors
    /// `Kind::Mesh` if the product of the sizes is not the size of the axis, or a name is taken.
    #[doc(alias = "unflatten")]
    pub fn split(&self, axis: Axis, outer: (&str, usize), inner: (&str, usize)) -> Result<Mesh, Error> {
        if outer.1.checked_mul(inner.1) != Some(self.size(axis)) {
            let (name, size) = (self.name(axis), self.size(axis));
            return Err(Error::new(
                Kind::Mesh,
                format!("axis `{name}` of size {size} cannot be split into {} x {}", outer.1, inner.1),
            ));
        }
        let mut axes: Vec<(&str, usize)> = self.axes().map(|a| (self.name(a), self.size(a))).collect();
        axes.splice(axis.0 as usize..=axis.0 as usize, [outer, inner]);
        Mesh::new(&axes)
    }

    /// Merges an axis with its inner neighbour into one axis. Rank numbers stay.
    ///
    /// # Errors
    /// `Kind::Mesh` if `outer` is the innermost axis, or the name is taken.
    #[doc(alias = "flatten")]
    pub fn fold(&self, outer: Axis, name: &str) -> Result<Mesh, Error> {
        let at = outer.0 as usize;
        if at + 1 >= self.num_axes() {
            return Err(Error::new(
                Kind::Mesh,
                format!(
                    "axis `{}` is the innermost axis: there is no inner neighbour to fold it with",
                    self.name(outer)
                ),
            ));
        }
        let mut axes: Vec<(&str, usize)> = self.axes().map(|a| (self.name(a), self.size(a))).collect();
        let size = axes[at].1 * axes[at + 1].1;
        axes.splice(at..at + 2, [(name, size)]);
        Mesh::new(&axes)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes().map(|a| format!("{}={}", self.name(a), self.size(a))).collect();
        write!(f, "mesh({})", axes.join(", "))
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_descriptions_by_hand() {
        let mesh = Mesh::parse("dp=2, tp=3").unwrap();
        let (dp, tp) = (mesh.axis("dp").unwrap(), mesh.axis("tp").unwrap());
        assert_eq!(mesh.describe(4), "4 (dp=1, tp=1) of mesh(dp=2, tp=3)");
        assert_eq!(mesh.group(4, AxisSet::one(dp)), [1, 4]);
        assert_eq!(mesh.group(4, AxisSet::one(tp)), [3, 4, 5]);
        assert_eq!(mesh.group(4, mesh.all_axes()), [0, 1, 2, 3, 4, 5]);
        assert_eq!(
            (mesh.all_axes().bits(), AxisSet::one(tp).bits(), mesh.names(mesh.all_axes())),
            (3, 2, "dp,tp".into())
        );
    }

    #[test]
    fn split_and_fold_keep_rank_numbers() {
        let mesh = Mesh::parse("dp=4,tp=3").unwrap();
        let split = mesh.split(Axis(0), ("dp", 2), ("ep", 2)).unwrap();
        assert_eq!(split.to_string(), "mesh(dp=2, ep=2, tp=3)");
        assert_eq!(split.fold(Axis(0), "dp").unwrap(), mesh);
        assert_eq!(
            split.group(7, [Axis(0), Axis(1)].into_iter().collect()),
            mesh.group(7, AxisSet::one(Axis(0)))
        );
        assert_eq!(mesh.split(Axis(1), ("a", 2), ("b", 2)).unwrap_err().kind(), Kind::Mesh);
        assert_eq!(mesh.fold(Axis(1), "x").unwrap_err().kind(), Kind::Mesh);
    }

    #[test]
    fn invalid_meshes_are_rejected() {
        for text in [
            "tp",
            "tp=0",
            "tp=x",
            "tp=2,tp=2",
            "2=2",
            "a b=2",
            "a=65536,b=65536",
            "a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1",
        ] {
            assert_eq!(Mesh::parse(text).unwrap_err().kind(), Kind::Mesh, "{text}");
        }
        assert_eq!(Mesh::parse(" ").unwrap(), Mesh::single());
    }
}
