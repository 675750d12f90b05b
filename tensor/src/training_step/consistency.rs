//! Consistency checks between ranks: whether replicas are bit-equal, and whether all ranks got the same configuration.
//!
//! Collectives compare calls, not contents: a replica with a flipped bit, or a rank with another learning rate, would go
//! unnoticed. These checks run now and then, and before a checkpoint.

use crate::layout::Layout;
use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Call, Error, Kind, Origin, Phase, Rank, Result};
use shardgrad_kernels::{Buffer, DType, download, upload};
use std::panic::Location;

/// The number of names in an error.
pub(super) const NAMES_MAX: usize = 8;

/// Checks that replicas are bit-equal: those of ranks with the same position on every axis that shards the tensor.
/// Partial sums have no replicas. One all_gather over the mesh of one fingerprint for each tensor. A collective call:
/// every rank passes the same tensors in the same order. Does nothing on the null back end.
///
/// # Errors
/// `Kind::Diverged`, on every rank, with the tensors and ranks whose replicas differ from those of the first rank that
/// holds the same part; errors of the collective.
#[doc(alias = "verify_params_across_processes")]
#[doc(alias = "assert_equal_across_ranks")]
pub fn check_replicas(
    rank: &Rank,
    tensors: &[(&str, &Tensor)],
    site: &'static Location<'static>,
) -> Result<()> {
    let marks: Vec<i64> =
        tensors.iter().map(|(_, t)| Ok(fingerprint(&t.local_bytes()?) as i64)).collect::<Result<_>>()?;
    let Some(everyone) = gathered(rank, &marks, site)? else { return Ok(()) };
    let layouts = tensors.iter().map(|(_, tensor)| tensor.layout());
    let differing: Vec<_> = differing_replicas(layouts, &everyone)
        .into_iter()
        .map(|(number, first, other)| (tensors[number].0, tensors[number].1.layout(), first, other))
        .collect();
    refuse_differing(rank, &differing, tensors.len(), site)
}

/// Returns the tensors whose replicas have different fingerprints: number of the tensor, first rank that holds the part, and the
/// first rank that holds other bits. `everyone` has the fingerprints of each rank, in the order of the tensors.
pub(super) fn differing_replicas<'a>(
    layouts: impl Iterator<Item = &'a Layout>,
    everyone: &[Vec<i64>],
) -> Vec<(usize, usize, usize)> {
    let differs = |(number, layout): (usize, &Layout)| {
        let mesh = layout.mesh();
        let is_copy = |a: &Axis| !matches!(layout.placement(*a), Placement::Shard(_));
        let copies: Vec<Axis> = mesh.axes().filter(is_copy).collect();
        let first = |r: usize| {
            let mut place = mesh.coordinate(r);
            copies.iter().for_each(|a| place[a.0 as usize] = 0);
            mesh.rank_at(&place)
        };
        let other = (0..mesh.num_ranks()).find(|r| everyone[*r][number] != everyone[first(*r)][number]);
        other.filter(|_| layout.partial().is_empty()).map(|r| (number, first(r), r))
    };
    layouts.enumerate().filter_map(differs).collect()
}

/// A tensor that ranks at several positions of a world axis (pipeline stages) hold as replicas, each on the mesh without
/// that axis.
#[derive(Clone, Debug)]
pub struct SharedTensor<'a> {
    /// The name in error messages.
    pub name: &'a str,
    /// The layout on the mesh without the axis.
    pub layout: Layout,
    /// The positions on the axis that hold the tensor, in order.
    pub positions: Vec<usize>,
    /// The replica of this rank, if it has one.
    pub replica: Option<Tensor>,
}

/// Checks that replicas along a world axis are bit-equal: those of ranks that differ in their position on the axis
/// alone. One all_gather over the world of one fingerprint for each tensor. A collective call: every rank passes the
/// same tensors in the same order, those included that it does not hold. Does nothing on the null back end.
///
/// # Errors
/// As [`check_replicas`].
#[doc(alias = "tied_weights")]
pub fn check_shared_replicas(
    rank: &Rank,
    axis: Axis,
    tensors: &[SharedTensor<'_>],
    site: &'static Location<'static>,
) -> Result<()> {
    let rank = rank.world();
    let mesh = rank.mesh();
    let mark = |t: &SharedTensor<'_>| match &t.replica {
        Some(replica) => Ok(fingerprint(&replica.local_bytes()?) as i64),
        None => Ok(0),
    };
    let marks: Vec<i64> = tensors.iter().map(mark).collect::<Result<_>>()?;
    let Some(everyone) = gathered(rank, &marks, site)? else { return Ok(()) };
    let at = |r: usize, place: usize| {
        let mut coordinate = mesh.coordinate(r);
        coordinate[axis.0 as usize] = place;
        mesh.rank_at(&coordinate)
    };
    let mut differing = Vec::new();
    for (number, SharedTensor { name, layout, positions, .. }) in tensors.iter().enumerate() {
        let mut holders =
            (0..mesh.num_ranks()).filter(|r| positions.contains(&mesh.coordinate(*r)[axis.0 as usize]));
        let other = holders.find(|r| everyone[*r][number] != everyone[at(*r, positions[0])][number]);
        differing.extend(other.map(|r| (*name, layout, at(r, positions[0]), r)));
    }
    refuse_differing(rank, &differing, tensors.len(), site)
}

