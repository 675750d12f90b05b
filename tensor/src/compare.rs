//! Whether two tensors hold nearly the same numbers, and if not, where they differ most.

use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use std::fmt;
use std::panic::Location;

/// How far an element may be from the one that is expected: `absolute + relative |expected|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// What is allowed of any element.
    pub absolute: f64,
    /// What is allowed beside it, as a part of the expected element.
    pub relative: f64,
}

impl Tolerance {
    /// No difference at all.
    pub const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };

    /// The same bound absolute and relative.
    #[must_use]
    pub const fn of(bound: f64) -> Tolerance {
        Tolerance { absolute: bound, relative: bound }
    }

    /// By how many times the allowance `got` is away from `want`; 0 for equal numbers and for two that are no numbers, infinite
    /// where one is and the other is not.
    fn excess(self, got: f64, want: f64) -> f64 {
        if got == want || (got.is_nan() && want.is_nan()) {
            return 0.0;
        }
        let excess = (got - want).abs() / (self.absolute + self.relative * want.abs());
        if excess.is_nan() { f64::INFINITY } else { excess }
    }
}

/// The element that is furthest from what was expected, counted in what is allowed there.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Its index in each dim.
    pub index: Vec<usize>,
    /// What is there.
    pub got: f64,
    /// What was expected.
    pub want: f64,
    /// How many elements are further away than allowed.
    pub num_wrong: usize,
    /// Of how many.
    pub numel: usize,
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Worst { index, got, want, num_wrong, numel } = self;
        let off = (got - want).abs();
        write!(
            f,
            "{num_wrong} of {numel} elements differ, worst at {index:?}: {got} instead of {want}, off by {off:e}"
        )
    }
}

/// The worst of some row-major elements of a shape, if one differs by more than is allowed. The slices have one element for
/// each place of the shape; what one of them has beyond the other counts as no number.
#[must_use]
pub fn worst(shape: &[usize], got: &[f64], want: &[f64], tolerance: Tolerance) -> Option<Worst> {
    let at = |list: &[f64], i: usize| list.get(i).copied().unwrap_or(f64::NAN);
    let numel = got.len().max(want.len());
    let excess = |i: usize| tolerance.excess(at(got, i), at(want, i));
    let wrong: Vec<usize> = (0..numel).filter(|i| excess(*i) > 1.0).collect();
    let place = wrong.iter().copied().reduce(|a, b| if excess(b) > excess(a) { b } else { a })?;
    let (mut index, mut rest) = (vec![0; shape.len()], place);
    for (d, n) in shape.iter().enumerate().rev() {
        (index[d], rest) = (rest % n.max(&1), rest / n.max(&1));
    }
    Some(Worst { index, got: at(got, place), want: at(want, place), num_wrong: wrong.len(), numel })
}

/// Compares two tensors, whatever their layouts and dtypes. Both are gathered, so every rank calls this together.
///
/// # Errors
/// `Kind::Shape` if their shapes differ; `Kind::Data` naming the worst element, its index and both numbers; what the
/// collectives report.
#[track_caller]
pub fn check_close(got: &Tensor, want: &Tensor, tolerance: Tolerance) -> Result<()> {
    let site = Location::caller();
    if got.shape() != want.shape() {
        let text = format!("{} compared with {}", got.layout(), want.layout());
        return Err(Error::new(Kind::Shape, text).at(site));
    }
    match worst(&got.shape(), &got.to_f64()?, &want.to_f64()?, tolerance) {
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

/// [`check_close`] for tests.
///
/// # Panics
/// Unwinds with the error of [`check_close`].
///
/// ```
/// use shardgrad_dist::{Mesh, World};
/// use shardgrad_tensor::compare::{Tolerance, assert_close};
/// use shardgrad_tensor::{Tensor, Value};
///
/// World::run(Mesh::parse("tp=2")?, |rank| {
///     let x = Tensor::from_host(rank, &[3], &[1.0f32, 4.0, 9.0])?;
///     assert_close(&x.sqrt().square(), &x, Tolerance::of(1e-6));
///     Ok(())
/// })?;
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
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
    fn the_worst_element_is_told() {
        let found = worst(
            &[2, 3],
            &[1.0, 2.0, 3.0, 4.5, 5.0, 7.0],
            &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            Tolerance::of(0.01),
        );
        let expected = Worst { index: vec![1, 2], got: 7.0, want: 6.0, num_wrong: 2, numel: 6 };
        assert_eq!(found, Some(expected));
        let text = found.unwrap().to_string();
        assert_eq!(text, "2 of 6 elements differ, worst at [1, 2]: 7 instead of 6, off by 1e0");
    }

    #[test]
    fn what_is_no_number_equals_only_its_like() {
        let nan = f64::NAN;
        assert_eq!(worst(&[2], &[nan, 1.0], &[nan, 1.0], Tolerance::EXACT), None);
        assert_eq!(worst(&[1], &[f64::INFINITY], &[f64::INFINITY], Tolerance::EXACT), None);
        let found = worst(&[2], &[nan, 3.0], &[1.0, 1.0], Tolerance::of(1.0)).unwrap();
        assert_eq!((found.index, found.num_wrong), (vec![0], 1));
        assert!(worst(&[2], &[1.0], &[1.0, 1.0], Tolerance::of(1.0)).is_some());
        assert_eq!(worst(&[], &[0.0], &[-0.0], Tolerance::EXACT), None);
    }

    #[test]
    fn tensors_are_compared_whatever_their_layouts() {
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
