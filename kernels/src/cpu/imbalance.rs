//! Load imbalance of a pool's threads: whether equal tasks take equal time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Thousandths of thread time that may be idle before finer tasks are worth their cost: they read operands again, some 5% of a
/// product's time.
const IDLE_MAX: u32 = 80;
/// The largest value of a single measurement, in thousandths: one delay of a thread is weak evidence.
const SAMPLE_MAX: u32 = 400;
/// Tasks per thread if threads have different speeds: a slow thread leaves most of its share to the others.
const TASKS_FINE: usize = 4;
/// The interval of sampled products: one of this many is split evenly anyway, to measure whether the threads are balanced again. A prime,
/// so that it is not the same product of every step.
const SAMPLE_EVERY: u32 = 31;

/// A running mean of the time that threads idle at the end of evenly split products. Decides how later products are split, which does not
/// affect results.
#[derive(Debug, Default)]
pub(crate) struct ImbalanceEstimate {
    /// In thousandths of thread time.
    idle: AtomicU32,
    products: AtomicU32,
}

impl ImbalanceEstimate {
    /// Returns the number of tasks per thread: one while the threads are balanced.
    pub(crate) fn tasks_per_thread(&self) -> usize {
        if self.idle.load(Ordering::Relaxed) <= IDLE_MAX { 1 } else { TASKS_FINE }
    }

    /// Returns the number of tasks per thread for a product that can be timed: every [`SAMPLE_EVERY`] calls one, to sample.
    pub(crate) fn tasks_per_thread_sampled(&self) -> usize {
        let is_sample = self.products.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE_EVERY);
        if is_sample { 1 } else { self.tasks_per_thread() }
    }

    /// Records a measurement: `threads` threads were busy for `busy` in total, during `elapsed`.
    fn record(&self, threads: usize, busy: Duration, elapsed: Duration) {
        if elapsed.is_zero() {
            return;
        }
        let idle = 1000.0 * (1.0 - busy.as_secs_f64() / (elapsed.as_secs_f64() * threads as f64));
        let idle = (idle.max(0.0) as u32).min(SAMPLE_MAX);
        let mean = self.idle.load(Ordering::Relaxed);
        self.idle.store((7 * mean + idle).div_ceil(8), Ordering::Relaxed);
    }
}

/// Times a product that is split into one task per thread.
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

    /// Runs and times a task.
    pub(crate) fn time<R>(&self, task: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = task();
        self.busy.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Records the measurement, after all tasks.
    pub(crate) fn finish(self) {
        self.imbalance.record(
            self.threads,
            Duration::from_nanos(self.busy.into_inner()),
            self.start.elapsed(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn fine(imbalance: &ImbalanceEstimate) -> usize {
        (0..SAMPLE_EVERY).filter(|_| imbalance.tasks_per_thread_sampled() == TASKS_FINE).count()
    }

    #[test]
    fn balanced_threads_get_one_task_each() {
        let imbalance = ImbalanceEstimate::default();
        for _ in 0..100 {
            imbalance.record(2, 39 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), 0);
    }

    #[test]
    fn imbalanced_threads_get_finer_tasks_until_they_are_balanced_again() {
        let imbalance = ImbalanceEstimate::default();
        imbalance.record(2, 20 * MILLI, 20 * MILLI);
        assert_eq!(fine(&imbalance), 0, "one measurement is no imbalance");
        for _ in 0..4 {
            imbalance.record(2, 30 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), SAMPLE_EVERY as usize - 1, "all but the sample");
        for _ in 0..40 {
            imbalance.record(2, 40 * MILLI, 20 * MILLI);
        }
        assert_eq!(fine(&imbalance), 0);
    }

    #[test]
    fn task_timer_records_idle_time() {
        let imbalance = ImbalanceEstimate::default();
        for _ in 0..8 {
            let timer = TaskTimer::new(&imbalance, 2);
            timer.time(|| std::thread::sleep(MILLI));
            timer.finish();
        }
        let idle = imbalance.idle.load(Ordering::Relaxed);
        assert!((200..=SAMPLE_MAX).contains(&idle), "one of two threads worked: {idle}");
    }

    #[test]
    fn zero_elapsed_time_records_nothing() {
        let imbalance = ImbalanceEstimate::default();
        imbalance.record(2, Duration::ZERO, Duration::ZERO);
        imbalance.record(1, 2 * MILLI, MILLI);
        assert_eq!(imbalance.idle.load(Ordering::Relaxed), 0);
    }
}
