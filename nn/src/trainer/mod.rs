//! The trainer. [`Trainer::step_with`] is a training step from top to bottom: learning rate, forward and backward of the
//! microbatches, all-reduce of the control word, overflow check and clipping, update, report; on a pipeline or not, captured or not.

mod row_leaves;
mod config;
mod forward_backward;
mod graph_capture;
mod not_finite;
mod consistency;
mod issue_order;
mod evaluation;
mod inference;
mod state;

pub use config::TrainerConfig;
pub use row_leaves::Deterministic;

use crate::loss::{Loss, LossForm};
use crate::module::Module;
use crate::module::param::Param;
use crate::optim::{LossScale, Optimizer};
use crate::pipelined_model::{PipelinedModel, PlannedStep, StageGathering};
use crate::plan::Plan;
use crate::sharded_model::Model;
use config::check_config;
use graph_capture::StepCapture;
use row_leaves::RowLeaves;
use shardgrad_autograd::Var;
use shardgrad_autograd::pipeline::{self, TimedAction};
use shardgrad_tensor::{ControlFlags, DType, Error, Kind, Rank, Result, StepArgs, StepReport, Tensor};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Loads the arguments of the loss: the rank on whose mesh the tensors are, the step, and the rows of the global
/// batch.
type LoadBatch<'t> = Box<dyn Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't>;
/// Computes the loss from a module and arguments.
type LossFn<'t, M> = Box<dyn Fn(&M, &[Var]) -> Loss + 't>;

/// A model in training on one rank, on any mesh. If the plan has a pipeline and the mesh has its axis, the model is
/// recorded and cut into stages, and this rank holds the parameters of its own stage only.
///
/// Every rank constructs its trainer with equal arguments and calls [`Trainer::step`] together with the other ranks.
pub struct Trainer<'t, M> {
    model: Model<M>,
    optim: Box<dyn Optimizer + 't>,
    config: TrainerConfig,
    load_batch: LoadBatch<'t>,
    loss_fn: LossFn<'t, M>,
    /// The stages, and the form of the recorded loss.
    pipelined: Option<(PipelinedModel, LossForm)>,
    /// The leaves of rows, if sums do not depend on the mesh.
    leaves: Option<RowLeaves>,
    capture: StepCapture,
    loss_scale: Option<LossScale>,
    step: u64,
    /// Step before the first update by this trainer. While `step` equals `first_step`, no update has changed the
    /// parameters.
    first_step: u64,
    /// Which parameters were frozen when the issue order of the passes was last proved.
    proved_frozen: Option<Vec<bool>>,
    /// Whether an update has begun and not finished: the parameters may then belong to no step.
    update_in_progress: bool,
    passes: RefCell<Vec<TimedAction>>,
    /// Caller of the last step, for errors.
    site: &'static Location<'static>,
}

