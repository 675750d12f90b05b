//! The tree of canonical sums against golden cases: bits of one-rank sums and roots of runs, computed by an independent program, and
//! every cut into ranks.

use shardgrad_kernels::{SumTree, TreeNode, TreeSums};
use std::convert::Infallible;
use std::ops::Range;

/// Numbers of units that are cut into leaves.
const EXTENTS: [usize; 32] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28,
    29, 97, 128, 1000,
];

/// For each number of leaves the bits of the f32 sums of [`value`] of so many units.
#[rustfmt::skip]
const SUMS: [(usize, [u32; 32]); 8] = [
    (
        1,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f80, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090475, 0xc20902e7,
            0xc20902da, 0xc20908dc, 0xc2090118, 0xc2090a03, 0xc208ccbd, 0xc208b3f9, 0xc2094601, 0xc207f133,
            0xc20855dc, 0xc20f3bb6, 0xc209407c, 0xc215bc28, 0xc1bf2f88, 0xc21d0ec3, 0x416fa498, 0xc2885b6b,
        ],
    ),
    (
        2,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e85075e, 0xc16a356d, 0xc09c25ab, 0xc2090475, 0xc20902e8,
            0xc20902db, 0xc20908dc, 0xc2090118, 0xc2090a04, 0xc208ccbe, 0xc208b3f9, 0xc2094601, 0xc207f133,
            0xc20855dc, 0xc20f3bb5, 0xc209407a, 0xc215bc27, 0xc1bf2f86, 0xc21d0ec4, 0x416fa4a8, 0xc2885b67,
        ],
    ),
    (
        4,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090475, 0xc20902e8,
            0xc20902db, 0xc20908dc, 0xc2090118, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc2094600, 0xc207f132,
            0xc20855db, 0xc20f3bb5, 0xc209407a, 0xc215bc26, 0xc1bf2f86, 0xc21d0ec6, 0x416fa488, 0xc2885b69,
        ],
    ),
    (
        8,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090475, 0xc20902e8,
            0xc20902da, 0xc20908dc, 0xc2090118, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc2094600, 0xc207f131,
            0xc20855da, 0xc20f3bb5, 0xc209407b, 0xc215bc27, 0xc1bf2f86, 0xc21d0ec6, 0x416fa488, 0xc2885b68,
        ],
    ),
    (
        12,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090476, 0xc20902e8,
            0xc20902da, 0xc20908db, 0xc2090117, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc20945ff, 0xc207f133,
            0xc20855dc, 0xc20f3bb5, 0xc209407b, 0xc215bc28, 0xc1bf2f87, 0xc21d0ec3, 0x416fa480, 0xc2885b70,
        ],
    ),
    (
        16,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090475, 0xc20902e8,
            0xc20902da, 0xc20908dc, 0xc2090118, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc2094600, 0xc207f131,
            0xc20855da, 0xc20f3bb5, 0xc209407b, 0xc215bc27, 0xc1bf2f86, 0xc21d0ec4, 0x416fa490, 0xc2885b68,
        ],
    ),
    (
        24,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090476, 0xc20902e8,
            0xc20902da, 0xc20908db, 0xc2090117, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc20945ff, 0xc207f133,
            0xc20855dc, 0xc20f3bb5, 0xc209407b, 0xc215bc28, 0xc1bf2f87, 0xc21d0ec2, 0x416fa488, 0xc2885b72,
        ],
    ),
    (
        48,
        [
            0x3a71bbc0, 0xbb51d548, 0x3c00d786, 0x3bc89e3c, 0xbd38c178, 0x3be38f7c, 0xbda3b5c0, 0x3eba8a28,
            0x3efa5740, 0xbf4a2960, 0x3fcc7438, 0x3e850760, 0xc16a356d, 0xc09c25aa, 0xc2090476, 0xc20902e8,
            0xc20902da, 0xc20908db, 0xc2090117, 0xc2090a02, 0xc208ccbc, 0xc208b3f7, 0xc20945ff, 0xc207f133,
            0xc20855dc, 0xc20f3bb5, 0xc209407b, 0xc215bc28, 0xc1bf2f87, 0xc21d0ec4, 0x416fa484, 0xc2885b6e,
        ],
    ),
];

