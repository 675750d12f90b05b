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
use shardgrad_dist::{AxisSet, Error, Kind, Rank, Result};
use shardgrad_kernels::op::binary::ACCUMULATE;
use shardgrad_kernels::{SumTree, TreeSums};
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
    /// The forward joins leaves itself.
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
            return Err(unsupported(why));
        }
    }
    Ok((dims, summed))
}

/// Returns the leaf of each element of argument `i` of this rank, flattened, for an op that joins the leaves of the label itself that would
/// be cut for it ([`CanonicalForm::Own`]): i64.
///
/// # Errors
/// As [`sum_leaves`].
pub(crate) fn leaves_of_elements(
    op: &dyn Op,
    tree: SumTree,
    local: &ForwardContext<'_>,
    (i, x): (usize, &LocalTensor),
) -> Result<LocalTensor> {
    let signature = Context::of(local.rank).signature(op.signature());
    let mut leaves = vec![0i64; x.numel()];
    if let Some(label) = cut_label(&signature, local.inference.labels()) {
        let (dims, summed) = cut_dims(op, label, local)?;
        if let (Some(dim), false) = (dims[i], leaves.is_empty()) {
            let shape = &x.view.shape;
            let inner: usize = shape[dim + 1..].iter().product();
            for (leaf, range) in local_leaves(local.rank, tree, &summed)? {
                for block in leaves.chunks_exact_mut(shape[dim] * inner) {
                    block[range.start * inner..range.end * inner].fill(leaf as i64);
                }
            }
        }
    }
    LocalTensor::upload(local.rank, &[leaves.len()], &leaves)
}

/// Runs the forward once for each leaf of a label, and joins the outputs.
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
    let outputs: Vec<Option<usize>> = labels.outputs().iter().map(|output| dim_of(output, label)).collect();
    let start = summed.range(rank.mesh(), rank.coordinates()).start;
    let mut whole: Vec<Option<LocalTensor>> = outputs
        .iter()
        .enumerate()
        .map(|(i, dim)| dim.map(|_| local.output(i)).transpose())
        .collect::<Result<_>>()?;
    let sums = sum_leaves(rank, tree, &summed, |range| {
        let part = |(x, dim): (&&LocalTensor, &Option<usize>)| match dim {
            Some(dim) => x.with_view(x.view.narrow(*dim, range.start, range.end)),
            None => (*x).clone(),
        };
        let parts: Vec<LocalTensor> = x.iter().zip(&dims).map(part).collect();
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
    })?;
    let mut sums = sums.map(LocalTensors::into_iter);
    let output = |(i, whole): (usize, Option<LocalTensor>)| match (whole, &mut sums) {
        (Some(whole), _) => Ok(whole),
        (None, Some(sums)) => Ok(sums.next().expect("each leaf has all sums")),
        // This rank has no leaf with elements.
        (None, None) => {
            let output = local.output(i)?;
            LocalTensor::full(rank, output.dtype, &output.view.shape, Context::of(rank).zero())
        }
    };
    whole.into_iter().enumerate().map(output).collect()
}

/// Returns the root of the leaves of this rank, which `part` sums over ranges of the local part of a dim; `None` if the rank has no
/// element of the dim. A sum over the ranks of the axis that shards the dim, if there is one, is the sum of all leaves.
///
/// # Errors
/// `Kind::Unsupported` if the dim is sharded over several axes in another order than that of the mesh, or the leaves of a rank have no single
/// root; errors of `part`.
pub(crate) fn sum_leaves(
    rank: &Rank,
    tree: SumTree,
    dim: &Dim,
    mut part: impl FnMut(Range<usize>) -> Result<LocalTensors>,
) -> Result<Option<LocalTensors>> {
    let mut sums = TreeSums::new(tree);
    for (leaf, range) in local_leaves(rank, tree, dim)? {
        let sum = if range.is_empty() { None } else { Some(part(range)?) };
        sums.add(SumTree::leaf(leaf), sum, |mut left: LocalTensors, right| {
            // Each node is rounded to the dtype.
            for (left, right) in left.iter_mut().zip(&right) {
                launch(rank, &ACCUMULATE, &[right], &mut [left], &[])?;
            }
            Ok::<_, Error>(left)
        })?;
    }
    Ok(sums.into_roots().next().and_then(|(_, sum)| sum))
}

/// Returns the leaves of this rank, each with its range in the local part of a dim.
fn local_leaves(rank: &Rank, tree: SumTree, dim: &Dim) -> Result<Vec<(usize, Range<usize>)>> {
    let (mesh, coordinates) = (rank.mesh(), rank.coordinates());
    // The ranks of a group, which join the sums, are in the order of the mesh.
    let axes = || dim.axes.iter().filter(|axis| mesh.size(*axis) > 1);
    if !axes().eq(axes().collect::<AxisSet>().iter()) {
        let names = axes().map(|axis| mesh.name(axis)).collect::<Vec<_>>().join(", ");
        return Err(unsupported(format!(
            "a sum over a dim that the axes {names} shard has a canonical form only on a mesh that lists them in this order"
        )));
    }
    let (position, num_ranks) = dim.shard_index(mesh, coordinates);
    let run = tree.run(position, num_ranks).filter(|run| tree.roots(run.clone()).len() == 1);
    let Some(run) = run else {
        let why = format!("{num_ranks} ranks cannot share the {} leaves of a sum", tree.num_leaves());
        return Err(unsupported(why));
    };
    let (start, grain) = (dim.range(mesh, coordinates).start, dim.grain);
    let local = |leaf: usize| {
        let units = tree.leaf_range(dim.extent / grain, leaf);
        (leaf, units.start * grain - start..units.end * grain - start)
    };
    Ok(run.map(local).collect())
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
            Err(unsupported(format!("{op} computes with a partial sum over `{axis}`, term by term")))
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
            Err(unsupported(format!(
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
        Some(_) => {
            Err(unsupported(format!("{op} adds terms of several ranks in an order that follows the ranks")))
        }
    }
}

fn unsupported(why: String) -> Error {
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
    use crate::tensor::Tensor;
    use crate::tensor::redistribute::redistribute_cached;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;
    use std::panic::Location;

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

    #[test]
    fn products_have_the_same_bits_for_every_number_of_ranks_that_share_k() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for k in [0, 1, 3, 13, 64, 301] {
                for (num_leaves, meshes) in
                    [(8, &["tp=2", "tp=4", "tp=8"][..]), (12, &["tp=3", "tp=6", "tp=12"])]
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
