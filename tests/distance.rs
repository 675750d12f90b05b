//! How far apart numbers are that should be alike.

/// The largest difference of numbers that stand at one place; infinite where one is not a number.
pub(crate) fn far(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, |far, d| if d.is_nan() { f64::INFINITY } else { far.max(d) })
}

#[test]
fn what_is_no_number_is_far_from_all() {
    let nan = f64::NAN;
    assert_eq!(far(&[1.0, -2.0], &[1.5, -4.0]), 2.0);
    for other in [[nan, 0.0], [0.0, nan], [nan, nan]] {
        assert_eq!((far(&[0.0; 2], &other), far(&other, &other)), (f64::INFINITY, f64::INFINITY));
    }
}
