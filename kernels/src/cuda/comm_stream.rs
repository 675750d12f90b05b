//! The communication streams of a rank: one for the copies and sums of its async collectives, and further ones that are ordered with no
//! other ([`Backend::open_stream`]). An operation starts after an event of the compute stream: for a collective, all work submitted there
//! before. Later work of the compute stream waits for the operation only if it reads what the operation writes, or writes what the
//! operation reads or writes; memory that the operation uses is not reused before it is done.

use super::driver::{Event, Priority, Stream};
use super::launch::{Operands, Programs};
use super::memory::{CachingAllocator, Reclaim};
use crate::backend::{AsyncStream, Backend, SyncEvent};
use crate::buffer::{Buffer, DeviceAllocator};
use crate::cost::Cost;
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::gpu::{GridArg, LaunchPlan, Step};
use crate::kernel::{Kernel, Launch};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

/// The bytes that pending collectives may use when the next one begins, of the memory of the rank: this share, but at least these bytes.
/// Beyond that the compute stream waits for the oldest. The host may run far ahead of the GPU, and until then none of this memory could be
/// reused. The gradient of an embedding of 128,256 x 4,096 has 1 GiB in bf16; were it more than the bound, the compute stream would wait for
/// its reduction at the next collective.
const ASYNC_SHARE: usize = 16;
const ASYNC_BYTES_MIN: usize = 256 << 20;
/// The most pending collectives when the next one begins.
const ASYNC_OPS_MAX: usize = 64;
/// A stream with more watched operations than this drops those that are done whenever a submission ends: [`Backend::running_async`] may
/// not be called any more.
const WATCHED_OPS_MAX: usize = 64;

/// The state of a rank on its GPU that both of its streams share.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) number: usize,
    pub(super) shared_bytes_max: u32,
    /// The most memory of the rank, in bytes.
    pub(super) memory_bytes: usize,
    /// Whether that is a limit of the rank, and not the memory of the GPU.
    pub(super) has_memory_limit: bool,
    /// The UUID of the GPU.
    pub(super) uuid: String,
    pub(super) num_threads: usize,
    pub(super) programs: Arc<Programs>,
    pub(super) cost: Mutex<Cost>,
    pub(super) memory: Arc<CachingAllocator>,
    /// The compute stream: everything but collectives.
    pub(super) stream: Stream,
    /// How often blocks of pending operations were released.
    pub(super) num_releases: AtomicU64,
    /// Whether [`Backend::running_async`] is called.
    pub(super) is_watched: AtomicBool,
}

impl RankState {
    pub(super) fn cost(&self) -> MutexGuard<'_, Cost> {
        self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last operations of a stream that use a block: number of the last writer and of the last reader, 0 for none.
#[derive(Debug)]
struct BufferUse {
    allocator: Arc<dyn DeviceAllocator>,
    bytes: usize,
    written: u64,
    read: u64,
}

/// An operation that is not known to be done: its number, the event after which it begins, and the event at its end.
#[derive(Debug)]
struct WatchedOp {
    op: u64,
    after: SyncEvent,
    end: Arc<Event>,
}

/// The operations of a stream, numbered from 1, and the memory that pending ones use.
#[derive(Debug, Default)]
struct PendingOps {
    /// The last operation that was begun.
    last: u64,
    /// The compute stream waits for the operations up to this one already.
    waited_for: u64,
    /// The event after which the last operation begins.
    after: SyncEvent,
    /// The later operations whose submission has ended, with the events after them.
    ended: VecDeque<(u64, Arc<Event>)>,
    /// The operations that are not known to be done, if they are watched.
    watched: VecDeque<WatchedOp>,
    /// Blocks in use, by address. All of them are retained.
    uses: HashMap<u64, BufferUse>,
}

impl PendingOps {
    /// Returns the entry of a block that the current operation uses; `None` for host memory.
    fn use_by_current_op(&mut self, buffer: &Buffer) -> Option<&mut BufferUse> {
        let (address, allocator) = buffer.device_allocation()?;
        Some(self.uses.entry(address).or_insert_with(|| {
            allocator.retain(address);
            BufferUse { allocator: allocator.clone(), bytes: buffer.bytes(), written: 0, read: 0 }
        }))
    }

    fn get(&self, buffer: &Buffer) -> Option<&BufferUse> {
        self.uses.get(&buffer.device_address()?)
    }

