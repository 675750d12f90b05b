//! The rendezvous client, every rank but rank 0: connects to rank 0, then to all other ranks.

use super::super::handshake::{HANDSHAKE_BYTES, Initiator, Key};
use super::super::link::{Link, receive_exact};
use super::super::listener::{HANDSHAKE_TIME, Incoming, RankListener};
use super::message::{
    ClientMessage, Hello, HostMessage, ListenAddress, Nonce, WorldConfig, decode_rank, encode_rank,
};
use super::token_file::KeySource;
use super::{GRACE, HOST_PROLOGUE, JoinWait, POLL_INTERVAL, RAISE_TIMEOUT, addresses, names, seconds};
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The timeout of one attempt to connect.
const ATTEMPT_TIME: Duration = Duration::from_secs(2);
/// The longest pause after a handshake that failed. The first pauses are shorter: rank 0 leaves its token right after it has started to
/// listen.
const REJECTED_PAUSE_MAX: Duration = Duration::from_millis(200);
/// How long a failing process waits for rank 0 to read its report.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// An attempt to connect to rank 0, repeated by a thread until rank 0 listens.
#[derive(Debug)]
struct ConnectAttempt {
    link: Receiver<(Link, Key)>,
    /// Why there is no connection yet.
    reason: Arc<Mutex<String>>,
    is_over: Arc<AtomicBool>,
}

impl ConnectAttempt {
    /// Starts to connect; `hello` is the first record.
    fn begin(process: &Process, hello: &Hello, source: &KeySource, reason: &str) -> ConnectAttempt {
        let (sender, link) = channel();
        let reason = Arc::new(Mutex::new(reason.to_string()));
        let attempt = ConnectAttempt { link, reason: reason.clone(), is_over: Arc::default() };
        let (process, hello, source) = (process.clone(), hello.clone(), source.clone());
        let is_over = attempt.is_over.clone();
        let repeat = move || {
            let mut rejected_pause = POLL_INTERVAL;
            while !is_over.load(Ordering::SeqCst) {
                let found =
                    addresses::of_rank_zero(&process).map_err(|e| ConnectError::NotReached(e.to_string()));
                let pause = match found.and_then(|addresses| connect(addresses, &hello, &source)) {
                    Ok(link) => return drop(sender.send(link)),
                    Err(why) => {
                        let (why, pause) = match why {
                            ConnectError::NotReached(why) => (why, POLL_INTERVAL),
                            ConnectError::NotProved(why) => {
                                let pause = rejected_pause;
                                rejected_pause = REJECTED_PAUSE_MAX.min(2 * pause);
                                (why, pause)
                            }
                        };
                        *reason.lock().unwrap_or_else(PoisonError::into_inner) = why;
                        pause
                    }
                };
                std::thread::sleep(pause);
            }
        };
        // If no thread can be started, there is no connection, and the wait for it times out.
        let _ = std::thread::Builder::new().name("rendezvous".to_string()).spawn(repeat);
        attempt
    }

    fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The connection, if it is made within `limit`.
    fn link(&self, limit: Duration) -> Option<(Link, Key)> {
        self.link.recv_timeout(limit).ok()
    }
}

