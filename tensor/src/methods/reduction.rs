//! Reductions of every [`Value`] beyond sums and means (max, argmax, logsumexp, cumsum, variance, norms, any, all), and
//! the ops built on them (log_softmax, group_norm).

use crate::methods::elementwise::Elementwise;
use crate::methods::value::Value;
use crate::op::unwind;
use crate::ops::amax::Amax;
use crate::ops::argmax::Argmax;
use crate::ops::cumsum::Cumsum;
use crate::ops::gated_scan::GatedScan;
use crate::ops::log_sum_exp::LogSumExp;
use shardgrad_dist::{Error, Kind};
use shardgrad_kernels::{DType, Dims};

/// Reductions over some dims, which are removed. Dims may be sharded unless the method says that they must be unsharded;
/// then a sharded dim is refused with repairs. Methods of several ops compute in the accumulator dtype (f32 for the
/// 16-bit floats) and round once. A misuse unwinds with the error that names op, layouts and source line.
pub trait Reduction: Value {
    /// Maximum over some dims; negative infinity over nothing. Ties share the gradient; where the maximum is NaN, so
    /// is the gradient.
    #[doc(alias = "max")]
    #[doc(alias = "reduce_max")]
    #[track_caller]
    #[must_use]
    fn amax(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Amax::over(self.layout().ndim(), dims, true)), &[self])
    }

    /// Minimum over some dims; infinity over nothing. Gradients as of [`Reduction::amax`].
    #[doc(alias = "min")]
    #[doc(alias = "reduce_min")]
    #[track_caller]
    #[must_use]
    fn amin(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Amax::over(self.layout().ndim(), dims, false)), &[self])
    }

    /// Index (i64) of the maximum along a dim: the first of ties, and the first NaN if there is one, on every layout. Over a sharded dim a
    /// rank gathers one element and one index for each row from each rank.
    #[track_caller]
    #[must_use]
    fn argmax(&self, dim: usize) -> Self {
        Self::apply_one(unwind(Argmax::along(&self.shape(), dim, true)), &[self])
    }

    /// Index (i64) of the minimum along a dim; otherwise as [`Reduction::argmax`].
    #[track_caller]
    #[must_use]
    fn argmin(&self, dim: usize) -> Self {
        Self::apply_one(unwind(Argmax::along(&self.shape(), dim, false)), &[self])
    }

    /// Log-sum-exp: ln(sum of exp(x)) over some dims; negative infinity over nothing.
    #[doc(alias = "logsumexp")]
    #[track_caller]
    #[must_use]
    fn log_sum_exp(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(LogSumExp::over(self.layout().ndim(), dims)), &[self])
    }

    /// Cumulative sum along an unsharded dim.
    #[track_caller]
    #[must_use]
    fn cumsum(&self, dim: usize) -> Self {
        Self::apply_one(unwind(Cumsum::along(self.layout().ndim(), dim)), &[self])
    }

    /// Gated linear recurrence along a dim: h_t = a_t h_(t-1) + x_t from h_(-1) = 0, with gates a of the shape and dtype of x. The dim
    /// may be sharded: a rank gathers two numbers for each lane from each rank.
    #[doc(alias = "associative_scan")]
    #[doc(alias = "linear recurrence")]
    #[track_caller]
    #[must_use]
    fn gated_scan(&self, gates: &Self, dim: usize) -> Self {
        Self::apply_one(unwind(GatedScan::along(self.layout().ndim(), dim)), &[gates, self])
    }

    /// Variance over some dims: the sum of (x - mean)^2 divided by the number of elements n less `correction` (1 for
    /// a sample, 0 for a population). NaN if that is not positive.
    #[doc(alias = "variance")]
    #[track_caller]
    #[must_use]
    fn var(&self, dims: &[usize], correction: f64) -> Self {
        variance(&to_accumulator(self), dims, correction).cast(self.dtype())
    }

    /// Standard deviation: the square root of [`Reduction::var`]. Its gradient is 0 where the variance is 0.
    #[track_caller]
    #[must_use]
    fn std(&self, dims: &[usize], correction: f64) -> Self {
        safe_sqrt(&variance(&to_accumulator(self), dims, correction)).cast(self.dtype())
    }

    /// p-norm over some dims: (sum of |x|^p)^(1/p); the largest |x| for an infinite p. For p = 2 the gradient at 0
    /// is 0.
    #[doc(alias = "vector_norm")]
    #[track_caller]
    #[must_use]
    fn norm(&self, dims: &[usize], p: f64) -> Self {
        let x = to_accumulator(self);
        let norm = if p == 1.0 {
            x.abs().sum_dims(dims)
        } else if p == 2.0 {
            safe_sqrt(&x.square().sum_dims(dims))
        } else if p == f64::INFINITY {
            x.abs().amax(dims)
        } else {
            if p.is_nan() || p <= 0.0 {
                let text = format!("norm: p must be positive, got {p}");
                unwind(Err(Error::new(Kind::Shape, text)))
            }
            x.abs().powf(p).sum_dims(dims).powf(1.0 / p)
        };
        norm.cast(self.dtype())
    }

    /// Whether any element over some dims is true, in bool; false over nothing. Any dtype: any value except 0 is
    /// true, NaN too.
    #[track_caller]
    #[must_use]
    fn any(&self, dims: &[usize]) -> Self {
        self.cast(DType::Bool).cast(DType::F32).amax(dims).gt_scalar(0.5)
    }

    /// Whether all elements over some dims are true, in bool; true over nothing. Truth as in [`Reduction::any`].
    #[track_caller]
    #[must_use]
    fn all(&self, dims: &[usize]) -> Self {
        self.cast(DType::Bool).cast(DType::F32).amin(dims).gt_scalar(0.5)
    }

    /// Softmax exp(x_i) / sum_j exp(x_j) along an unsharded dim. For a sharded dim, take the exponential of
    /// [`Reduction::log_softmax`].
    #[track_caller]
    #[must_use]
    fn softmax_dim(&self, dim: usize) -> Self {
        let last = self.layout().ndim().saturating_sub(1);
        if dim == last {
            return self.softmax();
        }
        if dim > last {
            let text = format!("softmax: dim {dim} is out of range for {}", self.layout());
            unwind(Err::<(), _>(Error::new(Kind::Shape, text).detail("help", "dims count from 0")));
        }
        self.transpose(dim, last).softmax().transpose(dim, last)
    }

    /// Log-softmax x_i - ln(sum_j exp(x_j)) along a dim, sharded or not.
    #[track_caller]
    #[must_use]
    fn log_softmax(&self, dim: usize) -> Self {
        let x = to_accumulator(self);
        x.sub(&keepdim(&x.log_sum_exp(&[dim]), &x, &[dim])).cast(self.dtype())
    }

    /// Group norm (Wu and He, arXiv 1803.08494) of `[n, c, ..]`: (x - mean) / sqrt(var + eps) w + b, with mean and
    /// variance over each of `groups` groups of neighbouring channels; w, b have one element for each channel
    /// (`[c]`).
    #[doc(alias = "GroupNorm")]
    #[track_caller]
    #[must_use]
    fn group_norm(&self, groups: usize, w: &Self, b: &Self, eps: f64) -> Self {
        let shape = self.shape();
        if shape.len() < 2 || groups == 0 || !shape[1].is_multiple_of(groups) {
            let text = format!("group_norm: {groups} groups do not divide the channels of {shape:?}");
            let help = "dim 1 holds the channels; the number of groups must divide it";
            unwind(Err(Error::new(Kind::Shape, text).detail("help", help)))
        }
        let each = shape[1..].iter().product::<usize>() / groups;
        let x = to_accumulator(&self.reshape(&[shape[0], groups, each]));
        let centred = x.sub(&keepdim(&x.mean_dims(&[2]), &x, &[2]));
        let scale = centred.square().mean_dims(&[2]).add_scalar(eps).rsqrt();
        let normal = centred.mul(&keepdim(&scale, &x, &[2])).reshape(&shape);
        let column: Dims = (1..shape.len()).map(|d| if d == 1 { shape[1] } else { 1 }).collect();
        let [w, b] = [w, b].map(|v| to_accumulator(v).reshape(&column));
        normal.mul(&w).add(&b).cast(self.dtype())
    }
}

