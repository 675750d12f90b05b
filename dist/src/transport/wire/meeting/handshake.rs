//! How messages of a rendezvous are sent and received, and how a listener receives connections.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The first bytes of every message. The number is that of the messages and frames, and changes with them.
const MAGIC: &[u8; 18] = b"shardgrad ranks 2\n";
/// No message is longer.
const BYTES_MAX: usize = 1 << 20;
/// How long a message takes at most from its first byte to its last, and the first one from the connection on.
pub(super) const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// How often a process that waits looks around.
pub(super) const NAP: Duration = Duration::from_millis(5);

/// Sends a message.
pub(super) fn send(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.set_write_timeout(Some(MESSAGE_TIME))?;
    let len = (bytes.len() as u64).to_le_bytes();
    stream.write_all(&[MAGIC.as_slice(), &len, bytes].concat())
}

/// Receives a message within a limit.
///
/// # Errors
/// Why there is none.
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
    let stranger = || "the process there is no rank of shardgrad, or one of another version".to_string();
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

/// Receives a message if one begins within a limit, which may be zero.
///
/// # Errors
/// Why none will come.
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

/// A connection and the first message that came over it.
#[derive(Debug)]
pub(super) struct Guest<T> {
    pub(super) stream: TcpStream,
    pub(super) message: T,
}

/// A listener, with those who have connected to it and sent a first message of the right form.
#[derive(Debug)]
pub(super) struct Door<T> {
    listener: TcpListener,
    sender: Sender<Guest<T>>,
    guests: Receiver<Guest<T>>,
}

impl<T: Send + 'static> Door<T> {
    /// Takes a listener that does not block.
    pub(super) fn new(listener: TcpListener) -> Door<T> {
        let (sender, guests) = channel();
        Door { listener, sender, guests }
    }

    /// Accepts connections and returns the next one whose first message `read` accepts, if one comes soon. A thread each receives
    /// these messages, so that a silent connection delays no other.
    pub(super) fn next(
        &self,
        read: impl Fn(&[u8]) -> Option<T> + Clone + Send + 'static,
    ) -> Option<Guest<T>> {
        while let Ok((mut stream, _)) = self.listener.accept() {
            let (sender, read) = (self.sender.clone(), read.clone());
            // Without a thread the connection is closed, and the other side connects again.
            let _ = std::thread::Builder::new().name("door".to_string()).spawn(move || {
                stream.set_nonblocking(false).ok()?;
                stream.set_nodelay(true).ok()?;
                let message = read(&receive(&mut stream, MESSAGE_TIME).ok()?)?;
                sender.send(Guest { stream, message }).ok()
            });
        }
        self.guests.recv_timeout(NAP).ok()
    }
}
