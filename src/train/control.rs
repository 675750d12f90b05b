//! Control flags that ranks agree on in each step, so that all stop after the same step.

use crate::interrupt::StopReason;

/// The flags of a rank in a step, or their combination over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ControlFlags {
    /// Why the run must stop.
    pub(crate) stop: Option<StopReason>,
    /// Whether a rank has an error that leaves valid weights.
    pub(crate) failed: bool,
    /// The duration of the step before: the mean over ranks.
    pub(crate) step_seconds: f64,
}

impl ControlFlags {
    /// Length of the encoding: one number per reason and two more.
    const LEN: usize = StopReason::ALL.len() + 2;

    /// Encodes the flags as numbers to be summed over ranks.
    pub(crate) fn to_numbers(self) -> [f64; ControlFlags::LEN] {
        let mut numbers = [0.0; ControlFlags::LEN];
        for (number, reason) in numbers.iter_mut().zip(StopReason::ALL) {
            *number = f64::from(u8::from(self.stop == Some(reason)));
        }
        numbers[ControlFlags::LEN - 2] = f64::from(u8::from(self.failed));
        numbers[ControlFlags::LEN - 1] = self.step_seconds;
        numbers
    }

    /// Decodes sums over `num_ranks` ranks.
    pub(crate) fn from_sums(sums: &[f64], num_ranks: usize) -> ControlFlags {
        let reasons = sums.iter().zip(StopReason::ALL);
        ControlFlags {
            stop: reasons.into_iter().find(|(sum, _)| **sum > 0.0).map(|(_, reason)| reason),
            failed: sums[ControlFlags::LEN - 2] > 0.0,
            step_seconds: sums[ControlFlags::LEN - 1] / num_ranks as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_flags_round_trip_through_sums() {
        let summed = |ranks: &[ControlFlags]| {
            let sum = |i: usize| ranks.iter().map(|flags| flags.to_numbers()[i]).sum();
            let sums: Vec<f64> = (0..ControlFlags::LEN).map(sum).collect();
            ControlFlags::from_sums(&sums, ranks.len())
        };
        let none = ControlFlags::default();
        assert_eq!(summed(&[none; 3]), none);
        for reason in StopReason::ALL {
            let stopped = ControlFlags { stop: Some(reason), ..none };
            assert_eq!(summed(&[none, stopped, none]), stopped);
            assert_eq!(summed(&[stopped, stopped]), stopped);
        }
        let (first, last) = (StopReason::Interrupt, StopReason::LauncherEnded);
        let [first, last] = [first, last].map(|reason| ControlFlags { stop: Some(reason), ..none });
        assert_eq!(summed(&[last, first]), first);
        let slow = ControlFlags { failed: true, step_seconds: 3.0, ..none };
        assert_eq!(summed(&[none, slow]), ControlFlags { step_seconds: 1.5, ..slow });
    }
}
