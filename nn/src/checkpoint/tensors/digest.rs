//! Digest: a 64-bit hash of the bytes of a file, which tells files of different saves apart.

/// 64-bit hash of a byte stream. Each word is mixed in by invertible steps, so a change of one word always changes
/// the digest. Not cryptographic: collisions can be constructed.
#[derive(Debug, Default)]
pub struct Digest {
    state: u64,
    /// Bytes that do not yet fill a word, and their number.
    word: [u8; 8],
    filled: usize,
    len: u64,
}

impl Digest {
    fn mix(&mut self, word: u64) {
        self.state = (self.state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }

    /// Adds the next bytes; the digest does not depend on how the bytes are cut into pieces.
    pub fn add(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        if self.filled > 0 {
            let (first, rest) = bytes.split_at(bytes.len().min(8 - self.filled));
            self.word[self.filled..][..first.len()].copy_from_slice(first);
            self.filled += first.len();
            if self.filled < 8 {
                return;
            }
            self.mix(u64::from_le_bytes(self.word));
            bytes = rest;
        }
        let (words, tail) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.mix(u64::from_le_bytes(*word)));
        self.word[..tail.len()].copy_from_slice(tail);
        self.filled = tail.len();
    }

    /// Returns the digest as 16 hexadecimal digits.
    #[must_use]
    pub fn hex(mut self) -> String {
        self.word[self.filled..].fill(0);
        self.mix(u64::from_le_bytes(self.word));
        self.mix(self.len);
        // Spread the last bits mixed in over the result.
        self.mix(self.state >> 32);
        format!("{:016x}", self.state)
    }

    /// Combines the digests of files that belong together, in their order; the digest of a single file is its own.
    pub(super) fn of_files(digests: &[String]) -> Option<String> {
        match digests {
            [] => None,
            [own] => Some(own.clone()),
            several => {
                let mut all = Digest::default();
                several.iter().for_each(|digest| all.add(digest.as_bytes()));
                Some(all.hex())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pieces: &[&[u8]]) -> String {
        let mut digest = Digest::default();
        pieces.iter().for_each(|piece| digest.add(piece));
        digest.hex()
    }

    #[test]
    fn digest_is_independent_of_pieces_and_sensitive_to_every_bit() {
        let mut bytes: Vec<u8> = (0..37).collect();
        let whole = of(&[&bytes]);
        for cut in 0..bytes.len() {
            let (a, b) = bytes.split_at(cut);
            assert_eq!(of(&[a, &b[..b.len().min(3)], &b[b.len().min(3)..]]), whole);
        }
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&[&bytes]), whole, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_ne!(of(&[&[0; 8]]), of(&[&[0; 9]]));
        assert_eq!(whole.len(), 16);
    }
}
