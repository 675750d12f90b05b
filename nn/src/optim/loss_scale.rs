//! Loss scaling: small gradients kept from vanishing in f16.

/// By what the gradients of a run in f16 are too large, and how that goes on: half of it after a step whose gradients are not
/// finite, which is not taken; twice as much after 2000 steps in a row that were. The first factor is 2^16.
///
/// Cotangents of a loss are often below the least number of f16, 6e-8. A loss that is multiplied by a factor lifts them; the
/// optimizer divides by it. Powers of two change no digit. Micikevicius and others, arXiv 1710.03740, section 3.2; the numbers are
/// those of `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    factor: f64,
    good_steps: u32,
}

/// Steps that must be taken in a row before the factor is doubled.
const GROWTH_INTERVAL: u32 = 2000;

/// Where a factor that is halved ends: a gradient that is not finite without any factor is not so for the factor.
const LEAST: f64 = 1.0;

impl LossScale {
    /// Begins, or goes on, with a factor (a power of two of at least 1 is meant) after so many steps in a row that were taken.
    #[must_use]
    pub const fn new(factor: f64, good_steps: u32) -> LossScale {
        LossScale { factor, good_steps }
    }

    /// What a loss is multiplied by before its backward pass.
    #[must_use]
    pub const fn factor(self) -> f64 {
        self.factor
    }

    /// How many steps in a row were taken since the factor changed.
    #[must_use]
    pub const fn good_steps(self) -> u32 {
        self.good_steps
    }

    /// Whether a smaller factor may help where gradients are not finite.
    #[must_use]
    pub fn can_fall(self) -> bool {
        self.factor > LEAST
    }

    /// What follows a step.
    #[must_use]
    pub fn after(self, taken: bool) -> LossScale {
        let good_steps = self.good_steps + 1;
        match taken {
            false => LossScale { factor: (self.factor / 2.0).max(LEAST), good_steps: 0 },
            true if good_steps >= GROWTH_INTERVAL => LossScale { factor: self.factor * 2.0, good_steps: 0 },
            true => LossScale { good_steps, ..self },
        }
    }
}

impl Default for LossScale {
    /// 2^16.
    fn default() -> LossScale {
        LossScale::new(65_536.0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_falls_at_once_and_rises_slowly() {
        let mut scale = LossScale::default();
        scale = scale.after(false);
        assert_eq!(scale, LossScale::new(32_768.0, 0));
        for _ in 0..GROWTH_INTERVAL - 1 {
            scale = scale.after(true);
        }
        assert_eq!(scale, LossScale::new(32_768.0, 1999));
        assert_eq!(scale.after(true), LossScale::default());
        assert_eq!(scale.after(false).after(true), LossScale::new(16_384.0, 1));
        for _ in 0..15 {
            assert!(scale.can_fall());
            scale = scale.after(false);
        }
        assert_eq!((scale.factor(), scale.can_fall()), (1.0, false));
        assert_eq!(scale.after(false).factor(), 1.0);
    }
}
