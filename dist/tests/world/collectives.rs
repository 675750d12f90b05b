//! Every collective against a plain reference. Inputs are small integers, so that every sum is exact in every dtype.

use crate::support::{RANK_KINDS, RankKind, axes, down, hash, mesh, over, up};
use shardgrad_dist::{AxisSet, Call, Rank, ReduceOp, World};
use shardgrad_kernels::Element;

/// The input of rank `rank`: integers in -5..=5, so that sums over 16 ranks fit into eight bits.
fn brought<T: Element>(rank: usize, len: usize) -> Vec<T> {
    brought_by(0, rank, len)
}

/// [`brought`] with a seed.
pub(crate) fn brought_by<T: Element>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    let one = |e: usize| hash(seed.wrapping_mul(0x1_0000_0001) ^ (rank * 100_003 + e) as u64) % 11;
    (0..len).map(|e| T::from_f64(one(e) as f64 - 5.0)).collect()
}

/// The reference reduction: element by element over the inputs of the members.
fn combined<T: Element>(members: &[usize], len: usize, how: ReduceOp) -> Vec<T> {
    combined_of(0, members, len, how)
}

/// [`combined`] with a seed.
pub(crate) fn combined_of<T: Element>(seed: u64, members: &[usize], len: usize, how: ReduceOp) -> Vec<T> {
    let all: Vec<Vec<T>> = members.iter().map(|&r| brought_by(seed, r, len)).collect();
    let of = |e: usize| all.iter().map(move |x| x[e].to_f64());
    (0..len)
        .map(|e| match how {
            ReduceOp::Sum => of(e).sum(),
            ReduceOp::Max => of(e).fold(f64::MIN, f64::max),
            ReduceOp::Min => of(e).fold(f64::MAX, f64::min),
        })
        .map(T::from_f64)
        .collect()
}

/// Even, uneven and mostly empty parts for a group of k.
fn all_counts(k: usize) -> Vec<Vec<usize>> {
    vec![
        vec![4; k],
        (0..k).map(|i| (i + 1) * 10 / k - i * 10 / k).collect(),
        (0..k).map(|i| if i % 3 == 1 { 3 } else { 0 }).collect(),
        vec![0; k],
    ]
}

fn reductions<T: Element>(rank: &Rank, call: &Call<'_>, members: &[usize]) {
    for how in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        for len in [0, 1, 7, 20_011] {
            let x = up(rank, &brought::<T>(rank.index(), len));
            let y = rank.all_reduce(call, &x, len, how).unwrap();
            assert_eq!(down::<T>(&y, len), combined::<T>(members, len, how), "all_reduce({how}) of {len}");
            assert_eq!(down::<T>(&x, len), brought::<T>(rank.index(), len), "the argument is unchanged");
        }
    }
}

fn gathers<T: Element>(rank: &Rank, call: &Call<'_>, members: &[usize]) {
    let group_rank = rank.group_rank(call.axes);
    for counts in all_counts(members.len()) {
        let x = up(rank, &brought::<T>(rank.index(), counts[group_rank]));
        let total = counts.iter().sum();
        let y = rank.all_gather(call, &x, &counts).unwrap();
        let expected: Vec<T> = members.iter().zip(&counts).flat_map(|(&r, &n)| brought::<T>(r, n)).collect();
        assert_eq!(down::<T>(&y, total), expected, "all_gather of {counts:?}");

        let x = up(rank, &brought::<T>(rank.index(), total));
        let y = rank.reduce_scatter(call, &x, &counts).unwrap();
        let start: usize = counts[..group_rank].iter().sum();
        let expected = &combined::<T>(members, total, ReduceOp::Sum)[start..start + counts[group_rank]];
        assert_eq!(down::<T>(&y, counts[group_rank]), expected, "reduce_scatter of {counts:?}");
    }
}

fn exchanges<T: Element>(rank: &Rank, call: &Call<'_>, members: &[usize]) {
    let (k, group_rank) = (members.len(), rank.group_rank(call.axes));
    for seed in 0..3usize {
        // How many elements member i sends to member j; seed 2 sends nothing at all.
        let sent = |i: usize, j: usize| if seed == 2 { 0 } else { (i * 2 + j * 3 + seed) % 4 };
        let send: Vec<usize> = (0..k).map(|j| sent(group_rank, j)).collect();
        let recv: Vec<usize> = (0..k).map(|i| sent(i, group_rank)).collect();
        let x = up(rank, &brought::<T>(rank.index(), send.iter().sum()));
        let y = rank.all_to_all(call, &x, &send, &recv).unwrap();
        let mut expected = Vec::new();
        for (i, &r) in members.iter().enumerate() {
            let whole = brought::<T>(r, (0..k).map(|j| sent(i, j)).sum());
            let start: usize = (0..group_rank).map(|j| sent(i, j)).sum();
            expected.extend_from_slice(&whole[start..start + sent(i, group_rank)]);
        }
        assert_eq!(down::<T>(&y, expected.len()), expected, "all_to_all of {send:?}");
    }
    for (root, &source) in members.iter().enumerate() {
        let x = (root == group_rank).then(|| up(rank, &brought::<T>(rank.index(), 9)));
        let y = rank.broadcast(call, x.as_ref(), 9, root).unwrap();
        assert_eq!(down::<T>(&y, 9), brought::<T>(source, 9), "broadcast from {root}");
    }
    // Several messages around the ring, so that their order matters.
    let (next, last) = ((group_rank + 1) % k, (group_rank + k - 1) % k);
    for len in [5, 0, 3] {
        rank.send(call, &up(rank, &brought::<T>(rank.index(), len)), len, next).unwrap();
    }
    for len in [5, 0, 3] {
        let y = rank.recv(call, len, last).unwrap();
        assert_eq!(down::<T>(&y, len), brought::<T>(members[last], len), "recv of {len}");
    }
    rank.barrier(call).unwrap();
}

