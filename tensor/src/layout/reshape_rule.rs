//! The layout rule of reshape: merging dims, splitting dims, and adding or removing extents of 1, without moving data.
//!
//! Both shapes are cut into the smallest groups of dims with equal products; each group is merged into one dim, and that
//! dim is split. Merge (A, B): a sharding of A in grains of a stays, in grains of a B. A sharding of B passes only if A
//! has extent 1, or if the axes of A leave one index per rank. Split AB in grains of g: the axes land on A, in grains of
//! g / B if B divides g, else in grains of 1 if that gives the same shard boundaries; else, if the first axes have
//! exactly A members and g divides B, those land on A and the rest on B. No data moves. No rank holds an element of an
//! empty tensor: there, axes that fit nowhere else land on the first new dim of extent 0.

use crate::layout::Layout;
use crate::layout::dim::{AxisList, Dim};
use crate::layout::refusal::Refusal;
use shardgrad_dist::{Axis, Mesh};
use smallvec::SmallVec;
use std::ops::Range;

/// Returns the layout of a tensor after a reshape to another shape with as many elements. Partial and replicated axes
/// stay.
///
/// # Errors
/// Code `shape` if the numbers of elements differ, code `reshape` if a shard boundary would fall inside a row.
#[doc(alias = "view")]
pub fn reshape_layout(from: &Layout, shape: &[usize]) -> Result<Layout, Refusal> {
    let fits = shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent.max(1))).is_some();
    if !fits || shape.iter().product::<usize>() != from.numel() {
        let text = format!("{from} has {} elements, which do not fit the shape {shape:?}", from.numel());
        return Err(Refusal::new("shape", text, &[]));
    }
    let mut dims: SmallVec<[Dim; 6]> = SmallVec::new();
    let mut left_over: SmallVec<[Axis; 4]> = SmallVec::new();
    for (old, new) in groups(&from.shape(), shape) {
        let target = &shape[new];
        let source = &from.dims()[old.clone()];
        match regroup(source, target, from.mesh()) {
            Some(group) => dims.extend(group),
            None if from.numel() == 0 => {
                dims.extend(target.iter().map(|&n| Dim::unsharded(n)));
                left_over.extend(source.iter().flat_map(|d| d.axes.iter()));
            }
            None => return Err(refusal(from, old, target)),
        }
    }
    if let Some(empty) = dims.iter_mut().find(|d| d.extent == 0) {
        empty.axes = empty.axes.iter().chain(left_over).collect();
    }
    Ok(from.with_dims(dims))
}

/// The smallest groups of neighbouring dims with equal products, old and new. Trailing dims of extent 1, and the
/// remaining dims of empty tensors, form a last group.
fn groups(old: &[usize], new: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < old.len() && j < new.len() {
        let (first_i, first_j) = (i, j);
        let (mut m, mut n) = (old[i], new[j]);
        (i, j) = (i + 1, j + 1);
        while m != n {
            if m < n && i < old.len() {
                m *= old[i];
                i += 1;
            } else if n < m && j < new.len() {
                n *= new[j];
                j += 1;
            } else {
                // Only the products of empty tensors can differ to the end.
                (m, n, i, j) = (0, 0, old.len(), new.len());
            }
        }
        groups.push((first_i..i, first_j..j));
    }
    if i < old.len() || j < new.len() {
        groups.push((i..old.len(), j..new.len()));
    }
    groups
}

fn regroup(old: &[Dim], new: &[usize], mesh: &Mesh) -> Option<SmallVec<[Dim; 4]>> {
    if let ([dim], [extent]) = (old, new)
        && dim.extent == *extent
    {
        return Some(SmallVec::from_slice(&[*dim]));
    }
    let whole = old.iter().all(|d| d.axes.is_empty());
    // Groups with unequal products are the remaining dims of empty tensors.
    let product: usize = old.iter().map(|d| d.extent).product();
    let empty = product == 0 || product != new.iter().product::<usize>();
    if whole && (empty || new.is_empty() || old.is_empty()) {
        return Some(new.iter().map(|&n| Dim::unsharded(n)).collect());
    }
    if empty || new.is_empty() {
        return None;
    }
    let merged = old[1..].iter().try_fold(old[0], |a, b| merge(&a, b, mesh))?;
    split(merged, new, mesh)
}

