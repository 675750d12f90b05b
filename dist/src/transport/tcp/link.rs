//! A connection after its handshake: the stream and the keys of its two directions, and the messages of a rendezvous over it.

use super::record::{ENCRYPTED_BYTES_MAX, Opener, Protection, Sealer, Session};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest message of a rendezvous.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// The timeout of a message from its first byte to its last.
pub(super) const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// The bytes of the length before a message.
const LENGTH_BYTES: usize = 8;

/// A connection whose other end has proved that it has the token.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) stream: TcpStream,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

impl Link {
    /// A connection for the messages of a rendezvous, which are always encrypted.
    pub(super) fn new(stream: TcpStream, session: Session) -> Link {
        let (sealer, opener) = session.split(Protection::Encrypted);
        Link { stream, sealer, opener }
    }

    /// A connection without keys, for tests of what it carries.
    #[cfg(test)]
    pub(super) fn unprotected(stream: TcpStream) -> Link {
        let (sealer, opener) = Session::unprotected().split(Protection::None);
        Link { stream, sealer, opener }
    }

    /// Sets how all further records are protected.
    #[must_use]
    pub(super) fn protected(mut self, protection: Protection) -> Link {
        (self.sealer.protection, self.opener.protection) = (protection, protection);
        self
    }

    /// The address of the other end.
    pub(super) fn peer_ip(&self) -> std::io::Result<IpAddr> {
        Ok(self.stream.peer_addr()?.ip().to_canonical())
    }

    /// Sends a message.
    pub(super) fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let mut sealed = Vec::new();
        self.sealer.seal(&[&(bytes.len() as u64).to_le_bytes()], &mut sealed);
        bytes.chunks(ENCRYPTED_BYTES_MAX).for_each(|part| self.sealer.seal(&[part], &mut sealed));
        self.stream.set_write_timeout(Some(MESSAGE_TIME))?;
        self.stream.write_all(&sealed)
    }

    /// Receives a message if one starts to arrive within `limit`, which may be zero.
    ///
    /// # Errors
    /// The reason why no message will arrive.
    pub(super) fn poll(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, String> {
        let stream = &mut self.stream;
        let peeked = if limit.is_zero() {
            let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
            stream.set_nonblocking(false).and(peeked)
        } else {
            stream.set_read_timeout(Some(limit)).and_then(|()| stream.peek(&mut [0]))
        };
        match peeked {
            Ok(0) => Err("the connection was closed".to_string()),
            Ok(_) => self.receive().map(Some),
            Err(e) if is_pause(e.kind()) => Ok(None),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Receives a message that has started to arrive.
    fn receive(&mut self) -> Result<Vec<u8>, String> {
        let (start, mut length) = (Instant::now(), Vec::new());
        self.receive_record(LENGTH_BYTES, start, &mut length)?;
        let length: [u8; LENGTH_BYTES] = length.try_into().expect("bug: a record of another length");
        let length = usize::try_from(u64::from_le_bytes(length)).ok();
        let length = length.filter(|length| *length <= MESSAGE_BYTES_MAX);
        let length = length.ok_or_else(|| "a message came that is too long".to_string())?;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            self.receive_record((length - bytes.len()).min(ENCRYPTED_BYTES_MAX), start, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Receives a record with `len` bytes of contents, within [`MESSAGE_TIME`] from `start`.
    fn receive_record(&mut self, len: usize, start: Instant, out: &mut Vec<u8>) -> Result<(), String> {
        let mut record = vec![0; self.opener.record_bytes(len)];
        receive_exact(&mut self.stream, &mut record, start, MESSAGE_TIME)?;
        let tampered = |_| "a message was changed on its way, or is not from a rank of this run".to_string();
        self.opener.open(&record, out).map_err(tampered)
    }
}

/// Whether an error of a socket with a timeout means only that nothing can be read or written now.
pub(super) fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Fills `part` within `limit` from `start`.
///
/// # Errors
/// The reason why not all bytes came.
pub(super) fn receive_exact(
    stream: &mut TcpStream,
    part: &mut [u8],
    start: Instant,
    limit: Duration,
) -> Result<(), String> {
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
        if done < part.len() && start.elapsed() > limit {
            return Err(format!("no message came for {limit:?}"));
        }
    }
    Ok(())
}
