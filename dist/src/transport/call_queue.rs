//! The queue between a rank and its communication thread: calls in issue order, of which the thread runs one at a time.

use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::PoisonError;

/// Why the communication thread runs no more calls.
#[derive(Debug)]
pub(crate) enum CallFailure {
    /// The error of a call.
    Error(crate::error::Error),
    /// The payload of a panic in a call; `None` once the rank has unwound with the payload.
    Panic(Option<Box<dyn Any + Send>>),
}

/// Calls of a rank that its communication thread has not finished. Calls are numbered from 1.
#[derive(Debug)]
pub(crate) struct CallQueue<C> {
    state: Mutex<QueueState<C>>,
    /// Notified when a call is added or finished, and when the queue is closed.
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<C> {
    waiting: VecDeque<C>,
    num_added: u64,
    /// The calls up to this number are finished, or will not run.
    num_finished: u64,
    is_closed: bool,
    failure: Option<CallFailure>,
}

impl<C> CallQueue<C> {
    pub(crate) fn new() -> CallQueue<C> {
        let (waiting, num_added, num_finished) = (VecDeque::new(), 0, 0);
        let state = QueueState { waiting, num_added, num_finished, is_closed: false, failure: None };
        CallQueue { state: Mutex::new(state), changed: Condvar::new() }
    }

    // Calls run without the lock, so a poisoned lock holds a consistent state.
    fn state(&self) -> MutexGuard<'_, QueueState<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, QueueState<C>>) -> MutexGuard<'a, QueueState<C>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call and returns its number. After a failure the call does not run.
    pub(crate) fn add(&self, call: C) -> u64 {
        let mut state = self.state();
        state.num_added += 1;
        if state.failure.is_some() {
            state.num_finished = state.num_added;
        } else {
            state.waiting.push_back(call);
        }
        let number = state.num_added;
        drop(state);
        self.changed.notify_all();
        number
    }

    /// Waits, in the communication thread, for the next call. `None` once the queue is closed.
    pub(crate) fn next(&self) -> Option<C> {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(call) = state.waiting.pop_front() {
                return Some(call);
            }
            state = self.wait(state);
        }
    }

    /// Finishes the call that [`CallQueue::next`] returned last. After a failure no later call runs.
    pub(crate) fn finish_call(&self, outcome: std::result::Result<(), CallFailure>) {
        let mut state = self.state();
        state.num_finished += 1;
        if let Err(failure) = outcome {
            state.failure = Some(failure);
            state.num_finished = state.num_added;
            state.waiting.clear();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the calls up to a number are finished. Every call ends, so this wait does, too.
    ///
    /// # Errors
    /// The error of the first call that failed.
    ///
    /// # Panics
    /// Unwinds with the payload of a call that panicked.
    pub(crate) fn wait_until_finished(&self, number: u64) -> Result<()> {
        let mut state = self.state();
        while state.num_finished < number {
            state = self.wait(state);
        }
        match &mut state.failure {
            None => Ok(()),
            Some(CallFailure::Error(error)) => Err(error.clone()),
            Some(CallFailure::Panic(payload)) => {
                let payload = payload.take();
                drop(state);
                resume_unwind(payload.unwrap_or_else(|| Box::new("an earlier collective panicked")))
            }
        }
    }

    /// Makes [`CallQueue::next`] return `None` from now on.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};

    #[test]
    fn calls_after_a_failure_do_not_run() {
        let queue = CallQueue::new();
        assert_eq!([queue.add('a'), queue.add('b'), queue.add('c')], [1, 2, 3]);
        assert_eq!(queue.next(), Some('a'));
        queue.finish_call(Ok(()));
        queue.wait_until_finished(1).unwrap();
        assert_eq!(queue.next(), Some('b'));
        queue.finish_call(Err(CallFailure::Error(Error::new(Kind::Timeout, "late"))));
        assert_eq!(queue.wait_until_finished(3).unwrap_err().kind(), Kind::Timeout);
        assert_eq!(queue.add('d'), 4);
        assert_eq!(queue.wait_until_finished(4).unwrap_err().message(), "late");
        queue.close();
        assert_eq!(queue.next(), None, "{queue:?}");
    }

    #[test]
    fn panic_of_a_call_unwinds_the_rank() {
        let queue = CallQueue::new();
        queue.add(());
        queue.next();
        queue.finish_call(Err(CallFailure::Panic(Some(Box::new("the cause")))));
        for cause in ["the cause", "an earlier collective panicked"] {
            let wait = std::panic::AssertUnwindSafe(|| queue.wait_until_finished(1));
            let payload = std::panic::catch_unwind(wait).unwrap_err();
            assert_eq!(payload.downcast_ref(), Some(&cause));
        }
    }
}
