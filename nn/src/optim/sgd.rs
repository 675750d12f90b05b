//! Stochastic gradient descent with momentum.

use super::step::{Group, Groups, Kept, NOT_NEGATIVE, Optimizer, Range, check_asked, check_setting, unlike};
use crate::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::update::{SgdRates, SgdStep, Velocity, descent};
use shardgrad_tensor::{GatedStep, Result, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

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
    groups: Groups,
    num_steps: u64,
    velocities: BTreeMap<Key, Velocity>,
}

const MOMENTA: Range = (|x| (0.0..=1.0).contains(&x), "a number from 0 to 1");

impl Sgd {
    /// Plain descent: no momentum, no weight decay.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a rate that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn new(lr: f64) -> Sgd {
        check_setting("the learning rate", lr, NOT_NEGATIVE);
        Sgd {
            lr,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            groups: Groups::default(),
            num_steps: 0,
            velocities: BTreeMap::new(),
        }
    }

    /// How slowly the velocity forgets, 0 to 1.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if it is not in `0..=1`.
    #[track_caller]
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Sgd {
        check_setting("the momentum", momentum, MOMENTA);
        Sgd { momentum, ..self }
    }

    /// Steps that look ahead by the momentum.
    #[must_use]
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }

    /// The decay of parameters of two or more dims: this times a parameter is added to its gradient.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if it is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Sgd {
        check_setting("the weight decay", weight_decay, NOT_NEGATIVE);
        Sgd { weight_decay, ..self }
    }

    /// Other settings for parameters whose names match a pattern; later groups win, setting by setting. One that matches
    /// none is refused by [`Optimizer::check`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a setting that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn group(mut self, pattern: &str, group: Group) -> Sgd {
        self.groups.push(pattern, group);
        self
    }

    /// The velocity of a parameter, once a step of it was tried: what a run needs to go on, beside its parameters.
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

impl Optimizer for Sgd {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        let Sgd { lr, momentum, nesterov, weight_decay, groups: Groups(groups), num_steps, .. } = self;
        let ahead = if *nesterov { " after Nesterov" } else { "" };
        format!(
            "SGD lr {lr}, momentum {momentum}{ahead}, weight decay {weight_decay}, groups {groups:?}, after {num_steps} steps"
        )
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn check(&self, params: &[Param]) -> Result<()> {
        self.groups.check(params)
    }

    fn kept(&self, param: &Param) -> Option<Kept> {
        Some(Kept { num_steps: self.num_steps, tensors: vec![self.velocity(param)?] })
    }

    fn kept_names(&self) -> Option<&'static [&'static str]> {
        Some(&["momentum_buffer"])
    }

    fn go_on(&mut self, num_steps: u64, kept: Vec<(Param, Kept)>) -> Result<()> {
        let velocity = |(param, kept): &(Param, Kept)| match &kept.tensors[..] {
            [velocity] => Ok((param.clone(), velocity.clone())),
            other => Err(unlike(param, other.len(), 1)),
        };
        let velocities: Vec<(Param, Tensor)> = kept.iter().map(velocity).collect::<Result<_>>()?;
        self.restore(num_steps, velocities.iter().map(|(param, velocity)| (param, velocity.clone())))
    }

    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        let mut rates = Vec::new();
        for param in params {
            let rank = param.tensor().rank().clone();
            let velocity = match self.velocities.entry(param.key()) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Velocity::zeros(&rank, &param.layout())?),
            };
            velocity.own(&rank)?;
            let [lr, weight_decay] = self.groups.of(param, lr, self.weight_decay);
            rates.extend(SgdRates { lr, momentum: self.momentum, weight_decay }.row());
        }
        Ok(rates)
    }

    fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()> {
        check_asked(params, |param| self.velocities.contains_key(&param.key()))?;
        let mut velocities: BTreeMap<Key, &mut Velocity> =
            self.velocities.iter_mut().map(|(key, velocity)| (*key, velocity)).collect();
        Param::update_all(params.iter().map(|(param, _)| *param), |tensors| {
            let mut steps = Vec::with_capacity(params.len());
            for (param, (of, grad)) in tensors.into_iter().zip(params) {
                let velocity = velocities.remove(&of.key()).expect("each parameter comes once");
                steps.push(SgdStep { param, grad, velocity });
            }
            descent(steps, self.nesterov, step)
        })
    }

    fn count(&mut self, _: &[&Param]) {
        self.num_steps += 1;
    }
}
