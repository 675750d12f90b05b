//! Launching a world: one thread per rank, dry runs, and the settings of both.

#[cfg(feature = "processes")]
mod join;

use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
#[cfg(not(feature = "processes"))]
use crate::process::Process;
use crate::rank::Rank;
use crate::report;
use crate::transport::overlapped::OverlappedTransport;
#[cfg(feature = "processes")]
use crate::transport::tcp::{ConsistentValues, WaitHook};
use crate::transport::thread::{Shared, ThreadTransport};
use crate::world_state::{Failure, RankStatus, WorldState};
use shardgrad_kernels::cpu::cores;
use shardgrad_kernels::cpu::simd::{LIMIT_VARIABLE, requested_limit};
use shardgrad_kernels::{BackendConfig, BackendProvider, CpuProvider, MatmulPrecision};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// The stack size of a rank's thread: deep models recurse deeper than the default allows.
const STACK_BYTES: usize = 8 << 20;

/// How long a waiting rank spins before it sleeps, if every thread has a core of its own.
const SPIN: Duration = Duration::from_micros(40);

/// The configuration of a world of ranks on a mesh, and the functions that start it.
///
/// ```
/// use shardgrad_dist::{Mesh, World};
/// let mesh = Mesh::parse("dp=2,tp=2")?;
/// assert_eq!(World::run(mesh, |rank| Ok(rank.index() * 10))?, [0, 10, 20, 30]);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[doc(alias = "init_process_group")]
#[doc(alias = "torch.distributed")]
#[derive(Clone, Debug)]
pub struct World {
    mesh: Mesh,
    num_threads: Option<usize>,
    timeout: Duration,
    memory_bytes_max: usize,
    precision: MatmulPrecision,
    delay_seed: Option<u64>,
    call_delay: Duration,
    pin_threads: bool,
    provider: Arc<dyn BackendProvider>,
    #[cfg(feature = "processes")]
    consistent_values: Vec<ConsistentValues>,
    #[cfg(feature = "processes")]
    wait_hook: Option<WaitHook>,
    #[cfg(feature = "processes")]
    shares_gpu: bool,
    #[cfg(feature = "nccl")]
    is_over_tcp: bool,
    #[cfg(feature = "nccl")]
    has_tree_sums: bool,
    /// Whether to warn that kernels are compiled without optimization.
    warns_of_slow_kernels: bool,
}

/// Set by the first world of the process that warns that kernels are compiled without optimization: later worlds do not repeat the warning.
static WARNED_OF_SLOW_KERNELS: OnceLock<()> = OnceLock::new();

impl World {
    /// A world with one rank per position of the mesh, and the defaults that the methods below name.
    #[must_use]
    pub fn new(mesh: Mesh) -> World {
        World {
            mesh,
            num_threads: None,
            timeout: Duration::from_secs(60),
            memory_bytes_max: 0,
            precision: MatmulPrecision::Highest,
            delay_seed: None,
            call_delay: Duration::ZERO,
            pin_threads: false,
            provider: Arc::new(CpuProvider),
            #[cfg(feature = "processes")]
            consistent_values: Vec::new(),
            #[cfg(feature = "processes")]
            wait_hook: None,
            #[cfg(feature = "processes")]
            shares_gpu: false,
            #[cfg(feature = "nccl")]
            is_over_tcp: false,
            #[cfg(feature = "nccl")]
            has_tree_sums: false,
            warns_of_slow_kernels: !shardgrad_kernels::IS_OPTIMIZED,
        }
    }

    /// [`World::new`] and [`World::launch`].
    ///
    /// # Errors
    /// See [`World::launch`].
    pub fn run<T: Send>(mesh: Mesh, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        World::new(mesh).launch(f)
    }

    /// Sets the number of threads that the kernels of one rank use, including the rank's own thread. Default: cores divided by ranks,
    /// at least one. Results do not depend on it.
    #[must_use]
    pub fn threads(mut self, num_threads: usize) -> World {
        self.num_threads = Some(num_threads.max(1));
        self
    }

