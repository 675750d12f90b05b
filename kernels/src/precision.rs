//! The precision of f32 matrix products.

use std::fmt;
use std::str::FromStr;

/// The precision of f32 matrix products: permission to be faster, no promise to be less exact. On a device without a faster way, products
/// are as with [`MatmulPrecision::Highest`]. Results and sums are f32 in any case. Named as in `torch.set_float32_matmul_precision` and
/// `jax_default_matmul_precision`.
///
/// Applies to contractions and ops built on them (einsum, linear, MLP), forward and backward. Attention has its own products, in f32 on
/// the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// f32: the error of a product is that of one rounding, 2^-24 of its size.
    #[default]
    Highest,
    /// TF32 on NVIDIA GPUs (10 mantissa bits): an error of at most 2^-9 of the size of a product, less if the library rounds to nearest.
    High,
    /// Operands rounded to bf16 (7 mantissa bits), on NVIDIA GPUs and on CPUs whose bf16 dot products are faster than f32: an error of at
    /// most 2^-7 of the size of a product. On such CPUs operands beyond 3.39e38 become infinite, and operands and sums below 2^-126 count
    /// as 0.
    Medium,
}

impl MatmulPrecision {
    /// All precisions, the most exact first.
    pub const EVERY: [MatmulPrecision; 3] =
        [MatmulPrecision::Highest, MatmulPrecision::High, MatmulPrecision::Medium];

    /// Returns `highest`, `high` or `medium`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MatmulPrecision::Highest => "highest",
            MatmulPrecision::High => "high",
            MatmulPrecision::Medium => "medium",
        }
    }
}

impl fmt::Display for MatmulPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MatmulPrecision {
    type Err = String;

    fn from_str(name: &str) -> Result<MatmulPrecision, String> {
        let found = MatmulPrecision::EVERY.into_iter().find(|p| p.name() == name);
        found.ok_or_else(|| format!("`{name}` is no precision: use highest, high or medium"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_parse_round_trip() {
        for precision in MatmulPrecision::EVERY {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert_eq!(MatmulPrecision::default(), MatmulPrecision::Highest);
        let wrong = "low".parse::<MatmulPrecision>();
        assert_eq!(wrong, Err("`low` is no precision: use highest, high or medium".into()));
    }
}
