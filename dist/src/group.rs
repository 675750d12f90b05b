//! Where the members of a group meet, and the little that they show each other there without a lock.
//!
//! A line of memory that two cores write goes back and forth between them, 150 ns each time, and a lock is such a line. So
//! what all members have to know of each other's call is one number, its print, and contents of up to [`NOTE_BYTES`] are
//! shown as they are. Each member has two notes, for calls of odd and of even number: it writes to one again two calls later,
//! before which everyone has come to the call between, and so has read it.

use crate::call::Print;
use crate::error::Result;
use crate::park::Parking;
use crate::sync::{AtomicU64, RwLock};
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes that a member can show in a note.
pub(crate) const NOTE_BYTES: usize = 4 << 10;
/// In larger groups notes are prints: to read so many takes longer than a second meeting.
pub(crate) const NOTED_MAX: usize = 8;

const WORD_BYTES: usize = size_of::<u64>();
/// What lies beside the print: two lines of memory hold all.
const NUM_WORDS: usize = 13;

/// What one member shows of a call.
#[derive(Default)]
#[repr(align(128))]
struct Note {
    call: AtomicU64,
    path: AtomicU64,
    mark: AtomicU64,
    words: [AtomicU64; NUM_WORDS],
    sheet: Sheet,
}

/// Contents that are too long to go word by word: wide stores and loads keep many lines under way at once, which is worth a lock
/// that nobody ever finds taken by one of another kind.
#[derive(Default)]
#[repr(align(128))]
struct Sheet(RwLock<Vec<u8>>);

/// How often the members of a group have come to each of the three meetings, summed over all of them, and their notes.
#[repr(align(128))]
pub(crate) struct Group {
    pub(crate) arrived: AtomicU64,
    pub(crate) combined: AtomicU64,
    pub(crate) left: AtomicU64,
    parking: Parking,
    /// By place, then by the number of the call.
    notes: Vec<[Note; 2]>,
}

impl Group {
    /// A group of so many members.
    pub(crate) fn new(size: usize) -> Group {
        let count = || AtomicU64::new(0);
        let notes = (0..size).map(|_| <[Note; 2]>::default()).collect();
        Group { arrived: count(), combined: count(), left: count(), parking: Parking::default(), notes }
    }

    fn size(&self) -> u64 {
        self.notes.len() as u64
    }

    /// Comes to a meeting of one kind and waits until all members have come. `tick` runs at every wake-up that finds nothing
    /// done; its error ends the wait.
    pub(crate) fn come(
        &self,
        count: &AtomicU64,
        spin: Duration,
        tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let before = count.fetch_add(1, Ordering::SeqCst);
        // Nobody comes to the next meeting of a kind before this one is complete.
        let all = (before / self.size() + 1) * self.size();
        if before + 1 == all {
            self.parking.ring();
            return Ok(());
        }
        self.parking.wait(spin, || count.load(Ordering::SeqCst) >= all, tick)
    }

    /// Whether all members have arrived at call number `number`, from 1.
    pub(crate) fn has_met(&self, number: u64) -> bool {
        self.arrived.load(Ordering::SeqCst) >= number * self.size()
    }

    fn note(&self, place: usize, number: u64) -> &Note {
        &self.notes[place][(number % 2) as usize]
    }

    /// Writes the note of the member at a place, before it arrives at call number `number`.
    pub(crate) fn show(&self, place: usize, number: u64, print: Print, contents: &[u8]) {
        let note = self.note(place, number);
        // Whoever sees that this member has arrived sees what it wrote before.
        note.call.store(print.call, Ordering::Relaxed);
        note.path.store(print.path, Ordering::Relaxed);
        note.mark.store(print.mark, Ordering::Relaxed);
        if contents.len() > NUM_WORDS * WORD_BYTES {
            let mut sheet = note.sheet.0.write().unwrap_or_else(PoisonError::into_inner);
            sheet.clear();
            sheet.extend_from_slice(contents);
            return;
        }
        for (word, bytes) in note.words.iter().zip(contents.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
    }

    /// Whether what all members have shown of call number `number`, at which all have arrived, fits together.
    pub(crate) fn prints_agree(&self, number: u64) -> bool {
        let print = |place: usize| {
            let Note { call, path, mark, .. } = self.note(place, number);
            let [call, path, mark] = [call, path, mark].map(|word| word.load(Ordering::Relaxed));
            Print { call, path, mark }
        };
        // Known words are compared with the first that is known.
        let mut first = print(0);
        (1..self.notes.len()).map(print).all(|other| {
            let fits = other.fits(first);
            first.learn(other);
            fits
        })
    }

    /// Reads the contents that the member at a place shows in call number `number`, at which all have arrived. Returns whether there
    /// are as many bytes; contents that fit into the words of a note have no length of their own.
    #[must_use]
    pub(crate) fn read(&self, place: usize, number: u64, contents: &mut [u8]) -> bool {
        let note = self.note(place, number);
        if contents.len() > NUM_WORDS * WORD_BYTES {
            let sheet = note.sheet.0.read().unwrap_or_else(PoisonError::into_inner);
            if sheet.len() == contents.len() {
                contents.copy_from_slice(&sheet);
            }
            return sheet.len() == contents.len();
        }
        for (word, bytes) in note.words.iter().zip(contents.chunks_mut(WORD_BYTES)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..bytes.len()]);
        }
        true
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group of {}", self.notes.len())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn notes_of_two_calls_lie_apart_and_odd_bytes_come_back() {
        let group = Group::new(2);
        let print = Print { call: 7, path: 0, mark: 0 };
        let all: Vec<u8> = (0..NOTE_BYTES).map(|i| (i * 7 % 251) as u8).collect();
        for size in [0, 1, 7, 8, 9, 103, 104, 105, NOTE_BYTES - 1, NOTE_BYTES] {
            group.show(0, 1, print, &all[..size]);
            group.show(0, 2, print, &[255; 200]);
            group.show(1, 1, print, &[254; 200]);
            let mut back = vec![0; size];
            assert!(group.read(0, 1, &mut back));
            assert_eq!(back, all[..size]);
        }
        group.show(0, 1, print, &all[..200]);
        assert!(!group.read(0, 1, &mut [0; 199]) && !group.read(0, 1, &mut [0; 201]));
    }

    #[test]
    fn a_print_that_differs_is_seen_and_no_path_fits_any() {
        let group = Group::new(3);
        let show = |prints: [(u64, u64, u64); 3]| {
            for (place, (call, path, mark)) in prints.into_iter().enumerate() {
                group.show(place, 4, Print { call, path, mark }, &[]);
            }
            group.prints_agree(4)
        };
        assert!(show([(5, 1, 2), (5, 1, 2), (5, 1, 2)]) && show([(5, 1, 2), (5, 0, 2), (5, 1, 0)]));
        assert!(!show([(5, 1, 2), (5, 1, 2), (6, 1, 2)]));
        assert!(!show([(5, 1, 2), (5, 2, 2), (5, 1, 2)]) && !show([(5, 1, 2), (5, 1, 2), (5, 1, 3)]));
        assert!(!show([(5, 0, 2), (5, 1, 2), (5, 2, 2)]) && !show([(5, 1, 0), (5, 1, 3), (5, 1, 4)]));
    }
}
