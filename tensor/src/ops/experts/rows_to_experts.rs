//! The choice between gathering all rows to the experts and exchanging token-expert pairs, by bytes.

use super::exchange::exchange_axes;
use crate::layout::Layout;
use crate::layout::placement::Placement;
use shardgrad_dist::AxisSet;

/// How rows reach the experts where one mesh axis shards both.
#[doc(alias = "moe_token_dispatcher_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsToExperts {
    /// Gathered or exchanged, whichever moves fewer bytes forward and backward.
    Cheapest,
    /// As the layouts say: exchanged where the axis shards rows and experts.
    AsStated,
}

/// The layouts of rows, indices and weights on the ranks that have gathered them, if that moves fewer bytes than an exchange.
///
/// A group of n ranks with R rows of width d, k experts each, and results of width o, in floats of s bytes, moves forward and
/// backward, for each rank and but for a factor 1 - 1/n:
/// - gathered: R (s (2 d + 2 o + 2 k) + 8 k), for rows and their cotangents, results and theirs, weights and theirs, and indices;
/// - exchanged: R k / n (s (3 d + 2 o + 2)) under balanced routing, since the backward sends rows again, and 16 e for two exchanges of
///   the number of pairs of each of the e experts.
///
/// With d = o much larger than k, gathering moves fewer bytes where n < 1.25 k. `None` where gathering would have to move other shards
/// of the rows first.
pub(crate) fn cheaper_gathered(args: &[&Layout; 6]) -> Option<[Layout; 3]> {
    let axes = exchange_axes(args)?;
    let [x, index, p, stacks @ ..] = args;
    let (mesh, [d, k]) = (x.mesh(), [x, index].map(|layout| layout.extents().last().copied().unwrap_or(0)));
    let (o, experts) = (stacks[2].extent(2), stacks[0].extent(0));
    let outside: usize =
        x.sharded_axes().iter().filter(|a| !axes.contains(*a)).map(|a| mesh.size(a)).product();
    let rows = x.extents().iter().rev().skip(1).product::<usize>() / outside.max(1);
    let bytes = |numbers: usize| numbers as u128 * x.dtype().size() as u128;
    let gathered = rows as u128 * (bytes(2 * (d + o + k)) + 8 * k as u128);
    let pairs = rows as u128 * k as u128 / mesh.group_size(axes).max(1) as u128;
    let exchanged = pairs * bytes(3 * d + 2 * o + 2) + 16 * experts as u128;
    let gather = |layout: &Layout, placement| unsharded(layout, axes, placement);
    let layouts = [
        gather(x, Placement::Replicate)?,
        gather(index, Placement::Invariant)?,
        gather(p, Placement::Replicate)?,
    ];
    (gathered <= exchanged).then_some(layouts)
}

/// The layout of the result with rows sharded as x is, from the layout after rows were gathered over the axes of the experts.
pub(crate) fn scattered(y: &Layout, x: &Layout) -> Layout {
    let dims = x.dims().iter().enumerate().take(x.ndim().saturating_sub(1));
    let axes = dims.flat_map(|(d, dim)| dim.axes.iter().map(move |axis| (axis, d)));
    axes.filter(|(axis, _)| y.partial().contains(*axis))
        .fold(y.clone(), |layout, (axis, d)| layout.with_placement(axis, Placement::Shard(d)))
}

/// The layout without some axes, if these are the innermost of their dims.
fn unsharded(layout: &Layout, axes: AxisSet, placement: Placement) -> Option<Layout> {
    let mut result = layout.clone();
    for dim in layout.dims() {
        let mut inner = dim.axes.iter().rev();
        let leaving: Vec<_> = inner.by_ref().take_while(|axis| axes.contains(*axis)).collect();
        if leaving.len() != dim.axes.iter().filter(|axis| axes.contains(*axis)).count() {
            return None;
        }
        result = leaving.into_iter().fold(result, |layout, axis| layout.with_placement(axis, placement));
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    fn layouts(mesh: &str, texts: [&str; 6]) -> Vec<Layout> {
        let mesh = Mesh::parse(mesh).unwrap();
        texts.iter().map(|text| Layout::parse(text, &mesh).unwrap()).collect()
    }

    fn gathered(mesh: &str, rows: &str, k: usize) -> Option<[String; 3]> {
        let [x, index, p] = ["f32 64", "i64 k", "f32 k"].map(|text| {
            let (dtype, width) = text.split_once(' ').unwrap();
            format!("{dtype}[{rows}, {}]", width.replace('k', &k.to_string()))
        });
        let stacks = ["f32[8@ep, 64, 96]", "f32[8@ep, 64, 96]", "f32[8@ep, 96, 64]"];
        let args = layouts(mesh, [&x, &index, &p, stacks[0], stacks[1], stacks[2]]);
        let args: [&Layout; 6] = std::array::from_fn(|i| &args[i]);
        cheaper_gathered(&args).map(|layouts| layouts.map(|layout| layout.to_string()))
    }

    #[test]
    fn rows_are_gathered_while_ranks_are_few() {
        let two = gathered("dp=2,ep=2", "8@dp@ep, 16", 2).expect("two ranks and two experts for each row");
        assert_eq!(two, ["f32[8@dp, 16, 64] ~ep", "i64[8@dp, 16, 2]", "f32[8@dp, 16, 2] ~ep"]);
        for (ranks, k, is_gathered) in [
            (2, 1, false),
            (3, 2, false),
            (4, 3, false),
            (4, 4, true),
            (8, 6, false),
            (8, 7, false),
            (8, 8, true),
        ] {
            let made = gathered(&format!("ep={ranks}"), "8@ep, 16", k).is_some();
            assert_eq!(made, is_gathered, "{ranks} ranks, {k} experts for each row");
        }
        assert_eq!(gathered("dp=2,ep=2", "8@ep@dp, 16", 2), None, "shards of dp would have to move first");
        assert_eq!(gathered("ep=1", "8, 16", 2), None);
        assert_eq!(gathered("dp=2,ep=2", "8@dp, 16", 2), None, "rows are not sharded over ep");
    }

    #[test]
    fn results_return_to_the_rows() {
        let both = layouts(
            "dp=2,ep=2,tp=2",
            ["f32[8@dp, 16, 64] +ep +tp", "f32[8@dp@ep, 16, 64] ~tp", "f32[]", "f32[]", "f32[]", "f32[]"],
        );
        assert_eq!(scattered(&both[0], &both[1]).to_string(), "f32[8@dp@ep, 16, 64] +tp");
    }
}
