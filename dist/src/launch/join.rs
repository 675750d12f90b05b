//! Joining a world of processes, each of which is one rank.

use super::{SPIN, STACK_BYTES, World, caught, homes};
use crate::bytes::printable;
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use crate::rank::Rank;
use crate::transport::wire::{Facts, Joint, Rendezvous, Values, WaitHook, Wire};
use shardgrad_kernels::BackendConfig;
use shardgrad_kernels::cpu::cores;
use std::io::Read;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

impl World {
    /// Names values that every process of this world must have alike, such as options or hashes of files: [`World::join`] compares
    /// them with those of rank 0 before any rank starts, and refuses a difference with both values, as in "ranks got different
    /// options: --lr is 0.002 on rank 0, 0.1 on rank 1", where `subject` is "options". Values are sent and shown: give a hash of a
    /// long one. Ranks that are threads share what they have, so [`World::launch`] compares nothing.
    #[must_use]
    pub fn consistent(mut self, subject: &str, values: impl IntoIterator<Item = (String, String)>) -> World {
        // As they arrive at rank 0.
        let named = values
            .into_iter()
            .map(|(name, value)| (printable(&name, usize::MAX), printable(&value, usize::MAX)))
            .collect();
        self.consistent.push(Values { subject: printable(subject, usize::MAX), named });
        self
    }

    /// Calls `hook` once with a line of text if this process has waited so long for the others to join, with the ranks or the address
    /// that it waits for, and the reason where one is known. Default: none.
    #[must_use]
    pub fn on_wait(mut self, after: Duration, hook: impl Fn(&str) + Send + Sync + 'static) -> World {
        self.wait_hook = Some(WaitHook { after, call: Arc::new(hook) });
        self
    }

    /// Calls `f` on the one rank of this world that this process is, and returns its result when all ranks have returned: what
    /// [`World::launch`] does with threads, across processes and machines, with the same bits. Every process of the world calls
    /// this with the same mesh; rank 0 waits for them at [`Process::port`], and they are connected each with each. Connections are
    /// neither encrypted nor proof against those who can listen in: use a network that you trust.
    ///
    /// By default a rank has the cores that this process may run on, divided by [`Process::num_local`].
    ///
    /// ```
    /// use shardgrad_dist::{Mesh, Process, World};
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// // Two processes; here, two threads that each join as one.
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
    /// `Kind::Config` where the mesh has another number of ranks than there are processes, another process has another mesh, program,
    /// version or [consistent value](World::consistent), and where two processes have one number; `Kind::Timeout` naming the ranks
    /// that do not connect within [`World::timeout`]; `Kind::Io` for a port that cannot be had; `Kind::PeerLost` for a process that
    /// ends before all ranks have connected. Then as [`World::launch`]: the cause with its details on one rank, the one that it
    /// belongs to where that can still report, and on all others one line that names it, of `Kind::PeerLost` where the rank did not
    /// take part in the failure. A process that ends, or of which nothing is heard for as long as a wait may last (ten seconds at
    /// least), is lost.
    pub fn join<T: Send>(self, process: &Process, f: impl FnOnce(&Rank) -> Result<T> + Send) -> Result<T> {
        let rendezvous = Rendezvous::open(process)?;
        self.join_at(&rendezvous, f).inspect_err(|error| rendezvous.fail(error))
    }

    /// [`World::join`] at a rendezvous that is open. An error before all ranks are connected may be
    /// [reported](Rendezvous::fail) to those that have not come yet.
    ///
    /// # Errors
    /// As [`World::join`].
    pub fn join_at<T: Send>(
        self,
        rendezvous: &Rendezvous,
        f: impl FnOnce(&Rank) -> Result<T> + Send,
    ) -> Result<T> {
        let process = rendezvous.process();
        let (num_ranks, there) = (self.mesh.num_ranks(), process.num_ranks());
        if num_ranks != there {
            let why = format!("{} has {num_ranks} ranks, but {there} processes were started", self.mesh);
            let help = "give a mesh of as many ranks as there are processes: one process is one rank";
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let mesh = self.mesh.to_string();
        let facts = Facts { mesh, program: program(), values: self.consistent.clone() };
        let streams = rendezvous.meet(&facts, self.timeout, self.wait_hook.as_ref())?;
        let joint = Joint::new(&self.mesh, process.rank(), streams, self.timeout)?;
        thread::scope(|scope| {
            let name = format!("rank-{}", process.rank());
            let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
            let own = builder.spawn_scoped(scope, || self.live_joined(process, &joint, f));
            let own = own.map_err(|e| Error::new(Kind::Io, format!("no thread for the rank: {e}")));
            match own.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(ended)) => ended,
                Ok(Err(_)) => Err(Error::new(Kind::Panic, "bug: a panic of a rank was not caught")),
                Err(error) => {
                    joint.fail(error.clone());
                    Err(joint.part(error))
                }
            }
        })
    }

    /// The life of the rank that is this process.
    fn live_joined<T>(
        &self,
        process: &Process,
        joint: &Joint,
        f: impl FnOnce(&Rank) -> Result<T>,
    ) -> Result<T> {
        let (index, num_local) = (process.rank(), process.num_local());
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_threads = self.num_threads.unwrap_or((cores / num_local).max(1));
        let may_spin = num_local.saturating_mul(num_threads) <= cores;
        let spin = if may_spin { SPIN } else { Duration::ZERO };
        let ended = caught(&self.mesh, index, || {
            let homes = if self.pinned { homes(num_local, num_threads)? } else { Vec::new() };
            let cores = homes.chunks(num_threads).nth(process.local_rank()).unwrap_or_default().to_vec();
            cores.first().iter().for_each(|core| cores::pin_thread(**core));
            let (memory_bytes_max, precision) = (self.memory_bytes_max, self.precision);
            let settings = BackendConfig { num_threads, may_spin, cores, memory_bytes_max, precision };
            let wire = Box::new(Wire::new(joint.clone(), self.timeout, spin));
            let rank = Rank::new(self.mesh.clone(), index, self.machine.backend(settings)?, wire);
            let result = f(&rank)?;
            // What a device has yet to report counts as the rank's end.
            rank.backend().synchronize()?;
            Ok(result)
        });
        let ended = ended.and_then(|result| caught(&self.mesh, index, || joint.leave()).map(|()| result));
        ended.map_err(|error| {
            joint.fail(error.clone());
            joint.part(error)
        })
    }
}

/// A number made from the file that was started, so that two machines with two programs find that out; 0 if it cannot be read.
fn program() -> u64 {
    let file =
        std::fs::File::open("/proc/self/exe").or_else(|_| std::fs::File::open(std::env::current_exe()?));
    let Ok(mut file) = file else { return 0 };
    let (mut hash, mut part) = (0xCBF2_9CE4_8422_2325u64, Vec::new());
    loop {
        part.clear();
        match file.by_ref().take(1 << 16).read_to_end(&mut part) {
            Ok(0) => return hash | 1,
            Ok(_) => {
                for word in part.chunks(8) {
                    let mut whole = [0; 8];
                    whole[..word.len()].copy_from_slice(word);
                    hash = (hash ^ u64::from_le_bytes(whole))
                        .wrapping_mul(0x0000_0100_0000_01B3)
                        .rotate_left(23);
                }
            }
            Err(_) => return 0,
        }
    }
}