/// The error for replicas that differ, each with its name, its layout, and two ranks that hold different bits.
fn refuse_differing(
    rank: &Rank,
    differing: &[(&str, &Layout, usize, usize)],
    count: usize,
    site: &'static Location<'static>,
) -> Result<()> {
    let mesh = rank.mesh();
    let Some((name, layout, first, other)) = differing.first() else { return Ok(()) };
    let mut names: Vec<&str> = differing.iter().take(NAMES_MAX).map(|(name, ..)| *name).collect();
    if differing.len() > NAMES_MAX {
        names.push("...");
    }
    let text =
        format!("replicas of {} of {count} tensors differ between ranks, `{name}` first", differing.len());
    Err(Error::new(Kind::Diverged, text)
        .detail("tensors", names.join(", "))
        .detail("layout", layout.to_string())
        .detail("rank", format!("{} holds different bits than rank {}", mesh.describe(*other), mesh.describe(*first)))
        .detail("help", "resume from the last checkpoint; if it happens again, suspect the memory, or code that runs on one rank only")
        .at(site))
}

/// Checks that all ranks of the world have the same labelled texts (configuration, options). One all_gather of two words
/// for each text; one more for a text that differs. A collective call: every rank passes the same labels in the same
/// order.
///
/// # Errors
/// `Kind::Diverged`, on every rank, with the first text that differs, as two ranks have it; errors of the collectives.
pub fn check_consistent(
    rank: &Rank,
    settings: &[(&'static str, String)],
    site: &'static Location<'static>,
) -> Result<()> {
    let rank = rank.world();
    let word = |text: &String| [fingerprint(text.as_bytes()) as i64, text.len() as i64];
    let marks: Vec<i64> = settings.iter().flat_map(|(_, text)| word(text)).collect();
    let Some(everyone) = gathered(rank, &marks, site)? else { return Ok(()) };
    let differs =
        |i: &usize| everyone.iter().position(|m| m[2 * i..2 * i + 2] != everyone[0][2 * i..2 * i + 2]);
    let Some((number, other)) = (0..settings.len()).find_map(|i| Some((i, differs(&i)?))) else {
        return Ok(());
    };
    let (label, text) = &settings[number];
    let counts: Vec<usize> = everyone.iter().map(|m| m[2 * number + 1] as usize).collect();
    let own = upload(&**rank.backend(), text.as_bytes())?;
    let joined = all_gather(rank, DType::U8, &own, &counts, site)?;
    let joined = download::<u8>(&**rank.backend(), &joined, counts.iter().sum())?;
    let of = |r: usize| {
        let start: usize = counts[..r].iter().sum();
        String::from_utf8_lossy(&joined[start..start + counts[r]]).into_owned()
    };
    let mesh = rank.mesh();
    let line = |r: usize| format!("{}: {}", mesh.describe(r), of(r));
    Err(Error::new(
        Kind::Diverged,
        format!("ranks got different configurations: `{label}` is not the same on every rank"),
    )
    .detail("rank", line(0))
    .detail("rank", line(other))
    .detail("help", "pass the same options, files and seed to every rank")
    .at(site))
}

/// Gathers the words of every rank of a mesh; `None` on one rank, without words, and on the null back end.
pub(super) fn gathered(
    rank: &Rank,
    words: &[i64],
    site: &'static Location<'static>,
) -> Result<Option<Vec<Vec<i64>>>> {
    let num_ranks = rank.mesh().num_ranks();
    if num_ranks == 1 || words.is_empty() {
        return Ok(None);
    }
    let own = upload(&**rank.backend(), words)?;
    let all = all_gather(rank, DType::I64, &own, &vec![words.len(); num_ranks], site)?;
    let all = download::<i64>(&**rank.backend(), &all, words.len() * num_ranks)?;
    Ok((!rank.is_dry_run()).then(|| all.chunks(words.len()).take(num_ranks).map(<[i64]>::to_vec).collect()))
}

fn all_gather(
    rank: &Rank,
    dtype: DType,
    own: &Buffer,
    counts: &[usize],
    site: &'static Location<'static>,
) -> Result<Buffer> {
    let mesh = rank.mesh();
    let axes = mesh.axes().filter(|a| mesh.size(*a) > 1).collect();
    let call = Call { axes, dtype, phase: Phase::Control, path: "", origin: Origin::default(), site };
    rank.all_gather(&call, own, counts)
}

/// A 64-bit fingerprint that a change of any single word changes: every word is mixed in by an invertible step. Four
/// independent states, because a single one would wait for its multiplications.
pub(super) fn fingerprint(bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
    let mix = |state: u64, word: u64| (state ^ word).wrapping_mul(ODD).rotate_left(29);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let (blocks, rest) = bytes.as_chunks::<32>();
    let mut states = [1u64, 2, 3, 4];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for (state, bytes) in states.iter_mut().zip(words) {
            *state = mix(*state, u64::from_le_bytes(*bytes));
        }
    }
    let tail = rest.chunks(8).fold(bytes.len() as u64, |state, bytes| mix(state, word(bytes)));
    let joined = states.into_iter().fold(tail, mix);
    // The last words would otherwise affect few bits of the result.
    (joined ^ (joined >> 32)).wrapping_mul(ODD) ^ (joined >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn fingerprint_changes_with_any_flipped_bit() {
        let bytes: Vec<u8> = (0..203).map(|i| (i * 7) as u8).collect();
        for len in [0, 1, 8, 31, 32, 33, 64, 203] {
            let (same, mut other) = (fingerprint(&bytes[..len]), bytes[..len].to_vec());
            for bit in 0..8 * len {
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(fingerprint(&other), same, "bit {bit} of {len} bytes");
                other[bit / 8] ^= 1 << (bit % 8);
            }
            assert_eq!(fingerprint(&other), same);
        }
        assert_ne!(fingerprint(&[0; 8]), fingerprint(&[0; 16]));
    }

    /// Checks a tensor of zeros with a layout, in which one rank holds a 1 bit.
    fn one_flipped(mesh: &str, layout: &str, flipped: usize) -> Result<()> {
        let mesh = Mesh::parse(mesh).unwrap();
        let layout = Layout::parse(layout, &mesh).unwrap();
        let ended = World::run(mesh, |rank| {
            let numel = layout.local_shape(rank.coordinates()).iter().product();
            let mut data = vec![0f32; numel];
            if rank.index() == flipped {
                *data.last_mut().expect("no local tensor is empty here") = f32::from_bits(1);
            }
            let (whole, x) =
                (Tensor::from_host(rank, &[2], &[1f32, 2.0])?, Tensor::from_local(rank, &layout, &data)?);
            check_replicas(rank, &[("whole", &whole), ("x", &x)], Location::caller())
        });
        ended.map(drop)
    }

    #[test]
    fn replicas_are_compared_on_every_layout() {
        for flipped in 0..4 {
            for (layout, is_copy) in [
                ("f32[4, 6]", true),
                ("f32[4@a, 6]", true),
                ("f32[4, 6@b] ~a", true),
                ("f32[4@a, 6@b]", false),
                ("f32[4@b@a, 6]", false),
                ("f32[4, 6] +a", false),
            ] {
                let ended = one_flipped("a=2,b=2", layout, flipped);
                assert_eq!(ended.is_err(), is_copy, "{layout} {flipped}: {ended:?}");
                if let Err(error) = ended {
                    assert_eq!(error.kind(), Kind::Diverged);
                    assert!(
                        error.to_string().contains("1 of 2 tensors differ between ranks, `x` first"),
                        "{error}"
                    );
                }
            }
            one_flipped("a=2,b=2", "f32[4, 6]", 9).unwrap();
        }
    }

    #[test]
    fn configurations_of_ranks_are_compared() {
        let mesh = Mesh::parse("a=3").unwrap();
        let check_with = |other: &'static str| {
            World::run(mesh.clone(), |rank| {
                let rate = if rank.index() == 2 { other } else { "lr 1e-3" };
                let settings = [("model", "wide".to_string()), ("optimizer", rate.to_string())];
                check_consistent(rank, &settings, Location::caller())
            })
        };
        check_with("lr 1e-3").unwrap();
        let error = check_with("lr 1e-3, decayed").unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::Diverged);
        for part in
            ["`optimizer`", "0 (a=0) of mesh(a=3): lr 1e-3\n", "2 (a=2) of mesh(a=3): lr 1e-3, decayed"]
        {
            assert!(text.contains(part), "{text}");
        }
        World::run(Mesh::single(), |rank| check_consistent(rank, &[("x", "y".into())], Location::caller()))
            .unwrap();
    }
}
