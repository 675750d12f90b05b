//! Communicators: a group of ranks, and operations between them on the memory and the streams of a back end.

use crate::functions::{
    Config, FLOAT32, FLOAT64, Functions, IN_PROGRESS, INT64, MAGIC, MAX, MIN, NO_COLOR, RawComm, RawStream,
    SUCCESS, SUM, UINT8, UNDEFINED,
};
use crate::library::{Nccl, UniqueId};
use shardgrad_kernels::cuda::library::NCCL;
use shardgrad_kernels::{Backend, Buffer, DType, KernelError};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How often a wait polls before it pauses between polls.
const POLLS_MAX: usize = 100;
const PAUSE: Duration = Duration::from_micros(100);

/// How long the library may take to abort a communicator that is dropped.
const DROP_TIME: Duration = Duration::from_secs(10);

/// The function that an error names if work was aborted, or needs a communicator that was.
pub const ABORTED: &str = "ncclCommAbort";

/// A reduction of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum, in an order that NCCL chooses.
    Sum,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
}

/// A part of an operation; all parts of one [`Communicator::submit`] run at once. Ranges are bytes of its buffers: `x` is read, `y`
/// written. Ranks are those of the communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reduces `numel` elements of all ranks, for all ranks.
    AllReduce {
        /// The number of elements of each rank.
        numel: usize,
        /// Their dtype: no 16-bit float, because NCCL rounds each addition.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// Sums the elements of all ranks; rank i gets the i-th run of `numel` elements.
    ReduceScatter {
        /// The number of elements that each rank gets.
        numel: usize,
        /// Their dtype, as for an all-reduce.
        dtype: DType,
    },
    /// Concatenates as many bytes of each rank.
    AllGather {
        /// The number of bytes of each rank.
        bytes: usize,
    },
    /// Copies bytes of one rank, which passes no `y`, to all others, which pass no `x`.
    Broadcast {
        /// The number of bytes.
        bytes: usize,
        /// The rank that has them.
        root: usize,
    },
    /// Sends a range of `x`.
    Send {
        /// The range.
        range: Range<usize>,
        /// The receiver.
        to: usize,
    },
    /// Receives into a range of `y`.
    Recv {
        /// The range.
        range: Range<usize>,
        /// The sender.
        from: usize,
    },
}

/// The new communicator of a rank in a [`Communicator::split`].
#[derive(Clone, Copy, Debug)]
pub struct SplitGroup {
    /// The number of the new communicator among those of the split.
    pub color: usize,
    /// The rank there.
    pub rank: usize,
    /// The number of ranks there.
    pub size: usize,
    /// The most blocks of a kernel of its operations; 0 lets NCCL choose.
    pub num_blocks_max: usize,
}

/// A non-blocking communicator of NCCL. Any thread may abort it.
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    rank: usize,
    size: usize,
    /// The address of the library's object; `None` once it is aborted. Calls hold the lock, waits do not.
    handle: Mutex<Option<usize>>,
    /// Where the library writes the handles of splits whose waits were given up.
    unfinished_splits: Mutex<Vec<usize>>,
}

/// The address of an object of the library.
fn raw(handle: usize) -> *mut RawComm {
    ptr::with_exposed_provenance_mut(handle)
}

fn int(number: usize) -> c_int {
    c_int::try_from(number).expect("bug: a number of ranks beyond an int")
}

/// Returns the number of a dtype that NCCL reduces without another rounding than ours.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F64 => FLOAT64,
        DType::F32 => FLOAT32,
        DType::I64 => INT64,
        DType::U8 | DType::Bool => UINT8,
        DType::BF16 | DType::F16 => panic!("bug: NCCL would round each addition of {dtype}"),
    }
}

