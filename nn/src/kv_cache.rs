//! KV cache: the keys and values of the tokens that a model has read, so that decoding computes each new token alone.

use shardgrad_autograd::Var;
use shardgrad_tensor::{GrowableTensor, Value, unwind};

/// KV cache of one layer: keys and values, `[b, s, .., c]` each, in the layout in which the layer computes them. Sharded heads
/// stay sharded.
#[doc(alias = "past_key_values")]
#[derive(Debug)]
pub struct LayerKvCache {
    keys: GrowableTensor,
    values: GrowableTensor,
    /// Number of positions that were evicted at the start.
    num_evicted: usize,
}

/// Positions are evicted in multiples of this number. Copies of the remaining positions are then rare, and attention splits
/// its sums over keys at the same positions as without eviction.
const EVICTION_GRANULARITY: usize = 256;

impl Default for LayerKvCache {
    fn default() -> LayerKvCache {
        LayerKvCache { keys: GrowableTensor::along(1), values: GrowableTensor::along(1), num_evicted: 0 }
    }
}

impl LayerKvCache {
    /// Number of positions read so far, evicted ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.num_evicted + self.keys.len()
    }

    /// Number of positions whose keys and values are in the cache: the last ones.
    #[must_use]
    pub fn cached_len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no position was read yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Evicts positions that no later query attends to under a sliding window of `window` positions, the query's own included.
    /// Up to 255 positions more than necessary stay, because eviction works in multiples of 256.
    ///
    /// # Panics
    /// Unwinds with `Kind::OutOfMemory` if the copy of the remaining positions does not fit.
    #[track_caller]
    pub fn evict_beyond_window(&mut self, window: usize) {
        let evicted =
            (self.cached_len() + 1).saturating_sub(window) / EVICTION_GRANULARITY * EVICTION_GRANULARITY;
        unwind(self.keys.drop_front(evicted));
        unwind(self.values.drop_front(evicted));
        self.num_evicted += evicted;
    }

    /// Appends the keys and values of new positions and returns those of all cached positions, as constants: no gradient flows
    /// through the cache.
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if positions are sharded, or if the layout differs from that of the cached positions.
    #[track_caller]
    #[must_use]
    pub fn extend(&mut self, keys: &Var, values: &Var) -> (Var, Var) {
        let (k, v) = (unwind(self.keys.append(keys.tensor())), unwind(self.values.append(values.tensor())));
        (keys.constant(k), values.constant(v))
    }
}

/// KV cache of a model, for one sequence or a batch of sequences of equal length.
#[doc(alias = "past_key_values")]
#[doc(alias = "DynamicCache")]
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerKvCache>,
}

impl KvCache {
    /// Returns an empty cache for a model of `num_layers` layers.
    #[must_use]
    pub fn new(num_layers: usize) -> KvCache {
        KvCache { layers: (0..num_layers).map(|_| LayerKvCache::default()).collect() }
    }

    /// Number of positions read so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, LayerKvCache::len)
    }

    /// Whether no position was read yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The caches of the layers, in the order of the layers.
    pub fn layers(&mut self) -> impl Iterator<Item = &mut LayerKvCache> {
        self.layers.iter_mut()
    }
}
