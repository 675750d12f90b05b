//! The connections of one process to all others. One thread per connection reads all incoming frames, so that senders never wait for
//! what the receiving rank computes; one more thread sends heartbeats.

use super::frame::{Frame, HEARTBEAT, PREFIX_BYTES, SHORT_BYTES_MAX, heartbeat, lengths, set_body};
use super::link::{Link, is_pause};
use super::record::{Opener, Protection, RECORD_BYTES_MAX, Sealer, TAG_BYTES_MAX};
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
/// The longest time in which bytes of one record trickle in. A writer sends a record at once, so where only heartbeats arrive instead,
/// bytes are missing. Longer pauses do not count: the network or the other process had stopped.
const RECORD_TIME: Duration = Duration::from_secs(5);
/// The longest pause that counts.
const COUNTED_PAUSE_MAX: Duration = Duration::from_millis(1500);
/// The bytes by which the memory for a message grows before they have arrived.
const GROWTH_BYTES_MIN: usize = 1 << 20;

/// The write half of a connection; `None` after a frame was written only in part.
type WriteHalf = Mutex<Option<Writer>>;

/// The stream and the keys of a write half.
#[derive(Debug)]
struct Writer {
    stream: TcpStream,
    sealer: Sealer,
    /// The rest of a heartbeat that was written only in part.
    unsent: Vec<u8>,
}

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
        links: Vec<Option<Link>>,
        limit: Duration,
    ) -> Result<Connections> {
        let (mut write_halves, mut readings, mut streams) = (Vec::new(), Vec::new(), Vec::new());
        for (from, link) in links.into_iter().enumerate() {
            let Some(Link { stream, sealer, opener }) = link else {
                write_halves.push(None);
                continue;
            };
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(READ_TIMEOUT))?;
            stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
            streams.push(stream.try_clone()?);
            readings.push((from, stream.try_clone()?, opener));
            write_halves.push(Some(Mutex::new(Some(Writer { stream, sealer, unsent: Vec::new() }))));
        }
        let open = AtomicUsize::new(readings.len());
        let shared =
            Arc::new(SharedConnections { view, write_halves, is_over: AtomicBool::new(false), open });
        let mut connections =
            Connections { shared: shared.clone(), streams, readers: Vec::new(), heartbeat: None };
        for (from, stream, opener) in readings {
            let shared = shared.clone();
            let read = move || {
                let peer = stream.peer_addr().map_or_else(|_| "unknown".to_string(), |at| at.to_string());
                let why = Reader::new(from, stream, opener, &shared, limit.max(SILENCE_MIN)).read_all();
                let me = shared.view.rank;
                shared.view.mark_lost(
                    from,
                    &why.detail("connection", format!("of rank {me} to rank {from} ({peer})")),
                );
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
        let Some(writer) = &mut *half else { return Ok(()) };
        let written = writer.write_frame(head, body, &mut tick);
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
            let mut half = half;
            half.iter_mut().for_each(Writer::write_heartbeat);
        }
    }
}

impl Writer {
    /// Writes a frame with an encoded head.
    fn write_frame(&mut self, head: &[u8], body: &[u8], tick: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Writer { stream, sealer, unsent } = self;
        let mut sealed = std::mem::take(unsent);
        let (prefix, head) = head.split_at(PREFIX_BYTES);
        sealer.seal(&[prefix], &mut sealed);
        if head.len() + body.len() <= SHORT_BYTES_MAX {
            if head.len() + body.len() > 0 {
                sealer.seal(&[head, body], &mut sealed);
            }
            return write(stream, &sealed, tick);
        }
        head.chunks(RECORD_BYTES_MAX).for_each(|part| sealer.seal(&[part], &mut sealed));
        if sealer.protection == Protection::None {
            write(stream, &sealed, tick)?;
            return write(stream, body, tick);
        }
        for part in body.chunks(RECORD_BYTES_MAX) {
            sealer.seal(&[part], &mut sealed);
            write(stream, &sealed, tick)?;
            sealed.clear();
        }
        write(stream, &sealed, tick)
    }

    /// Writes a heartbeat, or the rest of the last one, as far as the peer accepts it at once.
    fn write_heartbeat(&mut self) {
        if self.unsent.is_empty() {
            self.sealer.seal(&[&heartbeat()], &mut self.unsent);
        }
        let count = self.stream.write(&self.unsent).unwrap_or(0);
        self.unsent.drain(..count);
    }
}

fn lock(half: &WriteHalf) -> MutexGuard<'_, Option<Writer>> {
    half.lock().unwrap_or_else(PoisonError::into_inner)
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
    opener: Opener,
    /// The number of records that have arrived.
    number: u64,
    /// Bytes that have been read, from `start` to `end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    shared: &'a SharedConnections,
    limit: Duration,
}

