//! The state hash: a 128-bit hash of named tensors that is the same for every layout and mesh.
//!
//! Each element contributes a number that depends on the name of its tensor, its global index and its bits; the hash is the
//! sum of all contributions modulo 2^128. So neither the order of the elements nor the rank that adds one matters. The map
//! from index and bits to the contribution is invertible, so a change of one element always changes the hash. The hash is not
//! cryptographic.

use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use crate::training_step::consistency::gathered;
use shardgrad_dist::{Error, Kind, Rank, Result};
use std::fmt;
use std::panic::Location;
use std::str::FromStr;

/// Number of hexadecimal digits of a hash.
const DIGITS: usize = 32;
/// Odd multipliers of the mixing rounds: the fractions of the golden ratio and of the square roots of 2, 3 and 5.
const ROUNDS: [u64; 4] =
    [0x9E37_79B9_7F4A_7C15, 0x6A09_E667_F3BC_C909, 0xBB67_AE85_84CA_A73B, 0x3C6E_F372_FE94_F82B];

/// A hash of named tensors and numbers. It prints as 32 hexadecimal digits, which [`str::parse`] reads.
///
/// A rank adds its local tensors; the sum over all ranks ([`StateHash::sum_over_world`]) is the hash.
#[doc(alias = "checksum")]
#[doc(alias = "fingerprint")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateHash(u128);

/// Multiplies to 128 bits and folds. Always inlined, also without optimization: it runs four times for each element.
#[inline(always)]
fn fold(x: u64, odd: u64) -> u64 {
    let wide = u128::from(x ^ odd.rotate_left(32)) * u128::from(odd);
    (wide >> 64) as u64 ^ wide as u64
}

/// An invertible map of two words: a Feistel network.
#[inline(always)]
fn mix([mut a, mut b]: [u64; 2]) -> [u64; 2] {
    b ^= fold(a, ROUNDS[0]);
    a ^= fold(b, ROUNDS[1]);
    b ^= fold(a, ROUNDS[2]);
    a ^= fold(b, ROUNDS[3]);
    [a, b]
}

/// The key of a name: the hash of its bytes and its length.
fn key(name: &str) -> [u64; 2] {
    name.as_bytes().chunks(8).fold(mix([name.len() as u64, 0]), |[a, b], chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix([a ^ u64::from_le_bytes(word), b])
    })
}

impl StateHash {
    #[inline(always)]
    fn add(&mut self, key: [u64; 2], index: u64, bits: u64) {
        let [high, low] = mix([index ^ key[0], bits ^ key[1]]);
        self.0 = self.0.wrapping_add(u128::from(high) << 64 | u128::from(low));
    }

    /// Adds consecutive elements of `SIZE` bytes from a global index on; `word` reads one, little endian.
    fn add_run<const SIZE: usize>(
        &mut self,
        key: [u64; 2],
        first: usize,
        bytes: &[u8],
        word: impl Fn([u8; SIZE]) -> u64,
    ) {
        let mut sum = StateHash::default();
        for (index, element) in (first as u64..).zip(bytes.as_chunks::<SIZE>().0) {
            sum.add(key, index, word(*element));
        }
        self.0 = self.0.wrapping_add(sum.0);
    }

