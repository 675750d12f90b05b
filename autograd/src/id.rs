//! Identifiers of values on a tape, and the state of random numbers.

use shardgrad_tensor::Tensor;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// The identifier of a parameter on a tape: a number that the parameter's owner chose.
pub type Key = u64;

/// Gradients by parameter, in the dual of the stored layout (which equals the stored layout).
pub type Gradients = BTreeMap<Key, Tensor>;

/// A hash map by parameter, without an order.
pub(crate) type KeyMap<T> = HashMap<Key, T, BuildHasherDefault<KeyHasher>>;

/// A hasher of one number; no input is adversarial.
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
        // Hash tables take low and high bits; a multiplication leaves the low bits weak.
        let mixed = (self.0 ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

/// The position of a variable on its tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    /// A leaf, by number.
    Leaf(u32),
    /// An output of a node of a round.
    Output { round: u32, node: u32, out: u32 },
}

impl Id {
    /// The number of the leaf, if this is a leaf.
    pub(crate) fn leaf(self) -> Option<usize> {
        match self {
            Id::Leaf(at) => Some(at as usize),
            Id::Output { .. } => None,
        }
    }
}

/// The random numbers that ops of a recorded program draw when the program is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayNoise {
    /// The random numbers of the recording.
    Recorded,
    /// The random numbers of another step or row.
    Of(Noise),
    /// None: random ops are the identity, as in inference.
    Off,
}

/// The key of random numbers, together with the name of the op that draws them.
#[doc(alias = "rng")]
#[doc(alias = "random seed")]
#[doc(alias = "generator")]
#[doc(alias = "PRNGKey")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The seed of the run.
    pub seed: u64,
    /// The step of the run.
    pub step: u64,
    /// The index in the global batch of the first row of this round, so that microbatching does not change the random
    /// numbers.
    pub first_row: u64,
}

/// The noise of a tape, and whether it was set and read.
#[derive(Default)]
pub(crate) struct NoiseState {
    noise: Cell<Option<Noise>>,
    was_set: Cell<bool>,
    was_read: Cell<bool>,
    /// The draws by each key since the noise was set.
    counts: UseCounts,
}

/// The number of uses of each key.
#[derive(Default)]
pub(crate) struct UseCounts(RefCell<KeyMap<u64>>);

impl UseCounts {
    /// Counts a use of a key and returns the number of earlier ones.
    pub(crate) fn count(&self, key: Key) -> u64 {
        let mut counts = self.0.borrow_mut();
        let count = counts.entry(key).or_default();
        *count += 1;
        *count - 1
    }

    /// Forgets all uses.
    fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

impl NoiseState {
    /// Sets the noise and clears the counts.
    pub(crate) fn begin(&self, noise: Option<Noise>) {
        self.noise.set(noise);
        self.was_set.set(true);
        self.counts.clear();
    }

    /// The noise, for an op that draws by it.
    pub(crate) fn noise(&self) -> Option<Noise> {
        self.was_read.set(true);
        self.noise.get()
    }

    /// Whether [`NoiseState::begin`] was ever called.
    pub(crate) fn was_set(&self) -> bool {
        self.was_set.get()
    }

    /// Whether [`NoiseState::noise`] was ever called.
    pub(crate) fn was_read(&self) -> bool {
        self.was_read.get()
    }

    /// Counts a draw by a key and returns the number of earlier ones.
    pub(crate) fn count(&self, key: Key) -> u64 {
        self.counts.count(key)
    }
}
