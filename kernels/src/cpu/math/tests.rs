//! Errors against f64 and known values, special values, equal bits on every instruction set.

use super::*;
use crate::cpu::vectorized;
use approx::relative_eq;

/// Returns the largest error in ulps over every 1997th f32 of a range; infinite if a result is NaN.
fn worst(range: [f32; 2], ours: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
    let order = |x: f32| if x < 0.0 { -i64::from(x.to_bits() & 0x7fff_ffff) } else { i64::from(x.to_bits()) };
    let value = |i: i64| f32::from_bits(if i < 0 { -i as u32 | 0x8000_0000 } else { i as u32 });
    let mut worst = 0.0f64;
    for i in (order(range[0])..order(range[1])).step_by(1997) {
        let x = value(i);
        let (y, e) = (f64::from(ours(x)), exact(f64::from(x)));
        let nearest = (e as f32).abs();
        let error = (y - e).abs() / f64::from(nearest.next_up() - nearest);
        worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
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
    assert!(coarse > 2.0, "the measure detects an error of three units: {coarse}");
    let none = worst([-12.0, 12.0], |x| if x < 1.0 { f32::NAN } else { Maths::tanh(x) }, f64::tanh);
    assert_eq!(none, f64::INFINITY, "and NaN results");
}

/// Returns whether both are NaN, or have the same sign, also as zeros, and are equal within a relative error.
fn is_same(a: f32, b: f32, max_relative: f32) -> bool {
    let same_sign = a.is_sign_negative() == b.is_sign_negative();
    (a.is_nan() && b.is_nan()) || same_sign && relative_eq!(a, b, epsilon = 0.0, max_relative = max_relative)
}

#[test]
fn special_values_of_exp_ln_tanh() {
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
        let same = |a: f32, b: f32| is_same(a, b, 1e-6);
        assert!(same(Maths::exp(x), exp), "exp {x}: {}", Maths::exp(x));
        assert!(same(Maths::ln(x), ln), "ln {x}: {}", Maths::ln(x));
        assert!(same(Maths::tanh(x), tanh), "tanh {x}: {}", Maths::tanh(x));
    }
    assert!(Maths::exp(88.72f32).is_finite() && Maths::exp(88.73f32) == inf);
    assert!(Maths::exp(-103.9f32) > 0.0, "the smallest subnormal");
}

#[test]
fn exp_and_decay_have_the_bits_of_the_plain_formula() {
    let plain = |x: f32| {
        let x = if x > 89.0 { 89.0 } else { x };
        let (bits, tail) = exp_parts(if x < -104.0 { -104.0 } else { x }, 0.0);
        let n = bits.wrapping_sub(ROUNDER.to_bits()) as i32;
        let half = n >> 1;
        (tail + 1.0) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
    };
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let ends = [inf, -inf, nan, -nan, -0.0, 89.0, 88.73, 40.0, -87.33, -103.9, -103.98, -104.0];
    for x in ends.into_iter().chain((0..u32::MAX).step_by(4093).map(f32::from_bits)) {
        assert_eq!(Maths::exp(x).to_bits(), plain(x).to_bits(), "exp {x:e}");
        assert!(x > 40.0 || x.decay().to_bits() == plain(x).to_bits(), "decay {x:e}: {}", x.decay());
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let x: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) * 1.7);
    let functions: [fn(f32) -> f32; 8] = [
        |x| Maths::exp(x),
        |x| x.decay(),
        |x| Maths::ln(x.abs()),
        |x| Maths::tanh(x),
        |x| Maths::expm1(x),
        |x| Maths::ln_1p(x.abs()),
        |x| Maths::erf(x / 5.0),
        |x| x.normal().0,
    ];
    for f in functions {
        assert_eq!(in_vectors(f, x).map(f32::to_bits), x.map(f).map(f32::to_bits));
    }
}

