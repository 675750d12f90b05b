//! Backward of a norm over the channels of heads, where sums are canonical: the rows have three dims or more, of which ranks may share the
//! second, tokens, and later ones, heads. The gradient of a parameter is a sum over leaves of tokens for each head, and then over leaves of
//! heads.

use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, View, launch};
use crate::layout::dim::Dim;
use crate::op::{ForwardContext, LocalTensors, NodeLeaves, sum_leaves, unsupported_sum};
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{AxisSet, Rank, ReduceOp, Result};
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::{Dims, Kernel, Scalar, Strides, SumTree};
use smallvec::SmallVec;
use std::iter;
use std::mem;
use std::ops::Range;

/// The dims of rows and tokens, before those of heads.
const NUM_LEADING: usize = 2;

/// Returns dx, and the gradient of each parameter as a term of the sum over the ranks that share tokens or heads.
///
/// # Errors
/// `Kind::Unsupported` if the first dim is sharded; as [`sum_leaves`]; errors of the collective that completes sums over tokens.
pub(super) fn backward(
    kernel: &Kernel,
    tree: SumTree,
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
) -> Result<LocalTensors> {
    let rank = local.rank;
    let [rows, tokens, heads @ .., _] = local.inputs[0].dims() else { unreachable!("x has dims of heads") };
    if !sharding_axes(rank, rows).is_empty() {
        let why =
            "a norm of heads sums over rows that are sharded, but its leaves are those of tokens and heads";
        return Err(unsupported_sum(why.to_string()));
    }
    let sums = |shape: &[usize]| -> Result<LocalTensors> {
        let params = local.inference.outputs.iter().skip(1);
        params.map(|layout| LocalTensor::alloc(rank, layout.dtype(), shape)).collect()
    };
    let mut dx = local.output(0)?;
    let mut shape = Dims::from_slice(&x[0].view.shape[NUM_LEADING..]);
    let of_heads = || sums(&shape);
    let mut terms = sum_leaves(local, x, (tree, tokens), of_heads, |leaves| {
        sum_tokens(kernel, local, x, leaves, (&mut dx, of_heads()?))
    })?;
    // The ranks that have the same terms, because a sum was completed over their axes.
    let (mut alike, mut summed) = (AxisSet::EMPTY, tokens);
    for (d, dim) in heads.iter().enumerate().rev() {
        let axes = sharding_axes(rank, summed);
        let complete = |term| all_reduce(rank, local.with_lineage(x, term), axes, ReduceOp::Sum, local.site);
        let complete: LocalTensors = terms.into_iter().map(complete).collect::<Result<_>>()?;
        shape.remove(d);
        let of_range = |range: Range<usize>| -> Result<LocalTensors> {
            complete.iter().map(|x| sum_range(rank, x, d, &range)).collect()
        };
        let node = |leaves: &NodeLeaves| leaves.sum_each(rank, of_range);
        terms = sum_leaves(local, x, (tree, dim), || sums(&shape), node)?;
        alike = alike.iter().chain(axes.iter()).collect();
        summed = dim;
    }
    if rank.group_rank(alike) > 0 {
        let zero = Context::of(rank).zero();
        let zeros = |term: &LocalTensor| LocalTensor::full(rank, term.dtype, &term.view.shape, zero);
        terms = terms.iter().map(zeros).collect::<Result<_>>()?;
    }
    Ok(iter::once(dx).chain(terms).collect())
}

/// Returns the axes of several ranks that shard a dim.
fn sharding_axes(rank: &Rank, dim: &Dim) -> AxisSet {
    dim.axes.iter().filter(|axis| rank.mesh().size(*axis) > 1).collect()
}

