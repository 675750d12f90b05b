//! Content hash, by which processes detect that they read different data.

use shardgrad::Result;
use xxhash_rust::xxh3::Xxh3;

/// Contents up to this size are hashed whole.
const WHOLE_BYTES_MAX: u64 = 1 << 30;
/// Number of evenly spaced blocks hashed of longer contents, first and last included.
const BLOCKS: u64 = 1024;
/// Block size, and size of a read.
const BLOCK_BYTES: u64 = 256 << 10;

/// xxh3-64 hash of a sequence of contents. Of contents above 1 GiB only the length and 1024 blocks of 256 KiB are hashed, so that the start of
/// a run on very large files is fast.
#[derive(Default)]
pub(crate) struct ContentHash(Xxh3);

impl ContentHash {
    /// Adds bytes in memory.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Adds contents of `len` bytes; `read` fills a buffer from a position.
    ///
    /// # Errors
    /// Errors of `read`.
    pub(crate) fn add_contents(
        &mut self,
        len: u64,
        read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.add_blocks(len, WHOLE_BYTES_MAX, read)
    }

    fn add_blocks(
        &mut self,
        len: u64,
        whole_bytes_max: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.0.update(&len.to_le_bytes());
        let mut block = vec![0; BLOCK_BYTES.min(len) as usize];
        let mut add = |at: u64| {
            let part = &mut block[..(len - at).min(BLOCK_BYTES) as usize];
            read(at, part)?;
            self.0.update(part);
            Ok(())
        };
        if len <= whole_bytes_max {
            return (0..len.div_ceil(BLOCK_BYTES)).try_for_each(|block| add(block * BLOCK_BYTES));
        }
        let last = u128::from(len.saturating_sub(BLOCK_BYTES));
        (0..BLOCKS).try_for_each(|i| add((last * u128::from(i) / u128::from(BLOCKS - 1)) as u64))
    }

    /// Returns the hash as 16 hexadecimal digits.
    pub(crate) fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hashes bytes through `add_blocks`.
    fn hash(bytes: &[u8], whole_bytes_max: u64) -> String {
        let mut hash = ContentHash::default();
        let read = |at: u64, part: &mut [u8]| {
            part.copy_from_slice(&bytes[at as usize..][..part.len()]);
            Ok(())
        };
        hash.add_blocks(bytes.len() as u64, whole_bytes_max, read).unwrap();
        hash.hex()
    }

    #[test]
    fn content_hash_covers_every_byte_and_the_length() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES as usize * 2 + 5).map(|i| (i % 251) as u8).collect();
        let whole = hash(&bytes, u64::MAX);
        for at in [0, 1, BLOCK_BYTES as usize, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(hash(&other, u64::MAX), whole, "{at}");
        }
        assert_ne!(hash(&bytes[..bytes.len() - 1], u64::MAX), whole);
        assert_ne!(hash(&[], u64::MAX), hash(&[0], u64::MAX));
        // The boundary between two added contents matters.
        let [mut one, mut other] = [ContentHash::default(), ContentHash::default()];
        [&b"ab"[..], b"c"].iter().for_each(|part| one.add(part));
        [&b"a"[..], b"bc"].iter().for_each(|part| other.add(part));
        assert_ne!(one.hex(), other.hex());
    }

    #[test]
    fn hash_of_long_contents_covers_first_and_last_byte() {
        let bytes = vec![7; BLOCK_BYTES as usize * 3];
        let all = hash(&bytes, 10);
        for at in [0, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] = 8;
            assert_ne!(hash(&other, 10), all, "{at}");
        }
        assert_ne!(hash(&bytes[1..], 10), all);
    }
}
