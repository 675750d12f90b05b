//! The training loop's body: microbatches, stages, gradient norm, update.

mod loss;
mod not_finite;
mod resumed;

use crate::captured::{Capture, Passes};
use crate::checkpoint::check_parameters;
use crate::module::Module;
use crate::optim::{self, LossParts, LossScale, Optimizer, Report, Schedule, StepArgs};
use crate::placed::Model;
use crate::plan::Plan;
use crate::precision::Precision;
use crate::rescue::Rescued;
use crate::staged::{self, Staged};
use loss::wide;
use shardgrad_autograd::pipeline::{self, Action, Passed};
use shardgrad_autograd::{Gradients, Noise, OpRecord, Program, Var};
use shardgrad_tensor::agreement::{check_alike, check_copies};
use shardgrad_tensor::{DType, Error, Kind, Layout, Rank, Result, Tensor, Value};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;
use std::time::Instant;

/// What decides the numbers of a run beside model, data and optimizer.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rows of the global batch.
    pub rows: usize,
    /// Pieces that the batch is cut into, one after another; they divide the rows.
    pub microbatches: usize,
    /// The seed of first values and random ops.
    pub seed: u64,
    /// The dtype of computing. In f16 the loss is scaled ([`LossScale`]).
    pub dtype: DType,
    /// The dtype of the stored parameters; `None` is that in which sums are formed: f32 for computing in bf16 or f16.
    pub param_dtype: Option<DType>,
    /// Learning rates; `None` keeps the optimizer's.
    pub schedule: Option<Schedule>,
    /// Bound of the global gradient norm, above 0; `None` does not clip.
    pub clip: Option<f64>,
    /// Whether steps are captured in the first one and replayed in the others, with the same bits, where that can be: in a world of
    /// one rank, without a pipeline, on a device that does such things; [`Trainer::not_captured`] says why not. All from forward to
    /// update is given at once then, and the host waits once, at the end.
    ///
    /// What changes from step to step comes in through `read` then, as on a pipeline ([`Trainer::new`]), beside rates and control
    /// numbers: the loss runs when its pass is captured, and what it computes beside its ops stays as it was, as does all that it reads
    /// which is neither argument nor parameter. Where arguments, parameters or what the optimizer keeps lie otherwise than before, and
    /// where the loss scale or what is frozen has changed, the step is captured anew. A loss that draws random numbers of the step, or
    /// reaches for the host, is run in each step, and so is an update that does ([`Optimizer::change`]). A captured step keeps its
    /// memory until [`Trainer::loss_part`] is called; what is held of its losses and gradients is overwritten by the next step.
    pub capture: bool,
}

impl Settings {
    /// A batch of so many rows in one piece, seed 0, f32, the optimizer's learning rate, no clipping, no capture.
    #[must_use]
    pub fn new(rows: usize) -> Settings {
        let (dtype, param_dtype) = (DType::F32, None);
        let (schedule, clip, capture) = (None, None, false);
        Settings { rows, microbatches: 1, seed: 0, dtype, param_dtype, schedule, clip, capture }
    }

    /// The dtypes of computing and of the stored parameters.
    #[must_use]
    pub fn precision(&self) -> Precision {
        let param_dtype = self.param_dtype.unwrap_or(Precision::mixed(self.dtype).param_dtype);
        Precision { dtype: self.dtype, param_dtype }
    }
}

/// What a step left behind; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The number of the step, from 0.
    pub step: u64,
    /// The mean of the loss over the microbatches.
    pub loss: f64,
    /// The global gradient norm, before clipping; not finite if the step was skipped.
    pub grad_norm: f64,
    /// The learning rate.
    pub lr: f64,
    /// What the loss was multiplied by before its backward pass, where losses are scaled (in f16).
    pub loss_scale: Option<f64>,
    /// Whether parameters stayed as they were, since a gradient of the scaled loss was not finite.
    pub skipped: bool,
    /// The sums over all ranks of the numbers that rode along.
    pub control: Vec<f64>,
}

/// What reads arguments: the rank on whose mesh they lie, the step, and the rows of the global batch.
type Read<'t> = Box<dyn Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't>;
/// The model text that makes a loss of arguments.
type Loss<'t, M> = Box<dyn Fn(&M, &[Var]) -> Var + 't>;

