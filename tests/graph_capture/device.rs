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

/// A host request to the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Asked {
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
    asked: Arc<Mutex<Vec<Asked>>>,
    /// Number of captures to fail, and the kernel whose launch fails.
    refusals: (Arc<AtomicUsize>, &'static str),
    /// The replay to fail, counted from 1.
    failing: Option<usize>,
}

impl CapturingDevice {
    /// A device that fails the first `count` captures at a kernel launch.
    pub(super) fn refusing(count: usize, kernel: &'static str) -> CapturingDevice {
        CapturingDevice { refusals: (Arc::new(count.into()), kernel), ..CapturingDevice::default() }
    }

    /// A device on which one replay fails.
    pub(super) fn failing(number: usize) -> CapturingDevice {
        CapturingDevice { failing: Some(number), ..CapturingDevice::default() }
    }

    /// Takes the requests since the last call.
    pub(super) fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *locked(&self.asked))
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
        let store = Arc::new(Store { host: host.clone(), books: Mutex::default() });
        let (device, noting) = (self.clone(), Mutex::default());
        Ok(Arc::new(OneRank { host, store, device, noting }))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device memory by address.
#[derive(Debug)]
struct Store {
    host: Arc<dyn Backend>,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    contents: HashMap<u64, Buffer>,
    /// Free addresses by size, last freed at the end.
    free: HashMap<usize, Vec<u64>>,
    /// Blocks with a live handle.
    held: HashMap<u64, usize>,
    /// Number of graphs that use a block.
    kept: HashMap<u64, usize>,
    next: u64,
}

/// Fills a block with junk.
fn overwrite(host: &dyn Backend, contents: &mut Buffer) {
    let junk = vec![0xff; contents.bytes()];
    host.upload(&junk, contents).unwrap();
}

impl Store {
    fn alloc(self: &Arc<Store>, bytes: usize) -> Result<Buffer, KernelError> {
        let mut books = locked(&self.books);
        let address = match books.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(address) => address,
            None => {
                let mut contents = self.host.alloc(bytes)?;
                overwrite(&*self.host, &mut contents);
                books.next += 512 + bytes as u64;
                let address = books.next;
                books.contents.insert(address, contents);
                address
            }
        };
        books.held.insert(address, bytes);
        Ok(Buffer::on_device(address, bytes, self.clone()))
    }

    fn release(&self, address: u64) {
        let mut books = locked(&self.books);
        let count = books.kept.get_mut(&address).unwrap();
        *count -= 1;
        if *count == 0 {
            books.kept.remove(&address);
            books.free_if_unused(&*self.host, address);
        }
    }
}

impl Books {
    fn free_if_unused(&mut self, host: &dyn Backend, address: u64) {
        if !self.kept.contains_key(&address) && !self.held.contains_key(&address) {
            let contents = self.contents.get_mut(&address).unwrap();
            overwrite(host, contents);
            let bytes = contents.bytes();
            self.free.entry(bytes).or_default().push(address);
        }
    }

    fn run(&mut self, host: &dyn Backend, noted: &Noted) -> Result<(), KernelError> {
        let read: Vec<Buffer> = noted.inputs.iter().map(|x| self.contents[&x.address].clone()).collect();
        let mut written: Vec<Buffer> =
            noted.outputs.iter().map(|y| self.contents.remove(&y.address).expect("written once")).collect();
        let inputs: Vec<Arg<'_>> = (noted.inputs.iter().zip(&read))
            .map(|(x, buffer)| Arg { buffer, dtype: x.dtype, view: &x.view })
            .collect();
        let mut outputs: Vec<ArgMut<'_>> = (noted.outputs.iter().zip(&mut written))
            .map(|(y, buffer)| ArgMut { buffer, dtype: y.dtype, view: &y.view })
            .collect();
        let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &noted.scalars };
        let done = host.launch(&noted.kernel, &mut launch);
        for (y, contents) in noted.outputs.iter().zip(written) {
            self.contents.insert(y.address, contents);
        }
        done
    }
}