impl Reader<'_> {
    fn new(
        from: usize,
        stream: TcpStream,
        opener: Opener,
        shared: &SharedConnections,
        limit: Duration,
    ) -> Reader<'_> {
        let buffer = vec![0; RECORD_BYTES_MAX + TAG_BYTES_MAX];
        Reader { from, stream, opener, number: 0, buffer, start: 0, end: 0, shared, limit }
    }

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
        let mut prefix = Vec::with_capacity(PREFIX_BYTES);
        self.read_record(PREFIX_BYTES, &mut prefix)?;
        let (view, from) = (&self.shared.view, self.from);
        let malformed = || report::malformed(from);
        let prefix = prefix.first_chunk::<PREFIX_BYTES>().ok_or_else(malformed)?;
        if *prefix == heartbeat() {
            return Ok(());
        }
        let (head, body) = lengths(prefix).filter(|_| prefix[0] != HEARTBEAT).ok_or_else(malformed)?;
        let is_short = head.checked_add(body).is_some_and(|bytes| bytes <= SHORT_BYTES_MAX);
        let mut bytes = Vec::new();
        if is_short && head + body > 0 {
            self.read_record(head + body, &mut bytes)?;
        } else {
            self.read_bytes(head, &mut bytes)?;
        }
        let rest = bytes.split_off(head);
        let frame = Frame::decode(prefix[0], &bytes, &view.mesh).ok_or_else(malformed)?;
        view.check(from, &frame, body)?;
        let mut bytes = rest;
        if !is_short {
            self.shared.view.wait_for_room(from, || self.shared.is_over.load(Ordering::SeqCst));
            self.read_bytes(body, &mut bytes)?;
        }
        view.receive(from, frame, bytes);
        if is_short {
            self.shared.view.wait_for_room(from, || self.shared.is_over.load(Ordering::SeqCst));
        }
        Ok(())
    }

    /// Reads the next `len` bytes, sent in records. Memory grows with the bytes that arrive, whatever length is claimed.
    fn read_bytes(&mut self, len: usize, out: &mut Vec<u8>) -> Result<()> {
        while out.len() < len {
            let missing = len - out.len();
            if out.capacity() - out.len() < missing.min(RECORD_BYTES_MAX) + TAG_BYTES_MAX {
                let more = missing.min(out.len().max(GROWTH_BYTES_MIN)) + TAG_BYTES_MAX;
                out.try_reserve_exact(more).map_err(|_| {
                    let (rank, from) = (self.shared.view.rank, self.from);
                    Error::new(
                        Kind::PeerLost,
                        format!("rank {rank} cannot allocate {len} bytes for a message of rank {from}"),
                    )
                })?;
            }
            self.read_record(missing.min(RECORD_BYTES_MAX), out)?;
        }
        Ok(())
    }

    /// Reads the next record, with `len` bytes of contents, and appends these to `out`.
    fn read_record(&mut self, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.opener.record_bytes(len);
        self.fill(bytes)?;
        self.number += 1;
        let record = &self.buffer[self.start..self.start + bytes];
        let opened = self.opener.open(record, out);
        self.start += bytes;
        opened.map_err(|tampered| report::tampered(self.shared.view.rank, self.from, tampered.number))
    }

    /// Reads until the buffer holds `bytes` bytes.
    fn fill(&mut self, bytes: usize) -> Result<()> {
        if self.start + bytes > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // Each read that times out counts as its timeout, no more: time in which this process is stopped is no silence of the peer.
        let (from, mut silence) = (self.from, Duration::ZERO);
        let (mut last_read, mut record_time) = (Instant::now(), Duration::ZERO);
        while self.end - self.start < bytes {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(report::process_ended(from)),
                Ok(count) => {
                    if !silence.is_zero() {
                        silence = Duration::ZERO;
                        self.shared.view.set_silence(from, silence);
                    }
                    let is_begun = self.end > self.start;
                    self.end += count;
                    record_time +=
                        if is_begun { last_read.elapsed().min(COUNTED_PAUSE_MAX) } else { Duration::ZERO };
                    last_read = Instant::now();
                    if record_time > RECORD_TIME && self.end - self.start < bytes {
                        return Err(report::tampered(self.shared.view.rank, from, self.number));
                    }
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use std::net::TcpListener;

    #[test]
    fn memory_grows_with_the_bytes_that_arrive_not_with_the_length_that_is_claimed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Link { stream, opener, .. } = Link::unprotected(listener.accept().unwrap().0);
        let view = Arc::new(WorldView::new(Mesh::new(&[("tp", 2)]).unwrap(), 0));
        let (is_over, open) = (AtomicBool::new(false), AtomicUsize::new(1));
        let shared = SharedConnections { view, write_halves: Vec::new(), is_over, open };
        let mut reader = Reader::new(1, stream, opener, &shared, SILENCE_MIN);
        let sender = std::thread::spawn(move || far.write_all(&[7; 3 << 20]));
        let mut bytes = Vec::new();
        let error = reader.read_bytes(3 << 30, &mut bytes).unwrap_err();
        sender.join().unwrap().unwrap();
        assert!(error.message().contains("process ended"), "{error}");
        assert!(bytes.len() > 2 << 20 && bytes.iter().all(|byte| *byte == 7), "{}", bytes.len());
        assert!(bytes.capacity() <= 8 << 20, "{} bytes for 3 MiB that have arrived", bytes.capacity());
    }
}
