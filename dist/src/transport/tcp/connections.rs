//! The connections of one process to all others. One thread per connection reads all incoming frames, so that senders never wait for
//! what the receiving rank computes; one more thread sends heartbeats.

use super::frame::{Frame, HEARTBEAT, PREFIX_BYTES, lengths, set_body};
use super::world_view::WorldView;
use crate::error::{Error, Kind, Result};
use crate::report;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The interval between heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// The least time without any data after which a process is lost, however short the timeout of waits is.
const SILENCE_MIN: Duration = Duration::from_secs(10);
/// The timeout of one read, after which the silence of the peer is counted.
const READ_TIMEOUT: Duration = Duration::from_millis(250);
/// The timeout of one write, after which the writer runs its checks.
const WRITE_TIMEOUT: Duration = Duration::from_millis(10);
/// How long a process waits at the end for the others to send final frames, and to close their connections.
const LINGER: Duration = Duration::from_millis(500);
/// The largest body that is copied behind its head and sent in one write.
const SINGLE_WRITE_BYTES_MAX: usize = 16 << 10;

/// The write half of a connection; `None` after a frame was written only in part.
type WriteHalf = Mutex<Option<TcpStream>>;

/// The state that the threads of a process share.
#[derive(Debug)]
pub(super) struct SharedConnections {
    view: Arc<WorldView>,
    /// By rank; `None` for this rank.
    write_halves: Vec<Option<WriteHalf>>,
    is_over: AtomicBool,
    /// The number of connections that are still read.
    open: AtomicUsize,
}

/// All connections of a process.
#[derive(Debug)]
pub(crate) struct Connections {
    shared: Arc<SharedConnections>,
    streams: Vec<TcpStream>,
    readers: Vec<JoinHandle<()>>,
    heartbeat: Option<JoinHandle<()>>,
}

impl Connections {
    /// Starts to read from the connections to other ranks, by rank. A rank from which nothing arrives for longer than `limit` is lost.
    ///
    /// # Errors
    /// `Kind::Io` if a thread or a socket option fails.
    pub(super) fn start(
        view: Arc<WorldView>,
        streams: Vec<Option<TcpStream>>,
        limit: Duration,
    ) -> Result<Connections> {
        let reading = |(from, stream): (usize, &Option<TcpStream>)| {
            stream.as_ref().map(|stream| stream.try_clone().map(|stream| (from, stream)))
        };
        let readings = streams.iter().enumerate().filter_map(reading);
        let readings = readings.collect::<std::io::Result<Vec<(usize, TcpStream)>>>()?;
        for stream in streams.iter().flatten() {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(READ_TIMEOUT))?;
            stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        }
        let streams_kept =
            streams.iter().flatten().map(TcpStream::try_clone).collect::<std::io::Result<_>>()?;
        let write_halves = streams.into_iter().map(|s| Some(Mutex::new(Some(s?)))).collect();
        let open = AtomicUsize::new(readings.len());
        let shared =
            Arc::new(SharedConnections { view, write_halves, is_over: AtomicBool::new(false), open });
        let mut connections = Connections {
            shared: shared.clone(),
            streams: streams_kept,
            readers: Vec::new(),
            heartbeat: None,
        };
        for (from, stream) in readings {
            let shared = shared.clone();
            let read = move || {
                let why = Reader { from, stream, shared: &shared, limit: limit.max(SILENCE_MIN) }.read_all();
                shared.view.mark_lost(from, &why);
                shared.open.fetch_sub(1, Ordering::SeqCst);
                shared.view.condvar.notify_all();
            };
            connections.readers.push(Builder::new().name(format!("from-rank-{from}")).spawn(read)?);
        }
        let heartbeat = move || {
            while !shared.is_over.load(Ordering::SeqCst) {
                shared.send_heartbeats();
                std::thread::park_timeout(HEARTBEAT_EVERY);
            }
        };
        connections.heartbeat = Some(Builder::new().name("heartbeat".to_string()).spawn(heartbeat)?);
        Ok(connections)
    }

    /// Writes a frame. `tick` runs while the peer reads nothing; its error ends the write, and no frame is sent there any more. A
    /// connection closed by the peer is no error here: the frames received from the peer state the reason.
    ///
    /// # Errors
    /// The errors of `tick`.
    pub(super) fn send(
        &self,
        to: usize,
        head: &mut [u8],
        body: &[u8],
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let Some(half) = &self.shared.write_halves[to] else { return Ok(()) };
        set_body(head, body.len());
        let mut half = lock(half);
        let Some(stream) = &mut *half else { return Ok(()) };
        let written = if body.len() <= SINGLE_WRITE_BYTES_MAX {
            write(stream, &[head, body].concat(), &mut tick)
        } else {
            write(stream, head, &mut tick).and_then(|()| write(stream, body, &mut tick))
        };
        if written.is_err() {
            *half = None;
        }
        written
    }

    /// Sends a frame without a body to all other ranks, with a timeout for each.
    pub(super) fn send_to_all(&self, frame: &Frame, limit: Duration) {
        let mut head = frame.encode();
        for to in 0..self.shared.write_halves.len() {
            let start = Instant::now();
            let late = || Err(Error::new(Kind::Timeout, format!("rank {to} reads nothing")));
            // A rank that cannot be reached needs no frame.
            let _ = self.send(to, &mut head, &[], || if start.elapsed() > limit { late() } else { Ok(()) });
        }
    }

    /// Waits a moment for the final frames of all other ranks.
    pub(super) fn wait_for_final_frames(&self) {
        let (view, start) = (&self.shared.view, Instant::now());
        let done = || view.have_all_finished() || start.elapsed() > LINGER;
        let _ = view.condvar.wait(Duration::ZERO, done, || Ok(()));
    }
}

