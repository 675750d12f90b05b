//! Elementary functions that the compiler can turn into vector code.
//!
//! The f32 versions have no branch and no table, round with `mul_add` only, and so give the same bits at every
//! SIMD level. Their polynomials are minimax fits made for this file. The f64 versions are those of std: f64 is for
//! checking, f32 for speed.

use crate::dtype::Real;

/// Elementary functions of the accumulator types. Not-a-number goes in and comes out.
///
/// Largest error found in f32: `exp` 1.0, `ln` 0.9, `tanh` 1.4 units in the last place.
pub trait Maths: Real {
    /// e to the power of x: 0 far below, infinity far above.
    fn exp(self) -> Self;
    /// Natural logarithm: negative infinity at 0, not a number below.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
}

impl Maths for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
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
}

/// ln 2, cut after so few bits that a product with an exponent is exact, and the rest.
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

/// Above this (and below its negative), tanh is found from exp.
const TANH_SPLIT: f32 = 0.625;

impl Maths for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        // Comparisons are false for not-a-number, which thus stays.
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
        let n = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
        let whole = shifted - ROUNDER;
        let r = whole.mul_add(-LN_2_LOW, whole.mul_add(-LN_2_HIGH, x));
        let q = polynomial(r, [0.499_999_94, 0.166_665_09, 0.041_668_527, 0.008_370_135, 0.001_381_166]);
        let mantissa = (r * r).mul_add(q, r) + 1.0;
        // Two factors, since 2^n itself may be subnormal or infinite where the result is not.
        let half = n >> 1;
        mantissa * power_of_two(half) * power_of_two(n.wrapping_sub(half))
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        let tiny = self < f32::MIN_POSITIVE;
        let x = if tiny { self * 8_388_608.0 } else { self };
        // The mantissa between sqrt(1/2) and sqrt(2), minus one, and the exponent that goes with it.
        let low = std::f32::consts::FRAC_1_SQRT_2.to_bits();
        let bits = x.to_bits().wrapping_sub(low);
        let exponent = (bits as i32 >> 23).wrapping_sub(if tiny { 23 } else { 0 }) as f32;
        let f = f32::from_bits((bits & 0x007f_ffff).wrapping_add(low)) - 1.0;
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
        let tail = square.mul_add(-0.5, exponent.mul_add(LN_2_LOW, square * f * p));
        let y = exponent.mul_add(LN_2_HIGH, f + tail);
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
        let far = (1.0 - 2.0 / (Maths::exp(x + x) + 1.0)).copysign(self);
        // Not-a-number takes the second branch, which keeps it.
        if x < TANH_SPLIT { near } else { far }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vectorized;

    /// The largest error in units of the last place over every 1997th f32 of a range.
    fn worst(range: [f32; 2], ours: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
        let order =
            |x: f32| if x < 0.0 { -i64::from(x.to_bits() & 0x7fff_ffff) } else { i64::from(x.to_bits()) };
        let value = |i: i64| f32::from_bits(if i < 0 { -i as u32 | 0x8000_0000 } else { i as u32 });
        let mut worst = 0.0f64;
        for i in (order(range[0])..order(range[1])).step_by(1997) {
            let x = value(i);
            let (y, e) = (f64::from(ours(x)), exact(f64::from(x)));
            let nearest = (e as f32).abs();
            worst = worst.max((y - e).abs() / f64::from(nearest.next_up() - nearest));
        }
        worst
    }

    fn in_vectors(f: impl Fn(f32) -> f32, x: [f32; 16]) -> [f32; 16] {
        let mut y = x;
        vectorized(|| y.iter_mut().for_each(|v| *v = f(*v)));
        y
    }

    #[test]
    fn f32_functions_are_within_two_units() {
        let exp = worst([-103.0, 88.7], Maths::exp, f64::exp);
        let ln = worst([1e-45, f32::MAX], Maths::ln, f64::ln);
        let tanh = worst([-12.0, 12.0], Maths::tanh, f64::tanh);
        assert!(exp <= 1.0 && ln <= 0.9 && tanh <= 1.4, "exp {exp} ln {ln} tanh {tanh}");
        let coarse = worst([-12.0, 12.0], |x| Maths::tanh(x) * (1.0 + 4e-7), f64::tanh);
        assert!(coarse > 2.0, "the measure sees a fault of three units: {coarse}");
    }

    #[test]
    fn special_values() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for (x, exp, ln, tanh) in [
            (inf, inf, inf, 1.0),
            (-inf, 0.0, nan, -1.0),
            (nan, nan, nan, nan),
            (0.0, 1.0, -inf, 0.0),
            (-0.0, 1.0, -inf, -0.0),
            (1000.0, inf, 1000f64.ln() as f32, 1.0),
            (-1000.0, 0.0, nan, -1.0),
            (1.0, std::f32::consts::E, 0.0, 1f64.tanh() as f32),
            (1e-40, 1.0, 1e-40f32.ln(), 1e-40),
        ] {
            let same = |a: f32, b: f32| {
                (a.is_nan() && b.is_nan())
                    || a == b && a.is_sign_negative() == b.is_sign_negative()
                    || (a - b).abs() <= 1e-6 * b.abs()
            };
            assert!(same(Maths::exp(x), exp), "exp {x}: {}", Maths::exp(x));
            assert!(same(Maths::ln(x), ln), "ln {x}: {}", Maths::ln(x));
            assert!(same(Maths::tanh(x), tanh), "tanh {x}: {}", Maths::tanh(x));
        }
        assert!(Maths::exp(88.72f32).is_finite() && Maths::exp(88.73f32) == inf);
        assert!(Maths::exp(-103.9f32) > 0.0, "the smallest subnormal");
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) * 1.7);
        for f in [|x: f32| Maths::exp(x), |x: f32| Maths::ln(x.abs()), |x: f32| Maths::tanh(x)] {
            assert_eq!(in_vectors(f, x).map(f32::to_bits), x.map(f).map(f32::to_bits));
        }
    }
}
