//! The read half of a connection: reads records, verifies them and passes their frames to the view of the world.

use super::frame::{Frame, HEARTBEAT, PREFIX_BYTES, heartbeat, is_short, lengths};
use super::link::is_pause;
use super::record::{ENCRYPTED_BYTES_MAX, Opener, Protection, TAG_BYTES_MAX, Tampered};
use super::world_view::WorldView;
use crate::error::{Error, Kind, Result};
use crate::report;
use std::io::{ErrorKind, IoSliceMut, Read};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The timeout of one read, after which the silence of the peer is counted.
pub(super) const READ_TIMEOUT: Duration = Duration::from_millis(250);
/// The longest time in which bytes of one record trickle in. A writer sends a record at once, so where only heartbeats arrive instead,
/// bytes are missing. Longer pauses do not count: the network or the other process had stopped.
const RECORD_TIME: Duration = Duration::from_secs(5);
/// The longest pause that counts.
const COUNTED_PAUSE_MAX: Duration = Duration::from_millis(1500);
/// The bytes by which the memory for a message grows before they have arrived.
const GROWTH_BYTES_MIN: usize = 4 << 20;

/// The incoming bytes of a connection.
struct IncomingBytes<'a> {
    /// The rank of the peer.
    from: usize,
    stream: TcpStream,
    /// The number of records that have arrived.
    number: u64,
    view: &'a WorldView,
    /// Whether this process closes its connections.
    is_over: &'a AtomicBool,
    /// The silence after which the peer is lost.
    limit: Duration,
}

/// The time in which the bytes of one record arrive.
struct RecordClock {
    silence: Duration,
    last_read: Instant,
    time: Duration,
    is_begun: bool,
}

impl RecordClock {
    /// A record of which some bytes have arrived, or none.
    fn new(is_begun: bool) -> RecordClock {
        RecordClock { silence: Duration::ZERO, last_read: Instant::now(), time: Duration::ZERO, is_begun }
    }
}

impl IncomingBytes<'_> {
    /// Reads bytes of a record that is not complete. Returns their number, which is 0 if none arrived for a while.
    fn read_some(&mut self, clock: &mut RecordClock, parts: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let from = self.from;
        if clock.time > RECORD_TIME {
            return Err(report::tampered(self.view.rank, from, self.number));
        }
        match self.stream.read_vectored(parts) {
            Ok(0) => Err(report::process_ended(from)),
            Ok(count) => {
                if !clock.silence.is_zero() {
                    clock.silence = Duration::ZERO;
                    self.view.set_silence(from, clock.silence);
                }
                let pause = clock.last_read.elapsed().min(COUNTED_PAUSE_MAX);
                clock.time += if clock.is_begun { pause } else { Duration::ZERO };
                (clock.is_begun, clock.last_read) = (true, Instant::now());
                Ok(count)
            }
            Err(e) if is_pause(e.kind()) => {
                // Each read that times out counts as its timeout, no more: time in which this process is stopped is no silence of
                // the peer.
                clock.silence += READ_TIMEOUT;
                self.view.set_silence(from, clock.silence);
                if self.is_over.load(Ordering::SeqCst) || clock.silence > self.limit {
                    return Err(report::unresponsive(from, clock.silence));
                }
                Ok(0)
            }
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Err(report::process_ended(from)),
            Err(e) => {
                let why = format!("the connection to rank {from} failed: {e}");
                Err(Error::new(Kind::PeerLost, why))
            }
        }
    }
}

