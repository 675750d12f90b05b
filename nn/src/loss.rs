//! Loss functions: cross-entropy, mean squared error, binary cross-entropy, and the load-balancing loss of experts; and the loss of a
//! training step.

mod step_loss;
mod microbatch_losses;

pub use microbatch_losses::MicrobatchLosses;
pub(crate) use microbatch_losses::StepLosses;
pub(crate) use step_loss::LossForm;
pub use step_loss::{Loss, PartialLoss};

use shardgrad_autograd::Var;
use shardgrad_tensor::{Elementwise, Error, Kind, Value};

/// Cross-entropy of each row, `-log softmax(logits)[target]`: logits `[..m, v]` (any float), targets `[..m]` (i64); returns
/// `[..m]` in the accumulator type of the logits. Take the mean for the usual loss.
///
/// Computes ln(sum exp z) - z_target in one pass over the logits. A sharded vocabulary (vocab-parallel cross-entropy) costs three
/// all-reduces of one number per row forward (maxima, sums, logits of the targets) and none backward.
///
/// # Panics
/// Unwinds with an error if the shapes do not fit, or a target is outside `0..v`.
#[doc(alias = "nll_loss")]
#[doc(alias = "vocab_parallel_cross_entropy")]
#[track_caller]
#[must_use]
pub fn cross_entropy(logits: &Var, targets: &Var) -> Var {
    let (lse, picked) = logits.cross_entropy_terms(targets);
    lse.sub(&picked)
}

/// Cross-entropy with label smoothing and an ignored target.
#[doc(alias = "CrossEntropyLoss")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// Rows with this target have a loss of 0 and do not count in the mean.
    pub ignore_index: Option<i64>,
    /// Label smoothing: the share of each row's weight that is spread evenly over all classes, 0 to 1.
    pub label_smoothing: f64,
}

/// The label of tokens that the losses of the models ignore.
pub const IGNORE_INDEX: i64 = -100;

impl CrossEntropy {
    /// Ignores [`IGNORE_INDEX`], without label smoothing.
    pub const MASKED: CrossEntropy = CrossEntropy { ignore_index: Some(IGNORE_INDEX), label_smoothing: 0.0 };

    /// The loss of each row, as [`cross_entropy`] (`reduction="none"`): ln(sum exp z) - (1 - s) z_target - s mean(z) with label
    /// smoothing s.
    ///
    /// # Panics
    /// Unwinds with an error if the shapes do not fit, or a target is neither in `0..v` nor `ignore_index`; with `Kind::Config` if
    /// `label_smoothing` is not in `0..=1`.
    #[track_caller]
    #[must_use]
    pub fn per_row(&self, logits: &Var, targets: &Var) -> Var {
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let text = format!("`label_smoothing` is {}, but must be from 0 to 1", self.label_smoothing);
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        let ignored = self.ignore_index.map(|i| targets.eq_scalar(i as f64));
        let known = ignored.as_ref().map_or(targets.clone(), |mask| targets.masked_fill(mask, 0.0));
        let (lse, picked) = logits.cross_entropy_terms(&known);
        let mut loss = lse.sub(&picked);
        if self.label_smoothing != 0.0 {
            let last = logits.layout().ndim() - 1;
            let mean = to_accumulator(logits).mean_dims(&[last]);
            loss = loss.add(&picked.sub(&mean).scale(self.label_smoothing));
        }
        ignored.map_or(loss.clone(), |mask| loss.masked_fill(&mask, 0.0))
    }

    /// The loss of a step: with `ignore_index` the sum over the rows that are not ignored and their number, so that the step's loss is
    /// the mean over all of them, on all ranks and in all microbatches; without, the mean over the rows. [`Loss::value`] is the mean of one
    /// microbatch; the mean of such means is another number where microbatches have different numbers of ignored rows.
    ///
    /// # Panics
    /// As [`CrossEntropy::per_row`].
    #[track_caller]
    #[must_use]
    pub fn loss(&self, logits: &Var, targets: &Var) -> Loss {
        let rows = self.per_row(logits, targets);
        let Some(ignored) = self.ignore_index else { return Loss::mean(rows.mean()) };
        let count = targets.ne_scalar(ignored as f64).cast(rows.dtype()).sum();
        Loss::weighted(rows.sum(), count).count_max(targets.layout().numel())
    }
}

