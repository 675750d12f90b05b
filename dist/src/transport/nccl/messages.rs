//! Messages between two ranks over NCCL.
//!
//! Each direction of each pair of ranks has a communicator and a stream of its own, so that no message waits for another pair, for the
//! other direction, or for a collective: two ranks may both send first, and messages of a ring or a pipeline overlap. Both ends submit
//! the messages of a pair in the order in which the receiver asks for them, and only when both have made their calls (`tcp::announced`).
//!
//! No cycle of waits is possible on GPUs: a message waits only for work that its ends submitted before the receiver asked, for collectives
//! that are compared, and so submitted by all their members, and for earlier messages of its pair. Order all of these by time.

use super::watchdog::Watched;
use crate::call::Request;
use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
use crate::transport::tcp::{MessageId, PendingCalls, SentCall, TcpTransport};
use shardgrad_kernels::{AsyncStream, Backend, Buffer, SyncEvent};
use shardgrad_nccl::{Communicator, Part, SplitGroup};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// On axes of at most so many ranks every rank exchanges messages with every other one over NCCL, on longer axes with its neighbors. All
/// other messages go through TCP.
const ALL_PAIRS_MAX: usize = 8;
/// The most blocks of a kernel of a message. They hold their place on the GPU until the other end is there.
const NUM_BLOCKS_MAX: usize = 4;
/// The most messages of a rank that no rank has asked for. Their receivers store all their calls.
const KEPT_MAX: usize = 1 << 14;

/// One direction between this rank and another one.
#[derive(Debug)]
pub(super) struct Channel {
    /// The number of its communicator among those of the session.
    communicator: usize,
    /// The rank of the other end there.
    peer: usize,
    /// Opened by the first message: most pairs exchange none.
    stream: OnceLock<Arc<dyn AsyncStream>>,
}

/// The channels between this rank and another one.
#[derive(Debug)]
struct Link {
    to: Channel,
    from: Channel,
}

/// The channels of a rank, by the other rank.
#[derive(Debug, Default)]
pub(super) struct Links(HashMap<usize, Link>);

impl Links {
    /// Splits the communicator of all ranks, the first of `communicators`, into those of messages. All ranks call it.
    ///
    /// # Errors
    /// The errors of the library and of `tick`.
    pub(super) fn join(
        mesh: &Mesh,
        rank: usize,
        communicators: &mut Vec<Communicator>,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Links> {
        let mut links = Links::default();
        let coordinate = mesh.coordinate(rank);
        for axis in mesh.axes().filter(|axis| mesh.size(*axis) > 1) {
            let own = coordinate[usize::from(axis.0)];
            for round in rounds(mesh.size(axis)) {
                let pair = round.into_iter().find(|pair| pair.contains(&own));
                let Some([low, high]) = pair else {
                    for _ in 0..2 {
                        communicators[0].split(None, tick)?;
                    }
                    continue;
                };
                let mut other = coordinate.clone();
                other[usize::from(axis.0)] = low + high - own;
                let other = mesh.rank_at(&other);
                let (color, in_pair) = (rank.min(other), usize::from(own == high));
                let group = SplitGroup { color, rank: in_pair, size: 2, num_blocks_max: NUM_BLOCKS_MAX };
                // The first one carries messages of the rank with the lower coordinate.
                let mut channel = || -> Result<Channel> {
                    let split = communicators[0].split(Some(&group), tick)?;
                    communicators.push(split.expect("bug: a split without the rank's communicator"));
                    let (communicator, peer) = (communicators.len() - 1, 1 - in_pair);
                    Ok(Channel { communicator, peer, stream: OnceLock::new() })
                };
                let (first, second) = (channel()?, channel()?);
                let (to, from) = if own == low { (first, second) } else { (second, first) };
                links.0.insert(other, Link { to, from });
            }
        }
        Ok(links)
    }
}

/// The pairs of ranks of an axis that have channels, lower rank first, in rounds in each of which a rank is in one pair at most.
fn rounds(len: usize) -> Vec<Vec<[usize; 2]>> {
    if len <= ALL_PAIRS_MAX {
        // As in a round-robin tournament: pairs of a round have the same sum, and the last of an even number of ranks gets the rank that
        // is left.
        let num_rounds = len - 1 + len % 2;
        let mut rounds = vec![Vec::new(); num_rounds];
        for high in 1..len {
            for low in 0..high {
                let is_last = len.is_multiple_of(2) && high == len - 1;
                let sum = if is_last { 2 * low } else { low + high };
                rounds[sum % num_rounds].push([low, high]);
            }
        }
        return rounds;
    }
    let mut rounds = vec![Vec::new(); 2 + len % 2];
    for low in 0..len - 1 {
        rounds[low % 2].push([low, low + 1]);
    }
    rounds[1 + len % 2].push([0, len - 1]);
    rounds
}

/// A message that its receiver has not asked for.
#[derive(Debug)]
struct KeptMessage {
    call: SentCall,
    /// Another handle, so that nothing writes this memory or frees it.
    x: Buffer,
    bytes: usize,
    /// After the work that makes `x`.
    made: SyncEvent,
}

/// The messages of one process.
#[derive(Debug)]
pub(super) struct Messages {
    links: Links,
    watched: Arc<Watched>,
    backend: Arc<dyn Backend>,
    kept: Mutex<HashMap<MessageId, KeptMessage>>,
    /// Kept messages, and those that are being submitted.
    num_unsent: AtomicUsize,
}

impl Messages {
    pub(super) fn new(links: Links, watched: &Arc<Watched>, backend: &Arc<dyn Backend>) -> Messages {
        let (watched, backend, kept) = (watched.clone(), backend.clone(), Mutex::default());
        Messages { links, watched, backend, kept, num_unsent: AtomicUsize::new(0) }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<MessageId, KeptMessage>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether messages to a rank go over NCCL.
    pub(super) fn reaches(&self, to: usize) -> bool {
        self.links.0.contains_key(&to)
    }

    /// Whether all messages are submitted.
    pub(super) fn are_sent(&self) -> bool {
        self.num_unsent.load(Ordering::SeqCst) == 0
    }

    fn stream<'a>(&self, channel: &'a Channel) -> Result<&'a dyn AsyncStream> {
        if channel.stream.get().is_none() {
            let fresh = self.backend.open_stream()?.expect("bug: a GPU has communication streams");
            let _ = channel.stream.set(fresh);
        }
        Ok(&**channel.stream.get().expect("the stream has been set"))
    }

