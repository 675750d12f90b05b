//! Flow control between two ranks: which elements a sender sends at once, and which it keeps until the receiver asks for them.
//!
//! As in MPI there are two protocols. *Eager*: the elements follow their call at once, as long as less than [`QUEUE_BYTES_MAX`] bytes
//! are sent and not acknowledged; the receiver gives credit for what it has taken out of its queue. *Announced*: beyond that, only the
//! call is sent ("ready to send"), and its sender keeps the elements until the receiver has room for them, or waits for them ("clear
//! to send"). So a connection is always read, and a receiver never holds more than the limit that it has not asked for, whatever
//! it does. A message that is announced keeps its sender waiting while the receiver computes; a receiver that is itself waiting or
//! sending replies "hold", so that two ranks that send to each other go on, each with its own elements in its own memory.

use super::frame::{CallId, Frame};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes that a rank holds of another one without having asked for them: calls with their elements, in the queue or
/// acknowledged late. A second time as many bytes may be calls alone, whose elements their sender keeps. In tests few bytes.
pub(super) const QUEUE_BYTES_MAX: usize = if cfg!(test) { 1 << 20 } else { 65 << 20 };
/// The bytes taken out of a queue after which the receiver acknowledges them.
const CREDIT_BYTES: usize = QUEUE_BYTES_MAX / 4;
/// The memory of a queued call besides its texts and elements, rounded up.
pub(super) const CALL_BYTES: usize = 512;

/// The bytes of a queue that a call takes, with a head and elements of these lengths.
pub(super) fn call_bytes(head: usize, elements: usize) -> usize {
    head.saturating_add(elements).saturating_add(CALL_BYTES)
}

/// Elements that their sender keeps until the receiver asks for them: a range of a shared buffer.
#[derive(Debug)]
pub(super) struct KeptElements {
    pub(super) buffer: Arc<Vec<u8>>,
    pub(super) range: Range<usize>,
    /// Whether the receiver cannot take them soon.
    is_held: bool,
}

/// The sender's end of flow control.
#[derive(Debug, Default)]
pub(super) struct SendWindow {
    /// The bytes that were sent eagerly and are not acknowledged.
    unacknowledged: usize,
    kept: HashMap<CallId, KeptElements>,
    /// Messages that were announced, and that another transport carries once the receiver asks for them.
    announced: HashSet<CallId>,
}

impl SendWindow {
    /// Whether a call of this many bytes may be sent eagerly, which then counts as sent.
    pub(super) fn reserve(&mut self, bytes: usize) -> bool {
        let is_eager = bytes <= QUEUE_BYTES_MAX - self.unacknowledged;
        self.unacknowledged += if is_eager { bytes } else { 0 };
        is_eager
    }

    /// Whether so many bytes were sent eagerly and are not acknowledged.
    pub(super) fn may_acknowledge(&self, bytes: u64) -> bool {
        bytes <= self.unacknowledged as u64
    }

    /// Subtracts acknowledged bytes.
    pub(super) fn acknowledge(&mut self, bytes: u64) {
        self.unacknowledged -= bytes as usize;
    }

    /// Keeps the elements of a call, which is announced next.
    pub(super) fn keep(&mut self, id: CallId, buffer: Arc<Vec<u8>>, range: Range<usize>) {
        self.kept.insert(id, KeptElements { buffer, range, is_held: false });
    }

    /// Lets the receiver ask for a message that another transport carries.
    #[cfg(feature = "nccl")]
    pub(super) fn announce(&mut self, id: CallId) {
        self.announced.insert(id);
    }

    pub(super) fn is_announced(&self, id: CallId) -> bool {
        self.announced.contains(&id)
    }

    /// Whether a message was announced that another transport carries; no longer afterwards, because the receiver asks once.
    pub(super) fn take_announced(&mut self, id: CallId) -> bool {
        self.announced.remove(&id)
    }

    pub(super) fn is_kept(&self, id: CallId) -> bool {
        self.kept.contains_key(&id)
    }

    /// Takes out elements that the receiver has asked for.
    pub(super) fn clear(&mut self, id: CallId) -> Option<KeptElements> {
        self.kept.remove(&id)
    }

    /// Stores that the receiver cannot take these elements soon.
    pub(super) fn hold(&mut self, id: CallId) {
        self.kept.entry(id).and_modify(|kept| kept.is_held = true);
    }

