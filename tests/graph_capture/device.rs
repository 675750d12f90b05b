//! A test device: the CPU behind device addresses, with graph capture and replay. Freed blocks are overwritten and reused at the same
//! addresses, unless a captured graph uses them.

use shardgrad::kernels::buffer::DeviceAllocator;
use shardgrad::kernels::{
    Arg, ArgMut, Backend, BackendConfig, BackendProvider, Buffer, Cost, Cpu, DType, Device, Graph, Kernel,
    KernelError, Launch, MemoryStats, Scalar, Strides, SyncEvent,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A call of the host to the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DeviceCall {
    Launch,
    Replay,
    Upload,
    /// The host synchronized.
    Download,
}

/// The device, with counts of completed captures and replays.
#[derive(Clone, Debug, Default)]
pub(super) struct CapturingDevice {
    counts: Arc<[AtomicUsize; 2]>,
    calls: Arc<Mutex<Vec<DeviceCall>>>,
    /// Number of captures to fail, and the kernel whose launch fails.
    failing_captures: (Arc<AtomicUsize>, &'static str),
    /// The replay to fail, counted from 1.
    failing_replay: Option<usize>,
}

impl CapturingDevice {
    /// A device that fails the first `count` captures at a kernel launch.
    pub(super) fn failing_capture(count: usize, kernel: &'static str) -> CapturingDevice {
        CapturingDevice { failing_captures: (Arc::new(count.into()), kernel), ..CapturingDevice::default() }
    }

    /// A device on which one replay fails.
    pub(super) fn failing_replay(number: usize) -> CapturingDevice {
        CapturingDevice { failing_replay: Some(number), ..CapturingDevice::default() }
    }

    /// Takes the calls since the last call.
    pub(super) fn take_calls(&self) -> Vec<DeviceCall> {
        std::mem::take(&mut *lock(&self.calls))
    }

    pub(super) fn num_captures(&self) -> usize {
        self.counts[0].load(Ordering::Relaxed)
    }

    pub(super) fn num_replays(&self) -> usize {
        self.counts[1].load(Ordering::Relaxed)
    }
}

impl BackendProvider for CapturingDevice {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn backend(&self, _: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let host = Cpu::backend(1);
        let memory = Arc::new(DeviceMemory { host: host.clone(), blocks: Mutex::default() });
        let (device, capture) = (self.clone(), Mutex::default());
        Ok(Arc::new(CapturingBackend { host, memory, device, capture }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device memory by address.
#[derive(Debug)]
struct DeviceMemory {
    host: Arc<dyn Backend>,
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    contents: HashMap<u64, Buffer>,
    /// Free addresses by size, last freed at the end.
    free: HashMap<usize, Vec<u64>>,
    /// Blocks with a live handle.
    live: HashMap<u64, usize>,
    /// Number of graphs that use a block.
    graph_uses: HashMap<u64, usize>,
    next: u64,
}

/// Fills a block with junk.
fn overwrite(host: &dyn Backend, contents: &mut Buffer) {
    let junk = vec![0xff; contents.bytes()];
    host.upload(&junk, contents).unwrap();
}

impl DeviceMemory {
    fn alloc(self: &Arc<DeviceMemory>, bytes: usize) -> Result<Buffer, KernelError> {
        let mut blocks = lock(&self.blocks);
        let address = match blocks.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(address) => address,
            None => {
                let mut contents = self.host.alloc(bytes)?;
                overwrite(&*self.host, &mut contents);
                blocks.next += 512 + bytes as u64;
                let address = blocks.next;
                blocks.contents.insert(address, contents);
                address
            }
        };
        blocks.live.insert(address, bytes);
        Ok(Buffer::on_device(address, bytes, self.clone()))
    }

    fn release(&self, address: u64) {
        let mut blocks = lock(&self.blocks);
        let count = blocks.graph_uses.get_mut(&address).unwrap();
        *count -= 1;
        if *count == 0 {
            blocks.graph_uses.remove(&address);
            blocks.free_if_unused(&*self.host, address);
        }
    }
}

impl Blocks {
    fn free_if_unused(&mut self, host: &dyn Backend, address: u64) {
        if !self.graph_uses.contains_key(&address) && !self.live.contains_key(&address) {
            let contents = self.contents.get_mut(&address).unwrap();
            overwrite(host, contents);
            let bytes = contents.bytes();
            self.free.entry(bytes).or_default().push(address);
        }
    }

    fn run(&mut self, host: &dyn Backend, recorded: &RecordedLaunch) -> Result<(), KernelError> {
        let read: Vec<Buffer> = recorded.inputs.iter().map(|x| self.contents[&x.address].clone()).collect();
        let mut written: Vec<Buffer> = recorded
            .outputs
            .iter()
            .map(|y| self.contents.remove(&y.address).expect("written once"))
            .collect();
        let inputs: Vec<Arg<'_>> = (recorded.inputs.iter().zip(&read))
            .map(|(x, buffer)| Arg { buffer, dtype: x.dtype, view: &x.view })
            .collect();
        let mut outputs: Vec<ArgMut<'_>> = (recorded.outputs.iter().zip(&mut written))
            .map(|(y, buffer)| ArgMut { buffer, dtype: y.dtype, view: &y.view })
            .collect();
        let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &recorded.scalars };
        let result = host.launch(&recorded.kernel, &mut launch);
        for (y, contents) in recorded.outputs.iter().zip(written) {
            self.contents.insert(y.address, contents);
        }
        result
    }
}

impl DeviceAllocator for DeviceMemory {
    fn give_back(&self, address: u64) {
        let mut blocks = lock(&self.blocks);
        blocks.live.remove(&address);
        blocks.free_if_unused(&*self.host, address);
    }
}

/// An operand by address.
#[derive(Debug)]
struct Operand {
    address: u64,
    dtype: DType,
    view: Strides,
}

/// A recorded launch.
#[derive(Debug)]
struct RecordedLaunch {
    kernel: Kernel,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    scalars: Vec<Scalar>,
}

impl RecordedLaunch {
    fn of(kernel: &Kernel, launch: &mut Launch<'_>) -> RecordedLaunch {
        let Kernel { name, reference, cpu, flops, bytes, bound, .. } = *kernel;
        let at = |buffer: &Buffer| buffer.device_address().expect("memory of this device");
        let input = |x: &Arg<'_>| Operand { address: at(x.buffer), dtype: x.dtype, view: x.view.clone() };
        let output = |y: &mut ArgMut<'_>| {
            assert!(y.buffer.is_unique(), "an output has one handle");
            Operand { address: at(y.buffer), dtype: y.dtype, view: y.view.clone() }
        };
        RecordedLaunch {
            kernel: Kernel { name, reference, cpu, gpu: None, flops, bytes, bound },
            inputs: launch.inputs.iter().map(input).collect(),
            scalars: launch.scalars.to_vec(),
            outputs: launch.outputs.iter_mut().map(output).collect(),
        }
    }
}

/// A captured graph; its blocks are not reused.
#[derive(Debug)]
struct CapturedGraph {
    memory: Arc<DeviceMemory>,
    launches: Vec<RecordedLaunch>,
    used: Vec<u64>,
    /// Blocks allocated during the capture.
    own: Vec<u64>,
}

impl CapturedGraph {
    fn keep(&mut self, address: u64) {
        *lock(&self.memory.blocks).graph_uses.entry(address).or_default() += 1;
        self.used.push(address);
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.used.iter().for_each(|address| self.memory.release(*address));
    }
}

#[derive(Debug)]
struct CapturingBackend {
    host: Arc<dyn Backend>,
    memory: Arc<DeviceMemory>,
    device: CapturingDevice,
    capture: Mutex<Option<CapturedGraph>>,
}

impl CapturingBackend {
    fn record(&self, call: DeviceCall) {
        lock(&self.device.calls).push(call);
    }

    fn not_captured(&self, what: &'static str) -> Result<(), KernelError> {
        if lock(&self.capture).is_some() { Err(KernelError::NotCapturable { what }) } else { Ok(()) }
    }
}

impl Backend for CapturingBackend {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.memory.alloc(bytes)?;
        if let Some(captured) = &mut *lock(&self.capture) {
            let address = buffer.device_address().unwrap();
            captured.own.push(address);
            captured.keep(address);
        }
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let recorded = RecordedLaunch::of(kernel, launch);
        let mut capture = lock(&self.capture);
        let Some(captured) = &mut *capture else {
            self.record(DeviceCall::Launch);
            return lock(&self.memory.blocks).run(&*self.host, &recorded);
        };
        let used: Vec<u64> = recorded.inputs.iter().chain(&recorded.outputs).map(|x| x.address).collect();
        used.into_iter().for_each(|address| captured.keep(address));
        captured.launches.push(recorded);
        let (failing_captures, at) = &self.device.failing_captures;
        let fails = kernel.name == *at
            && failing_captures
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                .is_ok();
        let error = || KernelError::Device { call: "launch", why: "not now".into(), lost_gpu: None };
        if fails { Err(error()) } else { Ok(()) }
    }

    fn memory(&self) -> MemoryStats {
        self.host.memory()
    }

    fn cost(&self) -> Cost {
        self.host.cost()
    }

    fn num_threads(&self) -> usize {
        1
    }

    fn upload(&self, from: &[u8], to: &mut Buffer) -> Result<(), KernelError> {
        self.not_captured("copies from the host")?;
        self.record(DeviceCall::Upload);
        assert!(to.is_unique(), "a buffer that is written has one handle");
        let address = to.device_address().unwrap();
        self.host.upload(from, lock(&self.memory.blocks).contents.get_mut(&address).unwrap())
    }

    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        self.not_captured("copies to the host")?;
        self.record(DeviceCall::Download);
        self.host.download(&lock(&self.memory.blocks).contents[&from.device_address().unwrap()], to)
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        self.not_captured("records an event for other back ends")?;
        Ok(SyncEvent::default())
    }

    fn capture(
        &self,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
        _: &mut dyn FnMut(),
    ) -> Result<Graph, KernelError> {
        self.not_captured("captures other work")?;
        let (launches, used, own) = (Vec::new(), Vec::new(), Vec::new());
        *lock(&self.capture) = Some(CapturedGraph { memory: self.memory.clone(), launches, used, own });
        let done = work();
        let captured = lock(&self.capture).take().unwrap();
        if let Err(error) = done {
            let blocks = lock(&self.memory.blocks);
            let bytes = captured.own.iter().filter_map(|address| blocks.live.get(address)).sum();
            drop(blocks);
            return Err(if bytes > 0 { KernelError::CaptureOutputHeld { bytes } } else { error });
        }
        self.device.counts[0].fetch_add(1, Ordering::Relaxed);
        Ok(Graph::new(Arc::new(captured)))
    }

    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        let number = self.device.counts[1].fetch_add(1, Ordering::Relaxed) + 1;
        self.record(DeviceCall::Replay);
        if self.device.failing_replay == Some(number) {
            return Err(KernelError::Device { call: "replay", why: "not now".into(), lost_gpu: None });
        }
        let captured: &CapturedGraph = graph.downcast_ref().expect("a graph of this device");
        let mut blocks = lock(&self.memory.blocks);
        captured.launches.iter().try_for_each(|launch| blocks.run(&*self.host, launch))
    }
}
