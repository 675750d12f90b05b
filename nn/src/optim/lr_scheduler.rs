//! Learning-rate schedules: linear warmup, then constant, cosine or linear decay, or any function of the step.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

/// Learning-rate schedule, a pure function of the step: a linear warmup, then a constant rate, a cosine decay or a
/// linear decay; or any function of the step.
///
/// ```
/// use shardgrad_nn::optim::LrScheduler;
/// let schedule = LrScheduler::constant(1.0).warmup(4).cosine(8, 0.1);
/// assert_eq!([0, 3, 4, 8, 100].map(|step| schedule.lr(step)), [0.25, 1.0, 1.0, 0.1, 0.1]);
/// let halved = LrScheduler::from_fn(|step| 0.5f64.powi(step as i32 / 10));
/// assert_eq!([0, 9, 10, 25].map(|step| halved.lr(step)), [1.0, 1.0, 0.5, 0.25]);
/// ```
#[doc(alias = "SequentialLR")]
#[doc(alias = "lr_scheduler")]
#[doc(alias = "LRScheduler")]
#[derive(Clone, Debug, PartialEq)]
pub struct LrScheduler {
    peak: f64,
    num_warmup: usize,
    decay: Decay,
}

/// Learning rate after the warmup.
#[derive(Clone, Debug, PartialEq)]
enum Decay {
    Constant,
    /// Half a cosine down to a rate at a step.
    Cosine(usize, f64),
    /// A line down to a rate at a step.
    Linear(usize, f64),
    FromFn(StepFn),
}

/// Learning rate as a function of the step.
#[derive(Clone)]
struct StepFn(Arc<dyn Fn(usize) -> f64 + Send + Sync>);

/// Steps at which two functions are compared, and these times powers of ten.
const SAMPLED_STEPS: [usize; 4] = [0, 1, 2, 5];

impl StepFn {
    /// Samples the function, to compare functions across ranks: two functions that agree here may still differ
    /// elsewhere.
    fn sampled(&self) -> Vec<f64> {
        let steps = (0..7).flat_map(|digits| SAMPLED_STEPS.map(|step| step * 10usize.pow(digits)));
        steps.map(|step| (self.0)(step)).collect()
    }
}

impl PartialEq for StepFn {
    fn eq(&self, other: &StepFn) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.sampled() == other.sampled()
    }
}

impl fmt::Debug for StepFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.sampled())
    }
}

impl LrScheduler {
    /// Returns a constant learning rate.
    #[doc(alias = "constant_schedule")]
    #[doc(alias = "ConstantLR")]
    #[must_use]
    pub fn constant(lr: f64) -> LrScheduler {
        LrScheduler { peak: lr, num_warmup: 0, decay: Decay::Constant }
    }

    /// Returns the schedule that calls `lr` with the step, counted from 0; pass the same function on every rank. A
    /// warmup scales the rates of the function, a decay replaces them.
    #[doc(alias = "LambdaLR")]
    #[must_use]
    pub fn from_fn(lr: impl Fn(usize) -> f64 + Send + Sync + 'static) -> LrScheduler {
        LrScheduler { peak: lr(0), num_warmup: 0, decay: Decay::FromFn(StepFn(Arc::new(lr))) }
    }

    /// Adds a linear warmup over the first `num_steps` steps: step s (from 0) has (s + 1) / num_steps of the rate.
    #[doc(alias = "linear_schedule")]
    #[doc(alias = "warmup_steps")]
    #[doc(alias = "LinearLR")]
    #[must_use]
    pub fn warmup(self, num_steps: usize) -> LrScheduler {
        LrScheduler { num_warmup: num_steps, ..self }
    }

    /// Adds a cosine decay from the full rate at the end of the warmup to `min_lr` at step `num_steps`; the rate
    /// stays there.
    #[doc(alias = "warmup_cosine_decay_schedule")]
    #[doc(alias = "get_cosine_schedule_with_warmup")]
    #[doc(alias = "CosineAnnealingLR")]
    #[must_use]
    pub fn cosine(self, num_steps: usize, min_lr: f64) -> LrScheduler {
        LrScheduler { decay: Decay::Cosine(num_steps, min_lr), ..self }
    }

    /// Adds a linear decay from the full rate at the end of the warmup to `min_lr` at step `num_steps`; the rate
    /// stays there.
    #[doc(alias = "get_linear_schedule_with_warmup")]
    #[doc(alias = "PolynomialLR")]
    #[must_use]
    pub fn linear(self, num_steps: usize, min_lr: f64) -> LrScheduler {
        LrScheduler { decay: Decay::Linear(num_steps, min_lr), ..self }
    }

    /// Returns the learning rate of a step, counted from 0.
    #[must_use]
    pub fn lr(&self, step: usize) -> f64 {
        let rate = if let Decay::FromFn(rates) = &self.decay { (rates.0)(step) } else { self.peak };
        if step < self.num_warmup {
            return rate * (step + 1) as f64 / self.num_warmup as f64;
        }
        let done = |end: usize| (step - self.num_warmup) as f64 / (end - self.num_warmup) as f64;
        match self.decay {
            Decay::Constant | Decay::FromFn(_) => rate,
            Decay::Cosine(end, min) | Decay::Linear(end, min) if step >= end => min,
            Decay::Cosine(end, min) => min + (rate - min) * 0.5 * (1.0 + (PI * done(end)).cos()),
            Decay::Linear(end, min) => min + (rate - min) * (1.0 - done(end)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn learning_rates_match_hand_computed_values() {
        let schedule = LrScheduler::constant(2.0).warmup(2).cosine(6, 1.0);
        let rates: Vec<f64> = (0..8).map(|s| schedule.lr(s)).collect();
        let half = 0.5f64.sqrt() / 2.0;
        let wanted = [1.0, 2.0, 2.0, 1.5 + half, 1.5, 1.5 - half, 1.0, 1.0];
        assert_abs_diff_eq!(rates[..], wanted[..], epsilon = 1e-15);
        assert_eq!(LrScheduler::constant(0.3).lr(10_000), 0.3);
        let line = LrScheduler::constant(2.0).warmup(2).linear(6, 1.0);
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(|s| line.lr(s)), [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]);
        let own = LrScheduler::from_fn(|step| 1.0 / (1 + step) as f64).warmup(2);
        assert_eq!([0, 1, 2, 3].map(|s| own.lr(s)), [0.5, 0.5, 1.0 / 3.0, 0.25]);
        // Ranks compare their schedules by the Debug text.
        let of = |factor: f64| LrScheduler::from_fn(move |step| factor * step as f64);
        assert!(
            of(2.0) == of(2.0) && of(2.0) != of(3.0) && format!("{:?}", of(2.0)) != format!("{:?}", of(3.0))
        );
        assert_eq!(LrScheduler::constant(1.0).warmup(5).cosine(3, 0.5).lr(4), 1.0);
        assert_eq!(LrScheduler::constant(1.0).warmup(5).cosine(3, 0.5).lr(5), 0.5);
    }
}
