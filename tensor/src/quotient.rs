//! Difference quotients in f64: what a gradient must agree with.

use shardgrad_dist::Result;

/// Half the distance of the points of a quotient: a power of two, so that the points are exact.
const STEP: f64 = 1.0 / (1u64 << 17) as f64;
/// The largest part of a gradient by which its quotient may differ.
const TOLERANCE: f64 = 1e-6;

/// The first element of a gradient that is not the central difference of a function there: its place, what was claimed,
/// and what differences say. `shifted(i, by)` is the function with `by` added to element i of its argument.
///
/// # Errors
/// What the function reports.
pub fn disagreement(
    claimed: &[f64],
    mut shifted: impl FnMut(usize, f64) -> Result<f64>,
) -> Result<Option<(usize, f64, f64)>> {
    for (at, &claimed) in claimed.iter().enumerate() {
        let quotient = (shifted(at, STEP)? - shifted(at, -STEP)?) / (2.0 * STEP);
        // Not-a-number disagrees with everything.
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

    #[test]
    fn a_wrong_element_is_found_and_a_right_one_is_not() {
        let x = [1.5f64, -0.5];
        let cubes =
            |at: usize, by: f64| Ok((0..2).map(|i| (x[i] + if i == at { by } else { 0.0 }).powi(3)).sum());
        assert_eq!(disagreement(&[6.75, 0.75], cubes).unwrap(), None);
        let found = disagreement(&[6.75, 0.7501], cubes).unwrap().unwrap();
        assert!(found.0 == 1 && found.1 == 0.7501 && (found.2 - 0.75).abs() < 1e-8, "{found:?}");
        assert!(disagreement(&[f64::NAN, 0.75], cubes).unwrap().is_some());
    }
}
