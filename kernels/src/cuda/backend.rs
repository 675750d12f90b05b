//! Cards as machines for ranks, and the back end of one rank: its memory, what it launches, and the stream of what is no flight.

use super::comm_stream::{CommStream, RankState};
use super::compile::Compiler;
use super::cublaslt::{CublasLt, MatmulPlanner, WORKSPACE_BYTES};
use super::driver::{Context, DeviceProperties, Driver, Event, Pinned, Stream};
use super::graph::{self, CaptureState, CapturedGraph};
use super::launch::{Operands, Programs};
use super::library::{DRIVER, SearchPaths};
use super::matmul::MatmulRunner;
use super::memory::{Chunks, Memory};
use crate::backend::{Backend, Graph, SyncEvent};
use crate::buffer::Buffer;
use crate::cost::Cost;
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::gpu::{FAULTS_MAX, GridArg, LaunchPlan, Step};
use crate::kernel::{Kernel, Launch};
use crate::provider::{BackendConfig, BackendProvider};
use smallvec::SmallVec;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// An NVIDIA card that is open: its context, its compiled kernels and the libraries, which all ranks on it share.
#[derive(Debug)]
pub struct CudaDevice {
    number: usize,
    description: DeviceProperties,
    // Before those who may hold the last handle of the context: it is gone with that.
    products: Arc<CublasLt>,
    programs: Arc<Programs>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Finds driver, compiler and library of products, and opens a card by its number.
    ///
    /// # Errors
    /// [`KernelError::Library`] for whatever is missing or too old, with what to install; what the driver reports.
    pub fn open(places: &SearchPaths, number: usize) -> Result<Arc<CudaDevice>, KernelError> {
        let driver = Driver::open(places)?;
        let description = driver.describe(number)?;
        if description.capability < (8, 0) {
            let (major, minor) = description.capability;
            let why = format!("{} has compute capability {major}.{minor}; 8.0 is needed", description.name);
            return Err(DRIVER.error(why));
        }
        let compiler = Compiler::open(places)?;
        let context = Context::open(&driver, number)?;
        context.bound()?;
        let products = CublasLt::open(places)?;
        let programs = Arc::new(Programs::new(compiler, description.architecture()));
        Ok(Arc::new(CudaDevice { number, description, context, programs, products }))
    }

    /// What the card is.
    #[must_use]
    pub fn description(&self) -> &DeviceProperties {
        &self.description
    }
}

impl BackendProvider for CudaDevice {
    fn device(&self) -> Device {
        Device::Cuda(self.number)
    }

    fn backend(&self, settings: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        Ok(Arc::new(Cuda::new(self, settings)?))
    }
}

/// Bytes of each piece of staging memory.
const STAGE_BYTES: usize = 4 << 20;

/// Host memory through which contents come and go: two pieces, so that one is filled while the other is copied.
#[derive(Debug)]
struct Staging {
    pieces: [(Pinned, Option<Event>); 2],
    next: usize,
}

impl Staging {
    fn new(context: &Arc<Context>) -> Result<Staging, KernelError> {
        let piece = || Ok::<_, KernelError>((Pinned::new(context, STAGE_BYTES)?, None));
        Ok(Staging { pieces: [piece()?, piece()?], next: 0 })
    }

    /// A piece of which no copy is under way.
    fn turn(&mut self) -> Result<&mut (Pinned, Option<Event>), KernelError> {
        self.next = 1 - self.next;
        let piece = &mut self.pieces[self.next];
        if let Some(event) = piece.1.take() {
            event.wait()?;
        }
        Ok(piece)
    }
}

/// Words of `Fault` of the prelude: lock and found, index, position, rows.
const FAULT_BYTES: usize = 32;

/// Where kernels note indices that point outside: a place for each kernel that was launched with one.
#[derive(Debug)]
struct Faults {
    noted: Buffer,
    kernels: Vec<&'static str>,
}

impl Faults {
    /// Where the places of all kernels begin.
    fn first(&self) -> u64 {
        self.noted.device_address().expect("faults are noted on the card")
    }

    /// The place of a kernel.
    fn address(&mut self, kernel: &'static str) -> u64 {
        let at = self.kernels.iter().position(|k| *k == kernel).unwrap_or_else(|| {
            self.kernels.push(kernel);
            assert!(self.kernels.len() <= FAULTS_MAX, "bug: more kernels with faults than places for them");
            self.kernels.len() - 1
        });
        self.first() + (at * FAULT_BYTES) as u64
    }
}

