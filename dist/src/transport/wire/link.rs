//! The connections of one process to all others: a thread each that reads whatever comes, so that nobody who writes has to wait
//! for what a rank does, and one that tells everybody now and then that this process lives.

use super::board::Board;
use super::frame::{Frame, PREFIX_BYTES, PULSE, lengths, set_body};
use crate::error::{Error, Kind, Result};
use crate::report;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How often everybody is told that this process lives.
const PULSE_EVERY: Duration = Duration::from_secs(1);
/// A process of which nothing is heard for so long is lost, however short waits may be.
const SILENCE_MIN: Duration = Duration::from_secs(10);
/// How long a read lasts before it is seen that nothing has come.
const READ: Duration = Duration::from_millis(250);
/// How long a write lasts before the writer looks around.
const WRITE: Duration = Duration::from_millis(10);
/// How long the end of a world waits for the others to close their ends.
const LINGER: Duration = Duration::from_millis(500);
/// Bodies up to this size go in one piece with their head.
const JOINED_BYTES_MAX: usize = 16 << 10;

/// The end of a connection to which this process writes; `None` once part of a frame could not be written.
type End = Mutex<Option<TcpStream>>;

/// What the threads of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    board: Arc<Board>,
    /// By rank; there is none to this one.
    ends: Vec<Option<End>>,
    over: AtomicBool,
    /// Connections that are read.
    open: AtomicUsize,
}

/// All connections of a process.
#[derive(Debug)]
pub(crate) struct Links {
    shared: Arc<Shared>,
    streams: Vec<TcpStream>,
    readers: Vec<JoinHandle<()>>,
    pulse: Option<JoinHandle<()>>,
}

impl Links {
    /// Begins to read from connections to other ranks, by their numbers. One of which nothing is heard for longer than a limit is
    /// lost.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub(super) fn start(
        board: Arc<Board>,
        streams: Vec<Option<TcpStream>>,
        limit: Duration,
    ) -> Result<Links> {
        let reading = |(from, stream): (usize, &Option<TcpStream>)| {
            stream.as_ref().map(|stream| stream.try_clone().map(|stream| (from, stream)))
        };
        let readings = streams.iter().enumerate().filter_map(reading);
        let readings = readings.collect::<std::io::Result<Vec<(usize, TcpStream)>>>()?;
        for stream in streams.iter().flatten() {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(READ))?;
            stream.set_write_timeout(Some(WRITE))?;
        }
        let kept = streams.iter().flatten().map(TcpStream::try_clone).collect::<std::io::Result<_>>()?;
        let ends = streams.into_iter().map(|s| Some(Mutex::new(Some(s?)))).collect();
        let open = AtomicUsize::new(readings.len());
        let shared = Arc::new(Shared { board, ends, over: AtomicBool::new(false), open });
        let mut links = Links { shared: shared.clone(), streams: kept, readers: Vec::new(), pulse: None };
        for (from, stream) in readings {
            let shared = shared.clone();
            let read = move || {
                let why = Reader { from, stream, shared: &shared, limit: limit.max(SILENCE_MIN) }.read_all();
                shared.board.lose(from, &why);
                shared.open.fetch_sub(1, Ordering::SeqCst);
                shared.board.parking.ring();
            };
            links.readers.push(Builder::new().name(format!("from-rank-{from}")).spawn(read)?);
        }
        let pulse = move || {
            while !shared.over.load(Ordering::SeqCst) {
                shared.pulse();
                std::thread::park_timeout(PULSE_EVERY);
            }
        };
        links.pulse = Some(Builder::new().name("pulse".to_string()).spawn(pulse)?);
        Ok(links)
    }

    /// Writes a frame; `tick` runs while the other end takes nothing, and its error ends that: no frame goes there any more. That
    /// the other end has closed is no error: what came from there says why.
    ///
    /// # Errors
    /// Those of `tick`.
    pub(super) fn send(
        &self,
        to: usize,
        head: &mut [u8],
        body: &[u8],
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let Some(end) = &self.shared.ends[to] else { return Ok(()) };
        set_body(head, body.len());
        let mut end = lock(end);
        let Some(stream) = &mut *end else { return Ok(()) };
        let written = if body.len() <= JOINED_BYTES_MAX {
            write(stream, &[head, body].concat(), &mut tick)
        } else {
            write(stream, head, &mut tick).and_then(|()| write(stream, body, &mut tick))
        };
        if written.is_err() {
            *end = None;
        }
        written
    }

    /// [`Links::send`] of a frame without a body to all others, each of which may take nothing for so long.
    pub(super) fn tell(&self, frame: &Frame, limit: Duration) {
        let mut head = frame.head();
        for to in 0..self.shared.ends.len() {
            let start = Instant::now();
            let late = || Err(Error::new(Kind::Timeout, format!("rank {to} takes nothing")));
            // There is nobody to be told.
            let _ = self.send(to, &mut head, &[], || if start.elapsed() > limit { late() } else { Ok(()) });
        }
    }

    /// Waits a moment for all others to say how they end.
    pub(super) fn linger(&self) {
        let (board, start) = (&self.shared.board, Instant::now());
        let done = || board.have_all_ended() || start.elapsed() > LINGER;
        let _ = board.parking.wait(Duration::ZERO, done, || Ok(()));
    }
}

