//! Safe types over the CUDA driver API: the context of a GPU, which all ranks share, streams, events, memory.
//!
//! Handles are stored as integers. Every method makes the context current first, so that any thread may call it.

use super::library::{DRIVER, SearchPaths, StatusCode, foreign};
use crate::buffer::Buffer;
use crate::error::{KernelError, MemoryStats};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUmodule, CUstream, CUstreamCaptureMode, CUuuid,
};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

foreign!(Table {
    // Whose context the caller has made current, in the numbering of this process.
    gpu: Option<usize>
}, DRIVER, cudarc::driver::sys, CUresult {
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, number: c_int);
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxSynchronize();
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(start: *mut c_void);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventQuery(event: CUevent);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    fn cuLaunchKernel(function: CUfunction, blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint, threads_x: c_uint,
        threads_y: c_uint, threads_z: c_uint, shared_bytes: c_uint, stream: CUstream, args: *mut *mut c_void,
        extra: *mut *mut c_void);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuGraphInstantiateWithFlags(program: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuGraphLaunch(program: CUgraphExec, stream: CUstream);
    fn cuGraphExecDestroy(program: CUgraphExec);
});

const OUT_OF_MEMORY: StatusCode = 2;
const NOT_READY: StatusCode = 600;
/// The reason of the error that stands for [`NOT_READY`].
const NOT_READY_TEXT: &str = "not ready";
/// Errors that corrupt the context: every later call of the process fails with the same error. A GPU that falls off the bus reports one
/// of them, mostly 719 or 999.
const CONTEXT_LOST: [StatusCode; 12] = [214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999];
/// The variable by which the driver chooses the number of hardware queues of a context, and the most that it takes.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const CONNECTIONS_MAX: &str = "32";
/// Linux lists the threads of this process here.
const OWN_THREADS: &str = "/proc/self/task";
/// How often a wait of the host polls before it pauses between polls.
const POLLS_MAX: usize = 1000;
const POLL_PAUSE: Duration = Duration::from_micros(20);
const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

impl Table {
    /// Returns the error of a failed call. Names come from the driver, which may be newer than the bindings.
    fn failed(&self, call: &'static str, answer: StatusCode) -> KernelError {
        if answer == OUT_OF_MEMORY {
            // The allocator replaces this by an error with the requested bytes and its statistics.
            return KernelError::OutOfMemory { requested_bytes: 0, stats: MemoryStats::default() };
        }
        if answer == NOT_READY {
            return KernelError::Device { call, why: NOT_READY_TEXT.to_string(), lost_gpu: None };
        }
        let mut name = ptr::null();
        // SAFETY: the bindings state this type, except that the error is an integer here, because it may be newer than their enum;
        // the returned text is static.
        let name = unsafe {
            let find: Result<unsafe extern "C" fn(StatusCode, *mut *const c_char) -> StatusCode, _> =
                self.opened.function(&DRIVER, "cuGetErrorName");
            match find {
                Ok(find) if find(answer, &mut name) == 0 && !name.is_null() => {
                    CStr::from_ptr(name).to_string_lossy()
                }
                _ => "no name".into(),
            }
        };
        let lost_gpu = self.gpu.filter(|_| CONTEXT_LOST.contains(&answer));
        KernelError::Device { call, why: format!("{name} ({answer})"), lost_gpu }
    }
}

/// Sets `CUDA_DEVICE_MAX_CONNECTIONS` to 32, by which the driver gives a context as many hardware queues. Streams that share a queue wait
/// for each other's waits; each rank on a GPU has two streams, and by default there are 8 queues, so this matters from five ranks on.
///
/// Call it at the start of `main`: a process may change its environment only while it has a single thread. If it has others already, or
/// the variable is set, this function does nothing; then set the variable before the program starts. Returns whether it was set here.
pub fn reserve_hardware_queues() -> bool {
    let is_alone = || std::fs::read_dir(OWN_THREADS).is_ok_and(|threads| threads.count() == 1);
    if std::env::var_os(CONNECTIONS).is_some() || !is_alone() {
        return false;
    }
    // SAFETY: this is the only thread of the process, and only it could start others, so nothing else reads the environment meanwhile.
    unsafe { std::env::set_var(CONNECTIONS, CONNECTIONS_MAX) };
    true
}

/// The initialised CUDA driver of this machine.
#[derive(Debug)]
pub struct Driver {
    table: Table,
    version: i32,
    num_devices: usize,
}