/// Number of leaves, number of ranks, rank, and the start and width of each root of its run.
type Roots = (usize, usize, usize, &'static [(usize, usize)]);

#[rustfmt::skip]
const ROOTS: &[Roots] = &[
    (8, 4, 0, &[(0, 2)]),
    (8, 4, 1, &[(2, 2)]),
    (8, 4, 2, &[(4, 2)]),
    (8, 4, 3, &[(6, 2)]),
    (8, 1, 0, &[(0, 8)]),
    (12, 2, 0, &[(0, 4), (4, 2)]),
    (12, 2, 1, &[(6, 2), (8, 8)]),
    (12, 3, 0, &[(0, 4)]),
    (12, 3, 1, &[(4, 4)]),
    (12, 3, 2, &[(8, 8)]),
    (12, 4, 0, &[(0, 2), (2, 1)]),
    (12, 4, 1, &[(3, 1), (4, 2)]),
    (12, 4, 2, &[(6, 2), (8, 1)]),
    (12, 4, 3, &[(9, 1), (10, 2)]),
    (12, 6, 0, &[(0, 2)]),
    (12, 6, 1, &[(2, 2)]),
    (12, 6, 2, &[(4, 2)]),
    (12, 6, 3, &[(6, 2)]),
    (12, 6, 4, &[(8, 2)]),
    (24, 2, 0, &[(0, 8), (8, 4)]),
    (24, 2, 1, &[(12, 4), (16, 16)]),
    (24, 3, 0, &[(0, 8)]),
    (24, 3, 1, &[(8, 8)]),
    (24, 3, 2, &[(16, 16)]),
    (24, 4, 0, &[(0, 4), (4, 2)]),
    (24, 4, 1, &[(6, 2), (8, 4)]),
    (24, 4, 2, &[(12, 4), (16, 2)]),
    (24, 4, 3, &[(18, 2), (20, 4)]),
    (24, 8, 0, &[(0, 2), (2, 1)]),
    (24, 8, 1, &[(3, 1), (4, 2)]),
    (24, 8, 2, &[(6, 2), (8, 1)]),
    (24, 8, 3, &[(9, 1), (10, 2)]),
    (24, 8, 4, &[(12, 2), (14, 1)]),
    (48, 2, 0, &[(0, 16), (16, 8)]),
    (48, 2, 1, &[(24, 8), (32, 32)]),
    (48, 3, 0, &[(0, 16)]),
    (48, 3, 1, &[(16, 16)]),
    (48, 3, 2, &[(32, 32)]),
    (48, 16, 0, &[(0, 2), (2, 1)]),
    (48, 16, 1, &[(3, 1), (4, 2)]),
    (48, 16, 2, &[(6, 2), (8, 1)]),
    (48, 16, 3, &[(9, 1), (10, 2)]),
    (48, 16, 4, &[(12, 2), (14, 1)]),
    (12, 1, 0, &[(0, 16)]),
    (24, 24, 0, &[(0, 1)]),
    (24, 24, 1, &[(1, 1)]),
    (24, 24, 2, &[(2, 1)]),
    (24, 24, 3, &[(3, 1)]),
    (24, 24, 4, &[(4, 1)]),
];

/// The addend of a unit: a binary fraction of up to 23 digits, of one of 16 magnitudes.
fn value(unit: usize) -> f32 {
    let x = (unit as u32 + 1).wrapping_mul(2_654_435_761);
    ((x >> 9) as f32 / 8_388_608.0 - 0.5) * f32::powi(2.0, (x & 15) as i32 - 8)
}

/// The sum of a leaf, in the order of its units.
fn leaf_sum(tree: SumTree, extent: usize, leaf: usize) -> Option<f32> {
    tree.leaf_range(extent, leaf).map(value).reduce(|a, b| a + b)
}

fn add(sums: &mut TreeSums<f32>, node: TreeNode, sum: Option<f32>) {
    let Ok(()) = sums.add(node, sum, |a, b| Ok::<_, Infallible>(a + b));
}

fn run_sums(tree: SumTree, extent: usize, leaves: impl Iterator<Item = usize>) -> TreeSums<f32> {
    let mut sums = TreeSums::new(tree);
    leaves.for_each(|leaf| add(&mut sums, SumTree::leaf(leaf), leaf_sum(tree, extent, leaf)));
    sums
}

/// The only root, which spans all leaves.
fn total(sums: TreeSums<f32>, tree: SumTree) -> f32 {
    let roots: Vec<_> = sums.into_roots().collect();
    let [(TreeNode { start: 0, width }, Some(sum))] = roots[..] else { panic!("{roots:?}") };
    assert_eq!(width, tree.num_leaves().next_power_of_two());
    sum
}

fn runs(tree: SumTree, num_ranks: usize) -> Option<Vec<Range<usize>>> {
    (0..num_ranks).map(|rank| tree.run(rank, num_ranks)).collect()
}

#[test]
fn sums_of_every_cut_have_the_bits_of_one_rank() {
    let (mut cuts, mut differ_in_rank_order) = (0, 0);
    for (num_leaves, expected) in SUMS {
        let tree = SumTree::new(num_leaves);
        for (extent, expected) in EXTENTS.into_iter().zip(expected) {
            for num_ranks in 1..=num_leaves {
                let Some(runs) = runs(tree, num_ranks) else {
                    assert_ne!(num_leaves % num_ranks, 0);
                    continue;
                };
                let (mut joined, mut in_rank_order) = (TreeSums::new(tree), None);
                for (rank, run) in runs.into_iter().enumerate() {
                    let held =
                        tree.leaf_range(extent, run.start).start..tree.leaf_range(extent, run.end - 1).end;
                    assert_eq!(
                        held,
                        rank * extent / num_ranks..(rank + 1) * extent / num_ranks,
                        "borders of ranks"
                    );
                    for (node, sum) in run_sums(tree, extent, run.clone()).into_roots() {
                        add(&mut joined, node, sum);
                    }
                    let own = run.filter_map(|leaf| leaf_sum(tree, extent, leaf)).reduce(|a, b| a + b);
                    in_rank_order = in_rank_order.into_iter().chain(own).reduce(|a, b| a + b);
                }
                let what = format!("{num_leaves} leaves of {extent} on {num_ranks} ranks");
                assert_eq!(total(joined, tree).to_bits(), expected, "{what}");
                cuts += 1;
                differ_in_rank_order += usize::from(in_rank_order.map(f32::to_bits) != Some(expected));
            }
        }
    }
    assert!(
        cuts > 1000 && differ_in_rank_order > cuts / 4,
        "{differ_in_rank_order} of {cuts}: the sums tell orders apart"
    );
}

#[test]
fn order_of_arrival_does_not_matter() {
    for (num_leaves, expected) in SUMS {
        let tree = SumTree::new(num_leaves);
        for step in (1..num_leaves + 1).filter(|step| gcd(*step, num_leaves) == 1) {
            let shuffled = (0..num_leaves).map(|i| i * step % num_leaves);
            assert_eq!(total(run_sums(tree, 1000, shuffled), tree).to_bits(), expected[31], "step {step}");
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn roots_of_runs_are_the_golden_ones() {
    for (num_leaves, num_ranks, rank, expected) in ROOTS {
        let tree = SumTree::new(*num_leaves);
        let roots = tree.roots(tree.run(*rank, *num_ranks).expect("the ranks divide the leaves"));
        let expected: Vec<_> = expected.iter().map(|&(start, width)| TreeNode { start, width }).collect();
        assert_eq!(roots, expected, "rank {rank} of {num_ranks} with {num_leaves} leaves");
    }
}

#[test]
fn absent_leaves_keep_the_sign_of_zero_and_leaves_in_order_need_few_nodes() {
    let tree = SumTree::new(12);
    let mut sums = TreeSums::new(tree);
    (0..12).for_each(|leaf| add(&mut sums, SumTree::leaf(leaf), (leaf == 5).then_some(-0.0)));
    assert_eq!(total(sums, tree).to_bits(), (-0.0f32).to_bits());
    let mut sums = TreeSums::new(tree);
    for leaf in 0..12 {
        add(&mut sums, SumTree::leaf(leaf), Some(1.0));
        assert!(sums.clone().into_roots().count() <= 4);
    }
    assert_eq!(total(sums, tree), 12.0);
}
