//! Canonical sums of ops: a label that the op sums over is cut into leaves, independent of the mesh, and the sums of the leaves are
//! joined in one tree, so that bits do not depend on how many ranks shard the label ([record
//! 30](../../../docs/adr/0030-canonical-sums.md)).
//!
//! One label of an op is cut, by its signature alone: the arguments are searched in order for a dim that the op sums over, that is,
//! whose label some output lacks and which may be sharded (no `!`). If the argument begins with such dims, rows and tokens, the
//! second dim of this run is cut, or the only one: tokens, because rows are the outermost label and have leaves of their own. Otherwise
//! the first such dim is cut: heads before channels, the queries of attention.

use super::{ForwardContext, LocalTensors, Op};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::dim::Dim;
use crate::layout::placement::Placement;
use crate::layout::signature::{Labels, Signature};
use crate::tensor::redistribute::sum_roots_of_ranks;
use shardgrad_dist::{AxisSet, Error, Kind, Rank, Result};
use shardgrad_kernels::op::binary::ACCUMULATE;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{Scalar, SumTree, TreeSums};
use smallvec::SmallVec;
use std::iter;
use std::ops::Range;

/// How an op sums where the bits of sums must not depend on the mesh ([`Context::set_sum_tree`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CanonicalForm {
    /// Not stated. Refused where the op would sum over something that a mesh axis shards, or gets a partial sum.
    #[default]
    None,
    /// The outputs are sums over the label that is cut: the forward runs once for each leaf of the label, and the outputs that lack the
    /// label are joined in the tree.
    Leaves,
    /// No output is a sum of several terms that are not zero, and none is rounded: moved elements, looked up rows.
    Exact,
    /// The forward joins leaves itself, or adds nothing that it rounds: maxima.
    Own,
}

impl CanonicalForm {
    /// Whether an op of this form, whose layouts follow from its signature, may get a partial sum; otherwise the sum is completed first.
    pub(super) fn takes_partial_sums(self) -> bool {
        self == CanonicalForm::Exact
    }
}

/// Runs the forward of an op whose sums are canonical.
///
/// # Errors
/// The errors of the op; `Kind::Unsupported` for a sum without a canonical form.
pub(super) fn forward(
    op: &dyn Op,
    tree: SumTree,
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
) -> Result<LocalTensors> {
    match op.canonical_form() {
        CanonicalForm::Exact | CanonicalForm::Own => op.forward(local, x),
        CanonicalForm::None => {
            check_sums_nothing_sharded(op, local)?;
            op.forward(local, x)
        }
        CanonicalForm::Leaves => {
            check_no_partial_argument(op, local.rank, local.inputs)?;
            let signature = Context::of(local.rank).signature(op.signature());
            match cut_label(&signature, local.inference.labels()) {
                Some(label) => leaves_joined(op, (tree, label), local, x),
                None => op.forward(local, x),
            }
        }
    }
}

/// Returns the label that is cut into leaves; `None` if the op sums over nothing that may be sharded.
fn cut_label(signature: &Signature, labels: &Labels) -> Option<u8> {
    let unsharded: Vec<u8> = signature.inputs().iter().flat_map(|terms| labels.unsharded(terms)).collect();
    let is_summed = |label: &u8| {
        *label != Labels::UNIT
            && !unsharded.contains(label)
            && labels.outputs().iter().any(|output| !output.contains(label))
    };
    labels.inputs().iter().find_map(|argument| {
        let leading = argument.iter().take_while(|label| is_summed(label)).take(2).last();
        leading.or_else(|| argument.iter().find(|label| is_summed(label))).copied()
    })
}

/// Returns the position of a label in a tensor.
fn dim_of(labels: &[u8], label: u8) -> Option<usize> {
    labels.iter().position(|known| *known == label)
}

