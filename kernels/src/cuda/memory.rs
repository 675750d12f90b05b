//! The caching allocator of GPU memory of one rank: large chunks from the driver, from which blocks are cut. A freed block is reused
//! at once: the rank computes in one stream, so that the next use runs after the last. Exceptions are blocks that a graph uses,
//! until the graph is dropped, and blocks of pending collectives, until the compute stream waits for those.

use super::driver::{Context, Resource};
use crate::buffer::{Buffer, DeviceAllocator, FreeList};
use crate::error::{KernelError, MemoryStats};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Block sizes are multiples of this; the alignment of driver allocations.
const GRAIN: usize = 512;
/// Blocks up to this size come from chunks of [`SMALL_CHUNK`], so that they do not fragment large chunks.
const SMALL_MAX: usize = 1 << 20;
const SMALL_CHUNK: usize = 8 << 20;
const LARGE_CHUNK: usize = 64 << 20;
/// Sizes of larger chunks are multiples of this.
const CHUNK_GRAIN: usize = 2 << 20;

/// The source of chunks: the driver, or a fake in tests.
pub(super) trait ChunkSource: fmt::Debug + Send + Sync {
    /// Allocates a chunk; `None` if memory is short.
    fn alloc(&self, bytes: usize) -> Result<Option<u64>, KernelError>;
    /// Frees a chunk in which no block is in use; during a capture, later.
    fn free(&self, address: u64);
}

/// A holder of retained blocks that can release them when memory is short.
pub(super) trait Reclaim: fmt::Debug + Send + Sync {
    /// Releases blocks; returns whether there were any.
    fn reclaim(&self) -> bool;
}

/// Chunks and blocks of an allocator, by address, and its statistics.
#[derive(Debug, Default)]
struct AllocatorState {
    /// Free lists of small and of large chunks.
    free_list: [FreeList; 2],
    /// Bytes of each block in use.
    used: HashMap<u64, usize>,
    /// How many graphs and collectives retain a block.
    retained: HashMap<u64, usize>,
    /// Retained blocks without other handles.
    freed_while_retained: HashSet<u64>,
    stats: MemoryStats,
}

/// Returns the index of the free list for blocks of `bytes` bytes: 0 for small, 1 for large.
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
        if self.retained.contains_key(&address) {
            self.freed_while_retained.insert(address);
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

    /// Removes the chunks in which nothing is in use, and returns their addresses.
    fn empty_chunks(&mut self) -> Vec<u64> {
        let empty = self.free_list.iter_mut().flat_map(FreeList::take_empty);
        let empty = empty.inspect(|(_, bytes)| self.stats.reserved_bytes -= bytes);
        empty.map(|(address, _)| address).collect()
    }
}

/// The caching allocator of one rank, or of a captured graph of the rank. Shared by handles.
#[derive(Debug)]
pub(super) struct CachingAllocator {
    source: Arc<dyn ChunkSource>,
    limit: usize,
    state: Mutex<AllocatorState>,
    /// The allocator of the rank, for the allocator of a graph: it counts the graph's memory. Locks are taken in the order graph, rank.
    parent: Option<Arc<CachingAllocator>>,
    reclaimer: OnceLock<Weak<dyn Reclaim>>,
}

impl CachingAllocator {
    /// Creates an allocator that takes at most `limit` bytes from the driver (0: no limit).
    pub(super) fn new(source: Arc<dyn ChunkSource>, limit: usize) -> Arc<CachingAllocator> {
        Arc::new(CachingAllocator {
            source,
            limit,
            state: Mutex::default(),
            parent: None,
            reclaimer: OnceLock::new(),
        })
    }

