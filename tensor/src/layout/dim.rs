//! One dim of a layout: its extent, the mesh axes that shard it, and the rule that gives each rank its range.
//!
//! With axes `a_1 .. a_m` of sizes `k_j` and coordinates `c_j`, `K` the product of the sizes,
//! `i = ((c_1 k_2 + c_2) k_3 + c_3) ..` and `G = extent / grain`, a rank holds
//! `grain * floor(i G / K) .. grain * floor((i + 1) G / K)`: uneven shards differ by one grain, and a shard may be empty.

use shardgrad_dist::{Axis, Mesh};
use std::fmt;
use std::ops::Range;

/// The mesh axes that shard one dim, outermost first. At most [`Mesh::MAX_AXES`], each once.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct AxisList(u64);

impl AxisList {
    /// No axis: every rank holds the whole dim.
    pub const EMPTY: AxisList = AxisList(0);

    /// Returns the number of axes.
    #[must_use]
    pub const fn len(self) -> usize {
        // Each axis takes one byte, its number plus one; the first zero byte ends the list.
        8 - (self.0.leading_zeros() / 8) as usize
    }

    /// Whether no axis shards the dim.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over the axes, outermost first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Axis> + ExactSizeIterator {
        (0..self.len()).map(move |i| Axis((self.0 >> (8 * i)) as u8 - 1))
    }

    /// Returns the position of an axis in the list (0 is the outermost).
    #[must_use]
    pub fn position(self, axis: Axis) -> Option<usize> {
        self.iter().position(|a| a == axis)
    }

    /// Whether the axis is in the list.
    #[must_use]
    pub fn contains(self, axis: Axis) -> bool {
        self.position(axis).is_some()
    }

    /// Returns the innermost axis.
    #[must_use]
    pub fn last(self) -> Option<Axis> {
        self.iter().next_back()
    }

    /// Returns the list of the first `len` axes.
    #[must_use]
    pub const fn prefix(self, len: usize) -> AxisList {
        if len >= 8 { self } else { AxisList(self.0 & ((1 << (8 * len)) - 1)) }
    }

    /// Whether the other list starts with this list.
    #[must_use]
    pub const fn is_prefix_of(self, other: AxisList) -> bool {
        other.prefix(self.len()).0 == self.0
    }

    /// Returns the list with an axis appended as the innermost.
    #[must_use]
    pub const fn with(self, axis: Axis) -> AxisList {
        assert!(
            self.len() < Mesh::MAX_AXES && (axis.0 as usize) < Mesh::MAX_AXES,
            "a mesh has at most 8 axes"
        );
        AxisList(self.0 | ((axis.0 as u64 + 1) << (8 * self.len())))
    }

    /// Returns the list without an axis.
    #[must_use]
    pub fn without(self, axis: Axis) -> AxisList {
        self.iter().filter(|a| *a != axis).collect()
    }

    /// Returns the number of shards: the product of the sizes of the axes.
    #[must_use]
    pub fn num_shards(self, mesh: &Mesh) -> usize {
        self.iter().map(|a| mesh.size(a)).product()
    }
}

impl FromIterator<Axis> for AxisList {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> AxisList {
        axes.into_iter().fold(AxisList::EMPTY, AxisList::with)
    }
}

impl fmt::Debug for AxisList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|a| a.0)).finish()
    }
}

/// One dim of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dim {
    /// The global extent.
    pub extent: usize,
    /// The unit in which the dim is sharded (a head, a block), so that a shard boundary never falls inside one: at
    /// least 1, divides the extent. Kept on unsharded dims too.
    pub grain: usize,
    /// The axes that shard the dim, outermost first.
    pub axes: AxisList,
}

impl Dim {
    /// An unsharded dim, which every rank holds in full, with a grain of 1.
    #[must_use]
    pub const fn unsharded(extent: usize) -> Dim {
        Dim { extent, grain: 1, axes: AxisList::EMPTY }
    }

    /// Whether no axis shards the dim.
    #[must_use]
    pub const fn is_unsharded(&self) -> bool {
        self.axes.0 == AxisList::EMPTY.0
    }

    /// A dim with a grain of 1 that the given axes shard, outermost first.
    #[must_use]
    pub fn sharded(extent: usize, axes: impl IntoIterator<Item = Axis>) -> Dim {
        Dim { extent, grain: 1, axes: axes.into_iter().collect() }
    }

    /// The same dim with another grain.
    #[must_use]
    pub const fn with_grain(self, grain: usize) -> Dim {
        Dim { grain, ..self }
    }

    /// Returns the first index of shard `i` of `num_shards`.
    #[must_use]
    pub fn shard_start(&self, i: usize, num_shards: usize) -> usize {
        let grains = self.extent / self.grain;
        let begin = match i.checked_mul(grains) {
            Some(product) => product / num_shards,
            None => (i as u128 * grains as u128 / num_shards as u128) as usize,
        };
        begin * self.grain
    }

    /// Returns the index of the shard at a mesh coordinate (mixed radix over the axes, outermost first) and the
    /// number of shards.
    #[must_use]
    pub fn shard_index(&self, mesh: &Mesh, coordinate: &[usize]) -> (usize, usize) {
        self.axes.iter().fold((0, 1), |(i, num_shards), a| {
            let size = mesh.size(a);
            (i * size + coordinate[a.0 as usize], num_shards * size)
        })
    }

