//! Memory of a card for one rank: large chunks from the driver, cut up here. What is freed is used again at once: work of the
//! rank is given to one stream, so whoever uses it next comes after whoever used it last. Only blocks that captured work uses
//! wait until that is gone, and those of flights, which have another stream, until the rank comes behind them.

use super::driver::Context;
use crate::buffer::{Buffer, DeviceAllocator, FreeList};
use crate::error::{KernelError, MemoryStats};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Every block is a multiple of this, which is the alignment that a driver gives.
const GRAIN: usize = 512;
/// Blocks up to this size come from chunks of [`SMALL_CHUNK`], so that they do not cut up large ones.
const SMALL_MAX: usize = 1 << 20;
const SMALL_CHUNK: usize = 8 << 20;
const LARGE_CHUNK: usize = 64 << 20;
/// Larger chunks are multiples of this.
const CHUNK_GRAIN: usize = 2 << 20;

/// Where chunks come from.
pub(super) trait ChunkSource: fmt::Debug + Send + Sync {
    /// A chunk; `None` if there is not so much.
    fn take(&self, bytes: usize) -> Result<Option<u64>, KernelError>;
    /// Takes a chunk back in which no block is in use.
    fn give(&self, address: u64);

    /// Gives back what could not be given back before.
    fn give_late(&self) {}
}

/// What can have blocks be let go that it keeps.
pub(super) trait Reclaim: fmt::Debug + Send + Sync {
    /// Whether it has let any go.
    fn reclaim(&self) -> bool;
}

/// Chunks and blocks, as addresses.
#[derive(Debug, Default)]
struct AllocatorState {
    /// Small chunks and large ones apart.
    free_list: [FreeList; 2],
    /// Bytes of each block in use.
    used: HashMap<u64, usize>,
    /// How many graphs and flights keep a block in use, and which of those would be free without them.
    kept: HashMap<u64, usize>,
    waiting: HashSet<u64>,
    stats: MemoryStats,
}

/// Of which kind the chunk is that a block of so many bytes comes from.
fn kind(bytes: usize) -> usize {
    usize::from(bytes > SMALL_MAX)
}

impl AllocatorState {
    fn cut(&mut self, bytes: usize) -> Option<u64> {
        let address = self.free_list[kind(bytes)].cut(bytes)?;
        self.used.insert(address, bytes);
        self.count(bytes);
        Some(address)
    }

    fn count(&mut self, bytes: usize) {
        self.stats.in_use_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.in_use_bytes);
    }

    fn count_chunk(&mut self, bytes: usize) {
        self.stats.reserved_bytes += bytes;
        self.stats.num_system_allocs += 1;
    }

    fn give_back(&mut self, address: u64) {
        if self.kept.contains_key(&address) {
            self.waiting.insert(address);
            return;
        }
        let Some(bytes) = self.used.remove(&address) else { return };
        self.stats.in_use_bytes -= bytes;
        self.free_list[kind(bytes)].give_back(address, bytes);
    }

    fn add_chunk(&mut self, kind: usize, address: u64, bytes: usize) {
        self.count_chunk(bytes);
        self.free_list[kind].add_chunk(address, bytes);
    }

    /// Strikes out the chunks in which nothing is in use.
    fn empty_chunks(&mut self) -> Vec<u64> {
        let empty = self.free_list.iter_mut().flat_map(FreeList::take_empty);
        let empty = empty.inspect(|(_, bytes)| self.stats.reserved_bytes -= bytes);
        empty.map(|(address, _)| address).collect()
    }
}

/// The allocator of one rank, or of a graph of its work. Handles share it.
#[derive(Debug)]
pub(super) struct Memory {
    source: Arc<dyn ChunkSource>,
    limit: usize,
    state: Mutex<AllocatorState>,
    /// The rank's own, where this is a graph's. It counts what a graph holds, and is never waited for the other way round.
    home: Option<Arc<Memory>>,
    reclaimer: OnceLock<Weak<dyn Reclaim>>,
}

impl Memory {
    /// Memory of at most `limit` bytes from the driver (0: no limit).
    pub(super) fn new(source: Arc<dyn ChunkSource>, limit: usize) -> Arc<Memory> {
        Arc::new(Memory { source, limit, state: Mutex::default(), home: None, reclaimer: OnceLock::new() })
    }

