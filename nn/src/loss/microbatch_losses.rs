//! The losses of a step's microbatches: their backward passes, and what an optimizer step gets of them.

use super::step_loss::{AuxiliaryReduction, Loss, LossForm};
use shardgrad_tensor::{
    Auxiliary, AuxiliaryDivisor, AuxiliaryVector, Error, Kind, Result, StepArgs, Tensor, Value,
};

/// The losses of all microbatches of a step on this rank, after their backward passes.
#[derive(Clone, Debug)]
pub(crate) struct StepLosses {
    pub(crate) form: LossForm,
    /// For each microbatch the values of `Loss::into_vars`, as far as this rank has them.
    pub(crate) outputs: Vec<Vec<Option<Tensor>>>,
    /// The number of microbatches of the step.
    pub(crate) microbatches: usize,
    pub(crate) loss_scale: Option<f64>,
    /// Whether means are divided by the number of microbatches already.
    pub(crate) is_divided: bool,
}

impl StepLosses {
    /// Returns arguments of an optimizer step with these losses, their counts, auxiliary outputs, and the loss scale that their
    /// gradients have.
    pub(crate) fn step_args(&self, args: StepArgs) -> StepArgs {
        let (form, microbatches) = (&self.form, self.microbatches);
        let column = |at: usize| -> Vec<Tensor> {
            self.outputs.iter().filter_map(|of_microbatch| of_microbatch.get(at)?.clone()).collect()
        };
        let mut columns = (0..).map(column);
        let mut next = || columns.next().unwrap_or_default();
        let losses = next();
        let counts = form.is_weighted.then(&mut next);
        let auxiliary = form.auxiliary.iter().map(|(name, reduction)| {
            let sums = next();
            let divisor = match reduction {
                AuxiliaryReduction::Mean => AuxiliaryDivisor::Number(microbatches as f64),
                AuxiliaryReduction::Sum => AuxiliaryDivisor::Number(1.0),
                AuxiliaryReduction::Quotient => AuxiliaryDivisor::Counts(next()),
            };
            Auxiliary { name: name.clone(), sums, divisor }
        });
        let auxiliary = auxiliary.collect();
        let vector =
            |(name, len): &(String, usize)| AuxiliaryVector { name: name.clone(), len: *len, sums: next() };
        let auxiliary_vectors = form.vectors.iter().map(vector).collect();
        let loss_divisor = if form.is_weighted || self.is_divided { 1 } else { microbatches };
        let loss_scale = match form.is_weighted {
            false => self.loss_scale,
            true => self.loss_scale.map(|scale| form.gradient_factor(microbatches, Some(scale))),
        };
        StepArgs { losses, loss_divisor, counts, auxiliary, auxiliary_vectors, loss_scale, ..args }
    }
}

/// The backward passes of a step's microbatches in a training loop without a trainer: each loss runs backward with the factor that
/// makes the step's gradients those of [`Loss`], and an optimizer step gets what it divides by and reports.
///
/// ```
/// use shardgrad_nn::{AdamW, CrossEntropy, Linear, MicrobatchLosses, Model, Optimizer, Plan, StepArgs};
/// use shardgrad_tensor::{Mesh, Tensor, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// World::run(Mesh::single(), |rank| {
///     let model = Model::new(rank, Linear::new(1, 3), &Plan::new(), 1)?;
///     let mut optim = AdamW::new(0.1);
///     let tape = model.tape().for_rounds(2);
///     let mut losses = MicrobatchLosses::new(2);
///     for labels in [[2i64, -100], [-100, -100]] {
///         let x = tape.constant(Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?);
///         let labels = tape.constant(Tensor::from_host(rank, &[2], &labels)?);
///         let cross_entropy = CrossEntropy { ignore_index: Some(-100), ..CrossEntropy::default() };
///         losses.backward(cross_entropy.loss(&model.forward(&x), &labels))?;
///     }
///     let args = losses.step_args(StepArgs { clip: Some(1.0), ..StepArgs::new(0.1) })?;
///     let report = optim.step(&model, tape.gradients(), args)?;
///     assert_eq!(report.count, Some(1.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "gradient accumulation")]
#[derive(Clone, Debug)]
pub struct MicrobatchLosses {
    microbatches: usize,
    /// The number of backward passes on this rank.
    passes: usize,
    loss_scale: Option<f64>,
    count_max: usize,
    /// Whether means are divided by the number of microbatches before the backward pass.
    divides: bool,
    form: Option<LossForm>,
    outputs: Vec<Vec<Option<Tensor>>>,
}

