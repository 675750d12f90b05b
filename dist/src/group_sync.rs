//! Shared memory of a group of threads: barrier counters, call fingerprints, and inline payloads of small collectives.
//!
//! A cache line that two cores write moves between them, at 150 ns each time, and a lock is such a line. So members compare calls by
//! fingerprints, without locks, and payloads of up to [`INLINE_BYTES_MAX`] are copied into the slot of their sender. Each member has
//! two slots, for calls of odd and of even number: it overwrites a slot two calls later, when all members have arrived at the call
//! between, and so have read the slot.

use crate::call::Fingerprint;
use crate::error::Result;
use crate::spin_condvar::SpinCondvar;
use crate::sync::{AtomicU64, RwLock};
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The largest payload that fits into a slot, in bytes.
pub(crate) const INLINE_BYTES_MAX: usize = 4 << 10;
/// The largest group with inline payloads: in larger groups, reading all slots takes longer than a second barrier.
pub(crate) const INLINE_RANKS_MAX: usize = 8;

const WORD_BYTES: usize = size_of::<u64>();
/// Words of payload next to the fingerprint, so that both fill two cache lines.
const NUM_WORDS: usize = 13;

/// What one member publishes for a call: its fingerprint, and a small payload.
#[derive(Default)]
#[repr(align(128))]
struct InlineSlot {
    call: AtomicU64,
    path: AtomicU64,
    origin: AtomicU64,
    words: [AtomicU64; NUM_WORDS],
    long: LongPayload,
}

/// A payload too long for the words of a slot. Copying with wide loads and stores outweighs the lock, which is never contended:
/// writers and readers use it at different times.
#[derive(Default)]
#[repr(align(128))]
struct LongPayload(RwLock<Vec<u8>>);

/// The shared state of a group: for each of the three barriers of a collective, how often members have arrived at it (summed over the
/// members), and the members' slots.
#[repr(align(128))]
pub(crate) struct GroupSync {
    pub(crate) arrived: AtomicU64,
    pub(crate) reduced: AtomicU64,
    pub(crate) finished: AtomicU64,
    condvar: SpinCondvar,
    /// By group rank, then by the parity of the call's number.
    slots: Vec<[InlineSlot; 2]>,
}

impl GroupSync {
    /// The state of a group with `size` members.
    pub(crate) fn new(size: usize) -> GroupSync {
        let count = || AtomicU64::new(0);
        let slots = (0..size).map(|_| <[InlineSlot; 2]>::default()).collect();
        GroupSync {
            arrived: count(),
            reduced: count(),
            finished: count(),
            condvar: SpinCondvar::default(),
            slots,
        }
    }

