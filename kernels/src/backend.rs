//! Where kernels run: the object-safe traits, and the CPU.

use crate::buffer::{Allocator, Buffer, bytes_of, bytes_of_mut};
use crate::cost_counter::CostCounter;
use crate::cpu::Pool;
use crate::cpu::pack_cache::PackCache;
use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Cost, Kernel, Launch};
use crate::precision::MatmulPrecision;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// What a tensor lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory, host threads.
    Cpu,
    /// An NVIDIA card, by the number that its driver gives it.
    Cuda(usize),
    /// No memory and no arithmetic: shapes, bytes and costs only.
    Null,
}

impl Device {
    /// Reads `cpu`, `null`, `cuda:1`, and `cuda` for the first card.
    #[must_use]
    pub fn parse(text: &str) -> Option<Device> {
        match text {
            "cpu" => Some(Device::Cpu),
            "null" => Some(Device::Null),
            "cuda" => Some(Device::Cuda(0)),
            _ => {
                let card = text.strip_prefix("cuda:")?;
                let plain = card.bytes().all(|b| b.is_ascii_digit());
                card.parse().ok().filter(|_| plain).map(Device::Cuda)
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(card) => write!(f, "cuda:{card}"),
            Device::Null => f.write_str("null"),
        }
    }
}

/// A point in the work that was given to a back end. The default is a point that is always behind: a back end that has
/// done its work when a call returns knows no other.
#[derive(Clone, Debug, Default)]
pub struct SyncEvent(Option<Arc<dyn Any + Send + Sync>>);

impl SyncEvent {
    /// A point as its back end knows it.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(point: Arc<T>) -> SyncEvent {
        SyncEvent(Some(point))
    }

    /// Whether nobody needs to wait for it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.is_none()
    }

    /// The point, if it is of this type.
    #[must_use]
    pub fn point<T: Any>(&self) -> Option<&T> {
        self.0.as_ref()?.downcast_ref()
    }
}

/// Work that a back end has noted as a whole, with all the memory that it uses: what it reads and writes is kept with it, whoever
/// else drops it.
#[derive(Clone, Debug)]
pub struct Graph(Arc<dyn Any + Send + Sync>);

impl Graph {
    /// Work as its back end knows it.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(work: Arc<T>) -> Graph {
        Graph(work)
    }

    /// The work, if it is of this type.
    #[must_use]
    pub fn work<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

/// While this lives, a buffer is one that kernels read again and again ([`Backend::reuse`]). The default is a word that nobody heeds.
#[derive(Debug, Default)]
pub struct PackCacheGuard {
    _hold: Option<Box<dyn Any + Send + Sync>>,
}

impl PackCacheGuard {
    /// What ends when it is dropped, as its back end knows it.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(hold: T) -> PackCacheGuard {
        PackCacheGuard { _hold: Some(Box::new(hold)) }
    }
}

