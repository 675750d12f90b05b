//! A small pool of threads for the kernels of one rank.
//!
//! Work is cut into tasks. Where a border of tasks cuts a sum, it does not depend on the number of threads, so results
//! do not either. Workers spin for a while after a task (waking a parked thread costs some 20 us), then park.

use crate::cpu::pace::Pace;
use crate::cpu::simd::scratch::Scratch;
use crate::precision::MatmulPrecision;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(60);

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One call of [`Pool::run`]: the task, how many indices were handed out, how many are done.
struct Job {
    task: *const Task<'static>,
    count: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    panicked: AtomicBool,
}

// SAFETY: `task` points to a `Sync` closure that outlives the job's last access: `Pool::run` returns only after
// `done == count`, and no worker touches `task` after counting its last index.
unsafe impl Send for Job {}
// SAFETY: as for Send; everything else in a job is atomic.
unsafe impl Sync for Job {}

impl Job {
    fn work(&self) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            // SAFETY: index i < count is not done yet, so `Pool::run` still waits and the closure is alive.
            let task = unsafe { &*self.task };
            if let Err(cause) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task(i))) {
                // To drop it may panic again, outside of what is caught.
                std::mem::forget(cause);
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }
}

#[derive(Default)]
struct Inbox {
    job: Option<Arc<Job>>,
    /// Workers that wait to be woken. To wake nobody costs a call of the system all the same.
    num_parked: usize,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    /// Counts jobs, so that spinning workers see a new one without the lock. It is changed under the lock: whoever finds it
    /// unchanged there is counted as parked before the next job comes.
    epoch: AtomicUsize,
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what workers find, and lets all of them look.
    fn tell(&self, change: impl FnOnce(&mut Inbox)) {
        let mut inbox = self.locked();
        change(&mut inbox);
        self.epoch.fetch_add(1, Ordering::Release);
        let num_parked = inbox.num_parked;
        drop(inbox);
        if num_parked > 0 {
            self.wake.notify_all();
        }
    }
}

/// Threads for the kernels of one rank; the caller's thread is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// What tasks have given back.
    scratches: Mutex<Vec<Scratch>>,
    precision: MatmulPrecision,
    pace: Pace,
}

/// Scratch memory on loan to one task.
#[derive(Debug)]
pub struct Loan<'a> {
    scratch: Scratch,
    home: &'a Mutex<Vec<Scratch>>,
}

impl Deref for Loan<'_> {
    type Target = Scratch;
    fn deref(&self) -> &Scratch {
        &self.scratch
    }
}