impl Communicator {
    /// Joins a new communicator as `rank` of `size`, on the device of `backend`. All ranks call it with one id. `tick` is called while
    /// others are missing; its error ends the wait.
    ///
    /// # Errors
    /// The errors of the library and of `tick`.
    pub fn join<E: From<KernelError>>(
        nccl: &Arc<Nccl>,
        backend: &dyn Backend,
        id: &UniqueId,
        (rank, size): (usize, usize),
        tick: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Communicator, E> {
        stream_of(backend)?;
        // Never freed: a wait may be given up while the library still works.
        let new = Box::leak(Box::new(ptr::null_mut()));
        let config = configuration(0);
        let functions = &nccl.functions;
        // SAFETY: id, sizes and configuration are as `nccl.h` asks, both pointers are valid for ever, the device is current.
        let answer =
            unsafe { (functions.ncclCommInitRankConfig)(new, int(size), id.raw(), int(rank), config) };
        functions.check("ncclCommInitRankConfig", answer)?;
        let joined = Communicator::new(nccl, (rank, size), new.expose_provenance());
        joined.wait("ncclCommInitRankConfig", tick)?;
        Ok(joined)
    }

    fn new(nccl: &Arc<Nccl>, (rank, size): (usize, usize), handle: usize) -> Communicator {
        let (handle, unfinished_splits) = (Mutex::new(Some(handle)), Mutex::default());
        Communicator { nccl: nccl.clone(), rank, size, handle, unfinished_splits }
    }

    /// Splits the communicator: ranks with one color join a new one, in the order of their ranks there. All ranks call it, those that join
    /// none without a group.
    ///
    /// # Errors
    /// The errors of the library and of `tick`, as for [`Communicator::join`]. Then the new communicator, which the library may still make,
    /// is aborted with this one.
    pub fn split<E: From<KernelError>>(
        &self,
        group: Option<&SplitGroup>,
        tick: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Option<Communicator>, E> {
        // Never freed: the library writes the handle while the split is in progress, which may outlast this wait.
        let new: *mut *mut RawComm = Box::leak(Box::new(ptr::null_mut()));
        let (color, key) = group.map_or((NO_COLOR, 0), |group| (int(group.color), int(group.rank)));
        let config = configuration(group.map_or(0, |group| group.num_blocks_max));
        self.call(|functions, own| {
            // SAFETY: the communicator is alive under the lock; both pointers are valid for ever.
            ("ncclCommSplit", unsafe { (functions.ncclCommSplit)(own, color, key, new, config) })
        })?;
        self.wait("ncclCommSplit", tick).inspect_err(|_| {
            self.unfinished_splits().push(new.expose_provenance());
        })?;
        let Some(SplitGroup { rank, size, .. }) = group.copied() else { return Ok(None) };
        // SAFETY: the split is no longer in progress, so the library has written the handle and does not write it again.
        let handle = unsafe { new.read() }.expose_provenance();
        let split = Communicator::new(&self.nccl, (rank, size), handle);
        split.wait("ncclCommSplit", tick)?;
        Ok(Some(split))
    }

    /// Submits parts to the stream of `on`, after the work submitted there before: one part, or sends and receives. `x` is recorded as
    /// read ([`Backend::record_stream`]); `y` is allocated on `on` and has one handle. `tick` is called while the submission is in
    /// progress.
    ///
    /// # Errors
    /// The errors of the library and of `tick`.
    ///
    /// # Panics
    /// If a part is outside of its buffer.
    pub fn submit<E: From<KernelError>>(
        &self,
        on: &dyn Backend,
        x: Option<&Buffer>,
        mut y: Option<&mut Buffer>,
        parts: &[Part],
        tick: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let stream: *mut RawStream = ptr::with_exposed_provenance_mut(stream_of(on)?);
        if let Some(y) = &mut y {
            assert!(y.is_unique(), "bug: a buffer that is written has one handle");
        }
        x.into_iter().for_each(|x| on.record_stream(x));
        let y = y.as_deref();
        let is_fine = |answer: c_int| answer == SUCCESS || answer == IN_PROGRESS;
        self.call(|functions, own| {
            // SAFETY: group calls have no arguments; between them only operations of this communicator are called, on this thread.
            let started = unsafe { (functions.ncclGroupStart)() };
            if started != SUCCESS {
                return ("ncclGroupStart", started);
            }
            let added = parts.iter().map(|part| self.add(functions, (own, stream), x, y, part));
            let failed = added.into_iter().find(|(_, answer)| !is_fine(*answer));
            // SAFETY: as above. After an error too, so that the thread leaves the group.
            let ended = ("ncclGroupEnd", unsafe { (functions.ncclGroupEnd)() });
            failed.unwrap_or(ended)
        })?;
        self.wait("ncclGroupEnd", tick)
    }

    /// Adds a part to the group of this thread.
    fn add(
        &self,
        functions: &Functions,
        (own, stream): (*mut RawComm, *mut RawStream),
        x: Option<&Buffer>,
        y: Option<&Buffer>,
        part: &Part,
    ) -> (&'static str, c_int) {
        let all = |bytes: usize| 0..self.size * bytes;
        let read = |range: Range<usize>| address(x, range).cast_const();
        let written = |range: Range<usize>| address(y, range);
        // SAFETY: the communicator is alive under the lock and the stream belongs to the live back end. The ranges are inside of device
        // memory: `address` checks it. The memory stays allocated until the stream has passed: what is read is recorded, what is written
        // is allocated on that stream, and the back end reuses neither before. Nothing else accesses `y`, which has one handle.
        unsafe {
            match part {
                Part::AllReduce { numel, dtype, op } => {
                    let bytes = numel * dtype.size();
                    let op = match op {
                        ReduceOp::Sum => SUM,
                        ReduceOp::Max => MAX,
                        ReduceOp::Min => MIN,
                    };
                    let (x, y) = (read(0..bytes), written(0..bytes));
                    let answer = (functions.ncclAllReduce)(x, y, *numel, data_type(*dtype), op, own, stream);
                    ("ncclAllReduce", answer)
                }
                Part::ReduceScatter { numel, dtype } => {
                    let bytes = numel * dtype.size();
                    let (x, y) = (read(all(bytes)), written(0..bytes));
                    let dtype = data_type(*dtype);
                    (
                        "ncclReduceScatter",
                        (functions.ncclReduceScatter)(x, y, *numel, dtype, SUM, own, stream),
                    )
                }
                Part::AllGather { bytes } => {
                    let (x, y) = (read(0..*bytes), written(all(*bytes)));
                    ("ncclAllGather", (functions.ncclAllGather)(x, y, *bytes, UINT8, own, stream))
                }
                Part::Broadcast { bytes, root } => {
                    // The root passes its argument twice: in place, so that NCCL writes nothing there.
                    let at = if *root == self.rank { address(x, 0..*bytes) } else { written(0..*bytes) };
                    (
                        "ncclBroadcast",
                        (functions.ncclBroadcast)(at, at, *bytes, UINT8, int(*root), own, stream),
                    )
                }
                Part::Send { range, to } => {
                    let x = read(range.clone());
                    ("ncclSend", (functions.ncclSend)(x, range.len(), UINT8, int(*to), own, stream))
                }
                Part::Recv { range, from } => {
                    let y = written(range.clone());
                    ("ncclRecv", (functions.ncclRecv)(y, range.len(), UINT8, int(*from), own, stream))
                }
            }
        }
    }

    fn handle(&self) -> MutexGuard<'_, Option<usize>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unfinished_splits(&self) -> MutexGuard<'_, Vec<usize>> {
        self.unfinished_splits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call with the library's object.
    fn call(
        &self,
        call: impl FnOnce(&Functions, *mut RawComm) -> (&'static str, c_int),
    ) -> Result<bool, KernelError> {
        let handle = self.handle();
        let functions = &self.nccl.functions;
        match *handle {
            Some(own) => {
                let (name, answer) = call(functions, raw(own));
                functions.check(name, answer)
            }
            None => {
                let why = "the communicator is aborted".into();
                Err(KernelError::Device { call: ABORTED, why, lost_gpu: None })
            }
        }
    }

    /// Waits until nothing is in progress. The operations themselves run on their stream.
    fn wait<E: From<KernelError>>(
        &self,
        call: &'static str,
        tick: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut num_polls = 0;
        while !self.is_ready(call)? {
            tick()?;
            // A submission takes microseconds, the start of a communicator as long as the last rank.
            match num_polls < POLLS_MAX {
                true => std::thread::yield_now(),
                false => std::thread::sleep(PAUSE),
            }
            num_polls += 1;
        }
        Ok(())
    }

    /// Returns whether nothing is in progress.
    fn is_ready(&self, call: &'static str) -> Result<bool, KernelError> {
        let mut state = SUCCESS;
        self.call(|functions, own| {
            // SAFETY: the communicator is alive under the lock; the out-pointer outlives the call.
            ("ncclCommGetAsyncError", unsafe { (functions.ncclCommGetAsyncError)(own, &mut state) })
        })?;
        self.nccl.functions.check(call, state)
    }

    /// Returns the asynchronous error of the communicator, if it has one and is not aborted.
    ///
    /// # Errors
    /// That error, with the library's text.
    pub fn check(&self) -> Result<(), KernelError> {
        let is_aborted = self.handle().is_none();
        if is_aborted { Ok(()) } else { self.is_ready("an operation of NCCL").map(|_| ()) }
    }

    /// Aborts the operations of the communicator, so that their streams continue; what they write has any contents then. Aborts the
    /// communicators of splits that were given up, too. Every later call is an error.
    ///
    /// # Errors
    /// An error of the library, also if it does not answer within `limit`. Operations may wait on the GPU for ever then.
    pub fn abort(&self, limit: Duration) -> Result<(), KernelError> {
        let Some(own) = self.handle().take() else { return Ok(()) };
        let splits = std::mem::take(&mut *self.unfinished_splits());
        self.within(limit, ABORTED, move |functions| {
            let abort = |handle: *mut RawComm| {
                // SAFETY: the communicator was alive, and nobody has its handle any more.
                functions.check(ABORTED, unsafe { (functions.ncclCommAbort)(handle) })
            };
            abort(raw(own))?;
            for split in splits {
                let new: *const *mut RawComm = ptr::with_exposed_provenance(split);
                // SAFETY: never freed. The library ends a split before it frees the communicator that is split, so it has written the handle,
                // or never does.
                let new = unsafe { new.read() };
                if !new.is_null() {
                    abort(new)?;
                }
            }
            Ok(())
        })
    }

    /// Destroys the communicator, whose operations are done. All ranks call it.
    ///
    /// # Errors
    /// An error of the library, also if it does not answer within `limit`.
    pub fn destroy(&self, limit: Duration) -> Result<(), KernelError> {
        if !self.unfinished_splits().is_empty() {
            return self.abort(limit);
        }
        let Some(own) = self.handle().take() else { return Ok(()) };
        self.within(limit, "ncclCommDestroy", move |functions| {
            // SAFETY: the communicator was alive, and nobody has its handle any more.
            functions.check("ncclCommDestroy", unsafe { (functions.ncclCommDestroy)(raw(own)) }).map(|_| ())
        })
    }

    /// Makes a call that may wait for ever, on a thread of its own, which it leaves behind then.
    fn within(
        &self,
        limit: Duration,
        call: &'static str,
        run: impl FnOnce(&Functions) -> Result<(), KernelError> + Send + 'static,
    ) -> Result<(), KernelError> {
        let failed = |why: String| KernelError::Device { call, why, lost_gpu: None };
        let (nccl, start) = (self.nccl.clone(), Instant::now());
        let thread = Builder::new().name("nccl-call".to_string()).spawn(move || run(&nccl.functions));
        let thread = thread.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        while !thread.is_finished() {
            if start.elapsed() >= limit {
                return Err(failed(format!("no answer within {limit:?}")));
            }
            std::thread::sleep(PAUSE);
        }
        thread.join().unwrap_or_else(|_| Err(failed("bug: the thread of the call panicked".to_string())))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // An error has nobody to go to. What waits for the operations may wait for ever then.
        let _ = self.abort(DROP_TIME);
    }
}

/// Returns the configuration of a non-blocking communicator. Never freed: the library may read it after a wait was given up.
fn configuration(num_blocks_max: usize) -> &'static mut Config {
    Box::leak(Box::new(Config {
        size: size_of::<Config>(),
        magic: MAGIC,
        version: NCCL.min_version.0 as u32,
        blocking: 0,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: if num_blocks_max == 0 { UNDEFINED } else { int(num_blocks_max) },
        net_name: ptr::null(),
        split_share: UNDEFINED,
        traffic_class: UNDEFINED,
    }))
}

/// Returns the stream of a back end, after making its device current.
fn stream_of(backend: &dyn Backend) -> Result<usize, KernelError> {
    let missing = || NCCL.error(format!("{} has no streams for NCCL", backend.device()));
    backend.native_stream()?.ok_or_else(missing)
}

/// Returns the address of a range of a buffer in device memory.
fn address(buffer: Option<&Buffer>, range: Range<usize>) -> *mut c_void {
    let buffer = buffer.expect("bug: an operation without its buffer");
    assert!(range.end <= buffer.bytes(), "bug: bytes {range:?} of a buffer of {}", buffer.bytes());
    let start = buffer.device_address().expect("bug: memory of the host");
    ptr::with_exposed_provenance_mut(start as usize + range.start)
}