    /// Sets the timeout of one wait in a collective; time in which the whole process is stopped does not count.
    /// Default: 60 seconds.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> World {
        self.timeout = limit;
        self
    }

    /// Limits the memory that each rank may allocate from the system, in bytes. Default: 0, no limit.
    #[must_use]
    pub fn memory_limit(mut self, bytes_max: usize) -> World {
        self.memory_bytes_max = bytes_max;
        self
    }

    /// Sets the precision of f32 matrix products on all ranks. Default: [`MatmulPrecision::Highest`].
    #[doc(alias = "set_float32_matmul_precision")]
    #[must_use]
    pub fn matmul_precision(mut self, precision: MatmulPrecision) -> World {
        self.precision = precision;
        self
    }

    /// Sets the device of all ranks ([`open`](shardgrad_kernels::open()) opens a device by its name). Default: the CPU.
    #[must_use]
    pub fn on_device(mut self, provider: Arc<dyn BackendProvider>) -> World {
        self.provider = provider;
        self
    }

    /// Delays ranks at random moments around and inside collectives, to test that results do not depend on timing. Default: off.
    #[doc(alias = "jitter")]
    #[must_use]
    pub fn random_delays(mut self, seed: u64) -> World {
        self.delay_seed = Some(seed);
        self
    }

    /// Adds a latency to each collective and message of each rank, as a slow network does, for tests and benchmarks. NCCL has none. Default:
    /// zero.
    #[doc(alias = "latency")]
    #[must_use]
    pub fn delay_calls(mut self, latency: Duration) -> World {
        self.call_delay = latency;
        self
    }

    /// Pins each thread of each rank to a core of its own, among the cores that the calling thread may run on. Pinning makes timings
    /// steadier if nothing else uses these cores, and much longer if something does: give programs that run at the same time
    /// separate affinity masks (`taskset`). Default: off.
    #[doc(alias = "cpu_affinity")]
    #[doc(alias = "OMP_PROC_BIND")]
    #[must_use]
    pub fn pin_threads(mut self) -> World {
        self.pin_threads = true;
        self
    }

    /// Omits the warning on stderr that a build with `opt-level = 0` prints once per process when ranks start.
    #[must_use]
    pub fn allow_unoptimized(mut self) -> World {
        self.warns_of_slow_kernels = false;
        self
    }

    /// Calls `f` once on every rank, each on a thread of its own, and returns the results in the order of
    /// ranks.
    ///
    /// # Errors
    /// The first failure, if any rank returned an error, unwound with one ([`Error::raise`]) or panicked, or if
    /// a collective failed: that rank's error, with the rank as a detail; a panic as `Kind::Panic`
    /// with its message. The other ranks stop at once if they wait, and at the next [`Rank::check`] if they compute. Also
    /// `Kind::Collective` if a message was sent and never received, and `Kind::Config` if threads are to be
    /// [pinned](World::pin_threads) and there are too few cores, or if `SHARDGRAD_CPU_ISA` names no instruction set.
    #[doc(alias = "spawn")]
    #[doc(alias = "mp.spawn")]
    pub fn launch<T: Send>(self, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        let places = empty_places(self.mesh.num_ranks());
        self.launch_ranks(&|rank| {
            let result = f(rank)?;
            *places[rank.index()].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            Ok(())
        })?;
        Ok(results_of(places))
    }

    /// [`World::launch`], compiled once and not for each function that is launched.
    fn launch_ranks(self, f: &(dyn Fn(&Rank) -> Result<()> + Sync)) -> Result<()> {
        self.warn_of_slow_kernels();
        check_instruction_set()?;
        let num_ranks = self.mesh.num_ranks();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_threads = self.num_threads.unwrap_or((cores / num_ranks).max(1));
        let may_spin = num_ranks.saturating_mul(num_threads) <= cores;
        let spin = if may_spin { SPIN } else { Duration::ZERO };
        let assigned_cores =
            if self.pin_threads { assign_cores(num_ranks, num_threads)? } else { Vec::new() };
        let world = WorldState::new(self.mesh.clone());
        let shared = Arc::new(Shared::new(world, self.timeout, spin, self.delay_seed));
        let (memory_bytes_max, precision) = (self.memory_bytes_max, self.precision);
        let one = |index: usize| {
            let rank = || {
                let cores = assigned_cores.chunks(num_threads).nth(index).unwrap_or_default().to_vec();
                cores.first().iter().for_each(|core| cores::pin_thread(**core));
                let settings = BackendConfig { num_threads, may_spin, cores, memory_bytes_max, precision };
                let backend = self.provider.backend(settings)?;
                let transport = ThreadTransport::new(shared.clone(), index);
                let transport = Box::new(OverlappedTransport::new(transport, index, self.call_delay));
                Ok(Rank::new(self.mesh.clone(), index, backend, transport))
            };
            run_rank(&shared.world, index, rank, f);
        };
        thread::scope(|scope| {
            let start = |index: usize| {
                let builder = thread::Builder::new().name(format!("rank-{index}")).stack_size(STACK_BYTES);
                let one = &one;
                builder.spawn_scoped(scope, move || one(index)).map_err(|e| {
                    let error = Error::new(Kind::Io, format!("cannot start the thread of rank {index}: {e}"));
                    shared.world.fail(Failure { error, origin: index, affected: vec![] });
                    shared.world.rank_state(index).set_status(RankStatus::Failed);
                })
            };
            let handles: Vec<_> = (0..num_ranks).map(start).collect();
            // A thread without a result is found by the caller.
            handles.into_iter().flatten().for_each(|handle| drop(handle.join()));
        });
        if let Some(failure) = shared.world.failure() {
            return Err(failure.error);
        }
        if let Some((to, message)) = shared.world.unread() {
            return Err(report::not_received(&self.mesh, to, message.from, &message.issued));
        }
        Ok(())
    }

    /// Refuses to join: this build has no ranks as processes.
    ///
    /// # Errors
    /// `Kind::Unsupported`.
    #[cfg(not(feature = "processes"))]
    pub fn join<T: Send>(self, process: &Process, f: impl FnOnce(&Rank) -> Result<T> + Send) -> Result<T> {
        drop(f);
        let (rank, num_ranks) = (process.rank(), process.num_ranks());
        let text = format!(
            "rank {rank} of {num_ranks} processes cannot join {}: this build has no ranks as processes",
            self.mesh
        );
        let help = "add features = [\"processes\"] to the dependency `shardgrad` in Cargo.toml, or start ranks as threads with \
                    World::launch";
        Err(Error::new(Kind::Unsupported, text).detail("help", help))
    }

    /// Warns on stderr, once per process, if kernels are compiled without optimization.
    #[expect(
        clippy::print_stderr,
        reason = "a slow build is no error, but its user must learn why it is slow"
    )]
    fn warn_of_slow_kernels(&self) {
        if self.warns_of_slow_kernels {
            WARNED_OF_SLOW_KERNELS.get_or_init(|| {
                eprintln!(
                    "warning: shardgrad is compiled without optimization and runs many times slower; use `cargo run --release`, or \
                     add to Cargo.toml:\n\n[profile.dev.package]\n\"*\" = {{ opt-level = 1 }}\nshardgrad-kernels = {{ opt-level = \
                     3, codegen-units = 1 }}\n\n(World::allow_unoptimized omits this warning)"
                );
            });
        }
    }

    /// Dry run: calls `f` for one rank of the mesh, on this thread, without memory, arithmetic or communication. The null
    /// back end counts memory and work, the trace records collectives (it starts enabled), and collectives return buffers of the right
    /// size. Prepacked operands count only within [`World::memory_limit`], because the CPU evicts them first.
    ///
    /// # Errors
    /// The error that `f` returns or unwinds with, `Kind::Panic` if it panics, `Kind::Mesh` for an index outside of the
    /// mesh.
    #[doc(alias = "meta device")]
    #[doc(alias = "FakeTensorMode")]
    #[doc(alias = "eval_shape")]
    pub fn dry_run<T>(self, index: usize, f: impl FnOnce(&Rank) -> Result<T>) -> Result<T> {
        let (mut f, mut result) = (Some(f), None);
        self.dry_run_rank(index, &mut |rank| {
            let f = f.take().expect("bug: the function of a rank is called twice");
            result = Some(f(rank)?);
            Ok(())
        })?;
        Ok(result.expect("bug: a rank without a result in a dry run without a failure"))
    }

    /// [`World::dry_run`], compiled once and not for each function.
    fn dry_run_rank(self, index: usize, f: &mut dyn FnMut(&Rank) -> Result<()>) -> Result<()> {
        if index >= self.mesh.num_ranks() {
            return Err(Error::new(Kind::Mesh, format!("there is no rank {index} in {}", self.mesh)));
        }
        let rank = Rank::of_dry_run(&self.mesh, index, self.memory_bytes_max);
        catch_errors(&self.mesh, index, || f(&rank))
    }
}