impl MicrobatchLosses {
    /// For a step of this number of microbatches.
    #[must_use]
    pub fn new(microbatches: usize) -> MicrobatchLosses {
        let passes = microbatches;
        MicrobatchLosses {
            microbatches,
            passes,
            loss_scale: None,
            count_max: 1,
            divides: true,
            form: None,
            outputs: Vec::new(),
        }
    }

    /// Multiplies all gradients by a loss scale ([`LossScale::factor`](crate::LossScale::factor)), for f16; the step divides by it.
    #[doc(alias = "GradScaler")]
    #[must_use]
    pub fn loss_scale(self, factor: f64) -> MicrobatchLosses {
        MicrobatchLosses { loss_scale: Some(factor), ..self }
    }

    /// Sets the number of backward passes on this rank, where other ranks run those of the other microbatches.
    pub(crate) fn with_passes(self, passes: usize) -> MicrobatchLosses {
        MicrobatchLosses { passes, ..self }
    }

    /// Leaves means undivided, as a pipeline does: the step divides their sum.
    pub(crate) fn undivided(self) -> MicrobatchLosses {
        MicrobatchLosses { divides: false, ..self }
    }

    /// Sets the bound of the count of a microbatch for losses that state none.
    pub(crate) fn with_count_max(self, count_max: usize) -> MicrobatchLosses {
        MicrobatchLosses { count_max, ..self }
    }

    /// Runs the backward pass of the loss of the next microbatch.
    ///
    /// # Errors
    /// `Kind::Config` if the loss has another form (mean or sum, names of auxiliary outputs) than that of an earlier microbatch, or
    /// if there are more losses than microbatches; `Kind::DType` for a loss of 16 bits; as [`Var::backward`](shardgrad_autograd::Var::backward).
    #[track_caller]
    pub fn backward(&mut self, loss: impl Into<Loss>) -> Result<()> {
        let (form, vars) = loss.into().check_dtype()?.into_vars();
        let form = form.or_count_max(self.count_max);
        if self.outputs.len() == self.passes {
            let text = format!("a step of {} microbatches has a further loss", self.passes);
            return Err(Error::new(Kind::Config, text)
                .detail("help", "give MicrobatchLosses::new the number of backward passes of the step"));
        }
        let first = self.form.get_or_insert_with(|| form.clone());
        if *first != form {
            let text = format!(
                "the loss of microbatch {} is {form:?}, that of microbatch 0 {first:?}",
                self.outputs.len()
            );
            return Err(Error::new(Kind::Config, text).detail(
                "help",
                "return a loss of one kind, with the same auxiliary outputs, for each microbatch",
            ));
        }
        let mut vars = vars.into_iter();
        let value = vars.next().expect("a loss has a value");
        let (value, factor) = match (form.is_weighted, self.microbatches) {
            (is_weighted, microbatches) if is_weighted || !self.divides => {
                (value, form.gradient_factor(microbatches, self.loss_scale))
            }
            (_, 1) => (value, self.loss_scale.unwrap_or(1.0)),
            (_, microbatches) => (value.scale(1.0 / microbatches as f64), self.loss_scale.unwrap_or(1.0)),
        };
        let scalars = [value.clone()].into_iter().chain(vars);
        self.outputs.push(scalars.map(|var| Some(var.tensor().clone())).collect());
        value.backward_scaled(factor)
    }

    /// Returns arguments of an optimizer step with these losses, their counts, auxiliary outputs and loss scale.
    ///
    /// # Errors
    /// `Kind::Config` if there were fewer losses than microbatches: a mean would be too small.
    pub fn step_args(self, args: StepArgs) -> Result<StepArgs> {
        Ok(self.finish()?.step_args(args))
    }

    /// The losses of the step.
    pub(crate) fn finish(self) -> Result<StepLosses> {
        let MicrobatchLosses { microbatches, passes, loss_scale, divides, form, outputs, .. } = self;
        match form {
            Some(form) if outputs.len() == passes => {
                Ok(StepLosses { form, outputs, microbatches, loss_scale, is_divided: divides })
            }
            _ => {
                let text = format!("a step of {passes} microbatches has {} losses", outputs.len());
                Err(Error::new(Kind::Config, text)
                    .detail("help", "call MicrobatchLosses::backward once for each microbatch"))
            }
        }
    }
}
