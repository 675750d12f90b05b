//! The `Optimizer` trait, and the step that all optimizers share: gradient norm, overflow check, clipping, update.

use super::grad_norm::{PartialLoss, counted_gradients};
use super::hyperparameter::{NOT_NEGATIVE, POSITIVE, check_clip, check_range};
use crate::module::Module;
use crate::module::param::{LOST_VALUE_HELP, Param};
use crate::sharded_model::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::{Error, Kind, OverflowCheck, Rank, Result, StepInputs, StepOutcome, Tensor};
use std::collections::HashSet;
use std::fmt;
use std::panic::Location;

/// Refuses arguments of a step that reverse the update or produce weights that are not finite.
fn check_args(step: u64, args: &StepArgs<'_>) -> Result<()> {
    check_range(format_args!("the learning rate of step {step}"), args.lr, NOT_NEGATIVE)
        .map_err(|e| e.detail("help", "check the learning-rate schedule (LrScheduler)"))?;
    check_clip(args.clip)?;
    check_range("the loss scale", args.loss_scale, POSITIVE)
        .map_err(|e| e.detail("help", "use a power of two of at least 1"))
}

/// Refuses gradients of parameters of another model: the step would ignore them silently.
fn check_gradients_belong(params: &[Param], gradients: &Gradients) -> Result<()> {
    let known: HashSet<Key> = params.iter().map(Param::key).collect();
    let num_foreign = gradients.keys().filter(|key| !known.contains(key)).count();
    if num_foreign == 0 {
        return Ok(());
    }
    let text = format!("{num_foreign} of {} gradients belong to no parameter of this model", gradients.len());
    Err(Error::new(Kind::Config, text).detail(
        "help",
        "pass the gradients of this model's own tape: those of Gradients under Param::key of its parameters",
    ))
}

/// Optimizer state of one parameter: what a run needs, besides the parameter itself, to resume.
#[doc(alias = "opt_state")]
#[doc(alias = "state_dict")]
#[derive(Clone, Debug)]
pub struct OptimizerState {
    /// Number of updates of the parameter, if the optimizer counts them.
    pub num_steps: u64,
    /// State tensors such as moments, laid out as the stored parameter, in the order of [`Optimizer::state_names`].
    pub tensors: Vec<Tensor>,
}

/// Error for a state with another number of tensors than the optimizer has.
pub(super) fn wrong_num_tensors(param: &Param, found: usize, wanted: usize) -> Error {
    let text =
        format!("the state of parameter `{}` has {found} tensors, the optimizer has {wanted}", param.name());
    Error::new(Kind::Config, text).detail("help", "load the state into the optimizer that saved it")
}

/// Refuses to update a parameter without optimizer state: [`Optimizer::rates`] was not called for it.
pub(super) fn check_rates_requested(
    params: &[(&Param, Tensor)],
    has_state: impl Fn(&Param) -> bool,
) -> Result<()> {
    let Some((param, _)) = params.iter().find(|(param, _)| !has_state(param)) else { return Ok(()) };
    let text = format!("Optimizer::rates was not called for parameter `{}`", param.name());
    Err(Error::new(Kind::Config, text).detail(
        "help",
        "an optimizer that forwards `apply_update` to another must forward `rates` and `count_step` too",
    ))
}

/// Arguments of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepArgs<'a> {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Largest global gradient norm, above 0; `None` does not clip.
    #[doc(alias = "max_norm")]
    #[doc(alias = "clip_grad_norm_")]
    pub clip: Option<f64>,
    /// Numbers to sum over all ranks in the all-reduce of the norm; as many on every rank.
    pub control: &'a [f64],
    /// Loss scale: norm, clipping and update use the gradients divided by this factor.
    pub loss_scale: f64,
}

impl StepArgs<'_> {
    /// Returns arguments with a learning rate only: no clipping, no control numbers, loss scale 1.
    #[must_use]
    pub const fn new(lr: f64) -> StepArgs<'static> {
        StepArgs { lr, clip: None, control: &[], loss_scale: 1.0 }
    }
}

