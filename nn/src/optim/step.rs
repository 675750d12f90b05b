//! What the steps of all optimizers share: the gate of numbers that are not finite, clipping, settings of groups.

use super::norm::{LossParts, counted};
use crate::module::Module;
use crate::name::{matches, nearest};
use crate::param::{AFTER_LOSS, Param};
use crate::placed::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::{Error, Found, GatedStep, Kind, Rank, Result, StepTold, Tensor};
use std::collections::HashSet;
use std::fmt;
use std::panic::Location;

/// What is different for some parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    /// The learning rate, as a multiple of the common one.
    pub lr_scale: Option<f64>,
    /// The weight decay, whatever the number of dims.
    pub weight_decay: Option<f64>,
}

/// Groups by the pattern of their names; later ones win, setting by setting.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups(pub(super) Vec<(String, Group)>);

impl Groups {
    #[track_caller]
    pub(super) fn push(&mut self, pattern: &str, group: Group) {
        check_setting("the lr_scale of a group", group.lr_scale.unwrap_or(0.0), NOT_NEGATIVE);
        check_setting("the weight_decay of a group", group.weight_decay.unwrap_or(0.0), NOT_NEGATIVE);
        self.0.push((pattern.to_string(), group));
    }

    /// Refuses patterns that match no parameter: what they ask for would be done nowhere.
    pub(super) fn check(&self, params: &[Param]) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = params.iter().map(Param::name).collect();
        let is_lost = |pattern: &&str| !names.iter().any(|name| matches(pattern, name));
        let lost: Vec<&str> = self.0.iter().map(|(pattern, _)| pattern.as_str()).filter(is_lost).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let text = format!("{} group(s) of the optimizer match no parameter", lost.len());
        Err(lost.into_iter().fold(Error::new(Kind::Config, text), |error, pattern| {
            let near = nearest(pattern, names.iter().map(String::as_str)).join(", ");
            error.detail("group", format!("{pattern}; nearest: {near}"))
        }))
    }

    /// Learning rate and weight decay of a parameter, where the common ones are these. The common decay applies to parameters
    /// of two or more dims (in files).
    pub(super) fn of(&self, param: &Param, lr: f64, weight_decay: f64) -> [f64; 2] {
        let name = param.name();
        let (mut lr_scale, mut weight_decay) = (1.0, if param.decays() { weight_decay } else { 0.0 });
        for (_, group) in self.0.iter().filter(|(pattern, _)| matches(pattern, &name)) {
            lr_scale = group.lr_scale.unwrap_or(lr_scale);
            weight_decay = group.weight_decay.unwrap_or(weight_decay);
        }
        [lr * lr_scale, weight_decay]
    }
}

/// Which numbers a setting takes: a test, and words for it.
pub(super) type Range = (fn(f64) -> bool, &'static str);

pub(super) const NOT_NEGATIVE: Range = (|x| x >= 0.0, "a finite number of at least 0");
pub(super) const POSITIVE: Range = (|x| x > 0.0, "a finite number above 0");
pub(super) const BELOW_ONE: Range = (|x| (0.0..1.0).contains(&x), "a number of at least 0 and below 1");

/// Refuses a setting outside of its range: its steps would leave numbers that are none, or no descent.
#[track_caller]
pub(super) fn check_setting(what: &str, x: f64, range: Range) {
    if let Err(e) = within(what, x, range) {
        e.at(Location::caller()).raise();
    }
}

/// Whether a setting is within its range.
fn within(what: impl fmt::Display, x: f64, (fits, range): Range) -> Result<()> {
    if x.is_finite() && fits(x) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, format!("{what} is {x}, which is not {range}")))
}

/// Refuses a bound of the gradient norm that would turn steps round, or leave nothing of them. An infinite one binds nothing.
///
/// # Errors
/// `Kind::Config`.
pub(crate) fn check_clip(clip: Option<f64>) -> Result<()> {
    let Some(most) = clip.filter(|most| *most != f64::INFINITY) else { return Ok(()) };
    within("the bound of the gradient norm (clip)", most, POSITIVE)
        .map_err(|e| e.detail("help", "1.0 is usual; None does not clip"))
}

/// Refuses what would turn a step round, or leave weights that are not finite.
fn check_args(step: u64, args: &StepArgs<'_>) -> Result<()> {
    within(format_args!("the learning rate of step {step}"), args.lr, NOT_NEGATIVE)
        .map_err(|e| e.detail("help", "look at the schedule of learning rates"))?;
    check_clip(args.clip)?;
    within("the loss scale", args.loss_scale, POSITIVE)
        .map_err(|e| e.detail("help", "give a power of two of at least 1"))
}

