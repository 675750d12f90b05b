//! The watchdog of the communicators of one process: aborts them when the world has failed, and fails the world when one of them has.

use crate::error::{Error, Kind};
use crate::transport::tcp::{Endpoint, PendingCalls};
use shardgrad_kernels::{Backend, KernelError};
use shardgrad_nccl::Communicator;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The interval at which the watchdog looks whether the world has failed.
const WATCH_EVERY: Duration = Duration::from_millis(10);
/// The interval at which it asks the communicators for asynchronous errors.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long an error of the library waits for its cause: a lost process, which the connection to it reports with its rank, on a machine
/// too that stops some of its cores for seconds.
const CAUSE_TIME: Duration = Duration::from_secs(5);

/// How long the operation that each stream runs has been running.
#[derive(Debug, Default)]
struct StreamClocks(Vec<Option<(u64, Instant)>>);

impl StreamClocks {
    /// Compares the operations that run with those of the last time. Returns a stream, and its operation, that runs for longer than
    /// `limit`. While calls are not compared, no time counts: an operation may wait for the calls of other ranks, which have a timeout of
    /// their own.
    fn advance(
        &mut self,
        running: &[Option<u64>],
        are_compared: bool,
        limit: Duration,
    ) -> Option<(usize, u64)> {
        if !are_compared {
            self.0.clear();
            return None;
        }
        self.0.resize(running.len(), None);
        for (clock, op) in self.0.iter_mut().zip(running) {
            let since = clock.filter(|(before, _)| Some(*before) == *op).map(|(_, since)| since);
            *clock = op.map(|op| (op, since.unwrap_or_else(Instant::now)));
        }
        let late = |clock: &Option<(u64, Instant)>| {
            clock.filter(|(_, since)| since.elapsed() > limit).map(|(op, _)| op)
        };
        self.0.iter().enumerate().find_map(|(stream, clock)| Some((stream, late(clock)?)))
    }
}

/// What the rank and the watchdog share.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) endpoint: Endpoint,
    pub(super) rank_text: String,
    /// That of all ranks first, then those of groups, then those of messages.
    pub(super) communicators: Vec<Communicator>,
    is_over: AtomicBool,
    /// How long an operation may run on the GPU, and how long the library may take to end.
    pub(super) limit: Duration,
    /// Whether the communicators are aborted. An abort holds the lock.
    is_aborted: Mutex<bool>,
    /// Why the GPU is given up.
    given_up: OnceLock<String>,
    /// Outlives the communicators.
    backend: Arc<dyn Backend>,
}

/// Whether an error follows from the failure of the world, as most errors of the library do. Waits a moment for that failure.
pub(super) fn is_consequence(endpoint: &Endpoint, error: &Error) -> bool {
    let is_of_library = error.kind() == Kind::Device && error.message().starts_with("nccl");
    let start = Instant::now();
    while is_of_library && !endpoint.has_failed() && start.elapsed() < CAUSE_TIME {
        std::thread::sleep(WATCH_EVERY);
    }
    is_of_library && endpoint.has_failed()
}

impl Watched {
    /// See [`is_consequence`].
    pub(super) fn is_consequence(&self, error: &Error) -> bool {
        is_consequence(&self.endpoint, error)
    }

    pub(super) fn new(
        endpoint: &Endpoint,
        rank_text: String,
        communicators: Vec<Communicator>,
        backend: &Arc<dyn Backend>,
        limit: Duration,
    ) -> Watched {
        let (endpoint, backend) = (endpoint.clone(), backend.clone());
        let (is_over, is_aborted, given_up) = (AtomicBool::new(false), Mutex::default(), OnceLock::new());
        Watched { endpoint, rank_text, communicators, is_over, limit, is_aborted, given_up, backend }
    }

    /// Ends the watchdog.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// Aborts the communicators as soon as the world has failed, and fails the world if a communicator has, or if the GPU waits for longer
    /// than the limit in a call that is compared.
    pub(super) fn watch(&self, pending: &PendingCalls) {
        let limit = self.limit;
        let (mut asked, mut clocks) = (Instant::now(), StreamClocks::default());
        let mut found: Option<(Instant, KernelError)> = None;
        while !self.is_over.load(Ordering::SeqCst) {
            std::thread::park_timeout(WATCH_EVERY);
            if self.endpoint.has_failed() {
                return self.abort();
            }
            if found.is_none() && asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                let error = self.communicators.iter().find_map(|communicator| communicator.check().err());
                let stuck = self.backend.running_async();
                let stuck = stuck.map(|running| clocks.advance(&running, pending.are_compared(), limit));
                if let Ok(Some((stream, op))) = stuck {
                    let call = if stream == 0 { pending.describe_collective(op) } else { "a message".into() };
                    self.endpoint.fail_everywhere(self.endpoint.stuck(&call, limit));
                }
                found = error.or(stuck.err()).map(|error| (Instant::now(), error));
            }
            if let Some((_, error)) = found.take_if(|(since, _)| since.elapsed() >= CAUSE_TIME) {
                self.endpoint.fail_everywhere(Error::from(error).detail("rank", self.rank_text.clone()));
            }
        }
    }

    /// Aborts all communicators. What their operations write is not read any more: the world has failed before. If the library refuses
    /// that, or does not answer within the limit, operations may stay on the GPU for ever: gives it up, so that no wait of the rank hangs.
    pub(super) fn abort(&self) {
        let mut is_aborted = self.is_aborted.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *is_aborted, true) {
            return;
        }
        let mut first = None;
        for communicator in self.communicators.iter().rev() {
            // After an error nobody waits for the others.
            let limit = if first.is_some() { Duration::ZERO } else { self.limit };
            first = first.or(communicator.abort(limit).err());
        }
        if let Some(error) = first {
            let _ = self.given_up.set(error.to_string());
            if let KernelError::Device { call, why, .. } = error {
                self.backend.give_up(call, why);
            }
        }
    }

    /// Why the GPU is given up, if it is.
    pub(super) fn given_up(&self) -> Option<&str> {
        self.given_up.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_is_late_if_the_same_one_runs_for_long() {
        let (mut clocks, now, later) = (StreamClocks::default(), Duration::ZERO, Duration::from_secs(60));
        let mut late = |running: &[Option<u64>], limit: Duration| {
            std::thread::sleep(Duration::from_millis(2));
            clocks.advance(running, true, limit)
        };
        assert_eq!(late(&[Some(1)], later), None);
        assert_eq!(late(&[Some(1)], later), None);
        assert_eq!(late(&[Some(1)], now), Some((0, 1)));
        // Another operation, and another stream.
        let some = Duration::from_secs(1);
        assert_eq!(late(&[Some(2), None], some), None);
        assert_eq!(late(&[None, Some(7)], some), None);
        assert_eq!(late(&[None, Some(7)], Duration::from_millis(1)), Some((1, 7)));
        // The time counts from the comparison on.
        assert_eq!(clocks.advance(&[None, Some(7)], false, now), None);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(clocks.advance(&[None, Some(7)], true, Duration::from_millis(1)), None);
    }
}
