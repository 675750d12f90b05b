//! Learning rates over the steps of a run.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

/// A learning rate that rises linearly at first and then stays, or falls along half a cosine or a line, or is any function of
/// the step.
///
/// ```
/// use shardgrad_nn::optim::Schedule;
/// let schedule = Schedule::constant(1.0).warmup(4).cosine(8, 0.1);
/// assert_eq!([0, 3, 4, 8, 100].map(|step| schedule.lr(step)), [0.25, 1.0, 1.0, 0.1, 0.1]);
/// let halved = Schedule::from_fn(|step| 0.5f64.powi(step as i32 / 10));
/// assert_eq!([0, 9, 10, 25].map(|step| halved.lr(step)), [1.0, 1.0, 0.5, 0.25]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    peak: f64,
    num_warmup: usize,
    then: Then,
}

/// What follows the rise.
#[derive(Clone, Debug, PartialEq)]
enum Then {
    Stays,
    /// Along half a cosine, to a rate at a step.
    Cosine(usize, f64),
    /// Along a line, to a rate at a step.
    Linear(usize, f64),
    Rates(Rates),
}

/// Rates by step.
#[derive(Clone)]
struct Rates(Arc<dyn Fn(usize) -> f64 + Send + Sync>);

/// At these steps, and those ten and a hundred times as far and so on, functions are compared.
const PROBES: [usize; 4] = [0, 1, 2, 5];

impl Rates {
    /// By what functions are told apart: two that agree here may yet differ elsewhere.
    fn probed(&self) -> Vec<f64> {
        let steps = (0..7).flat_map(|digits| PROBES.map(|step| step * 10usize.pow(digits)));
        steps.map(|step| (self.0)(step)).collect()
    }
}

impl PartialEq for Rates {
    fn eq(&self, other: &Rates) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.probed() == other.probed()
    }
}

impl fmt::Debug for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.probed())
    }
}

impl Schedule {
    /// The same rate in every step.
    #[must_use]
    pub fn constant(lr: f64) -> Schedule {
        Schedule { peak: lr, num_warmup: 0, then: Then::Stays }
    }

    /// The rate that a function gives to each step, counted from 0; the same function on every rank. A rise takes parts of it, a
    /// fall takes its place.
    #[must_use]
    pub fn from_fn(lr: impl Fn(usize) -> f64 + Send + Sync + 'static) -> Schedule {
        Schedule { peak: lr(0), num_warmup: 0, then: Then::Rates(Rates(Arc::new(lr))) }
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
        Schedule { then: Then::Cosine(num_steps, min_lr), ..self }
    }

    /// Falls along a line, from the full rate at the end of the rise to `min_lr` at step `num_steps`, where it stays.
    #[must_use]
    pub fn linear(self, num_steps: usize, min_lr: f64) -> Schedule {
        Schedule { then: Then::Linear(num_steps, min_lr), ..self }
    }

    /// The rate of a step, counted from 0.
    #[must_use]
    pub fn lr(&self, step: usize) -> f64 {
        let rate = if let Then::Rates(rates) = &self.then { (rates.0)(step) } else { self.peak };
        if step < self.num_warmup {
            return rate * (step + 1) as f64 / self.num_warmup as f64;
        }
        let done = |end: usize| (step - self.num_warmup) as f64 / (end - self.num_warmup) as f64;
        match self.then {
            Then::Stays | Then::Rates(_) => rate,
            Then::Cosine(end, min) | Then::Linear(end, min) if step >= end => min,
            Then::Cosine(end, min) => min + (rate - min) * 0.5 * (1.0 + (PI * done(end)).cos()),
            Then::Linear(end, min) => min + (rate - min) * (1.0 - done(end)),
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
        let line = Schedule::constant(2.0).warmup(2).linear(6, 1.0);
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(|s| line.lr(s)), [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]);
        let own = Schedule::from_fn(|step| 1.0 / (1 + step) as f64).warmup(2);
        assert_eq!([0, 1, 2, 3].map(|s| own.lr(s)), [0.5, 0.5, 1.0 / 3.0, 0.25]);
        // Ranks are compared by what their settings print.
        let of = |factor: f64| Schedule::from_fn(move |step| factor * step as f64);
        assert!(
            of(2.0) == of(2.0) && of(2.0) != of(3.0) && format!("{:?}", of(2.0)) != format!("{:?}", of(3.0))
        );
        assert_eq!(Schedule::constant(1.0).warmup(5).cosine(3, 0.5).lr(4), 1.0);
        assert_eq!(Schedule::constant(1.0).warmup(5).cosine(3, 0.5).lr(5), 0.5);
    }
}
