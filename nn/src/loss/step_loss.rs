//! The loss of a step: a mean, or a sum with a count, and auxiliary outputs.

use shardgrad_autograd::Var;
use shardgrad_tensor::{DType, Error, Kind, Layout, Result, Tensor, Value};
use std::panic::Location;

/// The loss of a microbatch: a mean over its rows, or a sum and the count to divide it by, with auxiliary outputs for the report.
///
/// A step averages means over its microbatches, and divides the sum of all sums by the sum of all counts. Where microbatches or
/// ranks count unequally (ignored labels, padding, weights), only the second is the mean over the batch: the average of means
/// overweights the tokens of microbatches with few tokens. The page `docs/exact-mean.md` explains how gradients are divided.
///
/// ```
/// use shardgrad_nn::{AdamW, CrossEntropy, Linear, Loss, Plan, Trainer, TrainerConfig};
/// use shardgrad_tensor::{Indexing, Mesh, Reduction, Tensor, Value, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// World::run(Mesh::single(), |rank| {
///     let config = TrainerConfig { microbatches: 2, ..TrainerConfig::new(4) };
///     let read = |rank: &_, _, rows: std::ops::Range<usize>| {
///         let labels = [2i64, -100, -100, 0];
///         let x = Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?;
///         Ok(vec![x, Tensor::from_host(rank, &[2], &labels[rows])?])
///     };
///     let loss = |model: &Linear, x: &[_]| {
///         let (logits, labels) = (model.forward(&x[0]), &x[1]);
///         let cross_entropy = CrossEntropy { ignore_index: Some(-100), ..CrossEntropy::default() };
///         cross_entropy.loss(&logits, labels).also_sum("largest", logits.amax(&[0, 1]))
///     };
///     let mut trainer =
///         Trainer::new(rank, Linear::new(1, 3), &Plan::new(), AdamW::new(0.1), config, read, loss)?;
///     let report = trainer.step()?;
///     assert_eq!(report.count, Some(2.0));
///     assert!(report.auxiliary("largest").is_finite());
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "num_items_in_batch")]
#[doc(alias = "reduction")]
#[derive(Clone, Debug)]
pub struct Loss {
    value: Var,
    /// The count, if the value is a sum.
    count: Option<Var>,
    count_max: Option<usize>,
    auxiliary: Vec<AuxiliaryVar>,
    /// Names and values of auxiliary vectors.
    vectors: Vec<(String, Var)>,
}

/// An auxiliary output of a microbatch.
#[derive(Clone, Debug)]
struct AuxiliaryVar {
    name: String,
    value: Var,
    reduction: AuxiliaryReduction,
    /// The count, for [`AuxiliaryReduction::Quotient`].
    count: Option<Var>,
}

/// How an auxiliary output is reduced over microbatches; over ranks it is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuxiliaryReduction {
    Mean,
    Sum,
    Quotient,
}

impl From<Var> for Loss {
    fn from(value: Var) -> Loss {
        Loss::mean(value)
    }
}

impl Loss {
    /// A scalar that is a mean over the rows of the microbatch. A [`Var`] converts to it.
    #[must_use]
    pub fn mean(value: Var) -> Loss {
        Loss { value, count: None, count_max: None, auxiliary: Vec::new(), vectors: Vec::new() }
    }

    /// A sum over the microbatch, and the count, or the sum of weights, to divide it by: scalars. The step divides the sum of all
    /// sums by the sum of all counts, over ranks and microbatches, and the gradients alike. Either may be a partial sum. No gradient
    /// flows through the count. A microbatch of which nothing counts adds nothing; in a step of which nothing counts the loss is
    /// the sum, 0, and so are the gradients.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the count is not a scalar, with `Kind::DType` if it is neither f64, f32 nor i64: a narrow dtype
    /// has too few digits for a count.
    #[track_caller]
    #[must_use]
    pub fn weighted(sum: Var, count: Var) -> Loss {
        check_scalar("the count of a weighted loss", &count, Location::caller());
        Loss { value: sum, count: Some(count), count_max: None, auxiliary: Vec::new(), vectors: Vec::new() }
    }

    /// States a bound of the count of one microbatch that shapes give, such as its number of tokens; equal for all microbatches.
    /// With f16 the gradients are divided by it before the backward pass, rounded up to a power of two, so that the loss scale
    /// means the same for a sum as for a mean. Without it a [`Trainer`](crate::Trainer) takes the rows of a microbatch.
    #[must_use]
    pub fn count_max(self, count_max: usize) -> Loss {
        Loss { count_max: Some(count_max), ..self }
    }

