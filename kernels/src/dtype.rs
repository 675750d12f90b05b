//! Element types: the run-time [`DType`] and the corresponding Rust types.

use half::{bf16, f16};
use std::fmt;

/// The element type of a tensor, chosen at run time; kernels are generic over the Rust type inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of an f32. Arithmetic happens in f32.
    BF16,
    /// IEEE 754 binary16. Arithmetic happens in f32.
    F16,
    /// Signed 64-bit integer: indices and token numbers.
    I64,
    /// Unsigned byte.
    U8,
    /// Boolean, one byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every dtype, widest float first.
    pub const ALL: [DType; 7] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::U8, DType::Bool];
    /// The dtypes that carry gradients.
    pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// Whether values of this dtype carry gradients.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// Returns the dtype of sums of this dtype: f32 for the 16-bit floats, the dtype itself otherwise.
    #[must_use]
    pub const fn accumulator(self) -> DType {
        match self {
            DType::BF16 | DType::F16 => DType::F32,
            other => other,
        }
    }

    /// Returns the name used in layouts, files and messages: `f32`, `bf16`, `i64`, ...
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Parses what [`DType::name`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == text)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    /// Keeps other crates from adding element types whose bit patterns are not all valid.
    pub trait Sealed {}
}

/// A Rust type of buffer elements. Sealed: every bit pattern of an implementor is a valid value.
pub trait Element: sealed::Sealed + Copy + Send + Sync + PartialEq + fmt::Debug + Default + 'static {
    /// The dtype of this type.
    const DTYPE: DType;
    /// Converts to f64: exact for floats, rounded to nearest for large integers.
    fn to_f64(self) -> f64;
    /// Converts from f64: to nearest for floats, towards zero and saturating for integers.
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($($t:ty => $d:ident, |$x:ident| $to:expr, |$y:ident| $from:expr;)*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f64(self) -> f64 { let $x = self; $to }
            #[inline(always)]
            fn from_f64($y: f64) -> Self { $from }
        }
    )*};
}

element! {
    f64 => F64, |x| x, |y| y;
    f32 => F32, |x| f64::from(x), |y| y as f32;
    bf16 => BF16, |x| x.to_f64(), |y| bf16::from_f32(to_odd(y));
    f16 => F16, |x| x.to_f64(), |y| f16::from_f32(to_odd(y));
    i64 => I64, |x| x as f64, |y| y as i64;
    u8 => U8, |x| f64::from(x), |y| y as u8;
}

/// Rounds x to f32 by round-to-odd: the nearest f32 if x is exact there, else the one of its two neighbours with an odd mantissa. Rounding
/// that to 16 bits gives the same as rounding x directly (`half`'s own conversions from f64 drop the low half of x, which breaks ties).
#[inline(always)]
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if x.is_nan() || f64::from(near) == x {
        return near;
    }
    let towards_zero = near.to_bits() - u32::from(f64::from(near).abs() > x.abs());
    f32::from_bits(towards_zero | 1)
}

/// A float type of kernels: loads widen to the accumulator type, stores round once.
pub trait Float: Element {
    /// f64 for f64, f32 for everything narrower.
    type Acc: Real;
    /// Widens to the accumulator type, exactly.
    fn widen(self) -> Self::Acc;
    /// Rounds from the accumulator type to nearest, ties to even.
    fn narrow(x: Self::Acc) -> Self;
    /// Returns the slice itself if this type is its own accumulator.
    fn as_wide(row: &[Self]) -> Option<&[Self::Acc]>;
}

/// The accumulator types, f32 and f64, with the arithmetic that kernels need.
pub trait Real:
    Float<Acc = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::MulAssign
    + PartialOrd
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Negative infinity, the identity of max.
    const NEG_INFINITY: Self;
    /// Infinity, the identity of min.
    const INFINITY: Self;
    /// Converts a literal; rounds to nearest in f32.
    fn lit(x: f64) -> Self;
    /// Fused multiply-add: self * a + b with one rounding.
    fn fma(self, a: Self, b: Self) -> Self;
    /// Square root, correctly rounded.
    fn root(self) -> Self;
    /// The larger of two; if one is NaN, the other one.
    fn greater(self, other: Self) -> Self;
}

