//! Canonical sums: the order of a sum over fixed leaves, whichever rank or pass computes a leaf.
//!
//! A dim of n units is cut into B leaves, leaf j being floor(j n / B) .. floor((j + 1) n / B). The leaves are joined in a perfect
//! binary tree over the leaf index: a node is the sum of its two children or, where only one child has leaves, that child. A leaf
//! without elements is absent, not zero, so that -0 stays -0. Since the tree depends on B alone, a sum has the same bits whichever
//! rank or pass computes a leaf, and in whatever order nodes are found, as long as a + b is computed as the left child plus the
//! right child and rounded to its dtype.
//!
//! Rank r of k holds the leaves r B / k .. (r + 1) B / k. Its border floor(r n / k) is the border of a leaf, so ranks of uneven
//! shards hold whole leaves too. A rank sends the sums of its maximal nodes, one where B / k is a power of two.

use std::ops::Range;

/// The tree over the leaves of a canonical sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumTree {
    num_leaves: usize,
}

/// A node of a [`SumTree`]: `width` leaf positions from `start` on. The width is a power of two that divides the start; positions
/// beyond the last leaf are absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeNode {
    /// The first leaf position.
    pub start: usize,
    /// The number of leaf positions.
    pub width: usize,
}

impl TreeNode {
    fn parent(self) -> TreeNode {
        let width = 2 * self.width;
        TreeNode { start: self.start / width * width, width }
    }

    fn is_left_child(self) -> bool {
        self.start == self.parent().start
    }

    fn sibling(self) -> TreeNode {
        let start = if self.is_left_child() { self.start + self.width } else { self.start - self.width };
        TreeNode { start, width: self.width }
    }
}

impl SumTree {
    /// The version of the rule. A change of the tree, of the borders of leaves or of the order of the sum inside a leaf changes bits,
    /// and gets another version.
    pub const VERSION: u64 = 1;

    /// Returns the tree over a number of leaves, at least one.
    ///
    /// # Panics
    /// For no leaves.
    #[must_use]
    pub fn new(num_leaves: usize) -> SumTree {
        assert!(num_leaves > 0, "a sum has at least one leaf");
        SumTree { num_leaves }
    }

    /// Returns the number of leaves.
    #[must_use]
    pub fn num_leaves(self) -> usize {
        self.num_leaves
    }

    /// Returns a number of leaves, at least that of this tree, of which each of some ranks holds a power of two: their partial sums
    /// are one root each.
    #[must_use]
    pub fn num_leaves_for(self, num_ranks: usize) -> usize {
        num_ranks * self.num_leaves.div_ceil(num_ranks).next_power_of_two()
    }

    /// Returns the units of a leaf of a dim of `extent` units; empty if the leaf is absent.
    #[must_use]
    pub fn leaf_range(self, extent: usize, leaf: usize) -> Range<usize> {
        let border = |leaf: usize| (leaf as u128 * extent as u128 / self.num_leaves as u128) as usize;
        border(leaf)..border(leaf + 1)
    }

    /// Returns the leaves that rank `rank` of `num_ranks` holds; `None` if the ranks do not divide the leaves.
    #[must_use]
    pub fn run(self, rank: usize, num_ranks: usize) -> Option<Range<usize>> {
        let each = self.num_leaves / num_ranks;
        (each * num_ranks == self.num_leaves).then(|| rank * each..(rank + 1) * each)
    }

    /// Returns the maximal nodes whose leaves all lie in a run of leaves, in order: the nodes whose sums the holder of the run sends.
    #[must_use]
    pub fn roots(self, run: Range<usize>) -> Vec<TreeNode> {
        let mut sums = TreeSums::new(self);
        for leaf in run {
            let Ok(()) =
                sums.add(SumTree::leaf(leaf), Some(()), |(), ()| Ok::<_, std::convert::Infallible>(()));
        }
        sums.into_roots().map(|(node, _)| node).collect()
    }

    /// Returns the node of one leaf.
    #[must_use]
    pub fn leaf(leaf: usize) -> TreeNode {
        TreeNode { start: leaf, width: 1 }
    }
}

/// The sums of some nodes of a tree, each joined with its sibling as soon as both are there (a binary counter, if leaves come in
/// order): at most log2 of the number of leaves plus one are held then. `T` is a number, a buffer, a tensor.
#[derive(Clone, Debug)]
pub struct TreeSums<T> {
    tree: SumTree,
    /// The nodes that wait for their siblings, in the order of their leaves.
    nodes: Vec<(TreeNode, Option<T>)>,
}

impl<T> TreeSums<T> {
    /// Returns sums without any node.
    #[must_use]
    pub fn new(tree: SumTree) -> TreeSums<T> {
        TreeSums { tree, nodes: Vec::new() }
    }

    /// Adds the sum of a node, `None` if all its leaves are absent. `join` returns the sum of a left and a right child. Each leaf
    /// is added once.
    ///
    /// # Errors
    /// Errors of `join`.
    pub fn add<E>(
        &mut self,
        mut node: TreeNode,
        mut sum: Option<T>,
        mut join: impl FnMut(T, T) -> Result<T, E>,
    ) -> Result<(), E> {
        while node.width < self.tree.num_leaves {
            let sibling = node.sibling();
            if sibling.start < self.tree.num_leaves {
                let Some(found) = self.nodes.iter().position(|(known, _)| *known == sibling) else { break };
                let (_, other) = self.nodes.remove(found);
                let (left, right) = if node.is_left_child() { (sum, other) } else { (other, sum) };
                sum = match (left, right) {
                    (Some(left), Some(right)) => Some(join(left, right)?),
                    (left, right) => left.or(right),
                };
            }
            node = node.parent();
        }
        let place = self.nodes.partition_point(|(known, _)| known.start < node.start);
        self.nodes.insert(place, (node, sum));
        Ok(())
    }

    /// Returns the nodes that are not joined, in the order of their leaves: one if all leaves were added.
    pub fn into_roots(self) -> impl Iterator<Item = (TreeNode, Option<T>)> {
        self.nodes.into_iter()
    }
}
