//! Names of things on a tape.

use shardgrad_tensor::Tensor;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// What a parameter is called on a tape: a number that its owner chose.
pub type Key = u64;

/// Gradients by parameter, in the dual of the stored layout (which is the stored layout itself).
pub type Gradients = BTreeMap<Key, Tensor>;

/// Things by parameter, in no order.
pub(crate) type ByKey<T> = HashMap<Key, T, BuildHasherDefault<KeyHasher>>;

/// A hash of one number that nobody chooses against us.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, x: u64) {
        // Tables take low bits and high ones; a multiplication leaves the low ones weak.
        let mixed = (self.0 ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

/// Where a variable stands on its tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    /// A leaf, by number.
    Leaf(u32),
    /// An output of a node of a round.
    Made { round: u32, node: u32, out: u32 },
}

impl Id {
    /// The number of the leaf that it names.
    pub(crate) fn leaf(self) -> Option<usize> {
        match self {
            Id::Leaf(at) => Some(at as usize),
            Id::Made { .. } => None,
        }
    }
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

/// The noise of a tape, and what was asked of it.
#[derive(Default)]
pub(crate) struct Draws {
    noise: Cell<Option<Noise>>,
    is_asked: Cell<bool>,
    /// How often each key was drawn by since the noise was set.
    counts: RefCell<ByKey<u64>>,
}

impl Draws {
    /// Begins anew.
    pub(crate) fn begin(&self, noise: Option<Noise>) {
        self.noise.set(noise);
        self.counts.borrow_mut().clear();
    }

    /// The noise, for somebody who draws by it.
    pub(crate) fn noise(&self) -> Option<Noise> {
        self.is_asked.set(true);
        self.noise.get()
    }

    /// Whether anybody has asked for the noise, ever.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.get()
    }

    /// Counts a draw by a key; gives how many there were before it.
    pub(crate) fn count(&self, key: Key) -> u64 {
        let mut counts = self.counts.borrow_mut();
        let count = counts.entry(key).or_default();
        *count += 1;
        *count - 1
    }
}
