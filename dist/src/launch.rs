//! Starting the ranks of a world as threads, and ending them with one result or one cause.

mod join;

use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
use crate::rank::Rank;
use crate::report;
use crate::table::{Failure, State, Table};
use crate::transport::record::Recording;
use crate::transport::thread::{Shared, Threads};
use crate::transport::wire::{Values, WaitHook};
use shardgrad_kernels::cpu::cores;
use shardgrad_kernels::{BackendConfig, BackendProvider, CpuProvider, MatmulPrecision, Null};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Stack of a rank: deep models recurse deeper than the default of a thread allows.
const STACK_BYTES: usize = 8 << 20;

/// How long a waiting rank spins before it sleeps, while every thread has a core of its own.
const SPIN: Duration = Duration::from_micros(40);

/// Ranks to be launched on a mesh.
///
/// ```
/// use shardgrad_dist::{Mesh, World};
/// let mesh = Mesh::parse("dp=2,tp=2")?;
/// assert_eq!(World::run(mesh, |rank| Ok(rank.index() * 10))?, [0, 10, 20, 30]);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct World {
    mesh: Mesh,
    num_threads: Option<usize>,
    timeout: Duration,
    memory_bytes_max: usize,
    precision: MatmulPrecision,
    jitter: Option<u64>,
    pinned: bool,
    machine: Arc<dyn BackendProvider>,
    consistent: Vec<Values>,
    wait_hook: Option<WaitHook>,
}

impl World {
    /// A world of the ranks of a mesh, with the defaults that each method here names.
    #[must_use]
    pub fn new(mesh: Mesh) -> World {
        World {
            mesh,
            num_threads: None,
            timeout: Duration::from_secs(60),
            memory_bytes_max: 0,
            precision: MatmulPrecision::Highest,
            jitter: None,
            pinned: false,
            machine: Arc::new(CpuProvider),
            consistent: Vec::new(),
            wait_hook: None,
        }
    }

    /// [`World::new`] and [`World::launch`].
    ///
    /// # Errors
    /// See [`World::launch`].
    pub fn run<T: Send>(mesh: Mesh, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        World::new(mesh).launch(f)
    }

    /// Threads that the kernels of one rank use, the rank's own among them. Default: cores divided by ranks,
    /// at least one. No result depends on it.
    #[must_use]
    pub fn threads(mut self, num_threads: usize) -> World {
        self.num_threads = Some(num_threads.max(1));
        self
    }

