//! A small pool of threads for the kernels of one rank.
//!
//! Work is cut into tasks. Where a border of tasks free_list a sum, it does not depend on the number of threads, so results
//! do not either. Workers spin for a while after a task (waking a parked thread costs some 20 us), then park. While they
//! spin, handing work over and learning that it is done takes a few exchanges of cache lines.

use crate::cpu::cores;
use crate::cpu::imbalance::ImbalanceEstimate;
use crate::cpu::job::{Job, TaskOfThread, Worker, serve};
use crate::cpu::pack_cache::PackCache;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::worker_slot::WorkerSlot;
use crate::precision::MatmulPrecision;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads for the kernels of one rank; the caller's thread is one of them.
pub struct Pool {
    workers: Vec<Worker>,
    /// What tasks have given back, by thread.
    shelves: Box<[Shelf]>,
    precision: MatmulPrecision,
    imbalance: ImbalanceEstimate,
    pack_cache: Option<Arc<PackCache>>,
}

/// Scratch memory that one thread has used: it lies in the caches of its core.
#[derive(Default)]
#[repr(align(128))]
struct Shelf(Mutex<Vec<Scratch>>);

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
    /// A pool of `num_threads` threads, the caller's among them (0 counts as 1), which has a core for each.
    #[must_use]
    pub fn new(num_threads: usize) -> Pool {
        Pool::placed(num_threads, true, &[])
    }

    /// The same, whose threads spin for a while where they wait, or leave their cores to others at once. They stay on these cores,
    /// of which the first is for the caller, who has to see to that; on any if there are none.
    #[must_use]
    pub fn placed(num_threads: usize, may_spin: bool, cores: &[usize]) -> Pool {
        let workers = (1..num_threads.max(1)).map(|thread| {
            let slot = Arc::new(WorkerSlot::new(may_spin));
            let (own, core) = (slot.clone(), cores.get(thread).copied());
            let handle = std::thread::Builder::new()
                .name(format!("kernel-{thread}"))
                .spawn(move || {
                    core.into_iter().for_each(cores::stay_on);
                    serve(&own, thread);
                })
                .expect("the system starts a thread for the kernel pool");
            Worker { slot, handle }
        });
        let workers: Vec<_> = workers.collect();
        let shelves = (0..=workers.len()).map(|_| Shelf::default()).collect();
        let precision = MatmulPrecision::default();
        Pool { workers, shelves, precision, imbalance: ImbalanceEstimate::default(), pack_cache: None }
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

    /// The same, whose products keep forms of operands that recur.
    pub(crate) fn with_pack_cache(mut self, pack_cache: Arc<PackCache>) -> Pool {
        self.pack_cache = Some(pack_cache);
        self
    }

    /// The operands that recur, if any does now.
    pub(crate) fn pack_cache(&self) -> Option<&PackCache> {
        self.pack_cache.as_deref().filter(|pack_cache| pack_cache.is_in_use())
    }

    /// Whether the threads keep imbalance.
    pub(crate) fn imbalance(&self) -> &ImbalanceEstimate {
        &self.imbalance
    }

    /// Scratch memory of a thread for as long as a task of it holds it (see [`Pool::run_on_threads`]): what that thread gave
    /// back last, if it has any.
    pub(crate) fn scratch_of(&self, thread: usize) -> Loan<'_> {
        let home = &self.shelves[thread].0;
        let mut free = home.lock().unwrap_or_else(PoisonError::into_inner);
        Loan { scratch: free.pop().unwrap_or_default(), home }
    }

    /// A few at once: each is what had its place in a call like this one. The last is the one that [`Pool::scratch_of`] gives.
    pub(crate) fn scratches_of<const N: usize>(&self, thread: usize) -> [Loan<'_>; N] {
        // They are given back from the first on, so that the last lies on top.
        let mut loans = std::array::from_fn(|_| self.scratch_of(thread));
        loans.reverse();
        loans
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
        self.run_on_threads(count, &|_, i| task(i));
    }

    /// As [`Pool::run`] for a task that is told the number of its thread before i. The caller's is 0 and does the first task, so
    /// that a second thread, if it comes in time, finds in its caches what it left there in a call like this one.
    ///
    /// # Panics
    /// If a task panics, after all are done.
    pub(crate) fn run_on_threads(&self, count: usize, task: &TaskOfThread<'_>) {
        if count <= 1 || self.workers.is_empty() {
            (0..count).for_each(|i| task(0, i));
            return;
        }
        let has_panicked = Job::run(&self.workers, count, task);
        assert!(!has_panicked, "a kernel task panicked (its own message stands above)");
    }

    /// FreeList `out` into chunks of `chunk` elements (the last may be shorter) and calls `task(i, chunk i)` for each.
    ///
    /// # Panics
    /// If a task panics.
    pub fn chunks<T: Send>(&self, out: &mut [T], chunk: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        self.cut(out, chunk, &|_, i, part| task(i, part));
    }

    /// As [`Pool::chunks`] for a task that is told the number of its thread before i, and may take scratch memory of it.
    ///
    /// # Panics
    /// If a task panics.
    pub(crate) fn chunks_on_threads<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        task: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        self.cut(out, chunk, &task);
    }

    // Compiled once for each T, not for each task.
    fn cut<T: Send>(&self, out: &mut [T], chunk: usize, task: &(dyn Fn(usize, usize, &mut [T]) + Sync)) {
        let (len, chunk) = (out.len(), chunk.max(1));
        if len <= chunk {
            // Nothing to cut, and nothing to hand out.
            return if len > 0 {
                task(0, 0, out)
            };
        }
        let start = Shares(out.as_mut_ptr());
        self.run_on_threads(len.div_ceil(chunk), &|thread, i| {
            let from = i * chunk;
            // SAFETY: chunks of different i do not overlap, each i runs once, and `out` stays borrowed until
            // `run` returns.
            let part =
                unsafe { std::slice::from_raw_parts_mut(start.get().add(from), chunk.min(len - from)) };
            task(thread, i, part);
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

impl Drop for Pool {
    fn drop(&mut self) {
        self.workers.iter().for_each(|worker| worker.slot.close(worker.handle.thread()));
        for worker in self.workers.drain(..) {
            let _ = worker.handle.join();
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
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    #[cfg(target_os = "linux")]
    #[test]
    fn workers_stay_on_their_cores() {
        let all = cores::allowed();
        // Where there is one core only, it is that one twice.
        let (first, last) = (all[0], all[all.len() - 1]);
        let pool = Pool::placed(2, true, &[first, last]);
        let both = std::sync::Barrier::new(2);
        let seen = Mutex::new(vec![]);
        pool.run_on_threads(2, &|thread, _| {
            both.wait();
            seen.lock().unwrap().push((thread, cores::allowed()));
        });
        let mut seen = seen.into_inner().unwrap();
        seen.sort();
        assert_eq!(seen, [(0, all), (1, vec![last])]);
    }

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
        // The caller wakes two, these wake the others.
        let pool = Pool::new(9);
        for round in 0..4 {
            let wait = Instant::now();
            while !pool.workers.iter().all(|worker| worker.slot.is_parked()) {
                assert!(wait.elapsed() < Duration::from_secs(20), "round {round}: idle workers park");
                std::thread::yield_now();
            }
            all_take_part(&pool);
        }
    }

    /// None of as many tasks as there are threads ends before all have begun, on a thread each.
    fn all_take_part(pool: &Pool) {
        let (all, threads) = (Barrier::new(pool.num_threads()), Mutex::new(vec![]));
        pool.run_on_threads(pool.num_threads(), &|thread, _| {
            threads.lock().unwrap().push(thread);
            all.wait();
        });
        let mut threads = threads.into_inner().unwrap();
        threads.sort();
        assert!(threads.into_iter().eq(0..pool.num_threads()));
    }

    /// Whether a call to a pool panics.
    fn panics(call: impl FnOnce()) -> bool {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err()
    }

    fn fail() {
        std::panic::resume_unwind(Box::new("a task"))
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        for failing in 0..3 {
            let (all, done) = (Barrier::new(3), AtomicUsize::new(0));
            let caught = panics(|| {
                pool.run_on_threads(20, &|thread, i| {
                    // Each thread has one of the first three tasks.
                    if i < 3 {
                        all.wait();
                        if thread == failing {
                            fail()
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(caught, "on thread {failing}");
            assert_eq!(done.into_inner(), 19, "the others are done all the same");
            all_take_part(&pool);
        }
    }

    #[test]
    fn a_panic_in_a_call_within_a_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        for failing in 0..3 {
            let (all, done) = (Barrier::new(3), AtomicUsize::new(0));
            let inner = |thread: usize| {
                pool.run(4, &|i| {
                    if thread == failing && i == 3 {
                        fail()
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                });
            };
            let caught = panics(|| {
                pool.run_on_threads(3, &|thread, _| {
                    all.wait();
                    inner(thread);
                });
            });
            assert!(caught, "on thread {failing}");
            assert_eq!(done.into_inner(), 11, "the others are done all the same");
            all_take_part(&pool);
        }
    }

    #[test]
    fn a_task_that_panics_gives_its_scratch_back() {
        let pool = Pool::new(2);
        let caught = panics(|| {
            let all = Barrier::new(2);
            pool.run_on_threads(2, &|thread, _| {
                let mut scratch = pool.scratch_of(thread);
                scratch.slices([100 * (thread + 1)])[0].fill(1f32);
                all.wait();
                fail()
            });
        });
        assert!(caught);
        let sizes = [0, 1].map(|thread| format!("{:?}", *pool.scratch_of(thread)));
        assert_eq!(sizes, ["Scratch(448 bytes)", "Scratch(832 bytes)"]);
    }

    #[test]
    fn scratch_keeps_its_place_and_its_thread() {
        let pool = Pool::new(2);
        let sizes = |thread| pool.scratches_of::<3>(thread).map(|scratch| format!("{:?}", *scratch));
        for (scratch, lines) in pool.scratches_of::<3>(0).iter_mut().zip([3, 1, 2]) {
            let [_] = scratch.slices::<f32, 1>([16 * lines]);
        }
        for _ in 0..2 {
            assert_eq!(sizes(0), ["Scratch(192 bytes)", "Scratch(64 bytes)", "Scratch(128 bytes)"]);
            assert_eq!(format!("{:?}", *pool.scratch_of(0)), "Scratch(128 bytes)");
        }
        assert_eq!(sizes(1), ["Scratch(0 bytes)"; 3], "another thread has its own");
    }

    #[test]
    fn chunks_come_with_the_thread_that_does_them() {
        let pool = Pool::new(3);
        let (all, mut out) = (Barrier::new(3), vec![(9, 9); 5]);
        pool.chunks_on_threads(&mut out, 2, |thread, i, part| {
            all.wait();
            part.fill((thread, i));
        });
        assert_eq!(out.iter().map(|&(_, i)| i).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
        let mut threads = [out[0].0, out[2].0, out[4].0];
        assert_eq!(threads[0], 0, "the caller does the first");
        threads.sort();
        assert_eq!(threads, [0, 1, 2]);
        let mut one = [9];
        pool.chunks_on_threads(&mut one, 2, |thread, i, part| part[0] = thread + i);
        assert_eq!(one, [0], "what is not cut is the caller's");
    }
}
