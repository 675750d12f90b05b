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
/// Of so many works one is cut evenly all the same, to see whether the threads keep imbalance again. It is prime, so that it is
/// not always the same one of a step.
const TRIAL: u32 = 31;

/// A running mean of the time that threads waited for each other at the end of work that was cut evenly. It decides how
/// later work is cut, which means nothing for results.
#[derive(Debug, Default)]
pub(crate) struct ImbalanceEstimate {
    /// In thousandths of the threads' time.
    lost: AtomicU32,
    works: AtomicU32,
}

impl ImbalanceEstimate {
    /// How many tasks each thread should get: one while threads keep imbalance.
    pub(crate) fn tasks_per_thread(&self) -> usize {
        if self.lost.load(Ordering::Relaxed) <= LOST_MAX { 1 } else { TASKS_FINE }
    }

    /// The same for work that would be watched, which now and then is a trial.
    pub(crate) fn tasks_per_thread_sampled(&self) -> usize {
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
pub(crate) struct TaskTimer<'a> {
    imbalance: &'a ImbalanceEstimate,
    threads: usize,
    start: Instant,
    /// Nanoseconds.
    busy: std::sync::atomic::AtomicU64,
}

impl<'a> TaskTimer<'a> {
    pub(crate) fn new(imbalance: &'a ImbalanceEstimate, threads: usize) -> TaskTimer<'a> {
        TaskTimer { imbalance, threads, start: Instant::now(), busy: Default::default() }
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
        self.imbalance.saw(self.threads, Duration::from_nanos(self.busy.into_inner()), self.start.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn fine(imbalance: &ImbalanceEstimate) -> usize {
        (0..TRIAL).filter(|_| imbalance.tasks_per_thread_sampled() == TASKS_FINE).count()
    }

    #[test]
    fn threads_that_keep_pace_get_one_task_each() {
        let imbalance = ImbalanceEstimate::default();
        for _ in 0..100 {
            imbalance.saw(2, 39 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), 0);
    }

    #[test]
    fn a_slow_thread_leaves_work_to_others_until_it_is_fast_again() {
        let imbalance = ImbalanceEstimate::default();
        imbalance.saw(2, 20 * MILLI, 20 * MILLI);
        assert_eq!(fine(&imbalance), 0, "once is no imbalance");
        for _ in 0..4 {
            imbalance.saw(2, 30 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), TRIAL as usize - 1, "all but the trial");
        for _ in 0..40 {
            imbalance.saw(2, 40 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), 0);
    }

    #[test]
    fn what_is_watched_is_taken_up() {
        let imbalance = ImbalanceEstimate::default();
        for _ in 0..8 {
            let watch = TaskTimer::new(&imbalance, 2);
            watch.time(|| std::thread::sleep(MILLI));
            watch.end();
        }
        let lost = imbalance.lost.load(Ordering::Relaxed);
        assert!((200..=SAMPLE_MAX).contains(&lost), "one of two threads worked: {lost}");
    }

    #[test]
    fn no_time_at_all_is_no_loss() {
        let imbalance = ImbalanceEstimate::default();
        imbalance.saw(2, Duration::ZERO, Duration::ZERO);
        imbalance.saw(1, 2 * MILLI, MILLI);
        assert_eq!(imbalance.lost.load(Ordering::Relaxed), 0);
    }
}