    /// Returns the range of indices that the rank at a coordinate holds.
    #[must_use]
    pub fn range(&self, mesh: &Mesh, coordinate: &[usize]) -> Range<usize> {
        if self.axes.is_empty() {
            return 0..self.extent;
        }
        let (i, num_shards) = self.shard_index(mesh, coordinate);
        self.shard_start(i, num_shards)..self.shard_start(i + 1, num_shards)
    }

    /// Returns the largest number of indices that any rank holds.
    #[must_use]
    pub fn max_local_extent(&self, mesh: &Mesh) -> usize {
        (self.extent / self.grain).div_ceil(self.axes.num_shards(mesh)) * self.grain
    }

    /// Whether sharding with another grain gives the same boundaries, so that changing the grain moves no element.
    #[must_use]
    pub fn has_same_boundaries(&self, grain: usize, mesh: &Mesh) -> bool {
        if self.grain == grain || self.axes.is_empty() {
            return true;
        }
        let (other, num_shards) = (self.with_grain(grain), self.axes.num_shards(mesh));
        (1..num_shards).all(|i| self.shard_start(i, num_shards) == other.shard_start(i, num_shards))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(list: &[u8]) -> AxisList {
        list.iter().map(|&a| Axis(a)).collect()
    }

    #[test]
    fn axis_lists_keep_their_order() {
        let list = axes(&[3, 0, 7]);
        assert_eq!(list.iter().map(|a| a.0).collect::<Vec<_>>(), [3, 0, 7]);
        assert_eq!((list.len(), list.last(), list.position(Axis(0))), (3, Some(Axis(7)), Some(1)));
        assert_eq!(list.without(Axis(3)), axes(&[0, 7]));
        assert!(
            axes(&[3, 0]).is_prefix_of(list) && AxisList::EMPTY.is_prefix_of(list) && list.is_prefix_of(list)
        );
        assert!(!axes(&[0]).is_prefix_of(list) && !list.is_prefix_of(axes(&[3, 0])));
        let full = axes(&[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((full.len(), full.prefix(8), full.prefix(2)), (8, full, axes(&[0, 1])));
    }

    #[test]
    fn ranges_match_hand_computed_values() {
        let mesh = Mesh::new(&[("a", 2), ("b", 3)]).unwrap();
        let dim = Dim::sharded(7, [Axis(0), Axis(1)]);
        let starts: Vec<usize> = (0..6).map(|r| dim.range(&mesh, &mesh.coordinate(r)).start).collect();
        assert_eq!(starts, [0, 1, 2, 3, 4, 5]);
        assert_eq!(dim.range(&mesh, &[1, 2]), 5..7);
        assert_eq!(Dim::sharded(12, [Axis(0)]).with_grain(4).range(&mesh, &[0, 0]), 0..4);
        assert_eq!((dim.max_local_extent(&mesh), Dim::unsharded(7).max_local_extent(&mesh)), (2, 7));
    }

    #[test]
    fn shard_start_does_not_overflow_64_bits() {
        let dim = Dim::unsharded(usize::MAX / 2);
        assert_eq!(dim.shard_start(1 << 31, 1 << 31), usize::MAX / 2);
        assert_eq!(dim.shard_start(1 << 30, 1 << 31), usize::MAX / 4);
    }

    #[test]
    fn has_same_boundaries_compares_grains() {
        let mesh = Mesh::new(&[("a", 2)]).unwrap();
        assert!(Dim::sharded(8, [Axis(0)]).has_same_boundaries(4, &mesh));
        assert!(!Dim::sharded(12, [Axis(0)]).has_same_boundaries(4, &mesh));
        assert!(Dim::unsharded(12).has_same_boundaries(4, &mesh));
    }

    #[test]
    fn nested_shards_tile_the_outer_shard_and_folding_axes_moves_nothing() {
        for (ka, kb, extent, grain) in combinations(&[1, 2, 3, 4], &[1, 2, 3, 4], 25, &[1, 2, 3]) {
            let mesh = Mesh::new(&[("a", ka), ("b", kb)]).unwrap();
            let folded = mesh.fold(Axis(0), "ab").unwrap();
            let both = Dim::sharded(extent, [Axis(0), Axis(1)]).with_grain(grain);
            let outer = Dim::sharded(extent, [Axis(0)]).with_grain(grain);
            for a in 0..ka {
                let inner: Vec<_> = (0..kb).map(|b| both.range(&mesh, &[a, b])).collect();
                assert_eq!(inner[0].start..inner[kb - 1].end, outer.range(&mesh, &[a, 0]));
                assert!(inner.windows(2).all(|w| w[0].end == w[1].start));
                for (b, range) in inner.iter().enumerate() {
                    assert_eq!(
                        *range,
                        outer.range(&folded, &[a * kb + b]),
                        "{extent}:{grain} over {ka} x {kb}"
                    );
                }
            }
        }
    }

    /// Every combination in which the grain divides the extent.
    fn combinations(
        ka: &[usize],
        kb: &[usize],
        extents: usize,
        grains: &[usize],
    ) -> Vec<(usize, usize, usize, usize)> {
        let mut all = Vec::new();
        for &a in ka {
            for &b in kb {
                for n in 0..extents {
                    all.extend(grains.iter().filter(|g| n % **g == 0).map(|&g| (a, b, n, g)));
                }
            }
        }
        all
    }
}
