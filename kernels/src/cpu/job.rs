//! One call of a thread pool: a task for each index, and the workers that are woken to help.
//!
//! Waking a worker is a system call. So the wake-ups form a tree: the caller and each worker that has joined wake a few workers, then run
//! tasks. A worker that joins too late for a task wakes nobody.

use super::sync::{AtomicUsize, JoinHandle};
use super::worker_slot::WorkerSlot;
use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// A task: called for each index with the number of the thread (the caller's is 0) and the index.
pub(super) type ThreadTask<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Workers woken at a time. One in a loom model of three threads, so that the second thread wakes the third.
const WAKE_BATCH: usize = if cfg!(all(loom, test)) { 1 } else { 2 };

/// A worker thread, which runs [`serve`], and the slot where it waits for jobs.
pub(super) struct Worker {
    pub(super) slot: Arc<WorkerSlot>,
    pub(super) handle: JoinHandle<()>,
}

/// One call, owned by the caller until no worker uses it. On cache lines of its own, which move to a worker at once.
#[repr(align(128))]
pub(super) struct Job<'a> {
    task: &'a ThreadTask<'a>,
    count: usize,
    /// The workers that may help: at most one per task, less the caller's first task.
    helpers: &'a [Worker],
    /// The next index to run.
    next: AtomicUsize,
    /// How many of `helpers`, from the first on, were offered the job or were skipped because they were busy. May exceed their number, if
    /// two threads find the last one offered.
    num_offered: AtomicUsize,
    /// The payload of the first task that panicked.
    panicked: Mutex<Option<Panicked>>,
}

/// The payload of a panic.
pub(super) type Panicked = Box<dyn Any + Send>;

impl Job<'_> {
    /// Calls `task(thread, i)` for every i below `count`, which is 2 or more, on this thread and on idle workers. Returns, after all
    /// tasks are done, the payload of the first task that panicked. Dropping the payload may panic again.
    pub(super) fn run(workers: &[Worker], count: usize, task: &ThreadTask<'_>) -> Option<Panicked> {
        let helpers = &workers[..workers.len().min(count - 1)];
        // The first helpers are offered the job before any other thread can offer it.
        let first = &helpers[..helpers.len().min(WAKE_BATCH)];
        let (next, num_offered) = (AtomicUsize::new(1), AtomicUsize::new(first.len()));
        let job = Job { task, count, helpers, next, num_offered, panicked: Mutex::default() };
        // Nothing unwinds from here until no worker uses the job.
        let found = first.iter().filter(|worker| job.try_offer(worker)).count();
        job.offer_to_next(first.len() - found);
        job.run_task(0, 0);
        job.run_tasks(0);
        job.recall();
        job.panicked.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs tasks until none is left; wakes helpers before each task but the last.
    fn run_tasks(&self, thread: usize) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            if i + 1 < self.count {
                self.offer_to_next(WAKE_BATCH);
            }
            self.run_task(thread, i);
        }
    }

    fn run_task(&self, thread: usize, i: usize) {
        let task = std::panic::AssertUnwindSafe(|| (self.task)(thread, i));
        if let Err(cause) = std::panic::catch_unwind(task) {
            let mut first = self.panicked.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_none() {
                *first = Some(cause);
            } else {
                // Dropping the payload may panic again, outside of `catch_unwind`.
                std::mem::forget(cause);
            }
        }
    }

    /// Offers the job to the next `wanted` idle helpers.
    fn offer_to_next(&self, wanted: usize) {
        let mut found = 0;
        while found < wanted && self.num_offered.load(Ordering::Relaxed) < self.helpers.len() {
            let Some(worker) = self.helpers.get(self.num_offered.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            found += usize::from(self.try_offer(worker));
        }
    }

    /// Offers the job to a worker; returns whether it was idle.
    fn try_offer(&self, worker: &Worker) -> bool {
        worker.slot.offer(self.as_offer(), worker.handle.thread())
    }

    /// Takes the job back from all workers that were offered it, or waits until they are done. Called by the caller, last.
    fn recall(&self) {
        // A worker that has the job offers it only to helpers behind itself, so that no helper gets an offer after its recall.
        let mut i = 0;
        while i < self.num_offered.load(Ordering::Relaxed).min(self.helpers.len()) {
            self.helpers[i].slot.recall(self.as_offer());
            i += 1;
        }
    }

    /// Returns the job as the pointer that [`serve`] receives.
    fn as_offer(&self) -> *mut () {
        (&raw const *self).cast_mut().cast()
    }
}