impl<V: Value> Reduction for V {}

/// Converts x to its accumulator dtype.
#[track_caller]
fn to_accumulator<V: Value>(x: &V) -> V {
    x.cast(x.dtype().accumulator())
}

/// Square root with gradient 0 at 0, where the slope of the root is infinite.
#[track_caller]
fn safe_sqrt<V: Value>(x: &V) -> V {
    let zero = x.eq_scalar(0.0);
    x.masked_fill(&zero, 1.0).sqrt().masked_fill(&zero, 0.0)
}

/// Restores reduced dims with extent 1 (`keepdim`).
#[track_caller]
fn keepdim<V: Value>(reduced: &V, x: &V, dims: &[usize]) -> V {
    let shape: Dims =
        x.shape().iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect();
    reduced.reshape(&shape)
}

#[track_caller]
fn variance<V: Value>(x: &V, dims: &[usize], correction: f64) -> V {
    let mean = x.mean_dims(dims);
    let count: usize = dims.iter().map(|&d| x.shape()[d]).product();
    let rest = count as f64 - correction;
    let scale = if rest > 0.0 { 1.0 / rest } else { f64::NAN };
    x.sub(&keepdim(&mean, x, dims)).square().sum_dims(dims).scale(scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::tensor::Tensor;
    use approx::{abs_diff_eq, assert_abs_diff_eq};
    use shardgrad_dist::{Mesh, Result, World};

    const X: [f64; 12] = [1.0, 2.0, 4.0, -1.0, 0.5, 3.0, 2.5, -2.0, 0.0, 7.0, 1.5, -3.0];

    /// Runs each method on a `[2, 6]` tensor with this layout and compares with values computed here.
    fn known(text: &str) {
        World::run(Mesh::parse("a=2").unwrap(), |rank| -> Result<()> {
            let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &X)?;
            let near = |y: Tensor, right: [f64; 2]| {
                let y = y.to_f64()?;
                assert!(
                    abs_diff_eq!(y[..], right[..], epsilon = 1e-12),
                    "{text}: {y:?} instead of {right:?}"
                );
                Ok::<(), Error>(())
            };
            let rows = [&X[..6], &X[6..]];
            let of = |f: &dyn Fn(&[f64]) -> f64| rows.map(f);
            let mean = |row: &[f64]| row.iter().sum::<f64>() / 6.0;
            let var = move |row: &[f64]| row.iter().map(|v| (v - mean(row)).powi(2)).sum::<f64>() / 5.0;
            near(x.var(&[1], 1.0), of(&var))?;
            near(x.std(&[1], 1.0), of(&|row| var(row).sqrt()))?;
            near(x.norm(&[1], 1.0), of(&|row| row.iter().map(|v| v.abs()).sum()))?;
            near(x.norm(&[1], 2.0), of(&|row| row.iter().map(|v| v * v).sum::<f64>().sqrt()))?;
            near(x.norm(&[1], 3.0), of(&|row| row.iter().map(|v| v.abs().powi(3)).sum::<f64>().cbrt()))?;
            near(x.norm(&[1], f64::INFINITY), [4.0, 7.0])?;
            near(x.gt_scalar(6.5).any(&[1]), [0.0, 1.0])?;
            near(x.gt_scalar(-1.5).all(&[1]), [1.0, 0.0])?;
            near(x.log_softmax(1).exp().sum_dims(&[1]), [1.0, 1.0])?;
            near(x.log_softmax(0).exp().sum_dims(&[0]).sum_dims(&[0]).expand(0, 2), [6.0, 6.0])?;
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn reductions_match_hand_computed_values_on_every_layout() {
        known("f64[2, 6]");
        known("f64[2, 6@a]");
        known("f64[2@a, 6]");
    }

    #[test]
    fn softmax_dim_and_group_norm_match_references() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 6], &X)?;
            assert_eq!(x.softmax_dim(0).to_f64()?, x.transpose(0, 1).softmax().transpose(0, 1).to_f64()?);
            let x = x.reshape(&[1, 4, 3]);
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 1.0, 1.0])?;
            let b = Tensor::from_host(rank, &[4], &[0.0f64, 0.0, 0.5, 0.0])?;
            let y = x.group_norm(2, &w, &b, 0.0).to_f64()?;
            for (group, row) in y.chunks(6).zip(X.chunks(6)) {
                let mean = row.iter().sum::<f64>() / 6.0;
                let root = (row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 6.0).sqrt();
                let first = if row == &X[..6] { 0.0 } else { 0.5 };
                let second = if row == &X[..6] { 2.0 } else { 1.0 };
                assert_abs_diff_eq!(group[0], (row[0] - mean) / root + first, epsilon = 1e-12);
                assert_abs_diff_eq!(group[3], second * (row[3] - mean) / root, epsilon = 1e-12);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn empty_means_and_small_samples_are_nan() {
        World::run(Mesh::single(), |rank| {
            let none = Tensor::from_host::<f64>(rank, &[2, 0], &[])?;
            assert!(none.mean_dims(&[1]).to_f64()?.iter().all(|y| y.is_nan()));
            let one = Tensor::from_host(rank, &[1], &[3.0f64])?;
            assert!(one.var(&[0], 1.0).item()?.is_nan());
            assert_eq!(one.var(&[0], 0.0).item()?, 0.0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn any_value_except_zero_is_true_in_any_dtype() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let both =
                |x: &Tensor| Ok::<_, Error>((x.any(&[0]).to_host::<u8>()?, x.all(&[0]).to_host::<u8>()?));
            let split = Layout::parse("f64[2@a, 4]", rank.mesh())?;
            let x = Tensor::from_global(rank, &split, &[0.0, -1.0, 0.3, f64::NAN, 0.0, 0.0, 0.4, -0.2])?;
            assert_eq!(both(&x)?, (vec![0, 1, 1, 1], vec![0, 0, 1, 1]));
            let x = Tensor::from_host(rank, &[2, 3], &[-1i64, 0, 1 << 40, i64::MIN, 0, 0])?;
            assert_eq!(both(&x)?, (vec![1, 0, 1], vec![1, 0, 0]));
            let x = Tensor::from_global(rank, &Layout::parse("i64[2] +a", rank.mesh())?, &[-3i64, 0])?;
            assert_eq!(both(&x)?, (vec![1], vec![0]));
            let tiny = Tensor::from_host(rank, &[1], &[1e-300])?;
            assert_eq!(both(&tiny)?, (vec![1], vec![1]), "a value that f32 rounds to 0 is true");
            let none = Tensor::from_host::<u8>(rank, &[0, 1], &[])?;
            assert_eq!(both(&none)?, (vec![0], vec![1]));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn out_of_range_dim_names_the_called_op() {
        let ran = World::run(Mesh::single(), |rank| {
            let _ = Tensor::from_host(rank, &[2, 3], &[0.0f32; 6])?.softmax_dim(2);
            Ok(())
        });
        let error = ran.unwrap_err();
        assert_eq!(error.message(), "softmax: dim 2 is out of range for f32[2, 3]");
        assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
    }
}
