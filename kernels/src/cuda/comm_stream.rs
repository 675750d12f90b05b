//! Work of a rank epilogue_operands all other, in a stream of its own: what it copies and sums for calls to other ranks. A flight begins
//! behind all that the rank was given before. What the rank is given next does not wait for it, unless it reads what the flight
//! writes, or writes what the flight reads; and no block that it uses is used again before it is done.

use super::driver::{Event, Stream};
use super::launch::{Operands, Programs};
use super::memory::{Memory, Reclaim};
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

/// What flights have in use at most when the next one begins; beyond that the rank comes behind the oldest of them. It may be far
/// ahead of the card, and so long nothing that flights have used would be used again.
const BYTES_MAX: usize = 256 << 20;
/// The same, in flights.
const ASYNC_OPS_MAX: usize = 64;

/// What a rank has on its card, whatever stream its work is given to.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) number: usize,
    pub(super) shared_bytes_max: u32,
    pub(super) num_threads: usize,
    pub(super) programs: Arc<Programs>,
    pub(super) cost: Mutex<Cost>,
    pub(super) memory: Arc<Memory>,
    /// Where all is given that is no flight.
    pub(super) stream: Stream,
}

impl RankState {
    pub(super) fn cost(&self) -> MutexGuard<'_, Cost> {
        self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last flights that use a block; 0 where none does.
#[derive(Debug)]
struct Use {
    keeper: Arc<dyn DeviceAllocator>,
    bytes: usize,
    written: u64,
    read: u64,
}

/// CommStream by their numbers, from 1.
#[derive(Debug, Default)]
struct PendingOps {
    /// The last that was begun.
    last: u64,
    /// What the rank is given next comes behind this one and all before it.
    behind: u64,
    /// Those that have ended since, with the points behind them.
    ended: VecDeque<(u64, Event)>,
    /// By address. All of these blocks are kept.
    uses: HashMap<u64, Use>,
}

impl PendingOps {
    /// What the flight that runs does with a block.
    fn used(&mut self, buffer: &Buffer) -> Option<&mut Use> {
        let (address, keeper) = buffer.on_its_device()?;
        Some(self.uses.entry(address).or_insert_with(|| {
            keeper.keep(address);
            Use { keeper: keeper.clone(), bytes: buffer.bytes(), written: 0, read: 0 }
        }))
    }

    fn of(&self, buffer: &Buffer) -> Option<&Use> {
        self.uses.get(&buffer.device_address()?)
    }

    /// Lets go of what only flights up to one have used.
    fn pass(&mut self, flight: u64) {
        self.behind = flight;
        self.uses.retain(|address, used| {
            let goes_on = used.written.max(used.read) > flight;
            if !goes_on {
                used.keeper.release(*address);
            }
            goes_on
        });
    }
}

/// The flights of a rank. As a back end it is that of the flight which runs.
#[derive(Debug)]
pub(super) struct CommStream {
    own: Arc<RankState>,
    stream: Stream,
    pending: Mutex<PendingOps>,
    /// Whether a block is in use by any: most launches look no further.
    has_uses: AtomicBool,
}

impl CommStream {
    pub(super) fn new(own: &Arc<RankState>) -> Result<Arc<CommStream>, KernelError> {
        let stream = Stream::new(own.stream.context())?;
        let flights =
            CommStream { own: own.clone(), stream, pending: Mutex::default(), has_uses: false.into() };
        let flights = Arc::new(flights);
        let reclaimer: Weak<CommStream> = Arc::downgrade(&flights);
        own.memory.set_reclaimer(reclaimer);
        Ok(flights)
    }

    fn pending(&self) -> MutexGuard<'_, PendingOps> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a flight behind all that the rank was given.
    pub(super) fn begin(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        while pending.ended.len() >= ASYNC_OPS_MAX
            || pending.uses.values().map(|u| u.bytes).sum::<usize>() > BYTES_MAX
        {
            let Some((oldest, _)) = pending.ended.front() else { break };
            let oldest = *oldest;
            self.wait_until(&mut pending, oldest)?;
        }
        self.stream.wait(&self.own.stream.mark()?)?;
        pending.last += 1;
        Ok(())
    }

