//! The communication stream of a rank: the copies and sums of its async collectives. A collective starts after all work that was
//! submitted to the compute stream before. Later work of the compute stream waits for the collective only if it reads what the
//! collective writes, or writes what the collective reads or writes; memory that the collective uses is not reused before it is done.

use super::driver::{Event, Priority, Stream};
use super::launch::{Operands, Programs};
use super::memory::{CachingAllocator, Reclaim};
use crate::backend::{Backend, SyncEvent};
use crate::buffer::{Buffer, DeviceAllocator};
use crate::cost::Cost;
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::gpu::{GridArg, LaunchPlan, Step};
use crate::kernel::{Kernel, Launch};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The bytes that pending collectives may use when the next one begins, of the memory of the rank: this share, but at least these bytes.
/// Beyond that the compute stream waits for the oldest. The host may run far ahead of the GPU, and until then none of this memory could be
/// reused. The gradient of an embedding of 128,256 x 4,096 has 1 GiB in bf16; were it more than the bound, the compute stream would wait for
/// its reduction at the next collective.
const ASYNC_SHARE: usize = 16;
const ASYNC_BYTES_MIN: usize = 256 << 20;
/// The most pending collectives when the next one begins.
const ASYNC_OPS_MAX: usize = 64;

/// The state of a rank on its GPU that both of its streams share.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) number: usize,
    pub(super) shared_bytes_max: u32,
    /// The most memory of the rank, in bytes.
    pub(super) memory_bytes: usize,
    pub(super) num_threads: usize,
    pub(super) programs: Arc<Programs>,
    pub(super) cost: Mutex<Cost>,
    pub(super) memory: Arc<CachingAllocator>,
    /// The compute stream: everything but collectives.
    pub(super) stream: Stream,
}

impl RankState {
    pub(super) fn cost(&self) -> MutexGuard<'_, Cost> {
        self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last collectives that use a block: number of the last writer and of the last reader, 0 for none.
#[derive(Debug)]
struct BufferUse {
    allocator: Arc<dyn DeviceAllocator>,
    bytes: usize,
    written: u64,
    read: u64,
}

/// The collectives of a rank, numbered from 1, and the memory that pending ones use.
#[derive(Debug, Default)]
struct PendingOps {
    /// The last collective that was begun.
    last: u64,
    /// The compute stream waits for the collectives up to this one already.
    waited_for: u64,
    /// The later collectives whose submission has ended, with the events after them.
    ended: VecDeque<(u64, Event)>,
    /// Blocks in use, by address. All of them are retained.
    uses: HashMap<u64, BufferUse>,
}

impl PendingOps {
    /// Returns the entry of a block that the current collective uses; `None` for host memory.
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

    /// Releases the blocks that only collectives up to `op` use.
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

/// The communication stream of a rank, and its pending collectives. Implements [`Backend`] for the current collective.
#[derive(Debug)]
pub(super) struct CommStream {
    rank: Arc<RankState>,
    stream: Stream,
    pending: Mutex<PendingOps>,
    /// Whether pending collectives use any block; checked by every launch without the lock.
    has_uses: AtomicBool,
}

impl CommStream {
    pub(super) fn new(rank: &Arc<RankState>) -> Result<Arc<CommStream>, KernelError> {
        let stream = Stream::new(rank.stream.context(), Priority::Highest)?;
        let comm_stream =
            CommStream { rank: rank.clone(), stream, pending: Mutex::default(), has_uses: false.into() };
        let comm_stream = Arc::new(comm_stream);
        let reclaimer: Weak<CommStream> = Arc::downgrade(&comm_stream);
        rank.memory.set_reclaimer(reclaimer);
        Ok(comm_stream)
    }

    fn pending(&self) -> MutexGuard<'_, PendingOps> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a collective after all work submitted to the compute stream.
    pub(super) fn begin(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let bytes_max = ASYNC_BYTES_MIN.max(self.rank.memory_bytes / ASYNC_SHARE);
        while pending.ended.len() >= ASYNC_OPS_MAX
            || pending.uses.values().map(|u| u.bytes).sum::<usize>() > bytes_max
        {
            let Some((oldest, _)) = pending.ended.front() else { break };
            let oldest = *oldest;
            self.wait_until(&mut pending, oldest)?;
        }
        self.stream.wait(&self.rank.stream.record_event()?)?;
        pending.last += 1;
        Ok(())
    }

    /// Ends the submission of the current collective.
    pub(super) fn end(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let ended = (pending.last, self.stream.record_event()?);
        pending.ended.push_back(ended);
        Ok(())
    }

    /// Makes the compute stream wait for the collectives that conflict with reads and writes of these buffers.
    pub(super) fn wait_for_conflicts<'a>(
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

    /// Makes the compute stream wait for all collectives.
    pub(super) fn wait_all(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let last = pending.last;
        self.wait_until(&mut pending, last)
    }

    fn wait_until(&self, pending: &mut PendingOps, op: u64) -> Result<(), KernelError> {
        if op <= pending.waited_for {
            return Ok(());
        }
        let at = pending.ended.partition_point(|(number, _)| *number < op);
        if at == pending.ended.len() {
            // The collective has no end event: its submission panicked.
            let now = (pending.last, self.stream.record_event()?);
            pending.ended.push_back(now);
        }
        self.rank.stream.wait(&pending.ended[at].1)?;
        let (passed, _) = pending.ended.drain(..=at).next_back().expect("at least one collective has ended");
        pending.release_up_to(passed);
        self.has_uses.store(!pending.uses.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Waits on the host until all collectives are done. The compute stream is done already.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.stream.synchronize()?;
        let mut pending = self.pending();
        let last = pending.last;
        pending.ended.clear();
        pending.release_up_to(last);
        self.has_uses.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl Reclaim for CommStream {
    fn reclaim(&self) -> bool {
        let mut pending = self.pending();
        let Some((last, _)) = pending.ended.back() else { return false };
        let last = *last;
        self.wait_until(&mut pending, last).is_ok()
    }
}

impl Backend for CommStream {
    fn device(&self) -> Device {
        Device::Cuda(self.rank.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.rank.memory.alloc(bytes)?;
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
