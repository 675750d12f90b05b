//! What a model has read: keys and values of all its layers, so that the next token costs one token.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Growing, Value, unwind};

/// Keys and values of one layer, `[b, s, .., c]` each. They lie as the layer makes them, so split heads stay split.
#[derive(Debug)]
pub struct Past {
    keys: Growing,
    values: Growing,
}

impl Default for Past {
    fn default() -> Past {
        Past { keys: Growing::along(1), values: Growing::along(1) }
    }
}

impl Past {
    /// How many positions there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether nothing was read yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys and values of all positions, those given behind those before. They are constants: no gradient passes.
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