/// Merges dims (A, B) into one.
fn merge(a: &Dim, b: &Dim, mesh: &Mesh) -> Option<Dim> {
    let extent = a.extent * b.extent;
    let (grain, axes) = if b.axes.is_empty() {
        match (a.axes.is_empty(), a.grain) {
            // A declares no grain, so the grain of B may stay.
            (true, 1) => (b.grain, AxisList::EMPTY),
            (_, grain) => (grain * b.extent, a.axes),
        }
    } else if a.extent == 1 && a.axes.is_empty() {
        (b.grain, b.axes)
    } else if !a.axes.is_empty() && a.axes.num_shards(mesh) == a.extent && a.grain == 1 {
        (b.grain, a.axes.iter().chain(b.axes.iter()).collect())
    } else {
        return None;
    };
    Some(Dim { extent, grain, axes })
}

/// Splits one dim into several.
fn split(dim: Dim, shape: &[usize], mesh: &Mesh) -> Option<SmallVec<[Dim; 4]>> {
    let (first, rest) = shape.split_first().expect("a group has at least one new dim");
    if rest.is_empty() {
        return Some(SmallVec::from_slice(&[dim]));
    }
    let row: usize = rest.iter().product();
    let mut dims: SmallVec<[Dim; 4]> = SmallVec::new();
    if let Some(a) = onto_first(&dim, *first, row, mesh) {
        dims.push(a);
        // The inner part of an unsharded dim keeps the grain if the grain fits into a row.
        let grain = if dim.axes.is_empty() && row.is_multiple_of(dim.grain) { dim.grain } else { 1 };
        let inner = Dim { extent: row, grain, axes: AxisList::EMPTY };
        dims.extend(split(inner, rest, mesh)?);
        return Some(dims);
    }
    let filled = (0..=dim.axes.len()).find(|n| dim.axes.prefix(*n).num_shards(mesh) == *first)?;
    if !row.is_multiple_of(dim.grain) {
        return None;
    }
    dims.push(Dim { extent: *first, grain: 1, axes: dim.axes.prefix(filled) });
    let inner = Dim { extent: row, grain: dim.grain, axes: dim.axes.iter().skip(filled).collect() };
    dims.extend(split(inner, rest, mesh)?);
    Some(dims)
}

/// Returns the first of two dims with all axes on it, if no shard boundary falls inside a row.
fn onto_first(dim: &Dim, extent: usize, row: usize, mesh: &Mesh) -> Option<Dim> {
    let num_shards = dim.axes.num_shards(mesh);
    let fits = |a: &Dim| {
        (0..=num_shards).all(|i| dim.shard_start(i, num_shards) == row * a.shard_start(i, num_shards))
    };
    let grains = [dim.grain / row, 1].into_iter().skip(usize::from(!dim.grain.is_multiple_of(row)));
    grains.map(|grain| Dim { extent, grain, axes: dim.axes }).find(|a| dim.axes.is_empty() || fits(a))
}

