//! Compares two tensors within a tolerance (`allclose`, `assert_close`), and reports the worst mismatch.

use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use std::fmt;
use std::panic::Location;

/// The tolerance of a comparison: `absolute + relative |expected|`.
#[doc(alias = "atol")]
#[doc(alias = "rtol")]
#[doc(alias = "allclose")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// The absolute tolerance (`atol`).
    pub absolute: f64,
    /// The relative tolerance (`rtol`), as a fraction of the expected element.
    pub relative: f64,
}

impl Tolerance {
    /// No tolerance.
    pub const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };

    /// The same bound, absolute and relative.
    #[must_use]
    pub const fn of(bound: f64) -> Tolerance {
        Tolerance { absolute: bound, relative: bound }
    }

    /// Returns the difference divided by the tolerance; 0 for equal numbers and for two NaNs, infinite if only one
    /// of the numbers is NaN.
    fn excess(self, got: f64, want: f64) -> f64 {
        if got == want || (got.is_nan() && want.is_nan()) {
            return 0.0;
        }
        let excess = (got - want).abs() / (self.absolute + self.relative * want.abs());
        if excess.is_nan() { f64::INFINITY } else { excess }
    }
}

/// The element with the largest difference relative to its tolerance.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// The index of the element in each dim.
    pub index: Vec<usize>,
    /// The actual value.
    pub got: f64,
    /// The expected value.
    pub want: f64,
    /// The number of elements beyond their tolerance.
    pub num_mismatched: usize,
    /// The number of elements compared.
    pub numel: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { index, got, want, num_mismatched, numel } = self;
        let off = (got - want).abs();
        write!(
            f,
            "{num_mismatched} of {numel} elements differ, worst at {index:?}: {got} instead of {want}, off by {off:e}"
        )
    }
}

/// Returns the worst mismatch of row-major elements of a shape, if any is beyond its tolerance. If one slice is longer,
/// the missing elements of the other count as NaN.
#[must_use]
pub fn worst_mismatch(shape: &[usize], got: &[f64], want: &[f64], tolerance: Tolerance) -> Option<Mismatch> {
    let at = |list: &[f64], i: usize| list.get(i).copied().unwrap_or(f64::NAN);
    let numel = got.len().max(want.len());
    let excess = |i: usize| tolerance.excess(at(got, i), at(want, i));
    let wrong: Vec<usize> = (0..numel).filter(|i| excess(*i) > 1.0).collect();
    let place = wrong.iter().copied().reduce(|a, b| if excess(b) > excess(a) { b } else { a })?;
    let (mut index, mut rest) = (vec![0; shape.len()], place);
    for (d, n) in shape.iter().enumerate().rev() {
        (index[d], rest) = (rest % n.max(&1), rest / n.max(&1));
    }
    Some(Mismatch { index, got: at(got, place), want: at(want, place), num_mismatched: wrong.len(), numel })
}

/// Checks that two tensors are close, whatever their layouts and dtypes. Both are gathered: a collective call.
///
/// # Errors
/// `Kind::Shape` if the shapes differ; `Kind::Data` with the worst element, its index and both values; errors of the
/// collectives.
#[doc(alias = "allclose")]
#[track_caller]
pub fn check_close(got: &Tensor, want: &Tensor, tolerance: Tolerance) -> Result<()> {
    let site = Location::caller();
    if got.shape() != want.shape() {
        let text = format!("cannot compare {} with {}: the shapes differ", got.layout(), want.layout());
        return Err(Error::new(Kind::Shape, text).at(site));
    }
    match worst_mismatch(&got.shape(), &got.to_f64()?, &want.to_f64()?, tolerance) {
        None => Ok(()),
        Some(worst) => {
            let Tolerance { absolute, relative } = tolerance;
            Err(Error::new(Kind::Data, worst.to_string())
                .detail("got", got.layout().to_string())
                .detail("expected", want.layout().to_string())
                .detail("allowed", format!("{absolute:e} + {relative:e} |expected|"))
                .at(site))
        }
    }
}

/// Asserts that two tensors are close: [`check_close`] for tests.
///
/// # Panics
/// Unwinds with the error of [`check_close`].
///
/// ```
/// use shardgrad_dist::{Mesh, World};
/// use shardgrad_tensor::tensor::compare::{Tolerance, assert_close};
/// use shardgrad_tensor::{Tensor, Value};
///
/// World::run(Mesh::parse("tp=2")?, |rank| {
///     let x = Tensor::from_host(rank, &[3], &[1.0f32, 4.0, 9.0])?;
///     assert_close(&x.sqrt().square(), &x, Tolerance::of(1e-6));
///     Ok(())
/// })?;
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[doc(alias = "testing.assert_close")]
#[doc(alias = "assert_allclose")]
#[track_caller]
pub fn assert_close(got: &Tensor, want: &Tensor, tolerance: Tolerance) {
    let site = Location::caller();
    check_close(got, want, tolerance).unwrap_or_else(|e| e.at(site).raise());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn worst_mismatch_is_reported() {
        let found = worst_mismatch(
            &[2, 3],
            &[1.0, 2.0, 3.0, 4.5, 5.0, 7.0],
            &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            Tolerance::of(0.01),
        );
        let expected = Mismatch { index: vec![1, 2], got: 7.0, want: 6.0, num_mismatched: 2, numel: 6 };
        assert_eq!(found, Some(expected));
        let text = found.unwrap().to_string();
        assert_eq!(text, "2 of 6 elements differ, worst at [1, 2]: 7 instead of 6, off by 1e0");
    }

    #[test]
    fn nan_equals_only_nan() {
        let nan = f64::NAN;
        assert_eq!(worst_mismatch(&[2], &[nan, 1.0], &[nan, 1.0], Tolerance::EXACT), None);
        assert_eq!(worst_mismatch(&[1], &[f64::INFINITY], &[f64::INFINITY], Tolerance::EXACT), None);
        let found = worst_mismatch(&[2], &[nan, 3.0], &[1.0, 1.0], Tolerance::of(1.0)).unwrap();
        assert_eq!((found.index, found.num_mismatched), (vec![0], 1));
        assert!(worst_mismatch(&[2], &[1.0], &[1.0, 1.0], Tolerance::of(1.0)).is_some());
        assert_eq!(worst_mismatch(&[], &[0.0], &[-0.0], Tolerance::EXACT), None);
    }

    #[test]
    fn tensors_are_compared_across_layouts() {
        let compared = |data: [f64; 5], allowed: f64| {
            World::run(Mesh::parse("a=2").unwrap(), |rank| {
                let split = Layout::parse("f64[5@a]", rank.mesh())?;
                let pending = Layout::parse("f64[5] +a", rank.mesh())?;
                let got = Tensor::from_global(rank, &split, &data)?;
                let want = Tensor::from_global(rank, &pending, &[1.0f64, 2.0, 3.0, 4.0, 5.0])?;
                check_close(&got, &want, Tolerance::of(allowed))
            })
        };
        compared([1.0, 2.0, 3.0, 4.0, 5.0], 0.0).unwrap();
        compared([1.0, 2.0, 3.0, 4.1, 5.0], 0.1).unwrap();
        let error = compared([1.0, 2.0, 3.0, 4.1, 5.5], 0.01).unwrap_err();
        assert!(error.message().contains("worst at [4]: 5.5 instead of 5"), "{error}");
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.site().unwrap().file().ends_with("compare.rs"), "{error}");
    }
}