impl Drop for Links {
    /// Closes all connections, this side first, and ends the threads.
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        if let Some(pulse) = self.pulse.take() {
            pulse.thread().unpark();
            let _ = pulse.join();
        }
        self.streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
        let start = Instant::now();
        let all_closed = || self.shared.open.load(Ordering::SeqCst) == 0 || start.elapsed() > LINGER;
        let _ = self.shared.board.parking.wait(Duration::ZERO, all_closed, || Ok(()));
        self.streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
    }
}

impl Shared {
    /// Tells all others that this process lives, but for those to which something is written anyhow, or who take nothing.
    fn pulse(&self) {
        for end in self.ends.iter().flatten() {
            let end = match end.try_lock() {
                Ok(end) => end,
                Err(TryLockError::Poisoned(end)) => end.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            // A single byte is written or not.
            end.iter().for_each(|mut stream| drop(stream.write(&[PULSE])));
        }
    }
}

fn lock(end: &End) -> MutexGuard<'_, Option<TcpStream>> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Writes all bytes, or as many as are taken before the other end closes.
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

/// The end of a connection that is read.
struct Reader<'a> {
    /// The rank at the other end.
    from: usize,
    stream: TcpStream,
    shared: &'a Shared,
    limit: Duration,
}

impl Reader<'_> {
    /// Puts what comes on the board until nothing more does, and says why.
    fn read_all(&mut self) -> Error {
        loop {
            match self.read_one() {
                Ok(()) => {}
                Err(why) => return why,
            }
        }
    }

    fn read_one(&mut self) -> Result<()> {
        let mut prefix = [PULSE; PREFIX_BYTES];
        self.fill(&mut prefix[..1])?;
        if prefix[0] == PULSE {
            return Ok(());
        }
        self.fill(&mut prefix[1..])?;
        let (board, from) = (&self.shared.board, self.from);
        let malformed = || report::malformed(from);
        let (head, body) = lengths(&prefix).ok_or_else(malformed)?;
        let head = self.part(head)?;
        let frame = Frame::read(prefix[0], &head, &board.mesh).ok_or_else(malformed)?;
        board.check(from, &frame, body)?;
        let body = self.part(body)?;
        board.take(from, frame, body);
        Ok(())
    }

    /// The next bytes, so many.
    fn part(&mut self, bytes: usize) -> Result<Vec<u8>> {
        let mut part = Vec::new();
        part.try_reserve_exact(bytes).map_err(|_| {
            let (rank, from) = (self.shared.board.rank, self.from);
            Error::new(
                Kind::PeerLost,
                format!("rank {rank} has no memory for {bytes} bytes from rank {from}"),
            )
        })?;
        part.resize(bytes, 0);
        self.fill(&mut part)?;
        Ok(part)
    }

    fn fill(&mut self, mut part: &mut [u8]) -> Result<()> {
        // Each reading that gives nothing counts as no more than it may last: the time in which this process stands still is not
        // the other's.
        let (from, mut silence) = (self.from, Duration::ZERO);
        while !part.is_empty() {
            match self.stream.read(part) {
                Ok(0) => return Err(report::process_ended(from)),
                Ok(count) => {
                    if !silence.is_zero() {
                        silence = Duration::ZERO;
                        self.shared.board.set_silence(from, silence);
                    }
                    part = &mut part[count..];
                }
                Err(e) if is_pause(e.kind()) => {
                    silence += READ;
                    self.shared.board.set_silence(from, silence);
                    if self.shared.over.load(Ordering::SeqCst) || silence > self.limit {
                        return Err(report::silent(from, silence));
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