/// Result of one optimizer step; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Sums of the control numbers.
    pub control: Vec<f64>,
    /// Whether parameters changed. They do not if the norm or a control sum is not finite.
    pub applied: bool,
}

/// An update rule: changes parameters by their gradients. The rule sees local tensors only: parameters are stored as
/// shards and equal copies, and each gradient has the layout of its parameter. Every rank has an optimizer of its own
/// and steps it together with the other ranks.
#[doc(alias = "torch.optim.Optimizer")]
#[doc(alias = "GradientTransformation")]
pub trait Optimizer: fmt::Debug {
    /// Returns the constant learning rate, for use without a schedule.
    fn lr(&self) -> f64;

    /// Returns all hyperparameters that decide the steps, in one line; it must be equal on every rank. Checkpoints record
    /// the line for readers. [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) write `NAME SETTING VALUE, ..., groups
    /// [PATTERN: SETTING VALUE, ...; ...], after N steps`.
    fn describe(&self) -> String;

    /// Returns the number of applied steps.
    fn num_steps(&self) -> u64;

    /// Returns the hyperparameters of the next step (such as learning rate, betas and bias corrections) at the common
    /// learning rate `lr`: as many numbers for each parameter, one parameter after the other. All that differs from
    /// step to step belongs here. Allocates the state of new parameters here, not in [`Optimizer::apply_update`].
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "hyperparameters")]
    #[doc(alias = "get_lr")]
    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        Ok(vec![lr; params.len()])
    }

    /// Updates the parameters that [`Optimizer::rates`] was called with, each by its gradient times the gradient
    /// scale of the step, if the step is to be applied. All parameters come in one call, so that one launch can
    /// update many. Each gradient has the layout of its stored parameter, and no parameter comes twice. A gradient is
    /// valid during this step only: the next replay of a captured step overwrites it, so a rule that needs the
    /// gradient later copies it ([`Tensor::static_copy`]).
    ///
    /// The host does not know yet whether the step is applied. A rule that passes the step on to an optimizer of this
    /// crate, with the parameters whose rates that optimizer returned ([`OverflowCheck::with_rates`] splits a step),
    /// need not know. A rule made of tensor ops calls [`OverflowCheck::host_step`], for which the host waits; such an
    /// update is not captured, because a graph must not depend on values of one step. With graph capture this method
    /// runs once for many steps, and again where capture is refused.
    ///
    /// # Errors
    /// Errors of the kernels. Parameters are lost then, unless the step was not to be applied.
    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()>;

    /// Counts an applied step that changed these parameters.
    fn count_step(&mut self, params: &[&Param]);

    /// Refuses parameters that the optimizer does not fit, for instance if a group matches none. Receives all
    /// parameters of a model, wherever they are. Called when a trainer is constructed and before each step.
    ///
    /// # Errors
    /// `Kind::Config`.
    fn check_params(&self, _params: &[Param]) -> Result<()> {
        Ok(())
    }

    /// Returns the state of a parameter, if [`Optimizer::rates`] was called for it and the rule has state. A captured
    /// update writes to these tensors: a rule with more state than this method returns is captured wrongly.
    #[doc(alias = "state_dict")]
    fn param_state(&self, _param: &Param) -> Option<OptimizerState> {
        None
    }

    /// Returns the names of the tensors of [`Optimizer::param_state`] in a checkpoint, in their order; empty for a
    /// rule without state. An optimizer that returns `None`, or cannot load state, cannot be saved
    /// ([`checkpoint`](crate::checkpoint)).
    fn state_names(&self) -> Option<&'static [&'static str]> {
        None
    }

    /// Loads the optimizer state after `num_steps` steps: the state of each parameter that has been updated.
    ///
    /// # Errors
    /// `Kind::Unsupported` if the rule cannot; `Kind::Layout` if a tensor has another layout than its stored
    /// parameter; `Kind::DType`; `Kind::Config` for another number of tensors than the rule has.
    #[doc(alias = "load_state_dict")]
    fn load_state(&mut self, _num_steps: u64, _states: Vec<(Param, OptimizerState)>) -> Result<()> {
        Err(Error::new(
            Kind::Unsupported,
            format!("this optimizer does not implement `load_state`: {self:?}"),
        ))
    }

    /// Runs one optimizer step: gradient norm, overflow check, clipping and update. The update is skipped if the
    /// gradient norm or a control sum is not finite. Costs one all-reduce over the whole mesh; every rank calls this
    /// together. Parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// `Kind::Config`, before any communication, for a learning rate below 0, for a clip or loss scale that is not
    /// above 0, for NaN in any of them, for gradients of parameters of another model, and as
    /// [`Optimizer::check_params`]. Errors of the collective and of the kernels.
    #[track_caller]
    fn step<M: Module>(
        &mut self,
        model: &Model<M>,
        gradients: Gradients,
        args: StepArgs<'_>,
    ) -> Result<UpdateReport>
    where
        Self: Sized,
    {
        let site = Location::caller();
        check_gradients_belong(model.params(), &gradients).map_err(|e| e.at(site))?;
        step(self, (model.rank(), model.params()), (gradients, None), args, &mut false)
    }

    /// Runs one step with the optimizer's own learning rate and without clipping.
    ///
    /// # Errors
    /// `Kind::NotFinite` if the gradient norm is not finite (parameters are unchanged), and as [`Optimizer::step`].
    #[track_caller]
    fn update<M: Module>(&mut self, model: &Model<M>, gradients: Gradients) -> Result<UpdateReport>
    where
        Self: Sized,
    {
        let args = StepArgs::new(self.lr());
        let report = self.step(model, gradients, args)?;
        if report.applied {
            return Ok(report);
        }
        let text = format!("the gradient norm is {}; the update was not applied", report.grad_norm);
        Err(Error::new(Kind::NotFinite, text).detail("help", "try a smaller learning rate"))
    }
}

