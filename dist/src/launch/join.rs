//! Joining a world of processes: one rank per process, connected over TCP.

use super::{SPIN, STACK_BYTES, World, assign_cores, catch_errors, check_instruction_set};
use crate::encoding::printable;
use crate::error::{Error, Kind, Result, host_name};
use crate::process::Process;
use crate::rank::Rank;
#[cfg(feature = "nccl")]
use crate::transport::nccl::{NcclTransport, Session};
use crate::transport::overlapped::OverlappedTransport;
use crate::transport::tcp::{
    ConsistentValues, Endpoint, RankGpu, Rendezvous, TcpTransport, WaitHook, WorldConfig,
};
use crate::transport::{Transport, TransportSession};
#[cfg(feature = "nccl")]
use shardgrad_kernels::Device;
use shardgrad_kernels::cpu::cores;
#[cfg(feature = "nccl")]
use shardgrad_kernels::cuda::SearchPaths;
use shardgrad_kernels::{Backend, BackendConfig};
#[cfg(feature = "nccl")]
use shardgrad_nccl::Nccl;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

impl World {
    /// Adds named values that must be equal on every process of this world, such as options or hashes of files. [`World::join`]
    /// compares them with those of rank 0 before any rank starts; a difference is an error with both values, as in "ranks got different
    /// options: --lr is 0.002 on rank 0, 0.1 on rank 1", where `subject` is "options". Values are sent and shown: pass a hash of a
    /// long value. [`World::launch`] ignores them: its ranks are threads of one process.
    #[must_use]
    pub fn check_consistent(
        mut self,
        subject: &str,
        values: impl IntoIterator<Item = (String, String)>,
    ) -> World {
        // Escaped as on arrival at rank 0, so that equal values compare equal.
        let named = values
            .into_iter()
            .map(|(name, value)| (printable(&name, usize::MAX), printable(&value, usize::MAX)))
            .collect();
        self.consistent_values.push(ConsistentValues { subject: printable(subject, usize::MAX), named });
        self
    }

    /// Sets a hook that is called once if this process has waited for other processes for the time `after`, with a line of text: the
    /// ranks or the address that it waits for, and the reason if known. Default: none.
    #[must_use]
    pub fn on_wait(mut self, after: Duration, hook: impl Fn(&str) + Send + Sync + 'static) -> World {
        self.wait_hook = Some(WaitHook { after, call: Arc::new(hook) });
        self
    }

    /// Lets processes have the same GPU. Default: an error, because it mostly means that each process sees one GPU, and all the same one.
    #[must_use]
    pub fn share_gpu(mut self) -> World {
        self.shares_gpu = true;
        self
    }

    /// Joins the world as the rank of this process: connects to all other processes, calls `f`, and returns its result when all ranks
    /// have returned. Results have the same bits as with the threads of [`World::launch`]. Every process of the world calls `join` with
    /// the same mesh; rank 0 listens at [`Process::port`], then each process connects to each other one. Each connection starts with
    /// a proof that both ends have the [token](Process::token) of the run; everything sent is authenticated, and between machines
    /// [encrypted](Process::encrypt).
    ///
    /// By default a rank uses the cores that this process may run on, divided by [`Process::num_local_ranks`].
    ///
    /// ```
    /// use shardgrad_dist::{Mesh, Process, World};
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// // Two processes; here, two threads that each join as one process.
    /// let one = move |rank: usize| {
    ///     let process = Process::new(rank, 2, "127.0.0.1", port)?;
    ///     World::new(Mesh::parse("dp=2")?).join(&process, |rank| Ok(rank.index() * 10))
    /// };
    /// let other = std::thread::spawn(move || one(1));
    /// assert_eq!((one(0)?, other.join().unwrap()?), (0, 10));
    /// # Ok::<(), shardgrad_dist::Error>(())
    /// ```
    ///
    /// # Errors
    /// While connecting: `Kind::Config` if the mesh has another number of ranks than there are processes, if processes differ in mesh,
    /// program, version or [consistent values](World::check_consistent), if two processes have the same rank, or
    /// [unintentionally](World::share_gpu) the same GPU; `Kind::Timeout` naming
    /// the ranks that did not connect within [`World::timeout`]; `Kind::Io` for a port that cannot be opened; `Kind::PeerLost` for a
    /// process that ended before all ranks were connected.
    ///
    /// Then as [`World::launch`]: one rank returns the cause with its details (the rank that failed, if it can still report), all others
    /// one line that names the cause, of `Kind::PeerLost` if the rank did not take part in the failure. A process is lost if it ends, or
    /// if nothing arrives from it for as long as a wait may last (ten seconds at least).
    #[doc(alias = "init_process_group")]
    #[doc(alias = "jax.distributed.initialize")]
    pub fn join<T: Send>(self, process: &Process, f: impl FnOnce(&Rank) -> Result<T> + Send) -> Result<T> {
        let rendezvous = Rendezvous::open(process)?;
        self.join_at(&rendezvous, f).inspect_err(|error| rendezvous.fail(error))
    }