impl<'t, M: Module> Trainer<'t, M> {
    /// Creates a trainer: distributes the parameters of `module` over the mesh as `plan` says.
    ///
    /// - `load_batch` returns the arguments of `loss` for a range of rows of the global batch of a step: tensors on the
    ///   rank that `load_batch` receives, split as [`Plan::batch_layout`] says.
    /// - `loss` returns a scalar that is a mean over rows, or a [`Loss`]: a sum with a count where rows or tokens count
    ///   unequally (ignored labels, padding, weights), and auxiliary outputs for the report. Neither `load_batch` nor
    ///   `loss` may depend on the mesh.
    /// - `optim` is any [`Optimizer`], constructed with equal arguments on every rank.
    ///
    /// On a pipeline, `loss` runs once for each combination of argument shapes, and every step replays its recorded
    /// ops. Values that change from step to step must come in through `load_batch`: what `loss` computes outside of ops
    /// (counters, numbers drawn from a key of the caller) keeps the value of the recording. Dropout and other layers
    /// still draw new random numbers in each step.
    ///
    /// # Errors
    /// As [`Model::new`] and [`Deterministic::row_ranges`]; `Kind::Config` if the microbatches do not divide the rows, if `clip` is not above 0, if the
    /// model cannot be cut for the pipeline, and as [`Optimizer::check_params`]; `Kind::DType` on a pipeline for a
    /// loss of 16 bits, which [`Trainer::step`] refuses elsewhere; errors of `load_batch`.
    #[track_caller]
    pub fn new<L: Into<Loss>>(
        rank: &Rank,
        module: M,
        plan: &Plan,
        optim: impl Optimizer + 't,
        config: TrainerConfig,
        load_batch: impl Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't,
        loss: impl Fn(&M, &[Var]) -> L + 't,
    ) -> Result<Trainer<'t, M>> {
        let loss_fn: LossFn<'t, M> = Box::new(move |module, arguments| loss(module, arguments).into());
        Trainer::with_boxed(rank, module, plan, Box::new(optim), config, Box::new(load_batch), loss_fn)
    }

    /// [`Trainer::new`], compiled for each module, not for each optimizer and function.
    #[track_caller]
    fn with_boxed(
        rank: &Rank,
        module: M,
        plan: &Plan,
        optim: Box<dyn Optimizer + 't>,
        config: TrainerConfig,
        load_batch: LoadBatch<'t>,
        loss_fn: LossFn<'t, M>,
    ) -> Result<Trainer<'t, M>> {
        check_config(&config)?;
        let precision = config.precision();
        let leaves = RowLeaves::new(config.deterministic, rank, plan, [config.rows, config.microbatches])?;
        let pipeline = plan.pipeline_on(rank.mesh());
        let stage_rank = pipeline.map_or_else(|| rank.clone(), |(_, axis)| rank.slice(axis));
        let pass_rank = leaves.as_ref().map(|leaves| leaves.pass_rank(&stage_rank));
        let model = Model::with_passes_on(&stage_rank, pass_rank, module, plan, precision)?;
        let sum_tree = leaves.as_ref().map(|leaves| leaves.set_sum_tree(model.pass_rank()));
        let pipelined = match pipeline {
            None => {
                model.params().iter().try_for_each(|param| param.init_value(rank, config.seed, None))?;
                None
            }
            Some((pipeline, axis)) => {
                let (microbatches, rows) = match &leaves {
                    Some(leaves) => (leaves.num_passes(), leaves.rows(0)),
                    None => (config.microbatches, 0..config.rows / config.microbatches),
                };
                let num_rows = rows.len();
                let (first, recorded) = (load_batch(model.pass_rank(), 0, rows)?, Cell::new(None));
                let forward = |arguments: &[Var]| {
                    let (form, vars) = loss_fn(&model, arguments).check_dtype()?.into_vars();
                    recorded.set(Some(form.or_count_max(num_rows)));
                    Ok(vars)
                };
                let optimizer_bytes = |param: &Param| optimizer_bytes(&*optim, param, &stage_rank);
                let step = PlannedStep {
                    num_microbatches: microbatches,
                    arguments: &first,
                    rank_memory_bytes: config.rank_memory_bytes,
                    optimizer_bytes: &optimizer_bytes,
                };
                let pipelined = PipelinedModel::new(&model, pipeline, axis, config.seed, &step, &forward)?;
                let form = recorded.take().expect("the loss was recorded");
                Some((pipelined, form))
            }
        };
        drop(sum_tree);
        leaves.as_ref().map_or(Ok(()), |leaves| leaves.check_params(model.params()))?;
        optim.check_params(model.params())?;
        let loss_scale = (config.dtype == DType::F16).then(LossScale::default);
        let capture = match &pipelined {
            Some(_) => StepCapture::disabled(Error::new(
                Kind::Unsupported,
                "graph capture does not support pipelines",
            )),
            None if leaves.is_some() => StepCapture::disabled(Error::new(
                Kind::Unsupported,
                "graph capture does not support sums that are independent of the mesh",
            )),
            None if rank.mesh().num_ranks() > 1 => StepCapture::disabled(Error::new(
                Kind::Unsupported,
                "graph capture supports a world of one rank only",
            )),
            None => StepCapture::default(),
        };
        Ok(Trainer {
            model,
            optim,
            config,
            load_batch,
            loss_fn,
            pipelined,
            leaves,
            capture,
            loss_scale,
            step: 0,
            first_step: 0,
            proved_frozen: None,
            update_in_progress: false,
            passes: RefCell::default(),
            site: Location::caller(),
        })
    }

    /// Returns the model; on a pipeline it has the parameters of this rank's stage only.
    #[must_use]
    pub fn model(&self) -> &Model<M> {
        &self.model
    }

    /// Returns the optimizer.
    #[must_use]
    pub fn optim(&self) -> &(dyn Optimizer + 't) {
        &*self.optim
    }

    /// Returns the state of loss scaling for the next step; `None` unless the compute dtype is f16.
    #[must_use]
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale
    }

    /// Returns the pipeline schedule of the trainer, transfers included; `None` without a pipeline.
    #[must_use]
    pub fn pipeline_schedule(&self) -> Option<&pipeline::Schedule> {
        self.pipelined.as_ref().map(|(pipelined, _)| pipelined.schedule())
    }

    /// Whether the pipeline stages of this rank gather parameters by microbatch ([`Plan::gathered_bytes_max`]), rather than once per
    /// step; false without a pipeline.
    #[must_use]
    pub fn gathers_by_microbatch(&self) -> bool {
        self.pipelined.as_ref().is_some_and(|(pipelined, _)| pipelined.gathers_by_microbatch())
    }

    /// Returns how the stages of each pipeline rank gather parameters that stage 3 of ZeRO stores as shards, and why; in a dry run those of
    /// this rank alone. Empty without such parameters, without a pipeline, and where sums do not depend on the mesh and the plan has no
    /// bound.
    #[must_use]
    pub fn stage_gatherings(&self) -> &[StageGathering] {
        self.pipelined.as_ref().map_or(&[][..], |(pipelined, _)| pipelined.gatherings())
    }

    /// Returns the index of the first op of each pipeline stage, and the path of that op in the model.
    #[must_use]
    pub fn stage_starts(&self) -> Vec<(usize, Rc<str>)> {
        self.pipelined.as_ref().map_or_else(Vec::new, |(pipelined, _)| pipelined.stage_starts())
    }

    /// Returns why passes or updates are not captured as graphs: the first refusal. `None` if they are captured, or
    /// if [`TrainerConfig::capture`] is off.
    #[must_use]
    pub fn capture_refusal(&self) -> Option<&Error> {
        self.capture.refusal().filter(|_| self.config.capture)
    }

    /// Returns the timed actions of this rank in the last step: forward and backward passes, and transfers between
    /// stages. Empty after a step that replayed a graph.
    #[must_use]
    pub fn passes(&self) -> Vec<TimedAction> {
        self.passes.borrow().clone()
    }

    /// Returns the rank on whose mesh arguments must be: without the pipeline axis, if there is one, and without the axes that shard
    /// rows if sums do not depend on the mesh ([`Deterministic::Mesh`]).
    #[must_use]
    pub fn rank(&self) -> &Rank {
        self.model.pass_rank()
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Runs one training step without control flags: [`Trainer::step_with`].
    ///
    /// # Errors
    /// As [`Trainer::step_with`].
    #[doc(alias = "training_step")]
    #[doc(alias = "train_step")]
    #[track_caller]
    pub fn step(&mut self) -> Result<StepReport> {
        self.step_with(ControlFlags::new())
    }

    /// Runs one training step: forward, backward, gradient norm, clipping and update, then the rules of parameters that follow the report
    /// ([`Param::after_step`](crate::Param::after_step)). The numbers of `control` are
    /// summed over all ranks in the same all-reduce as the gradient norm; every rank passes the same names.
    ///
    /// ```
    /// use shardgrad_nn::{AdamW, ControlFlags, Linear, Plan, Trainer, TrainerConfig};
    /// use shardgrad_tensor::{Elementwise, Mesh, Reduction, Tensor, Value, World};
    /// # fn main() -> shardgrad_tensor::Result<()> {
    /// World::run(Mesh::single(), |rank| {
    ///     let (plan, config) = (Plan::new(), TrainerConfig::new(4));
    ///     let read = |rank: &_, _, _| Ok(vec![Tensor::from_host(rank, &[4, 1], &[1.0f32, 2.0, 3.0, 4.0])?]);
    ///     let loss = |model: &Linear, x: &[_]| model.forward(&x[0]).square().mean();
    ///     let mut trainer = Trainer::new(rank, Linear::new(1, 1), &plan, AdamW::new(0.1), config, read, loss)?;
    ///     for step in 0..100 {
    ///         // A request to stop on any rank stops all ranks after this step.
    ///         let report = trainer.step_with(ControlFlags::new().flag("stop", step == 5))?;
    ///         if report.control.is_set("stop") {
    ///             break;
    ///         }
    ///     }
    ///     assert_eq!(trainer.state().step, 6);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Kind::NotFinite` on every rank, before the update, if the loss, a gradient or a control number is not finite.
    /// With a loss scale above 1, gradients that are not finite only skip the update and halve the scale.
    /// `Kind::DType` for a loss of 16 bits. `Kind::Config` as [`Optimizer::step`]. `Kind::Collective` before the first step for
    /// collectives without a common order ([`TrainerConfig::proves_issue_order`]). Errors of ops, of `load_batch` and of collectives.
    #[track_caller]
    pub fn step_with(&mut self, control: ControlFlags) -> Result<StepReport> {
        self.site = Location::caller();
        let scheduled = self.config.lr_scheduler.as_ref().map(|schedule| schedule.lr(self.step as usize));
        let lr = scheduled.unwrap_or_else(|| self.optim.lr());
        let loss_scale = self.loss_scale.map(LossScale::factor);
        let TrainerConfig { clip, copies_checked_every, .. } = self.config;
        let norm_leaves = self.leaves.as_ref().map(RowLeaves::norm_leaves);
        let args = StepArgs { clip, control, copies_checked_every, norm_leaves, ..StepArgs::new(lr) };

        self.prove_issue_order()?;
        let pass = self.forward_backward()?;
        // Inputs are uploaded before a captured pass runs, so that nothing comes between pass and update.
        let mut update = self.prepare_update(pass, args)?;
        self.capture.replay_pass()?;
        update.check_overflow(self.site)?;
        let report = update.apply(&mut *self.optim, &mut self.update_in_progress)?;
        // The step divides the gradients of a sum by a bound of the count too.
        let report = StepReport { loss_scale, ..report };
        self.capture.keep_update(update);
        if !report.skipped {
            self.update_in_progress = true;
            self.model.params().iter().try_for_each(|param| param.apply_step_rule(&report))?;
            self.update_in_progress = false;
        }

        if report.skipped {
            self.check_smaller_loss_scale_helps(&report)?;
        }
        self.loss_scale = self.loss_scale.map(|scale| scale.after_step(!report.skipped));
        self.step += 1;
        Ok(report)
    }

    /// Returns the factor on the loss, and so on all gradients: the loss scale, or 1.
    fn loss_factor(&self) -> f64 {
        self.loss_scale.map_or(1.0, LossScale::factor)
    }
}

/// Returns the bytes of the optimizer state of a parameter on a rank.
fn optimizer_bytes(optim: &dyn Optimizer, param: &Param, rank: &Rank) -> u64 {
    let num_tensors = optim.state_names(param).map_or(0, |names| names.len());
    let layout = param.layout();
    let numel: usize = layout.local_shape(rank.coordinates()).iter().product();
    (num_tensors * numel * layout.dtype().accumulator().size()) as u64
}

impl<M> fmt::Debug for Trainer<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trainer(step {}, {:?})", self.step, self.config)
    }
}
