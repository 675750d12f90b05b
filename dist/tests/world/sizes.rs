//! Contents around the sizes at which a transport takes another way: between threads, what fits into the words and the sheet of a
//! note; between processes, what goes in one write with its head; on both, an all-reduce that is cut into chunks.

use crate::collectives::{brought_by, combined_of};
use crate::support::{WAYS, down, on, over, up};
use shardgrad_dist::{Rank, ReduceOp, Result};
use shardgrad_kernels::Element;

/// Bytes at which something changes: 104 in words, 4 KiB in a note, 16 KiB in one write, 32 KiB combined at once; their multiples;
/// and more than one system call takes.
const BORDERS: [usize; 9] =
    [104, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10, 1 << 20];

/// The sizes next to a border, in elements of some bytes: one less, just as many, one more.
fn around(border: usize, element_bytes: usize) -> [usize; 3] {
    let numel = border / element_bytes;
    [numel - 1, numel, numel + 1]
}

/// One of each call that moves elements as they are, of bytes, so that sizes are odd too.
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
    // Everyone hands all to the last one, and nothing to the others.
    let mut sent = vec![0; k];
    sent[k - 1] = numel;
    let received = vec![if here == k - 1 { numel } else { 0 }; k];
    let y = rank.all_to_all(&call, &x, &sent, &received)?;
    assert!(here < k - 1 || down::<u8>(&y, all.len()) == all, "an exchange of {numel}");
    Ok(())
}

/// One of each call that combines elements.
fn sums<T: Element>(rank: &Rank, numel: usize) -> Result<()> {
    let (k, here) = (rank.mesh().num_ranks(), rank.index());
    let (call, members) = (over(on(rank, "tp").axes, T::DTYPE), (0..k).collect::<Vec<usize>>());
    let x = up(rank, &brought_by::<T>(0, here, numel));
    let sum = combined_of::<T>(0, &members, numel, ReduceOp::Sum);
    let y = rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
    assert!(down::<T>(&y, numel) == sum, "a sum of {numel} {}", T::DTYPE);
    // All for the last one.
    let mut counts = vec![0; k];
    counts[k - 1] = numel;
    let y = rank.reduce_scatter(&call, &x, &counts)?;
    assert!(here < k - 1 || down::<T>(&y, numel) == sum, "a sum of {numel} {} for one", T::DTYPE);
    Ok(())
}

#[test]
fn messages_around_every_size_at_which_a_transport_changes() {
    for (way, text) in WAYS.into_iter().flat_map(|way| ["tp=2", "tp=3"].map(|text| (way, text))) {
        way.run(text, |rank| {
            BORDERS.into_iter().flat_map(|border| around(border, 1)).try_for_each(|numel| moves(rank, numel))
        })
        .unwrap_or_else(|e| panic!("{way:?} on {text}: {e}"));
    }
}

#[test]
fn sums_around_every_size_at_which_a_transport_changes() {
    for (way, text) in WAYS.into_iter().flat_map(|way| ["tp=2", "tp=3"].map(|text| (way, text))) {
        way.run(text, |rank| {
            let k = rank.mesh().num_ranks();
            for border in BORDERS {
                around(border, 4).into_iter().try_for_each(|numel| sums::<f32>(rank, numel))?;
                around(border, 2).into_iter().try_for_each(|numel| sums::<half::bf16>(rank, numel))?;
                // Of a sum in chunks, these are the chunks.
                around(border, 4).into_iter().try_for_each(|numel| sums::<f32>(rank, numel * k))?;
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{way:?} on {text}: {e}"));
    }
}
