//! Elementary functions that the compiler can vectorize.
//!
//! The f32 versions have no branch and no table, round with `mul_add` only, and so give the same bits on every instruction set. Their
//! polynomials are minimax fits made for this file. The f64 versions are those of std: f64 is for checking, f32 for speed.

use crate::dtype::Real;

/// Elementary functions of the accumulator types. NaN in gives NaN out.
///
/// Largest error found in f32, in ulps: `exp` 1.0, `ln` 0.9, `tanh` 1.4, `expm1` 1.4, `ln_1p` 1.4,
/// `erf` 2.4, `normal` 5.7 (relative, in the far tail too); `sin`, `cos` and `pow` are those of f64, rounded: 0.51. In
/// f64 `erf` and `normal` were found within 2e-15 of their values, relatively; the others are those of std.
pub trait Maths: Real {
    /// e^x: 0 for very negative x, infinity for very large x.
    fn exp(self) -> Self;
    /// [`Maths::exp`] with the same bits, faster, for x of at most 40; unspecified above. NaN stays NaN.
    fn decay(self) -> Self;
    /// Natural logarithm: negative infinity at 0, NaN below.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// e^x - 1, exact near 0 too.
    fn expm1(self) -> Self;
    /// ln(1 + x), exact near 0 too: negative infinity at -1, NaN below.
    fn ln_1p(self) -> Self;
    /// Sine of an angle in radians, of any size; NaN at infinity.
    fn sin(self) -> Self;
    /// Cosine of an angle in radians, of any size; NaN at infinity.
    fn cos(self) -> Self;
    /// x to the power of y as IEEE 754 `pow`: 1 where y is 0 or x is 1, NaN for x < 0 and fractional y.
    fn pow(self, y: Self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// The largest integer not above x.
    fn floor(self) -> Self;
    /// The smallest integer not below x.
    fn ceil(self) -> Self;
    /// The nearest integer, ties to even.
    fn round_even(self) -> Self;
    /// The error function, (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.
    fn erf(self) -> Self;
    /// The upper tail Q(x) of the normal distribution, 1 - Phi(x), and exp(-x^2 / 2).
    fn normal(self) -> (Self, Self);
    /// The first of [`Maths::normal`].
    #[inline(always)]
    fn tail(self) -> Self {
        self.normal().0
    }
    /// The second of [`Maths::normal`].
    #[inline(always)]
    fn bell(self) -> Self {
        self.normal().1
    }
}

/// Coefficients of the normal tail for x in 0..end: Q(x) = exp(-x^2 / 2) g(t) / (x + centre), where t = (x - centre) / (x + centre) and
/// g is a polynomial.
struct Tail<const N: usize> {
    centre: f64,
    end: f64,
    c: [f64; N],
}

/// The normal tail for f32, as [`normal`] evaluates it, to 8e-9.
const TAIL_32: Tail<10> = Tail {
    centre: 3.5,
    end: 15.0,
    c: [
        0.744_416_058,
        -0.565_561_712,
        0.315_425_098,
        -0.116_053_171,
        0.017_405_821,
        0.006_493_726_75,
        -0.003_172_827_65,
        -0.000_495_039_101,
        0.000_418_322_132,
        0.000_108_692_759,
    ],
};
/// The normal tail for f64, to 1e-17.
const TAIL_64: Tail<23> = Tail {
    centre: 4.5,
    end: 40.0,
    c: [
        0.763_230_528_970_203_2,
        -0.640_257_760_252_617_2,
        0.446_452_517_055_677_5,
        -0.253_141_799_950_96,
        0.111_382_596_570_246_68,
        -0.033_871_326_177_426_046,
        0.004_223_613_379_861_687,
        0.001_748_830_571_620_435,
        -0.000_917_746_502_097_778_7,
        6.381_124_123_548e-6,
        0.000_112_042_714_658_097_45,
        -1.593_297_208_372_899e-5,
        -1.423_595_408_002_704_2e-5,
        3.189_937_743_418_209_3e-6,
        2.142_844_277_801_786e-6,
        -4.999_253_319_065_778e-7,
        -3.788_210_207_158_280_7e-7,
        6.178_738_341_191_606e-8,
        6.942_666_959_284_022e-8,
        -3.472_499_448_030_266_6e-9,
        -1.014_591_245_747_497_4e-8,
        -4.738_918_061_842_598e-10,
        6.575_772_398_955_589e-10,
    ],
};
/// erf(x) / x by powers of x^2 for x in 0..1, to 1.2e-9.
const ERF_32: [f64; 7] = [
    1.128_379_11,
    -0.376_126_26,
    0.112_835_854,
    -0.026_853_812_9,
    0.005_188_327_75,
    -0.000_801_019_429,
    7.853_864_37e-5,
];
/// erf(x) / x by powers of x^2 for x in 0..1, to 1.3e-19.
const ERF_64: [f64; 13] = [
    std::f64::consts::FRAC_2_SQRT_PI,
    -0.376_126_389_031_837_5,
    0.112_837_916_709_548_57,
    -0.026_866_170_645_072_896,
    0.005_223_977_624_780_868,
    -0.000_854_832_697_874_226_1,
    0.000_120_553_310_369_005_77,
    -1.492_559_350_688_875_2e-5,
    1.646_097_281_664_690_9e-6,
    -1.635_002_521_537_597e-7,
    1.465_787_977_467_242_4e-8,
    -1.136_566_564_118_705_7e-9,
    5.945_261_124_619_931e-11,
];

/// See [`Maths::normal`].
#[inline(always)]
fn normal<R: Maths, const N: usize>(x: R, tail: &Tail<N>) -> (R, R) {
    let (centre, end, half) = (R::lit(tail.centre), R::lit(tail.end), R::lit(0.5));
    let z = x.abs();
    let z = if z > end { end } else { z };
    let scale = R::ONE / (z + centre);
    let t = (z - centre) * scale;
    let mut g = R::lit(tail.c[N - 1]);
    for i in (0..N - 1).rev() {
        g = g.fma(t, R::lit(tail.c[i]));
    }
    // The rounding error of z^2 would be a large part of the exponential for large z.
    let square = z * z;
    let rest = z.fma(z, -square);
    let e = (-half * square).exp();
    let e = e.fma(-half * rest, e);
    let q = g * scale * e;
    (if x < R::ZERO { R::ONE - q } else { q }, e)
}

/// See [`Maths::erf`].
#[inline(always)]
fn erf<R: Maths, const N: usize>(x: R, near: &[f64; N]) -> R {
    let square = x * x;
    let mut p = R::lit(near[N - 1]);
    for i in (0..N - 1).rev() {
        p = p.fma(square, R::lit(near[i]));
    }
    let z = x.abs();
    let far = R::ONE - R::lit(2.0) * (z * R::lit(std::f64::consts::SQRT_2)).normal().0;
    let far = if x < R::ZERO { -far } else { far };
    // NaN takes the second branch, which keeps it.
    if z < R::ONE { x * p } else { far }
}

impl Maths for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn decay(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    #[inline(always)]
    fn expm1(self) -> f64 {
        f64::exp_m1(self)
    }

    #[inline(always)]
    fn ln_1p(self) -> f64 {
        f64::ln_1p(self)
    }

    #[inline(always)]
    fn sin(self) -> f64 {
        f64::sin(self)
    }

    #[inline(always)]
    fn cos(self) -> f64 {
        f64::cos(self)
    }

    #[inline(always)]
    fn pow(self, y: f64) -> f64 {
        f64::powf(self, y)
    }

    #[inline(always)]
    fn abs(self) -> f64 {
        f64::abs(self)
    }

    #[inline(always)]
    fn floor(self) -> f64 {
        f64::floor(self)
    }

    #[inline(always)]
    fn ceil(self) -> f64 {
        f64::ceil(self)
    }

    #[inline(always)]
    fn round_even(self) -> f64 {
        f64::round_ties_even(self)
    }

    #[inline(always)]
    fn erf(self) -> f64 {
        erf(self, &ERF_64)
    }

    #[inline(always)]
    fn normal(self) -> (f64, f64) {
        normal(self, &TAIL_64)
    }
}

/// ln 2, truncated so that a product with an exponent is exact, and the remainder.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// c[0] + c[1] x + c[2] x^2 + ...
#[inline(always)]
fn polynomial<const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut sum = c[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum.mul_add(x, c[i]);
    }
    sum
}