impl Driver {
    /// Finds and initialises the driver.
    ///
    /// # Errors
    /// [`KernelError::Library`] if the driver is missing, too old, or finds no GPU.
    pub fn open(paths: &SearchPaths) -> Result<Arc<Driver>, KernelError> {
        let library = paths.open(&DRIVER)?;
        let mut version = 0;
        // SAFETY: the bindings state this type; the out-pointer outlives the call, which is allowed before `cuInit`.
        unsafe {
            let ask: unsafe extern "C" fn(*mut c_int) -> c_int =
                library.function(&DRIVER, "cuDriverGetVersion")?;
            ask(&mut version);
        }
        let shown = format!("{}.{}", version / 1000, version % 1000 / 10);
        DRIVER.check(usize::try_from(version).unwrap_or(0), &shown, library.file())?;
        let table = Table::load(Arc::new(library), None)?;
        let mut count = 0;
        // SAFETY: the flags must be 0; the out-pointer outlives the call.
        let started = unsafe { table.cuInit(0).and_then(|()| table.cuDeviceGetCount(&mut count)) };
        let file = table.opened.file().display();
        started.map_err(|e| DRIVER.error(format!("{file} does not start: {e}")))?;
        Ok(Arc::new(Driver { table, version, num_devices: usize::try_from(count).unwrap_or(0) }))
    }

    /// Returns the newest CUDA version that the driver supports: 13000 is 13.0.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns the file of the library.
    #[must_use]
    pub fn file(&self) -> &Path {
        self.table.opened.file()
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn num_devices(&self) -> usize {
        self.num_devices
    }

    /// Returns the properties of a GPU.
    ///
    /// # Errors
    /// [`KernelError::Library`] if there is no GPU of this number; otherwise the errors of the driver.
    pub fn describe(&self, number: usize) -> Result<DeviceProperties, KernelError> {
        if number >= self.num_devices {
            return Err(DRIVER.error(format!(
                "GPU {number} does not exist; the driver reports {} GPUs",
                self.num_devices
            )));
        }
        use CUdevice_attribute as A;
        let device = self.device(number)?;
        let attribute = |which: A| {
            let mut value = 0;
            // SAFETY: the out-pointer outlives the call; the device is one of the driver's.
            unsafe { self.table.cuDeviceGetAttribute(&mut value, which, device) }.map(|()| value)
        };
        let (mut name, mut bytes, mut uuid) = ([0u8; 128], 0, CUuuid { bytes: [0; 16] });
        // SAFETY: the out-pointers outlive the calls, and the name has as many bytes as stated.
        unsafe {
            self.table.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device)?;
            self.table.cuDeviceTotalMem_v2(&mut bytes, device)?;
            self.table.cuDeviceGetUuid_v2(&mut uuid, device)?;
        }
        let name = CStr::from_bytes_until_nul(&name).map_or("unnamed".into(), CStr::to_string_lossy);
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(DeviceProperties {
            name: name.into_owned(),
            uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
            memory_bytes: bytes,
            capability: (major, minor),
            multiprocessors,
            shared_bytes_max: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        })
    }

    fn device(&self, number: usize) -> Result<CUdevice, KernelError> {
        let mut device = 0;
        // SAFETY: the out-pointer outlives the call.
        unsafe { self.table.cuDeviceGet(&mut device, number as c_int) }?;
        Ok(device)
    }
}

/// Formats a UUID as in `GPU-0a1b2c3d-0000-0000-0000-000000000000`.
fn uuid_text(bytes: [u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]);
    format!("GPU-{}", groups.join("-"))
}

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The name.
    pub name: String,
    /// The UUID as `nvidia-smi -L` shows it; that of a part of a GPU (MIG) differs from those of the other parts.
    pub uuid: String,
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// The compute capability: major, minor.
    pub capability: (i32, i32),
    /// The number of multiprocessors (SMs).
    pub multiprocessors: i32,
    /// The most bytes of shared memory per block, with opt-in.
    pub shared_bytes_max: u32,
}

impl DeviceProperties {
    /// Returns the compiler target: `sm_90a` for capability 9.0, with the features of that architecture only; else `sm_XY`.
    #[must_use]
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        let own = if major == 9 { "a" } else { "" };
        format!("sm_{major}{minor}{own}")
    }
}

/// A resource that is destroyed after all work of the GPU is done, because any stream may still use it.
#[derive(Debug)]
pub(super) enum Resource {
    /// Memory of [`Context::alloc`].
    Chunk(u64),
    /// Pinned host memory.
    Pinned(usize),
    /// An executable graph.
    GraphExec(usize),
    /// A module; no entry of it is launched again.
    Module(usize),
}

