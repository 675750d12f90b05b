//! Asynchronous collectives of ranks on a CPU: a communication thread runs them while the rank computes.
//!
//! The rank has one issue order over all its groups. Asynchronous calls enter a queue; the communication thread runs them one after
//! another; a call that blocks, and the end of the rank, wait for the whole queue first. So at most one call of a rank is under way at any
//! time, and calls are compared, deadlocks detected and failures reported as if the rank had blocked in each.
//!
//! The thread starts with the first asynchronous call: a rank that makes none pays nothing.

use super::call_queue::{CallFailure, CallQueue};
use super::{Pending, Transport};
use crate::call::{Call, GroupPosition, Op, Origin, Phase, Request};
use crate::error::{Error, Kind, Result};
use crate::mesh::AxisSet;
use crate::sync::Mutex;
use shardgrad_kernels::{
    Backend, Buffer, Cost, Cpu, DType, Device, Kernel, KernelError, Launch, MemoryStats,
};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A transport of which a rank may have two ends, its own and that of its communication thread, of which one is in use at a time.
pub(crate) trait TwoEnded: Transport + Send + Sized + 'static {
    /// The end of the communication thread. It never spins: the core is the rank's.
    fn other_end(&self) -> Self;

    /// Fails the world with an error of this rank, unless the world has failed already.
    fn fail_world(&self, error: Error);
}

/// A transport whose asynchronous collectives run on a communication thread.
#[derive(Debug)]
pub(crate) struct OverlappedTransport<T> {
    own: T,
    name: String,
    /// The latency added to each call ([`crate::World::delay_calls`]).
    delay: Duration,
    min_timeout: Cell<Duration>,
    thread: RefCell<Option<CommThread>>,
    /// The number of the last queued call, and the calls up to which this rank has waited.
    last_queued: Cell<u64>,
    waited_for: Cell<u64>,
}

/// A communication thread and its queue.
#[derive(Debug)]
struct CommThread {
    queue: Arc<CallQueue<QueuedCall>>,
    handle: JoinHandle<()>,
}

/// A call on its way to the communication thread.
#[derive(Debug)]
struct QueuedCall {
    axes: AxisSet,
    dtype: DType,
    phase: Phase,
    path: String,
    origin: u64,
    recent_inputs: String,
    site: &'static Location<'static>,
    op: Op,
    members: Vec<usize>,
    group_rank: usize,
    number: u64,
    counts: Vec<usize>,
    received: Vec<usize>,
    x: Option<Buffer>,
    min_timeout: Duration,
    result: Arc<ResultSlot>,
}

type ResultSlot = Mutex<Option<Buffer>>;

/// The result of a call that the communication thread may still run.
#[derive(Debug)]
pub(crate) struct QueuedResult {
    queue: Arc<CallQueue<QueuedCall>>,
    number: u64,
    result: Arc<ResultSlot>,
}

impl QueuedResult {
    /// Waits for the call.
    pub(crate) fn wait(self) -> Result<Option<Buffer>> {
        self.queue.wait_until_finished(self.number)?;
        Ok(self.result.lock().unwrap_or_else(PoisonError::into_inner).take())
    }
}

impl<T: TwoEnded> OverlappedTransport<T> {
    pub(crate) fn new(own: T, rank: usize, delay: Duration) -> OverlappedTransport<T> {
        let (min_timeout, thread) = (Cell::new(Duration::ZERO), RefCell::default());
        let (name, last_queued, waited_for) = (format!("comm-{rank}"), Cell::new(0), Cell::new(0));
        OverlappedTransport { own, name, delay, min_timeout, thread, last_queued, waited_for }
    }

    /// Starts the communication thread, unless it runs.
    fn queue(
        &self,
        backend: &Arc<dyn Backend>,
        site: &'static Location<'static>,
    ) -> Result<Arc<CallQueue<QueuedCall>>> {
        let mut thread = self.thread.borrow_mut();
        if let Some(thread) = &*thread {
            return Ok(thread.queue.clone());
        }
        let queue = Arc::new(CallQueue::new());
        let (end, backend, own, delay) =
            (self.own.other_end(), CommBackend::of(backend), queue.clone(), self.delay);
        let builder = std::thread::Builder::new().name(self.name.clone());
        let handle = builder.spawn(move || serve(&own, &end, &backend, delay)).map_err(|e| {
            Error::new(Kind::Io, format!("cannot start the communication thread of a rank: {e}")).at(site)
        })?;
        *thread = Some(CommThread { queue: queue.clone(), handle });
        Ok(queue)
    }

    /// Waits for all queued calls.
    fn wait_for_queue(&self) -> Result<()> {
        let last = self.last_queued.get();
        if self.waited_for.get() == last {
            return Ok(());
        }
        let queue = self.thread.borrow().as_ref().map(|thread| thread.queue.clone());
        queue.map_or(Ok(()), |queue| queue.wait_until_finished(last))?;
        self.waited_for.set(last);
        Ok(())
    }