    /// The last operation whose submission has ended.
    fn last_ended(&self) -> u64 {
        self.ended.back().map_or(self.waited_for, |(op, _)| *op)
    }

    /// Drops the watched operations that are done. Operations of a stream are done in their order.
    fn drop_watched(&mut self) -> Result<(), KernelError> {
        while let Some(first) = self.watched.front() {
            if !first.end.has_occurred()? {
                break;
            }
            self.watched.pop_front();
        }
        Ok(())
    }

    /// Releases the blocks that only operations up to `op` use.
    fn release_up_to(&mut self, op: u64) {
        self.waited_for = op;
        self.uses.retain(|address, used| {
            let is_pending = used.written.max(used.read) > op;
            if !is_pending {
                used.allocator.release(*address);
            }
            is_pending
        });
    }
}

/// The communication streams of a rank.
#[derive(Debug)]
pub(super) struct CommStreams {
    rank: Arc<RankState>,
    /// That of collectives, which the first one creates.
    collectives: OnceLock<Arc<CommStream>>,
    /// Those of [`Backend::open_stream`].
    others: RwLock<Vec<Arc<CommStream>>>,
}

impl CommStreams {
    pub(super) fn new(rank: &Arc<RankState>) -> Arc<CommStreams> {
        let (collectives, others) = (OnceLock::new(), RwLock::default());
        let streams = Arc::new(CommStreams { rank: rank.clone(), collectives, others });
        let reclaimer: Weak<CommStreams> = Arc::downgrade(&streams);
        rank.memory.set_reclaimer(reclaimer);
        streams
    }

    /// Returns the stream of collectives.
    pub(super) fn of_collectives(&self) -> Result<&Arc<CommStream>, KernelError> {
        match self.collectives.get() {
            Some(stream) => Ok(stream),
            None => {
                let fresh = CommStream::new(&self.rank)?;
                Ok(self.collectives.get_or_init(|| fresh))
            }
        }
    }

    /// Ends the submission of the current collective, if any has begun.
    pub(super) fn end_collective(&self) -> Result<(), KernelError> {
        self.collectives.get().map_or(Ok(()), |stream| stream.end_now())
    }

    /// Opens another stream.
    pub(super) fn open(&self) -> Result<Arc<CommStream>, KernelError> {
        let stream = CommStream::new(&self.rank)?;
        self.others.write().unwrap_or_else(PoisonError::into_inner).push(stream.clone());
        Ok(stream)
    }

    fn try_for_each(
        &self,
        mut f: impl FnMut(&CommStream) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        self.collectives.get().map_or(Ok(()), |stream| f(stream))?;
        self.others.read().unwrap_or_else(PoisonError::into_inner).iter().try_for_each(|stream| f(stream))
    }

    /// Makes the compute stream wait for the operations that conflict with reads and writes of these buffers.
    pub(super) fn wait_for_conflicts<'a>(
        &self,
        read: impl Iterator<Item = &'a Buffer> + Clone,
        written: impl Iterator<Item = &'a Buffer> + Clone,
    ) -> Result<(), KernelError> {
        self.try_for_each(|stream| stream.wait_for_conflicts(read.clone(), written.clone()))
    }

    /// Makes the compute stream wait for all operations.
    pub(super) fn wait_all(&self) -> Result<(), KernelError> {
        self.try_for_each(CommStream::wait_all)
    }

    /// Returns for each stream the number of the operation that runs now, for which it is watched from now on.
    pub(super) fn running(&self) -> Result<Vec<Option<u64>>, KernelError> {
        self.rank.is_watched.store(true, Ordering::Relaxed);
        self.rank.stream.context().poll_waits();
        // That of collectives has its place before it is created. Looked up once: another thread may create it now.
        let collectives = self.collectives.get().map_or(Ok(None), |stream| stream.running());
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        iter::once(collectives).chain(others.iter().map(|stream| stream.running())).collect()
    }

    /// Waits on the host until all operations are done. The compute stream is done already.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.try_for_each(CommStream::synchronize)
    }
}

impl Reclaim for CommStreams {
    fn reclaim(&self) -> bool {
        let mut has_released = false;
        let all = self.try_for_each(|stream| {
            has_released |= stream.reclaim()?;
            Ok(())
        });
        all.is_ok() && has_released
    }
}

