//! The communicators of one process, and the threads that compare calls, submit messages and abort communicators.

use super::messages::{Links, Messages};
use super::watchdog::{Watched, is_consequence};
use crate::call::{Call, GroupPosition, Op, Origin, Phase, Request};
use crate::error::{Error, Kind, Result};
use crate::mesh::{AxisSet, Mesh};
use crate::transport::tcp::{Endpoint, PendingCalls, TcpTransport};
use crate::transport::{Transport, TransportSession};
use shardgrad_kernels::cuda::SearchPaths;
use shardgrad_kernels::{Backend, Cpu, DType, KernelError, ResultCheck, download, upload};
use shardgrad_nccl::{ABORTED, Communicator, Nccl, SplitGroup, UniqueId};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Keeps results on the GPU until the calls of which they are results are compared, because NCCL may give unlike calls any contents; and
/// for ever once the world has failed, because operations are aborted then.
#[derive(Debug)]
struct ComparedResults(Arc<PendingCalls>);

impl ResultCheck for ComparedResults {
    fn check(&self) -> std::result::Result<(), KernelError> {
        let why = "the world has failed, so the collectives on the GPU were aborted".to_string();
        let aborted = KernelError::Device { call: ABORTED, why, lost_gpu: None };
        self.0.wait_until_compared(Duration::ZERO).map_err(|_| aborted)
    }
}

/// The communicators of one process for every set of axes whose groups have more than one rank.
#[derive(Debug)]
pub(crate) struct Session {
    watched: Arc<Watched>,
    /// The submitted calls that are not compared.
    pub(super) pending: Arc<PendingCalls>,
    /// The communicator of the bits of axes longer than 1.
    by_bits: HashMap<u16, usize>,
    long_axes: AxisSet,
    messages: Arc<Messages>,
    /// The comparer, the thread that submits messages, and the watchdog.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Outlives the communicators: it waits for their operations when it is dropped.
    backend: Arc<dyn Backend>,
}

impl Session {
    /// Joins the communicators with all other ranks.
    ///
    /// # Errors
    /// The errors of the library; `Kind::Config` if ranks have different versions of it; `Kind::Timeout` if a rank does not join; the
    /// failure of the world.
    pub(crate) fn join(
        mesh: &Mesh,
        rank: usize,
        tcp: &TcpTransport,
        endpoint: &Endpoint,
        backend: &Arc<dyn Backend>,
    ) -> Result<Arc<Session>> {
        let nccl = Nccl::open(&SearchPaths::from_env())?;
        let id = exchange_id(mesh, rank, tcp, &nccl)?;
        let start = Instant::now();
        let mut check = || -> Result<()> {
            tcp.check()?;
            if start.elapsed() <= tcp.limit() {
                return Ok(());
            }
            let why = format!(
                "rank {rank} waited more than {:?} for the others to join the communicators of NCCL",
                tcp.limit()
            );
            let help = "look for warnings of NCCL on the other ranks (NCCL_DEBUG=WARN); raise the timeout with --timeout";
            Err(Error::new(Kind::Timeout, why).detail("help", help))
        };
        let (mut communicators, rank_text, limit) = (Vec::new(), mesh.describe(rank), tcp.limit());
        let joined = Joined::of(&nccl, &**backend, &id, (mesh, rank), &mut communicators, &mut check);
        let joined = joined.map_err(|error| {
            // A process that ends while ranks join makes the library fail too: the cause is reported.
            if is_consequence(endpoint, &error) {
                return tcp.check().err().unwrap_or(error);
            }
            // Before the communicators end, which is an error of the other ranks.
            let error = error.detail("rank", rank_text.clone());
            endpoint.fail_everywhere(error.clone());
            error
        });
        let Joined { by_bits, long_axes, links } = joined?;
        let watched = Arc::new(Watched::new(endpoint, rank_text, communicators, backend, limit));
        let pending = PendingCalls::new(endpoint);
        backend.set_result_check(Arc::new(ComparedResults(pending.clone())));
        // From the first operation on.
        backend.running_async()?;
        let messages = Arc::new(Messages::new(links, &watched, backend));
        let (threads, backend) = (Mutex::default(), backend.clone());
        let session = Session { watched, pending, by_bits, long_axes, messages, threads, backend };
        let (watched, pending) = (session.watched.clone(), session.pending.clone());
        session.spawn_checked("nccl-watchdog", move || watched.watch(&pending))?;
        let comparer = tcp.comparer(&session.pending);
        session.spawn_checked("nccl-comparer", move || comparer.run())?;
        let (messages, tcp, pending) =
            (session.messages.clone(), tcp.for_messages(), session.pending.clone());
        session.spawn_checked("nccl-messages", move || messages.submit_requested(&tcp, &pending))?;
        Ok(Arc::new(session))
    }

    /// Starts a thread for which ranks would wait forever if it panicked.
    fn spawn_checked(&self, name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let endpoint = self.watched.endpoint.clone();
        self.spawn(name, move || {
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                let why = format!("bug: the thread {name} panicked");
                endpoint.fail_everywhere(Error::new(Kind::Panic, why));
            }
        })
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = Builder::new().name(name.to_string()).spawn(run)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// The communicator of this rank's group over some axes, which has more than one rank.
    pub(super) fn communicator(&self, axes: AxisSet) -> &Communicator {
        &self.watched.communicators[self.by_bits[&(axes.bits() & self.long_axes.bits())]]
    }

