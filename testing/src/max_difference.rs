//! The largest difference between two lists of numbers.

/// Returns the largest absolute difference between corresponding numbers; infinite if one is NaN.
///
/// # Panics
/// If the lists have different lengths.
#[must_use]
pub fn max_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "both lists have the same length");
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |far, d| if d.is_nan() { f64::INFINITY } else { far.max(d) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_is_infinitely_different() {
        let nan = f64::NAN;
        assert_eq!(max_difference(&[1.0, -2.0], &[1.5, -4.0]), 2.0);
        for other in [[nan, 0.0], [0.0, nan], [nan, nan]] {
            assert_eq!(
                (max_difference(&[0.0; 2], &other), max_difference(&other, &other)),
                (f64::INFINITY, f64::INFINITY)
            );
        }
    }
}