/// A communication stream, and its pending operations. Implements [`Backend`] for the current operation.
#[derive(Debug)]
pub(super) struct CommStream {
    rank: Arc<RankState>,
    stream: Stream,
    pending: Mutex<PendingOps>,
    /// Whether pending operations use any block; checked by every launch without the lock.
    has_uses: AtomicBool,
    /// How often blocks had been released before the event after which the current operation begins.
    num_releases: AtomicU64,
}

impl CommStream {
    fn new(rank: &Arc<RankState>) -> Result<Arc<CommStream>, KernelError> {
        let stream = Stream::new(rank.stream.context(), Priority::Highest)?;
        let (pending, has_uses, num_releases) = (Mutex::default(), false.into(), AtomicU64::new(0));
        Ok(Arc::new(CommStream { rank: rank.clone(), stream, pending, has_uses, num_releases }))
    }

    fn pending(&self) -> MutexGuard<'_, PendingOps> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event after all work submitted to the compute stream. Memory that is freed later may be in use after it.
    fn compute_event(&self) -> Result<Event, KernelError> {
        self.num_releases.store(self.rank.num_releases.load(Ordering::SeqCst), Ordering::SeqCst);
        self.rank.stream.record_event()
    }

    /// Begins an operation after all work submitted to the compute stream.
    pub(super) fn begin_now(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        self.limit(&mut pending)?;
        let after = self.back_end_event()?;
        self.start(&mut pending, &after)
    }

    fn start(&self, pending: &mut PendingOps, after: &SyncEvent) -> Result<(), KernelError> {
        after.downcast_ref::<Event>().map_or(Ok(()), |event| self.stream.wait(event))?;
        pending.after = after.clone();
        pending.last += 1;
        Ok(())
    }

    /// Makes the compute stream wait for old operations if pending ones use much memory.
    fn limit(&self, pending: &mut PendingOps) -> Result<(), KernelError> {
        let bytes_max = ASYNC_BYTES_MIN.max(self.rank.memory_bytes / ASYNC_SHARE);
        while pending.ended.len() >= ASYNC_OPS_MAX
            || pending.uses.values().map(|u| u.bytes).sum::<usize>() > bytes_max
        {
            let Some((oldest, _)) = pending.ended.front() else { break };
            let oldest = *oldest;
            self.wait_until(pending, oldest)?;
        }
        Ok(())
    }

    /// Ends the submission of the current operation.
    pub(super) fn end_now(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let (op, end) = (pending.last, Arc::new(self.stream.record_event()?));
        pending.ended.push_back((op, end.clone()));
        if self.rank.is_watched.load(Ordering::Relaxed) {
            let after = pending.after.clone();
            pending.watched.push_back(WatchedOp { op, after, end });
            if pending.watched.len() > WATCHED_OPS_MAX {
                pending.drop_watched()?;
            }
        }
        Ok(())
    }

    /// Returns the number of the operation that runs now.
    fn running(&self) -> Result<Option<u64>, KernelError> {
        let mut pending = self.pending();
        pending.drop_watched()?;
        let Some(first) = pending.watched.front() else { return Ok(None) };
        let has_begun = first.after.downcast_ref::<Event>().map_or(Ok(true), Event::has_occurred)?;
        Ok(has_begun.then_some(first.op))
    }

