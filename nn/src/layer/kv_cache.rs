//! KV cache: the keys and values of the tokens that a model has read, so that decoding computes each new token alone.

use shardgrad_autograd::Var;
use shardgrad_tensor::{GrowableTensor, Resharding, Value, unwind};

/// KV cache of one layer: keys and values, `[b, s, .., c]` each, in the layout in which the layer computes them, but with all positions
/// on each rank. Sharded heads stay sharded.
#[doc(alias = "past_key_values")]
#[derive(Debug)]
pub struct LayerKvCache {
    storage: Storage,
    /// Number of positions that were evicted at the start.
    num_evicted: usize,
}

/// Keys and values of the cached positions.
#[derive(Debug)]
enum Storage {
    /// Tensors that grow in place.
    Growable([GrowableTensor; 2]),
    /// Variables of a program that is recorded, whose ops slice and concatenate them: a program has no other state than its arguments
    /// and results. `None` before the first position.
    Recorded(Option<[Var; 2]>),
}

/// Positions are evicted in multiples of this number. Copies of the remaining positions are then rare, and attention splits
/// its sums over keys at the same positions as without eviction.
const EVICTION_GRANULARITY: usize = 256;

impl Default for LayerKvCache {
    fn default() -> LayerKvCache {
        let storage = Storage::Growable([GrowableTensor::along(1), GrowableTensor::along(1)]);
        LayerKvCache { storage, num_evicted: 0 }
    }
}

impl LayerKvCache {
    /// Number of positions read so far, evicted ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.num_evicted + self.cached_len()
    }

    /// Number of positions whose keys and values are in the cache: the last ones.
    #[must_use]
    pub fn cached_len(&self) -> usize {
        match &self.storage {
            Storage::Growable([keys, _]) => keys.len(),
            Storage::Recorded(past) => past.as_ref().map_or(0, |[keys, _]| keys.shape()[1]),
        }
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
        match &mut self.storage {
            Storage::Growable(tensors) => {
                tensors.iter_mut().for_each(|tensor| unwind(tensor.drop_front(evicted)))
            }
            Storage::Recorded(Some(past)) if evicted > 0 => {
                past.iter_mut().for_each(|past| *past = past.slice(1, evicted..past.shape()[1]));
            }
            Storage::Recorded(_) => {}
        }
        self.num_evicted += evicted;
    }

    /// Appends the keys and values of new positions and returns those of all cached positions, as constants: no gradient flows
    /// through the cache. Sharded positions, those of a ring of context parallelism, are gathered.
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if the layout differs from that of the cached positions.
    #[track_caller]
    #[must_use]
    pub fn extend(&mut self, keys: &Var, values: &Var) -> (Var, Var) {
        let [keys, values] = [&keys.whole_along(1), &values.whole_along(1)];
        match &mut self.storage {
            Storage::Growable([all_keys, all_values]) => {
                let (k, v) =
                    (unwind(all_keys.append(keys.tensor())), unwind(all_values.append(values.tensor())));
                (keys.constant(k), values.constant(v))
            }
            Storage::Recorded(past) => {
                let [k, v] = match past.take() {
                    Some([k, v]) => [Var::concat(&[&k, keys], 1), Var::concat(&[&v, values], 1)],
                    None => [keys.clone(), values.clone()],
                };
                *past = Some([k.clone(), v.clone()]);
                (k, v)
            }
        }
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

    /// Returns the cache of a model while a program is recorded. `past` are the keys and the values of the
    /// cached positions of each layer, or nothing before the first position; `num_evicted` has a number for each layer.
    pub(crate) fn recorded(past: &[Var], num_evicted: &[usize]) -> KvCache {
        let layer = |(layer, num_evicted): (usize, &usize)| {
            let past = past.get(2 * layer..2 * layer + 2).map(|past| [past[0].clone(), past[1].clone()]);
            LayerKvCache { storage: Storage::Recorded(past), num_evicted: *num_evicted }
        };
        KvCache { layers: num_evicted.iter().enumerate().map(layer).collect() }
    }

    /// Returns the keys and the values of each layer of a recorded cache, and the number of evicted positions of each layer.
    pub(crate) fn into_recorded(self) -> (Vec<Var>, Vec<usize>) {
        let num_evicted = self.layers.iter().map(|layer| layer.num_evicted).collect();
        let vars = self.layers.into_iter().flat_map(|layer| match layer.storage {
            Storage::Recorded(Some(vars)) => Vec::from(vars),
            Storage::Recorded(None) | Storage::Growable(_) => Vec::new(),
        });
        (vars.collect(), num_evicted)
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