    /// Creates the allocator of a graph, with separate chunks and a shared limit. Its peak counts as in use here as long as the graph
    /// lives, because every replay uses that memory again.
    pub(super) fn for_graph(self: &Arc<CachingAllocator>) -> Arc<CachingAllocator> {
        let (source, limit, parent) = (self.source.clone(), self.limit, Some(self.clone()));
        Arc::new(CachingAllocator {
            source,
            limit,
            state: Mutex::default(),
            parent,
            reclaimer: OnceLock::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, AllocatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the statistics; those of a rank include its graphs.
    pub(super) fn stats(&self) -> MemoryStats {
        self.state().stats
    }

    /// Frees the chunks in which nothing is in use.
    pub(super) fn release_empty_chunks(&self) {
        self.state().empty_chunks().into_iter().for_each(|address| self.source.free(address));
    }

    /// Sets the holder to call before an allocation fails. Only the first call has an effect.
    pub(super) fn set_reclaimer(&self, reclaimer: Weak<dyn Reclaim>) {
        self.reclaimer.get_or_init(|| reclaimer);
    }

    /// Allocates at least `bytes` bytes, with arbitrary contents.
    pub(super) fn alloc(self: &Arc<CachingAllocator>, bytes: usize) -> Result<Buffer, KernelError> {
        let reclaimed =
            || self.reclaimer.get().and_then(Weak::upgrade).is_some_and(|reclaimer| reclaimer.reclaim());
        match self.block(bytes) {
            Err(KernelError::OutOfMemory { .. }) if reclaimed() => self.block(bytes),
            found => found,
        }
    }

    fn block(self: &Arc<CachingAllocator>, bytes: usize) -> Result<Buffer, KernelError> {
        let mut state = self.state();
        let refuse = |state: &AllocatorState| {
            let stats = self.parent.as_ref().map_or(state.stats, |parent| parent.stats());
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
        if let Some(parent) = &self.parent {
            parent.state().count(state.stats.peak_bytes - peak);
        }
        drop(state);
        Ok(Buffer::on_device(address, bytes, self.clone()))
    }

    /// Adds a chunk with room for a block, if possible; frees empty chunks first if memory is short. A graph keeps its chunks: the
    /// captured launches use them, and nothing can be freed during capture.
    fn grow(&self, state: &mut AllocatorState, block: usize) -> Result<(), KernelError> {
        let own = block.checked_next_multiple_of(CHUNK_GRAIN).unwrap_or(block);
        let (usual, tight) = match kind(block) {
            0 => (SMALL_CHUNK, SMALL_CHUNK),
            _ => (own.max(LARGE_CHUNK), own),
        };
        for bytes in [usual, tight] {
            if self.reserve_chunk(state, kind(block), bytes)? {
                return Ok(());
            }
        }
        if self.parent.is_some() {
            return Ok(());
        }
        for address in state.empty_chunks() {
            self.source.free(address);
        }
        self.reserve_chunk(state, kind(block), tight).map(|_| ())
    }

    fn reserve_chunk(
        &self,
        state: &mut AllocatorState,
        kind: usize,
        bytes: usize,
    ) -> Result<bool, KernelError> {
        let mut parent = self.parent.as_ref().map(|parent| parent.state());
        let reserved =
            parent.as_ref().map_or(state.stats.reserved_bytes, |parent| parent.stats.reserved_bytes);
        if self.limit != 0 && reserved.saturating_add(bytes) > self.limit {
            return Ok(false);
        }
        let Some(address) = self.source.alloc(bytes)? else { return Ok(false) };
        state.add_chunk(kind, address, bytes);
        if let Some(parent) = &mut parent {
            parent.count_chunk(bytes);
        }
        Ok(true)
    }
}

impl DeviceAllocator for CachingAllocator {
    fn give_back(&self, address: u64) {
        self.state().give_back(address);
    }

    fn retain(&self, address: u64) {
        let mut state = self.state();
        debug_assert!(state.used.contains_key(&address), "bug: a free block is retained");
        *state.retained.entry(address).or_default() += 1;
    }

    fn release(&self, address: u64) {
        let mut state = self.state();
        let left = state.retained.get_mut(&address).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            state.retained.remove(&address);
            if state.freed_while_retained.remove(&address) {
                state.give_back(address);
            }
        }
    }
}

impl Drop for CachingAllocator {
    fn drop(&mut self) {
        let state = std::mem::take(&mut *self.state());
        state.free_list.iter().flat_map(FreeList::chunks).for_each(|address| self.source.free(address));
        if let Some(parent) = &self.parent {
            let mut parent = parent.state();
            parent.stats.reserved_bytes -= state.stats.reserved_bytes;
            parent.stats.in_use_bytes -= state.stats.peak_bytes;
        }
    }
}

/// Chunks from the driver of a GPU.
#[derive(Debug)]
pub(super) struct DriverChunks(pub(super) Arc<Context>);

impl ChunkSource for DriverChunks {
    fn alloc(&self, bytes: usize) -> Result<Option<u64>, KernelError> {
        self.0.alloc(bytes)
    }

    fn free(&self, address: u64) {
        self.0.destroy(Resource::Chunk(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// A source of fake addresses with a limited number of bytes.
    #[derive(Debug, Default)]
    struct FakeChunks {
        next: AtomicU64,
        left: Arc<AtomicUsize>,
        given: Arc<Mutex<Vec<u64>>>,
        sizes: Mutex<HashMap<u64, usize>>,
    }

    impl ChunkSource for FakeChunks {
        fn alloc(&self, bytes: usize) -> Result<Option<u64>, KernelError> {
            if self.left.load(Ordering::Relaxed) < bytes {
                return Ok(None);
            }
            self.left.fetch_sub(bytes, Ordering::Relaxed);
            // Chunks are adjacent: blocks of two chunks must not be merged.
            let address = 4096 + self.next.fetch_add(bytes as u64, Ordering::Relaxed);
            self.sizes.lock().unwrap().insert(address, bytes);
            Ok(Some(address))
        }

        fn free(&self, address: u64) {
            let bytes = self.sizes.lock().unwrap().remove(&address).expect("given back once");
            self.left.fetch_add(bytes, Ordering::Relaxed);
            self.given.lock().unwrap().push(address);
        }
    }

    fn memory(bytes: usize, limit: usize) -> (Arc<CachingAllocator>, Arc<AtomicUsize>) {
        let left = Arc::new(AtomicUsize::new(bytes));
        (
            CachingAllocator::new(
                Arc::new(FakeChunks { left: left.clone(), ..FakeChunks::default() }),
                limit,
            ),
            left,
        )
    }

    #[test]
    fn blocks_do_not_overlap_and_all_memory_is_returned() {
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
        assert!(state.free_list.iter().all(FreeList::is_all_free), "all free blocks are merged");
        drop(state);
        drop(memory);
        assert_eq!(left.load(Ordering::Relaxed), 4 << 30);
    }

    #[test]
    fn freed_block_is_reused_next() {
        let (memory, _) = memory(1 << 30, 0);
        let a = memory.alloc(3 << 20).unwrap();
        let address = a.device_address();
        drop(a);
        assert_eq!(memory.alloc(2 << 20).unwrap().device_address(), address);
        assert_eq!(memory.stats().num_system_allocs, 1);
    }

    #[test]
    fn retained_block_is_not_reused_before_release() {
        let (memory, left) = memory(1 << 30, 200 << 20);
        let a = memory.alloc(3 << 20).unwrap();
        let address = a.device_address().unwrap();
        memory.retain(address);
        memory.retain(address);
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
    fn peak_of_a_graph_counts_while_the_graph_lives() {
        let (memory, left) = memory(300 << 20, 0);
        let own = memory.alloc(10 << 20).unwrap();
        let for_graph = memory.for_graph();
        drop(for_graph.alloc(70 << 20).unwrap());
        let retained = for_graph.alloc(20 << 20).unwrap();
        assert_eq!(
            memory.stats().in_use_bytes,
            80 << 20,
            "the peak of the graph counts, not what it holds now"
        );
        let more = memory.alloc(5 << 20).unwrap();
        assert_eq!((memory.stats().in_use_bytes, memory.stats().peak_bytes), (85 << 20, 85 << 20));
        // An empty chunk of a graph is not freed for another allocation.
        drop(retained);
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
    fn limit_includes_the_memory_of_graphs() {
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
    fn full_gpu_frees_empty_chunks_before_it_refuses() {
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
    fn limit_applies_to_chunks_from_the_driver() {
        let (memory, _) = memory(1 << 30, 20 << 20);
        let held = memory.alloc(12 << 20).unwrap();
        assert!(memory.stats().reserved_bytes <= 20 << 20);
        assert!(memory.alloc(12 << 20).is_err());
        drop(held);
        memory.alloc(18 << 20).unwrap();
        assert!(memory.alloc(usize::MAX).is_err());
    }
}
