//! What a tensor is along one mesh axis: the four states.

use std::fmt;

/// The state of a tensor along one mesh axis. The order is the order in which routes break ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// `=`: a full copy, bit-equal on every rank, used once in the meaning of the program. Its gradient is the same.
    Invariant,
    /// `~`: a full copy, bit-equal on every rank; each rank's use of it is its own, so its gradient is pending.
    Replicate,
    /// `+`: the value is the sum over the axis. Its gradient is replicated.
    Partial,
    /// `@d`: each rank holds its range of dim `d`. Its gradient is split in the same way.
    Shard(usize),
}

impl State {
    /// The state of the gradient of a value in this state: `+` and `~` change places.
    #[must_use]
    pub const fn dual(self) -> State {
        match self {
            State::Replicate => State::Partial,
            State::Partial => State::Replicate,
            other => other,
        }
    }

    /// Whether every rank holds the full value (`=` or `~`).
    #[must_use]
    pub const fn is_copy(self) -> bool {
        matches!(self, State::Invariant | State::Replicate)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Invariant => f.write_str("="),
            State::Replicate => f.write_str("~"),
            State::Partial => f.write_str("+"),
            State::Shard(d) => write!(f, "@{d}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dual_of_the_dual_is_the_state() {
        for (state, dual) in [
            (State::Invariant, State::Invariant),
            (State::Replicate, State::Partial),
            (State::Partial, State::Replicate),
            (State::Shard(3), State::Shard(3)),
        ] {
            assert_eq!(state.dual(), dual);
            assert_eq!(dual.dual(), state);
        }
    }
}