    /// [`World::join`] with a rendezvous that is already open. The caller may [report](Rendezvous::fail) an error from before all ranks
    /// are connected to the ranks that have not connected yet.
    ///
    /// # Errors
    /// As [`World::join`].
    pub fn join_at<T: Send>(
        self,
        rendezvous: &Rendezvous,
        f: impl FnOnce(&Rank) -> Result<T> + Send,
    ) -> Result<T> {
        let (mut f, mut result) = (Some(f), None);
        self.join_with(rendezvous, &mut |rank| {
            let f = f.take().expect("bug: the function of a rank is called twice");
            result = Some(f(rank)?);
            Ok(())
        })?;
        Ok(result.expect("bug: a rank without a result in a world without a failure"))
    }

    /// [`World::join_at`], compiled once and not for each function.
    fn join_with(
        self,
        rendezvous: &Rendezvous,
        f: &mut (dyn FnMut(&Rank) -> Result<()> + Send),
    ) -> Result<()> {
        check_instruction_set()?;
        let process = rendezvous.process();
        if process.rank() == 0 {
            self.warn_of_slow_kernels();
        }
        let (num_ranks, there) = (self.mesh.num_ranks(), process.num_ranks());
        if num_ranks != there {
            let why = format!("{} has {num_ranks} ranks, but {there} processes were started", self.mesh);
            let help = "give a mesh with as many ranks as there are processes: each process is one rank";
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let mesh = self.mesh.to_string();
        let uuid = self.provider.uuid().filter(|_| !self.shares_gpu);
        let gpu = uuid.map(|uuid| RankGpu { uuid: uuid.to_string(), host: host_name() });
        let config = WorldConfig { mesh, program: program_hash(), values: self.compared_values(), gpu };
        let links = rendezvous.connect(&config, self.timeout, self.wait_hook.as_ref())?;
        let endpoint = Endpoint::new(&self.mesh, process.rank(), links, self.timeout)?;
        thread::scope(|scope| {
            let name = format!("rank-{}", process.rank());
            let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
            let own = builder.spawn_scoped(scope, || self.run_joined_rank(process, &endpoint, f));
            let own =
                own.map_err(|e| Error::new(Kind::Io, format!("cannot start the thread of the rank: {e}")));
            match own.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Err(Error::new(Kind::Panic, "bug: a panic of a rank was not caught")),
                Err(error) => {
                    endpoint.fail(error.clone());
                    Err(endpoint.abort(error))
                }
            }
        })
    }

    /// Runs the rank of this process.
    fn run_joined_rank(
        &self,
        process: &Process,
        endpoint: &Endpoint,
        f: &mut dyn FnMut(&Rank) -> Result<()>,
    ) -> Result<()> {
        let (index, num_local_ranks) = (process.rank(), process.num_local_ranks());
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_threads = self.num_threads.unwrap_or((cores / num_local_ranks).max(1));
        let may_spin = num_local_ranks.saturating_mul(num_threads) <= cores;
        let spin = if may_spin { SPIN } else { Duration::ZERO };
        let mut session: Option<Arc<dyn TransportSession>> = None;
        let outcome = catch_errors(&self.mesh, index, || {
            let assigned_cores =
                if self.pin_threads { assign_cores(num_local_ranks, num_threads)? } else { Vec::new() };
            let cores =
                assigned_cores.chunks(num_threads).nth(process.local_rank()).unwrap_or_default().to_vec();
            cores.first().iter().for_each(|core| cores::pin_thread(**core));
            let (memory_bytes_max, precision) = (self.memory_bytes_max, self.precision);
            let settings = BackendConfig { num_threads, may_spin, cores, memory_bytes_max, precision };
            let backend = self.provider.backend(settings)?;
            let tcp = TcpTransport::new(endpoint.clone(), self.timeout, spin);
            let transport = self.transport(endpoint, tcp, index, &backend, &mut session)?;
            let rank = Rank::new(self.mesh.clone(), index, backend, transport);
            let result = catch_errors(&self.mesh, index, || {
                f(&rank)?;
                // Errors that a call or a device has not reported yet count as errors of the function.
                rank.finish()?;
                Ok(rank.backend().synchronize()?)
            });
            rank.close(result.as_ref().err());
            result
        });
        // What a failed world does to a device is no cause of its own.
        let outcome = outcome.map_err(|error| match &session {
            Some(session) => session.explain(error),
            None => error,
        });
        let finish = || {
            endpoint.finish()?;
            session.as_ref().map_or(Ok(()), |session| session.finish())
        };
        let outcome = outcome.and_then(|()| catch_errors(&self.mesh, index, finish));
        outcome.map_err(|error| {
            endpoint.fail(error.clone());
            let error = endpoint.abort(error);
            match &session {
                Some(session) => session.abort(error),
                None => error,
            }
        })
    }
}

