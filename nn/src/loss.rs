//! Losses.

use shardgrad_autograd::Var;
use shardgrad_tensor::{DType, Value};

/// `-log softmax(logits)[target]` of each row: logits `[..m, v]` (any float), targets `[..m]` (i64); `[..m]` in the
/// accumulator type of the logits. Its mean is the usual loss.
///
/// It is log(sum exp(z - max)) + max - picked. Over a split vocabulary the sum and the picked logit are pending sums, so
/// that three all-reduces of one number a row are needed forward, and none backward.
///
/// # Panics
/// Unwinds with an error if the shapes do not fit, or a target is outside of `0..v`.
#[track_caller]
#[must_use]
pub fn cross_entropy(logits: &Var, targets: &Var) -> Var {
    let max = logits.max_last();
    let (sum, picked) = logits.cross_entropy_terms(&max, targets);
    sum.log().add(&max).sub(&picked)
}

/// The mean of [`cross_entropy`] over the places where the label is not negative: logits `[..m, v]` (any float), labels
/// `[..m]` (i64); a scalar in the accumulator type of the logits. Without any such place it is not a number.
///
/// # Panics
/// Unwinds with an error if the shapes do not fit, or a label is `v` or more.
#[track_caller]
#[must_use]
pub fn masked_cross_entropy(logits: &Var, labels: &Var) -> Var {
    // Integers have no comparison: in f64, which holds every label, 1 - relu(1 - n) is 0 for n = 0 and 1 above.
    let wide = labels.cast(DType::F64);
    let places = wide.add_scalar(1.0).relu();
    let asked = places.neg().add_scalar(1.0).relu().neg().add_scalar(1.0);
    let each = cross_entropy(logits, &wide.relu().cast(DType::I64));
    let asked = asked.cast(each.dtype());
    each.mul(&asked).sum().div(&asked.sum())
}