/// Returns the position of the label that is cut in each argument, and the dim.
///
/// # Errors
/// `Kind::Unsupported` if another label that the op sums over is sharded.
fn cut_dims(op: &dyn Op, label: u8, local: &ForwardContext<'_>) -> Result<(Vec<Option<usize>>, Dim)> {
    let (rank, labels) = (local.rank, local.inference.labels());
    let dims: Vec<Option<usize>> = labels.inputs().iter().map(|argument| dim_of(argument, label)).collect();
    let summed = dims.iter().zip(local.inputs).find_map(|(dim, layout)| Some(layout.dims()[(*dim)?]));
    let summed = summed.expect("the label was found in an argument");
    for (argument, layout) in labels.inputs().iter().zip(local.inputs) {
        let other = argument.iter().zip(layout.dims()).find(|(other, dim)| {
            let is_summed = labels.outputs().iter().any(|output| !output.contains(other));
            **other != label && is_summed && num_shards(rank, dim) > 1
        });
        if let Some((other, _)) = other {
            let (op, other, label) = (op.name(), labels.name(*other), labels.name(label));
            let why =
                format!("{op} sums over `{other}`, which is sharded, but its leaves are those of `{label}`");
            return Err(unsupported_sum(why));
        }
    }
    Ok((dims, summed))
}

/// Sums over the leaves of this rank of the label that is cut, for an op that joins the leaves of a node itself
/// ([`CanonicalForm::Own`]): as [`sum_leaves`], with one output. `node` gets the parts of the arguments that have the elements of the
/// node, and the leaf of each element of the first one, flattened: i64. The first argument has the label.
///
/// # Errors
/// `Kind::Unsupported` if another label that the op sums over is sharded; as [`sum_leaves`].
pub(crate) fn sum_nodes(
    op: &dyn Op,
    tree: SumTree,
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
    node: impl Fn(&[LocalTensor], &LocalTensor) -> Result<LocalTensors>,
) -> Result<LocalTensors> {
    let signature = Context::of(local.rank).signature(op.signature());
    let upload = |leaves: &[i64]| LocalTensor::upload(local.rank, &[leaves.len()], leaves);
    let of_one_leaf = || {
        let parts: Vec<LocalTensor> = x.iter().map(|x| (*x).clone()).collect();
        node(&parts, &upload(&vec![0; x[0].numel()])?)
    };
    let Some(label) = cut_label(&signature, local.inference.labels()) else { return of_one_leaf() };
    let (dims, summed) = cut_dims(op, label, local)?;
    if summed.extent == 0 {
        return of_one_leaf();
    }
    let dim = dims[0].expect("the first argument has the label that is cut");
    let outputs = || Ok([local.output(0)?].into_iter().collect());
    sum_leaves(local, x, (tree, &summed), outputs, |held| {
        let range = held.range();
        let parts = parts_of(x, &dims, &range);
        let mut leaves = vec![0i64; parts[0].numel()];
        let inner: usize = x[0].view.shape[dim + 1..].iter().product();
        for block in leaves.chunks_exact_mut((range.len() * inner).max(1)) {
            for (leaf, pair) in (held.first..).zip(held.borders.windows(2)) {
                block[(pair[0] - range.start) * inner..(pair[1] - range.start) * inner].fill(leaf as i64);
            }
        }
        node(&parts, &upload(&leaves)?)
    })
}

/// Returns the parts of arguments with a range of the label that is cut, at these dims.
fn parts_of(x: &[&LocalTensor], dims: &[Option<usize>], range: &Range<usize>) -> Vec<LocalTensor> {
    let part = |(x, dim): (&&LocalTensor, &Option<usize>)| match dim {
        Some(dim) => x.with_view(x.view.narrow(*dim, range.start, range.end)),
        None => (*x).clone(),
    };
    x.iter().zip(dims).map(part).collect()
}