    fn communicator(&self, channel: &Channel) -> &Communicator {
        &self.watched.communicators[channel.communicator]
    }

    /// Keeps a message to a rank until it asks for it, and announces it behind the calls of this rank.
    pub(super) fn send(
        &self,
        tcp: &TcpTransport,
        pending: &PendingCalls,
        request: &Request<'_>,
        to: usize,
    ) -> Result<()> {
        let x = request.x.expect("bug: a message without a buffer");
        // So that the event is behind it.
        self.backend.wait_for_writer(x)?;
        let made = self.stream(&self.links.0[&to].to)?.back_end_event()?;
        let (id, call) = tcp.sent_call(request, to);
        let (x, bytes) = (x.clone(), request.counts[0] * request.call.dtype.size());
        let mut kept = self.kept();
        if kept.len() >= KEPT_MAX {
            let why =
                format!("{} has sent {KEPT_MAX} messages that no rank has received", self.watched.rank_text);
            return Err(
                Error::new(Kind::Collective, why).detail("help", "receive messages before sending more")
            );
        }
        kept.insert(id, KeptMessage { call, x, bytes, made });
        drop(kept);
        self.num_unsent.fetch_add(1, Ordering::SeqCst);
        pending.push(tcp, request)
    }

    /// Receives a message that a rank has announced.
    pub(super) fn receive(
        &self,
        tcp: &TcpTransport,
        request: &Request<'_>,
        id: &MessageId,
    ) -> Result<Buffer> {
        let link = self.links.0.get(&id.peer).ok_or_else(|| crate::report::malformed(id.peer))?;
        let (channel, bytes) = (&link.from, request.counts[0] * request.call.dtype.size());
        let stream = self.stream(channel)?;
        let on = stream.begin(&stream.back_end_event()?)?;
        let receive = || -> Result<Buffer> {
            let mut y = on.alloc(bytes)?;
            tcp.request_message(id, request)?;
            let parts = [Part::Recv { range: 0..bytes, from: channel.peer }];
            let mut check = tcp.submission_check(request);
            self.communicator(channel).submit(on, None, Some(&mut y), &parts, &mut check)?;
            Ok(y)
        };
        let received = receive();
        // After an error too.
        let ended = stream.end();
        let y = received?;
        ended?;
        Ok(y)
    }

    /// Submits the messages that their receivers ask for, until the world is over or has failed.
    pub(super) fn submit_requested(&self, tcp: &TcpTransport, pending: &PendingCalls) {
        while let Some(id) = pending.next_requested() {
            let message = self.kept().remove(&id);
            let message = message.expect("bug: a rank asks for a message that was not announced");
            let outcome = self.submit(tcp, &message, id.peer);
            if let Err(error) = outcome {
                if !self.watched.is_consequence(&error) {
                    tcp.fail_message(&message.call, error);
                }
                return;
            }
            drop(message);
            self.num_unsent.fetch_sub(1, Ordering::SeqCst);
            pending.notify();
        }
    }

    fn submit(&self, tcp: &TcpTransport, message: &KeptMessage, to: usize) -> Result<()> {
        let channel = &self.links.0[&to].to;
        let stream = self.stream(channel)?;
        let on = stream.begin(&message.made)?;
        let parts = [Part::Send { range: 0..message.bytes, to: channel.peer }];
        let mut check = tcp.message_check(&message.call);
        let sent = self.communicator(channel).submit(on, Some(&message.x), None, &parts, &mut check);
        let ended = stream.end();
        sent?;
        Ok(ended?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_pair_all_ranks_of_short_axes_and_neighbors_on_long_ones() {
        for len in 2..=20 {
            let rounds = rounds(len);
            for round in &rounds {
                let mut ranks: Vec<usize> = round.iter().flatten().copied().collect();
                ranks.sort_unstable();
                assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]), "{len}: {round:?}");
            }
            let mut pairs: Vec<[usize; 2]> = rounds.concat();
            pairs.sort_unstable();
            assert!(pairs.iter().all(|[low, high]| low < high && *high < len));
            let is_paired =
                |[low, high]: [usize; 2]| len <= ALL_PAIRS_MAX || high - low == 1 || high - low == len - 1;
            let due: Vec<[usize; 2]> = (0..len)
                .flat_map(|low| (low + 1..len).map(move |high| [low, high]))
                .filter(|pair| is_paired(*pair))
                .collect();
            assert_eq!(pairs, due, "{len}");
        }
    }
}