    /// Adds an auxiliary output that is a mean over the microbatch, averaged over microbatches in the report
    /// ([`StepReport::auxiliary`](crate::StepReport::auxiliary)). It has no gradient and may be a partial sum.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the value is not a scalar, with `Kind::DType` if it is neither f64, f32 nor i64, with
    /// `Kind::Config` if the loss has an output of this name.
    #[track_caller]
    #[must_use]
    pub fn also(self, name: impl Into<String>, mean: Var) -> Loss {
        self.with_auxiliary(name.into(), mean, AuxiliaryReduction::Mean, None, Location::caller())
    }

    /// Adds an auxiliary output that is summed over ranks and microbatches, such as a number of tokens; otherwise as
    /// [`Loss::also`].
    ///
    /// # Panics
    /// As [`Loss::also`].
    #[track_caller]
    #[must_use]
    pub fn also_sum(self, name: impl Into<String>, sum: Var) -> Loss {
        self.with_auxiliary(name.into(), sum, AuxiliaryReduction::Sum, None, Location::caller())
    }

    /// Adds an auxiliary output that is a sum with a count, as [`Loss::weighted`], such as correct predictions among labels; NaN if
    /// nothing counts.
    ///
    /// # Panics
    /// As [`Loss::also`].
    #[track_caller]
    #[must_use]
    pub fn also_weighted(self, name: impl Into<String>, sum: Var, count: Var) -> Loss {
        self.with_auxiliary(name.into(), sum, AuxiliaryReduction::Quotient, Some(count), Location::caller())
    }

    /// Adds a vector of numbers, each summed over ranks and microbatches in the report
    /// ([`StepReport::auxiliary_vector`](crate::StepReport::auxiliary_vector)), such as the tokens of each expert. It has no gradient and
    /// may be a partial sum; no axis shards it.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the value is not a vector; otherwise as [`Loss::also`].
    #[track_caller]
    #[must_use]
    pub fn also_vector(mut self, name: impl Into<String>, sums: Var) -> Loss {
        let (name, site) = (name.into(), Location::caller());
        check_dims(&format!("the auxiliary vector `{name}`"), &sums, 1, site);
        self.check_new_name(&name, site);
        self.vectors.push((name, sums));
        self
    }

    /// Adds a mean over the microbatch, such as a regularizer, to a loss. In a weighted loss the mean weighs as many elements as the
    /// loss counts.
    ///
    /// # Panics
    /// Unwinds with an error if the dtypes differ.
    #[track_caller]
    #[must_use]
    pub fn add_mean(self, mean: &Var) -> Loss {
        let value = match &self.count {
            None => self.value.add(mean),
            Some(count) => self.value.add(&mean.mul(&count.cast(mean.dtype()).detach())),
        };
        Loss { value, ..self }
    }

    fn with_auxiliary(
        mut self,
        name: String,
        value: Var,
        reduction: AuxiliaryReduction,
        count: Option<Var>,
        site: &'static Location<'static>,
    ) -> Loss {
        for scalar in [Some(&value), count.as_ref()].into_iter().flatten() {
            check_scalar(&format!("the auxiliary output `{name}`"), scalar, site);
        }
        self.check_new_name(&name, site);
        self.auxiliary.push(AuxiliaryVar { name, value, reduction, count });
        self
    }

    /// Refuses a second auxiliary output of a name.
    fn check_new_name(&self, name: &str, site: &'static Location<'static>) {
        let names = self.auxiliary.iter().map(|known| &known.name);
        if names.chain(self.vectors.iter().map(|(known, _)| known)).any(|known| known == name) {
            Error::new(Kind::Config, format!("the loss has two auxiliary outputs `{name}`"))
                .detail("help", "give each auxiliary output a name of its own")
                .at(site)
                .raise();
        }
    }

    /// The loss of this microbatch alone: the mean, or the sum divided by its count (NaN if that is 0).
    #[track_caller]
    #[must_use]
    pub fn value(&self) -> Var {
        match &self.count {
            None => self.value.clone(),
            Some(count) => self.value.div(&count.cast(self.value.dtype()).detach()),
        }
    }

    /// The scalars of the loss: the value, then the count if there is one.
    #[must_use]
    pub fn into_scalars(self) -> Vec<Var> {
        [Some(self.value), self.count].into_iter().flatten().collect()
    }

    /// The form, and the values: loss, count if there is one, auxiliary outputs, auxiliary vectors.
    pub(crate) fn into_vars(self) -> (LossForm, Vec<Var>) {
        let form = LossForm {
            is_weighted: self.count.is_some(),
            count_max: self.count_max,
            auxiliary: self.auxiliary.iter().map(|a| (a.name.clone(), a.reduction)).collect(),
            vectors: self.vectors.iter().map(|(name, sums)| (name.clone(), sums.layout().numel())).collect(),
        };
        let auxiliary = self.auxiliary.into_iter().flat_map(|a| [Some(a.value), a.count]);
        let scalars = [Some(self.value), self.count].into_iter().chain(auxiliary).flatten();
        (form, scalars.chain(self.vectors.into_iter().map(|(_, sums)| sums)).collect())
    }

