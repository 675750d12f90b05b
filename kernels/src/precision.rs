//! How exactly products of f32 are formed.

use std::fmt;
use std::str::FromStr;

/// How exactly matrix products of f32 are formed: leave to be faster, not a duty to be less exact. Where a device has nothing
/// faster, products are as with [`MatmulPrecision::Highest`]. Results are f32 in any case, and so are all sums. The names are those of
/// `torch.set_float32_matmul_precision` and `jax_default_matmul_precision`.
///
/// It concerns contractions and what is built of them (einsum, linear, MLP), forward and backward. Attention forms its own
/// products, in f32 on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// In f32: the error of a product is that of one rounding, 2^-24 of its size.
    #[default]
    Highest,
    /// On NVIDIA cards in TF32 (10 bits behind the point): an error of at most 2^-9 of the size of a product, less where the
    /// library rounds to the nearest.
    High,
    /// Operands rounded to bf16 (7 bits behind the point) on CPUs whose dot products of it are faster than those of f32, and on NVIDIA
    /// cards: 2^-7 of the size of a product. On such CPUs operands beyond 3.39e38 become infinite, and operands and sums below 2^-126 count as 0.
    Medium,
}

impl MatmulPrecision {
    /// All of them, the most exact first.
    pub const EVERY: [MatmulPrecision; 3] =
        [MatmulPrecision::Highest, MatmulPrecision::High, MatmulPrecision::Medium];

    /// `highest`, `high`, `medium`.
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
        found.ok_or_else(|| format!("`{name}` is none of highest, high and medium"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_and_read() {
        for precision in MatmulPrecision::EVERY {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert_eq!(MatmulPrecision::default(), MatmulPrecision::Highest);
        let wrong = "low".parse::<MatmulPrecision>();
        assert_eq!(wrong, Err("`low` is none of highest, high and medium".into()));
    }
}