fn refusal(from: &Layout, old: Range<usize>, new: &[usize]) -> Refusal {
    let positions: Vec<(usize, usize)> = old.clone().map(|d| (0, d)).collect();
    let text = format!("reshaping dims {old:?} of {from} to {new:?} would put a shard boundary inside a row");
    let refusal = Refusal::new("reshape", text, &positions);
    let row: usize = new.iter().skip(1).product();
    match &from.dims()[old] {
        [dim] if new.len() > 1 && row > 1 && dim.grain % row != 0 => {
            refusal.hint(format!("declare the grain in the layout of the tensor, as in {}:{row}", dim.extent))
        }
        _ => refusal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flat global indices that the rank at a coordinate holds, row-major.
    fn held(layout: &Layout, at: &[usize]) -> Vec<usize> {
        let ranges = (0..layout.ndim()).map(|d| (layout.extent(d), layout.range(d, at)));
        ranges.fold(vec![0], |held, (n, range)| {
            held.iter().flat_map(|i| range.clone().map(move |j| i * n + j)).collect()
        })
    }

    /// The layout after a reshape, after checking that every rank holds the same elements in the same order.
    fn checked(from: &Layout, shape: &[usize]) -> Result<Layout, Refusal> {
        let to = reshape_layout(from, shape)?;
        let mesh = from.mesh();
        for at in (0..mesh.num_ranks()).map(|r| mesh.coordinate(r)) {
            assert_eq!(held(from, &at), held(&to, &at), "{from} -> {to}");
        }
        assert_eq!((from.partial(), from.replicate()), (to.partial(), to.replicate()));
        Ok(to)
    }

    fn reshape(from: &str, shape: &[usize]) -> Result<String, &'static str> {
        let mesh = Mesh::parse("a=2,b=3").unwrap();
        let to = checked(&Layout::parse(from, &mesh).unwrap(), shape);
        to.map(|l| l.to_string()).map_err(|refusal| refusal.code)
    }

    /// Every way to shard a shape over two axes, in grains that divide the extents.
    fn layouts(mesh: &Mesh, shape: &[usize]) -> Vec<Layout> {
        use shardgrad_dist::{Axis, AxisSet};
        let lists: Vec<AxisList> =
            [&[][..], &[0], &[1], &[0, 1], &[1, 0]].map(|l| l.iter().map(|a| Axis(*a)).collect()).to_vec();
        let mut all: Vec<Vec<Dim>> = vec![vec![]];
        for &extent in shape {
            let dims: Vec<Dim> = (1..=extent)
                .filter(|g| extent % g == 0)
                .flat_map(|grain| lists.iter().map(move |axes| Dim { extent, grain, axes: *axes }))
                .collect();
            all = all.iter().flat_map(|l| dims.iter().map(|d| [&l[..], &[*d]].concat())).collect();
        }
        let make =
            |dims| Layout::new(mesh, shardgrad_kernels::DType::F32, dims, AxisSet::EMPTY, AxisSet::EMPTY);
        all.into_iter().filter_map(|dims| make(dims).ok()).collect()
    }

    #[test]
    fn accepted_reshapes_move_no_element() {
        let shapes: [&[usize]; 10] = [
            &[12],
            &[1, 12],
            &[12, 1],
            &[2, 6],
            &[6, 2],
            &[3, 4],
            &[4, 3],
            &[2, 3, 2],
            &[2, 1, 6],
            &[3, 2, 2],
        ];
        for mesh in ["a=2,b=3", "a=4,b=2"] {
            let mesh = Mesh::parse(mesh).unwrap();
            let (mut accepted, mut refused) = (0, 0);
            for from in shapes.iter().flat_map(|s| layouts(&mesh, s)) {
                for to in shapes {
                    *(if checked(&from, to).is_ok() { &mut accepted } else { &mut refused }) += 1;
                }
            }
            assert!(accepted > 2_000 && refused > 1_000, "{accepted} accepted, {refused} refused");
        }
    }

    #[test]
    fn heads_and_features_merge_and_split() {
        assert_eq!(reshape("f32[8, 12:4@b]", &[8, 3, 4]).unwrap(), "f32[8, 3@b, 4]");
        assert_eq!(reshape("f32[8, 3@b, 4]", &[8, 12]).unwrap(), "f32[8, 12:4@b]");
        assert_eq!(reshape("f32[8, 20:4@a]", &[8, 5, 4]).unwrap(), "f32[8, 5@a, 4]");
        assert_eq!(reshape("f32[8, 20@a]", &[8, 5, 4]).unwrap_err(), "reshape");
        assert_eq!(reshape("f32[8, 20:4]", &[8, 5, 4]).unwrap(), "f32[8, 5, 4:4]");
    }

    #[test]
    fn batch_and_time_merge_into_tokens() {
        assert_eq!(reshape("f32[4@a, 5, 6] +b", &[20, 6]).unwrap(), "f32[20:5@a, 6] +b");
        assert_eq!(reshape("f32[20:5@a, 6] ~b", &[4, 5, 6]).unwrap(), "f32[4@a, 5, 6] ~b");
        assert_eq!(reshape("f32[4, 5@a, 6]", &[20, 6]).unwrap_err(), "reshape");
        assert_eq!(reshape("f32[2@a, 7@b]", &[14]).unwrap(), "f32[14@a@b]");
        assert_eq!(reshape("f32[14@a@b]", &[2, 7]).unwrap(), "f32[2@a, 7@b]");
    }

    #[test]
    fn dims_of_extent_one_are_added_and_removed() {
        assert_eq!(reshape("f32[1, 5@a, 1, 4@b, 1]", &[5, 4]).unwrap(), "f32[5@a, 4@b]");
        assert_eq!(reshape("f32[5@a, 4@b]", &[1, 5, 1, 1, 4, 1]).unwrap(), "f32[1, 5@a, 1, 1, 4@b, 1]");
        assert_eq!(reshape("f32[1, 1]", &[]).unwrap(), "f32[]");
        assert_eq!(reshape("f32[] +a", &[1, 1]).unwrap(), "f32[1, 1] +a");
        assert_eq!(reshape("f32[5, 1@a]", &[5]).unwrap_err(), "reshape");
        assert_eq!(reshape("f32[1@a, 5]", &[5]).unwrap(), "f32[5:5@a]");
    }

    #[test]
    fn several_dims_are_regrouped() {
        assert_eq!(reshape("f32[4@a, 6]", &[6, 4]).unwrap(), "f32[6@a, 4]");
        assert_eq!(reshape("f32[4@a, 9]", &[3, 12]).unwrap_err(), "reshape");
        assert_eq!(reshape("f32[6@b, 4, 5]", &[3, 2, 20]).unwrap(), "f32[3@b, 2, 20]");
    }

    #[test]
    fn empty_tensors_are_reshaped() {
        assert_eq!(reshape("f32[0@a, 12:4]", &[0, 3, 4]).unwrap(), "f32[0@a, 3, 4:4]");
        assert_eq!(reshape("f32[0, 3]", &[5, 0]).unwrap(), "f32[5, 0]");
        assert_eq!(reshape("f32[4@a, 0]", &[0]).unwrap(), "f32[0@a]");
        assert_eq!(reshape("f32[0@a]", &[4, 0]).unwrap(), "f32[4, 0@a]");
        assert_eq!(reshape("f32[0@a, 5]", &[0]).unwrap(), "f32[0@a]");
        assert_eq!(reshape("f32[0, 2, 1]", &[0, 1]).unwrap(), "f32[0, 1]");
        assert_eq!(reshape("f32[0, 4@a]", &[0, 2]).unwrap(), "f32[0@a, 2]");
        assert_eq!(reshape("f32[4@b, 6:2@a, 0]", &[5, 0, 2, 0]).unwrap(), "f32[5, 0@b@a, 2, 0]");
    }

    #[test]
    fn wrong_numbers_of_elements_are_refused() {
        assert_eq!(reshape("f32[4, 6]", &[5, 5]).unwrap_err(), "shape");
        assert_eq!(reshape("f32[4, 6]", &[usize::MAX, 2]).unwrap_err(), "shape");
    }

    #[test]
    fn the_hint_names_the_grain() {
        let mesh = Mesh::parse("a=2").unwrap();
        let refusal = reshape_layout(&Layout::parse("f32[12@a]", &mesh).unwrap(), &[3, 4]).unwrap_err();
        assert_eq!(refusal.hint.unwrap(), "declare the grain in the layout of the tensor, as in 12:4");
    }
}
