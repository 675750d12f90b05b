//! Whether the threads of a pool get equal work done in equal time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Thousandths of the threads' time that may be lost to waiting before smaller tasks are worth what they cost: they read
/// operands again, some 5% of a product's time.
const LOST_MAX: u32 = 80;
/// No single work counts for more thousandths: a thread that once was held up says little.
const SAMPLE_MAX: u32 = 400;
/// Tasks a thread, where threads keep different paces: a slow one leaves most of its share to others.
const TASKS_FINE: usize = 4;
/// Of so many works one is cut evenly all the same, to see whether the threads keep pace again. It is prime, so that it is
/// not always the same one of a step.
const TRIAL: u32 = 31;

/// A running mean of the time that threads waited for each other at the end of work that was cut evenly. It decides how
/// later work is cut, which means nothing for results.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// In thousandths of the threads' time.
    lost: AtomicU32,
    works: AtomicU32,
}

impl Pace {
    /// How many tasks each thread should get: one while threads keep pace.
    pub(crate) fn tasks_per_thread(&self) -> usize {
        if self.lost.load(Ordering::Relaxed) <= LOST_MAX { 1 } else { TASKS_FINE }
    }

    /// The same for work that would be watched, which now and then is a trial.
    pub(crate) fn tasks_at_trial(&self) -> usize {
        let is_trial = self.works.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRIAL);
        if is_trial { 1 } else { self.tasks_per_thread() }
    }

    /// Takes up what was seen: so many threads were at work for `busy`, all together, while `passed` went by.
    fn saw(&self, threads: usize, busy: Duration, passed: Duration) {
        if passed.is_zero() {
            return;
        }
        let lost = 1000.0 * (1.0 - busy.as_secs_f64() / (passed.as_secs_f64() * threads as f64));
        let lost = (lost.max(0.0) as u32).min(SAMPLE_MAX);
        let mean = self.lost.load(Ordering::Relaxed);
        self.lost.store((7 * mean + lost).div_ceil(8), Ordering::Relaxed);
    }
}

/// A work that is cut into one task for each thread, while it is watched.
pub(crate) struct Watch<'a> {
    pace: &'a Pace,
    threads: usize,
    start: Instant,
    /// Nanoseconds.
    busy: std::sync::atomic::AtomicU64,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(pace: &'a Pace, threads: usize) -> Watch<'a> {
        Watch { pace, threads, start: Instant::now(), busy: Default::default() }
    }

    /// Does a task.
    pub(crate) fn time<R>(&self, task: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = task();
        self.busy.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// All tasks are done.
    pub(crate) fn end(self) {
        self.pace.saw(self.threads, Duration::from_nanos(self.busy.into_inner()), self.start.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn fine(pace: &Pace) -> usize {
        (0..TRIAL).filter(|_| pace.tasks_at_trial() == TASKS_FINE).count()
    }

    #[test]
    fn threads_that_keep_pace_get_one_task_each() {
        let pace = Pace::default();
        for _ in 0..100 {
            pace.saw(2, 39 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&pace), 0);
    }

    #[test]
    fn a_slow_thread_leaves_work_to_others_until_it_is_fast_again() {
        let pace = Pace::default();
        pace.saw(2, 20 * MILLI, 20 * MILLI);
        assert_eq!(fine(&pace), 0, "once is no pace");
        for _ in 0..4 {
            pace.saw(2, 30 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&pace), TRIAL as usize - 1, "all but the trial");
        for _ in 0..40 {
            pace.saw(2, 40 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&pace), 0);
    }

    #[test]
    fn what_is_watched_is_taken_up() {
        let pace = Pace::default();
        for _ in 0..8 {
            let watch = Watch::new(&pace, 2);
            watch.time(|| std::thread::sleep(MILLI));
            watch.end();
        }
        let lost = pace.lost.load(Ordering::Relaxed);
        assert!((200..=SAMPLE_MAX).contains(&lost), "one of two threads worked: {lost}");
    }

    #[test]
    fn no_time_at_all_is_no_loss() {
        let pace = Pace::default();
        pace.saw(2, Duration::ZERO, Duration::ZERO);
        pace.saw(1, 2 * MILLI, MILLI);
        assert_eq!(pace.lost.load(Ordering::Relaxed), 0);
    }
}
