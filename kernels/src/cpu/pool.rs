//! A thread pool for the kernels of one rank.
//!
//! Work is cut into tasks. If a border between tasks cuts a sum, the border does not depend on the number of threads, so results do not
//! either. Workers spin for a while after a task (waking a parked thread costs some 20 us), then park. While they spin, handing work over
//! and learning that it is done takes a few transfers of cache lines.

use crate::cpu::cores;
use crate::cpu::imbalance::ImbalanceEstimate;
use crate::cpu::job::{Job, ThreadTask, Worker, serve};
use crate::cpu::pack_cache::PackCache;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::worker_slot::WorkerSlot;
use crate::error::KernelError;
use crate::precision::MatmulPrecision;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A pool of threads for the kernels of one rank; the caller's thread is one of them.
pub struct Pool {
    workers: Vec<Worker>,
    /// Scratch memory returned by tasks, by thread.
    scratch_caches: Box<[ScratchCache]>,
    precision: MatmulPrecision,
    imbalance: ImbalanceEstimate,
    pack_cache: Option<Arc<PackCache>>,
}

/// Scratch memory that one thread has used, which is in the caches of its core.
#[derive(Default)]
#[repr(align(128))]
struct ScratchCache(Mutex<Vec<Scratch>>);

/// Scratch memory lent to one task, returned on drop.
#[derive(Debug)]
pub struct ScratchGuard<'a> {
    scratch: Scratch,
    cache: &'a Mutex<Vec<Scratch>>,
}

impl Deref for ScratchGuard<'_> {
    type Target = Scratch;
    fn deref(&self) -> &Scratch {
        &self.scratch
    }
}

