//! The `Optimizer` trait: an update rule, and a step with it for training loops without a trainer.

mod step;

pub(crate) use step::OptimizerStep;

use super::matrices::{self, Matrix};
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

/// Refuses a step without any gradient: the update would do nothing, unnoticed.
fn check_has_gradients(params: &[Param], gradients: &Gradients) -> Result<()> {
    let num_trained = params.iter().filter(|param| param.is_local() && !param.is_frozen()).count();
    if num_trained == 0 || !gradients.is_empty() {
        return Ok(());
    }
    let text =
        format!("none of the {num_trained} trained parameters has a gradient: the step would change nothing");
    Err(Error::new(Kind::Config, text).detail(
        "help",
        "call `loss.backward()` before `tape.gradients()`, on the tape of the loss; the tape returns its gradients once",
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

/// An update rule: changes parameters by their gradients. The rule sees local tensors: parameters are stored as
/// shards and equal copies, and each gradient has the layout of its parameter. A rule that needs whole matrices asks
/// for them ([`Optimizer::map_matrices`]). Every rank has an optimizer of its own and steps it together with the
/// other ranks.
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

    /// Returns the names of the tensors of [`Optimizer::param_state`] of a parameter in a checkpoint, in their order; empty for
    /// a rule without state. An optimizer that returns `None`, or cannot load state, cannot be saved
    /// ([`checkpoint`](crate::checkpoint)).
    fn state_names(&self, _param: &Param) -> Option<Vec<&'static str>> {
        None
    }

    /// Returns the number of the group in which a parameter is updated: [`Optimizer::apply_update`] gets the parameters sorted
    /// by it, so that a rule that hands groups to other rules hands on each in one call ([`OverflowCheck::for_params`]).
    fn update_group(&self, _param: &Param) -> usize {
        0
    }

    /// Applies a function to the whole matrices of tensors that are laid out as their parameters, and returns the results
    /// in the layouts of the parameters. Each matrix is gathered to one rank, which alone calls `rule` for it, on any
    /// mesh, under any sharding; the results go back to all shards and copies, so copies stay equal. Each result has the
    /// shape and dtype of its matrix.
    ///
    /// The file shape of a parameter decides ([`Param::file_shape`]): the last two dims are the rows and columns of a
    /// matrix, dims before them count matrices (experts). The weights of attention heads are one matrix. The ranks of the
    /// mesh have nearly equal work, by the FLOPs of the product of a matrix with its own transpose. Costs two all-to-alls
    /// for all tensors together ([`MatrixOwners`](shardgrad_tensor::training_step::matrix_owners::MatrixOwners) states the
    /// bytes), none on one rank. A collective call: every rank of a pipeline stage passes the same parameters.
    ///
    /// An own optimizer that divides each gradient by its norm as a matrix:
    ///
    /// ```
    /// use shardgrad_nn::optim::OverflowCheck;
    /// use shardgrad_nn::{Linear, Model, Optimizer, Param, Plan};
    /// use shardgrad_tensor::{Mesh, Result, Tensor, Value, World};
    ///
    /// #[derive(Debug, Default)]
    /// struct Normalized(u64);
    ///
    /// impl Optimizer for Normalized {
    ///     fn lr(&self) -> f64 { 0.5 }
    ///     fn describe(&self) -> String { format!("normalized after {} steps", self.0) }
    ///     fn num_steps(&self) -> u64 { self.0 }
    ///     fn count_step(&mut self, _: &[&Param]) { self.0 += 1 }
    ///
    ///     fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
    ///         let Some((rows, _)) = step.host_update()? else { return Ok(()) };
    ///         let directions = self.map_matrices(params, &mut |matrix| {
    ///             let norm = matrix.value.sum_squares().sqrt().cast(matrix.value.dtype());
    ///             Ok(matrix.value.div(&norm))
    ///         })?;
    ///         params.iter().zip(directions).zip(rows).try_for_each(|(((param, _), direction), row)| {
    ///             param.set_tensor(param.tensor().sub(&direction.scale(row[0])))
    ///         })
    ///     }
    /// }
    ///
    /// let plan = Plan::new().store("weight", "tp@1");
    /// World::run(Mesh::parse("tp=2")?, |rank| {
    ///     let model = Model::new(rank, Linear::new(3, 4).without_bias(), &plan, 1)?;
    ///     let before = model.param("weight")?.tensor();
    ///     let tape = model.tape();
    ///     model.forward(&tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32, 2.0, 3.0])?)).sum().backward()?;
    ///     Normalized::default().update(&model, tape.gradients())?;
    ///     let moved = model.param("weight")?.tensor().sub(&before).sum_squares().item()?;
    ///     assert!((moved - 0.25).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardgrad_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Kind::Shape` naming a parameter that is no matrix in files, or for a result of another shape; `Kind::DType` for
    /// tensors of several dtypes; errors of `rule` and of the collectives.
    #[doc(alias = "full_tensor")]
    #[track_caller]
    fn map_matrices(
        &self,
        params: &[(&Param, Tensor)],
        rule: &mut dyn FnMut(Matrix<'_>) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        matrices::map_matrices(params, rule)
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
    /// The first update of a model, and every 100th ([`StepArgs::copies_checked_every`]), first compares the copies of loss,
    /// gradients and parameters bit for bit: ranks that computed with different data where the plan calls their work copies
    /// are an error before any parameter changes. Such a check reads gradients and parameters once, and costs one all-gather
    /// of 16 bytes per parameter.
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
    /// above 0, for NaN in any of them, for a loss divisor of 0, for gradients of parameters of another model, without any gradient,
    /// while averages are in place of parameters ([`Ema::swap_in`](crate::Ema::swap_in)), and as
    /// [`Optimizer::check_params`]. `Kind::Diverged` for copies that differ between ranks. Errors of the collective and of the kernels.
    #[track_caller]
    fn step<M: Module>(
        &mut self,
        model: &Model<M>,
        gradients: Gradients,
        mut args: StepArgs,
    ) -> Result<StepReport>
    where
        Self: Sized,
    {
        let site = Location::caller();
        check_gradients_belong(model.params(), &gradients).map_err(|e| e.at(site))?;
        let has_gradients = check_has_gradients(model.params(), &gradients);
        // Without losses of any rank, their sum would pass for a loss of 0.
        let num_flags = args.control.iter().count();
        args.control = args.control.flag("has losses", !args.losses.is_empty());
        let mut step = OptimizerStep::new(self, (model.rank(), model.params()), gradients, args, site)?;
        has_gradients.map_err(|e| e.at(site))?;
        step.check_overflow(site)?;
        let report = step.apply(self, &mut false)?;
        let (control, has_losses) = report.control.split_at(num_flags);
        let loss = if has_losses.is_set("has losses") { report.loss } else { f64::NAN };
        Ok(StepReport { loss, control, ..report })
    }

    /// Runs one step with the optimizer's own learning rate and without clipping. The loss of the report is NaN, because it is not passed;
    /// read it with `loss.item()`, or pass it to [`Optimizer::step`].
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