#[cfg(feature = "nccl")]
impl World {
    /// Lets ranks as processes communicate over TCP even if each has a GPU. Default: by NCCL, in a build with the feature `nccl`.
    #[must_use]
    pub fn over_tcp(mut self) -> World {
        self.is_over_tcp = true;
        self
    }

    /// Forms all sums over NCCL in the tree in which threads and TCP form them, so that results have the same bits on every transport:
    /// pieces travel over send and recv, and the kernels add. Default: NCCL adds f32 and f64, in an order that depends on its algorithm.
    #[must_use]
    pub fn tree_sums(mut self) -> World {
        self.has_tree_sums = true;
        self
    }

    /// Describes the NCCL over which the ranks of [`World::join`] communicate: its version, the variables by which it chooses algorithm
    /// and protocol, and who adds. `None` if they do not use NCCL or the library is not found.
    #[must_use]
    pub fn describe_nccl(&self) -> Option<String> {
        let library = self.uses_nccl().then(|| Nccl::open(&SearchPaths::from_env()))?.ok()?;
        let sums = if self.has_tree_sums { "in the order of threads" } else { "by NCCL" };
        Some(format!("{}, sums {sums}", library.describe_sums()))
    }

    /// Whether the ranks communicate by NCCL.
    fn uses_nccl(&self) -> bool {
        matches!(self.provider.device(), Device::Cuda(_)) && self.mesh.num_ranks() > 1 && !self.is_over_tcp
    }

    /// The values that must be equal on every process.
    fn compared_values(&self) -> Vec<ConsistentValues> {
        if !matches!(self.provider.device(), Device::Cuda(_)) {
            return self.consistent_values.clone();
        }
        let mut named = vec![("transport", if self.uses_nccl() { "NCCL" } else { "TCP" }.to_string())];
        if self.uses_nccl() {
            named.push(("sums", if self.has_tree_sums { "tree" } else { "NCCL" }.to_string()));
            // Ranks with different algorithms wait for each other.
            named.extend(shardgrad_nccl::algorithm());
        }
        let named = named.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        let transports = ConsistentValues { subject: "transports".to_string(), named };
        self.consistent_values.iter().cloned().chain([transports]).collect()
    }

    /// The transport of a rank over its connections. `session` gets what has to outlive the rank.
    fn transport(
        &self,
        endpoint: &Endpoint,
        tcp: TcpTransport,
        rank: usize,
        backend: &Arc<dyn Backend>,
        session: &mut Option<Arc<dyn TransportSession>>,
    ) -> Result<Box<dyn Transport>> {
        if !self.uses_nccl() {
            return Ok(Box::new(OverlappedTransport::new(tcp, rank, self.call_delay)));
        }
        let joined = Session::join(&self.mesh, rank, &tcp, endpoint, backend)?;
        *session = Some(joined.clone());
        Ok(Box::new(NcclTransport::new(tcp, joined, self.has_tree_sums)))
    }
}

#[cfg(not(feature = "nccl"))]
impl World {
    /// The values that must be equal on every process.
    fn compared_values(&self) -> Vec<ConsistentValues> {
        self.consistent_values.clone()
    }

    /// The transport of a rank over its connections.
    #[expect(clippy::unnecessary_wraps, reason = "with the feature `nccl` it may fail")]
    fn transport(
        &self,
        _: &Endpoint,
        tcp: TcpTransport,
        rank: usize,
        _: &Arc<dyn Backend>,
        _: &mut Option<Arc<dyn TransportSession>>,
    ) -> Result<Box<dyn Transport>> {
        Ok(Box::new(OverlappedTransport::new(tcp, rank, self.call_delay)))
    }
}

/// Returns a hash of the program's file, which detects different programs on different machines; 0 if the file cannot be read. It is
/// computed once: the file of a running program stays the same.
fn program_hash() -> u64 {
    static HASH: OnceLock<u64> = OnceLock::new();
    *HASH.get_or_init(|| {
        let file =
            std::fs::File::open("/proc/self/exe").or_else(|_| std::fs::File::open(std::env::current_exe()?));
        let mut hasher = blake3::Hasher::new();
        match file.and_then(|file| hasher.update_reader(file).map(drop)) {
            Ok(()) => {
                let mut first = [0; 8];
                hasher.finalize_xof().fill(&mut first);
                u64::from_le_bytes(first) | 1
            }
            Err(_) => 0,
        }
    })
}