impl DerefMut for ScratchGuard<'_> {
    fn deref_mut(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl Drop for ScratchGuard<'_> {
    fn drop(&mut self) {
        let scratch = std::mem::take(&mut self.scratch);
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

impl Pool {
    /// Creates a pool of `num_threads` threads, the caller's included (0 counts as 1), which may spin and are not pinned.
    ///
    /// # Panics
    /// If [`Pool::with_affinity`] fails.
    #[must_use]
    pub fn new(num_threads: usize) -> Pool {
        Pool::with_affinity(num_threads, true, &[]).expect("the system starts a thread for the kernel pool")
    }

    /// Creates a pool whose threads spin for a while when they wait (`may_spin`), or yield at once. Pins the workers to `cores`, of which
    /// the first is for the caller's thread, which the caller pins; pins nothing if `cores` is empty.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system cannot start a thread.
    pub fn with_affinity(num_threads: usize, may_spin: bool, cores: &[usize]) -> Result<Pool, KernelError> {
        let num_threads = num_threads.max(1);
        let mut pool = Pool {
            workers: Vec::new(),
            scratch_caches: (0..num_threads).map(|_| ScratchCache::default()).collect(),
            precision: MatmulPrecision::default(),
            imbalance: ImbalanceEstimate::default(),
            pack_cache: None,
        };
        for thread in 1..num_threads {
            let slot = Arc::new(WorkerSlot::new(may_spin));
            let (own, core) = (slot.clone(), cores.get(thread).copied());
            let handle = std::thread::Builder::new()
                .name(format!("kernel-{thread}"))
                .spawn(move || {
                    core.into_iter().for_each(cores::pin_thread);
                    serve(&own, thread);
                })
                .map_err(|e| KernelError::Device {
                    call: "starting a thread of the kernel pool",
                    why: e.to_string(),
                    lost_gpu: None,
                })?;
            pool.workers.push(Worker { slot, handle });
        }
        Ok(pool)
    }

    /// Sets the precision of f32 matrix products. Default: highest.
    #[must_use]
    pub fn with_precision(mut self, precision: MatmulPrecision) -> Pool {
        self.precision = precision;
        self
    }

    /// Returns the precision of f32 matrix products.
    #[must_use]
    pub fn precision(&self) -> MatmulPrecision {
        self.precision
    }

    /// Sets the pack cache of matrix products.
    pub(crate) fn with_pack_cache(mut self, pack_cache: Arc<PackCache>) -> Pool {
        self.pack_cache = Some(pack_cache);
        self
    }

    /// Returns the pack cache, if any operand is cached now.
    pub(crate) fn pack_cache(&self) -> Option<&PackCache> {
        self.pack_cache.as_deref().filter(|pack_cache| pack_cache.is_in_use())
    }

    /// Returns the imbalance estimate of the threads.
    pub(crate) fn imbalance(&self) -> &ImbalanceEstimate {
        &self.imbalance
    }

    /// Returns scratch memory of a thread for as long as a task holds the guard (see [`Pool::run_on_threads`]): the memory that this
    /// thread returned last, if any.
    pub(crate) fn scratch_for(&self, thread: usize) -> ScratchGuard<'_> {
        let cache = &self.scratch_caches[thread].0;
        let mut free = cache.lock().unwrap_or_else(PoisonError::into_inner);
        ScratchGuard { scratch: free.pop().unwrap_or_default(), cache }
    }

    /// Returns N scratch memories; a repeated call gets the same ones in the same order. The last is what [`Pool::scratch_for`] returns.
    pub(crate) fn scratch_array_for<const N: usize>(&self, thread: usize) -> [ScratchGuard<'_>; N] {
        // They are returned from the first on, so that the last is on top.
        let mut guards = std::array::from_fn(|_| self.scratch_for(thread));
        guards.reverse();
        guards
    }

    /// Returns the number of threads, the caller's included.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every i below `count`, in any order and on any thread, and returns when all are done. If a border
    /// between tasks cuts a sum, it must not depend on [`Pool::num_threads`].
    ///
    /// # Panics
    /// If a task panics, after all tasks are done.
    pub fn run(&self, count: usize, task: &Task<'_>) {
        self.run_on_threads(count, &|_, i| task(i));
    }

    /// [`Pool::run`] for a task that gets the number of its thread before i. The caller's is 0 and runs the first task, so that with two
    /// threads each finds in its caches what it left there in an equal call before (if the second joins in time).
    ///
    /// # Panics
    /// If a task panics, after all are done. A [`KernelError`] payload is passed on.
    pub(crate) fn run_on_threads(&self, count: usize, task: &ThreadTask<'_>) {
        if count <= 1 || self.workers.is_empty() {
            (0..count).for_each(|i| task(0, i));
            return;
        }
        if let Some(payload) = Job::run(&self.workers, count, task) {
            match payload.downcast::<KernelError>() {
                Ok(error) => resume_unwind(error),
                Err(payload) => {
                    // Dropping the payload may panic again.
                    std::mem::forget(payload);
                    panic!("a kernel task panicked (see its message above)");
                }
            }
        }
    }

    /// Splits `out` into chunks of `chunk` elements (the last may be shorter) and calls `task(i, chunk i)` for each.
    ///
    /// # Panics
    /// If a task panics.
    pub fn chunks<T: Send>(&self, out: &mut [T], chunk: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        self.run_chunks(out, chunk, &|_, i, part| task(i, part));
    }

    /// [`Pool::chunks`] for a task that gets the number of its thread before i, and may take scratch memory of that thread.
    ///
    /// # Panics
    /// If a task panics.
    pub(crate) fn chunks_on_threads<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        task: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        self.run_chunks(out, chunk, &task);
    }

    // Compiled once for each T, not for each task.
    fn run_chunks<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        task: &(dyn Fn(usize, usize, &mut [T]) + Sync),
    ) {
        let (len, chunk) = (out.len(), chunk.max(1));
        if len <= chunk {
            // One chunk: the caller's thread runs it.
            return if len > 0 {
                task(0, 0, out)
            };
        }
        let start = SharedPointer(out.as_mut_ptr());
        self.run_on_threads(len.div_ceil(chunk), &|thread, i| {
            let from = i * chunk;
            // SAFETY: chunks of different i do not overlap, each i runs once, and `out` stays borrowed until
            // `run` returns.
            let part =
                unsafe { std::slice::from_raw_parts_mut(start.get().add(from), chunk.min(len - from)) };
            task(thread, i, part);
        });
    }

    /// [`Pool::chunks`] over two outputs cut into the same number of chunks.
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
        let (start_a, start_b) = (SharedPointer(a.as_mut_ptr()), SharedPointer(b.as_mut_ptr()));
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

/// A pointer from which tasks on several threads form disjoint slices.
struct SharedPointer<T>(*mut T);