    /// Memory of a graph, from the same driver and under the same limit, whose blocks are never those of this one. All that it
    /// ever had in use counts as in use here as long as it lives: whenever the graph is replayed, it is used so again.
    pub(super) fn for_graph(self: &Arc<Memory>) -> Arc<Memory> {
        let (source, limit, home) = (self.source.clone(), self.limit, Some(self.clone()));
        Arc::new(Memory { source, limit, state: Mutex::default(), home, reclaimer: OnceLock::new() })
    }

    fn state(&self) -> MutexGuard<'_, AllocatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this memory holds; a rank's own counts its graphs too.
    pub(super) fn stats(&self) -> MemoryStats {
        self.state().stats
    }

    /// Gives chunks back to the driver in which nothing is in use.
    pub(super) fn release_empty_chunks(&self) {
        self.source.give_late();
        self.state().empty_chunks().into_iter().for_each(|address| self.source.give(address));
    }

    /// Asks this before a block is refused; the first that was named is asked.
    pub(super) fn set_reclaimer(&self, reclaimer: Weak<dyn Reclaim>) {
        self.reclaimer.get_or_init(|| reclaimer);
    }

    /// A block of at least `bytes` bytes with arbitrary contents.
    pub(super) fn alloc(self: &Arc<Memory>, bytes: usize) -> Result<Buffer, KernelError> {
        let relieved =
            || self.reclaimer.get().and_then(Weak::upgrade).is_some_and(|reclaimer| reclaimer.reclaim());
        match self.block(bytes) {
            Err(KernelError::OutOfMemory { .. }) if relieved() => self.block(bytes),
            found => found,
        }
    }

    fn block(self: &Arc<Memory>, bytes: usize) -> Result<Buffer, KernelError> {
        let mut state = self.state();
        let refuse = |state: &AllocatorState| {
            let stats = self.home.as_ref().map_or(state.stats, |home| home.stats());
            KernelError::OutOfMemory { requested_bytes: bytes, stats }
        };
        let Some(block) = bytes.max(1).checked_next_multiple_of(GRAIN) else { return Err(refuse(&state)) };
        let peak = state.stats.peak_bytes;
        let found = state.cut(block);
        let address = match found {
            Some(address) => address,
            None => {
                self.grow(&mut state, block)?;
                state.cut(block).ok_or_else(|| refuse(&state))?
            }
        };
        if let Some(home) = &self.home {
            home.state().count(state.stats.peak_bytes - peak);
        }
        drop(state);
        Ok(Buffer::on_device(address, bytes, self.clone()))
    }

    /// Takes a chunk that has room for a block, if it can be had: after empty chunks were given back, if need be. Those of a
    /// graph are not empty: what it has noted uses them, and nothing may be given back while work is noted.
    fn grow(&self, state: &mut AllocatorState, block: usize) -> Result<(), KernelError> {
        let own = block.checked_next_multiple_of(CHUNK_GRAIN).unwrap_or(block);
        let (usual, tight) = match kind(block) {
            0 => (SMALL_CHUNK, SMALL_CHUNK),
            _ => (own.max(LARGE_CHUNK), own),
        };
        for bytes in [usual, tight] {
            if self.take(state, kind(block), bytes)? {
                return Ok(());
            }
        }
        if self.home.is_some() {
            return Ok(());
        }
        for address in state.empty_chunks() {
            self.source.give(address);
        }
        self.take(state, kind(block), tight).map(|_| ())
    }

    fn take(&self, state: &mut AllocatorState, kind: usize, bytes: usize) -> Result<bool, KernelError> {
        let mut home = self.home.as_ref().map(|home| home.state());
        let reserved = home.as_ref().map_or(state.stats.reserved_bytes, |home| home.stats.reserved_bytes);
        if self.limit != 0 && reserved.saturating_add(bytes) > self.limit {
            return Ok(false);
        }
        let Some(address) = self.source.take(bytes)? else { return Ok(false) };
        state.add_chunk(kind, address, bytes);
        if let Some(home) = &mut home {
            home.count_chunk(bytes);
        }
        Ok(true)
    }
}

impl DeviceAllocator for Memory {
    fn give_back(&self, address: u64) {
        self.state().give_back(address);
    }

    fn keep(&self, address: u64) {
        let mut state = self.state();
        debug_assert!(state.used.contains_key(&address), "bug: a block that nobody has is to be kept");
        *state.kept.entry(address).or_default() += 1;
    }