/// The fault in a record, if there is one.
fn fault_of(kernel: &'static str, record: &[u8]) -> Option<KernelError> {
    let word = |i: usize| i64::from_le_bytes(record[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    let found = word(0) >> 32 != 0;
    let count = |x: i64| usize::try_from(x).unwrap_or(0);
    found.then(|| KernelError::Index {
        kernel,
        index: word(1),
        position: count(word(2)),
        rows: count(word(3)),
    })
}

/// CapturedGraph work, and what it costs each time.
#[derive(Debug)]
struct Noted {
    captured: CapturedGraph,
    cost: Cost,
}

/// The back end of one rank on a card.
#[derive(Debug)]
struct Cuda {
    planner: Mutex<MatmulPlanner>,
    workspace: Buffer,
    faults: Mutex<Faults>,
    staging: Mutex<Staging>,
    capture_state: CaptureState,
    /// Made with the first of them: a rank alone has none.
    flights: OnceLock<Arc<CommStream>>,
    own: Arc<RankState>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cuda {
    fn new(card: &CudaDevice, settings: BackendConfig) -> Result<Cuda, KernelError> {
        let stream = Stream::new(&card.context)?;
        let chunks = Arc::new(Chunks::of(&card.context));
        let memory = Memory::new(chunks, settings.memory_bytes_max);
        let workspace = memory.alloc(WORKSPACE_BYTES)?;
        let mut noted = memory.alloc(FAULTS_MAX * FAULT_BYTES)?;
        stream.clear(&mut noted)?;
        let own = RankState {
            number: card.number,
            shared_bytes_max: card.description.shared_bytes_max,
            num_threads: settings.num_threads,
            programs: card.programs.clone(),
            cost: Mutex::default(),
            memory,
            stream,
        };
        Ok(Cuda {
            planner: Mutex::new(MatmulPlanner::new(&card.products, settings.precision)),
            workspace,
            faults: Mutex::new(Faults { noted, kernels: Vec::new() }),
            staging: Mutex::new(Staging::new(&card.context)?),
            capture_state: CaptureState::default(),
            flights: OnceLock::new(),
            own: Arc::new(own),
        })
    }

    /// Gives the steps of a launch to the stream.
    fn run(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let unsupported = || KernelError::Unsupported { kernel: kernel.name, device: "cuda" };
        let gpu = kernel.gpu.as_ref().ok_or_else(unsupported)?;
        let mut plan = LaunchPlan::new(self.own.shared_bytes_max);
        (gpu.plan)(launch, &mut plan)?;
        let memory = self.memory_now(launch);
        let scratch = plan.scratch_bytes().iter().map(|&bytes| memory.alloc(bytes));
        let scratch: SmallVec<[Buffer; 4]> = scratch.collect::<Result<_, KernelError>>()?;
        for step in plan.steps() {
            match step {
                Step::Grid(grid) => {
                    let mut faults = locked(&self.faults);
                    let notes = grid.args.contains(&GridArg::Fault);
                    let fault = if notes { faults.address(kernel.name) } else { 0 };
                    let operands = Operands { launch, scratch: &scratch, fault, faults: faults.first() };
                    drop(faults);
                    self.own.programs.launch(&self.own.stream, kernel.name, gpu.source, grid, &operands)?;
                }
                Step::Matmul(product) => {
                    let maker = MatmulRunner {
                        memory: &memory,
                        planner: &self.planner,
                        workspace: &self.workspace,
                        stream: &self.own.stream,
                        run: &|kernel, launch| self.run(kernel, launch),
                    };
                    maker.product(launch, *product)?;
                }
            }
        }
        Ok(())
    }

    /// Where memory for a launch comes from; its operands are kept where it is captured.
    fn memory_now(&self, launch: &Launch<'_>) -> Arc<Memory> {
        let mut capture_state = locked(&self.capture_state);
        let Some(holdings) = capture_state.as_mut() else { return self.own.memory.clone() };
        let read = launch.inputs.iter().map(|x| x.buffer);
        let written = launch.outputs.iter().map(|y| &*y.buffer);
        read.chain(written).for_each(|buffer| holdings.keep(buffer));
        holdings.memory.clone()
    }

    /// Lets what comes next, which reads and writes these buffers, begin behind the flights that it must not meet.
    fn order<'a>(
        &self,
        read: impl Iterator<Item = &'a Buffer>,
        written: impl Iterator<Item = &'a Buffer>,
    ) -> Result<(), KernelError> {
        self.flights.get().map_or(Ok(()), |flights| flights.order(read, written))
    }

    /// Lets what comes next, whatever it uses, begin behind all flights.
    fn wait_all(&self) -> Result<(), KernelError> {
        self.flights.get().map_or(Ok(()), |flights| flights.wait_all())
    }

    /// Refuses what cannot be part of captured work.
    fn not_captured(&self, what: &'static str) -> Result<(), KernelError> {
        if locked(&self.capture_state).is_some() { Err(KernelError::NotCapturable { what }) } else { Ok(()) }
    }

    /// The first index that a kernel found outside since the last look.
    fn check_faults(&self, staging: &mut Staging) -> Result<(), KernelError> {
        let mut faults = locked(&self.faults);
        if faults.kernels.is_empty() {
            return Ok(());
        }
        let mut records = vec![0; faults.kernels.len() * FAULT_BYTES];
        let piece = staging.turn()?;
        self.own.stream.download(&faults.noted, 0, &mut records, &mut piece.0)?;
        let each = faults.kernels.iter().zip(records.chunks(FAULT_BYTES));
        let Some(error) = each.into_iter().find_map(|(kernel, record)| fault_of(kernel, record)) else {
            return Ok(());
        };
        self.own.stream.clear(&mut faults.noted)?;
        Err(error)
    }
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        Device::Cuda(self.own.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let memory = locked(&self.capture_state).as_ref().map(|holdings| holdings.memory.clone());
        memory.as_ref().unwrap_or(&self.own.memory).alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let read = launch.inputs.iter().map(|x| x.buffer);
        self.order(read, launch.outputs.iter().map(|y| &*y.buffer))?;
        self.run(kernel, launch)?;
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

    fn upload(&self, from: &[u8], to: &mut Buffer) -> Result<(), KernelError> {
        self.not_captured("copies from the host")?;
        assert!(to.is_unique(), "bug: a buffer that is written has one handle");
        self.order(iter::empty(), iter::once(&*to))?;
        let mut staging = locked(&self.staging);
        for (i, part) in from.chunks(STAGE_BYTES).enumerate() {
            let (memory, event) = staging.turn()?;
            *event = Some(self.own.stream.upload(part, to, i * STAGE_BYTES, memory)?);
        }
        Ok(())
    }

    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        self.not_captured("copies to the host")?;
        self.order(iter::once(from), iter::empty())?;
        let mut staging = locked(&self.staging);
        for (i, part) in to.chunks_mut(STAGE_BYTES).enumerate() {
            let (memory, _) = staging.turn()?;
            self.own.stream.download(from, i * STAGE_BYTES, part, memory)?;
        }
        self.check_faults(&mut staging)
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        self.not_captured("records an event for other back ends")?;
        self.wait_all()?;
        Ok(SyncEvent::new(Arc::new(self.own.stream.mark()?)))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        self.not_captured("waits for an event of another back end")?;
        event.downcast_ref::<Event>().map_or(Ok(()), |event| self.own.stream.wait(event))
    }

    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        self.not_captured("records an event for other back ends")?;
        let flights = match self.flights.get() {
            Some(flights) => flights,
            None => {
                let fresh = CommStream::new(&self.own)?;
                self.flights.get_or_init(|| fresh)
            }
        };
        flights.begin()?;
        Ok(Some(&**flights))
    }

    fn end_async(&self) -> Result<(), KernelError> {
        self.flights.get().map_or(Ok(()), |flights| flights.end())
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        // CapturedGraph work cannot wait for what is not.
        self.wait_all()?;
        // Nothing of it is done, so that nothing of it has a cost as yet, however it ends.
        let before = std::mem::take(&mut *self.own.cost());
        let noted = || graph::capture(&self.own.stream, &self.own.memory, &self.capture_state, work);
        let captured = catch_unwind(AssertUnwindSafe(noted));
        let cost = std::mem::replace(&mut *self.own.cost(), before);
        let captured = captured.unwrap_or_else(|cause| resume_unwind(cause))?;
        Ok(Graph::new(Arc::new(Noted { captured, cost })))
    }

    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        self.not_captured("replays other work")?;
        self.wait_all()?;
        let Noted { captured, cost } = graph.downcast_ref().expect("bug: a graph of another back end");
        captured.replay(&self.own.stream)?;
        *self.own.cost() += *cost;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.not_captured("waits until all work is done")?;
        self.own.stream.synchronize()?;
        self.flights.get().map_or(Ok(()), |flights| flights.synchronize())?;
        self.check_faults(&mut locked(&self.staging))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_fault_is_read() {
        let words = [1i64 << 32, -3, 7, 10];
        let record: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let error = fault_of("embedding", &record).unwrap();
        assert_eq!(error, KernelError::Index { kernel: "embedding", index: -3, position: 7, rows: 10 });
        assert_eq!(fault_of("embedding", &[0; 32]), None);
    }
}
