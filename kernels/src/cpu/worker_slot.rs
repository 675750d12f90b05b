//! The slot through which a worker of a pool receives jobs: one atomic word, so that a cache line goes there and back.

use super::sync::{AtomicPtr, Thread, park, yield_now};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an idle worker that may spin does so before it parks.
const SPIN: Duration = Duration::from_micros(60);
/// Spins of a caller that waits for a worker before it yields: the operating system may have preempted the worker.
const SPINS: usize = 20_000;

/// No job; the worker spins.
const READY: *mut () = null_mut();
/// No job; the worker is parked and must be woken.
const PARKED: *mut () = without_provenance_mut(1);
/// The worker exits.
const CLOSED: *mut () = without_provenance_mut(3);

/// The state of one worker: `READY`, `PARKED`, `CLOSED`, an offered job, or a job in progress (its address with the lowest bit set).
///
/// A caller that offers a job calls [`WorkerSlot::recall`] on every slot it was offered to, before the job ends. After that no worker
/// uses it.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct WorkerSlot {
    state: AtomicPtr<()>,
    may_spin: bool,
}

/// Returns the state while a job is in progress.
fn in_progress(job: *mut ()) -> *mut () {
    job.map_addr(|address| address | 1)
}

impl WorkerSlot {
    /// Creates an idle slot. `may_spin` is false if not every thread has a core: a spinning thread would hold the core of another.
    pub(super) fn new(may_spin: bool) -> WorkerSlot {
        WorkerSlot { state: AtomicPtr::new(READY), may_spin }
    }

    /// Waits for an offer and takes it; `None` if the slot is closed. Called by the worker, which calls [`WorkerSlot::finish`] next.
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
                if self.exchange(state, in_progress(state)) {
                    return Some(state);
                }
            } else if idle.elapsed() < spin {
                std::hint::spin_loop();
            } else if self.exchange(READY, PARKED) {
                while self.state.load(Ordering::Relaxed) == PARKED {
                    park();
                }
                idle = Instant::now();
            }
        }
    }

    /// Ends the job in progress, which the worker does not touch any more.
    pub(super) fn finish(&self) {
        self.state.store(READY, Ordering::Release);
    }

    /// Offers a job, whose address is even, unless the worker is busy or has an offer; returns whether the worker was idle.
    pub(super) fn offer(&self, job: *mut (), worker: &Thread) -> bool {
        if self.exchange(READY, job) {
            return true;
        }
        let has_parked = self.exchange(PARKED, job);
        if has_parked {
            worker.unpark();
        }
        has_parked
    }

    /// Takes a job back or, if the worker has taken it, waits until it is done. The worker's writes are visible after that.
    pub(super) fn recall(&self, job: *mut ()) {
        if self.exchange(job, READY) {
            return;
        }
        let mut spins_left = if self.may_spin { SPINS } else { 0 };
        while self.state.load(Ordering::Acquire) == in_progress(job) {
            if spins_left > 0 {
                std::hint::spin_loop()
            } else {
                yield_now()
            }
            spins_left = spins_left.saturating_sub(1);
        }
    }

    /// Makes the worker exit. No thread offers a job now or later.
    pub(super) fn close(&self, worker: &Thread) {
        // In loom's model a plain store may take effect before changes that it came too late for.
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

    fn exchange(&self, from: *mut (), to: *mut ()) -> bool {
        self.state.load(Ordering::Relaxed) == from
            && self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn offer_is_accepted_or_recalled() {
        let (slot, me) = (WorkerSlot::new(true), std::thread::current());
        let [first, second] = [16, 32].map(without_provenance_mut::<()>);
        assert!(slot.offer(first, &me));
        assert!(!slot.offer(second, &me));
        assert_eq!(slot.take(), Some(first), "a second offer is refused");
        assert!(!slot.offer(second, &me));
        slot.recall(second);
        assert_eq!(slot.state.load(Ordering::Relaxed), in_progress(first), "a busy worker refuses offers");
        slot.finish();
        slot.offer(second, &me);
        slot.recall(first);
        assert_eq!(slot.take(), Some(second), "recalling another job has no effect");
        slot.finish();
        slot.offer(first, &me);
        slot.recall(first);
        slot.close(&me);
        assert_eq!(slot.take(), None);
    }

    /// Workers count twice for each job they take: after a recall the caller sees even counts, and they do not change any more.
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
                    slot.finish();
                }
            };
            let workers = slots.each_ref().map(|slot| (slot, scope.spawn(move || work(slot))));
            let mut seen = vec![];
            for (round, count) in counts.iter().enumerate() {
                for (slot, worker) in &workers {
                    slot.offer(job(round), worker.thread());
                }
                // In some rounds no worker has taken the job yet, in others both are done.
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
    fn no_worker_uses_a_recalled_job() {
        race(true);
        race(false);
    }
}