    /// How long a rank waits in one call before that is an error; time in which the whole process is stopped does not count.
    /// Default: 60 seconds.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> World {
        self.timeout = limit;
        self
    }

    /// Bytes of memory that each rank may take from the system. Default: 0, no limit.
    #[must_use]
    pub fn memory_limit(mut self, bytes_max: usize) -> World {
        self.memory_bytes_max = bytes_max;
        self
    }

    /// How exactly matrix products of f32 are formed, on all ranks. Default: [`MatmulPrecision::Highest`].
    #[must_use]
    pub fn matmul_precision(mut self, precision: MatmulPrecision) -> World {
        self.precision = precision;
        self
    }

    /// Where the ranks compute ([`open`](shardgrad_kernels::open()) gives a device by its name). All of them share it.
    /// Default: the processor of this machine.
    #[must_use]
    pub fn on(mut self, machine: Arc<dyn BackendProvider>) -> World {
        self.machine = machine;
        self
    }

    /// Lets ranks stumble at random moments around and inside collectives. No result may depend on it: a tool
    /// for tests of that. Default: off.
    #[must_use]
    pub fn jitter(mut self, seed: u64) -> World {
        self.jitter = Some(seed);
        self
    }

    /// Keeps each thread of each rank on a core of its own, of those that the calling thread may run on. It makes times steadier
    /// where nothing else wants these cores, and much longer where something does: programs that run side by side need masks of
    /// their own (`taskset`). Default: off.
    #[must_use]
    pub fn pinned(mut self) -> World {
        self.pinned = true;
        self
    }

    /// Calls `f` once on every rank, each on a thread of its own, and returns the results in the order of
    /// ranks.
    ///
    /// # Errors
    /// The first cause, if any rank returned an error, unwound with one ([`Error::raise`]) or panicked, or if
    /// a collective failed: that rank's error as it is, with the rank as a detail; a panic as `Kind::Panic`
    /// with its text. The other ranks are released from their waits at once, and from computing at
    /// [`Rank::check`]. `Kind::Collective` too if a message was sent and never received. `Kind::Config` where threads are to be
    /// [pinned](World::pinned) and there are not as many cores.
    pub fn launch<T: Send>(self, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        let num_ranks = self.mesh.num_ranks();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_threads = self.num_threads.unwrap_or((cores / num_ranks).max(1));
        let may_spin = num_ranks.saturating_mul(num_threads) <= cores;
        let spin = if may_spin { SPIN } else { Duration::ZERO };
        let homes = if self.pinned { homes(num_ranks, num_threads)? } else { Vec::new() };
        let table = Table::new(self.mesh.clone());
        let shared = Arc::new(Shared::new(table, self.timeout, spin, self.jitter));
        let (memory_bytes_max, precision) = (self.memory_bytes_max, self.precision);
        let one = |index: usize| {
            let rank = || {
                let cores = homes.chunks(num_threads).nth(index).unwrap_or_default().to_vec();
                cores.first().iter().for_each(|core| cores::pin_thread(**core));
                let settings = BackendConfig { num_threads, may_spin, cores, memory_bytes_max, precision };
                let backend = self.machine.backend(settings)?;
                let transport = Box::new(Threads::new(shared.clone(), index));
                Ok(Rank::new(self.mesh.clone(), index, backend, transport))
            };
            live(&shared.table, index, rank, &f)
        };
        let results: Vec<Option<T>> = thread::scope(|scope| {
            let start = |index: usize| {
                let builder = thread::Builder::new().name(format!("rank-{index}")).stack_size(STACK_BYTES);
                let one = &one;
                builder.spawn_scoped(scope, move || one(index)).map_err(|e| {
                    let error = Error::new(Kind::Io, format!("no thread for rank {index}: {e}"));
                    shared.table.fail(Failure { error, origin: index, told: vec![] });
                    shared.table.entry(index).set_state(State::Failed);
                })
            };
            let handles: Vec<_> = (0..num_ranks).map(start).collect();
            handles.into_iter().map(|h| h.ok().and_then(|h| h.join().ok().flatten())).collect()
        });
        if let Some(failure) = shared.table.failure() {
            return Err(failure.error);
        }
        if let Some((to, letter)) = shared.table.unread() {
            return Err(report::unread(&self.mesh, to, (letter.from, &letter.issued)));
        }
        let results: Option<Vec<T>> = results.into_iter().collect();
        Ok(results.expect("every rank of a world without a failure has a result"))
    }

    /// Calls `f` on one rank of the mesh, on this thread, without memory, arithmetic or waiting: the null
    /// back end counts, the trace records (it starts enabled), collectives return buffers of the right size. Prepacked operands count
    /// only within [`World::memory_limit`], as they give way on the CPU.
    ///
    /// # Errors
    /// What `f` returns or unwinds with, `Kind::Panic` if it panics, `Kind::Mesh` for an index outside of the
    /// mesh.
    pub fn dry_run<T>(self, index: usize, f: impl FnOnce(&Rank) -> Result<T>) -> Result<T> {
        if index >= self.mesh.num_ranks() {
            return Err(Error::new(Kind::Mesh, format!("there is no rank {index} in {}", self.mesh)));
        }
        let rank =
            Rank::new(self.mesh.clone(), index, Null::with_limit(self.memory_bytes_max), Box::new(Recording));
        rank.trace().enable();
        caught(&self.mesh, index, || f(&rank))
    }
}

/// A core for each thread of each rank.
fn homes(num_ranks: usize, num_threads: usize) -> Result<Vec<usize>> {
    let wanted = num_ranks.saturating_mul(num_threads);
    let cores = cores::choose(wanted);
    if cores.len() < wanted {
        let there = cores.len();
        let why = format!("{num_ranks} ranks of {num_threads} threads cannot be pinned to {there} cores");
        let help = "do without pinning, or take as many ranks and threads as there are cores";
        return Err(Error::new(Kind::Config, why).detail("help", help));
    }
    Ok(cores)
}

/// The life of one rank: its function, and what the others have to know of its end before the rank is taken
/// down.
fn live<T>(
    table: &Table,
    index: usize,
    rank: impl FnOnce() -> Result<Rank>,
    f: impl Fn(&Rank) -> Result<T>,
) -> Option<T> {
    let tell = |end: Result<T>| match end {
        Ok(result) => {
            table.entry(index).set_state(State::Returned);
            Some(result)
        }
        Err(error) => {
            table.fail(Failure { error, origin: index, told: vec![] });
            table.entry(index).set_state(State::Failed);
            None
        }
    };
    // What a device has yet to report counts as the rank's end.
    let whole = |rank: &Rank| f(rank).and_then(|result| Ok(rank.backend().synchronize().map(|()| result)?));
    match caught(&table.mesh, index, rank) {
        Ok(rank) => tell(caught(&table.mesh, index, || whole(&rank))),
        Err(error) => tell(Err(error)),
    }
}

/// Runs a function; whatever way it fails in becomes an error that names the rank.
fn caught<T>(mesh: &Mesh, index: usize, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let error = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(result)) => return Ok(result),
        Ok(Err(error)) => error,
        Err(payload) => match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(payload) => Error::new(Kind::Panic, format!("rank {index} panicked: {}", text(&*payload))),
        },
    };
    let named = mesh.num_ranks() == 1 || error.details().iter().any(|(label, _)| *label == "rank");
    Err(if named { error } else { error.detail("rank", mesh.describe(index)) })
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| payload.downcast_ref::<&'static str>().copied()).unwrap_or("a value that is no text")
}