/// Load-balancing loss of mixtures of experts: e times the sum over the e experts of f_i p_i, where f_i is the fraction of rows
/// routed to expert i and p_i the mean router score of expert i. Fedus et al., arXiv 2101.03961, equations 4 to 6.
///
/// `usage` holds, for each layer, the number of rows routed to each expert and the sums of the scores, `[e]` both, as
/// [`Routing::expert_usage`](crate::layer::Routing::expert_usage) returns them; `rows` counts the rows of all layers. The minimum
/// is the number of experts per row, reached where all experts are used equally. The gradient flows through the scores alone.
/// f and p are those of the whole batch, also where its rows are sharded: two all-reduces of e numbers.
///
/// # Panics
/// Unwinds with an error if shapes do not fit, or `usage` is empty.
#[doc(alias = "aux_loss")]
#[doc(alias = "router_aux_loss")]
#[track_caller]
#[must_use]
pub fn load_balancing_loss(usage: &[[Var; 2]], rows: usize) -> Var {
    let sum = |i: usize| {
        let mut all = usage.iter().map(|layer| layer[i].clone());
        let first = all.next().unwrap_or_else(|| {
            let error =
                Error::new(Kind::Config, "load_balancing_loss needs the expert usage of at least one layer");
            error.at(std::panic::Location::caller()).raise()
        });
        all.fold(first, |sum, layer| sum.add(&layer)).scale(1.0 / rows.max(1) as f64)
    };
    let (taken, scores) = (sum(0), sum(1));
    let count = taken.layout().numel() as f64;
    taken.mul(&scores).sum().scale(count)
}

/// Load imbalance of experts: the tokens of the expert with most tokens divided by the mean over all experts, a scalar from 1 (balanced) to
/// the number of experts; NaN without tokens. `tokens_per_expert` is `[e]`, as
/// [`Routing::tokens_per_expert`](crate::layer::Routing::tokens_per_expert) returns it, or a sum of such. Without gradient; one
/// all-reduce of e numbers where rows are sharded.
///
/// # Panics
/// Unwinds with an error for a scalar.
#[doc(alias = "load_balance")]
#[track_caller]
#[must_use]
pub fn expert_imbalance(tokens_per_expert: &Var) -> Var {
    let tokens = tokens_per_expert.detach();
    tokens.max_last().div(&tokens.sum()).scale(tokens.layout().numel() as f64)
}

/// Mean squared error: the mean of (prediction - target)^2 over all elements, a scalar in the accumulator type.
///
/// # Panics
/// Unwinds with `Kind::Shape` if the shapes differ: `[8, 1]` and `[8]` would broadcast to all 64 pairs. With `Kind::DType` if the dtypes
/// do not fit.
#[doc(alias = "mse_loss")]
#[doc(alias = "MSELoss")]
#[track_caller]
#[must_use]
pub fn mse(prediction: &Var, target: &Var) -> Var {
    check_equal_shapes(["mse of a prediction", "a target"], &prediction.shape(), &target.shape());
    to_accumulator(prediction).sub(&to_accumulator(target)).square().mean()
}

/// Binary cross-entropy of logits z and targets t in 0..=1 (same float dtype): -t ln s(z) - (1 - t) ln(1 - s(z)) of each
/// element, in the accumulator type, where s is the sigmoid. Computed as
/// t softplus(-z) + (1 - t) softplus(z), which is accurate in both tails. Take the mean for the usual loss.
///
/// # Panics
/// As [`mse`].
#[doc(alias = "binary_cross_entropy_with_logits")]
#[doc(alias = "BCEWithLogitsLoss")]
#[track_caller]
#[must_use]
pub fn bce_with_logits(logits: &Var, targets: &Var) -> Var {
    check_equal_shapes(["bce_with_logits of logits", "targets"], &logits.shape(), &targets.shape());
    let (logits, targets) = (to_accumulator(logits), to_accumulator(targets));
    let yes = targets.mul(&logits.neg().softplus());
    yes.add(&targets.neg().add_scalar(1.0).mul(&logits.softplus()))
}