#[test]
fn other_f32_functions_are_within_their_bounds() {
    let expm1 = worst([-80.0, 88.7], Maths::expm1, f64::exp_m1);
    let ln_1p = worst([-0.999_999_9, f32::MAX], Maths::ln_1p, f64::ln_1p);
    let erf = worst([-5.0, 5.0], Maths::erf, Maths::erf);
    // Below 2^-126 a unit is larger than the relative error.
    let tail = worst([-6.0, 13.1], |x| x.normal().0, |x| x.normal().0);
    let [sin, cos] = [worst([-1e6, 1e6], Maths::sin, f64::sin), worst([-1e6, 1e6], Maths::cos, f64::cos)];
    let pow = worst([1e-12, 1e12], |x| x.pow(1.7), |x| x.powf(f64::from(1.7f32)));
    assert!(expm1 <= 1.4 && ln_1p <= 1.4, "expm1 {expm1} ln_1p {ln_1p}");
    assert!(erf <= 2.4 && tail <= 5.7, "erf {erf} tail {tail}");
    assert!(sin <= 0.51 && cos <= 0.51 && pow <= 0.51, "sin {sin} cos {cos} pow {pow}");
}

#[test]
fn erf_and_normal_tail_in_f64_match_mpmath() {
    // By mpmath with 40 digits.
    let erf = [
        (1e-9, 1.128_379_167_095_512_7e-9),
        (0.1, 0.112_462_916_018_284_9),
        (0.5, 0.520_499_877_813_046_5),
        (0.99, 0.838_508_069_555_369_8),
        (1.01, 0.846_810_496_228_276_8),
        (1.5, 0.966_105_146_475_310_8),
        (2.5, 0.999_593_047_982_555),
        (4.0, 0.999_999_984_582_742_1),
        (5.8, 0.999_999_999_999_999_8),
    ];
    let tail = [
        (-8.0, 0.999_999_999_999_999_3),
        (-1.0, 0.841_344_746_068_542_9),
        (0.0, 0.5),
        (0.3, 0.382_088_577_811_047_4),
        (1.0, 0.158_655_253_931_457_05),
        (2.0, 0.022_750_131_948_179_21),
        (5.0, 2.866_515_718_791_939e-7),
        (10.0, 7.619_853_024_160_525e-24),
        (20.0, 2.753_624_118_606_233_7e-89),
        (37.0, 5.725_571_222_524_577e-300),
    ];
    let off = |y: f64, e: f64| (y - e).abs() / e;
    for (x, e) in erf {
        assert!(off(Maths::erf(x), e) <= 2e-15 && off(-Maths::erf(-x), e) <= 2e-15, "erf {x}");
    }
    for (x, e) in tail {
        assert!(off(x.normal().0, e) <= 2e-15, "tail {x}: {} instead of {e}", x.normal().0);
    }
}

#[test]
fn special_values_of_expm1_ln_1p_erf_tail() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let same = |a: f32, b: f32| is_same(a, b, 4e-7);
    for (x, expm1, ln_1p, erf, tail) in [
        (inf, inf, inf, 1.0, 0.0),
        (-inf, -1.0, nan, -1.0, 1.0),
        (nan, nan, nan, nan, nan),
        (0.0, 0.0, 0.0, 0.0, 0.5),
        (-0.0, -0.0, -0.0, -0.0, 0.5),
        (-1.0, -0.632_120_55, -inf, -0.842_700_8, 0.841_344_8),
        (1000.0, inf, 1001f64.ln() as f32, 1.0, 0.0),
        (-1000.0, -1.0, nan, -1.0, 1.0),
    ] {
        assert!(same(Maths::expm1(x), expm1), "expm1 {x}: {}", Maths::expm1(x));
        assert!(same(Maths::ln_1p(x), ln_1p), "ln_1p {x}: {}", Maths::ln_1p(x));
        assert!(same(Maths::erf(x), erf), "erf {x}: {}", Maths::erf(x));
        assert!(same(x.normal().0, tail), "tail {x}: {}", x.normal().0);
    }
    assert!(Maths::expm1(88.72f32).is_finite() && Maths::expm1(88.73f32) == inf);
}