/// One device as one rank sees it: its memory and its way to run kernels.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Which device this is.
    fn device(&self) -> Device;

    /// Memory of at least `bytes` bytes with arbitrary contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError>;

    /// Runs a kernel. Every output buffer has one handle. One launch comes after another: a back end is that of one rank.
    ///
    /// # Errors
    /// What the kernel reports.
    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError>;

    /// What is in use now.
    fn memory(&self) -> MemoryStats;

    /// What the launches so far cost.
    fn cost(&self) -> Cost;

    /// How many threads a kernel may use.
    fn num_threads(&self) -> usize;

    /// Copies bytes from the host to the start of a buffer that has one handle. The bytes may change when it returns.
    ///
    /// # Errors
    /// What the device reports.
    fn upload(&self, from: &[u8], to: &mut Buffer) -> Result<(), KernelError> {
        let memory = to.as_mut::<u8>().expect("a buffer that is written has one handle");
        if !memory.is_empty() {
            memory[..from.len()].copy_from_slice(from);
        }
        Ok(())
    }

    /// Copies bytes from the start of a buffer to the host, after all work that was given before. Leaves them as they are
    /// where there is no memory.
    ///
    /// # Errors
    /// What the device reports, errors of earlier launches among it.
    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        let memory = from.as_slice::<u8>();
        if !memory.is_empty() {
            to.copy_from_slice(&memory[..to.len()]);
        }
        Ok(())
    }

    /// The point behind all work that was given so far, for [`Backend::wait`] of others on the same device.
    ///
    /// # Errors
    /// What the device reports.
    fn mark(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::default())
    }

    /// Lets all work that is given from now on begin after a point in the work of another back end. The caller does not
    /// wait.
    ///
    /// # Errors
    /// What the device reports.
    fn wait(&self, mark: &SyncEvent) -> Result<(), KernelError> {
        debug_assert!(mark.is_complete(), "a mark belongs to back ends of one kind");
        Ok(())
    }

    /// Begins a flight: work that is done beside all that is given here, for calls to others. It is given to the back end that
    /// comes back, which has this one's memory and account, and begins behind what was given here before. What is given here
    /// after [`Backend::end_async`] may begin before the flight is done, unless it reads what a flight has taken for itself
    /// ([`Backend::alloc`] there) or writes that or what a flight holds ([`Backend::hold`]). Nothing is given here in between.
    /// `None` where all work is done in one order.
    ///
    /// # Errors
    /// What the device reports; then there is no flight.
    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        Ok(None)
    }

    /// Ends the flight that runs, if one does.
    ///
    /// # Errors
    /// What the device reports.
    fn end_async(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// On the back end of a flight: the flight reads this buffer, or waits for others who do. Until it is done nobody else
    /// writes the buffer or takes its memory.
    fn hold(&self, buffer: &Buffer) {
        let _ = buffer;
    }

    /// Says that kernels will read a buffer several times while what comes back lives: the weights of a step of several
    /// microbatches. The back end holds the buffer so long, so that nobody writes it, and may keep beside it what kernels make of
    /// it: on the CPU, the form in which products pack a right operand, which takes about as much memory as that (in 16-bit floats
    /// twice as much) for each way in which it is read, as it is and turned. That is counted, and given up where memory is short.
    /// Results do not depend on it. Not for what is read once, nor for what is to be updated in place before the end.
    fn reuse(&self, buffer: &Buffer) -> PackCacheGuard {
        let _ = buffer;
        PackCacheGuard::default()
    }

    /// Notes the launches that a function gives, without doing them, for [`Backend::replay`]. Buffers that come out of the
    /// function have contents once that has been called, and keep their addresses; so do those that it reads and writes. Numbers
    /// that are passed by value stay as they are.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where there is no such thing; [`KernelError::Captured`] for work that copies to or from the
    /// host, orders itself with other back ends, waits, or captures; what the function or the device reports, unless somebody
    /// still holds what the function has made until then, which is [`KernelError::CaptureOutputHeld`].
    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        let _ = work;
        Err(KernelError::Unsupported { kernel: "capture", device: "this back end" })
    }

    /// Gives all work of a graph of this back end again, with what is in its buffers now.
    ///
    /// # Errors
    /// What the device reports.
    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        unreachable!("a graph of another back end: {graph:?}")
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// What launches have reported since.
    fn finish(&self) -> Result<(), KernelError> {
        Ok(())
    }
}

/// What a rank asks of its back end.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    /// Host threads that its kernels use, the rank's own among them (0 counts as 1).
    pub num_threads: usize,
    /// Whether these may spin for a while where they wait: all threads of all ranks have cores.
    pub may_spin: bool,
    /// Bytes that it takes from the system at most; 0 for no limit.
    pub memory_bytes_max: usize,
    /// How it forms matrix products of f32.
    pub precision: MatmulPrecision,
    /// The cores on which these threads stay, the rank's own first. Empty: where the system lets them run.
    pub cores: Vec<usize>,
}

impl Default for BackendConfig {
    /// One thread anywhere, which may spin, no limit, the most exact products.
    fn default() -> Self {
        let precision = MatmulPrecision::Highest;
        BackendConfig { num_threads: 1, may_spin: true, cores: Vec::new(), memory_bytes_max: 0, precision }
    }
}

/// What gives each rank of a world a back end of its own.
pub trait BackendProvider: fmt::Debug + Send + Sync {
    /// Which device its back ends are on.
    fn device(&self) -> Device;

    /// A back end.
    ///
    /// # Errors
    /// What the device reports.
    fn backend(&self, settings: BackendConfig) -> Result<Arc<dyn Backend>, KernelError>;
}

