//! Auxiliary outputs: numbers that a step reports beside the loss, summed over ranks and microbatches.

use crate::tensor::Tensor;

/// A number that a step reports beside the loss, such as an accuracy. A sum over all ranks and microbatches, divided by a number or by
/// another such sum. Auxiliary outputs cost no further all-reduce, and do not decide whether the step is taken: NaN is reported as it is.
#[derive(Clone, Debug)]
pub struct Auxiliary {
    /// The name; all ranks pass equal names in equal order.
    pub name: String,
    /// Scalars of this rank, one for each microbatch; none on the ranks of pipeline stages that do not compute them.
    pub sums: Vec<Tensor>,
    /// What the sum over all ranks is divided by.
    pub divisor: AuxiliaryDivisor,
}

/// The divisor of an auxiliary output.
#[derive(Clone, Debug)]
pub enum AuxiliaryDivisor {
    /// A number: 1 for a sum, the number of microbatches for a mean.
    Number(f64),
    /// The sum over all ranks of scalars of this rank, such as counts of tokens. The quotient is NaN if it is 0.
    Counts(Vec<Tensor>),
}

impl Auxiliary {
    /// Returns the groups of scalars to sum: the sums, then the counts if there are any.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &[Tensor]> {
        let counts = match &self.divisor {
            AuxiliaryDivisor::Number(_) => None,
            AuxiliaryDivisor::Counts(counts) => Some(&counts[..]),
        };
        [&self.sums[..]].into_iter().chain(counts)
    }

    /// Returns the value, from the sums of the groups, which are taken off the front.
    pub(crate) fn value(&self, sums: &mut impl Iterator<Item = f64>) -> f64 {
        let mut next = || sums.next().unwrap_or(f64::NAN);
        let sum = next();
        match self.divisor {
            AuxiliaryDivisor::Number(divisor) => sum / divisor,
            AuxiliaryDivisor::Counts(_) => sum / next(),
        }
    }
}