    /// Makes the compute stream wait for the operations that conflict with reads and writes of these buffers.
    fn wait_for_conflicts<'a>(
        &self,
        read: impl Iterator<Item = &'a Buffer>,
        written: impl Iterator<Item = &'a Buffer>,
    ) -> Result<(), KernelError> {
        if !self.has_uses.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut pending = self.pending();
        let read = read.filter_map(|x| pending.get(x)).map(|used| used.written);
        let written = written.filter_map(|y| pending.get(y)).map(|used| used.written.max(used.read));
        let op = read.chain(written).max().unwrap_or(0);
        self.wait_until(&mut pending, op)
    }

    /// Makes the compute stream wait for all operations whose submission has ended; another thread may be submitting one.
    fn wait_all(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let last = pending.last_ended();
        self.wait_until(&mut pending, last)
    }

    fn wait_until(&self, pending: &mut PendingOps, op: u64) -> Result<(), KernelError> {
        if op <= pending.waited_for {
            return Ok(());
        }
        let at = pending.ended.partition_point(|(number, _)| *number < op);
        if at == pending.ended.len() {
            // The operation has no end event: its submission panicked.
            let now = (pending.last, Arc::new(self.stream.record_event()?));
            pending.ended.push_back(now);
        }
        self.rank.stream.wait(&pending.ended[at].1)?;
        let (passed, _) = pending.ended.drain(..=at).next_back().expect("at least one operation has ended");
        // Counted first: who gets a released block sees the count.
        self.rank.num_releases.fetch_add(1, Ordering::SeqCst);
        pending.release_up_to(passed);
        self.has_uses.store(!pending.uses.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Waits on the host until all operations are done whose submission has ended.
    fn synchronize(&self) -> Result<(), KernelError> {
        let last = self.pending().last_ended();
        self.stream.synchronize()?;
        let mut pending = self.pending();
        if last > pending.waited_for {
            let done = pending.ended.partition_point(|(op, _)| *op <= last);
            pending.ended.drain(..done);
            pending.release_up_to(last);
            self.has_uses.store(!pending.uses.is_empty(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes the compute stream wait for all operations whose submission has ended, and releases their blocks. Returns whether there were
    /// any.
    fn reclaim(&self) -> Result<bool, KernelError> {
        let mut pending = self.pending();
        let last = pending.last_ended();
        let has_ended = last > pending.waited_for;
        self.wait_until(&mut pending, last)?;
        Ok(has_ended)
    }
}

impl AsyncStream for CommStream {
    fn back_end_event(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::new(Arc::new(self.compute_event()?)))
    }

    fn begin(&self, after: &SyncEvent) -> Result<&dyn Backend, KernelError> {
        let mut pending = self.pending();
        self.limit(&mut pending)?;
        self.start(&mut pending, after)?;
        Ok(self)
    }

    fn end(&self) -> Result<(), KernelError> {
        self.end_now()
    }
}

impl Backend for CommStream {
    fn device(&self) -> Device {
        Device::Cuda(self.rank.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.rank.memory.alloc(bytes)?;
        // The block may be one for which the compute stream has begun to wait after the event of this operation.
        if self.rank.num_releases.load(Ordering::SeqCst) != self.num_releases.load(Ordering::SeqCst) {
            self.stream.wait(&self.compute_event()?)?;
        }
        let mut pending = self.pending();
        let last = pending.last;
        pending.use_by_current_op(&buffer).expect("the allocator returns device memory").written = last;
        self.has_uses.store(true, Ordering::Relaxed);
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let unsupported =
            || KernelError::Unsupported { kernel: kernel.name, device: "the CUDA communication stream" };
        let gpu = kernel.gpu.as_ref().ok_or_else(unsupported)?;
        let mut plan = LaunchPlan::new(self.rank.shared_bytes_max);
        (gpu.plan)(launch, &mut plan)?;
        let scratch = plan.scratch_bytes().iter().map(|&bytes| self.alloc(bytes));
        let scratch: SmallVec<[Buffer; 4]> = scratch.collect::<Result<_, KernelError>>()?;
        for step in plan.steps() {
            // The cuBLASLt workspace and the fault records belong to the compute stream.
            let Step::Grid(grid) = step else { return Err(unsupported()) };
            if grid.args.iter().any(|arg| [GridArg::Fault, GridArg::Faults].contains(arg)) {
                return Err(unsupported());
            }
            let operands = Operands { launch, scratch: &scratch, fault: 0, faults: 0 };
            self.rank.programs.launch(&self.stream, kernel.name, gpu.source, grid, &operands)?;
        }
        *self.rank.cost() += kernel.cost(launch);
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        self.rank.memory.stats()
    }

    fn cost(&self) -> Cost {
        *self.rank.cost()
    }

    fn num_threads(&self) -> usize {
        self.rank.num_threads
    }

    fn upload(&self, _: &[u8], _: &mut Buffer) -> Result<(), KernelError> {
        Err(KernelError::Unsupported { kernel: "upload", device: "the CUDA communication stream" })
    }

    fn download(&self, _: &Buffer, _: &mut [u8]) -> Result<(), KernelError> {
        Err(KernelError::Unsupported { kernel: "download", device: "the CUDA communication stream" })
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::new(Arc::new(self.stream.record_event()?)))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        event.downcast_ref::<Event>().map_or(Ok(()), |event| self.stream.wait(event))
    }

    fn native_stream(&self) -> Result<Option<usize>, KernelError> {
        self.stream.for_libraries().map(Some)
    }

    fn record_stream(&self, buffer: &Buffer) {
        let mut pending = self.pending();
        let last = pending.last;
        if let Some(used) = pending.use_by_current_op(buffer) {
            used.read = last;
            self.has_uses.store(true, Ordering::Relaxed);
        }
    }
}