    fn size(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Barrier: increments `count` and waits until all members have done so. `tick` runs at every wake-up before that; its error ends
    /// the wait.
    pub(crate) fn wait_for_all(
        &self,
        count: &AtomicU64,
        spin: Duration,
        tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let before = count.fetch_add(1, Ordering::SeqCst);
        // No member enters the next barrier on a counter before this one is complete.
        let all = (before / self.size() + 1) * self.size();
        if before + 1 == all {
            self.condvar.notify_all();
            return Ok(());
        }
        self.condvar.wait(spin, || count.load(Ordering::SeqCst) >= all, tick)
    }

    /// Whether all members have arrived at call number `number`, from 1.
    pub(crate) fn have_all_arrived(&self, number: u64) -> bool {
        self.arrived.load(Ordering::SeqCst) >= number * self.size()
    }

    fn slot(&self, group_rank: usize, number: u64) -> &InlineSlot {
        &self.slots[group_rank][(number % 2) as usize]
    }

    /// Writes a member's slot for call number `number`, before the member arrives at that call.
    pub(crate) fn publish(&self, group_rank: usize, number: u64, fingerprint: Fingerprint, contents: &[u8]) {
        let slot = self.slot(group_rank, number);
        // Relaxed is enough: the barrier's counter orders these stores before the loads of other members.
        slot.call.store(fingerprint.call, Ordering::Relaxed);
        slot.path.store(fingerprint.path, Ordering::Relaxed);
        slot.origin.store(fingerprint.origin, Ordering::Relaxed);
        if contents.len() > NUM_WORDS * WORD_BYTES {
            let mut long = slot.long.0.write().unwrap_or_else(PoisonError::into_inner);
            long.clear();
            long.extend_from_slice(contents);
            return;
        }
        for (word, bytes) in slot.words.iter().zip(contents.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
    }

    /// Whether the fingerprints of all members match in call number `number`, at which all have arrived.
    pub(crate) fn fingerprints_agree(&self, number: u64) -> bool {
        let fingerprint = |group_rank: usize| {
            let InlineSlot { call, path, origin, .. } = self.slot(group_rank, number);
            let [call, path, origin] = [call, path, origin].map(|word| word.load(Ordering::Relaxed));
            Fingerprint { call, path, origin }
        };
        // Each hash is compared with the first known one.
        let mut first = fingerprint(0);
        (1..self.slots.len()).map(fingerprint).all(|other| {
            let fits = other.fits(first);
            first.fill_unknown(other);
            fits
        })
    }

    /// Copies a member's payload of call number `number`, at which all have arrived, into `contents`. Returns whether the payload has
    /// that length; the length of a payload that fits into the words of a slot is not stored.
    #[must_use]
    pub(crate) fn read(&self, group_rank: usize, number: u64, contents: &mut [u8]) -> bool {
        let slot = self.slot(group_rank, number);
        if contents.len() > NUM_WORDS * WORD_BYTES {
            let long = slot.long.0.read().unwrap_or_else(PoisonError::into_inner);
            if long.len() == contents.len() {
                contents.copy_from_slice(&long);
            }
            return long.len() == contents.len();
        }
        for (word, bytes) in slot.words.iter().zip(contents.chunks_mut(WORD_BYTES)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..bytes.len()]);
        }
        true
    }
}

impl fmt::Debug for GroupSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group of {}", self.slots.len())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_of_two_calls_are_separate_and_keep_every_length() {
        let group = GroupSync::new(2);
        let fingerprint = Fingerprint { call: 7, path: 0, origin: 0 };
        let all: Vec<u8> = (0..INLINE_BYTES_MAX).map(|i| (i * 7 % 251) as u8).collect();
        for size in [0, 1, 7, 8, 9, 103, 104, 105, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX] {
            group.publish(0, 1, fingerprint, &all[..size]);
            group.publish(0, 2, fingerprint, &[255; 200]);
            group.publish(1, 1, fingerprint, &[254; 200]);
            let mut back = vec![0; size];
            assert!(group.read(0, 1, &mut back));
            assert_eq!(back, all[..size]);
        }
        group.publish(0, 1, fingerprint, &all[..200]);
        assert!(!group.read(0, 1, &mut [0; 199]) && !group.read(0, 1, &mut [0; 201]));
    }

    #[test]
    fn different_fingerprints_are_found_and_unknown_hashes_match_any() {
        let group = GroupSync::new(3);
        let show = |fingerprints: [(u64, u64, u64); 3]| {
            for (group_rank, (call, path, origin)) in fingerprints.into_iter().enumerate() {
                group.publish(group_rank, 4, Fingerprint { call, path, origin }, &[]);
            }
            group.fingerprints_agree(4)
        };
        assert!(show([(5, 1, 2), (5, 1, 2), (5, 1, 2)]) && show([(5, 1, 2), (5, 0, 2), (5, 1, 0)]));
        assert!(!show([(5, 1, 2), (5, 1, 2), (6, 1, 2)]));
        assert!(!show([(5, 1, 2), (5, 2, 2), (5, 1, 2)]) && !show([(5, 1, 2), (5, 1, 2), (5, 1, 3)]));
        assert!(!show([(5, 0, 2), (5, 1, 2), (5, 2, 2)]) && !show([(5, 1, 0), (5, 1, 3), (5, 1, 4)]));
    }
}