    /// Adds the elements of a tensor that this rank holds and that no rank with smaller coordinates holds: of copies only those at
    /// coordinate 0 count. Names are unique. No communication; nothing is added on the null back end.
    ///
    /// # Errors
    /// `Kind::Layout` for a partial sum, whose elements no rank has before it is reduced; `Kind::OutOfMemory`; errors of the device.
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let (layout, rank) = (tensor.layout(), tensor.rank());
        if !layout.partial().is_empty() {
            let text = format!("`{name}` is a partial sum, which has no bits to hash: {layout}");
            let help = "redistribute the tensor to an invariant or sharded layout first";
            return Err(Error::new(Kind::Layout, text).detail("help", help));
        }
        let counts = |a| matches!(layout.placement(a), Placement::Shard(_)) || rank.coordinate(a) == 0;
        if !layout.mesh().axes().all(counts) {
            return Ok(());
        }
        let bytes = tensor.local_bytes()?;
        let (size, key) = (tensor.dtype().size(), key(name));
        let (extents, ranges): (Vec<usize>, Vec<_>) =
            (0..layout.ndim()).map(|d| (layout.extent(d), layout.range(d, rank.coordinates()))).unzip();
        // The elements of the dims from `inner` on are consecutive in the global tensor.
        let is_whole = |d: &usize| ranges[*d].len() == extents[*d];
        let inner = (0..extents.len()).rev().find(|d| !is_whole(d)).unwrap_or(0);
        let stride: usize = extents.iter().skip(inner + 1).product();
        let (run, first) = match ranges.get(inner) {
            Some(range) => (range.len() * stride, range.start * stride),
            None => (1, 0),
        };
        if run == 0 {
            return Ok(());
        }
        for (number, run_bytes) in bytes.chunks_exact(run * size).enumerate() {
            // The position of the run in the outer dims, as a global index.
            let (mut rest, mut start, mut stride) =
                (number, first, extents.iter().skip(inner).product::<usize>());
            for d in (0..inner).rev() {
                start += (ranges[d].start + rest % ranges[d].len()) * stride;
                rest /= ranges[d].len();
                stride *= extents[d];
            }
            match size {
                1 => self.add_run(key, start, run_bytes, |[byte]| u64::from(byte)),
                2 => self.add_run(key, start, run_bytes, |bytes| u64::from(u16::from_le_bytes(bytes))),
                4 => self.add_run(key, start, run_bytes, |bytes| u64::from(u32::from_le_bytes(bytes))),
                _ => self.add_run(key, start, run_bytes, u64::from_le_bytes),
            }
        }
        Ok(())
    }

    /// Adds a number under a name; one rank of the world adds it.
    pub fn add_number(&mut self, name: &str, number: u64) {
        self.add(key(name), 0, number);
    }

    /// Returns the sum of the hashes of all ranks of the world, the same on every rank: the hash of all that they have added. One
    /// all-gather of 16 bytes for each rank. A collective call: every rank calls it together. The null back end returns its own.
    ///
    /// # Errors
    /// Errors of the collective.
    pub fn sum_over_world(self, rank: &Rank, site: &'static Location<'static>) -> Result<StateHash> {
        let words = [(self.0 >> 64) as i64, self.0 as i64];
        let Some(everyone) = gathered(rank.world(), &words, site)? else { return Ok(self) };
        let hash = |words: &Vec<i64>| u128::from(words[0] as u64) << 64 | u128::from(words[1] as u64);
        Ok(StateHash(everyone.iter().map(hash).fold(0, u128::wrapping_add)))
    }
}

impl fmt::Display for StateHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$x}", self.0)
    }
}

impl FromStr for StateHash {
    type Err = Error;