    /// Whether the receiver may take these elements soon, and its reply is missing.
    pub(super) fn is_unanswered(&self, id: CallId) -> bool {
        self.kept.get(&id).is_some_and(|kept| !kept.is_held)
    }
}

/// A call that has arrived without its elements.
#[derive(Debug)]
struct Announcement {
    id: CallId,
    /// The length of the elements.
    bytes: usize,
    since: Instant,
    is_held: bool,
    /// Whether this rank has asked for the elements.
    is_cleared: bool,
    /// The bytes of the queue that are reserved for the elements: none if this rank waits for them.
    reserved: usize,
}

/// The receiver's end of flow control.
#[derive(Debug, Default)]
pub(super) struct ReceiveWindow {
    /// The bytes received, or reserved for announced elements, and not acknowledged.
    received: usize,
    /// Those of them that were taken out of the queue.
    taken: usize,
    /// The bytes of queued calls that came without elements.
    announced: usize,
    /// Calls whose elements have not arrived, in the order of arrival.
    announcements: VecDeque<Announcement>,
}

impl ReceiveWindow {
    /// Whether a call of this many bytes may arrive, eagerly or without its elements. A correct sender sends no other eagerly.
    pub(super) fn has_room(&self, bytes: usize, is_eager: bool) -> bool {
        bytes <= QUEUE_BYTES_MAX - if is_eager { self.received } else { self.announced }
    }

    /// Counts a call that has arrived with its elements.
    pub(super) fn add(&mut self, bytes: usize) {
        self.received += bytes;
    }

    /// Counts a call that has arrived and whose elements another transport carries.
    pub(super) fn add_call_only(&mut self, bytes: usize) {
        self.announced += bytes;
    }

    /// Counts a call that has arrived without its elements, which have this many bytes.
    pub(super) fn announce(&mut self, id: CallId, call_bytes: usize, bytes: usize) {
        self.announced += call_bytes;
        let since = Instant::now();
        let (is_held, is_cleared, reserved) = (false, false, 0);
        self.announcements.push_back(Announcement { id, bytes, since, is_held, is_cleared, reserved });
    }

    /// Whether this rank has asked for the elements of a call, which have this many bytes.
    pub(super) fn is_due(&self, id: CallId, bytes: usize) -> bool {
        self.announcements.iter().any(|one| one.id == id && one.is_cleared && one.bytes == bytes)
    }

    /// Removes the announcement of elements that have arrived. Returns the bytes reserved for them.
    pub(super) fn arrive(&mut self, id: CallId) -> usize {
        let at = self.announcements.iter().position(|one| one.id == id);
        at.and_then(|at| self.announcements.remove(at)).map_or(0, |one| one.reserved)
    }

    /// Counts a call that was taken out of the queue: the bytes that it counted with its elements, and without them. Returns whether
    /// [`ReceiveWindow::next_reply`] may have something to send.
    pub(super) fn take(&mut self, bytes: usize, announced: usize) -> bool {
        self.taken += bytes;
        self.announced -= announced;
        self.taken >= CREDIT_BYTES || !self.announcements.is_empty()
    }

    /// The next reply to what has arrived and was taken: asks for elements that fit where others were, or acknowledges.
    pub(super) fn next_reply(&mut self) -> Option<Frame> {
        if let Some(next) = self.announcements.iter_mut().find(|one| !one.is_cleared) {
            if next.bytes <= self.taken {
                self.taken -= next.bytes;
                (next.is_cleared, next.reserved) = (true, next.bytes);
                return Some(Frame::ClearToSend(next.id));
            }
            // Room is saved for it.
            if next.bytes <= self.received {
                return None;
            }
        }
        if self.taken < CREDIT_BYTES {
            return None;
        }
        self.received -= self.taken;
        Some(Frame::Credit(std::mem::take(&mut self.taken) as u64))
    }

