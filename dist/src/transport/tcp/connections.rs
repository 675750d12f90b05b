//! The connections of one process to all others. One thread per connection reads all incoming frames, so that writers never wait for
//! what the receiving rank computes; one more thread sends elements that other ranks have asked for, and one sends heartbeats.

use super::frame::{Frame, PREFIX_BYTES, heartbeat, is_short, set_body};
use super::link::{Link, is_pause};
use super::reader::{READ_TIMEOUT, Reader};
use super::record::{Protection, Sealer};
use super::world_view::WorldView;
use crate::error::{Error, Kind, Result};
use std::io::{IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The interval between heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// The least time without any data after which a process is lost, however short the timeout of waits is.
const SILENCE_MIN: Duration = Duration::from_secs(10);
/// The timeout of one write, after which the writer runs its checks.
const WRITE_TIMEOUT: Duration = Duration::from_millis(10);
/// The pause of a thread that waits until another thread has written a frame.
const LOCK_PAUSE: Duration = Duration::from_micros(200);
/// How long a process waits at the end for the others to send final frames, and to close their connections.
const LINGER: Duration = Duration::from_millis(500);

/// The write half of a connection; `None` after a frame was written only in part.
type WriteHalf = Mutex<Option<Writer>>;

/// The stream and the keys of a write half.
#[derive(Debug)]
struct Writer {
    stream: TcpStream,
    sealer: Sealer,
    /// Records that are not written yet: between frames, the rest of a heartbeat that was written only in part.
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
    elements: Option<JoinHandle<()>>,
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
        let (readers, elements, heartbeat) = (Vec::new(), None, None);
        let mut connections = Connections { shared: shared.clone(), streams, readers, elements, heartbeat };
        for (from, stream, opener) in readings {
            let shared = shared.clone();
            let read = move || {
                let peer = stream.peer_addr().map_or_else(|_| "unknown".to_string(), |at| at.to_string());
                let limit = limit.max(SILENCE_MIN);
                let why =
                    Reader::new(from, (stream, opener), &shared.view, &shared.is_over, limit).read_all();
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
        let sender = shared.clone();
        let send_elements = move || sender.send_cleared_elements();
        connections.elements = Some(Builder::new().name("elements".to_string()).spawn(send_elements)?);
        let heartbeat = move || {
            while !shared.is_over.load(Ordering::SeqCst) {
                shared.send_heartbeats();
                std::thread::park_timeout(HEARTBEAT_EVERY);
            }
        };
        connections.heartbeat = Some(Builder::new().name("heartbeat".to_string()).spawn(heartbeat)?);
        Ok(connections)
    }

    /// Writes a frame. `tick` runs while the peer reads nothing or another thread writes; its error ends the write, and if a part is
    /// written no frame is sent there any more. A connection closed by the peer is no error here: the frames received from the peer state the reason.
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
        self.shared.send(to, head, body, &mut tick)
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
        self.shared.view.end_cleared();
        if let Some(elements) = self.elements.take() {
            let _ = elements.join();
        }
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
    /// Writes a frame: see [`Connections::send`].
    fn send(
        &self,
        to: usize,
        head: &mut [u8],
        body: &[u8],
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let Some(half) = &self.write_halves[to] else { return Ok(()) };
        set_body(head, body.len());
        let mut half = lock(half, tick)?;
        let Some(writer) = &mut *half else { return Ok(()) };
        let written = writer.write_frame(head, body, tick);
        if written.is_err() {
            *half = None;
        }
        written
    }

    /// Sends elements that other ranks ask for, until the connections are closed.
    fn send_cleared_elements(&self) {
        let is_over = || self.is_over.load(Ordering::SeqCst);
        while let Some((to, id, kept)) = self.view.next_cleared(is_over) {
            let mut failed_at = None;
            let mut tick = || {
                // A frame that is written only in part closes the connection to later ones, which report the failure.
                let is_failed =
                    self.view.has_failed() && failed_at.get_or_insert_with(Instant::now).elapsed() > LINGER;
                if is_failed || is_over() {
                    return Err(Error::new(
                        Kind::PeerLost,
                        "the world has failed, or the connections are closed",
                    ));
                }
                Ok(())
            };
            // The rank notices a failure itself.
            let _ = self.send(to, &mut Frame::Elements(id).encode(), &kept.buffer[kept.range], &mut tick);
        }
    }

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
    /// Writes a frame with an encoded head. A body that is not encrypted is sent from where it is.
    fn write_frame(&mut self, head: &[u8], body: &[u8], tick: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Writer { stream, sealer, unsent } = self;
        let (prefix, head) = head.split_at(PREFIX_BYTES);
        sealer.seal(&[prefix], unsent);
        let in_one_record = is_short(head.len(), body.len());
        if in_one_record && head.len() + body.len() > 0 {
            sealer.seal(&[body, head], unsent);
        }
        if !in_one_record {
            let most = sealer.protection.record_bytes_max();
            head.chunks(most).for_each(|part| sealer.seal(&[part], unsent));
            for part in body.chunks(most) {
                if sealer.protection == Protection::Encrypted {
                    sealer.seal(&[part], unsent);
                    write(stream, &mut [IoSlice::new(unsent)], tick)?;
                } else {
                    let tag = sealer.detached_tag(part);
                    let tag = tag.as_ref().map_or(&[][..], |tag| tag.as_bytes());
                    write(stream, &mut [unsent, part, tag].map(IoSlice::new), tick)?;
                }
                unsent.clear();
            }
        }
        write(stream, &mut [IoSlice::new(unsent)], tick)?;
        unsent.clear();
        Ok(())
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

/// Locks a write half. `tick` runs while another thread writes a frame; its error ends the wait.
fn lock<'a>(
    half: &'a WriteHalf,
    tick: &mut dyn FnMut() -> Result<()>,
) -> Result<MutexGuard<'a, Option<Writer>>> {
    loop {
        match half.try_lock() {
            Ok(half) => return Ok(half),
            Err(TryLockError::Poisoned(half)) => return Ok(half.into_inner()),
            Err(TryLockError::WouldBlock) => tick()?,
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Writes all bytes, or as many as the peer accepts before it closes the connection.
fn write(
    stream: &mut TcpStream,
    mut parts: &mut [IoSlice<'_>],
    tick: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    // Removes empty parts.
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match stream.write_vectored(parts) {
            Ok(0) => return Ok(()),
            Ok(count) => IoSlice::advance_slices(&mut parts, count),
            Err(e) if is_pause(e.kind()) => tick()?,
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::handshake::{Initiator, Key, respond};
    use super::super::record::Opener;
    use super::*;
    use crate::call::{IssuedCall, Op};
    use crate::mesh::Mesh;
    use shardgrad_kernels::DType;
    use std::net::TcpListener;

    /// A connection whose ends have the keys of one handshake: a writer, and the stream and the opener of its reader.
    fn connected(protection: Protection) -> (Writer, TcpStream, Opener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let key = Key::of_token(b"0123456789abcdef");
        let (initiator, first) = Initiator::begin(&key, b"test");
        let (session, reply) = respond(&key, b"test", &first).unwrap();
        let (sealer, _) = initiator.finish(&reply).unwrap().split(protection);
        let (_, opener) = session.split(protection);
        (Writer { stream, sealer, unsent: Vec::new() }, listener.accept().unwrap().0, opener)
    }

    #[test]
    fn frames_of_all_lengths_arrive_whatever_their_records_are() {
        let mesh = Mesh::new(&[("tp", 2)]).unwrap();
        let most = Protection::Authenticated.record_bytes_max();
        for protection in [Protection::None, Protection::Authenticated, Protection::Encrypted] {
            let (mut writer, stream, opener) = connected(protection);
            let (view, is_over) = (WorldView::new(mesh.clone(), 0), AtomicBool::new(false));
            let mut reader = Reader::new(1, (stream, opener), &view, &is_over, SILENCE_MIN);
            let lengths =
                [0, 1, 16 << 10, 32 << 10, 64 << 10, most - 1, most, most + 1, 3 * most, 3 * most + 7, 5];
            let of = |len: usize| (0..len).map(|i| (i * 31 + len) as u8).collect::<Vec<u8>>();
            let call = |len: usize| {
                let mut issued = IssuedCall::none();
                (issued.op, issued.dtype, issued.axes) = (Op::Send { to: 0 }, DType::U8, mesh.all_axes());
                issued.counts = [len].as_slice().into();
                issued
            };
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for len in lengths {
                        // A long head has records of its own.
                        let mut issued = call(len);
                        issued.recent_inputs = "x".repeat(len.min(100_000));
                        let mut head = Frame::Call(issued).encode();
                        set_body(&mut head, len);
                        writer.write_heartbeat();
                        writer.write_frame(&head, &of(len), &mut || Ok(())).unwrap();
                    }
                });
                for len in lengths {
                    (0..2).for_each(|_| reader.read_one().unwrap());
                    let (message, _) = view.take_message(1, mesh.all_axes()).unwrap();
                    assert_eq!(message.elements(), of(len), "{len} bytes, {protection:?}");
                    // Makes room in the queue.
                    let _ = view.next_reply(1);
                }
            });
        }
    }
}
