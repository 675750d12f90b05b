//! Losses.

use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

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
