//! The four placements of a tensor along one mesh axis: `Invariant`, `Replicate`, `Partial`, `Shard`.

use std::fmt;

/// The placement of a tensor along one mesh axis (PyTorch DTensor's `Placement`). The order of the variants breaks ties
/// between routes.
#[doc(alias = "placements")]
#[doc(alias = "PartitionSpec")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// `=`: every rank holds the full value, bit-equal, and the program counts the value once. The gradient is `=`
    /// too.
    Invariant,
    /// `~`: every rank holds the full value, bit-equal, and uses its copy independently, so the gradient is `+` (a
    /// partial sum).
    Replicate,
    /// `+`: the value is the sum of the ranks' local tensors over the axis. The gradient is `~`.
    Partial,
    /// `@d`: each rank holds its range of dim `d`. The gradient is sharded in the same way.
    Shard(usize),
}

impl Placement {
    /// Returns the placement of the gradient of a value with this placement: `+` and `~` swap, `=` and `@d` stay.
    #[must_use]
    pub const fn dual(self) -> Placement {
        match self {
            Placement::Replicate => Placement::Partial,
            Placement::Partial => Placement::Replicate,
            other => other,
        }
    }

    /// Whether every rank holds the full value (`=` or `~`).
    #[must_use]
    pub const fn is_copy(self) -> bool {
        matches!(self, Placement::Invariant | Placement::Replicate)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Invariant => f.write_str("="),
            Placement::Replicate => f.write_str("~"),
            Placement::Partial => f.write_str("+"),
            Placement::Shard(d) => write!(f, "@{d}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dual_is_its_own_inverse() {
        for (placement, dual) in [
            (Placement::Invariant, Placement::Invariant),
            (Placement::Replicate, Placement::Partial),
            (Placement::Partial, Placement::Replicate),
            (Placement::Shard(3), Placement::Shard(3)),
        ] {
            assert_eq!(placement.dual(), dual);
            assert_eq!(dual.dual(), placement);
        }
    }
}