/// 2 to the power of n, for n in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// e^x = 2^n (1 + tail): returns a number whose lowest 9 bits are those of n + bias, and tail. The bias is whole and even, since ties
/// round to even sums.
#[inline(always)]
fn exp_parts(x: f32, bias: f32) -> (u32, f32) {
    let rounder = ROUNDER + bias;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, rounder);
    let whole = shifted - rounder;
    let r = whole.mul_add(-LN_2_LOW, whole.mul_add(-LN_2_HIGH, x));
    let q = polynomial(r, [0.499_999_94, 0.166_665_09, 0.041_668_527, 0.008_370_135, 0.001_381_166]);
    (shifted.to_bits(), (r * r).mul_add(q, r))
}

/// The exponent bias of f32.
const BIAS: f32 = 127.0;

/// 2 to the power of n, from a number whose lowest 9 bits are those of n + [`BIAS`], for n in -126..=127.
#[inline(always)]
fn power_of_biased(biased: u32) -> f32 {
    f32::from_bits(biased << 23)
}

/// The exponent of x, less `shift`, and the mantissa between sqrt(1/2) and sqrt(2) that goes with it, minus one.
#[inline(always)]
fn ln_parts(x: f32, shift: i32) -> (f32, f32) {
    let low = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    let bits = x.to_bits().wrapping_sub(low);
    let exponent = (bits as i32 >> 23).wrapping_sub(shift) as f32;
    (exponent, f32::from_bits((bits & 0x007f_ffff).wrapping_add(low)) - 1.0)
}