impl<T> SharedPointer<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: used only to form disjoint slices of `T: Send`, one per task.
unsafe impl<T: Send> Sync for SharedPointer<T> {}

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
    fn workers_are_pinned_to_their_cores() {
        let all = cores::allowed();
        // With a single core, both are that core.
        let (first, last) = (all[0], all[all.len() - 1]);
        let pool = Pool::with_affinity(2, true, &[first, last]).unwrap();
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
    fn panic_payload_of_a_task_is_returned() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            let task = |i| {
                if i == 5 {
                    drop(crate::host_vec::filled_or_unwind(0u8, usize::MAX / 2));
                }
            };
            let error = crate::host_vec::catch_kernel_error(|| {
                pool.run(9, &task);
                Ok(())
            });
            let requested_bytes = usize::MAX / 2;
            assert_eq!(
                error,
                Err(KernelError::HostMemory { requested_bytes, what: crate::host_vec::SCRATCH })
            );
            pool.run(9, &|_| ());
        }
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
        // The caller wakes two workers, these wake the others.
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

    /// Runs as many tasks as there are threads, none of which ends before all have begun: each thread runs one.
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

    /// Returns whether a call panics.
    fn panics(call: impl FnOnce()) -> bool {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err()
    }

    fn fail() {
        std::panic::resume_unwind(Box::new("a task"))
    }

    #[test]
    fn panic_on_any_thread_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        for failing in 0..3 {
            let (all, done) = (Barrier::new(3), AtomicUsize::new(0));
            let caught = panics(|| {
                pool.run_on_threads(20, &|thread, i| {
                    // Each thread runs one of the first three tasks.
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
            assert_eq!(done.into_inner(), 19, "the other tasks run all the same");
            all_take_part(&pool);
        }
    }

    #[test]
    fn panic_in_a_nested_call_reaches_the_caller_and_the_pool_survives() {
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
            assert_eq!(done.into_inner(), 11, "the other tasks run all the same");
            all_take_part(&pool);
        }
    }

    #[test]
    fn panicking_task_returns_its_scratch() {
        let pool = Pool::new(2);
        let caught = panics(|| {
            let all = Barrier::new(2);
            pool.run_on_threads(2, &|thread, _| {
                let mut scratch = pool.scratch_for(thread);
                scratch.slices([100 * (thread + 1)])[0].fill(1f32);
                all.wait();
                fail()
            });
        });
        assert!(caught);
        let sizes = [0, 1].map(|thread| format!("{:?}", *pool.scratch_for(thread)));
        assert_eq!(sizes, ["Scratch(448 bytes)", "Scratch(832 bytes)"]);
    }

    #[test]
    fn scratch_is_reused_in_order_by_the_same_thread() {
        let pool = Pool::new(2);
        let sizes = |thread| pool.scratch_array_for::<3>(thread).map(|scratch| format!("{:?}", *scratch));
        for (scratch, lines) in pool.scratch_array_for::<3>(0).iter_mut().zip([3, 1, 2]) {
            let [_] = scratch.slices::<f32, 1>([16 * lines]);
        }
        for _ in 0..2 {
            assert_eq!(sizes(0), ["Scratch(192 bytes)", "Scratch(64 bytes)", "Scratch(128 bytes)"]);
            assert_eq!(format!("{:?}", *pool.scratch_for(0)), "Scratch(128 bytes)");
        }
        assert_eq!(sizes(1), ["Scratch(0 bytes)"; 3], "each thread has its own scratch");
    }

    #[test]
    fn chunks_get_the_number_of_their_thread() {
        let pool = Pool::new(3);
        let (all, mut out) = (Barrier::new(3), vec![(9, 9); 5]);
        pool.chunks_on_threads(&mut out, 2, |thread, i, part| {
            all.wait();
            part.fill((thread, i));
        });
        assert_eq!(out.iter().map(|&(_, i)| i).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
        let mut threads = [out[0].0, out[2].0, out[4].0];
        assert_eq!(threads[0], 0, "the caller runs the first chunk");
        threads.sort();
        assert_eq!(threads, [0, 1, 2]);
        let mut one = [9];
        pool.chunks_on_threads(&mut one, 2, |thread, i, part| part[0] = thread + i);
        assert_eq!(one, [0], "the caller runs a single chunk");
    }
}
