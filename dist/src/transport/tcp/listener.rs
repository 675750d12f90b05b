//! Listening for ranks: a thread accepts connections and passes on those whose other end has proved that it has the token.
//!
//! A connection without that proof costs a socket and a buffer of some hundred bytes, for a few seconds. Their number is limited; the
//! oldest gives way, because a rank needs one round trip and a stranger has to keep connecting. A stranger gets no answer: whatever is
//! wrong with what he sends, the connection is closed.

use super::handshake::{HANDSHAKE_BYTES, Key, respond};
use super::link::{Link, is_pause};
use super::record::{ENCRYPTED_TAG_BYTES, Session};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The bytes of the first record of a connection, which names its rank; all have this length, whatever they name.
pub(super) const HELLO_BYTES: usize = 512;
/// The bytes of that record with its tag.
const HELLO_RECORD_BYTES: usize = HELLO_BYTES + ENCRYPTED_TAG_BYTES;
/// The time of a connection from the accept to its first record.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// The most connections without a proof; one more for each rank.
const NUM_HALF_OPEN_MAX: usize = 64;
/// The most connections that are accepted before the others are looked at again.
const NUM_ACCEPTS: usize = 64;
/// The interval at which the thread looks for new connections, and for bytes if there are half-open connections.
const INTERVALS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(1)];

/// A connection whose other end has proved that it has the token, with its first record.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) link: Link,
    pub(super) hello: Vec<u8>,
}

/// A listener for ranks. Dropping it closes the port.
#[derive(Debug)]
pub(super) struct RankListener {
    incoming: Receiver<Incoming>,
    num_rejected: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RankListener {
    /// Starts to accept connections.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(
        listener: TcpListener,
        key: Key,
        prologue: Vec<u8>,
        num_ranks: usize,
    ) -> std::io::Result<RankListener> {
        listener.set_nonblocking(true)?;
        let (sender, incoming) = channel();
        let (num_rejected, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let half_open = VecDeque::new();
        let num_max = NUM_HALF_OPEN_MAX + num_ranks;
        let mut gate =
            Gate { listener, key, prologue, half_open, num_max, num_rejected: num_rejected.clone(), sender };
        let over = is_over.clone();
        let accept = move || {
            while !over.load(Ordering::SeqCst) {
                gate.accept();
                gate.advance();
                std::thread::park_timeout(INTERVALS[usize::from(!gate.half_open.is_empty())]);
            }
        };
        let thread = Some(Builder::new().name("rank-listener".to_string()).spawn(accept)?);
        Ok(RankListener { incoming, num_rejected, is_over, thread })
    }

    /// The next connection of a rank, if one arrives within `limit`.
    pub(super) fn next(&self, limit: Duration) -> Option<Incoming> {
        self.incoming.recv_timeout(limit).ok()
    }

    /// The number of connections that were closed because the other end did not prove that it has the token.
    pub(super) fn num_rejected(&self) -> usize {
        self.num_rejected.load(Ordering::Relaxed)
    }
}

impl Drop for RankListener {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// A connection whose other end has proved nothing yet.
struct HalfOpen {
    stream: TcpStream,
    since: Instant,
    /// After a valid first message: the keys, with which the next record proves that the message is not a recorded one.
    session: Option<Session>,
    buffer: [u8; HELLO_RECORD_BYTES],
    filled: usize,
}

/// What has become of a half-open connection.
enum Progress {
    Waits,
    Rejected,
    Proved(Session),
}

impl HalfOpen {
    fn advance(&mut self, key: &Key, prologue: &[u8]) -> Progress {
        loop {
            let due = self.session.as_ref().map_or(HANDSHAKE_BYTES, |_| HELLO_RECORD_BYTES);
            if self.filled < due {
                match self.stream.read(&mut self.buffer[self.filled..due]) {
                    Ok(0) => return Progress::Rejected,
                    Ok(count) => self.filled += count,
                    Err(e) if is_pause(e.kind()) && self.since.elapsed() > HANDSHAKE_TIME => {
                        return Progress::Rejected;
                    }
                    Err(e) if is_pause(e.kind()) => return Progress::Waits,
                    Err(_) => return Progress::Rejected,
                }
                continue;
            }
            if let Some(session) = self.session.take() {
                return Progress::Proved(session);
            }
            let message = self.buffer.first_chunk().expect("bug: a buffer that is too short");
            let Some((session, reply)) = respond(key, prologue, message) else { return Progress::Rejected };
            // A new connection has room for the reply.
            if self.stream.write_all(&reply).is_err() {
                return Progress::Rejected;
            }
            self.filled = 0;
            self.session = Some(session);
        }
    }
}

/// The thread of a listener.
struct Gate {
    listener: TcpListener,
    key: Key,
    prologue: Vec<u8>,
    half_open: VecDeque<HalfOpen>,
    num_max: usize,
    num_rejected: Arc<AtomicUsize>,
    sender: Sender<Incoming>,
}

impl Gate {
    fn accept(&mut self) {
        for _ in 0..NUM_ACCEPTS {
            let Ok((stream, _)) = self.listener.accept() else { return };
            if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            if self.half_open.len() == self.num_max {
                self.half_open.pop_front();
                self.num_rejected.fetch_add(1, Ordering::Relaxed);
            }
            let (since, buffer) = (Instant::now(), [0; HELLO_RECORD_BYTES]);
            self.half_open.push_back(HalfOpen { stream, since, session: None, buffer, filled: 0 });
        }
    }

    fn advance(&mut self) {
        for _ in 0..self.half_open.len() {
            let Some(mut one) = self.half_open.pop_front() else { return };
            match one.advance(&self.key, &self.prologue) {
                Progress::Waits => self.half_open.push_back(one),
                Progress::Rejected => drop(self.num_rejected.fetch_add(1, Ordering::Relaxed)),
                Progress::Proved(session) => self.pass_on(one, session),
            }
        }
    }

    /// Opens the first record, which proves that the other end has the keys of this handshake.
    fn pass_on(&mut self, one: HalfOpen, session: Session) {
        let mut link = Link::new(one.stream, session);
        let mut hello = Vec::new();
        let opened = link.opener.open(&one.buffer[..one.filled], &mut hello);
        if opened.is_err() || link.stream.set_nonblocking(false).is_err() {
            self.num_rejected.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // The listener may be dropped just now.
        let _ = self.sender.send(Incoming { link, hello });
    }
}