/// ln(2^exponent (1 + f)) + more, for a small `more`.
#[inline(always)]
fn ln_sum(exponent: f32, f: f32, more: f32) -> f32 {
    let p = polynomial(
        f,
        [
            0.333_333_13,
            -0.250_000_1,
            0.200_021_19,
            -0.166_679_95,
            0.142_195_54,
            -0.124_055_95,
            0.118_881_606,
            -0.116_756_14,
            0.067_465_98,
        ],
    );
    let square = f * f;
    let tail = square.mul_add(-0.5, exponent.mul_add(LN_2_LOW, (square * f).mul_add(p, more)));
    exponent.mul_add(LN_2_HIGH, f + tail)
}

/// [`Maths::decay`] raises exponents by this, the smallest, -150, to a normal number, and those of up to 62 to a finite one. Odd, since the
/// exponent bias is.
const DECAY_RAISED: i32 = 65;

/// Above this magnitude tanh is computed from exp.
const TANH_SPLIT: f32 = 0.625;

impl Maths for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        // Comparisons with NaN are false, so that NaN stays.
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        let (doubly_biased, tail) = exp_parts(x, 2.0 * BIAS);
        // Two factors, since 2^n itself may be subnormal or infinite where the result is not.
        let half = doubly_biased >> 1;
        let (first, second) = (power_of_biased(half), power_of_biased(doubly_biased.wrapping_sub(half)));
        tail.mul_add(first, first) * second
    }

    #[inline(always)]
    fn decay(self) -> f32 {
        let x = if self < -104.0 { -104.0 } else { self };
        // 2^n may be subnormal; raised it is not, and lowering it again rounds once.
        let (biased, tail) = exp_parts(x, BIAS + DECAY_RAISED as f32);
        let raised = power_of_biased(biased);
        tail.mul_add(raised, raised) * power_of_two(-DECAY_RAISED)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        let tiny = self < f32::MIN_POSITIVE;
        let x = if tiny { self * 8_388_608.0 } else { self };
        let (exponent, f) = ln_parts(x, if tiny { 23 } else { 0 });
        let y = ln_sum(exponent, f, 0.0);
        let y = if self == f32::INFINITY { f32::INFINITY } else { y };
        let y = if self == 0.0 { f32::NEG_INFINITY } else { y };
        if self >= 0.0 { y } else { f32::NAN }
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        let x = self.abs();
        let t = self * self;
        let p = polynomial(
            t,
            [-0.333_333_3, 0.133_332_06, -0.053_946_763, 0.021_700_704, -0.008_177_4, 0.002_142_963],
        );
        let near = (t * self).mul_add(p, self);
        let far = 1.0 - 2.0 / (Maths::exp(x + x) + 1.0);
        // NaN takes the second branch, which keeps it. The sum of `near` loses the sign of -0.
        let y = if x < TANH_SPLIT { near } else { far };
        y.copysign(self)
    }

    #[inline(always)]
    fn expm1(self) -> f32 {
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -30.0 { -30.0 } else { x };
        let (bits, tail) = exp_parts(x, 0.0);
        let n = bits.wrapping_sub(ROUNDER.to_bits()) as i32;
        // 2^n (1 + tail) - 1, at half its size so that nothing overflows before the result does.
        let half = power_of_two(n.wrapping_sub(1));
        let y = 2.0 * half.mul_add(tail, half - 0.5);
        // Zero keeps its sign.
        if self == 0.0 { self } else { y }
    }

    #[inline(always)]
    fn ln_1p(self) -> f32 {
        let sum = 1.0 + self;
        let back = sum - 1.0;
        let lost = (1.0 - (sum - back)) + (self - back);
        let (exponent, f) = ln_parts(sum, 0);
        let y = ln_sum(exponent, f, lost / sum);
        let y = if self == f32::INFINITY { f32::INFINITY } else { y };
        let y = if self == -1.0 { f32::NEG_INFINITY } else { y };
        let y = if self == 0.0 { self } else { y };
        if self >= -1.0 { y } else { f32::NAN }
    }

    #[inline(always)]
    fn sin(self) -> f32 {
        f64::from(self).sin() as f32
    }

    #[inline(always)]
    fn cos(self) -> f32 {
        f64::from(self).cos() as f32
    }

    #[inline(always)]
    fn pow(self, y: f32) -> f32 {
        f64::from(self).powf(f64::from(y)) as f32
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn floor(self) -> f32 {
        f32::floor(self)
    }

    #[inline(always)]
    fn ceil(self) -> f32 {
        f32::ceil(self)
    }

    #[inline(always)]
    fn round_even(self) -> f32 {
        f32::round_ties_even(self)
    }

    #[inline(always)]
    fn erf(self) -> f32 {
        erf(self, &ERF_32)
    }

    #[inline(always)]
    fn normal(self) -> (f32, f32) {
        normal(self, &TAIL_32)
    }
}

#[cfg(test)]
mod tests;