/// The processor of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuProvider;

impl BackendProvider for CpuProvider {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let allocator = Allocator::with_limit(settings.memory_bytes_max);
        let BackendConfig { num_threads, may_spin, precision, ref cores, .. } = settings;
        let pool = Pool::placed(num_threads, may_spin, cores).with_precision(precision);
        Ok(Cpu::on(pool, allocator))
    }
}

/// Copies elements from the host into new memory (without contents on the null back end).
///
/// # Errors
/// [`KernelError::OutOfMemory`].
pub fn upload<T: Element>(backend: &dyn Backend, data: &[T]) -> Result<Buffer, KernelError> {
    let mut buffer = backend.alloc(size_of_val(data))?;
    backend.upload(bytes_of(data), &mut buffer)?;
    Ok(buffer)
}

/// Copies elements from the host to the start of a buffer that has one handle (not on the null back end).
///
/// # Errors
/// What the device reports.
pub fn upload_into<T: Element>(
    backend: &dyn Backend,
    data: &[T],
    to: &mut Buffer,
) -> Result<(), KernelError> {
    backend.upload(bytes_of(data), to)
}

/// The first `numel` elements of a buffer on the host (none on the null back end).
///
/// # Errors
/// What the device reports.
pub fn download<T: Element>(
    backend: &dyn Backend,
    buffer: &Buffer,
    numel: usize,
) -> Result<Vec<T>, KernelError> {
    if !buffer.has_memory() {
        return Ok(Vec::new());
    }
    let mut data = vec![T::default(); numel];
    backend.download(buffer, bytes_of_mut(&mut data))?;
    Ok(data)
}

/// The embedded default: host memory, a pool of threads, run-time SIMD detection.
#[derive(Debug)]
pub struct Cpu {
    allocator: Allocator,
    pool: Pool,
    pack_cache: Arc<PackCache>,
    cost: CostCounter,
}

impl Cpu {
    /// A CPU back end whose kernels use `num_threads` threads, the caller's among them (at least 1).
    #[must_use]
    pub fn backend(num_threads: usize) -> Arc<dyn Backend> {
        Cpu::with_allocator(num_threads, Allocator::default())
    }

    /// The same on memory of a given allocator.
    #[must_use]
    pub fn with_allocator(num_threads: usize, allocator: Allocator) -> Arc<dyn Backend> {
        Cpu::on(Pool::new(num_threads), allocator)
    }

    fn on(pool: Pool, allocator: Allocator) -> Arc<dyn Backend> {
        let pack_cache = Arc::new(PackCache::new(allocator.clone()));
        let pool = pool.with_pack_cache(pack_cache.clone());
        Arc::new(Cpu { allocator, pool, pack_cache, cost: CostCounter::default() })
    }

    /// Memory once more after a refusal: what makes products faster is worth less than what the program cannot do without.
    #[cold]
    fn alloc_in_need(&self, bytes: usize, refused: KernelError) -> Result<Buffer, KernelError> {
        if self.pack_cache.evict_all() { self.allocator.alloc(bytes) } else { Err(refused) }
    }
}

