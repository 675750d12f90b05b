//! What a model has read: keys and values of all its layers, so that the next token costs one token.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Growing, Value, unwind};

/// Keys and values of one layer, `[b, s, .., c]` each. They lie as the layer makes them, so split heads stay split.
#[derive(Debug)]
pub struct Past {
    keys: Growing,
    values: Growing,
    /// Positions before those that are kept.
    forgotten: usize,
}

/// Positions are forgotten in whole runs of so many: a copy of what is kept is then seldom, and sums over the keys that are
/// kept are cut where they would be cut over all of them.
const RUN: usize = 256;

impl Default for Past {
    fn default() -> Past {
        Past { keys: Growing::along(1), values: Growing::along(1), forgotten: 0 }
    }
}

impl Past {
    /// How many positions were read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.forgotten + self.keys.len()
    }

    /// Of how many positions, the last ones, keys and values are kept.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.keys.len()
    }

    /// Whether nothing was read yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets keys that no later query sees, where each sees its own and those before it, `window` in all. Some more
    /// stay for a while: fewer than 256.
    ///
    /// # Panics
    /// Unwinds with `Kind::OutOfMemory` if there is no memory for a copy of what stays.
    #[track_caller]
    pub fn forget_beyond(&mut self, window: usize) {
        let hidden = (self.kept() + 1).saturating_sub(window) / RUN * RUN;
        unwind(self.keys.forget(hidden));
        unwind(self.values.forget(hidden));
        self.forgotten += hidden;
    }

    /// Keys and values of all positions that are kept, those given behind those before. They are constants: no gradient
    /// passes.
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if positions are split, or keys lie otherwise than before.
    #[track_caller]
    #[must_use]
    pub fn extend(&mut self, keys: &Var, values: &Var) -> (Var, Var) {
        let (k, v) = (unwind(self.keys.append(keys.tensor())), unwind(self.values.append(values.tensor())));
        (keys.constant(k), values.constant(v))
    }
}

/// What a model has read of a text, or of several side by side.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<Past>,
}

impl Cache {
    /// Nothing yet, for a model of so many layers.
    #[must_use]
    pub fn new(num_layers: usize) -> Cache {
        Cache { layers: (0..num_layers).map(|_| Past::default()).collect() }
    }

    /// How many positions were read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, Past::len)
    }

    /// Whether nothing was read yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The layers, the first first.
    pub fn layers(&mut self) -> impl Iterator<Item = &mut Past> {
        self.layers.iter_mut()
    }
}
