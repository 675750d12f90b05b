//! Random collectives against a plain reference, bit for bit: ops, dtypes, sizes, groups, roots, uneven parts.

use crate::collectives::{brought_by, combined_of};
use crate::support::{RankKind, down, hash, in_parallel, over, up};
use shardgrad_dist::{AxisSet, Rank, ReduceOp, Result};
use shardgrad_kernels::Element;
use std::ops::Range;

/// Worlds of one to nine ranks, of one, two and three axes.
const MESHES: [&str; 14] = [
    "a=1",
    "a=2",
    "a=3",
    "a=4",
    "a=5",
    "a=6",
    "a=7",
    "a=8",
    "a=9",
    "a=2,b=2",
    "a=2,b=3",
    "a=3,b=3",
    "a=2,b=2,c=2",
    "a=1,b=2",
];
/// Zero, one, primes, round numbers, and a size beyond that up to which an all-reduce is not chunked.
const SIZES: [usize; 12] = [0, 1, 2, 3, 5, 7, 13, 16, 64, 101, 997, 20_011];

/// The random numbers of a case, the same on every rank.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = hash(self.0);
        (self.0 >> 8) as usize % bound.max(1)
    }

    /// A size; large sizes are rare.
    fn size(&mut self) -> usize {
        let most = if self.below(40) == 0 { SIZES.len() } else { SIZES.len() - 2 };
        SIZES[self.below(most)]
    }
}

/// One collective over some axes, checked on every rank.
fn case<T: Element>(rank: &Rank, seed: u64, dice: &mut Dice, axes: AxisSet) -> Result<()> {
    let (members, group_rank) = (rank.mesh().group(rank.index(), axes), rank.group_rank(axes));
    let (k, call, here) = (members.len(), over(axes, T::DTYPE), rank.index());
    let brings = |rank: usize, len: usize| brought_by::<T>(seed, rank, len);
    match dice.below(6) {
        0 => {
            let how = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][dice.below(3)];
            let len = dice.size();
            let y = rank.all_reduce(&call, &up(rank, &brings(here, len)), len, how)?;
            assert_eq!(down::<T>(&y, len), combined_of::<T>(seed, &members, len, how), "all_reduce of {len}");
        }
        1 => {
            let counts: Vec<usize> = (0..k).map(|_| dice.size()).collect();
            let y = rank.all_gather(&call, &up(rank, &brings(here, counts[group_rank])), &counts)?;
            let want: Vec<T> = members.iter().zip(&counts).flat_map(|(&r, &n)| brings(r, n)).collect();
            assert_eq!(down::<T>(&y, want.len()), want, "all_gather of {counts:?}");
        }
        2 => {
            let counts: Vec<usize> = (0..k).map(|_| dice.size()).collect();
            let total = counts.iter().sum();
            let start: usize = counts[..group_rank].iter().sum();
            let y = rank.reduce_scatter(&call, &up(rank, &brings(here, total)), &counts)?;
            let sums = combined_of::<T>(seed, &members, total, ReduceOp::Sum);
            assert_eq!(
                down::<T>(&y, counts[group_rank]),
                &sums[start..start + counts[group_rank]],
                "parts {counts:?}"
            );
        }
        3 => {
            let sent: Vec<Vec<usize>> = (0..k).map(|_| (0..k).map(|_| dice.size() % 100).collect()).collect();
            let recv: Vec<usize> = (0..k).map(|i| sent[i][group_rank]).collect();
            let x = up(rank, &brings(here, sent[group_rank].iter().sum()));
            let y = rank.all_to_all(&call, &x, &sent[group_rank], &recv)?;
            let mut want = Vec::new();
            for (i, &r) in members.iter().enumerate() {
                let start: usize = sent[i][..group_rank].iter().sum();
                want.extend_from_slice(&brings(r, sent[i].iter().sum())[start..start + sent[i][group_rank]]);
            }
            assert_eq!(down::<T>(&y, want.len()), want, "all_to_all of {sent:?}");
        }
        4 => {
            let (root, len) = (dice.below(k), dice.size());
            let x = (root == group_rank).then(|| up(rank, &brings(here, len)));
            let y = rank.broadcast(&call, x.as_ref(), len, root)?;
            assert_eq!(down::<T>(&y, len), brings(members[root], len), "broadcast of {len} from {root}");
        }
        _ => {
            // A ring with a random step.
            let (by, len) = (dice.below(k), dice.size());
            rank.send(&call, &up(rank, &brings(here, len)), len, (group_rank + by) % k)?;
            let from = (group_rank + k - by) % k;
            assert_eq!(
                down::<T>(&rank.recv(&call, len, from)?, len),
                brings(members[from], len),
                "recv of {len}"
            );
        }
    }
    Ok(())
}

/// Runs 3,000 cases, or as many as SHARDGRAD_COLLECTIVES states, at most a thousand per world; a fifth of them on processes too.
#[test]
fn random_collectives_are_exact() {
    let count: u64 =
        std::env::var("SHARDGRAD_COLLECTIVES").map_or(3000, |n| n.parse().expect("a number of cases"));
    let per_world = (count / 28).clamp(50, 1000);
    in_parallel(0..count.div_ceil(per_world), |round| {
        let (from, to) = (round * per_world, count.min((round + 1) * per_world));
        let text = MESHES[round as usize % MESHES.len()];
        RankKind::Threads.run(text, cases(from..to)).unwrap_or_else(|e| panic!("cases {from} to {to}: {e}"));
        let some = from + (to - from) / 5;
        let done = RankKind::Processes.run(text, cases(from..some));
        done.unwrap_or_else(|e| panic!("cases {from} to {some} of processes: {e}"));
    });
}

/// The program of a range of cases.
fn cases(seeds: Range<u64>) -> impl Fn(&Rank) -> Result<()> {
    move |rank| {
        for seed in seeds.clone() {
            let mut dice = Dice(hash(seed));
            let axes = rank.mesh().axes().filter(|_| dice.below(3) > 0).collect();
            match dice.below(5) {
                0 => case::<f64>(rank, seed, &mut dice, axes)?,
                1 => case::<half::bf16>(rank, seed, &mut dice, axes)?,
                2 => case::<half::f16>(rank, seed, &mut dice, axes)?,
                3 => case::<i64>(rank, seed, &mut dice, axes)?,
                _ => case::<f32>(rank, seed, &mut dice, axes)?,
            }
        }
        Ok(())
    }
}
