//! Sending, receiving and accepting of rendezvous messages.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The magic bytes of every message. The number is the version of messages and frames.
const MAGIC: &[u8; 18] = b"shardgrad ranks 2\n";
/// The longest message.
const BYTES_MAX: usize = 1 << 20;
/// The timeout of a message from its first byte to its last, and of the first message from the connection on.
pub(super) const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// The interval at which a waiting process polls.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Sends a message.
pub(super) fn send(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.set_write_timeout(Some(MESSAGE_TIME))?;
    let len = (bytes.len() as u64).to_le_bytes();
    stream.write_all(&[MAGIC.as_slice(), &len, bytes].concat())
}

/// Receives a message within `limit`.
///
/// # Errors
/// The reason why no message was received.
pub(super) fn receive(stream: &mut TcpStream, limit: Duration) -> Result<Vec<u8>, String> {
    let start = Instant::now();
    let mut fill = |part: &mut [u8]| {
        let mut done = 0;
        while done < part.len() {
            let left = limit.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            stream.set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
            match stream.read(&mut part[done..]) {
                Ok(0) => return Err("the connection was closed".to_string()),
                Ok(count) => done += count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if is_pause(e.kind()) => return Err(format!("no message came for {limit:?}")),
                Err(e) => return Err(e.to_string()),
            }
        }
        Ok(())
    };
    let stranger = || "the process there is not a rank of shardgrad, or runs another version".to_string();
    let (mut magic, mut len) = ([0; MAGIC.len()], [0; 8]);
    fill(&mut magic)?;
    if magic != *MAGIC {
        return Err(stranger());
    }
    fill(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|len| *len <= BYTES_MAX);
    let mut bytes = vec![0; len.ok_or_else(stranger)?];
    fill(&mut bytes)?;
    Ok(bytes)
}

/// Receives a message if one starts to arrive within `limit`, which may be zero.
///
/// # Errors
/// The reason why no message will arrive.
pub(super) fn poll(stream: &mut TcpStream, limit: Duration) -> Result<Option<Vec<u8>>, String> {
    let peeked = if limit.is_zero() {
        let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
        stream.set_nonblocking(false).and(peeked)
    } else {
        stream.set_read_timeout(Some(limit)).and_then(|()| stream.peek(&mut [0]))
    };
    match peeked {
        Ok(0) => Err("the connection was closed".to_string()),
        Ok(_) => receive(stream, MESSAGE_TIME).map(Some),
        Err(e) if is_pause(e.kind()) || e.kind() == ErrorKind::Interrupted => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// An accepted connection and its first message.
#[derive(Debug)]
pub(super) struct Incoming<T> {
    pub(super) stream: TcpStream,
    pub(super) message: T,
}

/// A listener that accepts connections and receives their first messages.
#[derive(Debug)]
pub(super) struct MessageListener<T> {
    listener: TcpListener,
    sender: Sender<Incoming<T>>,
    incoming: Receiver<Incoming<T>>,
}

impl<T: Send + 'static> MessageListener<T> {
    /// Wraps a non-blocking listener.
    pub(super) fn new(listener: TcpListener) -> MessageListener<T> {
        let (sender, incoming) = channel();
        MessageListener { listener, sender, incoming }
    }

    /// Accepts connections and returns the next one with a first message that `read` accepts, if one arrives within the poll interval.
    /// One thread per connection receives the first message, so that a silent connection delays no other.
    pub(super) fn next(
        &self,
        read: impl Fn(&[u8]) -> Option<T> + Clone + Send + 'static,
    ) -> Option<Incoming<T>> {
        while let Ok((mut stream, _)) = self.listener.accept() {
            let (sender, read) = (self.sender.clone(), read.clone());
            // If no thread can be started, the connection is closed, and the peer connects again.
            let _ = std::thread::Builder::new().name("handshake".to_string()).spawn(move || {
                stream.set_nonblocking(false).ok()?;
                stream.set_nodelay(true).ok()?;
                let message = read(&receive(&mut stream, MESSAGE_TIME).ok()?)?;
                sender.send(Incoming { stream, message }).ok()
            });
        }
        self.incoming.recv_timeout(POLL_INTERVAL).ok()
    }
}
