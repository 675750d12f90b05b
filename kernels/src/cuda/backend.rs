//! GPUs as back-end providers, and the back end of one rank: its memory, launches, compute stream and graph capture.

use super::comm_stream::{CommStreams, RankState};
use super::compile::Compiler;
use super::cublaslt::{CublasLt, MatmulPlanner, WORKSPACE_BYTES};
use super::driver::{Context, DeviceProperties, Driver, Event, Priority, Stream};
use super::graph::{self, CaptureState, CapturedGraph};
use super::launch::{Operands, Programs};
use super::library::{DRIVER, SearchPaths};
use super::matmul::MatmulRunner;
use super::memory::{CachingAllocator, DriverChunks};
use super::staging::Staging;
use crate::backend::{AsyncStream, AvailableMemory, Backend, Graph, ResultCheck, SyncEvent};
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
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// An open NVIDIA GPU: its context, compiled kernels and libraries, which all ranks on the GPU share.
#[derive(Debug)]
pub struct CudaDevice {
    number: usize,
    properties: DeviceProperties,
    // Dropped before `context`: its handle belongs to the context.
    cublaslt: Arc<CublasLt>,
    programs: Arc<Programs>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Finds the driver, NVRTC and cuBLASLt, and opens a GPU by its number.
    ///
    /// # Errors
    /// [`KernelError::Library`] if a library is missing or too old, with what to install; otherwise the errors of the driver.
    pub fn open(paths: &SearchPaths, number: usize) -> Result<Arc<CudaDevice>, KernelError> {
        let driver = Driver::open(paths)?;
        let properties = driver.describe(number)?;
        if properties.capability < (8, 0) {
            let (major, minor) = properties.capability;
            let why = format!("{} has compute capability {major}.{minor}; 8.0 is needed", properties.name);
            return Err(DRIVER.error(why));
        }
        let compiler = Compiler::open(paths)?;
        let context = Context::open(&driver, number)?;
        context.bound()?;
        let cublaslt = CublasLt::open(paths)?;
        let programs = Arc::new(Programs::new(compiler, properties.architecture()));
        Ok(Arc::new(CudaDevice { number, properties, context, programs, cublaslt }))
    }

    /// Returns name, memory and capabilities of the GPU.
    #[must_use]
    pub fn properties(&self) -> &DeviceProperties {
        &self.properties
    }
}

impl BackendProvider for CudaDevice {
    fn device(&self) -> Device {
        Device::Cuda(self.number)
    }

    fn uuid(&self) -> Option<&str> {
        Some(&self.properties.uuid)
    }

    fn backend(&self, config: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        Ok(Arc::new(Cuda::new(self, config)?))
    }
}

/// Bytes of a `Fault` of the prelude: lock and found, index, position, rows.
const FAULT_BYTES: usize = 32;

/// Device memory in which kernels record indices out of range: one record for each kernel that checks indices.
#[derive(Debug)]
struct Faults {
    records: Buffer,
    kernels: Vec<&'static str>,
}

impl Faults {
    /// Returns the address of the first record.
    fn base(&self) -> u64 {
        self.records.device_address().expect("fault records are device memory")
    }

    /// Returns the address of the record of a kernel, adding one at its first launch.
    fn address(&mut self, kernel: &'static str) -> u64 {
        let at = self.kernels.iter().position(|k| *k == kernel).unwrap_or_else(|| {
            self.kernels.push(kernel);
            assert!(
                self.kernels.len() <= FAULTS_MAX,
                "bug: more kernels check indices than there are fault records"
            );
            self.kernels.len() - 1
        });
        self.base() + (at * FAULT_BYTES) as u64
    }
}

