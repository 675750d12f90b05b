//! Where a worker of a pool waits for work, and how it is handed over: one word, so that a cache line goes there and back.

use super::sync::{AtomicPtr, Thread, park, yield_now};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an idle worker that may spin does so before it parks.
const SPIN: Duration = Duration::from_micros(60);
/// So often a caller that may spin looks whether a worker is done before it lets others run: the system may have stopped it.
const LOOKS: usize = 20_000;

/// Nothing to do; the worker spins.
const READY: *mut () = null_mut();
/// Nothing to do; the worker has to be woken.
const PARKED: *mut () = without_provenance_mut(1);
/// There will be no more work.
const CLOSED: *mut () = without_provenance_mut(3);

/// The place of one worker: `READY`, `PARKED`, `CLOSED`, an offer, or an offer that was taken.
///
/// Whoever offers a job calls [`WorkerSlot::recall`] before the job ends, on every slot it was offered to. After that no worker has it.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct WorkerSlot {
    state: AtomicPtr<()>,
    may_spin: bool,
}

/// The state while a job is worked on.
fn taken(job: *mut ()) -> *mut () {
    job.map_addr(|address| address | 1)
}

impl WorkerSlot {
    /// A free slot. Where not every thread has a core, nobody may spin: whoever waits would hold the core of another.
    pub(super) fn new(may_spin: bool) -> WorkerSlot {
        WorkerSlot { state: AtomicPtr::new(READY), may_spin }
    }

    /// Waits for an offer and takes it; none, if the slot is closed. For the worker, who says [`WorkerSlot::done`] next.
    pub(super) fn take(&self) -> Option<*mut ()> {
        let spin = if self.may_spin { SPIN } else { Duration::ZERO };
        let mut idle = Instant::now();
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state == CLOSED {
                return None;
            }
            if state != READY {
                // The job may have been recalled meanwhile.
                if self.change(state, taken(state)) {
                    return Some(state);
                }
            } else if idle.elapsed() < spin {
                std::hint::spin_loop();
            } else if self.change(READY, PARKED) {
                while self.state.load(Ordering::Relaxed) == PARKED {
                    park();
                }
                idle = Instant::now();
            }
        }
    }

    /// What was taken is done, and is not touched any more.
    pub(super) fn done(&self) {
        self.state.store(READY, Ordering::Release);
    }

    /// Offers a job, whose address is even, to the worker unless it is at work or has an offer; returns whether it did.
    pub(super) fn offer(&self, job: *mut (), worker: &Thread) -> bool {
        if self.change(READY, job) {
            return true;
        }
        let has_parked = self.change(PARKED, job);
        if has_parked {
            worker.unpark();
        }
        has_parked
    }

    /// Takes a job back or, if the worker has taken it, waits until it is done. What the worker did is seen after that.
    pub(super) fn recall(&self, job: *mut ()) {
        if self.change(job, READY) {
            return;
        }
        let mut looks = if self.may_spin { LOOKS } else { 0 };
        while self.state.load(Ordering::Acquire) == taken(job) {
            if looks > 0 {
                std::hint::spin_loop()
            } else {
                yield_now()
            }
            looks = looks.saturating_sub(1);
        }
    }

    /// Sends the worker home. Nobody offers anything now or later.
    pub(super) fn close(&self, worker: &Thread) {
        // The model of loom lets a plain store come before changes that it was too late for.
        self.state.swap(CLOSED, Ordering::AcqRel);
        worker.unpark();
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn is_parked(&self) -> bool {
        self.state.load(Ordering::Relaxed) == PARKED
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn is_offered(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        ![READY, PARKED, CLOSED].contains(&state) && state.addr().is_multiple_of(2)
    }

    fn change(&self, from: *mut (), to: *mut ()) -> bool {
        self.state.load(Ordering::Relaxed) == from
            && self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_job_is_taken_or_recalled() {
        let (slot, me) = (WorkerSlot::new(true), std::thread::current());
        let [first, second] = [16, 32].map(without_provenance_mut::<()>);
        assert!(slot.offer(first, &me));
        assert!(!slot.offer(second, &me));
        assert_eq!(slot.take(), Some(first), "who is offered one thing is not offered another");
        assert!(!slot.offer(second, &me));
        slot.recall(second);
        assert_eq!(slot.state.load(Ordering::Relaxed), taken(first), "nor is who works");
        slot.done();
        slot.offer(second, &me);
        slot.recall(first);
        assert_eq!(slot.take(), Some(second), "only the job itself is recalled");
        slot.done();
        slot.offer(first, &me);
        slot.recall(first);
        slot.close(&me);
        assert_eq!(slot.take(), None);
    }

    /// Workers count twice for each job they take: whoever has recalled it finds whole pairs, and they stay as they are.
    fn race(may_spin: bool) {
        const ROUNDS: usize = 2000;
        let slots = [WorkerSlot::new(may_spin), WorkerSlot::new(may_spin)];
        let counts: Vec<AtomicUsize> = (0..ROUNDS).map(|_| AtomicUsize::new(0)).collect();
        let job = |round: usize| without_provenance_mut::<()>(16 * (round + 1));
        std::thread::scope(|scope| {
            let work = |slot: &WorkerSlot| {
                while let Some(job) = slot.take() {
                    let count = &counts[job.addr() / 16 - 1];
                    count.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                    count.fetch_add(1, Ordering::Relaxed);
                    slot.done();
                }
            };
            let workers = slots.each_ref().map(|slot| (slot, scope.spawn(move || work(slot))));
            let mut seen = vec![];
            for (round, count) in counts.iter().enumerate() {
                for (slot, worker) in &workers {
                    slot.offer(job(round), worker.thread());
                }
                // Now nobody has taken it yet, now both are done with it.
                (0..round % 50 * 20).for_each(|_| std::hint::spin_loop());
                workers.iter().for_each(|(slot, _)| slot.recall(job(round)));
                seen.push(count.load(Ordering::Relaxed));
            }
            workers.iter().for_each(|(slot, worker)| slot.close(worker.thread()));
            assert!(seen.iter().all(|&count| [0, 2, 4].contains(&count)), "{seen:?}");
            for (seen, count) in seen.iter().zip(&counts) {
                assert_eq!(*seen, count.load(Ordering::Relaxed));
            }
        });
    }

    #[test]
    fn who_has_recalled_a_job_has_it_alone() {
        race(true);
        race(false);
    }
}