    /// Refuses a loss of 16 bits: its mean has three digits, and whether the scaled loss overflows would depend on the number of
    /// microbatches by which the loss is divided first, and so on the mesh.
    pub(crate) fn check_dtype(self) -> Result<Loss> {
        let dtype = self.value.dtype();
        let sums = dtype.accumulator();
        if dtype == sums {
            return Ok(self);
        }
        let text = format!(
            "the loss has dtype {dtype}: too few digits for a mean, and too small a range for loss scaling"
        );
        let help = format!("cast before the mean: x.cast(DType::{}).mean()", sums.name().to_uppercase());
        Err(Error::new(Kind::DType, text).detail("help", help))
    }
}

/// Refuses what is not a scalar, or has too few digits for a sum.
fn check_scalar(what: &str, scalar: &Var, site: &'static Location<'static>) {
    check_dims(what, scalar, 0, site);
}

/// Refuses what is not a scalar (0 dims) or a vector (1 dim), or has too few digits for a sum.
fn check_dims(what: &str, sums: &Var, ndim: usize, site: &'static Location<'static>) {
    let layout: &Layout = sums.layout();
    if layout.ndim() != ndim {
        let (kind, help) = match ndim {
            0 => ("a scalar", "sum it first: x.sum()"),
            _ => ("a vector", "sum over all other dims first: x.sum_dims(&[0, 1])"),
        };
        Error::new(Kind::Shape, format!("{what} is {layout}, but must be {kind}"))
            .detail("help", help)
            .at(site)
            .raise();
    }
    if ![DType::F64, DType::F32, DType::I64].contains(&layout.dtype()) {
        let text = format!("{what} has dtype {}: too few digits for a sum", layout.dtype());
        Error::new(Kind::DType, text)
            .detail("help", "cast before the sum: x.cast(DType::F32).sum()")
            .at(site)
            .raise();
    }
}

/// What a loss is besides its values; equal in all microbatches and on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LossForm {
    pub(super) is_weighted: bool,
    count_max: Option<usize>,
    pub(super) auxiliary: Vec<(String, AuxiliaryReduction)>,
    /// Names and lengths of the auxiliary vectors.
    pub(super) vectors: Vec<(String, usize)>,
}

impl LossForm {
    /// The number of scalars of the loss without auxiliary outputs.
    pub(crate) fn num_scalars(&self) -> usize {
        1 + usize::from(self.is_weighted)
    }

    /// Takes the rows of a microbatch for the bound of its count, unless there is one.
    pub(crate) fn or_count_max(self, rows: usize) -> LossForm {
        LossForm { count_max: self.count_max.or(Some(rows)), ..self }
    }

    /// Returns the factor of the gradients of each microbatch: for a mean the loss scale over the number of microbatches; for a sum 1
    /// or, with a loss scale, the loss scale over a power of two that is no smaller than the count of the step.
    pub(crate) fn gradient_factor(&self, microbatches: usize, loss_scale: Option<f64>) -> f64 {
        let count_max = self.count_max.unwrap_or(1).max(1) as f64 * microbatches as f64;
        match (self.is_weighted, loss_scale) {
            (false, scale) => scale.unwrap_or(1.0) / microbatches as f64,
            (true, None) => 1.0,
            (true, Some(scale)) => scale / count_max.log2().ceil().exp2(),
        }
    }
}

/// This rank's part of the loss of some arguments: the sum of `sum` over all ranks is the loss or, if there are counts, that sum
/// divided by the sum of `count`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialLoss {
    /// The part of the mean, or of the sum ([`Loss::weighted`]).
    pub sum: f64,
    /// The part of the count of a weighted loss; `Some` on all ranks or on none.
    pub count: Option<f64>,
}

impl PartialLoss {
    /// Reads the part of [`Loss::into_scalars`], as far as this rank has them; `None` counts as 0.
    ///
    /// # Errors
    /// `Kind::Shape` if one is not a scalar; errors of the device.
    pub fn from_scalars(scalars: &[Option<Tensor>]) -> Result<PartialLoss> {
        let part = |scalar: &Option<Tensor>| scalar.as_ref().map_or(Ok(0.0), Tensor::local_contribution);
        let mut parts = scalars.iter().map(part);
        Ok(PartialLoss { sum: parts.next().unwrap_or(Ok(0.0))?, count: parts.next().transpose()? })
    }
}