/// Refuses gradients of what is no parameter of a model: nothing would be done with them, and who gives a model those of another
/// would train it for nothing.
fn check_known(params: &[Param], gradients: &Gradients) -> Result<()> {
    let known: HashSet<Key> = params.iter().map(Param::key).collect();
    let strange = gradients.keys().filter(|key| !known.contains(key)).count();
    if strange == 0 {
        return Ok(());
    }
    let text = format!("{strange} of {} gradients are of no parameter of this model", gradients.len());
    Err(Error::new(Kind::Config, text)
        .detail("help", "give each model its own: what Gradients has under Param::key of its parameters"))
}

/// What an optimizer keeps of a parameter that has been stepped, and what a run needs to go on beside its parameters.
#[derive(Clone, Debug)]
pub struct Kept {
    /// How often the parameter was stepped, where the rule counts that.
    pub num_steps: u64,
    /// Averages, as the parameter is stored, in the order of the rule.
    pub tensors: Vec<Tensor>,
}

/// Another number of tensors than a rule keeps of a parameter.
pub(super) fn unlike(param: &Param, found: usize, wanted: usize) -> Error {
    let text = format!("{found} tensors were kept of parameter `{}`, the rule keeps {wanted}", param.name());
    Error::new(Kind::Config, text).detail("help", "go on with the optimizer that kept them")
}

/// Refuses to change a parameter of which nothing is kept, since its rates were not asked for.
pub(super) fn check_asked(params: &[(&Param, Tensor)], is_kept: impl Fn(&Param) -> bool) -> Result<()> {
    let Some((param, _)) = params.iter().find(|(param, _)| !is_kept(param)) else { return Ok(()) };
    let text = format!("the rates of parameter `{}` were not asked for", param.name());
    Err(Error::new(Kind::Config, text)
        .detail("help", "an optimizer that hands `change` on hands `rates` and `count` on too"))
}

/// What a step is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepArgs<'a> {
    /// The learning rate, 0 or above.
    pub lr: f64,
    /// Bound of the global gradient norm, above 0; `None` does not clip.
    pub clip: Option<f64>,
    /// Numbers that are summed over all ranks along with the norm; as many on every rank.
    pub control: &'a [f64],
    /// By what all gradients are too large; norm, clipping and update are of gradients divided by it.
    pub loss_scale: f64,
}

impl StepArgs<'_> {
    /// A step with a learning rate and nothing else.
    #[must_use]
    pub const fn new(lr: f64) -> StepArgs<'static> {
        StepArgs { lr, clip: None, control: &[], loss_scale: 1.0 }
    }
}

/// What a step found; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The sums of the numbers that rode along.
    pub control: Vec<f64>,
    /// Whether parameters changed. They do not if the norm or a sum is not finite.
    pub applied: bool,
}

/// A rule that changes parameters by their gradients. What it must know is local: parameters are stored as shards and equal
/// copies, and gradients lie as they do. Every rank keeps one of its own and steps it together with the others.
pub trait Optimizer: fmt::Debug {
    /// The learning rate where no schedule gives one.
    fn lr(&self) -> f64;

    /// All that decides its steps beside its averages, in one line; it must be the same on every rank.
    fn describe(&self) -> String;

    /// How many steps were taken.
    fn num_steps(&self) -> u64;