    /// The next reply of a rank that waits, perhaps for the elements of the call `awaited`, or cannot finish a send: asks for those
    /// elements, which need no room, or holds a message that was announced `pause` ago.
    pub(super) fn next_waiting_reply(&mut self, awaited: Option<CallId>, pause: Duration) -> Option<Frame> {
        for one in self.announcements.iter_mut().filter(|one| !one.is_cleared) {
            if awaited == Some(one.id) {
                one.is_cleared = true;
                return Some(Frame::ClearToSend(one.id));
            }
            if one.id.is_message && !one.is_held && one.since.elapsed() >= pause {
                one.is_held = true;
                return Some(Frame::Hold(one.id));
            }
        }
        self.next_reply()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn message(number: u64) -> CallId {
        CallId { is_message: true, bits: 1, number }
    }

    /// Delivers a frame of the receiver to the sender. Returns the call whose elements it asks for.
    fn deliver(frame: Option<Frame>, to: &mut SendWindow) -> Option<CallId> {
        match frame? {
            Frame::ClearToSend(id) => {
                to.clear(id).unwrap();
                return Some(id);
            }
            Frame::Hold(id) => to.hold(id),
            Frame::Credit(bytes) => to.acknowledge(bytes),
            frame => panic!("{frame:?} is no reply"),
        }
        None
    }

    #[test]
    fn announced_elements_are_asked_for_where_others_were_taken() {
        let (mut sender, mut receiver) = (SendWindow::default(), ReceiveWindow::default());
        let third = QUEUE_BYTES_MAX / 3;
        for _ in 0..3 {
            assert!(sender.reserve(third) && receiver.has_room(third, true));
            receiver.add(third);
        }
        assert!(!sender.reserve(third) && !receiver.has_room(third, true));
        for number in 4..6 {
            sender.keep(message(number), Arc::new(vec![0; third]), 0..third);
            receiver.announce(message(number), CALL_BYTES, third);
        }
        assert!(receiver.next_reply().is_none() && !receiver.is_due(message(4), third), "the queue is full");
        for number in 4..6 {
            assert!(receiver.take(third, 0));
            assert_eq!(deliver(receiver.next_reply(), &mut sender), Some(message(number)));
            assert!(receiver.is_due(message(number), third) && !receiver.is_due(message(number), third + 1));
            assert!(receiver.next_reply().is_none(), "its place is reserved");
            assert_eq!(receiver.arrive(message(number)), third);
            assert!(!receiver.is_due(message(number), third), "elements that have come");
        }
        // Whatever is taken without another announcement becomes credit.
        assert!(!sender.reserve(third));
        for announced in [0, CALL_BYTES, CALL_BYTES] {
            assert!(receiver.take(third, announced));
            assert_eq!(deliver(receiver.next_reply(), &mut sender), None);
            assert!(receiver.next_reply().is_none());
        }
        assert_eq!((sender.unacknowledged, receiver.received, receiver.announced), (0, 0, 0));
        assert!(!receiver.take(0, 0));
    }

    #[test]
    fn waiting_receiver_asks_for_what_it_waits_for_and_holds_other_messages() {
        let (mut sender, mut receiver) = (SendWindow::default(), ReceiveWindow::default());
        let collective = CallId { is_message: false, ..message(1) };
        for id in [message(1), collective, message(2)] {
            sender.keep(id, Arc::default(), 0..0);
            receiver.announce(id, CALL_BYTES, 2 * QUEUE_BYTES_MAX);
        }
        let now = Duration::ZERO;
        assert!(receiver.next_waiting_reply(None, Duration::from_secs(60)).is_none(), "too early");
        assert!(sender.is_unanswered(message(1)));
        // Calls are not held: nobody waits before they are cleared.
        for number in 1..3 {
            assert_eq!(deliver(receiver.next_waiting_reply(None, now), &mut sender), None);
            assert!(!sender.is_unanswered(message(number)) && sender.is_kept(message(number)));
        }
        assert!(receiver.next_waiting_reply(None, now).is_none());
        for id in [message(2), collective] {
            assert_eq!(deliver(receiver.next_waiting_reply(Some(id), now), &mut sender), Some(id));
            assert!(receiver.is_due(id, 2 * QUEUE_BYTES_MAX) && receiver.arrive(id) == 0);
        }
        assert!(receiver.next_waiting_reply(Some(collective), now).is_none() && !sender.is_kept(collective));
        assert!(sender.may_acknowledge(0) && !sender.may_acknowledge(1), "credit for what was not sent");
    }

    #[test]
    fn announcements_have_a_limit_of_their_own() {
        let mut receiver = ReceiveWindow::default();
        for number in 1..=(QUEUE_BYTES_MAX / CALL_BYTES) as u64 {
            assert!(receiver.has_room(CALL_BYTES, false));
            receiver.announce(message(number), CALL_BYTES, 1 << 40);
        }
        assert!(!receiver.has_room(1, false) && receiver.has_room(QUEUE_BYTES_MAX, true));
        assert!(!receiver.has_room(usize::MAX, true));
    }
}