/// Writes dx of the tokens of a node, and returns the sums over rows and these tokens in `sums`, for each head.
fn sum_tokens(
    kernel: &Kernel,
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
    leaves: &NodeLeaves,
    (dx, mut sums): (&mut LocalTensor, LocalTensors),
) -> Result<LocalTensors> {
    let (rank, range) = (local.rank, leaves.range());
    let num_heads = x[0].view.ndim() - NUM_LEADING - 1;
    // The heads first, so that the rows of a head have no gaps.
    let heads_first = |x: &&LocalTensor| match x.view.ndim() {
        1 => x.contiguous(rank),
        ndim => {
            let heads = NUM_LEADING..NUM_LEADING + num_heads;
            let order: Dims = heads.clone().chain(0..NUM_LEADING).chain(heads.end..ndim).collect();
            x.with_view(x.view.narrow(1, range.start, range.end).permute(&order)).contiguous(rank)
        }
    };
    let parts: SmallVec<[LocalTensor; 5]> = x.iter().map(heads_first).collect::<Result<_>>()?;
    let borders = leaves.borders.iter().map(|border| border - range.start).collect();
    let scalars = NodeLeaves { borders, ..leaves.clone() }.scalars(1);
    let mut dx_part = LocalTensor::alloc(rank, dx.dtype, &parts[0].view.shape)?;
    for head in 0..parts[0].view.shape[..num_heads].iter().product::<usize>() {
        let of_head = |x: &LocalTensor| {
            let shape = &x.view.shape[num_heads..];
            Strides::contiguous(shape).at(x.view.offset + head * shape.iter().product::<usize>())
        };
        let input = |x: &LocalTensor| match x.view.ndim() {
            1 => x.clone(),
            _ => x.with_view(of_head(x)),
        };
        let inputs: SmallVec<[LocalTensor; 5]> = parts.iter().map(input).collect();
        let mut outputs: SmallVec<[&mut LocalTensor; 3]> =
            iter::once(&mut dx_part).chain(&mut sums).collect();
        let narrow = |output: &mut &mut LocalTensor| {
            let view = of_head(output).into();
            mem::replace(&mut output.view, view)
        };
        let views: SmallVec<[View; 3]> = outputs.iter_mut().map(narrow).collect();
        launch(rank, kernel, &inputs.iter().collect::<SmallVec<[_; 5]>>(), &mut outputs, &scalars)?;
        outputs.into_iter().zip(views).for_each(|(output, view)| output.view = view);
    }
    let channels = dx_part.view.ndim() - 1;
    let heads_last: Dims = (num_heads..channels).chain(0..num_heads).chain([channels]).collect();
    let dx_part = dx_part.with_view(dx_part.view.permute(&heads_last));
    dx.write(rank, dx.view.narrow(1, range.start, range.end), &dx_part)?;
    Ok(sums)
}