/// Runs the forward once for each leaf of a label, or for all leaves of a node at once, and joins the outputs.
fn leaves_joined(
    op: &dyn Op,
    (tree, label): (SumTree, u8),
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
) -> Result<LocalTensors> {
    let (rank, labels) = (local.rank, local.inference.labels());
    let (dims, summed) = cut_dims(op, label, local)?;
    if summed.extent == 0 {
        return op.forward(local, x);
    }
    let (axes, leaves) = local_leaves(rank, tree, &summed)?;
    if leaves.are_one_node(axes) && !leaves.range().is_empty() {
        let cut = LeafCut { label, leaves };
        if let Some(outputs) = op.forward_of_leaves(local, x, &cut) {
            return outputs;
        }
    }
    let outputs: Vec<Option<usize>> = labels.outputs().iter().map(|output| dim_of(output, label)).collect();
    let start = summed.range(rank.mesh(), rank.coordinates()).start;
    let mut whole: Vec<Option<LocalTensor>> = outputs
        .iter()
        .enumerate()
        .map(|(i, dim)| dim.map(|_| local.output(i)).transpose())
        .collect::<Result<_>>()?;
    let sum_outputs = || {
        let sums = outputs.iter().enumerate().filter(|(_, dim)| dim.is_none());
        sums.map(|(i, _)| local.output(i)).collect::<Result<LocalTensors>>()
    };
    let sums = sum_leaves(local, x, (tree, &summed), sum_outputs, |leaves| {
        leaves.sum_each(rank, |range| {
            let parts = parts_of(x, &dims, &range);
            let leaf = start + range.start..start + range.end;
            let local = ForwardContext { leaf: Some((label, leaf)), ..*local };
            let mut results = op.forward(&local, &parts.iter().collect::<Vec<_>>())?;
            for ((result, whole), dim) in results.iter().zip(&mut whole).zip(&outputs) {
                if let (Some(whole), Some(dim)) = (whole, dim) {
                    let at = whole.view.narrow(*dim, range.start, range.end);
                    whole.write(rank, at, result)?;
                }
            }
            let mut is_sum = outputs.iter().map(Option::is_none);
            results.retain(|_| is_sum.next().unwrap_or(true));
            Ok(results)
        })
    })?;
    let mut sums = sums.into_iter();
    let output =
        |whole: Option<LocalTensor>| whole.or_else(|| sums.next()).expect("one sum for each sum output");
    Ok(whole.into_iter().map(output).collect())
}

/// Leaves of one node of a tree, on one rank.
#[derive(Clone, Debug)]
pub struct NodeLeaves {
    /// The tree.
    pub tree: SumTree,
    /// The first leaf.
    pub first: usize,
    /// The borders of the leaves in the local part of a dim, one more than there are leaves.
    pub borders: Vec<usize>,
}

impl NodeLeaves {
    /// Returns all leaves of a dim that no axis shards.
    pub(crate) fn of_whole(tree: SumTree, dim: &Dim) -> NodeLeaves {
        let end = |leaf: usize| tree.leaf_range(dim.extent / dim.grain, leaf).end * dim.grain;
        NodeLeaves { tree, first: 0, borders: iter::once(0).chain((0..tree.num_leaves()).map(end)).collect() }
    }

    /// Returns the range of all leaves in the local part of the dim.
    pub(crate) fn range(&self) -> Range<usize> {
        self.borders[0]..self.borders[self.borders.len() - 1]
    }

    /// Whether the leaves of a rank are those of one node, on each rank of the axes that shard them: an aligned run whose
    /// length is a power of two.
    fn are_one_node(&self, axes: AxisSet) -> bool {
        axes.is_empty() || (self.borders.len() - 1).is_power_of_two()
    }

    /// The sum of all leaves, which `part` sums over the range of a leaf. Each node is rounded to the dtype. Some leaf has an element.
    ///
    /// # Errors
    /// Errors of `part` and of additions.
    pub(crate) fn sum_each(
        &self,
        rank: &Rank,
        mut part: impl FnMut(Range<usize>) -> Result<LocalTensors>,
    ) -> Result<LocalTensors> {
        let mut sums = TreeSums::new(self.tree);
        for (number, pair) in self.borders.windows(2).enumerate() {
            let sum = if pair[0] == pair[1] { None } else { Some(part(pair[0]..pair[1])?) };
            sums.add(SumTree::leaf(self.first + number), sum, |mut left: LocalTensors, right| {
                for (left, right) in left.iter_mut().zip(&right) {
                    launch(rank, &ACCUMULATE, &[right], &mut [left], &[])?;
                }
                Ok::<_, Error>(left)
            })?;
        }
        let root = sums.into_roots().next().and_then(|(_, sum)| sum);
        Ok(root.expect("some leaf has an element"))
    }

