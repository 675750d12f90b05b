//! Learning rates over the steps of a run.

use std::f64::consts::PI;

/// A learning rate that rises linearly at first and then stays, or falls along half a cosine.
///
/// ```
/// use shardgrad_nn::optim::Schedule;
/// let schedule = Schedule::constant(1.0).warmup(4).cosine(8, 0.1);
/// assert_eq!([0, 3, 4, 8, 100].map(|step| schedule.lr(step)), [0.25, 1.0, 1.0, 0.1, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    peak: f64,
    num_warmup: usize,
    /// Where the fall ends, and at what rate.
    fall: Option<(usize, f64)>,
}

impl Schedule {
    /// The same rate in every step.
    #[must_use]
    pub fn constant(lr: f64) -> Schedule {
        Schedule { peak: lr, num_warmup: 0, fall: None }
    }

    /// Rises over the first `num_steps` steps: step s (from 0) has (s + 1) / num_steps of the rate.
    #[must_use]
    pub fn warmup(self, num_steps: usize) -> Schedule {
        Schedule { num_warmup: num_steps, ..self }
    }

    /// Falls along half a cosine, from the full rate at the end of the rise to `min_lr` at step `num_steps`, where it
    /// stays.
    #[must_use]
    pub fn cosine(self, num_steps: usize, min_lr: f64) -> Schedule {
        Schedule { fall: Some((num_steps, min_lr)), ..self }
    }

    /// The rate of a step, counted from 0.
    #[must_use]
    pub fn lr(&self, step: usize) -> f64 {
        if step < self.num_warmup {
            return self.peak * (step + 1) as f64 / self.num_warmup as f64;
        }
        match self.fall {
            None => self.peak,
            Some((end, min)) if step >= end => min,
            Some((end, min)) => {
                let done = (step - self.num_warmup) as f64 / (end - self.num_warmup) as f64;
                min + (self.peak - min) * 0.5 * (1.0 + (PI * done).cos())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_hand() {
        let schedule = Schedule::constant(2.0).warmup(2).cosine(6, 1.0);
        let rates: Vec<f64> = (0..8).map(|s| schedule.lr(s)).collect();
        let half = 0.5f64.sqrt() / 2.0;
        let wanted = [1.0, 2.0, 2.0, 1.5 + half, 1.5, 1.5 - half, 1.0, 1.0];
        assert!(rates.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-15), "{rates:?}");
        assert_eq!(Schedule::constant(0.3).lr(10_000), 0.3);
        assert_eq!(Schedule::constant(1.0).warmup(5).cosine(3, 0.5).lr(4), 1.0);
        assert_eq!(Schedule::constant(1.0).warmup(5).cosine(3, 0.5).lr(5), 0.5);
    }
}