    /// Ends the communication thread, which is at most finishing a call.
    fn join(&self) {
        if let Some(CommThread { queue, handle }) = self.thread.take() {
            queue.close();
            // The thread catches the panics of calls.
            let _ = handle.join();
        }
    }
}

impl<T: TwoEnded> Transport for OverlappedTransport<T> {
    fn check(&self) -> Result<()> {
        // If a queued call has failed, its error names that call.
        self.own.check().or_else(|error| self.wait_for_queue().and(Err(error)))
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.wait_for_queue()?;
        std::thread::sleep(self.delay);
        self.own.run(backend, request)
    }

    fn run_async(&self, backend: &Arc<dyn Backend>, request: &Request<'_>) -> Result<Pending> {
        // A device has a communication stream instead, and host memory with work under way has no event that a thread could wait for.
        if backend.device() != Device::Cpu || !backend.record_event()?.is_complete() {
            return self.run(&**backend, request).map(Pending::Done);
        }
        self.check()?;
        let queue = self.queue(backend, request.call.site)?;
        let result = Arc::new(Mutex::new(None));
        let number = queue.add(QueuedCall::new(request, self.min_timeout.get(), result.clone()));
        self.last_queued.set(number);
        Ok(Pending::Queued(QueuedResult { queue, number, result }))
    }

    fn set_min_timeout(&self, limit: Duration) -> Duration {
        self.own.set_min_timeout(limit);
        self.min_timeout.replace(limit)
    }

    fn finish(&self) -> Result<()> {
        self.wait_for_queue()
    }

    fn close(&self, error: Option<&Error>) {
        // A queued call ends soon only if the world has failed.
        if let Some(error) = error.filter(|_| self.thread.borrow().is_some()) {
            self.own.fail_world(error.clone());
        }
        self.join();
    }
}

impl QueuedCall {
    fn new(request: &Request<'_>, min_timeout: Duration, result: Arc<ResultSlot>) -> QueuedCall {
        let Request { call, op, position, number, counts, received, x } = *request;
        QueuedCall {
            axes: call.axes,
            dtype: call.dtype,
            phase: call.phase,
            path: call.path.to_string(),
            origin: call.origin.hash,
            recent_inputs: call.origin.recent_inputs.to_string(),
            site: call.site,
            op,
            members: position.members.clone(),
            group_rank: position.group_rank,
            number,
            counts: counts.to_vec(),
            received: received.to_vec(),
            x: x.cloned(),
            min_timeout,
            result,
        }
    }

    /// Runs the call. Afterwards only the caller holds the argument.
    fn run(self, transport: &dyn Transport, backend: &dyn Backend) -> Result<()> {
        let origin = Origin { hash: self.origin, recent_inputs: &self.recent_inputs };
        let QueuedCall { axes, dtype, phase, site, .. } = self;
        let call = Call { axes, dtype, phase, path: &self.path, origin, site };
        let position = GroupPosition {
            members: self.members,
            group_rank: self.group_rank,
            calls: Cell::new(self.number),
            sent: RefCell::default(),
            received: RefCell::default(),
        };
        let request = Request {
            call: &call,
            op: self.op,
            position: &position,
            number: self.number,
            counts: &self.counts,
            received: &self.received,
            x: self.x.as_ref(),
        };
        transport.set_min_timeout(self.min_timeout);
        let y = transport.run(backend, &request)?;
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = y;
        Ok(())
    }
}

/// The loop of a communication thread.
fn serve(queue: &CallQueue<QueuedCall>, transport: &dyn Transport, backend: &dyn Backend, delay: Duration) {
    while let Some(call) = queue.next() {
        std::thread::sleep(delay);
        let outcome = catch_unwind(AssertUnwindSafe(|| call.run(transport, backend)));
        queue.finish_call(match outcome {
            Ok(outcome) => outcome.map_err(CallFailure::Error),
            Err(payload) => Err(CallFailure::Panic(Some(payload))),
        });
    }
}

/// The back end of a communication thread: the memory of the rank, and kernels on this thread alone, since the kernel threads belong to
/// the rank.
#[derive(Debug)]
struct CommBackend {
    of_rank: Arc<dyn Backend>,
    of_thread: Arc<dyn Backend>,
}

impl CommBackend {
    fn of(rank: &Arc<dyn Backend>) -> CommBackend {
        CommBackend { of_rank: rank.clone(), of_thread: Cpu::backend(1) }
    }
}

impl Backend for CommBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> std::result::Result<Buffer, KernelError> {
        self.of_rank.alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> std::result::Result<(), KernelError> {
        self.of_thread.launch(kernel, launch)
    }

    fn memory(&self) -> MemoryStats {
        self.of_rank.memory()
    }

    fn cost(&self) -> Cost {
        self.of_thread.cost()
    }

    fn num_threads(&self) -> usize {
        1
    }
}