/// A model in training on one rank, on any mesh: where the plan has a pipeline and the mesh its axis, the model is
/// recorded and cut into stages, and only the parameters of this rank's stage are here.
///
/// Every rank makes its trainer alike and steps it together with the others.
pub struct Trainer<'t, M> {
    model: Model<M>,
    optim: Box<dyn Optimizer + 't>,
    settings: Settings,
    read: Read<'t>,
    loss: Loss<'t, M>,
    staged: Option<Staged>,
    capture: Capture,
    loss_scale: Option<LossScale>,
    step: u64,
    /// The step before the first update of this trainer: no update has changed the parameters as long as `step` is this.
    first_step: u64,
    /// Whether an update has begun and not ended: parameters may be of no step.
    is_updating: bool,
    passes: RefCell<Vec<Passed>>,
    /// The line that asked for the last step.
    site: &'static Location<'static>,
}

impl<'t, M: Module> Trainer<'t, M> {
    /// Places a model. `read` gives the arguments of `loss` for some rows of the global batch of a step, as tensors on the
    /// rank that it is handed, split as [`Plan::batch_layout`] says; `loss` is the model text, a scalar that is a mean over
    /// rows: where rows do not weigh alike, a sum over a count of the whole step, which `read` hands over. Neither may depend
    /// on the mesh. `optim` is any [`Optimizer`], made alike on every rank.
    ///
    /// On a pipeline `loss` runs once for each shape of its arguments, and its ops are replayed in every step: what changes from step
    /// to step comes in through `read`, and what the text computes beside its ops (counters, numbers of a key of one's own) stays as
    /// it was. Layers that draw random numbers draw those of the step all the same.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::Config` for rows that the microbatches do not divide, for a clip that is not above 0, for a
    /// pipeline that the model cannot be cut for, and what [`Optimizer::check`] refuses; `Kind::DType` on a pipeline for a loss
    /// of 16 bits, which [`Trainer::step`] refuses elsewhere; what `read` reports.
    #[track_caller]
    pub fn new(
        rank: &Rank,
        module: M,
        plan: &Plan,
        optim: impl Optimizer + 't,
        settings: Settings,
        read: impl Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + 't,
        loss: impl Fn(&M, &[Var]) -> Var + 't,
    ) -> Result<Trainer<'t, M>> {
        check(&settings)?;
        let precision = settings.precision();
        let (model, staged) = match plan.pipeline_on(rank.mesh()) {
            None => (Model::with_precision(rank, module, plan, settings.seed, precision)?, None),
            Some((pipeline, axis)) => {
                let model = staged::outline(rank, axis, module, plan, precision)?;
                let first = read(model.rank(), 0, 0..settings.rows / settings.microbatches)?;
                let of = (settings.seed, settings.microbatches);
                let text = |arguments: &[Var]| Ok(vec![wide(loss(&model, arguments))?]);
                let staged = Staged::new(&model, (pipeline, axis), of, &first, &text)?;
                (model, Some(staged))
            }
        };
        optim.check(model.params())?;
        let (read, loss) = (Box::new(read), Box::new(loss));
        let loss_scale = (settings.dtype == DType::F16).then(LossScale::default);
        let capture = match &staged {
            Some(_) => Capture::refused(Error::new(Kind::Unsupported, "it is that of a pipeline")),
            None if rank.mesh().num_ranks() > 1 => {
                Capture::refused(Error::new(Kind::Unsupported, "several ranks take it together"))
            }
            None => Capture::default(),
        };
        let (optim, passes) = (Box::new(optim), RefCell::default());
        Ok(Trainer {
            model,
            optim,
            settings,
            read,
            loss,
            staged,
            capture,
            loss_scale,
            step: 0,
            first_step: 0,
            is_updating: false,
            passes,
            site: Location::caller(),
        })
    }

    /// The model; on a pipeline, with the parameters of this rank's stage only.
    #[must_use]
    pub fn model(&self) -> &Model<M> {
        &self.model
    }

    /// The optimizer.
    #[must_use]
    pub fn optim(&self) -> &(dyn Optimizer + 't) {
        &*self.optim
    }

    /// By what the loss of the next step is multiplied, where losses are scaled (in f16).
    #[must_use]
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale
    }

    /// The schedule that the trainer follows on a pipeline, transfers included.
    #[must_use]
    pub fn schedule(&self) -> Option<&pipeline::Schedule> {
        self.staged.as_ref().map(Staged::schedule)
    }

    /// Of each stage of the pipeline, the number of its first op and the place of that in the model.
    #[must_use]
    pub fn stage_starts(&self) -> Vec<(usize, Rc<str>)> {
        self.staged.as_ref().map_or_else(Vec::new, Staged::starts)
    }

    /// Why steps, or their updates, are not captured, from the first on that was not; `None` where they are, or were not to be.
    #[must_use]
    pub fn not_captured(&self) -> Option<&Error> {
        self.capture.why_not().filter(|_| self.settings.capture)
    }

    /// What the last step did on this rank, and when: passes, and transfers between stages. Nothing of one that was replayed.
    #[must_use]
    pub fn passes(&self) -> Vec<Passed> {
        self.passes.borrow().clone()
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Forward, backward and update. The numbers of `control` are summed over all ranks along with the gradient norm.
    ///
    /// # Errors
    /// `Kind::NotFinite` on every rank, before the update, if the loss, a gradient or a control sum is not finite; with a
    /// loss scale above 1, gradients that are not finite only skip the update and halve the scale. `Kind::DType` for a loss of 16
    /// bits. `Kind::Config` as [`Optimizer::step`]. What ops, arguments and collectives report.
    #[track_caller]
    pub fn step(&mut self, control: &[f64]) -> Result<StepReport> {
        self.site = Location::caller();
        let step = self.step;
        let lr = self.settings.schedule.as_ref().map_or_else(|| self.optim.lr(), |s| s.lr(step as usize));
        let args = StepArgs { lr, clip: self.settings.clip, control, loss_scale: self.factor() };
        let report = match self.settings.capture && self.capture.is_on() {
            true => self.captured_step(args)?,
            false => self.update(self.gradients()?, args)?,
        };
        let mut control = report.control;
        let loss = control.remove(0);
        let finite = loss.is_finite() && control.iter().all(|x| x.is_finite());
        let skipped = !report.applied && finite && self.loss_scale.is_some_and(LossScale::can_fall);
        if !report.applied && !skipped {
            let odd = control.iter().position(|x| !x.is_finite()).filter(|_| loss.is_finite());
            if let Some(i) = odd.filter(|_| report.grad_norm.is_finite()) {
                let (step, sum) = (step + 1, control[i]);
                let text = format!(
                    "step {step}: control number {i} is {sum} over all ranks; the step was not taken"
                );
                return Err(Error::new(Kind::NotFinite, text)
                    .detail("help", "loss and gradients are finite: look at the numbers that rode along"));
            }
            return Err(self.explain_not_finite(loss, report.grad_norm));
        }
        let loss_scale = self.loss_scale.map(LossScale::factor);
        self.loss_scale = self.loss_scale.map(|scale| scale.after(!skipped));
        self.step += 1;
        Ok(StepReport { step, loss, grad_norm: report.grad_norm, lr, loss_scale, skipped, control })
    }

    /// What this rank holds of the weights after the last step that it took whole. For a world that has failed, on each of its
    /// ranks: where all were left with the weights of one step, [`Rescued::model`] makes the model of them in another world.
    /// Nothing is communicated.
    ///
    /// # Errors
    /// `Kind::Unsupported` where an update had begun and not ended: weights are those of no step then. What the device reports.
    pub fn rescue(&self) -> Result<Rescued> {
        if self.is_updating {
            let text = format!("the update of step {} had begun and did not end", self.step + 1);
            return Err(Error::new(Kind::Unsupported, text).detail("rank", self.rank().describe()));
        }
        Rescued::of(&self.model, self.step)
    }

    /// What gradients bear.
    fn factor(&self) -> f64 {
        self.loss_scale.map_or(1.0, LossScale::factor)
    }

    /// Compares what the ranks were told (settings, optimizer, step, how many arguments the loss has and how they lie), bit for
    /// bit the copies of parameters and of the arguments of the next step, and the names of this stage's parameters. Three small
    /// collectives, one more where stages share a parameter; every rank calls this together: at the start, and now and then,
    /// since no collective of a step sees what is in a tensor.
    ///
    /// # Errors
    /// `Kind::Diverged` on every rank, naming what differs; what `read` and the collectives report.
    #[track_caller]
    pub fn check_alike(&self) -> Result<()> {
        let site = Location::caller();
        let arguments = self.arguments(0)?;
        let layouts: Vec<String> = arguments.iter().map(|t| t.layout().to_string()).collect();
        let told = [
            ("settings", format!("{:?}", self.settings)),
            ("optimizer", self.optim.describe()),
            ("step", self.step.to_string()),
            ("loss scale", format!("{:?}", self.loss_scale)),
            ("arguments of the loss", format!("{}, {}", layouts.len(), layouts.join(", "))),
        ];
        check_alike(self.rank(), &told, site)?;
        check_parameters(&self.model, site)?;
        let names: Vec<String> = (0..arguments.len()).map(|i| format!("argument {i} of the loss")).collect();
        let arguments: Vec<_> = names.iter().map(String::as_str).zip(&arguments).collect();
        check_copies(self.rank(), &arguments, site)
    }

    /// This rank's part of the loss on some arguments, on which [`Trainer::rank`] they lie; the parts of all ranks add up to
    /// it ([`world_sum`](shardgrad_tensor::control::world_sum)). Nothing random is drawn, nothing is kept. A captured step gives its
    /// memory up for it, and is captured anew.
    ///
    /// # Errors
    /// What ops and collectives report.
    pub fn loss_part(&self, arguments: &[Tensor]) -> Result<f64> {
        self.capture.forget();
        let loss = match &self.staged {
            None => {
                let tape = self.model.inference();
                let arguments: Vec<Var> = arguments.iter().map(|t| tape.constant(t.clone())).collect();
                Some((self.loss)(&self.model, &arguments).tensor().clone())
            }
            Some(staged) => {
                let text = |arguments: &[Var]| Ok(vec![(self.loss)(&self.model, arguments)]);
                staged.infer(&self.model, arguments, &text)?
            }
        };
        loss.map_or(Ok(0.0), |loss| loss.local_part_once())
    }

    /// What the ops of this rank leave in a forward pass, in their order: the place in the model, and the layout of the first
    /// result. Nothing is computed.
    ///
    /// # Errors
    /// What `read` and the model's text report.
    pub fn outline(&self) -> Result<Vec<(Rc<str>, Layout)>> {
        let told = |r: &OpRecord| Some((r.path.clone(), r.outputs.first()?.clone()));
        if let Some(staged) = &self.staged {
            return Ok(staged.records(self.model.rank()).iter().filter_map(told).collect());
        }
        let layouts: Vec<Layout> = self.arguments(0)?.iter().map(|t| t.layout().clone()).collect();
        let text = |arguments: &[Var]| Ok(vec![(self.loss)(&self.model, arguments)]);
        let program = Program::record(self.model.rank(), &layouts, None, text)?;
        Ok(program.records.iter().filter_map(told).collect())
    }

    /// The rank on whose mesh arguments lie: without the axis of the pipeline, if there is one.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        self.model.rank()
    }

    /// What makes up this rank's part of the mean loss, and the gradients of its parameters times the loss scale.
    fn gradients(&self) -> Result<(LossParts, Gradients)> {
        let read = |microbatch: usize| self.arguments(microbatch);
        if let Some(staged) = &self.staged {
            let noise = |microbatch: usize| self.noise(microbatch);
            let outcome = staged.train(&self.model, &read, &noise, self.factor())?;
            *self.passes.borrow_mut() = outcome.passes;
            let tensors = outcome.results.into_iter().flatten().flatten().collect();
            return Ok((LossParts { tensors, count: self.settings.microbatches }, outcome.gradients));
        }
        Ok(self.pass(read)?.parts())
    }

    /// The optimizer's part of a step.
    #[track_caller]
    fn update(&mut self, (loss, gradients): (LossParts, Gradients), args: StepArgs<'_>) -> Result<Report> {
        let Trainer { model, optim, is_updating, .. } = self;
        let of = (model.rank(), model.params());
        optim::step(&mut **optim, of, (gradients, Some(loss)), args, is_updating)
    }

    /// A step by captured work, as far as that can be. What it leaves behind is let go of when it ends.
    #[track_caller]
    fn captured_step(&mut self, args: StepArgs<'_>) -> Result<Report> {
        let arguments = (0..self.settings.microbatches).map(|microbatch| self.arguments(microbatch));
        let arguments: Vec<Vec<Tensor>> = arguments.collect::<Result<_>>()?;
        let mut capture = std::mem::take(&mut self.capture);
        let pass = |arguments: &[Vec<Tensor>]| self.pass(|microbatch| Ok(arguments[microbatch].clone()));
        let made = capture.ready((self.rank(), self.model.params()), &arguments, self.factor(), pass);
        self.passes.borrow_mut().clear();
        self.capture = capture;
        let Some(made) = made? else {
            return self.update(self.pass(|microbatch| Ok(arguments[microbatch].clone()))?.parts(), args);
        };
        let (loss, gradients) = made.parts();
        let Trainer { model, optim, capture, is_updating, .. } = self;
        let of = (model.rank(), model.params());
        match capture.step(&mut **optim, of, (&gradients, &loss), args, is_updating)? {
            Some(report) => Ok(report),
            None => self.update((loss, gradients), args),
        }
    }

    /// Forward and backward of all microbatches. Nothing is read by the host.
    fn pass(&self, arguments: impl Fn(usize) -> Result<Vec<Tensor>>) -> Result<Passes> {
        let count = self.settings.microbatches;
        let tape = self.model.tape().for_rounds(count);
        let mut losses = Vec::with_capacity(count);
        self.passes.borrow_mut().clear();
        for microbatch in 0..count {
            let start = Instant::now();
            tape.set_noise(Some(self.noise(microbatch)));
            let arguments: Vec<Var> = arguments(microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let loss = wide((self.loss)(&self.model, &arguments)).map_err(|e| e.at(self.site))?;
            let loss = if count == 1 { loss } else { loss.scale(1.0 / count as f64) };
            losses.push(loss.tensor().clone());
            let (middle, stage) = (Instant::now(), 0);
            if microbatch + 1 == count {
                tape.expect_gradients();
            }
            // The line of the loss is not known, and that of this call is nobody's.
            loss.backward_scaled(self.factor()).map_err(|e| e.asked_by(self.site))?;
            self.passes.borrow_mut().extend([
                Passed { action: Action::Forward { stage, microbatch }, start, end: middle },
                Passed { action: Action::Backward { stage, microbatch }, start: middle, end: Instant::now() },
            ]);
        }
        Ok(Passes { losses, gradients: tape.gradients(), is_of_step: tape.noise_is_asked() })
    }

    /// The arguments of the loss for a microbatch of this step.
    fn arguments(&self, microbatch: usize) -> Result<Vec<Tensor>> {
        (self.read)(self.model.rank(), self.step, self.rows(microbatch))
    }

    /// What random ops draw by in a microbatch of this step.
    fn noise(&self, microbatch: usize) -> Noise {
        let first_row = self.rows(microbatch).start as u64;
        Noise { seed: self.settings.seed, step: self.step, first_row }
    }

    fn rows(&self, microbatch: usize) -> Range<usize> {
        let rows = self.settings.rows / self.settings.microbatches;
        microbatch * rows..(microbatch + 1) * rows
    }
}

fn check(settings: &Settings) -> Result<()> {
    let Settings { rows, microbatches, clip, .. } = *settings;
    optim::check_clip(clip)?;
    if rows == 0 || microbatches == 0 || !rows.is_multiple_of(microbatches) {
        let text = format!("{microbatches} microbatches do not divide a batch of {rows} rows");
        let legal = (1..=rows.isqrt()).filter(|m| rows.is_multiple_of(*m)).flat_map(|m| [m, rows / m]);
        let nearest = legal.min_by_key(|m| (m.abs_diff(microbatches), *m)).unwrap_or(1);
        return Err(Error::new(Kind::Config, text).detail("help", format!("use {nearest} microbatches")));
    }
    Ok(())
}

impl<M> fmt::Debug for Trainer<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trainer(step {}, {:?})", self.step, self.settings)
    }
}