    fn release(&self, address: u64) {
        let mut state = self.state();
        let left = state.kept.get_mut(&address).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            state.kept.remove(&address);
            if state.waiting.remove(&address) {
                state.give_back(address);
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let state = std::mem::take(&mut *self.state());
        state.free_list.iter().flat_map(FreeList::chunks).for_each(|address| self.source.give(address));
        if let Some(home) = &self.home {
            let mut home = home.state();
            home.stats.reserved_bytes -= state.stats.reserved_bytes;
            home.stats.in_use_bytes -= state.stats.peak_bytes;
        }
    }
}

/// Chunks of a card.
#[derive(Debug)]
pub(super) struct Chunks {
    context: Arc<Context>,
    /// What could not be given back yet, as nothing can while a stream of the card notes work.
    late: Mutex<Vec<u64>>,
}

impl Chunks {
    pub(super) fn of(context: &Arc<Context>) -> Chunks {
        Chunks { context: context.clone(), late: Mutex::default() }
    }

    fn late(&self) -> MutexGuard<'_, Vec<u64>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChunkSource for Chunks {
    fn take(&self, bytes: usize) -> Result<Option<u64>, KernelError> {
        self.give_late();
        self.context.take(bytes)
    }

    fn give(&self, address: u64) {
        if self.context.give(address).is_err() {
            self.late().push(address);
        }
    }

