//! Rendezvous: how the processes of a world find and connect to each other (PyTorch: `TCPStore`, rendezvous).
//!
//! Rank 0 listens at the port that all ranks know. Every other rank connects to it as soon as it starts; both prove that they have the
//! token, and the rank sends its number and run id. When it is ready, it sends its own listening port and its configuration, which
//! rank 0 compares with its own. When all ranks are ready, rank 0 sends each the listening addresses of all ranks and a random number of
//! this rendezvous; each rank connects to the ranks with lower numbers and accepts those with higher numbers, again with proofs.
//! Processes of other runs and foreign connections are rejected. If a rank reports an error, ends, or differs in its configuration,
//! the start fails on all ranks, and rank 0 sends them the reason.

mod addresses;
mod token_file;
pub(super) mod message;
mod host;
mod client;

pub(crate) use message::{ConsistentValues, RankGpu, WorldConfig};

use super::link::Link;
use super::listener::RankListener;
use super::record::Protection;
use crate::encoding::printable;
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use client::{RendezvousClient, connect};
use host::RendezvousHost;
use message::{Hello, HostMessage};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use token_file::KeySource;

/// How much longer than rank 0 the other ranks wait for its messages, and how long all ranks wait for the last connections.
const GRACE: Duration = Duration::from_secs(5);
/// How long a failing process waits for other ranks to connect, to send them the reason.
const FAILED_WAIT: Duration = Duration::from_secs(5);
/// How long a second rank 0 waits for a reply from the first.
const OTHER_RANK_ZERO_WAIT: Duration = Duration::from_secs(1);
/// The interval at which a waiting process polls.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The prologue of handshakes with rank 0.
const HOST_PROLOGUE: &[u8] = b"shardgrad rendezvous";
/// The most ranks that one error message names.
const NAMED_RANKS_MAX: usize = 16;

const RAISE_TIMEOUT: &str = "check that every rank was started; raise the timeout with --timeout";

/// A hook that is called with one line of text if a rendezvous takes long.
#[derive(Clone)]
pub(crate) struct WaitHook {
    pub(crate) after: Duration,
    pub(crate) call: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for WaitHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitHook").field("after", &self.after).finish_non_exhaustive()
    }
}

/// The wait of one process for the other processes.
#[derive(Debug)]
struct JoinWait<'a> {
    limit: Duration,
    start: Instant,
    hook: Option<&'a WaitHook>,
}

impl JoinWait<'_> {
    fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Calls the hook, once, if its time has passed.
    fn report(&mut self, text: impl FnOnce() -> String) {
        let waited = self.start.elapsed();
        if let Some(hook) = self.hook.take_if(|hook| waited >= hook.after) {
            let waited = Duration::from_secs(waited.as_secs());
            (hook.call)(&format!("{} ({} so far)", printable(&text(), usize::MAX), seconds(waited)));
        }
    }
}

/// The rendezvous of a process with the other processes of its world ([`World::join_at`](crate::World::join_at)).
///
/// Open it before reading arguments and files: an error in these then ends the start on all ranks at once, if it is
/// [reported](Rendezvous::fail); otherwise the other ranks wait for this rank until their timeout. The end of a process is detected
/// without a report.
#[doc(alias = "TCPStore")]
#[doc(alias = "rdzv")]
#[derive(Debug)]
pub struct Rendezvous {
    process: Process,
    role: Mutex<Role>,
}

#[derive(Debug)]
enum Role {
    /// The only rank.
    Alone,
    Host(RendezvousHost),
    Client(RendezvousClient),
    /// The ranks are connected, or the start has failed.
    Done,
}

impl Rendezvous {
    /// Opens the rendezvous: rank 0 starts to listen, every other rank starts to connect. Does not wait.
    ///
    /// # Errors
    /// `Kind::Io` for a port at which rank 0 cannot listen, and for a token that cannot be read or left; `Kind::Config` if the process that
    /// listens there is rank 0 of the same run, for ranks on several machines without a token ([`Process::token`]), and for a token that is
    /// too short or that other users can read.
    pub fn open(process: &Process) -> Result<Rendezvous> {
        let protection = match (process.is_insecure(), process.is_encrypted()) {
            (true, _) => Protection::None,
            (false, true) => Protection::Encrypted,
            (false, false) => Protection::Authenticated,
        };
        let hello = Hello {
            rank: process.rank(),
            run: message::shown_run(process.run_id()),
            version: env!("CARGO_PKG_VERSION").to_string(),
            num_ranks: process.num_ranks(),
            protection,
        };
        let role = match process.rank() {
            _ if process.num_ranks() == 1 => Role::Alone,
            0 => {
                let source = KeySource::of(process)?;
                // Only the process that has the port leaves a token.
                let listener = listen(process)
                    .map_err(|e| refused_by_other_rank_zero(process, &hello, &source).unwrap_or(e))?;
                let (key, left_file) = source.leave()?;
                let listener =
                    RankListener::start(listener, key, HOST_PROLOGUE.to_vec(), process.num_ranks())?;
                let address = format!("{}:{}", process.host(), process.port());
                Role::Host(RendezvousHost::new(listener, left_file, hello, address))
            }
            _ => Role::Client(RendezvousClient::new(process, hello, KeySource::of(process)?)),
        };
        Ok(Rendezvous { process: process.clone(), role: Mutex::new(role) })
    }

