//! Names of things on a tape.

use shardgrad_tensor::Tensor;
use std::collections::BTreeMap;

/// What a parameter is called on a tape: a number that its owner chose.
pub type Key = u64;

/// Gradients by parameter, in the dual of the stored layout (which is the stored layout itself).
pub type Gradients = BTreeMap<Key, Tensor>;

/// Where a variable stands on its tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    /// A leaf, by number.
    Leaf(u32),
    /// An output of a node of a round.
    Made { round: u32, node: u32, out: u32 },
}

/// Which random numbers the ops of a recorded program draw when it is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// Those that they were recorded with.
    Same,
    /// Those of another step or row.
    Of(Noise),
    /// None: ops that draw let everything pass, as in inference.
    Off,
}

/// What random ops are keyed by, beside their own name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The seed of the run.
    pub seed: u64,
    /// The step of the run.
    pub step: u64,
    /// The row of the global batch with which this round's rows begin, so that microbatches do not matter.
    pub first_row: u64,
}