    fn give_late(&self) {
        let late = std::mem::take(&mut *self.late());
        late.into_iter().for_each(|address| self.give(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// Addresses, and how many bytes there are.
    #[derive(Debug, Default)]
    struct Numbers {
        next: AtomicU64,
        left: Arc<AtomicUsize>,
        given: Arc<Mutex<Vec<u64>>>,
        sizes: Mutex<HashMap<u64, usize>>,
    }

    impl ChunkSource for Numbers {
        fn take(&self, bytes: usize) -> Result<Option<u64>, KernelError> {
            if self.left.load(Ordering::Relaxed) < bytes {
                return Ok(None);
            }
            self.left.fetch_sub(bytes, Ordering::Relaxed);
            // Chunks lie side by side: blocks of two chunks must not be joined.
            let address = 4096 + self.next.fetch_add(bytes as u64, Ordering::Relaxed);
            self.sizes.lock().unwrap().insert(address, bytes);
            Ok(Some(address))
        }

        fn give(&self, address: u64) {
            let bytes = self.sizes.lock().unwrap().remove(&address).expect("given back once");
            self.left.fetch_add(bytes, Ordering::Relaxed);
            self.given.lock().unwrap().push(address);
        }
    }

    fn memory(bytes: usize, limit: usize) -> (Arc<Memory>, Arc<AtomicUsize>) {
        let left = Arc::new(AtomicUsize::new(bytes));
        (Memory::new(Arc::new(Numbers { left: left.clone(), ..Numbers::default() }), limit), left)
    }

    #[test]
    fn blocks_do_not_overlap_and_all_comes_back() {
        let (memory, left) = memory(4 << 30, 0);
        let mut held: Vec<Buffer> = Vec::new();
        let mut state = 7u64;
        for _ in 0..3000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = (state >> 33) as usize;
            if draw % 5 < 3 {
                held.push(memory.alloc(draw % [100, 70_000, 9_000_000][draw / 5 % 3]).unwrap());
            } else if !held.is_empty() {
                held.swap_remove(draw % held.len());
            }
        }
        let mut spans: Vec<(u64, u64)> =
            held.iter().map(|b| (b.device_address().unwrap(), b.bytes().max(1) as u64)).collect();
        spans.sort_unstable();
        assert!(spans.len() > 20 && spans.iter().all(|(a, _)| a % 256 == 0));
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
        let stats = memory.stats();
        assert!(
            stats.in_use_bytes >= held.iter().map(Buffer::bytes).sum()
                && stats.peak_bytes >= stats.in_use_bytes
        );
        drop(held);
        assert_eq!(memory.stats().in_use_bytes, 0);
        let state = memory.state();
        assert!(state.free_list.iter().all(FreeList::is_all_free), "everything is joined again");
        drop(state);
        drop(memory);
        assert_eq!(left.load(Ordering::Relaxed), 4 << 30);
    }

    #[test]
    fn what_is_freed_is_used_next() {
        let (memory, _) = memory(1 << 30, 0);
        let a = memory.alloc(3 << 20).unwrap();
        let address = a.device_address();
        drop(a);
        assert_eq!(memory.alloc(2 << 20).unwrap().device_address(), address);
        assert_eq!(memory.stats().num_system_allocs, 1);
    }

    #[test]
    fn what_is_kept_is_not_used_again_before_it_is_let_go() {
        let (memory, left) = memory(1 << 30, 200 << 20);
        let a = memory.alloc(3 << 20).unwrap();
        let address = a.device_address().unwrap();
        memory.keep(address);
        memory.keep(address);
        drop(a);
        assert_ne!(memory.alloc(3 << 20).unwrap().device_address(), Some(address));
        memory.release(address);
        assert_ne!(memory.alloc(3 << 20).unwrap().device_address(), Some(address));
        memory.release(address);
        assert_eq!(memory.alloc(3 << 20).unwrap().device_address(), Some(address));
        let (own, for_graph) = (memory.alloc(2 << 20).unwrap(), memory.for_graph());
        let held = for_graph.alloc(100 << 20).unwrap();
        assert_eq!(memory.stats().reserved_bytes, 164 << 20);
        assert!(memory.alloc(100 << 20).is_err() && for_graph.alloc(100 << 20).is_err());
        drop((held, for_graph));
        assert_eq!(memory.stats().reserved_bytes, 64 << 20);
        memory.alloc(100 << 20).unwrap();
        drop((own, memory));
        assert_eq!(left.load(Ordering::Relaxed), 1 << 30);
    }

    #[test]
    fn what_a_graph_has_used_counts_as_long_as_it_lives() {
        let (memory, left) = memory(300 << 20, 0);
        let own = memory.alloc(10 << 20).unwrap();
        let for_graph = memory.for_graph();
        drop(for_graph.alloc(70 << 20).unwrap());
        let kept = for_graph.alloc(20 << 20).unwrap();
        assert_eq!(
            memory.stats().in_use_bytes,
            80 << 20,
            "the most that the graph had in use, though little is held"
        );
        let more = memory.alloc(5 << 20).unwrap();
        assert_eq!((memory.stats().in_use_bytes, memory.stats().peak_bytes), (85 << 20, 85 << 20));
        // A chunk of which the graph holds nothing any more is not given back for another, nor to somebody else.
        drop(kept);
        assert!(for_graph.alloc(200 << 20).is_err() && memory.alloc(200 << 20).is_err());
        drop((own, more));
        memory.release_empty_chunks();
        assert_eq!(memory.stats().reserved_bytes, 70 << 20);
        drop(for_graph);
        assert_eq!((memory.stats().in_use_bytes, memory.stats().reserved_bytes), (0, 0));
        assert_eq!(memory.stats().peak_bytes, 85 << 20);
        drop(memory);
        assert_eq!(left.load(Ordering::Relaxed), 300 << 20);
    }

    #[test]
    fn a_graph_is_refused_what_a_limit_does_not_leave() {
        let (memory, left) = memory(1 << 30, 100 << 20);
        let for_graph = memory.for_graph();
        let (held, own) = (for_graph.alloc(60 << 20).unwrap(), memory.alloc(30 << 20).unwrap());
        let error = for_graph.alloc(20 << 20).unwrap_err();
        let KernelError::OutOfMemory { stats, .. } = error else { panic!("{error}") };
        assert_eq!((stats.in_use_bytes, stats.reserved_bytes), (90 << 20, memory.stats().reserved_bytes));
        drop((held, own, for_graph, memory));
        assert_eq!(left.load(Ordering::Relaxed), 1 << 30);
    }

    #[test]
    fn a_full_card_gives_back_what_is_empty_and_then_refuses_with_figures() {
        let (memory, _) = memory(100 << 20, 0);
        let small = memory.alloc(10).unwrap();
        drop(memory.alloc(60 << 20).unwrap());
        // 28 MiB are left, and a chunk of 64 is empty.
        let large = memory.alloc(80 << 20).unwrap();
        let error = memory.alloc(30 << 20).unwrap_err();
        let figures = format!("reserved {} bytes", 88 << 20);
        assert!(
            matches!(error, KernelError::OutOfMemory { .. }) && error.to_string().contains(&figures),
            "{error}"
        );
        drop((small, large));
        memory.alloc(90 << 20).unwrap();
    }

    #[test]
    fn a_limit_holds_for_what_is_taken_from_the_driver() {
        let (memory, _) = memory(1 << 30, 20 << 20);
        let held = memory.alloc(12 << 20).unwrap();
        assert!(memory.stats().reserved_bytes <= 20 << 20);
        assert!(memory.alloc(12 << 20).is_err());
        drop(held);
        memory.alloc(18 << 20).unwrap();
        assert!(memory.alloc(usize::MAX).is_err());
    }
}
