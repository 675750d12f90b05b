//! SGD: stochastic gradient descent with momentum, optionally Nesterov.

use super::hyperparameter::{NOT_NEGATIVE, ValidRange, check_setting};
use super::optimizer::{Optimizer, OptimizerState};
use super::param_group::{ParamGroup, ParamGroups};
use super::velocities::Velocities;
use crate::module::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::training_step::optimizer_step::{SgdRates, SgdStep, Velocity, sgd};
use shardgrad_tensor::{Hyperparameters, OverflowCheck, Result, Tensor};
use std::collections::BTreeMap;

/// SGD optimizer, with Nesterov momentum after Sutskever et al. 2013.
///
/// ```text
/// g = gradient + decay w
/// v = momentum v + g
/// w = w - lr v                 (Nesterov: w = w - lr (g + momentum v))
/// ```
///
/// Decay applies to parameters of two or more dims (in files). The velocity has the layout of the stored parameter
/// and its accumulator dtype (f32 for the 16-bit floats). Every rank has an optimizer of its own and steps it
/// together with the other ranks.
#[doc(alias = "optax.sgd")]
#[doc(alias = "torch.optim.SGD")]
#[doc(alias = "momentum")]
#[doc(alias = "SGD")]
#[derive(Clone, Debug)]
pub struct Sgd {
    lr: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    groups: ParamGroups,
    velocities: Velocities,
}

const MOMENTUM_RANGE: ValidRange = (|x| (0.0..=1.0).contains(&x), "a number from 0 to 1");

impl Sgd {
    /// Returns plain SGD: no momentum, no weight decay.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a learning rate that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn new(lr: f64) -> Sgd {
        check_setting("the learning rate", lr, NOT_NEGATIVE);
        Sgd {
            lr,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            groups: ParamGroups::default(),
            velocities: Velocities::default(),
        }
    }

    /// Sets the momentum, 0 to 1.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the momentum is not in `0..=1`.
    #[track_caller]
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Sgd {
        check_setting("the momentum", momentum, MOMENTUM_RANGE);
        Sgd { momentum, ..self }
    }

    /// Uses Nesterov momentum.
    #[must_use]
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }

    /// Sets the weight decay of parameters of two or more dims: decay times the parameter is added to the gradient.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the decay is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Sgd {
        check_setting("the weight decay", weight_decay, NOT_NEGATIVE);
        Sgd { weight_decay, ..self }
    }

    /// Adds a parameter group: other settings for parameters whose names match a pattern. Later groups take
    /// precedence, setting by setting. [`Optimizer::check_params`] refuses a pattern that matches no parameter.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a setting that is negative or not finite.
    #[doc(alias = "param_groups")]
    #[track_caller]
    #[must_use]
    pub fn group(mut self, pattern: &str, group: ParamGroup) -> Sgd {
        self.groups.push(pattern, group);
        self
    }

    /// Returns the velocity (momentum buffer) of a parameter, once an update of the parameter was tried.
    #[doc(alias = "momentum_buffer")]
    #[must_use]
    pub fn velocity(&self, param: &Param) -> Option<Tensor> {
        self.velocities.tensor(param)
    }

    /// Restores the state after `num_steps` steps: the velocity of each parameter that has one.
    ///
    /// # Errors
    /// `Kind::Layout` if a velocity has another layout than its stored parameter.
    #[doc(alias = "load_state_dict")]
    pub fn restore<'a>(
        &mut self,
        num_steps: u64,
        velocities: impl IntoIterator<Item = (&'a Param, Tensor)>,
    ) -> Result<()> {
        self.velocities.restore(num_steps, velocities)
    }
}

impl Optimizer for Sgd {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        let Sgd { lr, momentum, nesterov, weight_decay, groups, velocities } = self;
        let num_steps = velocities.num_steps();
        let nesterov_note = if *nesterov { " after Nesterov" } else { "" };
        format!(
            "SGD lr {lr}, momentum {momentum}{nesterov_note}, weight decay {weight_decay}, groups {groups}, after {num_steps} steps"
        )
    }

    fn num_steps(&self) -> u64 {
        self.velocities.num_steps()
    }

    fn check_params(&self, params: &[Param]) -> Result<()> {
        self.groups.check(params)
    }

    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        self.velocities.state(param)
    }

    fn state_names(&self, _: &Param) -> Option<Vec<&'static str>> {
        Some(vec![Velocities::NAME])
    }

    fn load_state(&mut self, num_steps: u64, states: Vec<(Param, OptimizerState)>) -> Result<()> {
        self.velocities.load(num_steps, &states)
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        let mut rows = Vec::with_capacity(params.len());
        for param in params {
            self.velocities.get_or_zeros(param)?.make_unique(param.tensor().rank())?;
            let [lr, weight_decay] = self.groups.of(param, lr, self.weight_decay);
            rows.push(SgdRates { lr, momentum: self.momentum, weight_decay }.row().to_vec());
        }
        Ok(rows)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let velocities = self.velocities.of_update(params)?;
        let mut velocities: BTreeMap<Key, &mut Velocity> =
            velocities.iter_mut().map(|(key, velocity)| (*key, velocity)).collect();
        Param::update_all(params.iter().map(|(param, _)| *param), |tensors| {
            let mut steps = Vec::with_capacity(params.len());
            for (param, (of, grad)) in tensors.into_iter().zip(params) {
                let velocity = velocities.remove(&of.key()).expect("each parameter comes once");
                steps.push(SgdStep { param, grad, velocity });
            }
            sgd(steps, self.nesterov, step)
        })
    }

    fn count_step(&mut self, _: &[&Param]) {
        self.velocities.count_step();
    }
}
