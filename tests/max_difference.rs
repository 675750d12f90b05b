//! Maximum absolute difference of two slices.

/// Returns the maximum absolute difference of two slices; infinite if an element is NaN.
pub(crate) fn max_abs_diff(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, |far, d| if d.is_nan() { f64::INFINITY } else { far.max(d) })
}

#[test]
fn nan_is_infinitely_different() {
    let nan = f64::NAN;
    assert_eq!(max_abs_diff(&[1.0, -2.0], &[1.5, -4.0]), 2.0);
    for other in [[nan, 0.0], [0.0, nan], [nan, nan]] {
        assert_eq!(
            (max_abs_diff(&[0.0; 2], &other), max_abs_diff(&other, &other)),
            (f64::INFINITY, f64::INFINITY)
        );
    }
}