impl DerefMut for Loan<'_> {
    fn deref_mut(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let scratch = std::mem::take(&mut self.scratch);
        self.home.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

impl Pool {
    /// A pool of `num_threads` threads, the caller's among them (0 counts as 1).
    #[must_use]
    pub fn new(num_threads: usize) -> Pool {
        let shared = Arc::new(Shared::default());
        let workers = (1..num_threads.max(1))
            .map(|i| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("kernel-{i}"))
                    .spawn(move || serve(&shared))
                    .expect("the system starts a thread for the kernel pool")
            })
            .collect();
        let precision = MatmulPrecision::default();
        Pool { shared, workers, scratches: Mutex::default(), precision, pace: Pace::default() }
    }

    /// The same for kernels that form products of f32 in another way. Default: the most exact.
    #[must_use]
    pub fn with_precision(mut self, precision: MatmulPrecision) -> Pool {
        self.precision = precision;
        self
    }

    /// How the kernels form products of f32.
    #[must_use]
    pub fn precision(&self) -> MatmulPrecision {
        self.precision
    }

    /// Whether the threads keep pace.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Scratch memory for as long as the caller holds it; at most one lasts for each that is held at once.
    #[must_use]
    pub fn scratch(&self) -> Loan<'_> {
        let mut free = self.scratches.lock().unwrap_or_else(PoisonError::into_inner);
        Loan { scratch: free.pop().unwrap_or_default(), home: &self.scratches }
    }

    /// How many threads take part, the caller's among them.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every i below `count`, in any order and on any thread, and returns when all are
    /// done. Borders of tasks that cut a sum must not depend on [`Pool::num_threads`].
    ///
    /// # Panics
    /// If a task panics, after all are done.
    pub fn run(&self, count: usize, task: &Task<'_>) {
        if count <= 1 || self.workers.is_empty() {
            (0..count).for_each(&task);
            return;
        }
        // SAFETY: only the lifetime is erased; see `Job`.
        let task: *const Task<'static> =
            unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        let job = Arc::new(Job {
            task,
            count,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        self.shared.tell(|inbox| inbox.job = Some(job.clone()));
        job.work();
        let mut spins = 0u32;
        while job.done.load(Ordering::Acquire) < count {
            spins += 1;
            if spins < 20_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        self.shared.locked().job = None;
        assert!(
            !job.panicked.load(Ordering::Relaxed),
            "a kernel task panicked (its own message stands above)"
        );
    }

    /// Cuts `out` into chunks of `chunk` elements (the last may be shorter) and calls `task(i, chunk i)` for each.
    ///
    /// # Panics
    /// If a task panics.
    pub fn chunks<T: Send>(&self, out: &mut [T], chunk: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        self.cut(out, chunk, &task);
    }

    // Compiled once for each T, not for each task.
    fn cut<T: Send>(&self, out: &mut [T], chunk: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (len, chunk) = (out.len(), chunk.max(1));
        if len <= chunk {
            // Nothing to cut, and nothing to hand out.
            return if len > 0 {
                task(0, out)
            };
        }
        let start = Shares(out.as_mut_ptr());
        self.run(len.div_ceil(chunk), &|i| {
            let from = i * chunk;
            // SAFETY: chunks of different i do not overlap, each i runs once, and `out` stays borrowed until
            // `run` returns.
            let part =
                unsafe { std::slice::from_raw_parts_mut(start.get().add(from), chunk.min(len - from)) };
            task(i, part);
        });
    }

    /// As [`Pool::chunks`] over two outputs cut into the same number of chunks.
    ///
    /// # Panics
    /// If the numbers of chunks differ, or a task panics.
    pub fn chunks2<T: Send, U: Send>(
        &self,
        (a, chunk_a): (&mut [T], usize),
        (b, chunk_b): (&mut [U], usize),
        task: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        let (chunk_a, chunk_b) = (chunk_a.max(1), chunk_b.max(1));
        let (len_a, len_b) = (a.len(), b.len());
        assert_eq!(
            len_a.div_ceil(chunk_a),
            len_b.div_ceil(chunk_b),
            "both outputs have the same number of chunks"
        );
        let (start_a, start_b) = (Shares(a.as_mut_ptr()), Shares(b.as_mut_ptr()));
        self.run(len_a.div_ceil(chunk_a), &|i| {
            let (at, bt) = (i * chunk_a, i * chunk_b);
            // SAFETY: as in `chunks`, for `a`.
            let part_a =
                unsafe { std::slice::from_raw_parts_mut(start_a.get().add(at), chunk_a.min(len_a - at)) };
            // SAFETY: as in `chunks`, for `b`.
            let part_b =
                unsafe { std::slice::from_raw_parts_mut(start_b.get().add(bt), chunk_b.min(len_b - bt)) };
            task(i, part_a, part_b);
        });
    }
}

/// A pointer that tasks on several threads cut disjoint slices from.
struct Shares<T>(*mut T);

impl<T> Shares<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: used only to form disjoint slices of `T: Send`, one per task.
unsafe impl<T: Send> Sync for Shares<T> {}

fn serve(shared: &Shared) {
    let mut seen = 0;
    loop {
        let idle = Instant::now();
        while shared.epoch.load(Ordering::Acquire) == seen && idle.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        let mut inbox = shared.locked();
        while shared.epoch.load(Ordering::Acquire) == seen && !inbox.stop {
            inbox.num_parked += 1;
            inbox = shared.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
            inbox.num_parked -= 1;
        }
        if inbox.stop {
            return;
        }
        seen = shared.epoch.load(Ordering::Acquire);
        let job = inbox.job.clone();
        drop(inbox);
        if let Some(job) = job {
            job.work();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.tell(|inbox| inbox.stop = true);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads)", self.num_threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_visited_once() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for len in [0, 1, 7, 64, 1000] {
                let mut out = vec![0usize; len];
                for _ in 0..20 {
                    pool.chunks(&mut out, 9, |i, part| part.iter_mut().for_each(|x| *x += i + 1));
                }
                assert!(out.iter().enumerate().all(|(at, &x)| x == 20 * (at / 9 + 1)));
            }
        }
    }

    #[test]
    fn workers_that_have_parked_take_part_again() {
        let pool = Pool::new(3);
        for round in 0..4 {
            let wait = Instant::now();
            while pool.shared.locked().num_parked < 2 {
                assert!(wait.elapsed() < Duration::from_secs(20), "round {round}: idle workers park");
                std::thread::yield_now();
            }
            // None of three tasks ends before all have begun, on a thread each.
            let begun = AtomicUsize::new(0);
            pool.run(3, &|_| {
                begun.fetch_add(1, Ordering::Relaxed);
                while begun.load(Ordering::Relaxed) < 3 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panicking_task_is_reported_and_the_pool_survives() {
        let pool = Pool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, &|i| {
                if i == 5 {
                    std::panic::resume_unwind(Box::new("task 5"))
                }
            });
        }));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(100, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
}