    /// The leaves as scalars of kernels such as [`LEAF_MATMUL`](shardgrad_kernels::op::leaf_matmul::LEAF_MATMUL), in units of `inner`
    /// elements.
    pub(crate) fn scalars(&self, inner: usize) -> SmallVec<[Scalar; 12]> {
        let borders = self.borders.iter().map(|border| border * inner);
        [self.tree.num_leaves(), self.first]
            .into_iter()
            .chain(borders)
            .map(|n| Scalar::Int(n as i64))
            .collect()
    }
}

/// The leaves of a label of an op that a rank holds.
#[derive(Debug)]
pub struct LeafCut {
    /// The label.
    pub label: u8,
    /// The leaves, the first of which begins at 0.
    pub leaves: NodeLeaves,
}

/// Sums over the leaves of this rank of a dim, as terms of a sum over the ranks of the axes that shard the dim: with
/// the sum over the leaves of the rank if they are those of a node on each rank, otherwise with the sum of all leaves on the first rank
/// and -0 on the others. `outputs` allocates the sums; `node` sums the leaves of a node.
///
/// # Errors
/// `Kind::Unsupported` if the dim is sharded over several axes in another order than that of the mesh, or its ranks do not divide the
/// leaves; errors of `node` and, for several nodes on a rank, of the collective that joins them.
pub(crate) fn sum_leaves(
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
    (tree, dim): (SumTree, &Dim),
    outputs: impl Fn() -> Result<LocalTensors>,
    mut node: impl FnMut(&NodeLeaves) -> Result<LocalTensors>,
) -> Result<LocalTensors> {
    let rank = local.rank;
    let zeros = || {
        let mut outputs = outputs()?;
        for output in &mut outputs {
            launch(rank, &FILL, &[], &mut [output], &[Scalar::Real(Context::of(rank).zero())])?;
        }
        Ok::<_, Error>(outputs)
    };
    let (axes, leaves) = local_leaves(rank, tree, dim)?;
    let run = leaves.first..leaves.first + leaves.borders.len() - 1;
    let is_one_node = leaves.are_one_node(axes);
    let mut sums = Vec::new();
    for root in tree.roots(run.clone()) {
        let end = (root.start + root.width).min(run.end);
        let borders = leaves.borders[root.start - run.start..=end - run.start].to_vec();
        let leaves = NodeLeaves { first: root.start, borders, ..leaves };
        // A rank without an element of the node has nothing to add.
        sums.push(if leaves.range().is_empty() { zeros()? } else { node(&leaves)? });
    }
    if is_one_node {
        return Ok(sums.pop().expect("a run of leaves has a root"));
    }
    let zeros = zeros()?;
    let join = |(i, zeros): (usize, LocalTensor)| {
        let roots: Vec<LocalTensor> =
            sums.iter().map(|sums| local.with_lineage(x, sums[i].clone())).collect();
        let sum = sum_roots_of_ranks(rank, &roots, axes, tree, local.site)?;
        Ok(if rank.group_rank(axes) == 0 { sum } else { zeros })
    };
    zeros.into_iter().enumerate().map(join).collect()
}

/// [`sum_leaves`] of one output like `like`, of which `part` sums the range of a leaf.
///
/// # Errors
/// As [`sum_leaves`]; errors of `part`.
pub(crate) fn sum_ranges(
    local: &ForwardContext<'_>,
    x: &LocalTensor,
    (tree, dim): (SumTree, &Dim),
    like: &LocalTensor,
    part: impl Fn(Range<usize>) -> Result<LocalTensor>,
) -> Result<LocalTensor> {
    let outputs =
        || Ok([LocalTensor::alloc(local.rank, like.dtype, &like.view.shape)?].into_iter().collect());
    let mut sums = sum_leaves(local, &[x], (tree, dim), outputs, |leaves| {
        leaves.sum_each(local.rank, |range| Ok([part(range)?].into_iter().collect()))
    })?;
    Ok(sums.pop().expect("one sum"))
}