    /// Ends it.
    pub(super) fn end(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let ended = (pending.last, self.stream.mark()?);
        pending.ended.push_back(ended);
        Ok(())
    }

    /// Lets what the rank is given next, which reads and writes these buffers, begin behind the flights that it must not meet.
    pub(super) fn order<'a>(
        &self,
        read: impl Iterator<Item = &'a Buffer>,
        written: impl Iterator<Item = &'a Buffer>,
    ) -> Result<(), KernelError> {
        if !self.has_uses.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut pending = self.pending();
        let read = read.filter_map(|x| pending.of(x)).map(|used| used.written);
        let written = written.filter_map(|y| pending.of(y)).map(|used| used.written.max(used.read));
        let flight = read.chain(written).max().unwrap_or(0);
        self.wait_until(&mut pending, flight)
    }

    /// The same for whatever comes next.
    pub(super) fn wait_all(&self) -> Result<(), KernelError> {
        let mut pending = self.pending();
        let last = pending.last;
        self.wait_until(&mut pending, last)
    }

    fn wait_until(&self, pending: &mut PendingOps, flight: u64) -> Result<(), KernelError> {
        if flight <= pending.behind {
            return Ok(());
        }
        let at = pending.ended.partition_point(|(number, _)| *number < flight);
        if at == pending.ended.len() {
            // Whoever was to end it has unwound.
            let now = (pending.last, self.stream.mark()?);
            pending.ended.push_back(now);
        }
        self.own.stream.wait(&pending.ended[at].1)?;
        let (passed, _) = pending.ended.drain(..=at).next_back().expect("one that has ended is here");
        pending.pass(passed);
        self.has_uses.store(!pending.uses.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Waits until all flights are done; the rank's own work is.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.stream.synchronize()?;
        let mut pending = self.pending();
        let last = pending.last;
        pending.ended.clear();
        pending.pass(last);
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
        Device::Cuda(self.own.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.own.memory.alloc(bytes)?;
        let mut pending = self.pending();
        let last = pending.last;
        pending.used(&buffer).expect("it is memory of the card").written = last;
        self.has_uses.store(true, Ordering::Relaxed);
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let unsupported =
            || KernelError::Unsupported { kernel: kernel.name, device: "calls to others on cuda" };
        let gpu = kernel.gpu.as_ref().ok_or_else(unsupported)?;
        let mut plan = LaunchPlan::new(self.own.shared_bytes_max);
        (gpu.plan)(launch, &mut plan)?;
        let scratch = plan.scratch_bytes().iter().map(|&bytes| self.alloc(bytes));
        let scratch: SmallVec<[Buffer; 4]> = scratch.collect::<Result<_, KernelError>>()?;
        for step in plan.steps() {
            // CublasLt and faults have places of their own, which belong to the other stream.
            let Step::Grid(grid) = step else { return Err(unsupported()) };
            if grid.args.iter().any(|arg| [GridArg::Fault, GridArg::Faults].contains(arg)) {
                return Err(unsupported());
            }
            let operands = Operands { launch, scratch: &scratch, fault: 0, faults: 0 };
            self.own.programs.launch(&self.stream, kernel.name, gpu.source, grid, &operands)?;
        }
        *self.own.cost() += kernel.cost(launch);
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        self.own.memory.stats()
    }

    fn cost(&self) -> Cost {
        *self.own.cost()
    }

    fn num_threads(&self) -> usize {
        self.own.num_threads
    }

    fn upload(&self, _: &[u8], _: &mut Buffer) -> Result<(), KernelError> {
        Err(KernelError::Unsupported { kernel: "upload", device: "calls to others on cuda" })
    }

    fn download(&self, _: &Buffer, _: &mut [u8]) -> Result<(), KernelError> {
        Err(KernelError::Unsupported { kernel: "download", device: "calls to others on cuda" })
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::new(Arc::new(self.stream.mark()?)))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        event.downcast_ref::<Event>().map_or(Ok(()), |event| self.stream.wait(event))
    }

    fn record_stream(&self, buffer: &Buffer) {
        let mut pending = self.pending();
        let last = pending.last;
        if let Some(used) = pending.used(buffer) {
            used.read = last;
            self.has_uses.store(true, Ordering::Relaxed);
        }
    }
}
