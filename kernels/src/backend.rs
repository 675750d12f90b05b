//! The [`Backend`] trait: one device as one rank sees it, with its memory, launches, events, async work and graph capture.

use crate::buffer::{Buffer, bytes_of, bytes_of_mut};
use crate::cost::Cost;
use crate::device::Device;
use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::host_vec::try_zeroed;
use crate::kernel::{Kernel, Launch};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A recorded point in the work of a back end, as a CUDA event ([`Backend::record_event`]). The default event is always complete:
/// synchronous back ends return no other.
#[doc(alias = "CUDA event")]
#[derive(Clone, Debug, Default)]
pub struct SyncEvent(Option<Arc<dyn Any + Send + Sync>>);

impl SyncEvent {
    /// Wraps the event type of a back end.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(event: Arc<T>) -> SyncEvent {
        SyncEvent(Some(event))
    }

    /// Returns whether waiting for the event is never necessary.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the back end's event if its type is `T`.
    #[must_use]
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        self.0.as_ref()?.downcast_ref()
    }
}

/// Captured work of a back end, as a CUDA graph ([`Backend::capture`]). The graph keeps every buffer that the work reads or writes
/// alive.
#[doc(alias = "CUDA graph")]
#[derive(Clone, Debug)]
pub struct Graph(Arc<dyn Any + Send + Sync>);

impl Graph {
    /// Wraps the graph type of a back end.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(graph: Arc<T>) -> Graph {
        Graph(graph)
    }

    /// Returns the back end's graph if its type is `T`.
    #[must_use]
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

/// Keeps the packed forms of a buffer in the pack cache until dropped ([`Backend::cache_packed`]). The default guard does nothing.
#[doc(alias = "prepack")]
#[derive(Debug, Default)]
pub struct PackCacheGuard {
    _guard: Option<Box<dyn Any + Send + Sync>>,
}

impl PackCacheGuard {
    /// Wraps the guard type of a back end, whose drop ends the caching.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(guard: T) -> PackCacheGuard {
        PackCacheGuard { _guard: Some(Box::new(guard)) }
    }
}

/// Memory that a rank can still take from its device ([`Backend::available_memory`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// The bytes.
    pub bytes: u64,
    /// A text that ranks have in common if they share these bytes: that of a host or of a GPU. `None` if they are the rank's own.
    pub shared_by: Option<String>,
}