impl Drop for ConnectAttempt {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Why there is no connection to a rank.
pub(super) enum ConnectError {
    /// Nothing listens there, or nothing can be reached.
    NotReached(String),
    /// The process there has not proved that it has the token, or this process has none yet.
    NotProved(String),
}

/// Connects to rank 0 at the first address where a process proves that it has the token, and sends the first record.
pub(super) fn connect(
    addresses: Vec<SocketAddr>,
    hello: &Hello,
    source: &KeySource,
) -> Result<(Link, Key), ConnectError> {
    let mut why = ConnectError::NotReached("the host name has no address".to_string());
    for address in addresses {
        let connected = reach(address).and_then(|stream| {
            let key = source.key().map_err(ConnectError::NotProved)?;
            Ok((prove(stream, &key, HOST_PROLOGUE, &hello.encode())?, key))
        });
        match connected {
            Ok(connected) => return Ok(connected),
            Err(e) => why = e,
        }
    }
    Err(why)
}

fn reach(address: SocketAddr) -> Result<TcpStream, ConnectError> {
    let connected = TcpStream::connect_timeout(&address, ATTEMPT_TIME).and_then(|stream| {
        stream.set_nodelay(true)?;
        Ok(stream)
    });
    connected.map_err(|e| ConnectError::NotReached(e.to_string()))
}

/// Performs the handshake of a new connection and sends the first record.
fn prove(mut stream: TcpStream, key: &Key, prologue: &[u8], hello: &[u8]) -> Result<Link, ConnectError> {
    let (initiator, first) = Initiator::begin(key, prologue);
    let mut reply = [0; HANDSHAKE_BYTES];
    let not_proved = |why: String| {
        ConnectError::NotProved(format!(
            "the process there has another token, or is not a rank of shardgrad: {why}"
        ))
    };
    let exchange = stream.write_all(&first).map_err(|e| e.to_string());
    exchange
        .and_then(|()| receive_exact(&mut stream, &mut reply, Instant::now(), HANDSHAKE_TIME))
        .map_err(not_proved)?;
    let session =
        initiator.finish(&reply).ok_or_else(|| not_proved("its reply does not verify".to_string()))?;
    let mut link = Link::new(stream, session);
    let mut record = Vec::new();
    link.sealer.seal(&[hello], &mut record);
    link.stream.write_all(&record).map_err(|e| not_proved(e.to_string()))?;
    Ok(link)
}

/// The prologue of handshakes with a rank other than 0.
fn prologue_of(rank: usize, nonce: &Nonce) -> Vec<u8> {
    [b"shardgrad rank ", &(rank as u64).to_le_bytes()[..], nonce].concat()
}

/// Why the registration with rank 0 failed.
enum RegisterError {
    /// The start has failed.
    Failed(Error),
    /// The peer may not have been rank 0, which may still start: try again.
    Unknown(String),
}

/// A rank other than rank 0 in a rendezvous.
#[derive(Debug)]
pub(super) struct RendezvousClient {
    process: Process,
    hello: Hello,
    source: KeySource,
    attempt: ConnectAttempt,
}

impl RendezvousClient {
    /// Starts to connect to rank 0.
    pub(super) fn new(process: &Process, hello: Hello, source: KeySource) -> RendezvousClient {
        let attempt = ConnectAttempt::begin(process, &hello, &source, "not tried yet");
        RendezvousClient { process: process.clone(), hello, source, attempt }
    }

    fn rank(&self) -> usize {
        self.process.rank()
    }

    /// Host and port of rank 0.
    fn address(&self) -> String {
        format!("{}:{}", self.process.host(), self.process.port())
    }

    /// Reports an error of this process to rank 0, if it connects within `limit`.
    pub(super) fn fail(&mut self, error: &Error, limit: Duration) {
        let Some((mut link, _)) = self.attempt.link(limit) else { return };
        report_failure(&mut link, error);
    }

