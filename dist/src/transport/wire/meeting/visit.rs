//! The side of every other rank in a rendezvous: it connects to rank 0 and then to all others.

use super::handshake::{Door, Guest, NAP, poll, send};
use super::message::{Answer, Facts, Hello, Place, Report};
use super::{GRACE, LONGER, Waiting, listen, names, seconds};
use crate::bytes::{Reading, Writing};
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long one attempt to connect lasts.
const ATTEMPT: Duration = Duration::from_secs(2);
/// How long a process that fails waits for rank 0 to take its report.
const TAKE: Duration = Duration::from_millis(200);

/// A connection to rank 0 that a thread makes as soon as rank 0 listens.
#[derive(Debug)]
struct Call {
    stream: Receiver<TcpStream>,
    /// Why there is none yet.
    reason: Arc<Mutex<String>>,
    is_over: Arc<AtomicBool>,
}

impl Call {
    /// Begins to connect; the first message says who this is.
    fn begin(process: &Process, hello: &Hello, reason: &str) -> Call {
        let (sender, stream) = channel();
        let reason = Arc::new(Mutex::new(reason.to_string()));
        let call = Call { stream, reason: reason.clone(), is_over: Arc::default() };
        let (host, port, hello) = (process.host().to_string(), process.port(), hello.write());
        let is_over = call.is_over.clone();
        let connect = move || {
            while !is_over.load(Ordering::SeqCst) {
                let found = (host.as_str(), port).to_socket_addrs().map_err(|e| e.to_string());
                match found.and_then(|addresses| connect(addresses, &hello)) {
                    Ok(stream) => return drop(sender.send(stream)),
                    Err(why) => *reason.lock().unwrap_or_else(PoisonError::into_inner) = why,
                }
                std::thread::sleep(NAP);
            }
        };
        // Without a thread there is no connection, which ends the wait for one.
        let _ = std::thread::Builder::new().name("rendezvous".to_string()).spawn(connect);
        call
    }

    fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The connection, if there is one soon.
    fn stream(&self, limit: Duration) -> Option<TcpStream> {
        self.stream.recv_timeout(limit).ok()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Connects to one of some addresses and sends a message.
fn connect(addresses: impl Iterator<Item = SocketAddr>, message: &[u8]) -> Result<TcpStream, String> {
    let mut why = "the name has no address".to_string();
    for address in addresses {
        let connected = TcpStream::connect_timeout(&address, ATTEMPT).and_then(|mut stream| {
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

/// Why a conversation with rank 0 is over.
enum Stopped {
    /// For good.
    Failed(Error),
    /// Nothing shows that it was rank 0: it may come yet.
    Unknown(String),
}

/// A rank other than 0 on its way to the others.
#[derive(Debug)]
pub(super) struct Visitor {
    process: Process,
    hello: Hello,
    call: Call,
}

impl Visitor {
    /// Begins to connect to rank 0.
    pub(super) fn new(process: &Process, hello: Hello) -> Visitor {
        let call = Call::begin(process, &hello, "not tried yet");
        Visitor { process: process.clone(), hello, call }
    }

    fn rank(&self) -> usize {
        self.process.rank()
    }

    /// Host and port of rank 0.
    fn address(&self) -> String {
        format!("{}:{}", self.process.host(), self.process.port())
    }

    /// Tells rank 0, once connected, that this process cannot take part.
    pub(super) fn fail(&mut self, error: &Error, limit: Duration) {
        let Some(mut stream) = self.call.stream(limit) else { return };
        report_failure(&mut stream, error);
    }

    /// Connects to all others. Returns the connections to them, by rank.
    ///
    /// # Errors
    /// Why the start fails.
    pub(super) fn meet(
        &mut self,
        facts: &Facts,
        waiting: &mut Waiting<'_>,
    ) -> Result<Vec<Option<TcpStream>>> {
        let listener = listen(&self.process, 0)?;
        let ready = Report::Ready(facts.clone(), listener.local_addr()?.port()).write();
        let (mut zero, secret, places) = loop {
            if waiting.is_over() {
                return Err(self.not_connected(waiting.limit, &self.call.reason()));
            }
            let Some(mut stream) = self.call.stream(NAP) else {
                let (at, reason) = (self.address(), self.call.reason());
                waiting.report(|| format!("waiting for rank 0 ({at}): {reason}"));
                continue;
            };
            match self.greet(&mut stream, &ready, waiting) {
                Ok((secret, places)) => break (stream, secret, places),
                Err(Stopped::Failed(error)) => return Err(error),
                Err(Stopped::Unknown(why)) => {
                    std::thread::sleep(NAP);
                    self.call = Call::begin(&self.process, &self.hello, &why);
                }
            }
        };
        let limit = waiting.limit + GRACE + GRACE;
        let connected = self.connect_all(&mut zero, (secret, &places), listener, limit);
        let mut streams = connected.inspect_err(|error| {
            // What rank 0 said itself is no news to it.
            if error.kind() == Kind::Io {
                report_failure(&mut zero, error);
            }
        })?;
        let start = Instant::now();
        send(&mut zero, &Report::Connected.write()).map_err(|e| self.lost(&e.to_string()))?;
        while !self.is_begun(&mut zero)? {
            if start.elapsed() > limit {
                return Err(self.lost(&format!("no message came from it for {}", seconds(limit))));
            }
        }
        streams[0] = Some(zero);
        Ok(streams)
    }

    /// Tells rank 0 that this rank is ready, and waits for its welcome.
    fn greet(
        &self,
        stream: &mut TcpStream,
        ready: &[u8],
        waiting: &mut Waiting<'_>,
    ) -> Result<(u64, Vec<Place>), Stopped> {
        // Rank 0 may have refused this start while the process prepared, and closed the connection; that is read below.
        let _ = send(stream, ready);
        let (mut is_noted, mut heard, limit) = (false, Instant::now(), waiting.left() + GRACE);
        loop {
            let bytes = match poll(stream, NAP) {
                Ok(Some(bytes)) => bytes,
                Ok(None) if heard.elapsed() > limit.max(GRACE) => {
                    let why = format!("it sent no message for {}", seconds(limit));
                    return Err(Stopped::Failed(self.not_connected(waiting.limit, &why)));
                }
                Ok(None) => {
                    let at = self.address();
                    waiting.report(|| match is_noted {
                        true => format!("connected to rank 0 ({at}), which waits for other ranks"),
                        false => format!("connected to rank 0 ({at}), which has not answered yet"),
                    });
                    continue;
                }
                Err(why) if is_noted => return Err(Stopped::Failed(self.lost(&why))),
                Err(why) => return Err(Stopped::Unknown(why)),
            };
            match Answer::read(&bytes) {
                Some(Answer::Noted) => (is_noted, heard) = (true, Instant::now()),
                Some(Answer::Welcome(secret, places)) if places.len() == self.process.num_ranks() => {
                    return Ok((secret, places));
                }
                Some(Answer::Refused(error)) => return Err(Stopped::Failed(error)),
                _ => return Err(Stopped::Unknown("a malformed message came from there".to_string())),
            }
        }
    }

    /// Connects to the ranks of lower numbers but 0, and waits for those of higher ones.
    fn connect_all(
        &self,
        zero: &mut TcpStream,
        (secret, places): (u64, &[Place]),
        listener: TcpListener,
        limit: Duration,
    ) -> Result<Vec<Option<TcpStream>>> {
        let (start, me, port) = (Instant::now(), self.rank(), listener.local_addr()?.port());
        let here = zero.peer_addr()?.ip();
        let mut streams: Vec<Option<TcpStream>> = (0..places.len()).map(|_| None).collect();
        let mut pass = Writing::default();
        pass.number(secret).count(me);
        for (rank, (host, port)) in places.iter().enumerate().take(me).skip(1) {
            // Those that rank 0 reaches on its own machine are reached there.
            let ip = if host.is_empty() { Some(here) } else { host.parse().ok() };
            let stream = ip.ok_or_else(|| "it has no address".to_string());
            let stream = stream.and_then(|ip| connect(std::iter::once(SocketAddr::new(ip, *port)), &pass.0));
            streams[rank] = Some(stream.map_err(|e| {
                let host = if host.is_empty() { self.process.host() } else { host };
                unreachable(format!("rank {me} cannot connect to rank {rank} ({host}:{port}): {e}"))
            })?);
        }
        let door = Door::new(listener);
        loop {
            let missing: Vec<usize> =
                (me + 1..places.len()).filter(|rank| streams[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            if start.elapsed() > limit {
                let (names, limit) = (names(&missing), seconds(limit));
                let why = format!("{names} did not connect to rank {me} (its port {port}) within {limit}");
                return Err(unreachable(why));
            }
            let next = door.next(move |bytes| {
                let mut from = Reading(bytes);
                from.number().filter(|told| *told == secret)?;
                from.count()
            });
            if let Some(Guest { stream, message }) = next.filter(|guest| missing.contains(&guest.message)) {
                streams[message] = Some(stream);
            }
            if self.is_begun(zero)? {
                return Err(self.lost("it sent a message out of turn"));
            }
        }
    }

    /// Whether rank 0 says that all ranks are connected.
    ///
    /// # Errors
    /// Why the start has failed, as rank 0 says; `Kind::PeerLost` if its process has ended.
    fn is_begun(&self, zero: &mut TcpStream) -> Result<bool> {
        match poll(zero, NAP).map_err(|why| self.lost(&why))? {
            None => Ok(false),
            Some(bytes) => match Answer::read(&bytes) {
                Some(Answer::Begin) => Ok(true),
                Some(Answer::Noted) => Ok(false),
                Some(Answer::Refused(error)) => Err(error),
                _ => Err(self.lost("it sent a malformed message")),
            },
        }
    }

    /// The error of a wait for rank 0.
    fn not_connected(&self, limit: Duration, why: &str) -> Error {
        let (me, at, limit) = (self.rank(), self.address(), seconds(limit));
        let text = format!("rank {me} did not connect to rank 0 ({at}) within {limit}: {why}");
        let help = "check that rank 0 runs on the machine that MASTER_ADDR names, and that its port can be reached from here";
        Error::new(Kind::Timeout, text).detail("help", help).detail("help", LONGER)
    }

    /// The error of a rank 0 that has gone.
    fn lost(&self, why: &str) -> Error {
        let text = "rank 0's process ended before all ranks had connected";
        Error::new(Kind::PeerLost, text).detail("address", self.address()).detail("reason", why)
    }
}

/// Sends a failure to rank 0 and gives it a moment to take it.
fn report_failure(stream: &mut TcpStream, error: &Error) {
    let start = Instant::now();
    // A rank 0 that has gone needs no report.
    let _ = send(stream, &Report::Failed(error.clone()).write());
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(TAKE));
    while stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0) && start.elapsed() < TAKE {}
}

fn unreachable(why: String) -> Error {
    let help =
        "every machine must reach every other one at any port above 1023: check firewalls and host names";
    Error::new(Kind::Io, why).detail("help", help)
}
