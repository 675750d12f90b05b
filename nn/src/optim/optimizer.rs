//! The `Optimizer` trait: an update rule, and a step with it for training loops without a trainer.

mod step;

pub(crate) use step::OptimizerStep;

use crate::module::Module;
use crate::module::param::Param;
use crate::sharded_model::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::{Error, Hyperparameters, Kind, OverflowCheck, Result, StepArgs, StepReport, Tensor};
use std::collections::HashSet;
use std::fmt;
use std::panic::Location;

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

/// Refuses to update a parameter without optimizer state: [`Optimizer::hyperparameters`] was not called for it.
pub(super) fn check_hyperparameters_requested(
    params: &[(&Param, Tensor)],
    has_state: impl Fn(&Param) -> bool,
) -> Result<()> {
    let Some((param, _)) = params.iter().find(|(param, _)| !has_state(param)) else { return Ok(()) };
    let text = format!("Optimizer::hyperparameters was not called for parameter `{}`", param.name());
    Err(Error::new(Kind::Config, text).detail(
        "help",
        "an optimizer that forwards `apply_update` to another must forward `hyperparameters` and `count_step` too",
    ))
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
    /// learning rate `lr`: one row of numbers for each parameter. All that differs from step to step belongs here.
    /// Allocates the state of new parameters here, not in [`Optimizer::apply_update`].
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "get_lr")]
    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        Ok(vec![vec![lr]; params.len()])
    }

    /// Updates the parameters that [`Optimizer::hyperparameters`] was called with, each by its gradient times the gradient
    /// scale of the step, if the step is to be applied. All parameters come in one call, so that one launch can
    /// update many. Each gradient has the layout of its stored parameter, and no parameter comes twice. A gradient is
    /// valid during this step only: the next replay of a captured step overwrites it, so a rule that needs the
    /// gradient later copies it ([`Tensor::static_copy`]).
    ///
    /// The host does not know yet whether the step is applied. A rule that passes the step on to an optimizer of this
    /// crate, with the parameters whose hyperparameters that optimizer returned ([`OverflowCheck::for_params`] splits a
    /// step), need not know. A rule made of tensor ops calls [`OverflowCheck::host_update`], for which the host waits; such
    /// an update is not captured, because a graph must not depend on values of one step. With graph capture this method
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

    /// Returns the state of a parameter, if [`Optimizer::hyperparameters`] was called for it and the rule has state. A captured
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

    /// Runs one optimizer step: gradient norm, overflow check, clipping and update. The update is skipped if the gradient
    /// norm, the loss or a control number is not finite. Costs one all-reduce over the whole mesh; every rank calls this
    /// together. Parameters without a gradient stay as they are.
    ///
    /// ```
    /// use shardgrad_nn::{AdamW, Linear, Model, Optimizer, Plan, StepArgs};
    /// use shardgrad_tensor::{Elementwise, Mesh, Reduction, Tensor, Value, World};
    /// # fn main() -> shardgrad_tensor::Result<()> {
    /// World::run(Mesh::single(), |rank| {
    ///     let model = Model::new(rank, Linear::new(2, 1), &Plan::new(), 1)?;
    ///     let mut optim = AdamW::new(0.1);
    ///     let tape = model.tape();
    ///     let x = tape.constant(Tensor::from_host(rank, &[1, 2], &[1.0f32, 2.0])?);
    ///     let loss = model.forward(&x).square().mean();
    ///     loss.backward()?;
    ///     // The report has the loss over all ranks, summed together with the gradient norm.
    ///     let losses = vec![loss.tensor().clone()];
    ///     let args = StepArgs { clip: Some(1.0), losses, ..StepArgs::new(0.01) };
    ///     let report = optim.step(&model, tape.gradients(), args)?;
    ///     assert_eq!(report.loss, loss.item()?);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Kind::Config`, before any communication, for a learning rate below 0, for a clip or loss scale that is not
    /// above 0, for NaN in any of them, for a loss divisor of 0, for gradients of parameters of another model, and as
    /// [`Optimizer::check_params`]. Errors of the collective and of the kernels.
    #[track_caller]
    fn step<M: Module>(
        &mut self,
        model: &Model<M>,
        gradients: Gradients,
        args: StepArgs,
    ) -> Result<StepReport>
    where
        Self: Sized,
    {
        let site = Location::caller();
        check_gradients_belong(model.params(), &gradients).map_err(|e| e.at(site))?;
        let mut step = OptimizerStep::new(self, (model.rank(), model.params()), gradients, args)?;
        step.check_overflow(site)?;
        step.apply(self, &mut false)
    }

    /// Runs one step with the optimizer's own learning rate and without clipping.
    ///
    /// # Errors
    /// `Kind::NotFinite` if the gradient norm is not finite (parameters are unchanged), and as [`Optimizer::step`].
    #[track_caller]
    fn update<M: Module>(&mut self, model: &Model<M>, gradients: Gradients) -> Result<StepReport>
    where
        Self: Sized,
    {
        let args = StepArgs::new(self.lr());
        let report = self.step(model, gradients, args)?;
        if !report.skipped {
            return Ok(report);
        }
        let text = format!("the gradient norm is {}; the update was not applied", report.grad_norm);
        Err(Error::new(Kind::NotFinite, text).detail("help", "try a smaller learning rate"))
    }
}
