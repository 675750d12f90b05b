//! The trainer: one training step is forward and backward of all microbatches, the global gradient norm, and the
//! optimizer's update; on a pipeline the microbatches follow its schedule.

mod not_finite;
mod state;

use crate::checkpoint::{WeightSnapshot, check_parameters};
use crate::graph_capture::{PassOutputs, StepCapture};
use crate::module::Module;
use crate::module::precision::Precision;
use crate::optim::{self, LossScale, LrScheduler, Optimizer, PartialLoss, StepArgs, UpdateReport};
use crate::pipelined_model::{self, PipelinedModel};
use crate::plan::Plan;
use crate::sharded_model::Model;
use shardgrad_autograd::pipeline::{self, Action, TimedAction};
use shardgrad_autograd::{Gradients, Noise, OpRecord, Program, Var};
use shardgrad_tensor::training_step::consistency::{check_consistent, check_replicas};
use shardgrad_tensor::{DType, Error, Kind, Layout, Rank, Result, Tensor, Value};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;
use std::time::Instant;

/// Configuration of a [`Trainer`]: besides model, data and optimizer, all that decides the numbers of a run.
#[doc(alias = "TrainingArguments")]
#[derive(Clone, Debug)]
pub struct TrainerConfig {
    /// Rows (samples) of the global batch.
    pub rows: usize,
    /// Number of microbatches into which the batch is cut (gradient accumulation steps); it must divide `rows`.
    #[doc(alias = "gradient accumulation")]
    #[doc(alias = "gradient_accumulation_steps")]
    pub microbatches: usize,
    /// Seed of the initial parameter values and of random ops such as dropout.
    pub seed: u64,
    /// Compute dtype. With f16 the loss is scaled ([`LossScale`]).
    #[doc(alias = "amp")]
    #[doc(alias = "mixed precision")]
    #[doc(alias = "autocast")]
    pub dtype: DType,
    /// Dtype of the stored parameters; `None` selects the accumulator dtype of `dtype`: f32 for bf16 and f16.
    pub param_dtype: Option<DType>,
    /// Learning-rate schedule; `None` uses the optimizer's constant rate.
    pub lr_scheduler: Option<LrScheduler>,
    /// Largest global gradient norm, above 0: larger gradients are scaled down to this norm. `None` does not clip.
    #[doc(alias = "max_grad_norm")]
    #[doc(alias = "clip_by_global_norm")]
    #[doc(alias = "clip_grad_norm_")]
    pub clip: Option<f64>,
    /// Whether the first step is captured as a graph and later steps replay the graph, with the same bits.
    ///
    /// Capture needs a world of one rank, no pipeline, and a device that supports graph capture;
    /// [`Trainer::capture_refusal`] reports why a trainer does not capture. A replayed step enqueues all work from
    /// forward to update at once, and the host waits once, at the end.
    ///
    /// - Values that change from step to step must come in through `load_batch`, as on a pipeline ([`Trainer::new`]), or be
    ///   learning rates or control numbers. The loss closure runs only while its pass is captured: what the closure
    ///   computes outside of ops, and tensors that the closure reads which are neither arguments nor parameters, keep
    ///   the values of that step.
    /// - The step is captured again when arguments, parameters or optimizer state are at other addresses, or when the
    ///   loss scale or the set of frozen parameters changes.
    /// - A loss that draws random numbers of the step, or reads from the device to the host, runs in each step
    ///   without a graph; so does an update that does ([`Optimizer::apply_update`]).
    /// - A captured step keeps its memory until [`Trainer::partial_loss`] is called. The next step overwrites the
    ///   losses and gradients of a captured step.
    #[doc(alias = "torch.cuda.graph")]
    #[doc(alias = "CUDA graph")]
    pub capture: bool,
}

impl TrainerConfig {
    /// Returns the defaults for a batch of `rows` rows: one microbatch, seed 0, f32, the optimizer's own learning
    /// rate, no clipping, no graph capture.
    #[must_use]
    pub fn new(rows: usize) -> TrainerConfig {
        let (dtype, param_dtype) = (DType::F32, None);
        let (lr_scheduler, clip, capture) = (None, None, false);
        TrainerConfig { rows, microbatches: 1, seed: 0, dtype, param_dtype, lr_scheduler, clip, capture }
    }

    /// Returns the compute dtype and the dtype of the stored parameters.
    #[must_use]
    pub fn precision(&self) -> Precision {
        let param_dtype = self.param_dtype.unwrap_or(Precision::mixed(self.dtype).param_dtype);
        Precision { dtype: self.dtype, param_dtype }
    }
}