/// The read half of a connection.
pub(super) struct Reader<'a> {
    incoming: IncomingBytes<'a>,
    opener: Opener,
    /// Bytes that have been read, from `start` to `end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Reader<'_> {
    /// The read half of the connection to a rank. A peer from which nothing arrives for `limit`, or once `is_over`, is lost.
    pub(super) fn new<'a>(
        from: usize,
        (stream, opener): (TcpStream, Opener),
        view: &'a WorldView,
        is_over: &'a AtomicBool,
        limit: Duration,
    ) -> Reader<'a> {
        let buffer = vec![0; ENCRYPTED_BYTES_MAX + TAG_BYTES_MAX];
        let incoming = IncomingBytes { from, stream, number: 0, view, is_over, limit };
        Reader { incoming, opener, buffer, start: 0, end: 0 }
    }

    /// Passes frames to the world view until the connection ends. Returns why it ended.
    pub(super) fn read_all(&mut self) -> Error {
        loop {
            match self.read_one() {
                Ok(()) => {}
                Err(why) => return why,
            }
        }
    }

    pub(super) fn read_one(&mut self) -> Result<()> {
        let mut prefix = Vec::with_capacity(PREFIX_BYTES);
        self.read_record(PREFIX_BYTES, &mut prefix)?;
        let IncomingBytes { from, view, .. } = self.incoming;
        let malformed = || report::malformed(from);
        let prefix = prefix.first_chunk::<PREFIX_BYTES>().ok_or_else(malformed)?;
        if *prefix == heartbeat() {
            return Ok(());
        }
        let (head, body) = lengths(prefix).filter(|_| prefix[0] != HEARTBEAT).ok_or_else(malformed)?;
        let mut bytes = Vec::new();
        let in_one_record = is_short(head, body);
        if in_one_record && head + body > 0 {
            self.read_record(head + body, &mut bytes)?;
        } else {
            self.read_bytes(head, &mut bytes)?;
        }
        let encoded = bytes.split_off(if in_one_record { body } else { 0 });
        let frame = Frame::decode(prefix[0], &encoded, &view.mesh).ok_or_else(malformed)?;
        view.check(from, &frame, head, body)?;
        if !in_one_record {
            bytes = Vec::new();
            self.read_bytes(body, &mut bytes)?;
        }
        view.receive(from, frame, head, bytes);
        Ok(())
    }

    /// Reads the next `len` bytes, sent in records. Memory grows with the bytes that arrive, whatever length is claimed.
    fn read_bytes(&mut self, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let protection = self.opener.protection;
        while out.len() < len {
            let missing = len - out.len();
            let record = missing.min(protection.record_bytes_max());
            if out.capacity() - out.len() < record + TAG_BYTES_MAX {
                let more = missing.min(out.len().max(GROWTH_BYTES_MIN)) + TAG_BYTES_MAX;
                out.try_reserve_exact(more).map_err(|_| {
                    let (rank, from) = (self.incoming.view.rank, self.incoming.from);
                    Error::new(
                        Kind::PeerLost,
                        format!("rank {rank} cannot allocate {len} bytes for a message of rank {from}"),
                    )
                })?;
            }
            match protection {
                Protection::Encrypted => self.read_record(record, out)?,
                Protection::None | Protection::Authenticated => self.read_in_place(record, out)?,
            }
        }
        Ok(())
    }

    /// Reads the next record, with `len` bytes of contents, and appends these to `out`.
    fn read_record(&mut self, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.opener.record_bytes(len);
        self.fill(bytes)?;
        self.incoming.number += 1;
        let record = &self.buffer[self.start..self.start + bytes];
        let opened = self.opener.open(record, out);
        self.start += bytes;
        opened.map_err(|tampered| self.tampered(tampered))
    }

    /// As [`Reader::read_record`], for a record that is not encrypted: its contents go from the stream to their place in `out`, where
    /// they are verified. After an error `out` holds what must not be used.
    fn read_in_place(&mut self, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        let buffered = len.min(self.end - self.start);
        out.extend_from_slice(&self.buffer[self.start..self.start + buffered]);
        self.start += buffered;
        let (tag_bytes, mut tag) = (self.opener.record_bytes(0), [0; TAG_BYTES_MAX]);
        if buffered == len {
            self.fill(tag_bytes)?;
            tag[..tag_bytes].copy_from_slice(&self.buffer[self.start..self.start + tag_bytes]);
            self.start += tag_bytes;
        } else {
            let mut clock = RecordClock::new(buffered > 0);
            let (mut done, mut tag_done) = (out.len(), 0);
            out.resize(start + len, 0);
            while done < out.len() || tag_done < tag_bytes {
                let contents = IoSliceMut::new(&mut out[done..]);
                let mut parts = [contents, IoSliceMut::new(&mut tag[tag_done..tag_bytes])];
                let count = self.incoming.read_some(&mut clock, &mut parts)?;
                let of_contents = count.min(out.len() - done);
                done += of_contents;
                tag_done += count - of_contents;
            }
        }
        self.incoming.number += 1;
        let verified = self.opener.verify(&out[start..], &tag[..tag_bytes]);
        verified.map_err(|tampered| self.tampered(tampered))
    }

    fn tampered(&self, tampered: Tampered) -> Error {
        report::tampered(self.incoming.view.rank, self.incoming.from, tampered.number)
    }

    /// Reads until the buffer holds `bytes` bytes.
    fn fill(&mut self, bytes: usize) -> Result<()> {
        if self.start + bytes > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut clock = RecordClock::new(self.end > self.start);
        while self.end - self.start < bytes {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            let room = &mut self.buffer[self.end..];
            self.end += self.incoming.read_some(&mut clock, &mut [IoSliceMut::new(room)])?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::handshake::{Initiator, Key, respond};
    use super::super::link::Link;
    use super::*;
    use crate::mesh::Mesh;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn memory_grows_with_the_bytes_that_arrive_not_with_the_length_that_is_claimed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Link { stream, opener, .. } = Link::unprotected(listener.accept().unwrap().0);
        let (view, is_over) = (WorldView::new(Mesh::new(&[("tp", 2)]).unwrap(), 0), AtomicBool::new(false));
        let mut reader = Reader::new(1, (stream, opener), &view, &is_over, Duration::from_secs(10));
        let sender = std::thread::spawn(move || far.write_all(&[7; 3 << 20]));
        let mut bytes = Vec::new();
        let error = reader.read_bytes(3 << 30, &mut bytes).unwrap_err();
        sender.join().unwrap().unwrap();
        assert!(error.message().contains("process ended"), "{error}");
        assert!(bytes.len() >= 3 << 20 && bytes[..3 << 20].iter().all(|byte| *byte == 7), "{}", bytes.len());
        assert!(bytes.capacity() <= 8 << 20, "{} bytes for 3 MiB that have arrived", bytes.capacity());
    }

    #[test]
    fn flipped_bits_of_records_read_in_place_are_found() {
        for at in [0, 100, 4 << 10, 300 << 10, (300 << 10) + 31 + 32] {
            let key = Key::of_token(b"0123456789abcdef");
            let (initiator, first) = Initiator::begin(&key, b"test");
            let (session, reply) = respond(&key, b"test", &first).unwrap();
            let (mut sealer, _) = initiator.finish(&reply).unwrap().split(Protection::Authenticated);
            let (_, opener) = session.split(Protection::Authenticated);
            let (contents, mut records) = (vec![7; 300 << 10], Vec::new());
            let parts = contents.chunks(Protection::Authenticated.record_bytes_max());
            parts.for_each(|part| sealer.seal(&[part], &mut records));
            records[at] ^= 4;
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let near = (listener.accept().unwrap().0, opener);
            let (view, is_over) =
                (WorldView::new(Mesh::new(&[("tp", 2)]).unwrap(), 0), AtomicBool::new(false));
            let mut reader = Reader::new(1, near, &view, &is_over, Duration::from_secs(10));
            let error = std::thread::scope(|scope| {
                scope.spawn(|| far.write_all(&records).unwrap());
                reader.read_bytes(contents.len(), &mut Vec::new()).unwrap_err()
            });
            assert!(error.message().contains("was tampered with"), "byte {at}: {error}");
        }
    }
}
