//! Standard normal numbers from two words of random bits (Box and Muller), in f64 and in loops that vectorize.
//!
//! Only exact conversions, multiply-adds, a division and a square root are used, so every machine gives the same bits.

/// ln 2 in two parts; the upper ends in zeros, so that its product with a small integer is exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// The angle 2 pi / 2^32.
const TURN: f64 = std::f64::consts::TAU / 4_294_967_296.0;

/// The reciprocals 1/1, 1/3, ..., 1/21 of the series artanh(s) = s + s^3/3 + ...
const ARTANH: [f64; 11] = odd_reciprocals();
/// The series of sin(x) / x and of cos(x) in x^2.
const SIN: [f64; 9] = alternating_factorials(1);
const COS: [f64; 9] = alternating_factorials(0);

const fn odd_reciprocals() -> [f64; 11] {
    let mut c = [1.0; 11];
    let mut i = 1;
    while i < c.len() {
        c[i] = 1.0 / (2 * i + 1) as f64;
        i += 1;
    }
    c
}

/// (-1)^i / (2i + first)!
const fn alternating_factorials(first: u64) -> [f64; 9] {
    let (mut c, mut factorial) = ([1.0; 9], 1);
    let mut i = 1;
    while i < c.len() {
        let n = 2 * i as u64 + first;
        factorial *= n * (n - 1);
        c[i] = if i % 2 == 0 { 1.0 } else { -1.0 } / factorial as f64;
        i += 1;
    }
    c
}

/// c[0] + c[1] x + c[2] x^2 + ...
#[inline(always)]
fn series<const N: usize>(x: f64, c: &[f64; N]) -> f64 {
    let mut sum = c[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum.mul_add(x, c[i]);
    }
    sum
}

/// sqrt(-2 ln u) for u = (bits + 1) / 2^32.
#[inline(always)]
fn radius(bits: u32) -> f64 {
    let u = (f64::from(bits) + 1.0) * (1.0 / 4_294_967_296.0);
    // u = m 2^e with m between sqrt(1/2) and sqrt(2); ln m = 2 artanh((m - 1) / (m + 1)).
    let low = std::f64::consts::FRAC_1_SQRT_2.to_bits();
    let offset = u.to_bits().wrapping_sub(low);
    let e = f64::from((offset as i64 >> 52) as i32);
    let m = f64::from_bits((offset & 0x000f_ffff_ffff_ffff).wrapping_add(low));
    let s = (m - 1.0) / (m + 1.0);
    let ln_m = (s + s) * series(s * s, &ARTANH);
    let ln_u = e.mul_add(LN_2_HIGH, e.mul_add(LN_2_LOW, ln_m));
    (-2.0 * ln_u).sqrt()
}

/// Returns cosine and sine of the angle 2 pi `bits` / 2^32.
#[inline(always)]
fn direction(bits: u32) -> (f64, f64) {
    // The nearest multiple of pi / 2, and the rest, at most pi / 4.
    let quarter = bits.wrapping_add(1 << 29) >> 30;
    let x = f64::from(bits.wrapping_sub(quarter << 30) as i32) * TURN;
    let (sin, cos) = (x * series(x * x, &SIN), series(x * x, &COS));
    let (cos, sin) = if quarter & 1 == 0 { (cos, sin) } else { (sin, cos) };
    let negative_cos = u64::from((quarter.wrapping_add(1) >> 1) & 1) << 63;
    let negative_sin = u64::from((quarter >> 1) & 1) << 63;
    (f64::from_bits(cos.to_bits() ^ negative_cos), f64::from_bits(sin.to_bits() ^ negative_sin))
}

/// Returns two independent standard normal numbers.
#[inline(always)]
pub(super) fn normal_pair(first: u32, second: u32) -> (f64, f64) {
    let (r, (cos, sin)) = (radius(first), direction(second));
    (r * cos, r * sin)
}

/// Returns the pair computed with functions of std: the reference for [`normal_pair`].
pub(super) fn normal_pair_plain(first: u32, second: u32) -> (f64, f64) {
    let u = (f64::from(first) + 1.0) / 4_294_967_296.0;
    let angle = std::f64::consts::TAU * (f64::from(second) / 4_294_967_296.0);
    let r = (-2.0 * u.ln()).sqrt();
    (r * angle.cos(), r * angle.sin())
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::{abs_diff_eq, assert_abs_diff_eq};

    #[test]
    fn matches_known_values() {
        // u = 1 has radius 0; the second pair has u = 1/2 and the angle pi / 4.
        assert_eq!(normal_pair(u32::MAX, 12345).0, 0.0);
        let (a, b) = normal_pair((1 << 31) - 1, 1 << 29);
        let expected = 2f64.ln().sqrt();
        assert_abs_diff_eq!([a, b][..], [expected; 2][..], epsilon = 1e-15);
        let quarters = [0, 1, 2, 3].map(|q: u32| normal_pair(0, q << 30));
        let r = (64.0 * 2f64.ln()).sqrt();
        for ((a, b), (c, s)) in quarters.into_iter().zip([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)]) {
            assert_abs_diff_eq!([a, b][..], [r * c, r * s][..], epsilon = 1e-14);
        }
    }

    #[test]
    fn series_match_std() {
        for i in 0..40_000u32 {
            let (first, second) = (i.wrapping_mul(2_654_435_761), i.wrapping_mul(0x9e37_79b1) ^ 0x55);
            // Also small radii and the borders of octants.
            for (first, second) in [
                (first, second),
                (u32::MAX - i, second),
                (first, ((i % 8) << 29).wrapping_add(i % 3).wrapping_sub(1)),
            ] {
                let ((a, b), (c, d)) = (normal_pair(first, second), normal_pair_plain(first, second));
                let near = abs_diff_eq!([a, b][..], [c, d][..], epsilon = 4e-15);
                assert!(near, "{first} {second}: {a} {b}, not {c} {d}");
            }
        }
    }
}
