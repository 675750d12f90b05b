//! The caller and the workers of a thread pool under the model checker loom, in every interleaving of a few threads:
//! `RUSTFLAGS="--cfg loom" cargo test -p shardgrad-kernels --test pool_loom`. In these builds workers are woken one at a time, so that of
//! three threads the second wakes the third.
#![cfg(loom)]

#[path = "../src/cpu/job.rs"]
mod job;
#[path = "../src/cpu/worker_slot.rs"]
mod worker_slot;
#[path = "../src/cpu/sync.rs"]
mod sync;

use job::{Job, Worker, serve};
use loom::sync::atomic::AtomicUsize;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use worker_slot::WorkerSlot;

/// Checks every interleaving of a caller and `workers` workers, with at most `preemptions` preemptions. `caller` runs on the caller's
/// thread.
fn model(workers: usize, preemptions: usize, caller: impl Fn(&[Worker]) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let worker = |thread| {
            // Workers do not spin: the model of a spin loop would not terminate.
            let slot = Arc::new(WorkerSlot::new(false));
            let own = slot.clone();
            Worker { slot, handle: thread::spawn(move || serve(&own, thread)) }
        };
        let workers: Vec<_> = (1..=workers).map(worker).collect();
        caller(&workers);
        workers.iter().for_each(|worker| worker.slot.close(worker.handle.thread()));
        workers.into_iter().for_each(|worker| worker.handle.join().unwrap());
    });
}

/// Runs a job of `count` tasks; checks that each runs once, and that no worker uses the job afterwards.
fn run_and_check(workers: &[Worker], count: usize) {
    let times: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
    let panicked = Job::run(workers, count, &|_, i| {
        times[i].fetch_add(1, Ordering::Relaxed);
    });
    assert!(panicked.is_none());
    // Under loom, `into_inner` fails if another thread may still access the value.
    assert!(times.into_iter().all(|times| times.into_inner() == 1));
}

#[test]
fn two_threads_run_consecutive_jobs() {
    model(1, 3, |workers| (0..2).for_each(|_| run_and_check(workers, 2)));
}

#[test]
fn three_threads_run_a_job() {
    model(2, 2, |workers| run_and_check(workers, 3));
}

#[test]
fn three_threads_run_consecutive_jobs() {
    model(2, 1, |workers| [3, 2].into_iter().for_each(|count| run_and_check(workers, count)));
}

#[test]
fn four_threads_run_a_job() {
    model(3, 1, |workers| run_and_check(workers, 4));
}

/// Tasks that wait for each other need a thread each, so that every parked worker is woken, through the tree of wake-ups.
#[test]
fn all_requested_workers_join() {
    model(2, 1, |workers| {
        let (begun, more) = (Mutex::new(0), Condvar::new());
        let panicked = Job::run(workers, 3, &|_, _| {
            let mut begun = begun.lock().unwrap();
            *begun += 1;
            more.notify_all();
            while *begun < 3 {
                begun = more.wait(begun).unwrap();
            }
        });
        assert!(panicked.is_none());
    });
}

#[test]
fn nested_task_uses_the_workers() {
    model(2, 2, |workers| {
        let panicked = Job::run(workers, 2, &|_, _| run_and_check(workers, 2));
        assert!(panicked.is_none());
    });
}

#[test]
fn panic_is_reported_and_no_worker_is_lost() {
    model(2, 1, |workers| {
        let panics = |_, i| {
            if i == 1 {
                std::panic::resume_unwind(Box::new("task 1"))
            }
        };
        assert!(Job::run(workers, 3, &panics).is_some());
        run_and_check(workers, 2);
    });
}
