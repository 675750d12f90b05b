//! A condition variable that spins before it sleeps, and a clock for the time that a rank has waited.
//!
//! A waiting rank spins briefly if every thread has a core of its own, then sleeps, and wakes every ten milliseconds to check for
//! failures, deadlocks and timeouts.

use crate::error::Result;
use crate::sync::{AtomicUsize, Condvar, Mutex, seq_cst_fence, yield_now};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The longest sleep before a waiting thread wakes up and runs its checks.
const SLEEP: Duration = Duration::from_millis(10);

/// The longest part of one sleep that counts as waiting, however late a loaded machine wakes the thread.
const COUNTED_SLEEP_MAX: Duration = Duration::from_millis(100);

/// Checks of the condition without a yield: a few microseconds.
const NUM_TIGHT_SPINS: usize = 200;

/// A condition variable that spins before it sleeps.
#[derive(Debug, Default)]
pub(crate) struct SpinCondvar {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    condvar: Condvar,
}

impl SpinCondvar {
    /// Wakes all waiting threads. Call it after the change that makes the condition true; the change must be `SeqCst`, or made under
    /// a lock that `done` takes too.
    pub(crate) fn notify_all(&self) {
        seq_cst_fence();
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // A thread that held the lock checked the condition before the change and sleeps now, or checks after the change.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.condvar.notify_all();
        }
    }

    /// Waits until `done` holds: spins for `spin`, then sleeps. `tick` runs at every wake-up that finds `done` false; its error
    /// ends the wait.
    pub(crate) fn wait(
        &self,
        spin: Duration,
        done: impl Fn() -> bool,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if spin_until(spin, &done) {
            return Ok(());
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        seq_cst_fence();
        let outcome = self.sleep(&done, &mut tick);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn sleep(&self, done: &impl Fn() -> bool, tick: &mut impl FnMut() -> Result<()>) -> Result<()> {
        loop {
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            if done() {
                return Ok(());
            }
            drop(self.condvar.wait_timeout(guard, SLEEP).unwrap_or_else(PoisonError::into_inner));
            if done() {
                return Ok(());
            }
            tick()?;
        }
    }
}

/// Checks `done` repeatedly for the time `spin`: first without a pause, then yielding, because the awaited thread may need the
/// core. With `spin` of zero it checks a few times only. Returns whether `done` held.
fn spin_until(spin: Duration, done: &impl Fn() -> bool) -> bool {
    if !spin.is_zero() && (0..NUM_TIGHT_SPINS).any(|_| spin_once(done)) {
        return true;
    }
    let mut start = None;
    for i in 0.. {
        if done() {
            return true;
        }
        if i >= 2 && start.get_or_insert_with(Instant::now).elapsed() >= spin {
            break;
        }
        yield_now();
    }
    false
}

fn spin_once(done: &impl Fn() -> bool) -> bool {
    std::hint::spin_loop();
    done()
}

/// Measures how long a rank has waited, without the time in which the whole process was stopped.
#[derive(Debug, Default)]
pub(crate) struct WaitClock {
    waited: Duration,
    /// The previous wake-up.
    last: Option<Instant>,
    pub(crate) num_wakeups: usize,
}

impl WaitClock {
    /// Returns the time waited up to the wake-up at `now`. At most [`COUNTED_SLEEP_MAX`] of the time since the previous wake-up counts:
    /// during a longer sleep the whole process was stopped, and so were the ranks that this one waits for.
    pub(crate) fn advance(&mut self, now: Instant) -> Duration {
        let slept = now.saturating_duration_since(self.last.replace(now).unwrap_or(now));
        self.waited += slept.min(COUNTED_SLEEP_MAX);
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn notify_all_ends_a_wait_and_so_does_an_error_of_tick() {
        let (condvar, ready) = (SpinCondvar::default(), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(3));
                ready.store(true, Ordering::SeqCst);
                condvar.notify_all();
            });
            condvar.wait(Duration::ZERO, || ready.load(Ordering::SeqCst), || Ok(())).unwrap();
        });
        let stop = condvar.wait(Duration::ZERO, || false, || Err(Error::new(Kind::Timeout, "enough")));
        assert_eq!(stop.unwrap_err().kind(), Kind::Timeout);
    }

    #[test]
    fn wait_clock_ignores_the_time_in_which_the_process_was_stopped() {
        let (mut clock, start) = (WaitClock::default(), Instant::now());
        let mut waits = [0u64, 10, 20, 30].map(|at| clock.advance(start + Duration::from_millis(at)));
        assert_eq!(waits.map(|waited| waited.as_millis()), [0, 10, 20, 30]);
        // A stop of an hour, two normal sleeps, and a second long stop.
        waits = [3_600_000, 3_600_010, 3_600_060, 9_000_000]
            .map(|at| clock.advance(start + Duration::from_millis(at)));
        assert_eq!(waits.map(|waited| waited.as_millis()), [130, 140, 190, 290]);
        // Sleeps that a loaded machine prolongs still add up to the timeout.
        let waited =
            (1..=40).map(|slept| clock.advance(start + Duration::from_millis(9_000_000 + 500 * slept)));
        assert_eq!(waited.last().map(|waited| waited.as_millis()), Some(4290));
    }
}