impl Drop for Connections {
    /// Closes all connections, write halves first, and joins the threads.
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        if let Some(heartbeat) = self.heartbeat.take() {
            heartbeat.thread().unpark();
            let _ = heartbeat.join();
        }
        self.streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
        let start = Instant::now();
        let all_closed = || self.shared.open.load(Ordering::SeqCst) == 0 || start.elapsed() > LINGER;
        let _ = self.shared.view.condvar.wait(Duration::ZERO, all_closed, || Ok(()));
        self.streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
    }
}

impl SharedConnections {
    /// Sends a heartbeat to all other ranks, except those to which another frame is being written, or that read nothing.
    fn send_heartbeats(&self) {
        for half in self.write_halves.iter().flatten() {
            let half = match half.try_lock() {
                Ok(half) => half,
                Err(TryLockError::Poisoned(half)) => half.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            // A single byte is never written in part.
            half.iter().for_each(|mut stream| drop(stream.write(&[HEARTBEAT])));
        }
    }
}

fn lock(half: &WriteHalf) -> MutexGuard<'_, Option<TcpStream>> {
    half.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Writes all bytes, or as many as the peer accepts before it closes the connection.
fn write(stream: &mut TcpStream, mut bytes: &[u8], tick: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => bytes = &bytes[count..],
            Err(e) if is_pause(e.kind()) => tick()?,
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

/// The read half of a connection.
struct Reader<'a> {
    /// The rank of the peer.
    from: usize,
    stream: TcpStream,
    shared: &'a SharedConnections,
    limit: Duration,
}

impl Reader<'_> {
    /// Passes frames to the world view until the connection ends. Returns why it ended.
    fn read_all(&mut self) -> Error {
        loop {
            match self.read_one() {
                Ok(()) => {}
                Err(why) => return why,
            }
        }
    }

    fn read_one(&mut self) -> Result<()> {
        let mut prefix = [HEARTBEAT; PREFIX_BYTES];
        self.fill(&mut prefix[..1])?;
        if prefix[0] == HEARTBEAT {
            return Ok(());
        }
        self.fill(&mut prefix[1..])?;
        let (view, from) = (&self.shared.view, self.from);
        let malformed = || report::malformed(from);
        let (head, body) = lengths(&prefix).ok_or_else(malformed)?;
        let head = self.read_bytes(head)?;
        let frame = Frame::decode(prefix[0], &head, &view.mesh).ok_or_else(malformed)?;
        view.check(from, &frame, body)?;
        let body = self.read_bytes(body)?;
        view.receive(from, frame, body);
        Ok(())
    }

    /// Reads the next `bytes` bytes.
    fn read_bytes(&mut self, bytes: usize) -> Result<Vec<u8>> {
        let mut part = Vec::new();
        part.try_reserve_exact(bytes).map_err(|_| {
            let (rank, from) = (self.shared.view.rank, self.from);
            Error::new(
                Kind::PeerLost,
                format!("rank {rank} cannot allocate {bytes} bytes for a message of rank {from}"),
            )
        })?;
        part.resize(bytes, 0);
        self.fill(&mut part)?;
        Ok(part)
    }

    fn fill(&mut self, mut part: &mut [u8]) -> Result<()> {
        // Each read that times out counts as its timeout, no more: time in which this process is stopped is no silence of the peer.
        let (from, mut silence) = (self.from, Duration::ZERO);
        while !part.is_empty() {
            match self.stream.read(part) {
                Ok(0) => return Err(report::process_ended(from)),
                Ok(count) => {
                    if !silence.is_zero() {
                        silence = Duration::ZERO;
                        self.shared.view.set_silence(from, silence);
                    }
                    part = &mut part[count..];
                }
                Err(e) if is_pause(e.kind()) => {
                    silence += READ_TIMEOUT;
                    self.shared.view.set_silence(from, silence);
                    if self.shared.is_over.load(Ordering::SeqCst) || silence > self.limit {
                        return Err(report::unresponsive(from, silence));
                    }
                }
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Err(report::process_ended(from)),
                Err(e) => {
                    let why = format!("the connection to rank {from} failed: {e}");
                    return Err(Error::new(Kind::PeerLost, why));
                }
            }
        }
        Ok(())
    }
}
