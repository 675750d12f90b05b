//! The rendezvous of the processes of a world.
//!
//! Rank 0 listens at the port that all know. Every other rank connects to it as soon as it is started and names its rank and run.
//! When it is ready, it sends the port at which it listens itself and what all ranks must have alike; rank 0 compares that with its
//! own. When all are ready, rank 0 gives each a secret of this rendezvous and where the others listen; each connects to those of
//! lower numbers and accepts those of higher ones. Processes of another run and strangers are sent away. A rank that cannot take
//! part, that ends, or that differs ends the start for all: rank 0 tells the others why.

mod message;
mod handshake;
mod host;
mod visit;

pub(crate) use message::{Facts, Values};

use crate::bytes::printable;
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use handshake::{poll, send};
use host::Host;
use message::{Answer, Hello};
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use visit::Visitor;

/// How much longer than rank 0 the others wait for what it says, and all for the last connections.
const GRACE: Duration = Duration::from_secs(5);
/// How long a process that fails waits for the other ranks to connect, so that they learn why.
const FAILED_WAIT: Duration = Duration::from_secs(5);
/// How long a second rank 0 waits for the answer of the first.
const TWIN_WAIT: Duration = Duration::from_secs(1);
/// No more ranks are named in one message.
const NAMES_MAX: usize = 16;

const LONGER: &str = "check that every rank was started; raise the limit with --timeout";

/// What is called with one line of text where a rendezvous takes long.
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

/// The wait of one process for the others.
#[derive(Debug)]
struct Waiting<'a> {
    limit: Duration,
    start: Instant,
    hook: Option<&'a WaitHook>,
}

impl Waiting<'_> {
    fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Calls the hook once, after its time.
    fn report(&mut self, text: impl FnOnce() -> String) {
        let waited = self.start.elapsed();
        if let Some(hook) = self.hook.take_if(|hook| waited >= hook.after) {
            let waited = Duration::from_secs(waited.as_secs());
            (hook.call)(&format!("{} ({} so far)", printable(&text(), usize::MAX), seconds(waited)));
        }
    }
}

/// A process on its way to the other processes of its world ([`World::join_at`](crate::World::join_at)), from its start on.
///
/// A program opens it before it reads arguments and files. Whatever refuses them then ends the start on all ranks at once, if it is
/// [reported](Rendezvous::fail); otherwise the others wait for this rank until their time is over. That a process has ended is
/// noticed without a report.
#[derive(Debug)]
pub struct Rendezvous {
    process: Process,
    side: Mutex<Side>,
}

#[derive(Debug)]
enum Side {
    /// The only rank.
    Alone,
    Host(Host),
    Visitor(Visitor),
    /// The ranks are connected, or know that they will not be.
    Over,
}

impl Rendezvous {
    /// Rank 0 begins to listen, every other rank to connect. Nothing waits.
    ///
    /// # Errors
    /// `Kind::Io` for a port at which rank 0 cannot listen; `Kind::Config` if the process that listens there is rank 0 of the same run.
    pub fn open(process: &Process) -> Result<Rendezvous> {
        let hello = Hello {
            rank: process.rank(),
            run: printable(process.run(), usize::MAX),
            version: env!("CARGO_PKG_VERSION").to_string(),
            num_ranks: process.num_ranks(),
        };
        let side = match process.rank() {
            _ if process.num_ranks() == 1 => Side::Alone,
            0 => {
                let listener = listen(process, process.port())
                    .map_err(|e| refused_by_twin(process, &hello).unwrap_or(e))?;
                Side::Host(Host::new(listener, hello, format!("{}:{}", process.host(), process.port())))
            }
            _ => Side::Visitor(Visitor::new(process, hello)),
        };
        Ok(Rendezvous { process: process.clone(), side: Mutex::new(side) })
    }

    /// Which process this is.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Tells the other ranks that this process cannot take part, which ends the start on all of them with this error and the number
    /// of this rank. Waits some seconds at most for those that are not connected yet, and does nothing once the ranks are connected.
    pub fn fail(&self, error: &Error) {
        let side = &mut *self.side.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(side, Side::Over) {
            Side::Host(mut host) => host.fail(error, FAILED_WAIT),
            Side::Visitor(mut visitor) => visitor.fail(error, FAILED_WAIT),
            Side::Alone | Side::Over => {}
        }
    }

    /// Returns connections to all other ranks, by their numbers, once all have come within a limit.
    ///
    /// # Errors
    /// `Kind::Timeout` naming the ranks that did not come; `Kind::Config` for ranks that differ or have one number; `Kind::PeerLost`
    /// for one whose process ended; what a rank that cannot take part has reported; `Kind::Io` where one cannot be reached.
    pub(crate) fn meet(
        &self,
        facts: &Facts,
        limit: Duration,
        hook: Option<&WaitHook>,
    ) -> Result<Vec<Option<TcpStream>>> {
        let side = &mut *self.side.lock().unwrap_or_else(PoisonError::into_inner);
        let mut waiting = Waiting { limit, start: Instant::now(), hook };
        let met = match side {
            Side::Alone => return Ok(vec![None]),
            Side::Host(host) => host.meet(facts, &mut waiting),
            Side::Visitor(visitor) => visitor.meet(facts, &mut waiting),
            Side::Over => Err(Error::new(Kind::Config, "a rendezvous is for one world: open another")),
        };
        // Ranks that have not connected yet may still come and be told why, but for those that were waited for in vain.
        let is_known = met.as_ref().map_or_else(|e| e.kind() == Kind::Timeout, |_| true);
        if is_known || !matches!(side, Side::Host(_)) {
            *side = Side::Over;
        }
        met
    }
}

/// The addresses at which the others can reach this machine, the better first: none but its own, where that of rank 0 is one.
fn addresses(process: &Process) -> [IpAddr; 2] {
    let any = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    match process.host() {
        "localhost" => [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        // The second version takes connections of the first too; a machine may have the one or the other.
        host => host.parse().ok().filter(IpAddr::is_loopback).map_or(any, |ip| [ip, ip]),
    }
}

/// Listens where the others can reach this machine.
fn listen(process: &Process, port: u16) -> Result<TcpListener> {
    let [first, second] = addresses(process);
    let found = TcpListener::bind(SocketAddr::new(first, port)).or_else(|e| match e.kind() {
        ErrorKind::AddrInUse | ErrorKind::PermissionDenied => Err(e),
        _ => TcpListener::bind(SocketAddr::new(second, port)),
    });
    let listener = found.map_err(|e| {
        let why = format!("rank {} cannot listen at port {port}: {e}", process.rank());
        Error::new(Kind::Io, why).detail("help", "give all processes another port with SHARDGRAD_PORT")
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// What the process that has the port of this rank 0 says, if it is another rank 0.
fn refused_by_twin(process: &Process, hello: &Hello) -> Option<Error> {
    let mut stream = TcpStream::connect((process.host(), process.port())).ok()?;
    send(&mut stream, &hello.write()).ok()?;
    let answer = poll(&mut stream, TWIN_WAIT).ok()??;
    match Answer::read(&answer)? {
        Answer::Refused(error) => Some(error),
        _ => None,
    }
}

/// A number of seconds, as in `5 s`.
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

/// `rank 1`, or `ranks 1, 3`.
fn names(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(NAMES_MAX).map(usize::to_string).collect();
    let many = if ranks.len() > 1 { "ranks" } else { "rank" };
    let more = ranks.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{many} {}{more}", shown.join(", "))
}