/// One optimizer step, with the tensors that the step reads and changes.
#[derive(Debug)]
pub(crate) struct OptimizerStep {
    overflow_check: OverflowCheck,
    /// Gradients whose elements count on this rank.
    counted_gradients: Vec<Tensor>,
    loss: Option<PartialLoss>,
    /// Parameters to update, with their gradients.
    updates: Vec<(Param, Tensor)>,
}

impl OptimizerStep {
    /// Prepares a step; nothing is launched. The sum of the loss, if there is one, comes before the control sums.
    ///
    /// # Errors
    /// As [`Optimizer::check_params`] and [`Optimizer::rates`]; `Kind::Config` for a learning rate that is NaN.
    pub(crate) fn new(
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        (mut gradients, loss): (Gradients, Option<PartialLoss>),
        args: StepArgs<'_>,
    ) -> Result<OptimizerStep> {
        optim.check_params(params)?;
        let counted_gradients = counted_gradients(params, &gradients).cloned().collect();
        let trained = params.iter().filter(|param| !param.is_frozen());
        let updates = trained.filter_map(|param| Some((param.clone(), gradients.remove(&param.key())?)));
        let updates: Vec<(Param, Tensor)> = updates.collect();
        let overflow_check = OverflowCheck::new(rank, step_inputs(optim, &updates, args)?, loss.is_some())?;
        Ok(OptimizerStep { overflow_check, counted_gradients, loss, updates })
    }

    /// Uploads the hyperparameters of another step into the same memory. Returns false if their numbers do not fit.
    ///
    /// # Errors
    /// As [`OptimizerStep::new`].
    pub(crate) fn upload_into(
        &mut self,
        optim: &mut dyn Optimizer,
        params: &[Param],
        args: StepArgs<'_>,
    ) -> Result<bool> {
        optim.check_params(params)?;
        self.overflow_check.upload_into(step_inputs(optim, &self.updates, args)?)
    }