impl DeviceAllocator for Store {
    fn give_back(&self, address: u64) {
        let mut books = locked(&self.books);
        books.held.remove(&address);
        books.free_if_unused(&*self.host, address);
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
struct Noted {
    kernel: Kernel,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    scalars: Vec<Scalar>,
}

impl Noted {
    fn of(kernel: &Kernel, launch: &mut Launch<'_>) -> Noted {
        let Kernel { name, reference, cpu, flops, bytes, bound, .. } = *kernel;
        let at = |buffer: &Buffer| buffer.device_address().expect("memory of this device");
        let input = |x: &Arg<'_>| Operand { address: at(x.buffer), dtype: x.dtype, view: x.view.clone() };
        let output = |y: &mut ArgMut<'_>| {
            assert!(y.buffer.is_unique(), "an output has one handle");
            Operand { address: at(y.buffer), dtype: y.dtype, view: y.view.clone() }
        };
        Noted {
            kernel: Kernel { name, reference, cpu, gpu: None, flops, bytes, bound },
            inputs: launch.inputs.iter().map(input).collect(),
            scalars: launch.scalars.to_vec(),
            outputs: launch.outputs.iter_mut().map(output).collect(),
        }
    }
}

/// A captured graph; its blocks are not reused.
#[derive(Debug)]
struct Work {
    store: Arc<Store>,
    launches: Vec<Noted>,
    kept: Vec<u64>,
    /// Blocks allocated during the capture.
    own: Vec<u64>,
}

impl Work {
    fn keep(&mut self, address: u64) {
        *locked(&self.store.books).kept.entry(address).or_default() += 1;
        self.kept.push(address);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.kept.iter().for_each(|address| self.store.release(*address));
    }
}

#[derive(Debug)]
struct OneRank {
    host: Arc<dyn Backend>,
    store: Arc<Store>,
    device: CapturingDevice,
    noting: Mutex<Option<Work>>,
}

impl OneRank {
    fn note(&self, asked: Asked) {
        locked(&self.device.asked).push(asked);
    }

    fn not_captured(&self, what: &'static str) -> Result<(), KernelError> {
        if locked(&self.noting).is_some() { Err(KernelError::NotCapturable { what }) } else { Ok(()) }
    }
}

impl Backend for OneRank {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.store.alloc(bytes)?;
        if let Some(work) = &mut *locked(&self.noting) {
            let address = buffer.device_address().unwrap();
            work.own.push(address);
            work.keep(address);
        }
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        let noted = Noted::of(kernel, launch);
        let mut noting = locked(&self.noting);
        let Some(work) = &mut *noting else {
            self.note(Asked::Launch);
            return locked(&self.store.books).run(&*self.host, &noted);
        };
        let used: Vec<u64> = noted.inputs.iter().chain(&noted.outputs).map(|x| x.address).collect();
        used.into_iter().for_each(|address| work.keep(address));
        work.launches.push(noted);
        let (refusals, at) = &self.device.refusals;
        let refuses = kernel.name == *at
            && refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
        let error = || KernelError::Device { call: "launch", why: "not now".into(), is_permanent: false };
        if refuses { Err(error()) } else { Ok(()) }
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
        self.note(Asked::Upload);
        assert!(to.is_unique(), "a buffer that is written has one handle");
        let address = to.device_address().unwrap();
        self.host.upload(from, locked(&self.store.books).contents.get_mut(&address).unwrap())
    }

    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        self.not_captured("copies to the host")?;
        self.note(Asked::Download);
        self.host.download(&locked(&self.store.books).contents[&from.device_address().unwrap()], to)
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        self.not_captured("records an event for other back ends")?;
        Ok(SyncEvent::default())
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        self.not_captured("captures other work")?;
        let (launches, kept, own) = (Vec::new(), Vec::new(), Vec::new());
        *locked(&self.noting) = Some(Work { store: self.store.clone(), launches, kept, own });
        let done = work();
        let noted = locked(&self.noting).take().unwrap();
        if let Err(error) = done {
            let books = locked(&self.store.books);
            let bytes = noted.own.iter().filter_map(|address| books.held.get(address)).sum();
            drop(books);
            return Err(if bytes > 0 { KernelError::CaptureOutputHeld { bytes } } else { error });
        }
        self.device.counts[0].fetch_add(1, Ordering::Relaxed);
        Ok(Graph::new(Arc::new(noted)))
    }

    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        let number = self.device.counts[1].fetch_add(1, Ordering::Relaxed) + 1;
        self.note(Asked::Replay);
        if self.device.failing == Some(number) {
            return Err(KernelError::Device { call: "replay", why: "not now".into(), is_permanent: false });
        }
        let work: &Work = graph.downcast_ref().expect("a graph of this device");
        let mut books = locked(&self.store.books);
        work.launches.iter().try_for_each(|launch| books.run(&*self.host, launch))
    }
}