    /// Connects to all other ranks. Returns the connections by rank.
    ///
    /// # Errors
    /// The reason why the start fails.
    pub(super) fn connect(
        &mut self,
        config: &WorldConfig,
        wait: &mut JoinWait<'_>,
    ) -> Result<Vec<Option<Link>>> {
        let (mut zero, key, listener, (nonce, addresses)) = loop {
            if wait.is_over() {
                return Err(self.not_connected(wait.limit, &self.attempt.reason()));
            }
            let Some((mut link, key)) = self.attempt.link(POLL_INTERVAL) else {
                let (at, reason) = (self.address(), self.attempt.reason());
                wait.report(|| format!("waiting for rank 0 ({at}): {reason}"));
                continue;
            };
            // The other ranks reach this one at the address from which it reaches rank 0.
            let mut here = link.stream.local_addr()?;
            here.set_port(0);
            let listener = TcpListener::bind(here)?;
            let ready = ClientMessage::Ready(config.clone(), listener.local_addr()?.port()).encode();
            match self.register(&mut link, &ready, wait) {
                Ok(peers) => break (link, key, listener, peers),
                Err(RegisterError::Failed(error)) => return Err(error),
                Err(RegisterError::Unknown(why)) => {
                    std::thread::sleep(POLL_INTERVAL);
                    self.attempt = ConnectAttempt::begin(&self.process, &self.hello, &self.source, &why);
                }
            }
        };
        let limit = wait.limit + GRACE + GRACE;
        let connected = self.connect_all(&mut zero, &key, &nonce, &addresses, listener, limit);
        let mut links = connected.inspect_err(|error| {
            // Errors that rank 0 itself sent are not reported back to it.
            if error.kind() == Kind::Io {
                report_failure(&mut zero, error);
            }
        })?;
        let start = Instant::now();
        zero.send(&ClientMessage::Connected.encode()).map_err(|e| self.lost(&e.to_string()))?;
        while !self.has_started(&mut zero)? {
            if start.elapsed() > limit {
                return Err(self.lost(&format!("no message came from it for {}", seconds(limit))));
            }
        }
        links[0] = Some(zero);
        let protection = self.hello.protection;
        Ok(links.into_iter().map(|link| link.map(|link| link.protected(protection))).collect())
    }

    /// Tells rank 0 that this rank is ready, and waits for the addresses of all ranks.
    fn register(
        &self,
        link: &mut Link,
        ready: &[u8],
        wait: &mut JoinWait<'_>,
    ) -> Result<(Nonce, Vec<ListenAddress>), RegisterError> {
        // An error is ignored: rank 0 may have sent a refusal and closed the connection, and the refusal is read below.
        let _ = link.send(ready);
        let (mut is_registered, mut last_message, limit) = (false, Instant::now(), wait.remaining() + GRACE);
        loop {
            let bytes = match link.poll(POLL_INTERVAL) {
                Ok(Some(bytes)) => bytes,
                Ok(None) if last_message.elapsed() > limit.max(GRACE) => {
                    let why = format!("it sent no message for {}", seconds(limit));
                    return Err(RegisterError::Failed(self.not_connected(wait.limit, &why)));
                }
                Ok(None) => {
                    let at = self.address();
                    wait.report(|| match is_registered {
                        true => format!("connected to rank 0 ({at}), which waits for other ranks"),
                        false => format!("connected to rank 0 ({at}), which has not answered yet"),
                    });
                    continue;
                }
                Err(why) if is_registered => return Err(RegisterError::Failed(self.lost(&why))),
                Err(why) => return Err(RegisterError::Unknown(why)),
            };
            match HostMessage::decode(&bytes) {
                Some(HostMessage::KeepWaiting) => (is_registered, last_message) = (true, Instant::now()),
                Some(HostMessage::Peers(nonce, addresses)) if addresses.len() == self.process.num_ranks() => {
                    return Ok((nonce, addresses));
                }
                Some(HostMessage::Refused(error)) => return Err(RegisterError::Failed(error)),
                _ => return Err(RegisterError::Unknown("a malformed message came from there".to_string())),
            }
        }
    }