macro_rules! real {
    ($($t:ty),*) => {$(
        impl Float for $t {
            type Acc = $t;
            #[inline(always)]
            fn widen(self) -> $t { self }
            #[inline(always)]
            fn narrow(x: $t) -> $t { x }
            #[inline(always)]
            fn as_wide(row: &[$t]) -> Option<&[$t]> { Some(row) }
        }
        impl Real for $t {
            const ZERO: $t = 0.0;
            const ONE: $t = 1.0;
            const NEG_INFINITY: $t = <$t>::NEG_INFINITY;
            const INFINITY: $t = <$t>::INFINITY;
            #[inline(always)]
            fn lit(x: f64) -> $t { x as $t }
            #[inline(always)]
            fn fma(self, a: $t, b: $t) -> $t { self.mul_add(a, b) }
            #[inline(always)]
            fn root(self) -> $t { self.sqrt() }
            #[inline(always)]
            fn greater(self, other: $t) -> $t { if self > other || other.is_nan() { self } else { other } }
        }
    )*};
}
real!(f32, f64);

// The conversions of `half` branch and check CPU features per element; these have no branch, so that loops over them vectorize. The
// values are the same.

impl Float for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
    #[inline(always)]
    fn as_wide(_: &[bf16]) -> Option<&[f32]> {
        None
    }
}

impl Float for f16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        // The exponents' biases differ by 112; the product is exact for subnormals too.
        let finite = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
        let special = magnitude | 0x7f80_0000;
        let bare = if magnitude >= 0x7c00 << 13 { special } else { finite.to_bits() };
        f32::from_bits(bare | (bits & 0x8000) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> f16 {
        let sign = x.to_bits() >> 16 & 0x8000;
        let bare = x.to_bits() & 0x7fff_ffff;
        // Adding one half leaves a subnormal result, rounded, in the low bits.
        let subnormal = (f32::from_bits(bare) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let normal = bare.wrapping_sub(112 << 23).wrapping_add(0xfff + (bare >> 13 & 1)) >> 13;
        let special = if bare > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        let finite = if bare < 113 << 23 { subnormal } else { normal };
        let magnitude = if bare >= (127 + 16) << 23 { special } else { finite };
        f16::from_bits((magnitude | sign) as u16)
    }
    #[inline(always)]
    fn as_wide(_: &[f16]) -> Option<&[f32]> {
        None
    }
}

/// Runs a block with `$t` bound to the Rust type of a float dtype; `$other` is evaluated for the rest.
#[macro_export]
macro_rules! match_float {
    ($dtype:expr, $t:ident => $body:expr, else $other:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $t = f64;
                $body
            }
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $t = ::half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $t = ::half::f16;
                $body
            }
            _ => $other,
        }
    };
}

/// Runs a block with `$t` bound to the Rust type of any dtype (`Bool` is read as `u8`).
#[macro_export]
macro_rules! match_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $t = f64;
                $body
            }
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $t = ::half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $t = ::half::f16;
                $body
            }
            $crate::DType::I64 => {
                type $t = i64;
                $body
            }
            $crate::DType::U8 | $crate::DType::Bool => {
                type $t = u8;
                $body
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether two values are the same bits, or both NaN.
    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn sixteen_bit_conversions_match_half() {
        for bits in 0..=u16::MAX {
            assert!(same(bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f32()), "bf16 {bits:#x}");
            assert!(same(f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32()), "f16 {bits:#x}");
        }
        let every = (0..=u32::MAX).step_by(1021);
        let next_to_ties = (0..=u32::MAX).step_by(1 << 12).flat_map(|x| [x.wrapping_sub(1), x, x + 1]);
        for x in every.chain(next_to_ties).map(f32::from_bits) {
            assert!(same(bf16::narrow(x).to_f32(), bf16::from_f32(x).to_f32()), "bf16 {:#x}", x.to_bits());
            assert!(same(f16::narrow(x).to_f32(), f16::from_f32(x).to_f32()), "f16 {:#x}", x.to_bits());
        }
        let above_a_tie = f32::from_bits(0x3f80_8001);
        assert!(!same(bf16::narrow(above_a_tie).to_f32(), 1.0), "the comparison detects truncation");
    }

    #[test]
    fn values_next_to_a_tie_round_to_nearest() {
        let tie = 1.0 + 2f64.powi(-8);
        for offset in [2f64.powi(-23), 2f64.powi(-40), 2f64.powi(-52)] {
            assert_eq!(<bf16 as Element>::from_f64(tie + offset).to_f64(), 1.0 + 2f64.powi(-7));
            assert_eq!(<bf16 as Element>::from_f64(tie - offset).to_f64(), 1.0);
            assert_eq!(
                <f16 as Element>::from_f64(-1.0 - 2f64.powi(-11) - offset).to_f64(),
                -1.0 - 2f64.powi(-10)
            );
        }
        assert_eq!(<bf16 as Element>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<f16 as Element>::from_f64(f64::MAX).to_f64(), f64::INFINITY);
        assert_eq!(<bf16 as Element>::from_f64(1e-300).to_f64(), 0.0);
        assert!(<bf16 as Element>::from_f64(f64::NAN).to_f64().is_nan());
    }
}