    /// The numbers of the next step at the common learning rate `lr`, as many of each parameter, one parameter after the other: all
    /// that differs from step to step. What is kept of a parameter is made here, not in [`Optimizer::change`].
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        Ok(vec![lr; params.len()])
    }

    /// Changes the parameters that [`Optimizer::rates`] was asked about, each by its gradient times the factor of the step, if it is a
    /// step that is taken. They come all at once, since one launch can take care of many. A gradient lies as its parameter is stored,
    /// and no parameter comes twice. It is of this step only: of a captured one the next writes over it, so that a rule that needs it
    /// later copies it ([`Tensor::copied`]).
    ///
    /// Whether the step is taken is not known to the host as yet. A rule that hands the step on to an optimizer of this crate, with
    /// the parameters whose rates that one gave ([`GatedStep::of_rates`] parts a step), does not need to know. A rule of tensor ops
    /// asks [`GatedStep::taken`], where the host waits for it; such an update is not captured, since what is captured may depend on
    /// nothing of one step. Where steps are captured, this is called once for many of them, and again where that cannot be done.
    ///
    /// # Errors
    /// What the kernels report. Parameters are lost then, unless the step was not to be taken.
    fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()>;

    /// Counts a step that was taken, and that changed these parameters.
    fn count(&mut self, params: &[&Param]);

    /// Refuses parameters that it was not made for, such as where a group matches none; all of a model are given, wherever they
    /// live. Asked when a trainer is made, and before each step.
    ///
    /// # Errors
    /// `Kind::Config`.
    fn check(&self, _params: &[Param]) -> Result<()> {
        Ok(())
    }

    /// What is kept of a parameter, if its rates have been asked for and the rule keeps anything. A captured update writes to these
    /// tensors, so that a rule that keeps more than it tells here cannot be captured rightly.
    fn kept(&self, _param: &Param) -> Option<Kept> {
        None
    }

    /// What the tensors of [`Optimizer::kept`] are called in a checkpoint, in their order; none of a rule that keeps nothing. A
    /// rule that does not say so, or cannot go on, is not saved ([`resume`](crate::resume)).
    fn kept_names(&self) -> Option<&'static [&'static str]> {
        None
    }

    /// Goes on from step `num_steps` with what was kept of each parameter that had been stepped.
    ///
    /// # Errors
    /// `Kind::Unsupported` if the rule cannot; `Kind::Layout` if a tensor does not lie as its parameter is stored;
    /// `Kind::DType`; `Kind::Config` for another number of tensors than the rule keeps.
    fn go_on(&mut self, _num_steps: u64, _kept: Vec<(Param, Kept)>) -> Result<()> {
        Err(Error::new(Kind::Unsupported, format!("an optimizer that cannot go on: {self:?}")))
    }

    /// Takes a step, unless the gradient norm or one of the control sums is not finite. One all-reduce over the whole
    /// mesh; every rank calls this together. Parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// `Kind::Config` before anything is communicated for a rate below 0, for a clip or a loss scale that is not above 0, and for
    /// any of them that is no number; for gradients of what is no parameter of the model; what [`Optimizer::check`] refuses. What
    /// the collective and the kernels report.
    #[track_caller]
    fn step<M: Module>(
        &mut self,
        model: &Model<M>,
        gradients: Gradients,
        args: StepArgs<'_>,
    ) -> Result<Report>
    where
        Self: Sized,
    {
        let site = Location::caller();
        check_known(model.params(), &gradients).map_err(|e| e.at(site))?;
        step(self, (model.rank(), model.params()), (gradients, None), args, &mut false)
    }

    /// A step with the optimizer's own rate and without clipping.
    ///
    /// # Errors
    /// `Kind::NotFinite` if the gradient norm is not finite (parameters are untouched), and as [`Optimizer::step`].
    #[track_caller]
    fn update<M: Module>(&mut self, model: &Model<M>, gradients: Gradients) -> Result<Report>
    where
        Self: Sized,
    {
        let args = StepArgs::new(self.lr());
        let report = self.step(model, gradients, args)?;
        if report.applied {
            return Ok(report);
        }
        let text = format!("the gradient norm is {}; the step was not taken", report.grad_norm);
        Err(Error::new(Kind::NotFinite, text).detail("help", "a smaller learning rate is the usual cure"))
    }
}

/// A step of an optimizer, with what it reads and what it changes.
#[derive(Debug)]
pub(crate) struct Update {
    step: GatedStep,
    /// The gradients whose elements count here.
    counted: Vec<Tensor>,
    loss: Option<LossParts>,
    changed: Vec<(Param, Tensor)>,
}

impl Update {
    /// A step of which nothing is done. The sum of a loss, if one is given, stands before the other sums.
    ///
    /// # Errors
    /// What [`Optimizer::check`] and [`Optimizer::rates`] report; `Kind::Config` for a learning rate that is no number.
    pub(crate) fn new(
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        (mut gradients, loss): (Gradients, Option<LossParts>),
        args: StepArgs<'_>,
    ) -> Result<Update> {
        optim.check(params)?;
        let counted = counted(params, &gradients).cloned().collect();
        let trained = params.iter().filter(|param| !param.is_frozen());
        let changed = trained.filter_map(|param| Some((param.clone(), gradients.remove(&param.key())?)));
        let changed: Vec<(Param, Tensor)> = changed.collect();
        let step = GatedStep::new(rank, told(optim, &changed, args)?, loss.is_some())?;
        Ok(Update { step, counted, loss, changed })
    }