/// A place for the result of each rank.
type Places<T> = Vec<Mutex<Option<T>>>;

// Both are compiled for each type of results, not for each function that is launched, and have loops, which compile faster than iterators.
fn empty_places<T>(num_ranks: usize) -> Places<T> {
    let mut places = Vec::with_capacity(num_ranks);
    places.resize_with(num_ranks, Mutex::default);
    places
}

fn results_of<T>(places: Places<T>) -> Vec<T> {
    let mut results = Vec::with_capacity(places.len());
    for place in places {
        let result = place.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.push(result.expect("bug: a rank without a result in a world without a failure"));
    }
    results
}

/// Checks the environment variable that limits the instruction sets of kernels, which panic on an invalid value.
fn check_instruction_set() -> Result<()> {
    requested_limit().map(drop).map_err(|why| {
        let help = format!("unset {LIMIT_VARIABLE} to use the best instruction set of this CPU");
        Error::new(Kind::Config, why).detail("help", help)
    })
}

/// Chooses a core for each thread of each rank.
fn assign_cores(num_ranks: usize, num_threads: usize) -> Result<Vec<usize>> {
    let wanted = num_ranks.saturating_mul(num_threads);
    let cores = cores::choose(wanted);
    if cores.len() < wanted {
        let there = cores.len();
        let why = format!("{num_ranks} ranks of {num_threads} threads cannot be pinned to {there} cores");
        let help = "leave out --pin (World::pin_threads), or use fewer ranks or fewer --threads";
        return Err(Error::new(Kind::Config, why).detail("help", help));
    }
    Ok(cores)
}

