//! Control flags that ranks agree on in each step, so that all stop after the same step.

use crate::interrupt::StopReason;
use shardgrad::prelude::*;
use std::panic::Location;

/// Name of the flag that a rank has an error.
const FAILED: &str = "failed";
/// Name of the duration of the step before.
const STEP_SECONDS: &str = "step seconds";

/// The flags of a rank in a step, or their combination over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RunFlags {
    /// Why the run must stop.
    pub(crate) stop: Option<StopReason>,
    /// Whether a rank has an error that leaves valid weights.
    pub(crate) failed: bool,
    /// The duration of the step before: the mean over ranks.
    pub(crate) step_seconds: f64,
}

impl RunFlags {
    /// Returns the flags for a step: one for each reason to stop and two more.
    pub(crate) fn to_control(self) -> ControlFlags {
        let none = ControlFlags::new();
        let stop = StopReason::ALL
            .into_iter()
            .fold(none, |flags, reason| flags.flag(reason.name(), self.stop == Some(reason)));
        stop.flag(FAILED, self.failed).number(STEP_SECONDS, self.step_seconds)
    }

    /// Returns the combination of the flags of `num_ranks` ranks, given their sums.
    pub(crate) fn from_sums(sums: &ControlFlags, num_ranks: usize) -> RunFlags {
        RunFlags {
            stop: StopReason::ALL.into_iter().find(|reason| sums.is_set(reason.name())),
            failed: sums.is_set(FAILED),
            step_seconds: sums.get(STEP_SECONDS) / num_ranks as f64,
        }
    }

    /// Returns the combination of the flags of all ranks, outside of a step. Collective.
    ///
    /// # Errors
    /// Errors of the collective.
    #[track_caller]
    pub(crate) fn agreed(self, rank: &Rank) -> Result<RunFlags> {
        let sums = self.to_control().sum_over_ranks(rank, Location::caller())?;
        Ok(RunFlags::from_sums(&sums, rank.world().mesh().num_ranks()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the combination of the flags of some ranks.
    fn combined(ranks: &[RunFlags]) -> RunFlags {
        let mesh = Mesh::parse(&format!("dp={}", ranks.len())).unwrap();
        let agreed = World::run(mesh, |rank| ranks[rank.index()].agreed(rank)).unwrap();
        assert!(agreed.iter().all(|own| *own == agreed[0]), "{agreed:?}");
        agreed[0]
    }

    #[test]
    fn flags_of_ranks_are_combined() {
        let none = RunFlags::default();
        assert_eq!(combined(&[none; 3]), none);
        for reason in StopReason::ALL {
            let stopped = RunFlags { stop: Some(reason), ..none };
            assert_eq!(combined(&[none, stopped, none]), stopped);
            assert_eq!(combined(&[stopped, stopped]), stopped);
        }
        let (first, last) = (StopReason::Interrupt, StopReason::LauncherEnded);
        let [first, last] = [first, last].map(|reason| RunFlags { stop: Some(reason), ..none });
        assert_eq!(combined(&[last, first]), first);
        let slow = RunFlags { failed: true, step_seconds: 3.0, ..none };
        assert_eq!(combined(&[none, slow]), RunFlags { step_seconds: 1.5, ..slow });
    }
}