/// One device as one rank sees it: allocates its memory and launches its kernels.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns the device.
    fn device(&self) -> Device;

    /// Allocates at least `bytes` bytes with arbitrary contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError>;

    /// Launches a kernel. Every output buffer has exactly one handle. Launches are sequential: one rank owns the back end.
    ///
    /// # Errors
    /// The error that the kernel reports.
    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError>;

    /// Returns the memory in use.
    fn memory(&self) -> MemoryStats;

    /// Returns the memory that this rank can still take, now: what its limit leaves, or else the free memory of the device. `None` if that
    /// is unknown, and on the null back end.
    fn available_memory(&self) -> Option<AvailableMemory> {
        None
    }

    /// Returns the summed cost of all launches so far.
    fn cost(&self) -> Cost;

    /// Returns how many threads a kernel may use.
    fn num_threads(&self) -> usize;

    /// Copies bytes from the host to the start of a buffer that has one handle. `from` may be overwritten once the call returns.
    ///
    /// # Errors
    /// An error of the device.
    fn upload(&self, from: &[u8], to: &mut Buffer) -> Result<(), KernelError> {
        let memory = to.as_mut::<u8>().expect("a buffer that is written has one handle");
        if !memory.is_empty() {
            memory[..from.len()].copy_from_slice(from);
        }
        Ok(())
    }

    /// Copies bytes from the start of a buffer to the host, after all earlier work. Leaves `to` unchanged if the buffer has no memory.
    ///
    /// # Errors
    /// An error of the device, errors of earlier launches included.
    fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<(), KernelError> {
        let memory = from.as_slice::<u8>();
        if !memory.is_empty() {
            to.copy_from_slice(&memory[..to.len()]);
        }
        Ok(())
    }

    /// Records an event after all work submitted so far, for [`Backend::wait_event`] of other back ends on the same device.
    ///
    /// # Errors
    /// An error of the device.
    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::default())
    }

    /// Makes all work submitted from now on wait for an event of another back end. The calling thread does not wait.
    ///
    /// # Errors
    /// An error of the device.
    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        debug_assert!(event.is_complete(), "an event belongs to back ends of one kind");
        Ok(())
    }

    /// Begins async work on the communication stream, which overlaps with work of this back end. Returns the back end to submit the
    /// async work to, or `None` if the device has one stream only. Nothing is submitted to this back end before [`Backend::end_async`].
    ///
    /// The async work starts after all work submitted here before, and shares memory and cost counter with this back end. Work that is
    /// submitted here after [`Backend::end_async`] may start before the async work completes, unless it reads or writes a buffer that was
    /// allocated ([`Backend::alloc`]) on the async back end, or writes a buffer recorded there by [`Backend::record_stream`].
    ///
    /// # Errors
    /// An error of the device; then no async work has begun.
    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        Ok(None)
    }

    /// Ends the submission of async work, if any has begun.
    ///
    /// # Errors
    /// An error of the device.
    fn end_async(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// On the async back end: records that the async work reads this buffer, or waits for peers that read it, as PyTorch's
    /// `Tensor.record_stream`. Until the async work completes, the buffer is neither written nor is its memory allocated again.
    fn record_stream(&self, buffer: &Buffer) {
        let _ = buffer;
    }

    /// Opens a stream for async work that is ordered with no other async work, such as the messages from one rank to another. `None` if the
    /// device has one stream only.
    ///
    /// # Errors
    /// An error of the device.
    fn open_stream(&self) -> Result<Option<Arc<dyn AsyncStream>>, KernelError> {
        Ok(None)
    }

    /// Returns for each stream of async work, that of [`Backend::begin_async`] first, the number of the operation that runs now: the event
    /// after which it begins has occurred, and it is not done. The operations of a stream count from 1. Any thread may call this, and only
    /// operations that begin after the first call are seen.
    ///
    /// # Errors
    /// An error of the device.
    fn running_async(&self) -> Result<Vec<Option<u64>>, KernelError> {
        Ok(Vec::new())
    }

    /// Gives up the device, on which work never ends, such as an operation between ranks that a library cannot abort. Every wait of the host
    /// for this device ends with an error of the call and its reason, and so does every later use of the device by this process. Any thread
    /// may call this. Waits end only if [`Backend::running_async`] was called before.
    fn give_up(&self, call: &'static str, why: String) {
        let _ = (call, why);
    }

    /// Makes later work here, and async work begun later, wait for the async work that writes a buffer.
    ///
    /// # Errors
    /// An error of the device.
    fn wait_for_writer(&self, buffer: &Buffer) -> Result<(), KernelError> {
        let _ = buffer;
        Ok(())
    }

    /// Returns the stream of this back end, for a library that submits work to it, as the handle of its driver, after making the device
    /// current on the calling thread. `None` if the device has no streams.
    ///
    /// # Errors
    /// An error of the device.
    fn native_stream(&self) -> Result<Option<usize>, KernelError> {
        Ok(None)
    }

    /// Sets a check that every copy to the host and every wait for all work makes once the work is done, before the caller gets
    /// contents or success; its error is theirs. For contents that are valid only if other ranks agree and no work was aborted. The first
    /// check stays.
    fn set_result_check(&self, check: Arc<dyn ResultCheck>) {
        let _ = check;
    }

    /// Caches the packed forms of a matrix product operand while the returned guard lives: for weights that a step of several
    /// microbatches reads several times.
    ///
    /// The back end holds a handle of the buffer, so that nothing writes it. On the CPU, matrix products pack a right operand into
    /// panels; the pack cache keeps one packed form of the buffer for each view in which it is read (plain, transposed). A form takes
    /// about as much memory as the buffer (twice as much for 16-bit floats), is counted as in use, and is evicted when memory runs out.
    /// Results do not depend on the cache. Not worthwhile for a buffer that is read once, nor possible for a buffer that is updated in
    /// place while the guard lives.
    fn cache_packed(&self, buffer: &Buffer) -> PackCacheGuard {
        let _ = buffer;
        PackCacheGuard::default()
    }

    /// Captures the launches of a function into a graph, without running them, for [`Backend::replay`]. Buffers that the function
    /// allocates have contents after the first replay. All buffers keep their addresses; scalars passed by value keep their values.
    /// `discard` drops what the function made; it runs if the capture fails after the function has succeeded.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if the back end has no graph capture; [`KernelError::NotCapturable`] for work that copies to or
    /// from the host, synchronizes with other back ends or with the host, or captures; an error of the function or of the device,
    /// except that [`KernelError::CaptureOutputHeld`] replaces such an error if a buffer that the function allocated is still held.
    fn capture(
        &self,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
        discard: &mut dyn FnMut(),
    ) -> Result<Graph, KernelError> {
        let _ = (work, discard);
        Err(KernelError::Unsupported { kernel: "capture", device: "this back end" })
    }

    /// Submits all work of a graph of this back end again, with the current contents of its buffers.
    ///
    /// # Errors
    /// An error of the device.
    fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        unreachable!("a graph of another back end: {graph:?}")
    }

    /// Blocks until all work is complete.
    ///
    /// # Errors
    /// Errors of launches since the last call.
    fn synchronize(&self) -> Result<(), KernelError> {
        Ok(())
    }
}

