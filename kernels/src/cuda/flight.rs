//! Work of a rank beside all other, in a stream of its own: what it copies and sums for calls to other ranks. A flight begins
//! behind all that the rank was given before. What the rank is given next does not wait for it, unless it reads what the flight
//! writes, or writes what the flight reads; and no block that it uses is used again before it is done.

use super::driver::{Event, Stream};
use super::launch::{Operands, Programs};
use super::memory::{Memory, Relief};
use crate::backend::{Backend, Device, Mark};
use crate::buffer::{Buffer, Keeper};
use crate::error::{KernelError, MemoryStats};
use crate::gpu::{GridArg, Plan, Step};
use crate::kernel::{Cost, Kernel, Launch};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What flights have in use at most when the next one begins; beyond that the rank comes behind the oldest of them. It may be far
/// ahead of the card, and so long nothing that flights have used would be used again.
const BYTES_MAX: usize = 256 << 20;
/// The same, in flights.
const FLIGHTS_MAX: usize = 64;

/// What a rank has on its card, whatever stream its work is given to.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) number: usize,
    pub(super) shared_bytes_max: u32,
    pub(super) num_threads: usize,
    pub(super) programs: Arc<Programs>,
    pub(super) cost: Mutex<Cost>,
    pub(super) memory: Arc<Memory>,
    /// Where all is given that is no flight.
    pub(super) stream: Stream,
}

impl Own {
    pub(super) fn cost(&self) -> MutexGuard<'_, Cost> {
        self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last flights that use a block; 0 where none does.
#[derive(Debug)]
struct Use {
    keeper: Arc<dyn Keeper>,
    bytes: usize,
    written: u64,
    read: u64,
}

/// Flights by their numbers, from 1.
#[derive(Debug, Default)]
struct Books {
    /// The last that was begun.
    last: u64,
    /// What the rank is given next comes behind this one and all before it.
    behind: u64,
    /// Those that have ended since, with the points behind them.
    ended: VecDeque<(u64, Event)>,
    /// By address. All of these blocks are kept.
    uses: HashMap<u64, Use>,
}

impl Books {
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
                used.keeper.let_go(*address);
            }
            goes_on
        });
    }
}

/// The flights of a rank. As a back end it is that of the flight which runs.
#[derive(Debug)]
pub(super) struct Flights {
    own: Arc<Own>,
    stream: Stream,
    books: Mutex<Books>,
    /// Whether a block is in use by any: most launches look no further.
    has_uses: AtomicBool,
}

impl Flights {
    pub(super) fn new(own: &Arc<Own>) -> Result<Arc<Flights>, KernelError> {
        let stream = Stream::new(own.stream.context())?;
        let flights = Flights { own: own.clone(), stream, books: Mutex::default(), has_uses: false.into() };
        let flights = Arc::new(flights);
        let relief: Weak<Flights> = Arc::downgrade(&flights);
        own.memory.relieve_by(relief);
        Ok(flights)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a flight behind all that the rank was given.
    pub(super) fn begin(&self) -> Result<(), KernelError> {
        let mut books = self.books();
        while books.ended.len() >= FLIGHTS_MAX
            || books.uses.values().map(|u| u.bytes).sum::<usize>() > BYTES_MAX
        {
            let Some((oldest, _)) = books.ended.front() else { break };
            let oldest = *oldest;
            self.come_behind(&mut books, oldest)?;
        }
        self.stream.wait(&self.own.stream.mark()?)?;
        books.last += 1;
        Ok(())
    }

    /// Ends it.
    pub(super) fn end(&self) -> Result<(), KernelError> {
        let mut books = self.books();
        let ended = (books.last, self.stream.mark()?);
        books.ended.push_back(ended);
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
        let mut books = self.books();
        let read = read.filter_map(|x| books.of(x)).map(|used| used.written);
        let written = written.filter_map(|y| books.of(y)).map(|used| used.written.max(used.read));
        let flight = read.chain(written).max().unwrap_or(0);
        self.come_behind(&mut books, flight)
    }

    /// The same for whatever comes next.
    pub(super) fn order_all(&self) -> Result<(), KernelError> {
        let mut books = self.books();
        let last = books.last;
        self.come_behind(&mut books, last)
    }

    fn come_behind(&self, books: &mut Books, flight: u64) -> Result<(), KernelError> {
        if flight <= books.behind {
            return Ok(());
        }
        let at = books.ended.partition_point(|(number, _)| *number < flight);
        if at == books.ended.len() {
            // Whoever was to end it has unwound.
            let now = (books.last, self.stream.mark()?);
            books.ended.push_back(now);
        }
        self.own.stream.wait(&books.ended[at].1)?;
        let (passed, _) = books.ended.drain(..=at).next_back().expect("one that has ended is here");
        books.pass(passed);
        self.has_uses.store(!books.uses.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Waits until all flights are done; the rank's own work is.
    pub(super) fn finish(&self) -> Result<(), KernelError> {
        self.stream.finish()?;
        let mut books = self.books();
        let last = books.last;
        books.ended.clear();
        books.pass(last);
        self.has_uses.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl Relief for Flights {
    fn relieve(&self) -> bool {
        let mut books = self.books();
        let Some((last, _)) = books.ended.back() else { return false };
        let last = *last;
        self.come_behind(&mut books, last).is_ok()
    }
}

impl Backend for Flights {
    fn device(&self) -> Device {
        Device::Cuda(self.own.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.own.memory.alloc(bytes)?;
        let mut books = self.books();
        let last = books.last;
        books.used(&buffer).expect("it is memory of the card").written = last;
        self.has_uses.store(true, Ordering::Relaxed);
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let unsupported =
            || KernelError::Unsupported { kernel: kernel.name, device: "calls to others on cuda" };
        let gpu = kernel.gpu.as_ref().ok_or_else(unsupported)?;
        let mut plan = Plan::new(self.own.shared_bytes_max);
        (gpu.plan)(launch, &mut plan)?;
        let scratch = plan.scratch_bytes().iter().map(|&bytes| self.alloc(bytes));
        let scratch: SmallVec<[Buffer; 4]> = scratch.collect::<Result<_, KernelError>>()?;
        for step in plan.steps() {
            // Products and faults have places of their own, which belong to the other stream.
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

    fn mark(&self) -> Result<Mark, KernelError> {
        Ok(Mark::new(Arc::new(self.stream.mark()?)))
    }

    fn wait(&self, mark: &Mark) -> Result<(), KernelError> {
        mark.point::<Event>().map_or(Ok(()), |event| self.stream.wait(event))
    }

    fn hold(&self, buffer: &Buffer) {
        let mut books = self.books();
        let last = books.last;
        if let Some(used) = books.used(buffer) {
            used.read = last;
            self.has_uses.store(true, Ordering::Relaxed);
        }
    }
}