/// Decodes a record; `None` if it is empty.
fn decode_fault(kernel: &'static str, record: &[u8]) -> Option<KernelError> {
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

/// A captured graph, and the cost of one replay.
#[derive(Debug)]
struct CostedGraph {
    captured: CapturedGraph,
    cost: Cost,
}

/// The back end of one rank on a GPU.
#[derive(Debug)]
struct Cuda {
    planner: Mutex<MatmulPlanner>,
    workspace: Buffer,
    faults: Mutex<Faults>,
    staging: Mutex<Staging>,
    capture_state: CaptureState,
    comm_streams: Arc<CommStreams>,
    /// That of [`Backend::set_result_check`].
    result_check: OnceLock<Arc<dyn ResultCheck>>,
    rank: Arc<RankState>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cuda {
    fn new(device: &CudaDevice, config: BackendConfig) -> Result<Cuda, KernelError> {
        let stream = Stream::new(&device.context, Priority::Normal)?;
        let chunks = Arc::new(DriverChunks(device.context.clone()));
        let memory = CachingAllocator::new(chunks, config.memory_bytes_max);
        let workspace = memory.alloc(WORKSPACE_BYTES)?;
        let mut records = memory.alloc(FAULTS_MAX * FAULT_BYTES)?;
        stream.clear(&mut records)?;
        let rank = RankState {
            number: device.number,
            shared_bytes_max: device.properties.shared_bytes_max,
            memory_bytes: match config.memory_bytes_max {
                0 => device.properties.memory_bytes,
                limit => limit,
            },
            has_memory_limit: config.memory_bytes_max != 0,
            uuid: device.properties.uuid.clone(),
            num_threads: config.num_threads,
            programs: device.programs.clone(),
            cost: Mutex::default(),
            memory,
            stream,
            num_releases: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
        };
        let rank = Arc::new(rank);
        Ok(Cuda {
            planner: Mutex::new(MatmulPlanner::new(&device.cublaslt, config.precision)),
            workspace,
            faults: Mutex::new(Faults { records, kernels: Vec::new() }),
            staging: Mutex::new(Staging::new(&device.context)?),
            capture_state: CaptureState::default(),
            comm_streams: CommStreams::new(&rank),
            result_check: OnceLock::new(),
            rank,
        })
    }

    /// Submits the steps of a launch to the compute stream.
    fn run(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let unsupported = || KernelError::Unsupported { kernel: kernel.name, device: "cuda" };
        let gpu = kernel.gpu.as_ref().ok_or_else(unsupported)?;
        let mut plan = LaunchPlan::new(self.rank.shared_bytes_max);
        (gpu.plan)(launch, &mut plan)?;
        let memory = self.launch_allocator(launch);
        let scratch = plan.scratch_bytes().iter().map(|&bytes| memory.alloc(bytes));
        let scratch: SmallVec<[Buffer; 4]> = scratch.collect::<Result<_, KernelError>>()?;
        for step in plan.steps() {
            match step {
                Step::Grid(grid) => {
                    let mut faults = locked(&self.faults);
                    let records_faults = grid.args.contains(&GridArg::Fault);
                    let fault = if records_faults { faults.address(kernel.name) } else { 0 };
                    let operands = Operands { launch, scratch: &scratch, fault, faults: faults.base() };
                    drop(faults);
                    self.rank.programs.launch(&self.rank.stream, kernel.name, gpu.source, grid, &operands)?;
                }
                Step::Matmul(matmul) => {
                    let runner = MatmulRunner {
                        memory: &memory,
                        planner: &self.planner,
                        workspace: &self.workspace,
                        stream: &self.rank.stream,
                        run: &|kernel, launch| self.run(kernel, launch),
                    };
                    runner.run(launch, *matmul)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the allocator for scratch memory of a launch. During capture, it is that of the graph, which retains the operands.
    fn launch_allocator(&self, launch: &Launch<'_>) -> Arc<CachingAllocator> {
        let mut capture_state = locked(&self.capture_state);
        let Some(buffers) = capture_state.as_mut() else { return self.rank.memory.clone() };
        let read = launch.inputs.iter().map(|x| x.buffer);
        let written = launch.outputs.iter().map(|y| &*y.buffer);
        read.chain(written).for_each(|buffer| buffers.retain(buffer));
        buffers.memory.clone()
    }

    /// Returns an error during capture: `what` cannot be part of a graph.
    fn refuse_in_capture(&self, what: &'static str) -> Result<(), KernelError> {
        if locked(&self.capture_state).is_some() { Err(KernelError::NotCapturable { what }) } else { Ok(()) }
    }

    /// Makes the result check. Called after a wait, during which contents may become invalid.
    fn check_results(&self) -> Result<(), KernelError> {
        self.result_check.get().map_or(Ok(()), |result| result.check())
    }

    /// Returns the first index out of range since the last check as an error, and clears the records.
    fn check_faults(&self, staging: &mut Staging) -> Result<(), KernelError> {
        let mut faults = locked(&self.faults);
        if faults.kernels.is_empty() {
            return Ok(());
        }
        let mut records = vec![0; faults.kernels.len() * FAULT_BYTES];
        staging.download(&self.rank.stream, &faults.records, &mut records)?;
        let each = faults.kernels.iter().zip(records.chunks(FAULT_BYTES));
        let Some(error) = each.into_iter().find_map(|(kernel, record)| decode_fault(kernel, record)) else {
            return Ok(());
        };
        self.rank.stream.clear(&mut faults.records)?;
        Err(error)
    }
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        Device::Cuda(self.rank.number)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let memory = locked(&self.capture_state).as_ref().map(|buffers| buffers.memory.clone());
        memory.as_ref().unwrap_or(&self.rank.memory).alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let read = launch.inputs.iter().map(|x| x.buffer);
        self.comm_streams.wait_for_conflicts(read, launch.outputs.iter().map(|y| &*y.buffer))?;
        self.run(kernel, launch)?;
        *self.rank.cost() += kernel.cost(launch);
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        self.rank.memory.stats()
    }

    fn available_memory(&self) -> Option<AvailableMemory> {
        let stats = self.rank.memory.stats();
        if self.rank.has_memory_limit {
            let bytes = self.rank.memory_bytes.saturating_sub(stats.in_use_bytes) as u64;
            return Some(AvailableMemory { bytes, shared_by: None });
        }
        let free = self.rank.stream.context().free_bytes().ok()?;
        let bytes = (free + stats.reserved_bytes.saturating_sub(stats.in_use_bytes)) as u64;
        Some(AvailableMemory { bytes, shared_by: Some(self.rank.uuid.clone()) })
    }

    fn cost(&self) -> Cost {
        *self.rank.cost()
    }

    fn num_threads(&self) -> usize {
        self.rank.num_threads
    }

    fn upload(&self, from: &[u8], to: &mut Buffer) -> Result<(), KernelError> {
        self.refuse_in_capture("copies from the host")?;
        assert!(to.is_unique(), "bug: a buffer that is written has one handle");
        self.comm_streams.wait_for_conflicts(iter::empty(), iter::once(&*to))?;
        locked(&self.staging).upload(&self.rank.stream, from, to)
    }

    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        self.refuse_in_capture("copies to the host")?;
        self.comm_streams.wait_for_conflicts(iter::once(from), iter::empty())?;
        let mut staging = locked(&self.staging);
        staging.download(&self.rank.stream, from, to)?;
        self.check_results()?;
        self.check_faults(&mut staging)
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        self.refuse_in_capture("records an event for other back ends")?;
        self.comm_streams.wait_all()?;
        Ok(SyncEvent::new(Arc::new(self.rank.stream.record_event()?)))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        self.refuse_in_capture("waits for an event of another back end")?;
        event.downcast_ref::<Event>().map_or(Ok(()), |event| self.rank.stream.wait(event))
    }

    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        self.refuse_in_capture("records an event for other back ends")?;
        let comm_stream = self.comm_streams.of_collectives()?;
        comm_stream.begin_now()?;
        Ok(Some(&**comm_stream))
    }

    fn end_async(&self) -> Result<(), KernelError> {
        self.comm_streams.end_collective()
    }

    fn open_stream(&self) -> Result<Option<Arc<dyn AsyncStream>>, KernelError> {
        Ok(Some(self.comm_streams.open()?))
    }

    fn running_async(&self) -> Result<Vec<Option<u64>>, KernelError> {
        self.comm_streams.running()
    }

    fn give_up(&self, call: &'static str, why: String) {
        // The library waits for all work when it is dropped.
        std::mem::forget(locked(&self.planner).library().clone());
        let lost_gpu = Some(self.rank.number);
        self.rank.stream.context().give_up(KernelError::Device { call, why, lost_gpu });
    }

    fn wait_for_writer(&self, buffer: &Buffer) -> Result<(), KernelError> {
        self.comm_streams.wait_for_conflicts(iter::once(buffer), iter::empty())
    }

    fn native_stream(&self) -> Result<Option<usize>, KernelError> {
        self.rank.stream.for_libraries().map(Some)
    }

    fn set_result_check(&self, check: Arc<dyn ResultCheck>) {
        self.result_check.get_or_init(|| check);
    }

    fn capture(
        &self,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
        discard: &mut dyn FnMut(),
    ) -> Result<Graph, KernelError> {
        // Captured work cannot wait for an event of uncaptured work.
        self.comm_streams.wait_all()?;
        // Recording executes nothing, so it has no cost, even if the capture fails.
        let before = std::mem::take(&mut *self.rank.cost());
        let record =
            || graph::capture(&self.rank.stream, &self.rank.memory, &self.capture_state, work, discard);
        let captured = catch_unwind(AssertUnwindSafe(record));
        let cost = std::mem::replace(&mut *self.rank.cost(), before);
        let captured = captured.unwrap_or_else(|cause| resume_unwind(cause))?;
        Ok(Graph::new(Arc::new(CostedGraph { captured, cost })))
    }

    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        self.refuse_in_capture("replays other work")?;
        self.comm_streams.wait_all()?;
        let CostedGraph { captured, cost } = graph.downcast_ref().expect("bug: a graph of another back end");
        captured.replay(&self.rank.stream)?;
        *self.rank.cost() += *cost;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.refuse_in_capture("waits until all work is done")?;
        self.rank.stream.synchronize()?;
        self.comm_streams.synchronize()?;
        self.check_results()?;
        self.check_faults(&mut locked(&self.staging))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_record_is_decoded() {
        let words = [1i64 << 32, -3, 7, 10];
        let record: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let error = decode_fault("embedding", &record).unwrap();
        assert_eq!(error, KernelError::Index { kernel: "embedding", index: -3, position: 7, rows: 10 });
        assert_eq!(decode_fault("embedding", &[0; 32]), None);
    }
}