/// The loop of a worker: runs the jobs that are offered at its slot, until the slot is closed.
pub(super) fn serve(slot: &WorkerSlot, thread: usize) {
    while let Some(job) = slot.take() {
        // SAFETY: offers are made by `Job::offer_to_next` and `Job::run` alone and point to jobs that `Job::run` keeps until it has
        // recalled them, which waits until this worker is done; jobs are shared between threads only through atomics, their task, which
        // is `Sync`, and slots and handles of threads, which are too.
        unsafe { &*job.cast::<Job<'_>>() }.run_tasks(thread);
        slot.finish();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Workers whose threads do not serve their slots.
    fn helpers(count: usize) -> Vec<Worker> {
        let worker = |_| Worker { slot: Arc::new(WorkerSlot::new(true)), handle: std::thread::spawn(|| ()) };
        (0..count).map(worker).collect()
    }

    fn job<'a>(helpers: &'a [Worker], count: usize, task: &'a ThreadTask<'a>) -> Job<'a> {
        let (next, num_offered) = (AtomicUsize::new(1), AtomicUsize::new(0));
        Job { task, count, helpers, next, num_offered, panicked: Mutex::default() }
    }

    fn offered(helpers: &[Worker]) -> Vec<bool> {
        helpers.iter().map(|worker| worker.slot.is_offered()).collect()
    }

    #[test]
    fn offers_go_to_two_idle_workers_at_a_time() {
        let helpers = helpers(5);
        let other = std::ptr::without_provenance_mut(256);
        helpers[1].slot.offer(other, helpers[1].handle.thread());
        assert_eq!(helpers[1].slot.take(), Some(other));
        let job = job(&helpers, 6, &|_, _| ());
        job.offer_to_next(2);
        assert_eq!(offered(&helpers), [true, false, true, false, false]);
        job.offer_to_next(2);
        assert_eq!(offered(&helpers), [true, false, true, true, true]);
        job.offer_to_next(2);
        job.recall();
        assert_eq!(offered(&helpers), [false; 5]);
    }

    #[test]
    fn last_task_wakes_no_worker() {
        let helpers = helpers(4);
        let seen = std::sync::Mutex::new(vec![]);
        let look = |_, _| seen.lock().unwrap().push(offered(&helpers));
        let job = job(&helpers, 3, &look);
        job.run_tasks(1);
        let after_one = vec![true, true, false, false];
        assert_eq!(*seen.lock().unwrap(), [after_one.clone(), after_one], "of tasks 1 and 2");
        job.run_tasks(2);
        job.recall();
        assert_eq!(offered(&helpers), [false; 4]);
    }

    #[test]
    fn caller_skips_busy_workers() {
        let helpers = helpers(4);
        let other = std::ptr::without_provenance_mut(256);
        helpers[0].slot.offer(other, helpers[0].handle.thread());
        assert_eq!(helpers[0].slot.take(), Some(other));
        let first = std::sync::OnceLock::new();
        let panicked = Job::run(&helpers, 5, &|_, _| {
            first.get_or_init(|| offered(&helpers));
        });
        assert!(panicked.is_none());
        assert_eq!(first.into_inner(), Some(vec![false, true, true, false]));
        assert_eq!(offered(&helpers), [false; 4]);
    }

    #[test]
    fn number_of_offers_is_at_most_the_number_of_tasks() {
        let helpers = helpers(8);
        let most = AtomicUsize::new(0);
        let count = |_, _| {
            most.fetch_max(offered(&helpers).iter().filter(|&&is| is).count(), Ordering::Relaxed);
        };
        assert!(Job::run(&helpers, 5, &count).is_none());
        assert_eq!(most.into_inner(), 4, "the caller does one of them itself");
        assert_eq!(offered(&helpers), [false; 8]);
    }
}