    fn from_str(text: &str) -> Result<StateHash> {
        let is_hash = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let hash = u128::from_str_radix(text, 16).ok().filter(|_| is_hash).map(StateHash);
        hash.ok_or_else(|| {
            Error::new(Kind::Config, format!("`{text}` is not a hash of {DIGITS} hexadecimal digits"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use shardgrad_dist::{Mesh, World};

    /// The hash of one tensor of 7 x 6 x 2 numbers on a mesh.
    fn hash_on(mesh: &str, layout: &str, name: &str, data: &[f32]) -> StateHash {
        let mesh = Mesh::parse(mesh).unwrap();
        let layout = Layout::parse(layout, &mesh).unwrap();
        let hashes = World::run(mesh, |rank| {
            let mut hash = StateHash::default();
            hash.add_tensor(name, &Tensor::from_global(rank, &layout, data)?)?;
            hash.sum_over_world(rank, Location::caller())
        });
        let hashes = hashes.unwrap();
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
        hashes[0]
    }

    #[test]
    fn hash_is_independent_of_the_layout_and_sensitive_to_name_place_and_every_bit() {
        let data: Vec<f32> = (0..84).map(|i| 0.37 * i as f32 - 9.0).collect();
        let alone = hash_on("", "f32[7, 6, 2]", "w", &data);
        for (mesh, layout) in [
            ("a=2", "f32[7, 6, 2]"),
            ("a=2", "f32[7, 6, 2] ~a"),
            ("a=3", "f32[7@a, 6, 2]"),
            ("a=3", "f32[7, 6@a, 2]"),
            ("a=4", "f32[7, 6, 2@a]"),
            ("a=2,b=2", "f32[7@a, 6, 2@b]"),
            ("a=2,b=2", "f32[7@b@a, 6, 2]"),
            ("a=2,b=2", "f32[7@b, 6, 2] ~a"),
            ("a=2,b=2,c=2", "f32[7@c, 6@a, 2@b]"),
        ] {
            assert_eq!(hash_on(mesh, layout, "w", &data), alone, "{mesh} {layout}");
        }
        assert_ne!(hash_on("", "f32[7, 6, 2]", "v", &data), alone);
        assert_ne!(hash_on("", "f32[7, 6, 2]", "w\0", &data), alone);
        let mut changed = data.clone();
        for (i, bit) in (0..84).zip((0..32).cycle()) {
            changed[i] = f32::from_bits(data[i].to_bits() ^ 1 << bit);
            for (mesh, layout) in [("", "f32[7, 6, 2]"), ("a=2,b=2", "f32[7@a, 6@b, 2]")] {
                assert_ne!(hash_on(mesh, layout, "w", &changed), alone, "bit {bit} of element {i}");
            }
            changed[i] = data[i];
        }
        changed.swap(3, 4);
        assert_ne!(hash_on("", "f32[7, 6, 2]", "w", &changed), alone, "two elements exchanged");
    }

    #[test]
    fn scalars_and_empty_tensors_are_hashed_and_partial_sums_refused() {
        assert_ne!(hash_on("", "f32[]", "w", &[1.0]), hash_on("a=2", "f32[]", "w", &[2.0]));
        assert_eq!(hash_on("", "f32[]", "w", &[1.0]), hash_on("a=2", "f32[]", "w", &[1.0]));
        assert_eq!(hash_on("a=2", "f32[0@a]", "w", &[]), StateHash::default());
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let partial = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            let error = StateHash::default().add_tensor("w", &partial).unwrap_err();
            assert_eq!(error.kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn hash_prints_as_digits_that_parse() {
        let mut hash = StateHash::default();
        hash.add_number("step.w", 7);
        let text = hash.to_string();
        assert_eq!((text.len(), text.parse::<StateHash>().unwrap()), (DIGITS, hash));
        // The value is part of the format: logs of two releases can be compared.
        assert_eq!(text, "5bfc517fe8dfdf9e5895d6e07ab52ee7");
        for wrong in ["", "12", &text[1..], &format!("+{}", &text[1..]), &format!("{text}0")] {
            assert!(wrong.parse::<StateHash>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn mixing_is_invertible_and_changes_half_of_the_bits() {
        let mut seen = std::collections::HashSet::new();
        let mut flipped = 0;
        for a in 0..64u64 {
            for b in 0..64u64 {
                let here = mix([a, b << 23]);
                assert!(seen.insert(here));
                let there = mix([a, b << 23 ^ 1 << 63]);
                flipped += (here[0] ^ there[0]).count_ones() + (here[1] ^ there[1]).count_ones();
            }
        }
        let mean = f64::from(flipped) / 4096.0;
        assert!((56.0..72.0).contains(&mean), "{mean} of 128 bits");
    }
}