impl Backend for Cpu {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        match self.allocator.alloc(bytes) {
            Err(refused) => self.alloc_in_need(bytes, refused),
            taken => taken,
        }
    }

    fn reuse(&self, buffer: &Buffer) -> PackCacheGuard {
        if buffer.has_memory() {
            PackCacheGuard::new(self.pack_cache.hold(buffer))
        } else {
            PackCacheGuard::default()
        }
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        debug_assert!(
            launch.inputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size())
                && launch.outputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size()),
            "{}: a view reaches outside of its buffer",
            kernel.name
        );
        self.cost.add(kernel.cost(launch));
        kernel.cpu.unwrap_or(kernel.reference)(&self.pool, launch)
    }

    fn memory(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn cost(&self) -> Cost {
        self.cost.sum()
    }

    fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::{Arg, ArgMut};
    use crate::op::batched_matmul::BATCHED_MATMUL;
    use crate::strides::Strides;

    #[test]
    fn devices_are_shown_and_read() {
        for (text, device) in [("cpu", Device::Cpu), ("null", Device::Null), ("cuda:3", Device::Cuda(3))] {
            assert_eq!((Device::parse(text), &*device.to_string()), (Some(device), text));
        }
        assert_eq!(Device::parse("cuda"), Some(Device::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda1", "CPU"] {
            assert_eq!(Device::parse(text), None, "{text}");
        }
    }

    /// 64 rows by a weight of 100 rows and 300 columns.
    fn product(cpu: &dyn Backend, x: &Buffer, weight: &Buffer) -> Vec<f32> {
        let mut y = cpu.alloc(64 * 300 * 4).unwrap();
        let [a, b, c] =
            [[64, 100], [100, 300], [64, 300]].map(|[rows, cols]| Strides::contiguous(&[1, rows, cols]));
        let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
        let inputs = [arg(x, &a), arg(weight, &b)];
        let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &c }];
        cpu.launch(&BATCHED_MATMUL, &mut Launch { inputs: &inputs, outputs, scalars: &[] }).unwrap();
        download(cpu, &y, 64 * 300).unwrap()
    }

    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed) % 1000) as f32 - 500.0).collect()
    }

    #[test]
    fn what_is_reused_is_packed_once_and_updated_after() {
        let cpu = Cpu::backend(2);
        let x = upload(&*cpu, &numbers(1, 64 * 100)).unwrap();
        let mut weight = upload(&*cpu, &numbers(2, 100 * 300)).unwrap();
        let in_use = || cpu.memory().in_use_bytes;
        let (right, before) = (product(&*cpu, &x, &weight), in_use());
        for seed in [3, 4] {
            let reuse = cpu.reuse(&weight);
            assert_eq!(in_use(), before, "nothing is kept before a product needs it");
            assert!(!weight.is_unique(), "nobody else writes it");
            let first = product(&*cpu, &x, &weight);
            let with_form = in_use();
            assert!(with_form >= before + 100 * 304 * 4);
            assert!(product(&*cpu, &x, &weight) == first && in_use() == with_form);
            drop(reuse);
            assert_eq!(in_use(), before);
            cpu.upload(bytes_of(&numbers(seed, 100 * 300)), &mut weight).unwrap();
            assert!(product(&*cpu, &x, &weight) != first, "it is another weight now");
        }
        cpu.upload(bytes_of(&numbers(2, 100 * 300)), &mut weight).unwrap();
        let _reuse = cpu.reuse(&weight);
        assert!(product(&*cpu, &x, &weight) == right);
    }

    #[test]
    fn what_is_kept_gives_way_to_what_is_needed() {
        let (limit, form) = (1 << 20, 100 * 304 * 4);
        let cpu = Cpu::with_allocator(1, Allocator::with_limit(limit));
        let x = upload(&*cpu, &numbers(1, 64 * 100)).unwrap();
        let weight = upload(&*cpu, &numbers(2, 100 * 300)).unwrap();
        let in_use = || cpu.memory().in_use_bytes;
        let (right, before) = (product(&*cpu, &x, &weight), in_use());
        let reuse = cpu.reuse(&weight);
        assert!(product(&*cpu, &x, &weight) == right && in_use() >= before + form);
        let needed = cpu.alloc(limit - in_use() + form / 4).expect("there is as much without the form");
        let after = in_use();
        assert!(after < before + needed.bytes() + form, "it was given up");
        assert!(product(&*cpu, &x, &weight) == right && in_use() == after);
        drop(reuse);
        let _reuse = cpu.reuse(&weight);
        assert!(
            product(&*cpu, &x, &weight) == right && in_use() == after,
            "what is refused is packed as ever"
        );
        drop(needed);
        assert!(product(&*cpu, &x, &weight) == right && in_use() == before, "nor kept later");
    }

    #[test]
    fn elements_go_in_and_out() {
        let cpu = Cpu::backend(1);
        let buffer = upload(&*cpu, &[1.5f32, -2.0, 7.0]).unwrap();
        assert_eq!(download::<f32>(&*cpu, &buffer, 2).unwrap(), [1.5, -2.0]);
        assert_eq!(download::<f32>(&*cpu, &Buffer::without_memory(8), 2).unwrap(), []);
        assert!(cpu.mark().unwrap().is_complete());
    }
}
