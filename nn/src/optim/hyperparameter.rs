//! Validation of hyperparameters.

use shardgrad_tensor::{Error, Kind, Result};
use std::fmt;
use std::panic::Location;

/// Valid range of a hyperparameter: a test, and its description for errors.
pub(super) type ValidRange = (fn(f64) -> bool, &'static str);

pub(super) const NOT_NEGATIVE: ValidRange = (|x| x >= 0.0, "a finite number of at least 0");
pub(super) const POSITIVE: ValidRange = (|x| x > 0.0, "a finite number above 0");
pub(super) const BELOW_ONE: ValidRange = (|x| (0.0..1.0).contains(&x), "a number of at least 0 and below 1");

/// Raises `Kind::Config` for a hyperparameter outside of its range.
#[track_caller]
pub(super) fn check_setting(what: &str, x: f64, range: ValidRange) {
    if let Err(e) = check_range(what, x, range) {
        e.at(Location::caller()).raise();
    }
}

/// Checks that a hyperparameter is finite and within its range.
pub(super) fn check_range(what: impl fmt::Display, x: f64, (fits, range): ValidRange) -> Result<()> {
    if x.is_finite() && fits(x) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, format!("{what} is {x}, which is not {range}")))
}

/// Refuses a largest gradient norm that is not above 0: the update would reverse its direction or vanish. Infinity
/// never clips.
///
/// # Errors
/// `Kind::Config`.
#[doc(alias = "clip_grad_norm_")]
pub(crate) fn check_clip(clip: Option<f64>) -> Result<()> {
    let Some(most) = clip.filter(|most| *most != f64::INFINITY) else { return Ok(()) };
    check_range("the largest gradient norm (clip)", most, POSITIVE)
        .map_err(|e| e.detail("help", "1.0 is a common value; None does not clip"))
}