/// Returns the axes that shard a dim, and the leaves of this rank.
fn local_leaves(rank: &Rank, tree: SumTree, dim: &Dim) -> Result<(AxisSet, NodeLeaves)> {
    let (mesh, coordinates) = (rank.mesh(), rank.coordinates());
    // The ranks of a group, which join the sums, are in the order of the mesh.
    let sharding = || dim.axes.iter().filter(|axis| mesh.size(*axis) > 1);
    let axes: AxisSet = sharding().collect();
    if !sharding().eq(axes.iter()) {
        let names = sharding().map(|axis| mesh.name(axis)).collect::<Vec<_>>().join(", ");
        return Err(unsupported_sum(format!(
            "a sum over a dim that the axes {names} shard has a canonical form only on a mesh that lists them in this order"
        )));
    }
    let (position, num_ranks) = dim.shard_index(mesh, coordinates);
    let Some(run) = tree.run(position, num_ranks) else {
        let num_leaves = tree.num_leaves();
        let why = format!("{num_ranks} ranks cannot share the {num_leaves} leaves of a sum");
        let fitting = tree.num_leaves_for(num_ranks);
        let help = format!(
            "use {fitting} leaves (--sum-leaves); a run on other meshes has the same bits only with the same number"
        );
        return Err(Error::new(Kind::Config, why).detail("help", help));
    };
    let (start, grain) = (dim.range(mesh, coordinates).start, dim.grain);
    let end = |leaf: usize| tree.leaf_range(dim.extent / grain, leaf).end * grain - start;
    let borders = iter::once(0).chain(run.clone().map(end)).collect();
    Ok((axes, NodeLeaves { tree, first: run.start, borders }))
}

fn num_shards(rank: &Rank, dim: &Dim) -> usize {
    dim.axes.num_shards(rank.mesh())
}

/// Refuses a partial sum as an argument: to compute with the terms of each rank rounds on each rank.
pub(super) fn check_no_partial_argument<'a>(
    op: &dyn Op,
    rank: &Rank,
    args: impl IntoIterator<Item = &'a Layout>,
) -> Result<()> {
    let mesh = rank.mesh();
    let partial = args.into_iter().flat_map(|layout| layout.partial().iter());
    match partial.into_iter().find(|axis| mesh.size(*axis) > 1) {
        None => Ok(()),
        Some(axis) => {
            let (op, axis) = (op.name(), mesh.name(axis));
            Err(unsupported_sum(format!("{op} computes with a partial sum over `{axis}`, term by term")))
        }
    }
}

/// Refuses an op that may sum over something that a mesh axis shards: an axis that shards an argument and not all outputs.
fn check_sums_nothing_sharded(op: &dyn Op, local: &ForwardContext<'_>) -> Result<()> {
    check_no_partial_argument(op, local.rank, local.inputs)?;
    let mesh = local.rank.mesh();
    let summed = mesh.axes().filter(|axis| mesh.size(*axis) > 1).find(|axis| {
        let is_shard = |placement| matches!(placement, Placement::Shard(_));
        local.inputs.iter().any(|layout| is_shard(layout.placement(*axis)))
            && !local.inference.outputs.iter().all(|layout| is_shard(layout.placement(*axis)))
    });
    match summed {
        None => Ok(()),
        Some(axis) => {
            let (op, axis) = (op.name(), mesh.name(axis));
            Err(unsupported_sum(format!(
                "{op} sums over a dim that `{axis}` shards, and states no canonical form"
            )))
        }
    }
}

/// Refuses an op where sums are canonical, because it adds terms of several ranks in an order that follows the ranks.
///
/// # Errors
/// `Kind::Unsupported`.
pub(crate) fn refuse_order_of_ranks(op: &str, rank: &Rank) -> Result<()> {
    match Context::of(rank).sum_tree() {
        None => Ok(()),
        Some(_) => Err(unsupported_sum(format!(
            "{op} adds terms of several ranks in an order that follows the ranks"
        ))),
    }
}