    /// The process of this rendezvous.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Reports an error of this process to the other ranks, which ends the start on all of them with the error and the number of this
    /// rank. Waits a few seconds at most for ranks that are not connected yet. Does nothing once the ranks are connected.
    pub fn fail(&self, error: &Error) {
        let role = &mut *self.role.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(role, Role::Done) {
            Role::Host(mut host) => host.fail(error, FAILED_WAIT),
            Role::Client(mut client) => client.fail(error, FAILED_WAIT),
            Role::Alone | Role::Done => {}
        }
    }

    /// Connects to all other ranks within `limit`. Returns the connections by rank.
    ///
    /// # Errors
    /// `Kind::Timeout` naming the ranks that did not connect; `Kind::Config` for ranks that differ in their configuration or have the
    /// same number; `Kind::PeerLost` for a process that ended; the error that another rank reported; `Kind::Io` for a rank that cannot be
    /// reached.
    pub(crate) fn connect(
        &self,
        config: &WorldConfig,
        limit: Duration,
        hook: Option<&WaitHook>,
    ) -> Result<Vec<Option<Link>>> {
        let role = &mut *self.role.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wait = JoinWait { limit, start: Instant::now(), hook };
        let connected = match role {
            Role::Alone => return Ok(vec![None]),
            Role::Host(host) => host.connect(config, &mut wait),
            Role::Client(client) => client.connect(config, &mut wait),
            Role::Done => Err(Error::new(
                Kind::Config,
                "the rendezvous is used up: each serves one world, open another with Rendezvous::open",
            )),
        };
        // The host stays after a failure, to send the reason to ranks that connect later; after a timeout it has waited long enough.
        let is_known = connected.as_ref().map_or_else(|e| e.kind() == Kind::Timeout, |_| true);
        if is_known || !matches!(role, Role::Host(_)) {
            *role = Role::Done;
        }
        connected
    }
}

/// Listens where the other ranks reach rank 0, or at the address of `--listen`, and nowhere else.
fn listen(process: &Process) -> Result<TcpListener> {
    let port = process.port();
    let refused = |why: String, help: String| {
        let why = format!("rank {} cannot listen on port {port}: {why}", process.rank());
        Error::new(Kind::Io, why).detail("help", help)
    };
    let host = process.listen_host().unwrap_or(process.host());
    let help = || {
        match process.listen_host() {
        Some(_) => {
            "--listen (SHARDGRAD_LISTEN) takes a name or an address of the machine of rank 0, or 0.0.0.0 for all of its addresses".to_string()
        }
        None => format!(
            "set MASTER_ADDR to a name or an address of the machine of rank 0, the same for all processes; if {host} is forwarded to this \
             machine, as the virtual address of a Kubernetes Service is, say where rank 0 listens with --listen or SHARDGRAD_LISTEN, such \
             as 0.0.0.0 for all of its addresses"
        ),
    }
    };
    let addresses = addresses::of_listener(process).map_err(|e| refused(format!("{host}: {e}"), help()))?;
    addresses::listen(&addresses).map_err(|e| match e.kind() {
        ErrorKind::AddrNotAvailable => refused(format!("{host} is not an address of this machine"), help()),
        _ => refused(e.to_string(), "give all processes another port with SHARDGRAD_PORT".to_string()),
    })
}

/// The refusal by the process that listens on the port of this rank 0, if that process is another rank 0.
fn refused_by_other_rank_zero(process: &Process, hello: &Hello, source: &KeySource) -> Option<Error> {
    let start = Instant::now();
    let mut addresses = addresses::of_listener(process).ok()?;
    addresses.iter_mut().filter(|address| address.ip().is_unspecified()).for_each(|address| {
        address.set_ip(if address.is_ipv4() {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        });
    });
    let mut link = loop {
        // The other rank 0 may not have left its token yet.
        match connect(addresses.clone(), hello, source) {
            Ok((link, _)) => break link,
            Err(_) if start.elapsed() > OTHER_RANK_ZERO_WAIT => return None,
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    };
    match HostMessage::decode(&link.poll(OTHER_RANK_ZERO_WAIT).ok()??)? {
        HostMessage::Refused(error) => Some(error),
        _ => None,
    }
}

/// A duration in seconds, as in `5 s`.
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

/// `rank 1`, or `ranks 1, 3`.
fn names(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(NAMED_RANKS_MAX).map(usize::to_string).collect();
    let many = if ranks.len() > 1 { "ranks" } else { "rank" };
    let more = ranks.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{many} {}{more}", shown.join(", "))
}