/// The captures in progress on a GPU, and the resources to destroy after the last of them.
#[derive(Debug, Default)]
struct Captures {
    in_progress: usize,
    deferred: Vec<Resource>,
}

/// The open contexts of this process. The driver has one primary context for each GPU and process, whose captures a synchronization by any
/// of its users invalidates; so all [`CudaDevice`](super::CudaDevice)s of a GPU share one [`Context`], which defers it. No result depends
/// on who else uses a context.
#[derive(Debug, Default)]
struct OpenContexts(Mutex<Vec<Weak<Context>>>);

static OPEN_CONTEXTS: OnceLock<OpenContexts> = OnceLock::new();

/// The primary context of a GPU, released with the last handle.
#[derive(Debug)]
pub(super) struct Context {
    /// The functions of the driver, with the GPU for their errors.
    table: Table,
    device: CUdevice,
    handle: usize,
    captures: Mutex<Captures>,
    /// Whether waits of the host poll, so that [`Context::give_up`] ends them.
    has_polled_waits: AtomicBool,
    /// The error of every later call.
    given_up: OnceLock<KernelError>,
}

impl Context {
    /// Returns the context of a GPU: the one that this process has open already, or a new one.
    pub(super) fn open(driver: &Arc<Driver>, number: usize) -> Result<Arc<Context>, KernelError> {
        let device = driver.device(number)?;
        let table = Table::load(driver.table.opened.clone(), Some(number))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the out-pointer outlives the call; released once, when this is dropped.
        unsafe { table.cuDevicePrimaryCtxRetain(&mut handle, device) }?;
        let (captures, has_polled_waits, given_up) = (Mutex::default(), false.into(), OnceLock::new());
        let handle = handle.addr();
        let own = Arc::new(Context { table, device, handle, captures, has_polled_waits, given_up });
        let OpenContexts(open) = OPEN_CONTEXTS.get_or_init(OpenContexts::default);
        let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = open.iter().filter_map(Weak::upgrade).find(|one| one.handle == own.handle) {
            return Ok(shared);
        }
        open.retain(|context| context.strong_count() > 0);
        open.push(Arc::downgrade(&own));
        Ok(own)
    }

    /// Returns the driver functions, after making the context current on this thread. An error once the context is given up.
    pub(super) fn bound(&self) -> Result<&Table, KernelError> {
        if let Some(why) = self.given_up.get() {
            return Err(why.clone());
        }
        // SAFETY: the context is retained while this lives.
        unsafe { self.table.cuCtxSetCurrent(self.handle as CUcontext) }?;
        Ok(&self.table)
    }

    /// Lets later waits of the host poll, so that [`Context::give_up`] ends them.
    pub(super) fn poll_waits(&self) {
        self.has_polled_waits.store(true, Ordering::Relaxed);
    }

    /// Gives up the GPU, on which work never ends: polled waits end with this error, and so does every later call. Nothing of the context
    /// is freed any more, because the driver waits for all work first. The context stays open, so that this process does not use the GPU
    /// again.
    pub(super) fn give_up(self: &Arc<Context>, why: KernelError) {
        if self.given_up.set(why).is_ok() {
            std::mem::forget(self.clone());
        }
    }