/// Runs one rank's function and publishes how it ended, for the other ranks, before the rank is dropped.
fn run_rank(
    world: &WorldState,
    index: usize,
    rank: impl FnOnce() -> Result<Rank>,
    f: &(dyn Fn(&Rank) -> Result<()> + Sync),
) {
    let record_end = |end: Result<()>| {
        let status = match end {
            Ok(()) => RankStatus::Returned,
            Err(error) => {
                world.fail(Failure { error, origin: index, affected: vec![] });
                RankStatus::Failed
            }
        };
        world.rank_state(index).set_status(status);
    };
    // Errors that a call or a device has not reported yet count as errors of the function.
    let whole = |rank: &Rank| {
        f(rank)?;
        rank.finish()?;
        Ok(rank.backend().synchronize()?)
    };
    match catch_errors(&world.mesh, index, rank) {
        Ok(rank) => {
            let end = catch_errors(&world.mesh, index, || whole(&rank));
            let error = end.as_ref().err().cloned();
            record_end(end);
            rank.close(error.as_ref());
        }
        Err(error) => record_end(Err(error)),
    }
}

/// Runs a function of a rank and turns errors, unwinds and panics into an error that names the rank.
fn catch_errors<T>(mesh: &Mesh, index: usize, f: impl FnOnce() -> Result<T>) -> Result<T> {
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
    owned
        .or_else(|| payload.downcast_ref::<&'static str>().copied())
        .unwrap_or("a payload that is not a string")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[cfg(not(feature = "processes"))]
    #[test]
    fn joining_without_the_feature_names_the_feature() {
        let process = Process::new(1, 2, "127.0.0.1", 29500).unwrap();
        let error = World::new(Mesh::parse("dp=2").unwrap()).join(&process, |_| Ok(())).unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (
                Kind::Unsupported,
                "rank 1 of 2 processes cannot join mesh(dp=2): this build has no ranks as processes"
            )
        );
        assert!(error.details()[0].1.contains("features = [\"processes\"]"), "{error}");
    }

    /// Set in the process of the test below that starts ranks without optimization.
    const IS_CHILD: &str = "SHARDGRAD_TEST_SLOW_KERNELS";

    #[test]
    fn builds_without_optimization_warn_once_per_process_unless_allowed() {
        let slow = || World { warns_of_slow_kernels: true, ..World::new(Mesh::single()) };
        let launch = |world: World| world.launch(|_| Ok(())).unwrap();
        if let Some(which) = std::env::var_os(IS_CHILD) {
            launch(slow().allow_unoptimized());
            if which == "warned" {
                launch(slow());
                launch(slow());
            }
            return;
        }
        let warnings = |which: &str| {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let test = "launch::tests::builds_without_optimization_warn_once_per_process_unless_allowed";
            let output = child.args(["--exact", test, "--nocapture"]).env(IS_CHILD, which).output().unwrap();
            let stdout = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
            String::from_utf8(output.stderr).unwrap()
        };
        assert_eq!(
            warnings("warned"),
            "warning: shardgrad is compiled without optimization and runs many times slower; use `cargo run --release`, or add to \
             Cargo.toml:\n\n[profile.dev.package]\n\"*\" = { opt-level = 1 }\nshardgrad-kernels = { opt-level = 3, codegen-units \
             = 1 }\n\n(World::allow_unoptimized omits this warning)\n"
        );
        assert_eq!(warnings("allowed"), "");
        assert_eq!(World::new(Mesh::single()).warns_of_slow_kernels, !shardgrad_kernels::IS_OPTIMIZED);
    }
}
