//! Loss scaling: keeps small gradients from underflowing in f16.

/// Dynamic loss scale of a run in f16. A step whose gradients overflow is skipped and halves the factor; 2000 applied
/// steps in a row double the factor. The initial factor is 2^16.
///
/// Gradients are often below the smallest number of f16, 6e-8. The loss is multiplied by the factor before its
/// backward pass, and the optimizer divides the gradients by the factor. Powers of two change no digit. Micikevicius
/// et al., arXiv 1710.03740, section 3.2; the constants are those of `torch.amp.GradScaler`.
#[doc(alias = "amp")]
#[doc(alias = "loss scaling")]
#[doc(alias = "DynamicLossScaler")]
#[doc(alias = "GradScaler")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    factor: f64,
    good_steps: u32,
}

/// Applied steps in a row after which the factor is doubled.
const GROWTH_INTERVAL: u32 = 2000;

/// Smallest factor: gradients that overflow without any scaling do not overflow because of the factor.
const MIN_FACTOR: f64 = 1.0;

impl LossScale {
    /// Returns a loss scale with this factor (a power of two of at least 1) after `good_steps` applied steps in a
    /// row.
    #[must_use]
    pub const fn new(factor: f64, good_steps: u32) -> LossScale {
        LossScale { factor, good_steps }
    }

    /// Returns the factor on the loss.
    #[must_use]
    pub const fn factor(self) -> f64 {
        self.factor
    }

    /// Returns the number of applied steps in a row since the factor changed.
    #[must_use]
    pub const fn good_steps(self) -> u32 {
        self.good_steps
    }

    /// Whether a smaller factor may cure an overflow.
    #[must_use]
    pub fn can_decrease(self) -> bool {
        self.factor > MIN_FACTOR
    }

    /// Returns the loss scale after a step whose update was applied or skipped.
    #[must_use]
    pub fn after_step(self, applied: bool) -> LossScale {
        let good_steps = self.good_steps + 1;
        match applied {
            false => LossScale { factor: (self.factor / 2.0).max(MIN_FACTOR), good_steps: 0 },
            true if good_steps >= GROWTH_INTERVAL => LossScale { factor: self.factor * 2.0, good_steps: 0 },
            true => LossScale { good_steps, ..self },
        }
    }
}

impl Default for LossScale {
    /// A factor of 2^16.
    fn default() -> LossScale {
        LossScale::new(65_536.0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factor_halves_on_overflow_and_doubles_after_growth_interval() {
        let mut scale = LossScale::default();
        scale = scale.after_step(false);
        assert_eq!(scale, LossScale::new(32_768.0, 0));
        for _ in 0..GROWTH_INTERVAL - 1 {
            scale = scale.after_step(true);
        }
        assert_eq!(scale, LossScale::new(32_768.0, 1999));
        assert_eq!(scale.after_step(true), LossScale::default());
        assert_eq!(scale.after_step(false).after_step(true), LossScale::new(16_384.0, 1));
        for _ in 0..15 {
            assert!(scale.can_decrease());
            scale = scale.after_step(false);
        }
        assert_eq!((scale.factor(), scale.can_decrease()), (1.0, false));
        assert_eq!(scale.after_step(false).factor(), 1.0);
    }
}
