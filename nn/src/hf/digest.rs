//! A number made of the bytes of a file, by which files of different saves are told apart.

/// 64 bits of a stream of bytes. Every word is mixed in by steps that can be undone, so that a change of one word always
/// changes them. No secret: whoever wants two streams of one number can make them.
#[derive(Debug, Default)]
pub struct Digest {
    state: u64,
    /// Bytes that do not fill a word yet, and how many there are.
    word: [u8; 8],
    filled: usize,
    len: u64,
}

impl Digest {
    fn mix(&mut self, word: u64) {
        self.state = (self.state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }

    /// Goes on with these bytes; how they are cut into pieces makes no difference.
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

    /// The number, as 16 hexadecimal digits.
    #[must_use]
    pub fn hex(mut self) -> String {
        self.word[self.filled..].fill(0);
        self.mix(u64::from_le_bytes(self.word));
        self.mix(self.len);
        // The last bits mixed in would otherwise touch few of the result.
        self.mix(self.state >> 32);
        format!("{:016x}", self.state)
    }

    /// The digest of files that belong together, from theirs, in their order; that of a file alone is its own.
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
    fn pieces_make_no_difference_and_every_bit_does() {
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
