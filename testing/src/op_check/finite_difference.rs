//! Gradcheck: compares cotangents with central finite differences of the forward in f64.

use super::{OpCall, Reference, whole};
use crate::global_tensor::GlobalTensor;
use shardgrad_dist::{Error, Kind, Mesh, Result, World};
use shardgrad_tensor::ops::Case;
use shardgrad_tensor::{Tensor, op};
use std::panic::Location;

/// Compares the cotangents of a case, on one rank in f64, with central differences of the forward, element by element;
/// the cotangent of each argument alone with those of all together; and the cotangents for unused results with those for
/// zeros.
///
/// # Errors
/// `Kind::Unsupported` naming the first argument and element that disagree.
#[doc(alias = "check_grads")]
#[doc(alias = "numerical_gradient")]
#[track_caller]
pub fn gradcheck(make: impl Fn() -> Case + Sync, reference: &Reference) -> Result<()> {
    let site = Location::caller();
    World::run(Mesh::single(), |rank| {
        let case = make();
        let probe = GradProbe { call: OpCall { op: &case.op, rank, is_strided: false, site }, reference };
        for (i, cotangent) in reference.cotangents.iter().enumerate() {
            if let Some(cotangent) = cotangent {
                probe.differences(i, cotangent)?;
                probe.mask(i, cotangent)?;
            }
        }
        (0..reference.seeds.len()).try_for_each(|k| probe.unused(k))
    })?;
    Ok(())
}

/// One case on one rank.
struct GradProbe<'a> {
    call: OpCall<'a>,
    reference: &'a Reference,
}

impl GradProbe<'_> {
    fn wrong<T>(&self, what: String) -> Result<T> {
        Err(Error::new(Kind::Unsupported, format!("{:?}: {what}", self.call.op)))
    }

    fn args(&self, inputs: &[GlobalTensor]) -> Result<Vec<Tensor>> {
        inputs.iter().map(|g| g.distribute(self.call.rank, &whole(self.call.rank, g))).collect()
    }

    /// The loss: the sum of the products of results and seeds.
    fn loss(&self, inputs: &[GlobalTensor]) -> Result<f64> {
        let args = self.args(inputs)?;
        let refs: Vec<&Tensor> = args.iter().collect();
        let outputs = op::apply(&**self.call.op, &refs, self.call.site)?;
        let mut loss = 0.0;
        for (y, seed) in outputs.iter().zip(self.reference.seeds.iter().flatten()) {
            loss += y.to_local_f64()?.iter().zip(&seed.data).map(|(y, s)| y * s).sum::<f64>();
        }
        Ok(loss)
    }

    fn differences(&self, i: usize, cotangent: &GlobalTensor) -> Result<()> {
        let mut inputs = self.reference.inputs.clone();
        let found = find_disagreement(&cotangent.data, |at, by| {
            let x = inputs[i].data[at];
            inputs[i].data[at] = x + by;
            let loss = self.loss(&inputs);
            inputs[i].data[at] = x;
            loss
        })?;
        match found {
            None => Ok(()),
            Some((at, claimed, quotient)) => {
                self.wrong(format!("cotangent {i} is {claimed} at element {at}, differences say {quotient}"))
            }
        }
    }

    fn mask(&self, i: usize, cotangent: &GlobalTensor) -> Result<()> {
        let args = self.args(&self.reference.inputs)?;
        let only: Vec<bool> = (0..args.len()).map(|k| k == i).collect();
        let cotangents = self.call.run(&args, &self.reference.seeds, Some(&only))?.cotangents;
        for (k, alone) in cotangents.into_iter().flatten().enumerate() {
            let same = match &alone {
                None => k != i,
                Some(alone) => k == i && cotangent.find_mismatch(alone, 0.0, self.call.site)?.is_none(),
            };
            if !same {
                return self.wrong(format!("asked for cotangent {i} alone, the vjp gives {alone:?} for {k}"));
            }
        }
        Ok(())
    }

    fn unused(&self, k: usize) -> Result<()> {
        let args = self.args(&self.reference.inputs)?;
        let mut seeds = self.reference.seeds.clone();
        seeds[k] = seeds[k].take().map(|s| GlobalTensor { data: vec![0.0; s.data.len()], ..s });
        let zeros = self.call.run(&args, &seeds, None)?.cotangents;
        seeds[k] = None;
        let unused = self.call.run(&args, &seeds, None)?.cotangents;
        for (zero, none) in zeros.into_iter().flatten().zip(unused.into_iter().flatten()) {
            let (Some(zero), Some(none)) = (zero, none) else { continue };
            let zero = GlobalTensor::of(zero.layout(), zero.to_local_f64()?);
            if let Some(found) = zero.find_mismatch(&none, 0.0, self.call.site)? {
                return self
                    .wrong(format!("with result {k} unused a cotangent {found}, the value for zeros"));
            }
        }
        Ok(())
    }
}

/// Half the distance between the points of a central difference: a power of two, so that the points are exact.
const STEP: f64 = 1.0 / (1u64 << 17) as f64;
/// The relative tolerance between a gradient and its finite difference.
const TOLERANCE: f64 = 1e-6;

/// Returns the first element of a gradient that differs from the central difference of a function: its index, the
/// claimed value, and the finite difference. `shifted(i, by)` is the function with `by` added to element i of its
/// argument.
///
/// # Errors
/// Errors of the function.
#[doc(alias = "numerical_gradient")]
pub fn find_disagreement(
    claimed: &[f64],
    mut shifted: impl FnMut(usize, f64) -> Result<f64>,
) -> Result<Option<(usize, f64, f64)>> {
    for (at, &claimed) in claimed.iter().enumerate() {
        let quotient = (shifted(at, STEP)? - shifted(at, -STEP)?) / (2.0 * STEP);
        // NaN disagrees with everything.
        let near = (quotient - claimed).abs() <= TOLERANCE * (1.0 + claimed.abs());
        if !near {
            return Ok(Some((at, claimed, quotient)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn find_disagreement_finds_only_wrong_elements() {
        let x = [1.5f64, -0.5];
        let cubes =
            |at: usize, by: f64| Ok((0..2).map(|i| (x[i] + if i == at { by } else { 0.0 }).powi(3)).sum());
        assert_eq!(find_disagreement(&[6.75, 0.75], cubes).unwrap(), None);
        let found = find_disagreement(&[6.75, 0.7501], cubes).unwrap().unwrap();
        assert_eq!((found.0, found.1), (1, 0.7501));
        assert_abs_diff_eq!(found.2, 0.75, epsilon = 1e-8);
        assert!(find_disagreement(&[f64::NAN, 0.75], cubes).unwrap().is_some());
    }
}
