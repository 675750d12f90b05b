//! AdamW: Adam with weight decay apart from the gradient. Loshchilov and Hutter, arXiv 1711.05101.

use super::norm::grad_norm;
use crate::name::matches;
use crate::param::Param;
use crate::placed::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::update::{AdamWRates, Moments};
use shardgrad_tensor::{Error, Kind, Result, Tensor};
use std::collections::BTreeMap;

/// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
/// w = w - lr decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
///
/// Decay applies to parameters of two or more dims (in files). The moments lie as the parameter is stored and are kept
/// in its accumulator type (f32 for the 16-bit floats). Every rank keeps an optimizer of its own and steps it together
/// with the others.
#[derive(Clone, Debug)]
pub struct AdamW {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    groups: Vec<(String, Group)>,
    num_steps: u64,
    moments: BTreeMap<Key, Moments>,
}

/// What is different for some parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    /// The learning rate, as a multiple of the common one.
    pub lr_scale: Option<f64>,
    /// The weight decay, whatever the number of dims.
    pub weight_decay: Option<f64>,
}

/// What a step is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepArgs<'a> {
    /// The learning rate.
    pub lr: f64,
    /// Bound of the global gradient norm; `None` does not clip.
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

impl AdamW {
    /// The usual setting: betas 0.9 and 0.999, eps 1e-8, no weight decay.
    #[must_use]
    pub fn new(lr: f64) -> AdamW {
        AdamW {
            lr,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            groups: Vec::new(),
            num_steps: 0,
            moments: BTreeMap::new(),
        }
    }

    /// The learning rate.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// All that decides its steps beside its averages, in one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let AdamW { lr, betas, eps, weight_decay, groups, num_steps, .. } = self;
        format!(
            "AdamW lr {lr}, betas {betas:?}, eps {eps}, weight decay {weight_decay}, groups {groups:?}, after {num_steps} steps"
        )
    }

    /// How slowly the two averages forget.
    #[must_use]
    pub fn betas(self, beta1: f64, beta2: f64) -> AdamW {
        AdamW { betas: [beta1, beta2], ..self }
    }

    /// What is added to the root in the divisor.
    #[must_use]
    pub fn eps(self, eps: f64) -> AdamW {
        AdamW { eps, ..self }
    }

    /// The decay of parameters of two or more dims: each step takes lr times this off.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> AdamW {
        AdamW { weight_decay, ..self }
    }

    /// Other settings for parameters whose names match a pattern; later groups win, setting by setting.
    #[must_use]
    pub fn group(mut self, pattern: &str, group: Group) -> AdamW {
        self.groups.push((pattern.to_string(), group));
        self
    }

    /// A step with the optimizer's own rate and without clipping.
    ///
    /// # Errors
    /// `Kind::NotFinite` if the gradient norm is not finite (parameters are untouched), and as [`AdamW::step`].
    #[track_caller]
    pub fn update<M>(&mut self, model: &Model<M>, gradients: Gradients) -> Result<Report>
    where
        M: crate::Module,
    {
        let report = self.step(model, gradients, StepArgs::new(self.lr))?;
        if report.applied {
            return Ok(report);
        }
        let text = format!("the gradient norm is {}; the step was not taken", report.grad_norm);
        Err(Error::new(Kind::NotFinite, text).detail("help", "a smaller learning rate is the usual cure"))
    }

    /// Takes a step, unless the gradient norm or one of the control sums is not finite. One all-reduce over the whole
    /// mesh; every rank calls this together. Parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// What the collective and the kernels report.
    #[track_caller]
    pub fn step<M>(
        &mut self,
        model: &Model<M>,
        mut gradients: Gradients,
        args: StepArgs<'_>,
    ) -> Result<Report>
    where
        M: crate::Module,
    {
        let norm = grad_norm(model.rank(), model.params(), &gradients, args.control)?;
        let applied = norm.grad_norm.is_finite() && norm.control.iter().all(|x| x.is_finite());
        let grad_norm = norm.grad_norm / args.loss_scale;
        let report = Report { grad_norm, control: norm.control, applied };
        if !applied {
            return Ok(report);
        }
        self.num_steps += 1;
        let clip = args.clip.filter(|most| *most < report.grad_norm);
        let grad_scale = clip.map_or(1.0, |most| most / report.grad_norm) / args.loss_scale;
        for param in model.params().iter().filter(|p| !p.is_frozen()) {
            let Some(gradient) = gradients.remove(&param.key()) else { continue };
            let rates = self.rates(param, args.lr, grad_scale);
            let moments = match self.moments.entry(param.key()) {
                std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::btree_map::Entry::Vacant(new) => {
                    new.insert(Moments::zeros(model.rank(), param.tensor().layout())?)
                }
            };
            param.update(|tensor| moments.step(tensor, &gradient, &rates))?;
        }
        Ok(report)
    }

    fn rates(&self, param: &Param, lr: f64, grad_scale: f64) -> AdamWRates {
        let name = param.name();
        let (mut lr_scale, mut weight_decay) = (1.0, if param.decays() { self.weight_decay } else { 0.0 });
        for (_, group) in self.groups.iter().filter(|(pattern, _)| matches(pattern, &name)) {
            lr_scale = group.lr_scale.unwrap_or(lr_scale);
            weight_decay = group.weight_decay.unwrap_or(weight_decay);
        }
        let [beta1, beta2] = self.betas;
        let correction = |beta: f64| 1.0 - beta.powf(self.num_steps as f64);
        AdamWRates {
            lr: lr * lr_scale,
            beta1,
            beta2,
            eps: self.eps,
            weight_decay,
            correction1: correction(beta1),
            correction2: correction(beta2),
            grad_scale,
        }
    }

    /// How many steps were taken.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// The two moments of a parameter, once it has been stepped: what a run needs to go on, beside its parameters.
    #[must_use]
    pub fn moments(&self, param: &Param) -> Option<[Tensor; 2]> {
        let moments = self.moments.get(&param.key())?;
        Some(moments.tensors(param.tensor().rank()))
    }

    /// Goes on from step `num_steps` with these moments, given for each parameter that has them.
    ///
    /// # Errors
    /// `Kind::Layout` if moments do not lie as their parameter is stored; `Kind::DType`.
    pub fn restore<'a>(
        &mut self,
        num_steps: u64,
        moments: impl IntoIterator<Item = (&'a Param, [Tensor; 2])>,
    ) -> Result<()> {
        let fresh = moments.into_iter().map(|(param, pair)| {
            let moments = Moments::from_tensors(&param.layout(), pair);
            moments.map(|m| (param.key(), m)).map_err(|e| e.detail("parameter", param.name()))
        });
        self.moments = fresh.collect::<Result<_>>()?;
        self.num_steps = num_steps;
        Ok(())
    }
}