    /// Allocates GPU memory, aligned to 256 bytes; `None` if memory is short.
    pub(super) fn alloc(&self, bytes: usize) -> Result<Option<u64>, KernelError> {
        let table = self.bound()?;
        let mut address = 0;
        // SAFETY: the out-pointer outlives the call.
        match unsafe { table.cuMemAlloc_v2(&mut address, bytes) } {
            Ok(()) => Ok(Some(address)),
            Err(KernelError::OutOfMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the bytes of GPU memory that no process has allocated.
    pub(super) fn free_bytes(&self) -> Result<usize, KernelError> {
        let table = self.bound()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out-pointers outlive the call.
        unsafe { table.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(free)
    }

    fn captures(&self) -> MutexGuard<'_, Captures> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a capture that is about to begin. The caller ends it with [`Context::end_capture`].
    pub(super) fn begin_capture(&self) {
        self.captures().in_progress += 1;
    }

    /// Ends a capture of [`Context::begin_capture`], and destroys the deferred resources if it was the last one.
    pub(super) fn end_capture(&self) {
        let mut captures = self.captures();
        captures.in_progress -= 1;
        if captures.in_progress == 0 {
            let deferred = std::mem::take(&mut captures.deferred);
            self.destroy_now(&deferred);
        }
    }

    /// Destroys a resource after all work of the GPU is done. During a capture this is deferred to its end: the wait would invalidate
    /// the captures of every stream of the context, in any capture mode.
    pub(super) fn destroy(&self, resource: Resource) {
        let mut captures = self.captures();
        if captures.in_progress > 0 {
            captures.deferred.push(resource);
        } else {
            // Under the lock, so that no capture begins during the wait.
            self.destroy_now(&[resource]);
        }
    }

    fn destroy_now(&self, resources: &[Resource]) {
        if resources.is_empty() {
            return;
        }
        let Ok(table) = self.bound() else { return };
        // SAFETY: allocated or created once, destroyed once, here; nothing uses the resources after the synchronisation. If it fails, the
        // context is lost, and the resources with it.
        unsafe {
            if table.cuCtxSynchronize().is_err() {
                return;
            }
            for resource in resources {
                let _ = match *resource {
                    Resource::Chunk(address) => table.cuMemFree_v2(address),
                    Resource::Pinned(start) => table.cuMemFreeHost(ptr::with_exposed_provenance_mut(start)),
                    Resource::GraphExec(handle) => {
                        table.cuGraphExecDestroy(ptr::with_exposed_provenance_mut(handle))
                    }
                    Resource::Module(handle) => {
                        table.cuModuleUnload(ptr::with_exposed_provenance_mut(handle))
                    }
                };
            }
        }
    }
}

impl Drop for Context {
    /// Not called for a context that is given up.
    fn drop(&mut self) {
        // SAFETY: retained once when this was created. An error at shutdown is ignored.
        let _ = unsafe { self.table.cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// An event: a point in a stream.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    handle: usize,
}

impl Event {
    /// Waits on the host until the event has occurred.
    pub(super) fn wait(&self) -> Result<(), KernelError> {
        let mut num_polls = 0;
        while self.context.has_polled_waits.load(Ordering::Relaxed) && !self.has_occurred()? {
            // The driver spins first too.
            match num_polls < POLLS_MAX {
                true => std::thread::yield_now(),
                false => std::thread::sleep(POLL_PAUSE),
            }
            num_polls += 1;
        }
        // SAFETY: the event is alive.
        unsafe { self.context.bound()?.cuEventSynchronize(self.handle as CUevent) }
    }

    /// Returns whether the event has occurred.
    pub(super) fn has_occurred(&self) -> Result<bool, KernelError> {
        // SAFETY: the event is alive.
        match unsafe { self.context.bound()?.cuEventQuery(self.handle as CUevent) } {
            Ok(()) => Ok(true),
            Err(KernelError::Device { why, .. }) if why == NOT_READY_TEXT => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(table) = self.context.bound() {
            // SAFETY: created once, destroyed once; the driver keeps its state for streams that still wait.
            let _ = unsafe { table.cuEventDestroy_v2(self.handle as CUevent) };
        }
    }
}

/// Pinned (page-locked) host memory, for copies by the GPU. The methods of [`Stream`] ensure that the host does not access the memory
/// during a copy.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    start: usize,
    bytes: usize,
}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned, KernelError> {
        let mut start = ptr::null_mut();
        // SAFETY: the out-pointer outlives the call; freed once, when this is dropped.
        unsafe { context.bound()?.cuMemHostAlloc(&mut start, bytes, 0) }?;
        // SAFETY: the driver allocated this many bytes.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { context: context.clone(), start: start.expose_provenance(), bytes })
    }

    fn memory(&mut self) -> &mut [u8] {
        // SAFETY: the memory is this value's own, of this size, zeroed when it was made.
        unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(self.start), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.destroy(Resource::Pinned(self.start));
    }
}

/// The priority of a stream: pending blocks of a stream of higher priority start first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Priority {
    /// The default, the lowest.
    Normal,
    /// The highest that the GPU has.
    Highest,
}

/// A CUDA stream: work runs in the order of submission.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    handle: usize,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, priority: Priority) -> Result<Stream, KernelError> {
        let table = context.bound()?;
        let (mut handle, mut least, mut greatest) = (ptr::null_mut(), 0, 0);
        // SAFETY: the out-pointers outlive the calls; destroyed once, when this is dropped.
        unsafe {
            table.cuCtxGetStreamPriorityRange(&mut least, &mut greatest)?;
            let priority = if priority == Priority::Highest { greatest } else { least };
            table.cuStreamCreateWithPriority(&mut handle, NON_BLOCKING, priority)?;
        }
        Ok(Stream { context: context.clone(), handle: handle.expose_provenance() })
    }

    /// Returns the driver handle of the stream, for libraries that submit work to it.
    pub(super) fn handle(&self) -> CUstream {
        ptr::with_exposed_provenance_mut(self.handle)
    }

    /// Returns the driver handle of the stream as a number, after making its context current on this thread.
    pub(super) fn for_libraries(&self) -> Result<usize, KernelError> {
        self.context.bound()?;
        Ok(self.handle)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits on the host until all submitted work is done.
    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        if self.context.has_polled_waits.load(Ordering::Relaxed) {
            return self.record_event()?.wait();
        }
        // SAFETY: the stream is alive.
        unsafe { self.context.bound()?.cuStreamSynchronize(self.handle()) }
    }

    /// Records an event after all work submitted so far.
    pub(super) fn record_event(&self) -> Result<Event, KernelError> {
        let table = self.context.bound()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the out-pointer outlives the call; destroyed once, with the event.
        unsafe { table.cuEventCreate(&mut handle, DISABLE_TIMING) }?;
        let event = Event { context: self.context.clone(), handle: handle.addr() };
        // SAFETY: event and stream are alive and of one context.
        unsafe { table.cuEventRecord(handle, self.handle()) }?;
        Ok(event)
    }

    /// Makes work submitted from now on wait for a recorded event.
    pub(super) fn wait(&self, event: &Event) -> Result<(), KernelError> {
        // SAFETY: event and stream are alive.
        unsafe { self.context.bound()?.cuStreamWaitEvent(self.handle(), event.handle as CUevent, 0) }
    }

    /// Sets all bytes of a buffer to zero.
    pub(super) fn clear(&self, to: &mut Buffer) -> Result<(), KernelError> {
        let (address, bytes) = device_range(to, to.bytes());
        // SAFETY: the buffer has this many bytes.
        unsafe { self.context.bound()?.cuMemsetD8Async(address, 0, bytes, self.handle()) }
    }

    /// Copies bytes to offset `at` of a buffer through pinned memory, from an offset at which no copy is pending. The next use of these
    /// bytes of the pinned memory must wait for the returned event.
    pub(super) fn upload(
        &self,
        from: &[u8],
        to: &mut Buffer,
        at: usize,
        (by, by_at): (&mut Pinned, usize),
    ) -> Result<Event, KernelError> {
        let (address, _) = device_range(to, at + from.len());
        // First: the GPU may still write pinned memory of a context that is given up.
        let table = self.context.bound()?;
        by.memory()[by_at..by_at + from.len()].copy_from_slice(from);
        // SAFETY: both memories have this many bytes, and live until the copy is done: freeing pinned memory waits, and buffers
        // return to an allocator whose chunks outlive the stream's work.
        unsafe {
            let staged: *const c_void = ptr::with_exposed_provenance(by.start + by_at);
            table.cuMemcpyHtoDAsync_v2(address + at as u64, staged, from.len(), self.handle())?;
        }
        self.record_event()
    }

    /// Copies bytes from offset `at` of a buffer through pinned memory, and waits for the copy.
    pub(super) fn download(
        &self,
        from: &Buffer,
        at: usize,
        to: &mut [u8],
        by: &mut Pinned,
    ) -> Result<(), KernelError> {
        let (address, _) = device_range(from, at + to.len());
        assert!(to.len() <= by.bytes, "bug: a copy is longer than its staging memory");
        // SAFETY: both memories have this many bytes, and the copy is done before either is used again. If the wait fails, the context is lost
        // or given up, and neither is used or freed any more.
        unsafe {
            let into: *mut c_void = ptr::with_exposed_provenance_mut(by.start);
            let table = self.context.bound()?;
            table.cuMemcpyDtoHAsync_v2(into, address + at as u64, to.len(), self.handle())?;
        }
        self.synchronize()?;
        to.copy_from_slice(&by.memory()[..to.len()]);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(table) = self.context.bound() {
            // SAFETY: created once, destroyed once; submitted work still completes.
            let _ = unsafe { table.cuStreamDestroy_v2(self.handle()) };
        }
    }
}

/// Returns the address and the bytes of a buffer, which has at least `least` bytes.
fn device_range(buffer: &Buffer, least: usize) -> (u64, usize) {
    let address = buffer.device_address().expect("bug: memory of another device");
    assert!(least <= buffer.bytes(), "bug: {least} bytes of a buffer of {}", buffer.bytes());
    (address, buffer.bytes())
}
