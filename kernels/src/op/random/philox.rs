//! Philox4x32-10: random bits as a function of a counter and a key (Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3", 2011). There is no state, so any element can be computed by any rank.

/// The multipliers of a round, for words 0 and 2.
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The increments of the key per round: the golden ratio and sqrt(3) - 1.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Returns the upper and the lower half of a product.
#[inline(always)]
fn halves(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// Ten rounds on counters side by side; word i of counter n is `c[i][n]`.
#[inline(always)]
pub(super) fn philox_rounds(c: [&mut [u32]; 4], mut key: [u32; 2]) {
    let [c0, c1, c2, c3] = c;
    for _ in 0..10 {
        for (((c0, c1), c2), c3) in c0.iter_mut().zip(&mut *c1).zip(&mut *c2).zip(&mut *c3) {
            let (high0, low0) = halves(MULTIPLIERS[0], *c0);
            let (high1, low1) = halves(MULTIPLIERS[1], *c2);
            (*c0, *c1) = (high1 ^ *c1 ^ key[0], low1);
            (*c2, *c3) = (high0 ^ *c3 ^ key[1], low0);
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
}

/// Returns 128 random bits for a counter and a key.
#[must_use]
pub fn philox(mut counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_rounds(counter.each_mut().map(std::slice::from_mut), key);
    counter
}

/// Returns the lower and the upper word.
#[inline(always)]
pub(super) fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The 32 random bits of element `index`: word index mod 4 of the block with the counter
/// (index / 4, stream), each lower word first.
#[must_use]
pub fn bits_at(key: u64, stream: u64, index: u64) -> u32 {
    let ([block_low, block_high], [stream_low, stream_high]) = (words(index / 4), words(stream));
    philox([block_low, block_high, stream_low, stream_high], words(key))[(index % 4) as usize]
}

/// The uniform number in [0, 1) of element `index`, a multiple of 2^-24: exact in f32.
#[must_use]
pub fn uniform_at(key: u64, stream: u64, index: u64) -> f64 {
    unit_interval(bits_at(key, stream, index))
}

/// Returns the upper 24 bits as a fraction.
#[inline(always)]
pub(super) fn unit_interval(bits: u32) -> f64 {
    f64::from(bits >> 8) * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_known_values() {
        // From the test vectors that accompany the paper.
        let ones = u32::MAX;
        for (counter, key, answer) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), answer);
            assert_ne!(philox(counter, [key[0] ^ 1, key[1]]), answer, "one bit of the key matters");
        }
    }

    #[test]
    fn bits_of_elements_are_the_words_of_philox_blocks() {
        let (key, stream) = (0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210);
        let index = (1 << 40) + 6;
        let block = philox([1, 1 << 6, 0x7654_3210, 0xfedc_ba98], [0x89ab_cdef, 0x0123_4567]);
        assert_eq!(bits_at(key, stream, index), block[2]);
        assert_eq!(uniform_at(key, stream, index), f64::from(block[2] >> 8) / f64::from(1 << 24));
    }
}