    pub(super) fn messages(&self) -> &Messages {
        &self.messages
    }

    /// See [`Watched::is_consequence`].
    pub(super) fn is_consequence(&self, error: &Error) -> bool {
        self.watched.is_consequence(error)
    }

    fn end_threads(&self) {
        self.watched.end();
        self.pending.end();
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// What the communicators of a rank are for, by their numbers.
struct Joined {
    /// The communicator of the group over some axes, by the bits of the axes with several ranks.
    by_bits: HashMap<u16, usize>,
    /// The axes with several ranks.
    long_axes: AxisSet,
    links: Links,
}

impl Joined {
    /// Joins the communicators with all other ranks, which call this too. After an error too, `communicators` has those that the rank has
    /// joined.
    ///
    /// # Errors
    /// The errors of the library and of `check`.
    fn of(
        nccl: &Arc<Nccl>,
        backend: &dyn Backend,
        id: &UniqueId,
        (mesh, rank): (&Mesh, usize),
        communicators: &mut Vec<Communicator>,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Joined> {
        let long_axes: AxisSet = mesh.axes().filter(|axis| mesh.size(*axis) > 1).collect();
        let all = Communicator::join(nccl, backend, id, (rank, mesh.num_ranks()), check)?;
        let mut by_bits = HashMap::from([(long_axes.bits(), 0)]);
        communicators.push(all);
        // Every rank makes them in this order, and before its function runs: a split is a call of all ranks.
        for bits in 1..long_axes.bits() {
            let axes: AxisSet = mesh.axes().filter(|axis| bits & AxisSet::one(*axis).bits() != 0).collect();
            if axes.union(long_axes) != long_axes {
                continue;
            }
            let position = GroupPosition::new(mesh, rank, axes);
            let (color, rank, size) = (position.members[0], position.group_rank, position.size());
            let group = SplitGroup { color, rank, size, num_blocks_max: 0 };
            let split = communicators[0].split(Some(&group), check)?;
            by_bits.insert(bits, communicators.len());
            communicators.push(split.expect("bug: a split without the rank's communicator"));
        }
        let links = Links::join(mesh, rank, communicators, check)?;
        Ok(Joined { by_bits, long_axes, links })
    }
}

impl TransportSession for Session {
    /// Waits for the messages that other ranks have received, ends the threads, and destroys the communicators.
    fn finish(&self) -> Result<()> {
        self.pending.wait_until(Duration::ZERO, || self.messages.are_sent())?;
        self.backend.synchronize().map_err(|error| self.explain(error.into()))?;
        self.end_threads();
        let Watched { communicators, rank_text, limit, .. } = &*self.watched;
        let failed = |error: KernelError| Error::from(error).detail("rank", rank_text.clone());
        // Splits first.
        communicators.iter().rev().try_for_each(|communicator| communicator.destroy(*limit).map_err(failed))
    }

    fn abort(&self, error: Error) -> Error {
        self.end_threads();
        self.watched.abort();
        match self.watched.given_up() {
            Some(why) => error.detail("GPU", format!("given up, with all operations on it: {why}")),
            None => error,
        }
    }

    /// The failure of the world in place of an error that says that work of this rank was aborted, which happens after that failure.
    fn explain(&self, error: Error) -> Error {
        // The message names the GPU first if it is given up.
        let is_aborted = error.kind() == Kind::Device && error.message().contains(ABORTED);
        if is_aborted { self.pending.failure_error() } else { error }
    }
}

impl Drop for Session {
    /// Aborts what is left.
    fn drop(&mut self) {
        self.end_threads();
        self.watched.abort();
    }
}

/// Sends the id of a new communicator from rank 0 to all ranks, over TCP, with the version of the library.
fn exchange_id(mesh: &Mesh, rank: usize, tcp: &TcpTransport, nccl: &Nccl) -> Result<UniqueId> {
    let host = Cpu::backend(1);
    let x = match rank {
        0 => Some(upload(&*host, &[&nccl.unique_id()?.0[..], &nccl.version().to_le_bytes()].concat())?),
        _ => None,
    };
    let (axes, bytes) = (mesh.all_axes(), 128 + size_of::<usize>());
    let (dtype, phase, path, origin) =
        (DType::U8, Phase::Control, "the id of the communicators of NCCL", Origin::default());
    let call = Call { axes, dtype, phase, path, origin, site: Location::caller() };
    let position = GroupPosition::new(mesh, rank, axes);
    let op = Op::Broadcast { root: 0 };
    // Not one of the calls of the program, which are numbered from 1.
    let request = Request {
        call: &call,
        op,
        position: &position,
        number: 0,
        counts: &[bytes],
        received: &[],
        x: x.as_ref(),
    };
    let y = tcp.run(&*host, &request)?.expect("bug: a broadcast without a result");
    let y: Vec<u8> = download(&*host, &y, bytes)?;
    let (id, version) = y.split_first_chunk::<128>().expect("bug: a short id");
    let version = usize::from_le_bytes(version.try_into().expect("bug: a short version"));
    if version != nccl.version() {
        let why = format!(
            "ranks have different versions of NCCL: {version} on rank 0, {} on rank {rank}",
            nccl.version()
        );
        let help = "install the same version on all machines (`shardgrad doctor` shows the file)";
        return Err(Error::new(Kind::Config, why).detail("help", help));
    }
    Ok(UniqueId(*id))
}
