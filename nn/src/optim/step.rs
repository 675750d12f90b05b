//! What the steps of all optimizers share: the gate of numbers that are not finite, clipping, settings of groups.

use super::norm::{LossParts, norm_and_loss};
use crate::module::Module;
use crate::name::{matches, nearest};
use crate::param::Param;
use crate::placed::Model;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{Error, Kind, Rank, Result, Tensor};
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

    /// Counts a step that is about to be taken.
    fn begin(&mut self);

    /// Changes the parameters of that step, at the common learning rate `lr`, each by its gradient times `grad_scale`. They
    /// come all at once, since one launch can take care of many. A gradient lies as its parameter is stored, and no parameter
    /// comes twice. It is of this step only: of a captured one the next writes over it, so that a rule that needs it later
    /// copies it ([`Tensor::copied`]).
    ///
    /// # Errors
    /// What the kernels report. Parameters may be lost then.
    fn change(&mut self, params: &[(&Param, Tensor)], lr: f64, grad_scale: f64) -> Result<()>;

    /// Refuses parameters that it was not made for, such as where a group matches none; all of a model are given, wherever they
    /// live. Asked when a trainer is made, and before each step.
    ///
    /// # Errors
    /// `Kind::Config`.
    fn check(&self, _params: &[Param]) -> Result<()> {
        Ok(())
    }

    /// What is kept of a parameter, if it has been stepped and the rule keeps anything.
    fn kept(&self, _param: &Param) -> Option<Kept> {
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
    /// any of them that is no number; what [`Optimizer::check`] refuses. What the collective and the kernels report.
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
        step(self, model.rank(), model.params(), (gradients, None), args)
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

/// [`Optimizer::step`] of any optimizer; the sum of a loss, if one is given, stands before the other sums.
#[track_caller]
pub(crate) fn step(
    optim: &mut dyn Optimizer,
    rank: &Rank,
    params: &[Param],
    (mut gradients, loss): (Gradients, Option<&LossParts>),
    args: StepArgs<'_>,
) -> Result<Report> {
    optim.check(params)?;
    check_args(optim.num_steps() + 1, &args)?;
    let norm = norm_and_loss(rank, params, (&gradients, loss), args.control)?;
    let applied = norm.grad_norm.is_finite() && norm.control.iter().all(|x| x.is_finite());
    let grad_norm = norm.grad_norm / args.loss_scale;
    let report = Report { grad_norm, control: norm.control, applied };
    if !applied {
        return Ok(report);
    }
    optim.begin();
    let clip = args.clip.filter(|most| *most < report.grad_norm);
    let grad_scale = clip.map_or(1.0, |most| most / report.grad_norm) / args.loss_scale;
    let trained = params.iter().filter(|p| !p.is_frozen());
    let changed: Vec<(&Param, Tensor)> =
        trained.filter_map(|param| Some((param, gradients.remove(&param.key())?))).collect();
    optim.change(&changed, args.lr, grad_scale)?;
    Ok(report)
}
