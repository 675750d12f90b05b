//! One call of a pool: a task for each index, and the workers that are asked to help.
//!
//! To wake a worker is a system call. So nobody wakes them all: the caller and each worker that has come ask a few, then do
//! tasks of their own. A worker that comes too late for a task asks nobody.

use super::sync::{AtomicBool, AtomicUsize, JoinHandle};
use super::worker_slot::WorkerSlot;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What is done for each index, by a thread that is told its number: the caller's is 0.
pub(super) type TaskOfThread<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// So many workers are asked at a time. In a model of three threads it is one, so that the second asks the third.
const ASKED: usize = if cfg!(all(loom, test)) { 1 } else { 2 };

/// A thread and where it waits for jobs; it runs [`serve`].
pub(super) struct Worker {
    pub(super) slot: Arc<WorkerSlot>,
    pub(super) handle: JoinHandle<()>,
}

/// One call, held by the caller until no worker has it. On a cache line of its own, which goes to a worker at once.
#[repr(align(128))]
pub(super) struct Job<'a> {
    task: &'a TaskOfThread<'a>,
    count: usize,
    /// At most one for each task but the caller's first.
    crew: &'a [Worker],
    /// The next index to be handed out.
    next: AtomicUsize,
    /// How many of the crew, from the first on, have been asked or were passed over because they were at work. More than
    /// there are, where two found the last one asked.
    asked: AtomicUsize,
    panicked: AtomicBool,
}

impl Job<'_> {
    /// Calls `task(thread, i)` for every i below `count`, which is 2 or more, on this thread and on free ones of these workers.
    /// Returns whether a task panicked, when all are done.
    pub(super) fn run(workers: &[Worker], count: usize, task: &TaskOfThread<'_>) -> bool {
        let crew = &workers[..workers.len().min(count - 1)];
        // The first are asked before anyone else can ask.
        let first = &crew[..crew.len().min(ASKED)];
        let (next, asked) = (AtomicUsize::new(1), AtomicUsize::new(first.len()));
        let job = Job { task, count, crew, next, asked, panicked: AtomicBool::new(false) };
        // Nothing unwinds from here until no worker has the job.
        let found = first.iter().filter(|worker| job.is_offered_to(worker)).count();
        job.ask(first.len() - found);
        job.one(0, 0);
        job.work(0);
        job.recall();
        job.panicked.into_inner()
    }

    /// Does tasks until there are none; asks for help before each but the last.
    fn work(&self, thread: usize) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            if i + 1 < self.count {
                self.ask(ASKED);
            }
            self.one(thread, i);
        }
    }

    fn one(&self, thread: usize, i: usize) {
        let task = std::panic::AssertUnwindSafe(|| (self.task)(thread, i));
        if let Err(cause) = std::panic::catch_unwind(task) {
            // To drop it may panic again, outside of what is caught.
            std::mem::forget(cause);
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Offers the job to the next so many that are free.
    fn ask(&self, wanted: usize) {
        let mut found = 0;
        while found < wanted && self.asked.load(Ordering::Relaxed) < self.crew.len() {
            let Some(worker) = self.crew.get(self.asked.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            found += usize::from(self.is_offered_to(worker));
        }
    }

    /// Offers the job to a worker; returns whether it was free.
    fn is_offered_to(&self, worker: &Worker) -> bool {
        worker.slot.offer(self.offer(), worker.handle.thread())
    }

    /// Takes the job back from all who were asked, or waits until they are done. For the caller, when it asks no more.
    fn recall(&self) {
        // A worker that has the job asks those behind itself only, so that nobody is asked any more whose turn is over.
        let mut turn = 0;
        while turn < self.asked.load(Ordering::Relaxed).min(self.crew.len()) {
            self.crew[turn].slot.recall(self.offer());
            turn += 1;
        }
    }

    /// What [`serve`] takes.
    fn offer(&self) -> *mut () {
        (&raw const *self).cast_mut().cast()
    }
}

/// Does the jobs that are offered at a slot, until it is closed. For the worker whose slot it is.
pub(super) fn serve(slot: &WorkerSlot, thread: usize) {
    while let Some(job) = slot.take() {
        // SAFETY: offers are made by `Job::ask` alone and point to jobs that `Job::run` holds until it has recalled them, which
        // waits until this worker is done; jobs are shared between threads only by what is atomic, by their task, which is
        // `Sync`, and by slots and handles of threads, which are too.
        unsafe { &*job.cast::<Job<'_>>() }.work(thread);
        slot.done();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Workers whose threads serve nobody.
    fn crew(count: usize) -> Vec<Worker> {
        let worker = |_| Worker { slot: Arc::new(WorkerSlot::new(true)), handle: std::thread::spawn(|| ()) };
        (0..count).map(worker).collect()
    }

    fn job<'a>(crew: &'a [Worker], count: usize, task: &'a TaskOfThread<'a>) -> Job<'a> {
        let (next, asked) = (AtomicUsize::new(1), AtomicUsize::new(0));
        Job { task, count, crew, next, asked, panicked: AtomicBool::new(false) }
    }

    fn offered(crew: &[Worker]) -> Vec<bool> {
        crew.iter().map(|worker| worker.slot.is_offered()).collect()
    }

    #[test]
    fn two_are_asked_at_a_time_and_whoever_is_at_work_is_passed_over() {
        let crew = crew(5);
        let other = std::ptr::without_provenance_mut(256);
        crew[1].slot.offer(other, crew[1].handle.thread());
        assert_eq!(crew[1].slot.take(), Some(other));
        let job = job(&crew, 6, &|_, _| ());
        job.ask(2);
        assert_eq!(offered(&crew), [true, false, true, false, false]);
        job.ask(2);
        assert_eq!(offered(&crew), [true, false, true, true, true]);
        job.ask(2);
        job.recall();
        assert_eq!(offered(&crew), [false; 5]);
    }

    #[test]
    fn nobody_is_asked_when_the_last_task_is_handed_out() {
        let crew = crew(4);
        let seen = std::sync::Mutex::new(vec![]);
        let look = |_, _| seen.lock().unwrap().push(offered(&crew));
        let job = job(&crew, 3, &look);
        job.work(1);
        let after_one = vec![true, true, false, false];
        assert_eq!(*seen.lock().unwrap(), [after_one.clone(), after_one], "of tasks 1 and 2");
        job.work(2);
        job.recall();
        assert_eq!(offered(&crew), [false; 4]);
    }

    #[test]
    fn the_caller_passes_over_who_is_at_work_too() {
        let crew = crew(4);
        let other = std::ptr::without_provenance_mut(256);
        crew[0].slot.offer(other, crew[0].handle.thread());
        assert_eq!(crew[0].slot.take(), Some(other));
        let first = std::sync::OnceLock::new();
        assert!(!Job::run(&crew, 5, &|_, _| {
            first.get_or_init(|| offered(&crew));
        }));
        assert_eq!(first.into_inner(), Some(vec![false, true, true, false]));
        assert_eq!(offered(&crew), [false; 4]);
    }

    #[test]
    fn no_more_are_asked_than_there_are_tasks() {
        let crew = crew(8);
        let most = AtomicUsize::new(0);
        let count = |_, _| {
            most.fetch_max(offered(&crew).iter().filter(|&&is| is).count(), Ordering::Relaxed);
        };
        assert!(!Job::run(&crew, 5, &count));
        assert_eq!(most.into_inner(), 4, "the caller does one of them itself");
        assert_eq!(offered(&crew), [false; 8]);
    }
}
