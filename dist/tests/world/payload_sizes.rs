//! Collectives with payloads around the sizes at which a transport changes its algorithm: between threads, payloads in the words of a
//! slot and in its long form; between processes, bodies sent in one write with their head; on both, a chunked all-reduce.

use crate::collectives::{brought_by, combined_of};
use crate::support::{RANK_KINDS, RankKind, down, in_parallel, on, over, up};
use shardgrad_dist::{Rank, ReduceOp, Result};
use shardgrad_kernels::Element;

/// Sizes in bytes at which an algorithm changes: 104 in the words of a slot, 4 KiB in a slot, 16 KiB in one write, 32 KiB reduced
/// without chunks; their multiples; and more than one system call transfers.
const BORDERS: [usize; 9] =
    [104, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10, 1 << 20];

/// The element counts around a border: one less, equal, one more.
fn around(border: usize, element_bytes: usize) -> [usize; 3] {
    let numel = border / element_bytes;
    [numel - 1, numel, numel + 1]
}

/// One of each collective that copies elements, on bytes, so that odd sizes occur.
fn moves(rank: &Rank, numel: usize) -> Result<()> {
    let (k, here) = (rank.mesh().num_ranks(), rank.index());
    let call = over(on(rank, "tp").axes, u8::DTYPE);
    let brings = |rank: usize| -> Vec<u8> { (0..numel).map(|e| (e * 7 + rank * 31 + numel) as u8).collect() };
    let x = up(rank, &brings(here));
    rank.send(&call, &x, numel, (here + 1) % k)?;
    let from = (here + k - 1) % k;
    assert!(down::<u8>(&rank.recv(&call, numel, from)?, numel) == brings(from), "a message of {numel}");
    let y = rank.broadcast(&call, Some(&x), numel, k - 1)?;
    assert!(down::<u8>(&y, numel) == brings(k - 1), "a broadcast of {numel}");
    let all: Vec<u8> = (0..k).flat_map(brings).collect();
    let y = rank.all_gather(&call, &x, &vec![numel; k])?;
    assert!(down::<u8>(&y, all.len()) == all, "parts of {numel}");
    // Each member sends all elements to the last member, and none to the others.
    let mut sent = vec![0; k];
    sent[k - 1] = numel;
    let received = vec![if here == k - 1 { numel } else { 0 }; k];
    let y = rank.all_to_all(&call, &x, &sent, &received)?;
    assert!(here < k - 1 || down::<u8>(&y, all.len()) == all, "an exchange of {numel}");
    Ok(())
}

/// One of each collective that reduces elements.
fn sums<T: Element>(rank: &Rank, numel: usize) -> Result<()> {
    let (k, here) = (rank.mesh().num_ranks(), rank.index());
    let (call, members) = (over(on(rank, "tp").axes, T::DTYPE), (0..k).collect::<Vec<usize>>());
    let x = up(rank, &brought_by::<T>(0, here, numel));
    let sum = combined_of::<T>(0, &members, numel, ReduceOp::Sum);
    let y = rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
    assert!(down::<T>(&y, numel) == sum, "a sum of {numel} {}", T::DTYPE);
    // The last member gets the whole sum.
    let mut counts = vec![0; k];
    counts[k - 1] = numel;
    let y = rank.reduce_scatter(&call, &x, &counts)?;
    assert!(here < k - 1 || down::<T>(&y, numel) == sum, "a sum of {numel} {} for one", T::DTYPE);
    Ok(())
}

/// Two and three ranks of each kind.
fn worlds() -> impl Iterator<Item = (RankKind, &'static str)> {
    RANK_KINDS.into_iter().flat_map(|kind| ["tp=2", "tp=3"].map(|text| (kind, text)))
}

#[test]
fn copies_around_every_size_border() {
    in_parallel(worlds(), |(kind, text)| {
        kind.run(text, |rank| {
            BORDERS.into_iter().flat_map(|border| around(border, 1)).try_for_each(|numel| moves(rank, numel))
        })
        .unwrap_or_else(|e| panic!("{kind:?} on {text}: {e}"));
    });
}

#[test]
fn sums_around_every_size_border() {
    in_parallel(worlds(), |(kind, text)| {
        kind.run(text, |rank| {
            let k = rank.mesh().num_ranks();
            for border in BORDERS {
                around(border, 4).into_iter().try_for_each(|numel| sums::<f32>(rank, numel))?;
                around(border, 2).into_iter().try_for_each(|numel| sums::<half::bf16>(rank, numel))?;
                // Chunks of a chunked sum around the border.
                around(border, 4).into_iter().try_for_each(|numel| sums::<f32>(rank, numel * k))?;
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{kind:?} on {text}: {e}"));
    });
}
