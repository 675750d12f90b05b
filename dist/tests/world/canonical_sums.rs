//! Canonical sums: the bits of one rank for every number of ranks that divides the leaves, on threads and processes.

use crate::support::{RANK_KINDS, RankKind, axes, down, hash, in_parallel, over, up};
use half::bf16;
use shardgrad_dist::{Kind, Rank, Result};
use shardgrad_kernels::{DType, Element, Float, SumTree, TreeSums};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Element `e` of the sum of a leaf: a number of one of 32 magnitudes, so that sums depend on their order.
fn leaf_value<T: Element>(leaf: usize, e: usize) -> T {
    let x = hash((leaf * 100_003 + e) as u64);
    T::from_f64(((x >> 40) as f64 / 16_777_216.0 - 0.5) * f64::powi(2.0, (x & 31) as i32 - 16))
}

/// The sums of the roots of a run of leaves, `len` elements of one root after another.
fn root_sums<T: Float>(tree: SumTree, leaves: Range<usize>, len: usize) -> Vec<T> {
    let num_roots = tree.roots(leaves.clone()).len();
    let mut all = vec![T::default(); num_roots * len];
    for e in 0..len {
        let mut sums = TreeSums::new(tree);
        for leaf in leaves.clone() {
            let join = |a: T, b: T| Ok::<_, Infallible>(T::narrow(a.widen() + b.widen()));
            let Ok(()) = sums.add(SumTree::leaf(leaf), Some(leaf_value(leaf, e)), join);
        }
        for (root, (_, sum)) in sums.into_roots().enumerate() {
            all[root * len + e] = sum.expect("no leaf is absent");
        }
    }
    all
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.to_f64().to_bits()).collect()
}

/// Compares the sum over the ranks of a mesh with one axis with that of one rank. Returns the number of elements of which a sum in the
/// order of the leaves has other bits.
fn check<T: Float>(rank: &Rank, tree: SumTree, len: usize) -> Result<usize> {
    let (num_leaves, num_ranks) = (tree.num_leaves(), rank.mesh().num_ranks());
    let alone = bits(&root_sums::<T>(tree, 0..num_leaves, len));
    let run = tree.run(rank.index(), num_ranks).expect("the ranks divide the leaves");
    let x = up(rank, &root_sums::<T>(tree, run, len));
    let call = over(axes(rank.mesh(), "a"), T::DTYPE);
    let sum = bits(&down::<T>(&rank.all_reduce_canonical(&call, &x, len, tree)?, len));
    assert!(sum == alone, "{num_leaves} leaves on {num_ranks} ranks, {len} x {}", T::DTYPE);
    let in_order = |e: usize| {
        let leaves = (0..num_leaves).map(|leaf| leaf_value::<T>(leaf, e));
        leaves.reduce(|a, b| T::narrow(a.widen() + b.widen())).expect("there is a leaf")
    };
    Ok((0..len).filter(|e| in_order(*e).to_f64().to_bits() != alone[*e]).count())
}

#[test]
fn sums_have_the_bits_of_one_rank_for_every_number_of_ranks() {
    let divided = [(8, &[1, 2, 4, 8][..]), (12, &[1, 2, 3, 4, 6]), (24, &[2, 3, 8]), (6, &[1, 2, 3, 6])];
    let worlds =
        divided.into_iter().flat_map(|(num_leaves, ranks)| ranks.iter().map(move |n| (num_leaves, n)));
    let worlds = worlds.flat_map(|(num_leaves, ranks)| RANK_KINDS.map(|kind| (kind, num_leaves, ranks)));
    let differ_in_order = AtomicUsize::new(0);
    in_parallel(worlds, |(kind, num_leaves, num_ranks)| {
        let tree = SumTree::new(num_leaves);
        let differ = kind.run(&format!("a={num_ranks}"), |rank| {
            let f32 = [0, 1, 5, 1000].into_iter().map(|len| check::<f32>(rank, tree, len));
            let f32 = f32.sum::<Result<usize>>()?;
            Ok(f32 + check::<f64>(rank, tree, 7)? + check::<bf16>(rank, tree, 70)?)
        });
        differ_in_order.fetch_add(differ.unwrap()[0], Ordering::SeqCst);
    });
    let differ_in_order = differ_in_order.into_inner();
    // Large enough for chunks.
    let large =
        |rank: &Rank| Ok([8, 12].map(|leaves| check::<f32>(rank, SumTree::new(leaves), 40_000).unwrap()));
    RankKind::Threads.run("a=4", large).unwrap();
    assert!(differ_in_order > 5000, "only {differ_in_order} sums tell orders apart");
}

#[test]
fn one_group_of_a_larger_mesh_sums_among_its_members() {
    let tree = SumTree::new(6);
    for kind in RANK_KINDS {
        let sums = kind.run("a=2,b=2", |rank| {
            let axis = rank.mesh().axis("a").expect("the mesh has it");
            let own = rank.coordinate(axis);
            // The ranks of another group sum numbers twice as large.
            let scale = 1 + rank.coordinate(rank.mesh().axis("b").expect("the mesh has it"));
            let x: Vec<i64> = tree
                .roots(tree.run(own, 2).expect("two divides six"))
                .iter()
                .map(|root| (scale * root.start) as i64 + 1)
                .collect();
            let y =
                rank.all_reduce_canonical(&over(axes(rank.mesh(), "a"), DType::I64), &up(rank, &x), 1, tree)?;
            Ok(down::<i64>(&y, 1)[0])
        });
        // The roots are 0..2, 2, 3 and 4..6.
        assert_eq!(sums.unwrap(), [13, 22, 13, 22]);
    }
}

#[test]
fn ranks_that_do_not_divide_the_leaves_and_short_buffers_are_refused() {
    RankKind::Threads
        .run("a=3", |rank| {
            let call = over(axes(rank.mesh(), "a"), DType::F32);
            let refused = |num_leaves, numel| {
                let x = up(rank, &[0f32; 3]);
                let error =
                    rank.all_reduce_canonical(&call, &x, numel, SumTree::new(num_leaves)).unwrap_err();
                assert_eq!(error.kind(), Kind::Collective, "{error}");
                error.message().to_string()
            };
            let text = "a canonical sum of 8 leaves over 3 ranks, which do not divide them";
            assert_eq!(refused(8, 1), text);
            assert!(refused(9, 2).contains("too short for f32[4]"), "{}", refused(9, 2));
            Ok(())
        })
        .unwrap();
}
