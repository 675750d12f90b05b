//! A caller and the workers of a pool under the model checker loom, in every order in which a few threads can meet:
//! `RUSTFLAGS="--cfg loom" cargo test -p shardgrad-kernels --test meetings`. In these builds a worker is asked at a time, so
//! that of three threads the second asks the third.
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

/// Every order of a caller and so many workers, with at most so many preemptions; the caller's part comes in.
fn model(workers: usize, preemptions: usize, caller: impl Fn(&[Worker]) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let worker = |thread| {
            // Nobody spins: a model of who waits in a loop has no end.
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

/// A job of so many tasks: each is done once, and what they wrote is the caller's alone afterwards.
fn done_once(workers: &[Worker], count: usize) {
    let times: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
    let panicked = Job::run(workers, count, &|_, i| {
        times[i].fetch_add(1, Ordering::Relaxed);
    });
    assert!(panicked.is_none());
    // `into_inner` fails where anyone could still look.
    assert!(times.into_iter().all(|times| times.into_inner() == 1));
}

#[test]
fn two_threads_do_one_job_after_the_other() {
    model(1, 3, |workers| (0..2).for_each(|_| done_once(workers, 2)));
}

#[test]
fn three_threads_do_a_job() {
    model(2, 2, |workers| done_once(workers, 3));
}

#[test]
fn three_threads_do_one_job_after_the_other() {
    model(2, 1, |workers| [3, 2].into_iter().for_each(|count| done_once(workers, count)));
}

#[test]
fn four_threads_do_a_job() {
    model(3, 1, |workers| done_once(workers, 4));
}

/// Tasks that wait for each other need a thread each: whoever parked is woken, by way of a chain.
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
        let panicked = Job::run(workers, 2, &|_, _| done_once(workers, 2));
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
        done_once(workers, 2);
    });
}