    /// Launches the gradient norm and the overflow check. One all-reduce over the whole mesh.
    ///
    /// # Errors
    /// Errors of the collective and of the kernels.
    pub(crate) fn check_overflow(&mut self, site: &'static Location<'static>) -> Result<()> {
        let losses = self.loss.as_ref().map_or((&[][..], 1), |loss| (&loss.tensors[..], loss.count));
        self.overflow_check.check(&self.counted_gradients, losses, site)
    }

    /// Launches the update of the parameters.
    ///
    /// # Errors
    /// Errors of the kernels.
    pub(crate) fn apply(&self, optim: &mut dyn Optimizer) -> Result<()> {
        let updates: Vec<(&Param, Tensor)> =
            self.updates.iter().map(|(param, gradient)| (param, gradient.clone())).collect();
        optim.apply_update(&updates, &self.overflow_check)
    }

    /// Returns all tensors that the update writes: parameters and their optimizer state.
    pub(crate) fn written_tensors(&self, optim: &dyn Optimizer) -> Vec<Tensor> {
        let written = |(param, _): &(Param, Tensor)| {
            let state = optim.param_state(param).into_iter().flat_map(|state| state.tensors);
            std::iter::once(param.tensor()).chain(state).collect::<Vec<Tensor>>()
        };
        self.updates.iter().flat_map(written).collect()
    }

    /// Waits for the step, and counts it if it was applied. Clears `in_progress`, which says that parameters may
    /// belong to no step.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn finish(&self, optim: &mut dyn Optimizer, in_progress: &mut bool) -> Result<UpdateReport> {
        let outcome = self.overflow_check.read();
        let StepOutcome { grad_norm, is_applied, sums, .. } =
            outcome.map_err(|error| self.fail(in_progress, error))?;
        if is_applied {
            optim.count_step(&self.updates.iter().map(|(param, _)| param).collect::<Vec<&Param>>());
        }
        *in_progress = false;
        Ok(UpdateReport { grad_norm, control: sums, applied: is_applied })
    }

    /// Extends the error of a failed step: its parameters are lost, unless the overflow check had already stopped the
    /// update, as it does when the device finds a fault in the gradients.
    pub(crate) fn fail(&self, in_progress: &mut bool, error: Error) -> Error {
        if let Ok(StepOutcome { is_applied: false, .. }) = self.overflow_check.read() {
            *in_progress = false;
            return error;
        }
        self.updates.iter().for_each(|(param, _)| param.clear_value());
        let Some((first, _)) = self.updates.first() else { return error };
        let (first, count) = (first.name(), self.updates.len());
        error.detail(
            "lost",
            format!("{count} parameters, beginning with `{first}`, may belong to no step; {LOST_VALUE_HELP}"),
        )
    }
}

/// Returns the numbers that the host uploads for a step.
fn step_inputs(
    optim: &mut dyn Optimizer,
    updates: &[(Param, Tensor)],
    args: StepArgs<'_>,
) -> Result<StepInputs> {
    let StepArgs { lr, clip, control, loss_scale } = args;
    check_args(optim.num_steps() + 1, &args)?;
    let params: Vec<&Param> = updates.iter().map(|(param, _)| param).collect();
    let rates = optim.rates(&params, lr)?;
    Ok(StepInputs { clip, loss_scale, control: control.to_vec(), rates })
}

/// [`Optimizer::step`] of a dynamic optimizer. The sum of the loss, if there is one, comes before the control sums.
/// `in_progress` is true while parameters belong to no step.
#[track_caller]
pub(crate) fn step(
    optim: &mut dyn Optimizer,
    rank_and_params: (&Rank, &[Param]),
    gradients_and_loss: (Gradients, Option<PartialLoss>),
    args: StepArgs<'_>,
    in_progress: &mut bool,
) -> Result<UpdateReport> {
    let site = Location::caller();
    let mut update = OptimizerStep::new(optim, rank_and_params, gradients_and_loss, args)?;
    update.check_overflow(site)?;
    *in_progress = true;
    update.apply(optim).map_err(|error| update.fail(in_progress, error))?;
    update.finish(optim, in_progress)
}