fn everything<T: Element>(rank: &Rank, axes: AxisSet) {
    let members = rank.mesh().group(rank.index(), axes);
    let call = over(axes, T::DTYPE);
    reductions::<T>(rank, &call, &members);
    gathers::<T>(rank, &call, &members);
    exchanges::<T>(rank, &call, &members);
}

fn on_mesh(text: &str, groups: &[&str]) {
    RANK_KINDS.into_iter().for_each(|kind| on_mesh_of(kind, text, groups));
}

fn on_mesh_of(kind: RankKind, text: &str, groups: &[&str]) {
    kind.run(text, |rank| {
        for names in groups {
            let axes = axes(rank.mesh(), names);
            everything::<f32>(rank, axes);
            everything::<f64>(rank, axes);
            everything::<half::bf16>(rank, axes);
            everything::<i64>(rank, axes);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn collectives_in_groups_of_one_two_and_three() {
    on_mesh("", &[""]);
    on_mesh("tp=1", &["tp", ""]);
    on_mesh("tp=2", &["tp", ""]);
    on_mesh("tp=3", &["tp"]);
}

#[test]
fn collectives_in_groups_of_four_and_eight() {
    on_mesh("tp=4", &["tp"]);
    on_mesh("tp=8", &["tp"]);
}

#[test]
fn collectives_over_two_axes_separately_and_together() {
    on_mesh("dp=2,tp=2", &["dp", "tp", "dp,tp"]);
    on_mesh("dp=2,tp=3", &["tp", "dp,tp", "dp"]);
    on_mesh("dp=1,tp=2", &["dp", "tp", "dp,tp"]);
}

#[test]
fn all_reduce_has_the_same_bits_on_all_ranks_with_and_without_chunks() {
    // Sums of 1 / (e + 3) are rounded, so another order would change bits.
    let value = |rank: usize, e: usize| 1.0 / (hash((rank << 32 | e) as u64) % 1000 + 3) as f32;
    let len = 30_000;
    for text in ["tp=3", "tp=5", "tp=8"] {
        let sums = |rank: &Rank| {
            let call = over(axes(rank.mesh(), "tp"), f32::DTYPE);
            let x: Vec<f32> = (0..len).map(|e| value(rank.index(), e)).collect();
            let large = down::<f32>(&rank.all_reduce(&call, &up(rank, &x), len, ReduceOp::Sum)?, len);
            // Parts below the border are reduced by every rank itself.
            let mut small = Vec::new();
            for piece in x.chunks(1000) {
                let y = rank.all_reduce(&call, &up(rank, piece), piece.len(), ReduceOp::Sum)?;
                small.extend(down::<f32>(&y, piece.len()));
            }
            // Reduce-scatter gives the same sums.
            let counts: Vec<usize> =
                (0..rank.mesh().num_ranks()).map(|i| if i == 0 { len } else { 0 }).collect();
            let y = rank.reduce_scatter(&call, &up(rank, &x), &counts)?;
            if rank.index() == 0 {
                assert_eq!(down::<f32>(&y, len), large);
            }
            assert_eq!(small, large);
            Ok(large.iter().map(|v| v.to_bits()).collect::<Vec<u32>>())
        };
        let [whole, of_processes] = RANK_KINDS.map(|kind| kind.run(text, sums).unwrap());
        assert!(whole == of_processes && whole.windows(2).all(|w| w[0] == w[1]));
    }
}

#[test]
fn collectives_of_sixteen_ranks_on_few_cores() {
    World::run(mesh("dp=2,cp=2,tp=4"), |rank| {
        for names in ["tp", "dp,tp", "dp,cp,tp", "cp"] {
            everything::<f32>(rank, axes(rank.mesh(), names));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn no_peer_holds_a_buffer_after_a_call_and_memory_is_reused() {
    World::run(mesh("tp=4"), |rank| {
        let call = over(axes(rank.mesh(), "tp"), f32::DTYPE);
        let counts = [10_000; 4];
        let mut settled = 0;
        for round in 0..20 {
            let mut x = up(rank, &vec![1f32; 40_000]);
            let y = rank.all_reduce(&call, &x, 40_000, ReduceOp::Sum)?;
            assert!(x.is_unique() && down::<f32>(&y.clone(), 40_000)[39_999] == 4.0);
            rank.reduce_scatter(&call, &x, &counts)?;
            assert!(x.is_unique());
            rank.all_gather(&call, &x, &counts)?;
            assert!(x.is_unique());
            rank.all_to_all(&call, &x, &counts, &counts)?;
            assert!(x.is_unique());
            rank.broadcast(&call, Some(&x), 40_000, 2)?;
            assert!(x.is_unique());
            rank.send(&call, &x, 100, rank.index() ^ 1)?;
            assert!(x.is_unique());
            rank.recv(&call, 100, rank.index() ^ 1)?;
            let taken = rank.backend().memory().num_system_allocs;
            if round == 1 {
                settled = taken;
            }
            assert!(round < 1 || taken <= settled + 1, "round {round} took memory from the system: {taken}");
        }
        Ok(())
    })
    .unwrap();
}
