//! The rendezvous client, every rank but rank 0: connects to rank 0, then to all other ranks.

use super::handshake::{Incoming, MessageListener, POLL_INTERVAL, poll, send};
use super::message::{ClientMessage, Hello, HostMessage, ListenAddress, WorldConfig};
use super::{GRACE, JoinWait, RAISE_TIMEOUT, listen, names, seconds};
use crate::encoding::{Decoder, Encoder};
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The timeout of one attempt to connect.
const ATTEMPT_TIME: Duration = Duration::from_secs(2);
/// How long a failing process waits for rank 0 to read its report.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// An attempt to connect to rank 0, repeated by a thread until rank 0 listens.
#[derive(Debug)]
struct ConnectAttempt {
    stream: Receiver<TcpStream>,
    /// Why there is no connection yet.
    reason: Arc<Mutex<String>>,
    is_over: Arc<AtomicBool>,
}

impl ConnectAttempt {
    /// Starts to connect; `hello` is the first message.
    fn begin(process: &Process, hello: &Hello, reason: &str) -> ConnectAttempt {
        let (sender, stream) = channel();
        let reason = Arc::new(Mutex::new(reason.to_string()));
        let attempt = ConnectAttempt { stream, reason: reason.clone(), is_over: Arc::default() };
        let (host, port, hello) = (process.host().to_string(), process.port(), hello.encode());
        let is_over = attempt.is_over.clone();
        let connect = move || {
            while !is_over.load(Ordering::SeqCst) {
                let found = (host.as_str(), port).to_socket_addrs().map_err(|e| e.to_string());
                match found.and_then(|addresses| connect(addresses, &hello)) {
                    Ok(stream) => return drop(sender.send(stream)),
                    Err(why) => *reason.lock().unwrap_or_else(PoisonError::into_inner) = why,
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        };
        // If no thread can be started, there is no connection, and the wait for it times out.
        let _ = std::thread::Builder::new().name("rendezvous".to_string()).spawn(connect);
        attempt
    }

    fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The connection, if it is made within `limit`.
    fn stream(&self, limit: Duration) -> Option<TcpStream> {
        self.stream.recv_timeout(limit).ok()
    }
}

impl Drop for ConnectAttempt {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Connects to the first reachable address and sends a message.
fn connect(addresses: impl Iterator<Item = SocketAddr>, message: &[u8]) -> Result<TcpStream, String> {
    let mut why = "the host name has no address".to_string();
    for address in addresses {
        let connected = TcpStream::connect_timeout(&address, ATTEMPT_TIME).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            send(&mut stream, message)?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(e) => why = e.to_string(),
        }
    }
    Err(why)
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
    attempt: ConnectAttempt,
}

impl RendezvousClient {
    /// Starts to connect to rank 0.
    pub(super) fn new(process: &Process, hello: Hello) -> RendezvousClient {
        let attempt = ConnectAttempt::begin(process, &hello, "not tried yet");
        RendezvousClient { process: process.clone(), hello, attempt }
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
        let Some(mut stream) = self.attempt.stream(limit) else { return };
        report_failure(&mut stream, error);
    }

    /// Connects to all other ranks. Returns the connections by rank.
    ///
    /// # Errors
    /// The reason why the start fails.
    pub(super) fn connect(
        &mut self,
        config: &WorldConfig,
        wait: &mut JoinWait<'_>,
    ) -> Result<Vec<Option<TcpStream>>> {
        let listener = listen(&self.process, 0)?;
        let ready = ClientMessage::Ready(config.clone(), listener.local_addr()?.port()).encode();
        let (mut zero, secret, addresses) = loop {
            if wait.is_over() {
                return Err(self.not_connected(wait.limit, &self.attempt.reason()));
            }
            let Some(mut stream) = self.attempt.stream(POLL_INTERVAL) else {
                let (at, reason) = (self.address(), self.attempt.reason());
                wait.report(|| format!("waiting for rank 0 ({at}): {reason}"));
                continue;
            };
            match self.register(&mut stream, &ready, wait) {
                Ok((secret, addresses)) => break (stream, secret, addresses),
                Err(RegisterError::Failed(error)) => return Err(error),
                Err(RegisterError::Unknown(why)) => {
                    std::thread::sleep(POLL_INTERVAL);
                    self.attempt = ConnectAttempt::begin(&self.process, &self.hello, &why);
                }
            }
        };
        let limit = wait.limit + GRACE + GRACE;
        let connected = self.connect_all(&mut zero, secret, &addresses, listener, limit);
        let mut streams = connected.inspect_err(|error| {
            // Errors that rank 0 itself sent are not reported back to it.
            if error.kind() == Kind::Io {
                report_failure(&mut zero, error);
            }
        })?;
        let start = Instant::now();
        send(&mut zero, &ClientMessage::Connected.encode()).map_err(|e| self.lost(&e.to_string()))?;
        while !self.has_started(&mut zero)? {
            if start.elapsed() > limit {
                return Err(self.lost(&format!("no message came from it for {}", seconds(limit))));
            }
        }
        streams[0] = Some(zero);
        Ok(streams)
    }

    /// Tells rank 0 that this rank is ready, and waits for the addresses of all ranks.
    fn register(
        &self,
        stream: &mut TcpStream,
        ready: &[u8],
        wait: &mut JoinWait<'_>,
    ) -> Result<(u64, Vec<ListenAddress>), RegisterError> {
        // An error is ignored: rank 0 may have sent a refusal and closed the connection, and the refusal is read below.
        let _ = send(stream, ready);
        let (mut is_registered, mut last_message, limit) = (false, Instant::now(), wait.remaining() + GRACE);
        loop {
            let bytes = match poll(stream, POLL_INTERVAL) {
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
                Some(HostMessage::Peers(secret, addresses))
                    if addresses.len() == self.process.num_ranks() =>
                {
                    return Ok((secret, addresses));
                }
                Some(HostMessage::Refused(error)) => return Err(RegisterError::Failed(error)),
                _ => return Err(RegisterError::Unknown("a malformed message came from there".to_string())),
            }
        }
    }

    /// Connects to the ranks with lower numbers, except 0, and accepts connections of those with higher numbers.
    fn connect_all(
        &self,
        zero: &mut TcpStream,
        secret: u64,
        addresses: &[ListenAddress],
        listener: TcpListener,
        limit: Duration,
    ) -> Result<Vec<Option<TcpStream>>> {
        let (start, me, port) = (Instant::now(), self.rank(), listener.local_addr()?.port());
        let here = zero.peer_addr()?.ip();
        let mut streams: Vec<Option<TcpStream>> = (0..addresses.len()).map(|_| None).collect();
        let mut pass = Encoder::default();
        pass.number(secret).count(me);
        for (rank, (host, port)) in addresses.iter().enumerate().take(me).skip(1) {
            // An empty address is that of the machine of rank 0.
            let ip = if host.is_empty() { Some(here) } else { host.parse().ok() };
            let stream = ip.ok_or_else(|| "the rank has no address".to_string());
            let stream = stream.and_then(|ip| connect(std::iter::once(SocketAddr::new(ip, *port)), &pass.0));
            streams[rank] = Some(stream.map_err(|e| {
                let host = if host.is_empty() { self.process.host() } else { host };
                unreachable(format!("rank {me} cannot connect to rank {rank} ({host}:{port}): {e}"))
            })?);
        }
        let listener = MessageListener::new(listener);
        loop {
            let missing: Vec<usize> =
                (me + 1..addresses.len()).filter(|rank| streams[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            if start.elapsed() > limit {
                let (names, limit) = (names(&missing), seconds(limit));
                let why = format!("{names} did not connect to rank {me} (its port {port}) within {limit}");
                return Err(unreachable(why));
            }
            let next = listener.next(move |bytes| {
                let mut from = Decoder(bytes);
                from.number().filter(|sent| *sent == secret)?;
                from.count()
            });
            if let Some(Incoming { stream, message }) =
                next.filter(|incoming| missing.contains(&incoming.message))
            {
                streams[message] = Some(stream);
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
    fn has_started(&self, zero: &mut TcpStream) -> Result<bool> {
        match poll(zero, POLL_INTERVAL).map_err(|why| self.lost(&why))? {
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
fn report_failure(stream: &mut TcpStream, error: &Error) {
    let start = Instant::now();
    // A rank 0 that has ended needs no report.
    let _ = send(stream, &ClientMessage::Failed(error.clone()).encode());
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(REPORT_TIME));
    while stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0) && start.elapsed() < REPORT_TIME {}
}

fn unreachable(why: String) -> Error {
    let help =
        "every machine must reach every other one at any port above 1023: check firewalls and host names";
    Error::new(Kind::Io, why).detail("help", help)
}