    /// Connects to the ranks with lower numbers, except 0, and accepts connections of those with higher numbers.
    fn connect_all(
        &self,
        zero: &mut Link,
        key: &Key,
        nonce: &Nonce,
        addresses: &[ListenAddress],
        listener: TcpListener,
        limit: Duration,
    ) -> Result<Vec<Option<Link>>> {
        let (start, me, port) = (Instant::now(), self.rank(), listener.local_addr()?.port());
        let mut links: Vec<Option<Link>> = (0..addresses.len()).map(|_| None).collect();
        let listener = RankListener::start(listener, key.clone(), prologue_of(me, nonce), addresses.len())?;
        for (rank, (host, port)) in addresses.iter().enumerate().take(me).skip(1) {
            let failed = |why: String| {
                unreachable(format!("rank {me} cannot connect to rank {rank} ({host}:{port}): {why}"))
            };
            let ip = host.parse().map_err(|_| failed("the rank has no address".to_string()))?;
            links[rank] = loop {
                let prologue = prologue_of(rank, nonce);
                let connected = reach(SocketAddr::new(ip, *port))
                    .and_then(|stream| prove(stream, key, &prologue, &encode_rank(me)));
                match connected {
                    Ok(link) => break Some(link),
                    Err(ConnectError::NotReached(why)) => return Err(failed(why)),
                    // Strangers may have driven the connection out.
                    Err(ConnectError::NotProved(why)) if start.elapsed() > limit => return Err(failed(why)),
                    Err(ConnectError::NotProved(_)) => std::thread::sleep(POLL_INTERVAL),
                }
                if self.has_started(zero)? {
                    return Err(self.lost("it sent an unexpected message"));
                }
            };
        }
        loop {
            let missing: Vec<usize> =
                (me + 1..addresses.len()).filter(|rank| links[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(links);
            }
            if start.elapsed() > limit {
                let (names, limit) = (names(&missing), seconds(limit));
                let why = format!("{names} did not connect to rank {me} (its port {port}) within {limit}");
                return Err(unreachable(why));
            }
            if let Some(Incoming { link, hello }) = listener.next(POLL_INTERVAL)
                && let Some(rank) = decode_rank(&hello).filter(|rank| missing.contains(rank))
            {
                links[rank] = Some(link);
            }
            if self.has_started(zero)? {
                return Err(self.lost("it sent an unexpected message"));
            }
        }
    }

    /// Whether rank 0 has reported that all ranks are connected.
    ///
    /// # Errors
    /// The failure of the start that rank 0 reports; `Kind::PeerLost` if its process has ended.
    fn has_started(&self, zero: &mut Link) -> Result<bool> {
        match zero.poll(POLL_INTERVAL).map_err(|why| self.lost(&why))? {
            None => Ok(false),
            Some(bytes) => match HostMessage::decode(&bytes) {
                Some(HostMessage::Start) => Ok(true),
                Some(HostMessage::KeepWaiting) => Ok(false),
                Some(HostMessage::Refused(error)) => Err(error),
                _ => Err(self.lost("it sent a malformed message")),
            },
        }
    }

    /// The error of a timeout while waiting for rank 0.
    fn not_connected(&self, limit: Duration, why: &str) -> Error {
        let (me, at, limit) = (self.rank(), self.address(), seconds(limit));
        let text = format!("rank {me} did not connect to rank 0 ({at}) within {limit}: {why}");
        let help = "check that rank 0 runs on the machine that MASTER_ADDR names, and that its port can be reached from here";
        Error::new(Kind::Timeout, text).detail("help", help).detail("help", RAISE_TIMEOUT)
    }

    /// The error of a rank 0 whose process has ended.
    fn lost(&self, why: &str) -> Error {
        let text = "rank 0's process ended before all ranks had connected";
        Error::new(Kind::PeerLost, text).detail("address", self.address()).detail("reason", why)
    }
}

/// Sends an error to rank 0 and waits a moment until rank 0 has read it.
fn report_failure(link: &mut Link, error: &Error) {
    let start = Instant::now();
    // A rank 0 that has ended needs no report.
    let _ = link.send(&ClientMessage::Failed(error.clone()).encode());
    let stream = &mut link.stream;
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(REPORT_TIME));
    while stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0) && start.elapsed() < REPORT_TIME {}
}

fn unreachable(why: String) -> Error {
    let help =
        "every machine must reach every other one at any port above 1023: check firewalls and host names";
    Error::new(Kind::Io, why).detail("help", help)
}