    /// Tells the same step other numbers; false if it cannot be told these.
    ///
    /// # Errors
    /// As [`Update::new`].
    pub(crate) fn upload_into(
        &mut self,
        optim: &mut dyn Optimizer,
        params: &[Param],
        args: StepArgs<'_>,
    ) -> Result<bool> {
        optim.check(params)?;
        self.step.upload_into(told(optim, &self.changed, args)?)
    }

    /// Gives the launches that find whether the step is taken. One all-reduce over the whole mesh.
    ///
    /// # Errors
    /// What collective and kernels report.
    pub(crate) fn find(&mut self, site: &'static Location<'static>) -> Result<()> {
        let losses = self.loss.as_ref().map_or((&[][..], 1), |loss| (&loss.tensors[..], loss.count));
        self.step.find(&self.counted, losses, site)
    }

    /// Gives the launches that change parameters.
    ///
    /// # Errors
    /// What the kernels report.
    pub(crate) fn change(&self, optim: &mut dyn Optimizer) -> Result<()> {
        let changed: Vec<(&Param, Tensor)> =
            self.changed.iter().map(|(param, gradient)| (param, gradient.clone())).collect();
        optim.change(&changed, &self.step)
    }

    /// All that the launches change: parameters, and what is kept of them.
    pub(crate) fn written(&self, optim: &dyn Optimizer) -> Vec<Tensor> {
        let of = |(param, _): &(Param, Tensor)| {
            let kept = optim.kept(param).into_iter().flat_map(|kept| kept.tensors);
            std::iter::once(param.tensor()).chain(kept).collect::<Vec<Tensor>>()
        };
        self.changed.iter().flat_map(of).collect()
    }

    /// Waits for the step, and counts it if it was taken. `began` is whether parameters may be of no step, and false where they are
    /// not any more.
    ///
    /// # Errors
    /// What the device reports.
    pub(crate) fn end(&self, optim: &mut dyn Optimizer, began: &mut bool) -> Result<Report> {
        let found = self.step.read();
        let Found { grad_norm, is_taken, sums, .. } = found.map_err(|error| self.failed(began, error))?;
        if is_taken {
            optim.count(&self.changed.iter().map(|(param, _)| param).collect::<Vec<&Param>>());
        }
        *began = false;
        Ok(Report { grad_norm, control: sums, applied: is_taken })
    }

    /// What becomes of parameters after an error, and the error that says so: they are lost, unless the gate was shut, as it is where a
    /// device has found a fault in the gradients.
    pub(crate) fn failed(&self, began: &mut bool, error: Error) -> Error {
        if let Ok(Found { is_taken: false, .. }) = self.step.read() {
            *began = false;
            return error;
        }
        self.changed.iter().for_each(|(param, _)| param.lose());
        let Some((first, _)) = self.changed.first() else { return error };
        let (first, all) = (first.name(), self.changed.len());
        error.detail(
            "lost",
            format!("{all} parameters, `{first}` first: they may be of no step; {AFTER_LOSS}"),
        )
    }
}

/// What the host tells a step.
fn told(optim: &mut dyn Optimizer, changed: &[(Param, Tensor)], args: StepArgs<'_>) -> Result<StepTold> {
    let StepArgs { lr, clip, control, loss_scale } = args;
    check_args(optim.num_steps() + 1, &args)?;
    let params: Vec<&Param> = changed.iter().map(|(param, _)| param).collect();
    let rates = optim.rates(&params, lr)?;
    Ok(StepTold { clip, loss_scale, control: control.to_vec(), rates })
}

/// [`Optimizer::step`] of any optimizer; the sum of a loss, if one is given, stands before the other sums. `began` is set while
/// parameters are of no step.
#[track_caller]
pub(crate) fn step(
    optim: &mut dyn Optimizer,
    of: (&Rank, &[Param]),
    found: (Gradients, Option<LossParts>),
    args: StepArgs<'_>,
    began: &mut bool,
) -> Result<Report> {
    let site = Location::caller();
    let mut update = Update::new(optim, of, found, args)?;
    update.find(site)?;
    *began = true;
    update.change(optim).map_err(|error| update.failed(began, error))?;
    update.end(optim, began)
}