/// The error about a sum without a canonical form.
pub(crate) fn unsupported_sum(why: String) -> Error {
    Error::new(Kind::Unsupported, why).detail(
        "help",
        "use a mesh that does not shard the dim, or give up bits that are independent of the mesh (Deterministic::Run, \
         --deterministic run)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use crate::op::{DTypes, apply};
    use crate::ops::einsum::Einsum;
    use crate::ops::layer_norm::NormBackward;
    use crate::ops::sum::Sum;
    use crate::tensor::Tensor;
    use crate::tensor::redistribute::redistribute_cached;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;
    use std::panic::Location;
    use std::rc::Rc;

    #[test]
    fn label_that_is_cut_follows_from_the_signature() {
        for (text, ndims, cut) in [
            // Tokens, not rows; heads, not channels; not the packed queries, keys and values.
            ("..m k, ..m n -> k n", &[3, 3][..], Some("m1")),
            ("..m k, k n -> ..m n", &[3, 2], Some("k")),
            ("..m i0 i1, i0 i1 o0 -> ..m o0", &[4, 3], Some("i0")),
            ("..m p0! o0 o1, i0 p0! o0 o1 -> ..m i0", &[5, 4], Some("o0")),
            ("..m d -> d", &[3], Some("m1")),
            ("a b c d -> c d", &[4], Some("b")),
            // Tokens of the counts of experts, not their slots.
            ("a b c d -> d", &[4], Some("b")),
            ("..m, ..m d -> [v] d", &[2, 3], Some("m1")),
            ("b t h c!, b s! h c!, b t h c! -> b t h c!, b s! h c!", &[4, 4, 4], Some("t")),
            ("..m d!, d!, ..m, ..m d! -> ..m d!, d!", &[3, 1, 2, 3], Some("m1")),
            ("..m, ..m -> ..m", &[2, 2], None),
            ("..m d! -> ..m", &[2], None),
        ] {
            let signature = Signature::parse(text).unwrap();
            let labels = signature.bind(|i| ndims[i], |_| None).unwrap();
            let found = cut_label(&signature, &labels).map(|label| labels.name(label));
            assert_eq!(found.as_deref(), cut, "{text}");
        }
    }

    /// Numbers that no order of addition sums exactly.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| (((i * 7919 + seed * 104_729) % 1009) as f32 - 504.0) / 37.0).collect()
    }

    /// The bits of x w, with k sharded over `tp`, completed.
    fn product(mesh: &str, tree: Option<SumTree>, dtype: DType, [m, k, n]: [usize; 3]) -> Vec<u64> {
        let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(tree);
            let axis = if mesh.is_empty() { "" } else { "@tp" };
            let tensor = |text: &str, count: usize, seed: usize| {
                let layout = Layout::parse(text, rank.mesh())?;
                Tensor::from_global(rank, &layout, &numbers(count, seed))?.into_dtype(dtype)
            };
            let x = tensor(&format!("f32[{m}, {k}{axis}]"), m * k, 0)?;
            let w = tensor(&format!("f32[{k}{axis}, {n}]"), k * n, 1)?;
            let y = x.matmul(&w);
            let whole = Layout::invariant(rank.mesh(), dtype, &[m, n]);
            let y = redistribute_cached(&y, &whole, Location::caller())?;
            Ok(y.to_f64()?.iter().map(|y| y.to_bits()).collect::<Vec<_>>())
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{mesh}: ranks disagree");
        ranks[0].clone()
    }

    /// An op without kernels that join leaves: the definition of the bits.
    #[derive(Debug)]
    struct LeafByLeaf(Rc<dyn Op>);

    impl Op for LeafByLeaf {
        fn name(&self) -> &'static str {
            self.0.name()
        }
        fn signature(&self) -> &str {
            self.0.signature()
        }
        fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
            self.0.dtypes(inputs, num_outputs)
        }
        fn canonical_form(&self) -> CanonicalForm {
            self.0.canonical_form()
        }
        fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
            self.0.forward(local, x)
        }
    }

    #[test]
    fn kernels_that_join_leaves_have_the_bits_of_the_leaves() {
        let einsum = |text| Rc::new(Einsum::new(text).unwrap()) as Rc<dyn Op>;
        let products: [(&str, [&[usize]; 2]); 8] = [
            ("..m k, k n -> ..m n", [&[3, 5, 70], &[70, 33]]),
            ("..m n, k n -> ..m k", [&[3, 5, 70], &[33, 70]]),
            ("..m k, ..m n -> k n", [&[4, 37, 20], &[4, 37, 9]]),
            ("a b m k, a b m n -> k n", [&[2, 3, 19, 6], &[2, 3, 19, 5]]),
            ("b m k, b k n -> b m n", [&[3, 4, 300], &[3, 300, 5]]),
            ("b t h c, h c d -> b t d", [&[2, 3, 6, 5], &[6, 5, 7]]),
            ("b t d, p h c d -> b t p h c", [&[2, 3, 21], &[3, 2, 5, 21]]),
            ("k, k n -> n", [&[600], &[600, 40]]),
        ];
        for num_leaves in [1, 3, 8] {
            for dtype in DType::FLOATS {
                for threads in [1, 2] {
                    let tested = World::new(Mesh::single()).threads(threads).launch(|rank| {
                        let _tree = Context::of(rank).set_sum_tree(Some(SumTree::new(num_leaves)));
                        let tensor = |shape: &[usize], seed: usize| {
                            let layout = Layout::invariant(rank.mesh(), DType::F32, shape);
                            Tensor::from_global(rank, &layout, &numbers(shape.iter().product(), seed))?
                                .into_dtype(dtype)
                        };
                        let compare = |op: Rc<dyn Op>, args: &[&Tensor]| {
                            let bits = |op: Rc<dyn Op>| -> Result<Vec<Vec<u64>>> {
                                let all = apply(&*op, args, Location::caller())?;
                                all.iter()
                                    .map(|y| Ok(y.to_f64()?.iter().map(|y| y.to_bits()).collect()))
                                    .collect()
                            };
                            let what = format!("{op:?} in {dtype}, {num_leaves} leaves, {threads} threads");
                            assert!(bits(op.clone())? == bits(Rc::new(LeafByLeaf(op)))?, "{what}");
                            Ok::<_, Error>(())
                        };
                        for (text, [x, y]) in products {
                            compare(einsum(text), &[&tensor(x, 0)?, &tensor(y, 1)?])?;
                        }
                        let x = tensor(&[4, 29, 20], 2)?;
                        for op in [Sum::leading(3, 1), Sum::leading(3, 2), Sum::over(3, &[0, 2], true)?] {
                            compare(Rc::new(op), &[&x])?;
                        }
                        let (x, g, w) = (tensor(&[2, 37, 8], 3)?, tensor(&[2, 37, 8], 4)?, tensor(&[8], 5)?);
                        let statistic = |seed| tensor(&[2, 37], seed)?.into_dtype(dtype.accumulator());
                        let (mean, rstd) = (statistic(6)?, statistic(7)?);
                        let layer_norm = Rc::new(NormBackward::of_layer_norm(false, 3));
                        compare(layer_norm, &[&x, &w, &mean, &rstd, &g])?;
                        compare(Rc::new(NormBackward::of_rms_norm(false, 3)), &[&x, &w, &rstd, &g])?;
                        Ok(())
                    });
                    tested.unwrap();
                }
            }
        }
    }

    #[test]
    fn products_have_the_same_bits_for_every_number_of_ranks_that_share_k() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for k in [0, 1, 3, 13, 64, 301] {
                for (num_leaves, meshes) in
                    [(8, &["tp=2", "tp=4", "tp=8"][..]), (12, &["tp=2", "tp=3", "tp=4", "tp=6", "tp=12"])]
                {
                    let tree = Some(SumTree::new(num_leaves));
                    let alone = product("", tree, dtype, [5, k, 7]);
                    for mesh in meshes {
                        assert_eq!(
                            product(mesh, tree, dtype, [5, k, 7]),
                            alone,
                            "{dtype}, k = {k} over {mesh}"
                        );
                    }
                }
            }
        }
        let tree = |num_leaves| product("", Some(SumTree::new(num_leaves)), DType::F32, [5, 301, 7]);
        let plain = |mesh| product(mesh, None, DType::F32, [5, 301, 7]);
        assert!(tree(8) != tree(12) && tree(1) == plain(""), "the leaves decide the order");
        assert!(plain("tp=4") != plain(""), "without canonical sums the ranks decide the order");
    }
}