/// Returns the sum over a range of a dim, rounded once.
fn sum_range(rank: &Rank, x: &LocalTensor, dim: usize, range: &Range<usize>) -> Result<LocalTensor> {
    let order: Dims = (0..x.view.ndim()).filter(|d| *d != dim).chain([dim]).collect();
    let part = x.with_view(x.view.narrow(dim, range.start, range.end).permute(&order));
    let mut sum = LocalTensor::alloc(rank, x.dtype, &part.view.shape[..order.len() - 1])?;
    launch(rank, &SUM, &[&part], &mut [&mut sum], &[Scalar::Int(1), Scalar::Real(1.0)])?;
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::super::NormBackward;
    use super::*;
    use crate::layout::Layout;
    use crate::op::apply;
    use crate::tensor::Tensor;
    use crate::tensor::redistribute::redistribute_cached;
    use approx::assert_relative_eq;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;
    use std::panic::Location;

    /// Numbers that no order of addition sums exactly.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| (((i * 7919 + seed * 104_729) % 1009) as f32 - 504.0) / 370.0).collect()
    }

    /// dx and the gradients of the parameters of a norm, whole, of 2 rows of 13 tokens of 6 heads or 3 groups of 2 heads with 8 channels.
    fn gradients(
        mesh: &str,
        tree: Option<SumTree>,
        dtype: DType,
        heads: &[usize],
        has_mean: bool,
    ) -> Vec<Vec<f64>> {
        let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(tree);
            let axis = |name: &str| if mesh.contains(name) { format!("@{name}") } else { String::new() };
            let rows = [vec![2, 13], heads.to_vec()].concat();
            let tensor = |channels: &[usize], dtype: DType, seed: usize| {
                let dims = [format!("2, 13{}, {}{}", axis("cp"), heads[0], axis("tp"))];
                let others = heads[1..].iter().chain(channels).map(usize::to_string);
                let text = dims.into_iter().chain(others).collect::<Vec<_>>().join(", ");
                let count: usize = rows.iter().chain(channels).product();
                let layout = Layout::parse(&format!("f32[{text}]"), rank.mesh())?;
                Tensor::from_global(rank, &layout, &numbers(count, seed))?.into_dtype(dtype)
            };
            let w = Tensor::from_host(rank, &[8], &numbers(8, 1))?.into_dtype(dtype)?;
            let (x, g) = (tensor(&[8], dtype, 2)?, tensor(&[8], dtype, 3)?);
            let [mean, rstd] = [4, 5].map(|seed| tensor(&[], dtype.accumulator(), seed));
            let (mean, rstd) = (mean?, rstd?);
            let ndim = x.layout().ndim();
            let op = match has_mean {
                true => NormBackward::of_layer_norm(false, ndim),
                false => NormBackward::of_rms_norm(false, ndim),
            };
            let args: Vec<&Tensor> =
                [&x, &w].into_iter().chain(has_mean.then_some(&mean)).chain([&rstd, &g]).collect();
            let outputs = apply(&op, &args, Location::caller())?;
            let whole = |output: &Tensor| {
                let layout = Layout::invariant(rank.mesh(), dtype, &output.shape());
                redistribute_cached(output, &layout, Location::caller())?.to_f64()
            };
            outputs.iter().map(whole).collect::<Result<Vec<_>>>()
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{mesh}: ranks disagree");
        ranks[0].clone()
    }

    #[test]
    fn gradients_have_the_same_bits_for_every_number_of_ranks_that_share_tokens_and_heads() {
        let bits = |all: &[Vec<f64>]| all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (heads, has_mean) in [(&[6][..], false), (&[3, 2], false), (&[6], true)] {
            for dtype in [DType::F32, DType::BF16] {
                for (num_leaves, meshes) in [
                    (8, &["cp=2", "tp=2", "cp=2,tp=2", "tp=4,cp=2"][..]),
                    // 8 leaves are one node, 12 are two.
                    (24, &["tp=3", "cp=2", "tp=2", "cp=2,tp=3", "tp=2,cp=2", "cp=2,tp=2"]),
                ] {
                    let tree = Some(SumTree::new(num_leaves));
                    let alone = gradients("", tree, dtype, heads, has_mean);
                    for mesh in meshes {
                        let found = gradients(mesh, tree, dtype, heads, has_mean);
                        assert!(
                            bits(&found) == bits(&alone),
                            "{dtype}, heads {heads:?} on {mesh}, {num_leaves} leaves: {found:?}, on one rank {alone:?}"
                        );
                    }
                    let plain = gradients("", None, dtype, heads, has_mean);
                    assert_eq!(alone[0], plain[0], "dx has no leaves");
                    let epsilon = if dtype == DType::F32 { 1e-5 } else { 0.1 };
                    for (sum, plain) in alone[1..].concat().iter().zip(&plain[1..].concat()) {
                        assert_relative_eq!(*sum, *plain, epsilon = 10.0 * epsilon, max_relative = epsilon);
                    }
                }
            }
        }
        let plain = |mesh| bits(&gradients(mesh, None, DType::F32, &[6], false));
        assert!(
            plain("tp=2") != plain("") && plain("cp=2") != plain(""),
            "without leaves the ranks decide the order"
        );
    }

    #[test]
    fn norm_of_heads_whose_rows_are_sharded_is_refused() {
        let refused = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(Some(SumTree::new(8)));
            let tensor = |text: &str| Tensor::full(rank, &Layout::parse(text, rank.mesh())?, 0.5);
            let (x, w) = (tensor("f32[2@dp, 3, 4, 8]")?, tensor("f32[8]")?);
            let rstd = tensor("f32[2@dp, 3, 4]")?;
            let op = NormBackward::of_rms_norm(false, 4);
            Ok(apply(&op, &[&x, &w, &rstd, &x], Location::caller()).unwrap_err().to_string())
        });
        assert!(refused.unwrap()[0].contains("sums over rows that are sharded"));
    }
}
