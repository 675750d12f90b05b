//! Losses.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Elementwise, Error, Kind, Value};

/// `-log softmax(logits)[target]` of each row: logits `[..m, v]` (any float), targets `[..m]` (i64); `[..m]` in the
/// accumulator type of the logits. Its mean is the usual loss.
///
/// It is ln(sum exp z) - z_target, formed in one pass over the logits. Over a split vocabulary three all-reduces of one number
/// a row are needed forward, of maxima, sums and targets' logits, and none backward.
///
/// # Panics
/// Unwinds with an error if the shapes do not fit, or a target is outside of `0..v`.
#[track_caller]
#[must_use]
pub fn cross_entropy(logits: &Var, targets: &Var) -> Var {
    let (lse, picked) = logits.cross_entropy_terms(targets);
    lse.sub(&picked)
}

/// Variants of the cross-entropy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// Rows with this target have a loss of 0 and do not count in the mean.
    pub ignored: Option<i64>,
    /// This share of each row's weight is spread evenly over all classes (label smoothing), 0 to 1.
    pub smoothing: f64,
}

impl CrossEntropy {
    /// The loss of each row, as [`cross_entropy`]: with smoothing s it is
    /// ln(sum exp z) - (1 - s) z_target - s mean(z).
    ///
    /// # Panics
    /// Unwinds with an error if the shapes do not fit, or a target is neither in `0..v` nor ignored; with `Kind::Config` if the
    /// smoothing is not in `0..=1`.
    #[track_caller]
    #[must_use]
    pub fn rows(&self, logits: &Var, targets: &Var) -> Var {
        if !(0.0..=1.0).contains(&self.smoothing) {
            let text = format!("a smoothing of {} is no share: it must be from 0 to 1", self.smoothing);
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        let ignored = self.ignored.map(|i| targets.eq_scalar(i as f64));
        let known = ignored.as_ref().map_or(targets.clone(), |mask| targets.masked_fill(mask, 0.0));
        let (lse, picked) = logits.cross_entropy_terms(&known);
        let mut loss = lse.sub(&picked);
        if self.smoothing != 0.0 {
            let last = logits.layout().ndim() - 1;
            let mean = wide(logits).mean_dims(&[last]);
            loss = loss.add(&picked.sub(&mean).scale(self.smoothing));
        }
        ignored.map_or(loss.clone(), |mask| loss.masked_fill(&mask, 0.0))
    }

    /// The mean over the rows that are not ignored, a scalar; not a number if all are.
    ///
    /// # Panics
    /// As [`CrossEntropy::rows`].
    #[track_caller]
    #[must_use]
    pub fn mean(&self, logits: &Var, targets: &Var) -> Var {
        let rows = self.rows(logits, targets);
        match self.ignored {
            None => rows.mean(),
            Some(i) => rows.sum().div(&targets.ne_scalar(i as f64).cast(rows.dtype()).sum()),
        }
    }
}

/// How unevenly experts are used: e times the sum over the e experts of f_i p_i, f_i being how often a row takes expert i and p_i its
/// mean score, both over all `rows`. `usage` has how often each was taken, and the sums of scores, of each layer: `[e]` both, as
/// [`Routes::usage`](crate::layer::Routes::usage) gives them; `rows` counts the rows of all layers. It is least, the experts of a row,
/// where all are used alike; its gradient goes by the scores alone. Fedus et al., arXiv 2101.03961, equations 4 to 6. f and p are those
/// of the whole batch, wherever its rows lie: two all-reduces of e numbers.
///
/// # Panics
/// Unwinds with an error if shapes do not fit, or there is no layer.
#[track_caller]
#[must_use]
pub fn balance(usage: &[[Var; 2]], rows: usize) -> Var {
    let sum = |i: usize| {
        let mut all = usage.iter().map(|layer| layer[i].clone());
        let first = all.next().unwrap_or_else(|| {
            let error = Error::new(Kind::Config, "no layer tells how its experts are used");
            error.at(std::panic::Location::caller()).raise()
        });
        all.fold(first, |sum, layer| sum.add(&layer)).scale(1.0 / rows.max(1) as f64)
    };
    let (taken, scores) = (sum(0), sum(1));
    let count = taken.layout().numel() as f64;
    taken.mul(&scores).sum().scale(count)
}

/// The mean over all elements of (prediction - target)^2, a scalar in the accumulator type; shapes as [`Value::sub`].
///
/// # Panics
/// Unwinds with an error if shapes or dtypes do not fit.
#[track_caller]
#[must_use]
pub fn mse(prediction: &Var, target: &Var) -> Var {
    wide(prediction).sub(&wide(target)).square().mean()
}

/// Binary cross-entropy of logits z and targets t in 0..=1 (same float dtype): -t ln s(z) - (1 - t) ln(1 - s(z)) of each
/// element, in the accumulator type, s being the sigmoid; shapes as [`Value::mul`]. It is t softplus(-z) + (1 - t) softplus(z),
/// exact in both tails. Its mean is the usual loss.
///
/// # Panics
/// Unwinds with an error if shapes or dtypes do not fit.
#[track_caller]
#[must_use]
pub fn bce_with_logits(logits: &Var, targets: &Var) -> Var {
    let (logits, targets) = (wide(logits), wide(targets));
    let yes = targets.mul(&logits.neg().softplus());
    yes.add(&targets.neg().add_scalar(1.0).mul(&logits.softplus()))
}

/// In the accumulator type: a mean of 16-bit numbers would be rounded to three digits.
#[track_caller]
fn wide(x: &Var) -> Var {
    x.cast(x.dtype().accumulator())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_autograd::Tape;
    use shardgrad_tensor::{DType, Layout, Mesh, Rank, Result, Tensor, World};

    const LAYOUTS: [(&str, &str); 4] =
        [("", "f64[3, 4]"), ("a=2", "f64[3@a, 4]"), ("a=2", "f64[3, 4@a]"), ("a=2,b=2", "f64[3@b, 4@a]")];
    const Z: [f64; 12] = [1.0, -0.5, 2.0, 0.25, 3.0, -1.0, 0.5, 0.0, -2.0, 1.5, 0.75, 1.0];

    /// The value of a loss of Z on every layout, checked to be `right`, and its gradient to be that of differences.
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
                assert!((value - right(&Z)).abs() < 1e-12, "{text}: {value} instead of {}", right(&Z));
                for (i, slope) in gradient.iter().enumerate() {
                    let shifted = |by: f64| {
                        let mut z = Z;
                        z[i] += by;
                        right(&z)
                    };
                    let quotient = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
                    assert!((slope - quotient).abs() < 1e-8, "{text}, element {i}: {slope} and {quotient}");
                }
            }
        }
    }

    fn nll(row: &[f64], target: usize, smoothing: f64) -> f64 {
        let lse = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        lse - (1.0 - smoothing) * row[target] - smoothing * mean
    }

    #[test]
    fn cross_entropy_with_smoothing_and_without_ignored_rows() {
        let targets =
            |rank: &Rank, z: &Var, t: &[i64]| Ok::<_, Error>(z.constant(Tensor::from_host(rank, &[3], t)?));
        let smooth = CrossEntropy { smoothing: 0.2, ..CrossEntropy::default() };
        check(
            |rank, z| Ok(smooth.mean(z, &targets(rank, z, &[2, 0, 3])?)),
            |z| (nll(&z[..4], 2, 0.2) + nll(&z[4..8], 0, 0.2) + nll(&z[8..], 3, 0.2)) / 3.0,
        );
        let ignoring = CrossEntropy { ignored: Some(-100), smoothing: 0.1 };
        check(
            |rank, z| Ok(ignoring.mean(z, &targets(rank, z, &[2, -100, 3])?)),
            |z| (nll(&z[..4], 2, 0.1) + nll(&z[8..], 3, 0.1)) / 2.0,
        );
        check(
            |rank, z| Ok(CrossEntropy::default().mean(z, &targets(rank, z, &[1, 0, 0])?)),
            |z| (nll(&z[..4], 1, 0.0) + nll(&z[4..8], 0, 0.0) + nll(&z[8..], 0, 0.0)) / 3.0,
        );
    }

    #[test]
    fn a_smoothing_that_is_no_share_is_refused() {
        for smoothing in [1.5, -0.1, f64::NAN] {
            let made = World::run(Mesh::single(), |rank| {
                let tape = Tape::new(rank);
                let z = tape.constant(Tensor::from_host(rank, &[3, 4], &Z)?);
                let targets = tape.constant(Tensor::from_host(rank, &[3], &[2i64, 0, 3])?);
                CrossEntropy { smoothing, ..CrossEntropy::default() }.mean(&z, &targets).item()
            });
            let error = made.unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert!(error.message().starts_with("a smoothing of "), "{error}");
        }
    }

    #[test]
    fn squares_and_binary_cross_entropy() {
        let t = [0.0, 1.0, 0.5, 0.25];
        let targets = |rank: &Rank, z: &Var| Ok::<_, Error>(z.constant(Tensor::from_host(rank, &[4], &t)?));
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
    fn means_of_narrow_numbers_are_not_rounded_to_them() {
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
    fn far_logits_have_a_small_loss_or_a_linear_one() {
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
