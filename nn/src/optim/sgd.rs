//! Stochastic gradient descent with momentum.

use super::adamw::{Group, Report, StepArgs};
use super::norm::grad_norm;
use crate::name::matches;
use crate::param::Param;
use crate::placed::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::update::{SgdRates, Velocity};
use shardgrad_tensor::{Error, Kind, Result, Tensor};
use std::collections::BTreeMap;

/// g = gradient + decay w, v = momentum v + g, w = w - lr v; or, after Nesterov, w = w - lr (g + momentum v) (Sutskever and
/// others 2013).
///
/// Decay applies to parameters of two or more dims (in files). The velocity lies as the parameter is stored and is kept in
/// its accumulator type (f32 for the 16-bit floats). Every rank keeps an optimizer of its own and steps it together with the
/// others.
#[derive(Clone, Debug)]
pub struct Sgd {
    lr: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    groups: Vec<(String, Group)>,
    num_steps: u64,
    velocities: BTreeMap<Key, Velocity>,
}

impl Sgd {
    /// Plain descent: no momentum, no weight decay.
    #[must_use]
    pub fn new(lr: f64) -> Sgd {
        Sgd {
            lr,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            groups: Vec::new(),
            num_steps: 0,
            velocities: BTreeMap::new(),
        }
    }

    /// The learning rate.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// How slowly the velocity forgets, 0 to 1.
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Sgd {
        Sgd { momentum, ..self }
    }

    /// Steps that look ahead by the momentum.
    #[must_use]
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }

    /// The decay of parameters of two or more dims: this times a parameter is added to its gradient.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Sgd {
        Sgd { weight_decay, ..self }
    }

    /// Other settings for parameters whose names match a pattern; later groups win, setting by setting.
    #[must_use]
    pub fn group(mut self, pattern: &str, group: Group) -> Sgd {
        self.groups.push((pattern.to_string(), group));
        self
    }

    /// A step with the optimizer's own rate and without clipping.
    ///
    /// # Errors
    /// `Kind::NotFinite` if the gradient norm is not finite (parameters are untouched), and as [`Sgd::step`].
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

    /// Takes a step, unless the gradient norm or one of the control sums is not finite. One all-reduce over the whole mesh;
    /// every rank calls this together. Parameters without a gradient stay as they are.
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
            let velocity = match self.velocities.entry(param.key()) {
                std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::btree_map::Entry::Vacant(new) => {
                    new.insert(Velocity::zeros(model.rank(), param.tensor().layout())?)
                }
            };
            param.update(|tensor| velocity.step(tensor, &gradient, &rates))?;
        }
        Ok(report)
    }

    fn rates(&self, param: &Param, lr: f64, grad_scale: f64) -> SgdRates {
        let name = param.name();
        let (mut lr_scale, mut weight_decay) = (1.0, if param.decays() { self.weight_decay } else { 0.0 });
        for (_, group) in self.groups.iter().filter(|(pattern, _)| matches(pattern, &name)) {
            lr_scale = group.lr_scale.unwrap_or(lr_scale);
            weight_decay = group.weight_decay.unwrap_or(weight_decay);
        }
        let Sgd { momentum, nesterov, .. } = *self;
        SgdRates { lr: lr * lr_scale, momentum, weight_decay, grad_scale, nesterov }
    }

    /// How many steps were taken.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// The velocity of a parameter, once it has been stepped: what a run needs to go on, beside its parameters.
    #[must_use]
    pub fn velocity(&self, param: &Param) -> Option<Tensor> {
        Some(self.velocities.get(&param.key())?.tensor(param.tensor().rank()))
    }

    /// Goes on from step `num_steps` with these velocities, given for each parameter that has one.
    ///
    /// # Errors
    /// `Kind::Layout` if a velocity does not lie as its parameter is stored.
    pub fn restore<'a>(
        &mut self,
        num_steps: u64,
        velocities: impl IntoIterator<Item = (&'a Param, Tensor)>,
    ) -> Result<()> {
        let fresh = velocities.into_iter().map(|(param, v)| {
            let velocity = Velocity::from_tensor(&param.layout(), &v);
            velocity.map(|v| (param.key(), v)).map_err(|e| e.detail("parameter", param.name()))
        });
        self.velocities = fresh.collect::<Result<_>>()?;
        self.num_steps = num_steps;
        Ok(())
    }
}
