//! Auxiliary outputs: numbers that a step reports beside the loss, summed over ranks and microbatches.

use crate::execution::local_tensor::LocalTensor;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::Strides;

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

/// Numbers that a step reports beside the loss, one for each element of a vector, such as the number of tokens of each expert: sums over
/// all ranks and microbatches. They cost and decide as little as an [`Auxiliary`].
#[derive(Clone, Debug)]
pub struct AuxiliaryVector {
    /// The name; all ranks pass equal names in equal order.
    pub name: String,
    /// The number of elements.
    pub len: usize,
    /// Vectors of this rank, one for each microbatch; none on the ranks of pipeline stages that do not compute them.
    pub sums: Vec<Tensor>,
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

impl AuxiliaryVector {
    /// Returns the vectors that count on this rank, each as a column.
    ///
    /// # Errors
    /// `Kind::Shape` for a tensor that is not a vector of this length; `Kind::Layout` for a sharded one.
    pub(crate) fn contributing_columns(&self) -> Result<Vec<LocalTensor>> {
        let mut columns = Vec::with_capacity(self.sums.len());
        for vector in &self.sums {
            let layout = vector.layout();
            let refusal = match layout.shape()[..] == [self.len] {
                false => Some((Kind::Shape, format!("is not a vector of {} elements", self.len))),
                true if !layout.sharded_axes().is_empty() => Some((Kind::Layout, "is sharded".to_string())),
                true => None,
            };
            if let Some((kind, why)) = refusal {
                return Err(Error::new(
                    kind,
                    format!("the auxiliary output `{}`, {layout}, {why}", self.name),
                ));
            }
            if vector.is_counted_here() {
                let local = vector.local().flat(vector.rank())?;
                columns.push(local.with_view(Strides::contiguous(&[self.len, 1])));
            }
        }
        Ok(columns)
    }
}