/// A further stream of a back end for async work ([`Backend::open_stream`]). One thread at a time submits to it, which need not be the
/// thread of the rank.
pub trait AsyncStream: fmt::Debug + Send + Sync {
    /// Records an event after all work submitted to the back end so far, async work excepted. For [`AsyncStream::begin`].
    ///
    /// # Errors
    /// An error of the device.
    fn back_end_event(&self) -> Result<SyncEvent, KernelError>;

    /// Begins async work after an event of the back end, and after the work submitted to this stream before. Returns the back end to submit
    /// it to, as [`Backend::begin_async`] does. Only the thread of the rank allocates there, after an event that it has just recorded: the
    /// memory may be that of freed buffers, which earlier work uses.
    ///
    /// # Errors
    /// An error of the device; then no async work has begun.
    fn begin(&self, after: &SyncEvent) -> Result<&dyn Backend, KernelError>;

    /// Ends the submission of the async work. Until then the caller holds every buffer that it uses.
    ///
    /// # Errors
    /// An error of the device.
    fn end(&self) -> Result<(), KernelError>;
}

/// A check of results before they leave the device ([`Backend::set_result_check`]). It may wait.
pub trait ResultCheck: fmt::Debug + Send + Sync {
    /// Returns once the results of all work submitted by the calling rank are known to be valid.
    ///
    /// # Errors
    /// Why they are not.
    fn check(&self) -> Result<(), KernelError>;
}

/// Copies elements from the host into a new buffer (without contents on the null back end).
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
/// An error of the device.
pub fn upload_into<T: Element>(
    backend: &dyn Backend,
    data: &[T],
    to: &mut Buffer,
) -> Result<(), KernelError> {
    backend.upload(bytes_of(data), to)
}

/// Copies the first `numel` elements of a buffer to the host (none on the null back end).
///
/// # Errors
/// An error of the device.
pub fn download<T: Element>(
    backend: &dyn Backend,
    buffer: &Buffer,
    numel: usize,
) -> Result<Vec<T>, KernelError> {
    if !buffer.has_memory() {
        return Ok(Vec::new());
    }
    let mut data = try_zeroed(numel, "a copy of a tensor on the host")?;
    backend.download(buffer, bytes_of_mut(&mut data))?;
    Ok(data)
}