/// Result of one training step; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean of the loss over the microbatches.
    pub loss: f64,
    /// Global gradient norm before clipping; not finite if the step was skipped.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Loss scale of the step: the factor on the loss before its backward pass. `None` without loss scaling.
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped because a gradient of the scaled loss overflowed.
    pub skipped: bool,
    /// The caller's control numbers, each summed over all ranks.
    pub control: Vec<f64>,
}

/// Loads the arguments of the loss: the rank on whose mesh the tensors are, the step, and the rows of the global
/// batch.
type LoadBatch<'t> = Box<dyn Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't>;
/// Computes the loss from a module and arguments.
type LossFn<'t, M> = Box<dyn Fn(&M, &[Var]) -> Var + 't>;

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
    pipelined: Option<PipelinedModel>,
    capture: StepCapture,
    loss_scale: Option<LossScale>,
    step: u64,
    /// Step before the first update by this trainer. While `step` equals `first_step`, no update has changed the
    /// parameters.
    first_step: u64,
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
    /// - `loss` returns a scalar: a mean over rows. Where rows have unequal weights, divide a sum by the count of the
    ///   whole step, which `load_batch` passes as an argument. Neither `load_batch` nor `loss` may depend on the mesh.
    /// - `optim` is any [`Optimizer`], constructed with equal arguments on every rank.
    ///
    /// On a pipeline, `loss` runs once for each combination of argument shapes, and every step replays its recorded
    /// ops. Values that change from step to step must come in through `load_batch`: what `loss` computes outside of ops
    /// (counters, numbers drawn from a key of the caller) keeps the value of the recording. Dropout and other layers
    /// still draw new random numbers in each step.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::Config` if the microbatches do not divide the rows, if `clip` is not above 0, if the
    /// model cannot be cut for the pipeline, and as [`Optimizer::check_params`]; `Kind::DType` on a pipeline for a
    /// loss of 16 bits, which [`Trainer::step`] refuses elsewhere; errors of `load_batch`.
    #[track_caller]
    pub fn new(
        rank: &Rank,
        module: M,
        plan: &Plan,
        optim: impl Optimizer + 't,
        config: TrainerConfig,
        load_batch: impl Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't,
        loss: impl Fn(&M, &[Var]) -> Var + 't,
    ) -> Result<Trainer<'t, M>> {
        check_config(&config)?;
        let precision = config.precision();
        let (model, pipelined) = match plan.pipeline_on(rank.mesh()) {
            None => (Model::with_precision(rank, module, plan, config.seed, precision)?, None),
            Some((pipeline, axis)) => {
                let model = pipelined_model::stage_model(rank, axis, module, plan, precision)?;
                let first = load_batch(model.rank(), 0, 0..config.rows / config.microbatches)?;
                let (seed, microbatches) = (config.seed, config.microbatches);
                let forward = |arguments: &[Var]| Ok(vec![check_loss_dtype(loss(&model, arguments))?]);
                let pipelined =
                    PipelinedModel::new(&model, pipeline, axis, seed, microbatches, &first, &forward)?;
                (model, Some(pipelined))
            }
        };
        optim.check_params(model.params())?;
        let (load_batch, loss_fn) = (Box::new(load_batch), Box::new(loss));
        let loss_scale = (config.dtype == DType::F16).then(LossScale::default);
        let capture = match &pipelined {
            Some(_) => StepCapture::disabled(Error::new(
                Kind::Unsupported,
                "graph capture does not support pipelines",
            )),
            None if rank.mesh().num_ranks() > 1 => StepCapture::disabled(Error::new(
                Kind::Unsupported,
                "graph capture supports a world of one rank only",
            )),
            None => StepCapture::default(),
        };
        let (optim, passes) = (Box::new(optim), RefCell::default());
        Ok(Trainer {
            model,
            optim,
            config,
            load_batch,
            loss_fn,
            pipelined,
            capture,
            loss_scale,
            step: 0,
            first_step: 0,
            update_in_progress: false,
            passes,
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
        self.pipelined.as_ref().map(PipelinedModel::schedule)
    }

    /// Returns the index of the first op of each pipeline stage, and the path of that op in the model.
    #[must_use]
    pub fn stage_starts(&self) -> Vec<(usize, Rc<str>)> {
        self.pipelined.as_ref().map_or_else(Vec::new, PipelinedModel::stage_starts)
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

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Runs one training step: forward, backward, gradient norm, clipping and update. The numbers of `control` are
    /// summed over all ranks in the same all-reduce as the gradient norm.
    ///
    /// # Errors
    /// `Kind::NotFinite` on every rank, before the update, if the loss, a gradient or a control sum is not finite.
    /// With a loss scale above 1, gradients that are not finite only skip the update and halve the scale.
    /// `Kind::DType` for a loss of 16 bits. `Kind::Config` as [`Optimizer::step`]. Errors of ops, of `load_batch` and of
    /// collectives.
    #[doc(alias = "training_step")]
    #[doc(alias = "train_step")]
    #[track_caller]
    pub fn step(&mut self, control: &[f64]) -> Result<StepReport> {
        self.site = Location::caller();
        let step = self.step;
        let lr = self.config.lr_scheduler.as_ref().map_or_else(|| self.optim.lr(), |s| s.lr(step as usize));
        let args = StepArgs { lr, clip: self.config.clip, control, loss_scale: self.loss_factor() };
        let report = match self.config.capture && self.capture.is_enabled() {
            true => self.replay_step(args)?,
            false => self.apply_optimizer(self.gradients()?, args)?,
        };
        let mut control = report.control;
        let loss = control.remove(0);
        let finite = loss.is_finite() && control.iter().all(|x| x.is_finite());
        let skipped = !report.applied && finite && self.loss_scale.is_some_and(LossScale::can_decrease);
        if !report.applied && !skipped {
            let non_finite = control.iter().position(|x| !x.is_finite()).filter(|_| loss.is_finite());
            if let Some(i) = non_finite.filter(|_| report.grad_norm.is_finite()) {
                let (step, sum) = (step + 1, control[i]);
                let text = format!(
                    "step {step}: control number {i} sums to {sum} over all ranks; the update was not applied"
                );
                return Err(Error::new(Kind::NotFinite, text)
                    .detail("help", "loss and gradients are finite: check the `control` argument of Trainer::step on each rank"));
            }
            return Err(self.explain_not_finite(loss, report.grad_norm));
        }
        let loss_scale = self.loss_scale.map(LossScale::factor);
        self.loss_scale = self.loss_scale.map(|scale| scale.after_step(!skipped));
        self.step += 1;
        Ok(StepReport { step, loss, grad_norm: report.grad_norm, lr, loss_scale, skipped, control })
    }

    /// Returns a snapshot of this rank's weights after the last complete step, for use after the world has failed.
    /// Call it on each rank: if all snapshots are of one step, [`WeightSnapshot::model`] rebuilds the model in
    /// another world. Nothing is communicated.
    ///
    /// # Errors
    /// `Kind::Unsupported` if an update had begun and not finished: the weights then belong to no step. Errors of the
    /// device.
    pub fn rescue(&self) -> Result<WeightSnapshot> {
        if self.update_in_progress {
            let text = format!(
                "the update of step {} had begun and did not finish: the weights belong to no step",
                self.step + 1
            );
            return Err(Error::new(Kind::Unsupported, text).detail("rank", self.rank().describe()));
        }
        WeightSnapshot::from_model(&self.model, self.step)
    }

    /// Returns the factor on the loss, and so on all gradients: the loss scale, or 1.
    fn loss_factor(&self) -> f64 {
        self.loss_scale.map_or(1.0, LossScale::factor)
    }

    /// Verifies that all ranks agree: on configuration, optimizer, step, loss scale, number and layouts of the
    /// arguments of the loss; bit for bit on the copies of parameters and of the arguments of the next step; and on
    /// the parameter names of a stage.
    ///
    /// Call it on every rank at the start and at intervals: the collectives of a step do not compare what tensors
    /// contain. It costs three small collectives, and one more if stages share a parameter.
    ///
    /// # Errors
    /// `Kind::Diverged` on every rank, naming what differs; errors of `load_batch` and of the collectives.
    #[track_caller]
    pub fn check_consistent(&self) -> Result<()> {
        let site = Location::caller();
        let arguments = self.load_microbatch(0)?;
        let layouts: Vec<String> = arguments.iter().map(|t| t.layout().to_string()).collect();
        let values = [
            ("settings", format!("{:?}", self.config)),
            ("optimizer", self.optim.describe()),
            ("step", self.step.to_string()),
            ("loss scale", format!("{:?}", self.loss_scale)),
            ("arguments of the loss", format!("{}, {}", layouts.len(), layouts.join(", "))),
        ];
        check_consistent(self.rank(), &values, site)?;
        check_parameters(&self.model, site)?;
        let names: Vec<String> = (0..arguments.len()).map(|i| format!("argument {i} of the loss")).collect();
        let arguments: Vec<_> = names.iter().map(String::as_str).zip(&arguments).collect();
        check_replicas(self.rank(), &arguments, site)
    }

    /// Evaluates this rank's partial loss on arguments that are on the mesh of [`Trainer::rank`]. The sum over all
    /// ranks ([`world_sum`](shardgrad_tensor::training_step::control::world_sum)) is the loss. Dropout is off and no gradient is
    /// recorded. Releases the memory of a captured step, which is captured again later.
    ///
    /// # Errors
    /// Errors of ops and collectives.
    #[doc(alias = "no_grad")]
    #[doc(alias = "evaluate")]
    #[doc(alias = "eval")]
    pub fn partial_loss(&self, arguments: &[Tensor]) -> Result<f64> {
        self.capture.clear();
        let loss = match &self.pipelined {
            None => {
                let tape = self.model.inference_tape();
                let arguments: Vec<Var> = arguments.iter().map(|t| tape.constant(t.clone())).collect();
                Some((self.loss_fn)(&self.model, &arguments).tensor().clone())
            }
            Some(pipelined) => {
                let forward = |arguments: &[Var]| Ok(vec![(self.loss_fn)(&self.model, arguments)]);
                pipelined.forward_step(&self.model, arguments, &forward)?
            }
        };
        loss.map_or(Ok(0.0), |loss| loss.local_contribution())
    }

    /// Returns the path in the model and the layout of the first result of each op of this rank in a forward pass, in
    /// order. Computes nothing.
    ///
    /// # Errors
    /// Errors of `load_batch` and of the model.
    pub fn forward_layouts(&self) -> Result<Vec<(Rc<str>, Layout)>> {
        let path_and_layout = |r: &OpRecord| Some((r.path.clone(), r.outputs.first()?.clone()));
        if let Some(pipelined) = &self.pipelined {
            return Ok(pipelined.records(self.model.rank()).iter().filter_map(path_and_layout).collect());
        }
        let layouts: Vec<Layout> = self.load_microbatch(0)?.iter().map(|t| t.layout().clone()).collect();
        let forward = |arguments: &[Var]| Ok(vec![(self.loss_fn)(&self.model, arguments)]);
        let program = Program::record(self.model.rank(), &layouts, None, forward)?;
        Ok(program.records.iter().filter_map(path_and_layout).collect())
    }

    /// Returns the rank on whose mesh arguments must be: without the pipeline axis, if there is one.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        self.model.rank()
    }

    /// Runs forward and backward of all microbatches. Returns the terms of this rank's partial loss, and the
    /// gradients of its parameters times the loss scale.
    fn gradients(&self) -> Result<(PartialLoss, Gradients)> {
        let load = |microbatch: usize| self.load_microbatch(microbatch);
        if let Some(pipelined) = &self.pipelined {
            let noise = |microbatch: usize| self.noise(microbatch);
            let outputs = pipelined.train_step(&self.model, &load, &noise, self.loss_factor())?;
            *self.passes.borrow_mut() = outputs.passes;
            let tensors = outputs.results.into_iter().flatten().flatten().collect();
            return Ok((PartialLoss { tensors, count: self.config.microbatches }, outputs.gradients));
        }
        Ok(self.forward_backward(load)?.into_loss_and_gradients())
    }

    /// Applies the optimizer to the gradients of a step.
    #[track_caller]
    fn apply_optimizer(
        &mut self,
        (loss, gradients): (PartialLoss, Gradients),
        args: StepArgs<'_>,
    ) -> Result<UpdateReport> {
        let Trainer { model, optim, update_in_progress, .. } = self;
        let rank_and_params = (model.rank(), model.params());
        optim::step(&mut **optim, rank_and_params, (gradients, Some(loss)), args, update_in_progress)
    }

    /// Runs a step by replaying captured graphs, as far as pass and update can be captured. The losses and gradients
    /// of the step are released when this function returns.
    #[track_caller]
    fn replay_step(&mut self, args: StepArgs<'_>) -> Result<UpdateReport> {
        let arguments = (0..self.config.microbatches).map(|microbatch| self.load_microbatch(microbatch));
        let arguments: Vec<Vec<Tensor>> = arguments.collect::<Result<_>>()?;
        let mut capture = std::mem::take(&mut self.capture);
        let pass =
            |arguments: &[Vec<Tensor>]| self.forward_backward(|microbatch| Ok(arguments[microbatch].clone()));
        let outputs =
            capture.prepare((self.rank(), self.model.params()), &arguments, self.loss_factor(), pass);
        self.passes.borrow_mut().clear();
        self.capture = capture;
        let Some(outputs) = outputs? else {
            return self.apply_optimizer(
                self.forward_backward(|microbatch| Ok(arguments[microbatch].clone()))?
                    .into_loss_and_gradients(),
                args,
            );
        };
        let (loss, gradients) = outputs.into_loss_and_gradients();
        let Trainer { model, optim, capture, update_in_progress, .. } = self;
        let rank_and_params = (model.rank(), model.params());
        match capture.replay(&mut **optim, rank_and_params, (&gradients, &loss), args, update_in_progress)? {
            Some(report) => Ok(report),
            None => self.apply_optimizer((loss, gradients), args),
        }
    }

    /// Runs forward and backward of all microbatches without reading from the device.
    fn forward_backward(&self, arguments: impl Fn(usize) -> Result<Vec<Tensor>>) -> Result<PassOutputs> {
        let count = self.config.microbatches;
        let tape = self.model.tape().for_rounds(count);
        let mut losses = Vec::with_capacity(count);
        self.passes.borrow_mut().clear();
        for microbatch in 0..count {
            let start = Instant::now();
            tape.set_noise(Some(self.noise(microbatch)));
            let arguments: Vec<Var> = arguments(microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let loss =
                check_loss_dtype((self.loss_fn)(&self.model, &arguments)).map_err(|e| e.at(self.site))?;
            let loss = if count == 1 { loss } else { loss.scale(1.0 / count as f64) };
            losses.push(loss.tensor().clone());
            let (forward_end, stage) = (Instant::now(), 0);
            if microbatch + 1 == count {
                tape.expect_gradients();
            }
            // The line of the loss is unknown, and this line is not the caller's.
            loss.backward_scaled(self.loss_factor()).map_err(|e| e.replace_site(self.site))?;
            self.passes.borrow_mut().extend([
                TimedAction { action: Action::Forward { stage, microbatch }, start, end: forward_end },
                TimedAction {
                    action: Action::Backward { stage, microbatch },
                    start: forward_end,
                    end: Instant::now(),
                },
            ]);
        }
        Ok(PassOutputs { losses, gradients: tape.gradients(), depends_on_step: tape.noise_was_read() })
    }

    /// Loads the arguments of the loss for a microbatch of this step.
    fn load_microbatch(&self, microbatch: usize) -> Result<Vec<Tensor>> {
        (self.load_batch)(self.model.rank(), self.step, self.rows(microbatch))
    }

    /// Returns the random-number state of a microbatch of this step.
    fn noise(&self, microbatch: usize) -> Noise {
        let first_row = self.rows(microbatch).start as u64;
        Noise { seed: self.config.seed, step: self.step, first_row }
    }

    fn rows(&self, microbatch: usize) -> Range<usize> {
        let rows = self.config.rows / self.config.microbatches;
        microbatch * rows..(microbatch + 1) * rows
    }
}

fn check_config(config: &TrainerConfig) -> Result<()> {
    let TrainerConfig { rows, microbatches, clip, .. } = *config;
    optim::check_clip(clip)?;
    if rows == 0 || microbatches == 0 || !rows.is_multiple_of(microbatches) {
        let text = format!("{microbatches} microbatches do not divide a batch of {rows} rows");
        let legal = (1..=rows.isqrt()).filter(|m| rows.is_multiple_of(*m)).flat_map(|m| [m, rows / m]);
        let nearest = legal.min_by_key(|m| (m.abs_diff(microbatches), *m)).unwrap_or(1);
        return Err(Error::new(Kind::Config, text).detail("help", format!("use {nearest} microbatches")));
    }
    Ok(())
}

/// Refuses a loss of 16 bits: its mean has three digits, and whether the scaled loss overflows would depend on the
/// number of microbatches by which the loss is divided first, and so on the mesh.
fn check_loss_dtype(loss: Var) -> Result<Var> {
    let dtype = loss.dtype();
    if dtype == dtype.accumulator() {
        return Ok(loss);
    }
    let sums = dtype.accumulator();
    let text = format!(
        "the loss has dtype {dtype}: too few digits for a mean, and too small a range for loss scaling"
    );
    let help = format!("cast before the mean: x.cast(DType::{}).mean()", sums.name().to_uppercase());
    Err(Error::new(Kind::DType, text).detail("help", help))
}

impl<M> fmt::Debug for Trainer<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trainer(step {}, {:?})", self.step, self.config)
    }
}
