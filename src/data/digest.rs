//! A hash of contents, by which processes find out that they read different files.

use shardgrad::Result;
use xxhash_rust::xxh3::Xxh3;

/// Contents of up to so many bytes are hashed whole.
const WHOLE_BYTES_MAX: u64 = 1 << 30;
/// Of longer ones so many blocks are, which lie evenly and end with the last.
const BLOCKS: u64 = 1024;
/// Bytes of a block, and bytes that are read at a time.
const BLOCK_BYTES: u64 = 256 << 10;

/// The xxh3-64 hash of contents that follow each other. Contents of more than 1 GiB are hashed by their length and by 1024 blocks
/// of 256 KiB, so that the start of a run on very large files takes no minutes.
#[derive(Default)]
pub(crate) struct ContentHash(Xxh3);

impl ContentHash {
    /// Adds a text, or a number of bytes that are in memory.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Adds contents of `len` bytes, which `read` reads from a position on.
    ///
    /// # Errors
    /// Those of `read`.
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

    /// The hash, as 16 hexadecimal digits.
    pub(crate) fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of bytes that are read by position.
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
    fn every_byte_and_the_length_count() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES as usize * 2 + 5).map(|i| (i % 251) as u8).collect();
        let whole = hash(&bytes, u64::MAX);
        for at in [0, 1, BLOCK_BYTES as usize, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(hash(&other, u64::MAX), whole, "{at}");
        }
        assert_ne!(hash(&bytes[..bytes.len() - 1], u64::MAX), whole);
        assert_ne!(hash(&[], u64::MAX), hash(&[0], u64::MAX));
        // What is hashed in memory is told from what follows it.
        let [mut one, mut other] = [ContentHash::default(), ContentHash::default()];
        [&b"ab"[..], b"c"].iter().for_each(|part| one.add(part));
        [&b"a"[..], b"bc"].iter().for_each(|part| other.add(part));
        assert_ne!(one.hex(), other.hex());
    }

    #[test]
    fn of_long_contents_blocks_from_the_first_to_the_last_byte_count() {
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
