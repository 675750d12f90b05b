//! Metrics of classifiers: correct predictions over classes that may be sharded.

use crate::loss::{CrossEntropy, check_equal_shapes};
use shardgrad_autograd::Var;
use shardgrad_tensor::{DType, Elementwise, Indexing, Reduction, Value};

/// Whether the largest logit of each row is that of its target, 1 or 0: logits `[..m, v]` (any float), targets `[..m]` (i64); returns
/// `[..m]` in f32, without gradient. Of tied logits the first is taken, and the first NaN if there is one, on every layout; an ignored
/// target, which is no class, gives 0. Sharded classes cost two all-gathers of a number for each row.
///
/// # Panics
/// Unwinds with `Kind::Shape` if the targets have another shape than the rows.
#[track_caller]
#[must_use]
pub fn correct(logits: &Var, targets: &Var) -> Var {
    let last = last_dim_of_rows(logits, targets);
    logits.argmax(last).eq(targets).cast(DType::F32)
}

/// Whether the target of each row is among its k largest logits, 1 or 0; otherwise as [`correct`]. Of tied logits the first are taken,
/// and NaN is larger than all numbers.
///
/// # Panics
/// As [`correct`]; also if there are fewer than k classes.
#[track_caller]
#[must_use]
pub fn top_k_correct(logits: &Var, targets: &Var, k: usize) -> Var {
    let last = last_dim_of_rows(logits, targets);
    let (_, classes) = logits.top_k(last, k, true);
    classes.eq(&targets.expand(last, k)).cast(DType::F32).sum_dims(&[last])
}

/// The dim of the classes of logits `[..m, v]`. Refuses targets of another shape than `[..m]`, with which the classes would broadcast.
#[track_caller]
fn last_dim_of_rows(logits: &Var, targets: &Var) -> usize {
    let shape = logits.shape();
    let last = shape.len().saturating_sub(1);
    check_equal_shapes(["the rows of the logits", "the targets"], &shape[..last], &targets.shape());
    last
}

/// The share of rows whose largest logit is that of their target: the mean of [`correct`], a scalar. For unequal counts use
/// [`CrossEntropy::correct`] with [`Loss::also_weighted`](crate::Loss::also_weighted).
///
/// # Panics
/// As [`correct`].
#[doc(alias = "Accuracy")]
#[track_caller]
#[must_use]
pub fn accuracy(logits: &Var, targets: &Var) -> Var {
    correct(logits, targets).mean()
}

impl CrossEntropy {
    /// The number of rows that [`correct`] finds right, and the number of rows that are not ignored: scalars in f32, whose quotient over a
    /// step is the accuracy, `loss.also_weighted("accuracy", right, count)`.
    ///
    /// # Panics
    /// As [`correct`].
    #[track_caller]
    #[must_use]
    pub fn correct(&self, logits: &Var, targets: &Var) -> (Var, Var) {
        let right = correct(logits, targets).sum();
        let counted = match self.ignore_index {
            None => targets.eq(targets),
            Some(ignored) => targets.ne_scalar(ignored as f64),
        };
        (right, counted.cast(DType::F32).sum())
    }
}
