//! Control flags: named numbers that ranks sum in a step, so that all of them act after the same step.

use super::control::world_sum;
use shardgrad_dist::{Error, Kind, Rank, Result};
use std::panic::Location;

/// Flags and numbers with names. A rank sets its own; a step sums each over all ranks in the all-reduce of the gradient
/// norm, and every rank reads the same sums from the report.
///
/// ```
/// use shardgrad_tensor::ControlFlags;
/// let control = ControlFlags::new().flag("stop", true).number("seconds", 0.5);
/// assert!(control.is_set("stop"));
/// assert_eq!(control.get("seconds"), 0.5);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControlFlags {
    names: Vec<&'static str>,
    numbers: Vec<f64>,
}

impl ControlFlags {
    /// Returns no flags.
    #[must_use]
    pub const fn new() -> ControlFlags {
        ControlFlags { names: Vec::new(), numbers: Vec::new() }
    }

    /// Adds a flag, which counts as 1 if set; its sum is the number of ranks that set it.
    #[must_use]
    pub fn flag(self, name: &'static str, is_set: bool) -> ControlFlags {
        self.number(name, f64::from(u8::from(is_set)))
    }

    /// Adds a number. A sum that is not finite skips the update of the step.
    #[must_use]
    pub fn number(mut self, name: &'static str, number: f64) -> ControlFlags {
        self.names.push(name);
        self.numbers.push(number);
        self
    }

    /// Whether a flag is set; of sums: on any rank.
    ///
    /// # Panics
    /// As [`ControlFlags::get`].
    #[track_caller]
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        self.get(name) != 0.0
    }

    /// Returns the number of a name, or the sum.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no number has the name.
    #[track_caller]
    #[must_use]
    pub fn get(&self, name: &str) -> f64 {
        let found = self.iter().find(|(known, _)| *known == name);
        found.map_or_else(|| self.unknown(name).at(Location::caller()).raise(), |(_, number)| number)
    }

    /// Yields names and numbers, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.names.iter().copied().zip(self.numbers.iter().copied())
    }

    /// Returns the first `num` flags and numbers, and the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_at(&self, num: usize) -> (ControlFlags, ControlFlags) {
        let part = |names: &[&'static str], numbers: &[f64]| ControlFlags {
            names: names.to_vec(),
            numbers: numbers.to_vec(),
        };
        let (names, numbers) = (self.names.split_at(num), self.numbers.split_at(num));
        (part(names.0, numbers.0), part(names.1, numbers.1))
    }

    /// Returns the sums over all ranks, outside of a step: one all-reduce, none on a mesh of one rank. A collective call.
    ///
    /// # Errors
    /// Errors of the collective.
    pub fn sum_over_ranks(&self, rank: &Rank, site: &'static Location<'static>) -> Result<ControlFlags> {
        Ok(self.with_numbers(world_sum(rank, &self.numbers, site)?))
    }

    /// The numbers, in order.
    pub(crate) fn numbers(&self) -> &[f64] {
        &self.numbers
    }

    /// Returns the same names with other numbers.
    pub(crate) fn with_numbers(&self, numbers: Vec<f64>) -> ControlFlags {
        ControlFlags { names: self.names.clone(), numbers }
    }

    fn unknown(&self, name: &str) -> Error {
        let text = format!("no control flag or number has the name `{name}`");
        Error::new(Kind::Config, text).detail("known", self.names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn split_flags_keep_their_numbers() {
        let all = ControlFlags::new().number("a", 1.5).flag("b", true).flag("c", false);
        let (first, others) = all.split_at(1);
        assert_eq!(first, ControlFlags::new().number("a", 1.5));
        assert_eq!(others, ControlFlags::new().flag("b", true).flag("c", false));
    }

    #[test]
    fn sums_keep_their_names() {
        World::run(Mesh::parse("a=3").unwrap(), |rank| {
            let own = ControlFlags::new().flag("stop", rank.index() == 1).flag("failed", false);
            let own = own.number("seconds", rank.index() as f64);
            let sums = own.sum_over_ranks(rank, Location::caller())?;
            assert!(sums.is_set("stop") && !sums.is_set("failed"));
            assert_eq!(sums.iter().collect::<Vec<_>>(), [("stop", 1.0), ("failed", 0.0), ("seconds", 3.0)]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn unknown_name_is_refused() {
        let ended = World::run(Mesh::single(), |_| {
            let control = ControlFlags::new().flag("stop", true).flag("failed", false);
            Ok(control.is_set("stopped"))
        });
        let error = ended.unwrap_err();
        assert_eq!(error.message(), "no control flag or number has the name `stopped`");
        assert_eq!(error.details()[0], ("known", "stop, failed".to_string()));
    }
}
