//! How a rank waits: it spins for a moment while every thread has its core, then sleeps on a bell and looks
//! up every ten milliseconds.

use crate::error::Result;
use crate::sync::{AtomicUsize, Condvar, Mutex, in_one_order, yield_now};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a sleeper sleeps before it looks around.
const NAP: Duration = Duration::from_millis(10);

/// No more of a nap of ten milliseconds counts as waiting, however late a loaded machine wakes a rank.
const NAP_MAX: Duration = Duration::from_millis(100);

/// How many looks without a pause: a few microseconds.
const PROMPT: usize = 200;

/// A place to wait for a condition that other threads make true.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Parking {
    /// Wakes whoever sleeps. To be called after the change, which has to be sequentially consistent or made
    /// under a lock that `done` takes too.
    pub(crate) fn ring(&self) {
        in_one_order();
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // Whoever held the lock has looked before the change and sleeps now, or will look after it.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.bell.notify_all();
        }
    }

    /// Returns when `done` holds, or with the error of `tick`, which runs at every wake-up that finds nothing
    /// done.
    pub(crate) fn wait(
        &self,
        spin: Duration,
        done: impl Fn() -> bool,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if spun(spin, &done) {
            return Ok(());
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        in_one_order();
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
            drop(self.bell.wait_timeout(guard, NAP).unwrap_or_else(PoisonError::into_inner));
            if done() {
                return Ok(());
            }
            tick()?;
        }
    }
}

/// Looks again and again for a while, at first without a pause, then letting other threads go first: the core
/// may be wanted by the one that is waited for. Without leave to spin it looks a few times only.
fn spun(spin: Duration, done: &impl Fn() -> bool) -> bool {
    if !spin.is_zero() && (0..PROMPT).any(|_| looked(done)) {
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

fn looked(done: &impl Fn() -> bool) -> bool {
    std::hint::spin_loop();
    done()
}

/// How long a rank has slept in one wait, as far as it has lived.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    waited: Duration,
    /// When it woke up last.
    last: Option<Instant>,
    pub(crate) num_naps: usize,
}

impl Watch {
    /// What has been waited at a wake-up. Of the time since the one before it no more counts than [`NAP_MAX`]: in a longer one
    /// the whole process stood still, and those who are waited for with it.
    pub(crate) fn wake(&mut self, now: Instant) -> Duration {
        let nap = now.saturating_duration_since(self.last.replace(now).unwrap_or(now));
        self.waited += nap.min(NAP_MAX);
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_sleeper_hears_the_bell_and_an_error_wakes_it() {
        let (parking, ready) = (Parking::default(), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(3));
                ready.store(true, Ordering::SeqCst);
                parking.ring();
            });
            parking.wait(Duration::ZERO, || ready.load(Ordering::SeqCst), || Ok(())).unwrap();
        });
        let stop = parking.wait(Duration::ZERO, || false, || Err(Error::new(Kind::Timeout, "enough")));
        assert_eq!(stop.unwrap_err().kind(), Kind::Timeout);
    }

    #[test]
    fn a_process_that_stood_still_has_not_waited() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut wakes = [0u64, 10, 20, 30].map(|at| watch.wake(start + Duration::from_millis(at)));
        assert_eq!(wakes.map(|waited| waited.as_millis()), [0, 10, 20, 30]);
        // An hour, then a moment, then a second nap that was long.
        wakes = [3_600_000, 3_600_010, 3_600_060, 9_000_000]
            .map(|at| watch.wake(start + Duration::from_millis(at)));
        assert_eq!(wakes.map(|waited| waited.as_millis()), [130, 140, 190, 290]);
        // Naps that a loaded machine makes longer still come to an end.
        let waited = (1..=40).map(|nap| watch.wake(start + Duration::from_millis(9_000_000 + 500 * nap)));
        assert_eq!(waited.last().map(|waited| waited.as_millis()), Some(4290));
    }
}