/// Refuses values of different shapes, which would broadcast: each prediction would be compared with the targets of other rows.
#[track_caller]
pub(crate) fn check_equal_shapes(what: [&str; 2], first: &[usize], second: &[usize]) {
    if first != second {
        let [a, b] = what;
        Error::new(Kind::Shape, format!("{a} {first:?} and {b} {second:?}: the shapes differ"))
            .detail("help", format!("bring both to one shape, as with `.reshape(&{first:?})`"))
            .at(std::panic::Location::caller())
            .raise();
    }
}

/// Casts to the accumulator type: a mean in a 16-bit dtype would be rounded to three digits.
#[track_caller]
fn to_accumulator(x: &Var) -> Var {
    x.cast(x.dtype().accumulator())
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::abs_diff_eq;
    use shardgrad_autograd::Tape;
    use shardgrad_tensor::{DType, Layout, Mesh, Rank, Result, Tensor, World};

    const LAYOUTS: [(&str, &str); 4] =
        [("", "f64[3, 4]"), ("a=2", "f64[3@a, 4]"), ("a=2", "f64[3, 4@a]"), ("a=2,b=2", "f64[3@b, 4@a]")];
    const Z: [f64; 12] = [1.0, -0.5, 2.0, 0.25, 3.0, -1.0, 0.5, 0.0, -2.0, 1.5, 0.75, 1.0];

    /// Checks the value of a loss of Z on every layout against `right`, and its gradient against finite differences.
    fn check(loss: impl Fn(&Rank, &Var) -> Result<Var> + Sync, right: impl Fn(&[f64]) -> f64) {
        for (mesh, text) in LAYOUTS {
            let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let tape = Tape::new(rank);
                let z = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &Z)?;
                let loss = loss(rank, &tape.leaf(7, &z))?;
                loss.backward()?;
                let gradient = tape.gradients().remove(&7).expect("the leaf has a gradient");
                Ok((loss.item()?, gradient.to_f64()?))
            });
            for (value, gradient) in made.unwrap() {
                let exact = right(&Z);
                assert!(abs_diff_eq!(value, exact, epsilon = 1e-12), "{text}: {value} instead of {exact}");
                for (i, slope) in gradient.iter().enumerate() {
                    let shifted = |by: f64| {
                        let mut z = Z;
                        z[i] += by;
                        right(&z)
                    };
                    let quotient = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
                    let near = abs_diff_eq!(*slope, quotient, epsilon = 1e-8);
                    assert!(near, "{text}, element {i}: {slope} and {quotient}");
                }
            }
        }
    }

    fn nll(row: &[f64], target: usize, label_smoothing: f64) -> f64 {
        let lse = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        lse - (1.0 - label_smoothing) * row[target] - label_smoothing * mean
    }

    #[test]
    fn cross_entropy_with_smoothing_and_without_ignored_rows() {
        let targets =
            |rank: &Rank, z: &Var, t: &[i64]| Ok::<_, Error>(z.constant(Tensor::from_host(rank, &[3], t)?));
        let smooth = CrossEntropy { label_smoothing: 0.2, ..CrossEntropy::default() };
        check(
            |rank, z| Ok(smooth.loss(z, &targets(rank, z, &[2, 0, 3])?).value()),
            |z| (nll(&z[..4], 2, 0.2) + nll(&z[4..8], 0, 0.2) + nll(&z[8..], 3, 0.2)) / 3.0,
        );
        let ignoring = CrossEntropy { ignore_index: Some(-100), label_smoothing: 0.1 };
        check(
            |rank, z| Ok(ignoring.loss(z, &targets(rank, z, &[2, -100, 3])?).value()),
            |z| (nll(&z[..4], 2, 0.1) + nll(&z[8..], 3, 0.1)) / 2.0,
        );
        check(
            |rank, z| Ok(CrossEntropy::default().loss(z, &targets(rank, z, &[1, 0, 0])?).value()),
            |z| (nll(&z[..4], 1, 0.0) + nll(&z[4..8], 0, 0.0) + nll(&z[8..], 0, 0.0)) / 3.0,
        );
    }

    #[test]
    fn label_smoothing_outside_0_to_1_is_rejected() {
        for label_smoothing in [1.5, -0.1, f64::NAN] {
            let made = World::run(Mesh::single(), |rank| {
                let tape = Tape::new(rank);
                let z = tape.constant(Tensor::from_host(rank, &[3, 4], &Z)?);
                let targets = tape.constant(Tensor::from_host(rank, &[3], &[2i64, 0, 3])?);
                CrossEntropy { label_smoothing, ..CrossEntropy::default() }.loss(&z, &targets).value().item()
            });
            let error = made.unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert!(error.message().starts_with("`label_smoothing` is "), "{error}");
        }
    }

    #[test]
    fn mse_and_bce_with_logits_match_their_formulas() {
        let t = [0.0, 1.0, 0.5, 0.25];
        let targets = |rank: &Rank, z: &Var| {
            Ok::<_, Error>(z.constant(Tensor::from_global(rank, z.layout(), &t.repeat(3))?))
        };
        let mean = |z: &[f64], f: &dyn Fn(f64, f64) -> f64| {
            z.iter().enumerate().map(|(i, &z)| f(z, t[i % 4])).sum::<f64>() / z.len() as f64
        };
        check(|rank, z| Ok(mse(z, &targets(rank, z)?)), |z| mean(z, &|z, t| (z - t).powi(2)));
        check(
            |rank, z| Ok(bce_with_logits(z, &targets(rank, z)?).mean()),
            |z| mean(z, &|z, t| (1.0 + z.exp()).ln() - t * z),
        );
    }

    #[test]
    fn predictions_and_targets_of_different_shapes_are_refused() {
        let refused = |loss: fn(&Var, &Var) -> Var| {
            let made = World::run(Mesh::single(), |rank| {
                let tape = Tape::new(rank);
                let column = tape.constant(Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?);
                let row = tape.constant(Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?);
                loss(&column, &row).sum().item()
            });
            let error = made.unwrap_err();
            assert!(
                error.kind() == Kind::Shape && error.to_string().contains(".reshape(&[2, 1])"),
                "{error}"
            );
            assert!(error.site().is_some_and(|site| site.file().ends_with("loss.rs")), "{error}");
            error.message().to_string()
        };
        assert_eq!(refused(mse), "mse of a prediction [2, 1] and a target [2]: the shapes differ");
        assert_eq!(
            refused(bce_with_logits),
            "bce_with_logits of logits [2, 1] and targets [2]: the shapes differ"
        );
    }

    #[test]
    fn losses_of_16_bit_inputs_are_computed_in_the_accumulator_type() {
        World::run(Mesh::single(), |rank| {
            let tape = Tape::new(rank);
            let narrow = |x: &[f64]| {
                Ok::<_, Error>(tape.constant(Tensor::from_host(rank, &[4], x)?.cast(DType::BF16)))
            };
            let (x, zeros) = (narrow(&[16.0, 1.0, 1.0, 1.0])?, narrow(&[0.0; 4])?);
            let loss = mse(&x, &zeros);
            // In bf16 259 / 4 is 65.
            assert_eq!((loss.dtype(), loss.item()?), (DType::F32, 64.75));
            assert_eq!(bce_with_logits(&x, &zeros).dtype(), DType::F32);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn bce_with_logits_is_accurate_for_large_logits() {
        World::run(Mesh::single(), |rank| {
            let tape = Tape::new(rank);
            let z = tape.constant(Tensor::from_host(rank, &[4], &[60.0f64, -60.0, 60.0, -60.0])?);
            let t = tape.constant(Tensor::from_host(rank, &[4], &[1.0f64, 0.0, 0.0, 1.0])?);
            let tiny = (-60f64).exp();
            assert_eq!(bce_with_logits(&z, &t).tensor().to_f64()?, [tiny, tiny, 60.0, 60.0]);
            Ok(())
        })
        .unwrap();
    }
}
