//! AdamW: Adam with weight decay apart from the gradient. Loshchilov and Hutter, arXiv 1711.05101.

use super::step::{
    BELOW_ONE, Group, Groups, Kept, NOT_NEGATIVE, Optimizer, POSITIVE, check_asked, check_setting, unlike,
};
use crate::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::update::{AdamWRates, AdamWStep, Moments, adamw};
use shardgrad_tensor::{DType, Error, GatedStep, Kind, Result, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
/// w = w - lr decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
///
/// t counts the steps of this parameter: one that was frozen begins with 1. Decay applies to parameters of two or more dims
/// (in files). The moments lie as the parameter is stored and are kept in its accumulator type (f32 for the 16-bit floats).
/// Every rank keeps an optimizer of its own and steps it together with the others.
#[derive(Clone, Debug)]
pub struct AdamW {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    groups: Groups,
    num_steps: u64,
    kept: BTreeMap<Key, Means>,
}

/// What is kept of a parameter.
#[derive(Clone, Debug)]
struct Means {
    num_steps: u64,
    moments: Moments,
}

/// What [`AdamW`] knows of a parameter for which a step was tried.
#[derive(Clone, Debug)]
pub struct AdamWState {
    /// How often it was stepped.
    pub num_steps: u64,
    /// The means of gradients and of their squares, as the parameter is stored.
    pub moments: [Tensor; 2],
}

impl AdamW {
    /// The usual setting: betas 0.9 and 0.999, eps 1e-8, no weight decay.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a rate that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn new(lr: f64) -> AdamW {
        check_setting("the learning rate", lr, NOT_NEGATIVE);
        AdamW {
            lr,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            groups: Groups::default(),
            num_steps: 0,
            kept: BTreeMap::new(),
        }
    }

    /// How slowly the two averages forget.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if one is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn betas(self, beta1: f64, beta2: f64) -> AdamW {
        check_setting("beta1", beta1, BELOW_ONE);
        check_setting("beta2", beta2, BELOW_ONE);
        AdamW { betas: [beta1, beta2], ..self }
    }

    /// What is added to the root in the divisor. A model in whose means it is 0 or infinite is refused by [`Optimizer::check`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if it is not above 0, or not finite.
    #[track_caller]
    #[must_use]
    pub fn eps(self, eps: f64) -> AdamW {
        check_setting("eps", eps, POSITIVE);
        AdamW { eps, ..self }
    }

    /// The decay of parameters of two or more dims: each step takes lr times this off.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if it is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> AdamW {
        check_setting("the weight decay", weight_decay, NOT_NEGATIVE);
        AdamW { weight_decay, ..self }
    }

    /// Other settings for parameters whose names match a pattern; later groups win, setting by setting. One that matches
    /// none is refused by [`Optimizer::check`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a setting that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn group(mut self, pattern: &str, group: Group) -> AdamW {
        self.groups.push(pattern, group);
        self
    }

    /// The numbers of a parameter's step number `t`, from 1.
    fn rates_at(&self, param: &Param, t: u64, lr: f64) -> AdamWRates {
        let [lr, weight_decay] = self.groups.of(param, lr, self.weight_decay);
        let [beta1, beta2] = self.betas;
        let correction = |beta: f64| 1.0 - beta.powf(t as f64);
        AdamWRates {
            lr,
            beta1,
            beta2,
            eps: self.eps,
            weight_decay,
            correction1: correction(beta1),
            correction2: correction(beta2),
        }
    }

    /// What is kept of a parameter, once a step of it was tried: what a run needs to go on, beside its parameters.
    #[must_use]
    pub fn state(&self, param: &Param) -> Option<AdamWState> {
        let Means { num_steps, moments } = self.kept.get(&param.key())?;
        Some(AdamWState { num_steps: *num_steps, moments: moments.tensors(param.tensor().rank()) })
    }

    /// Goes on from step `num_steps` with what was kept of each parameter that had been stepped.
    ///
    /// # Errors
    /// `Kind::Layout` if moments do not lie as their parameter is stored; `Kind::DType`.
    pub fn restore<'a>(
        &mut self,
        num_steps: u64,
        states: impl IntoIterator<Item = (&'a Param, AdamWState)>,
    ) -> Result<()> {
        let kept = states.into_iter().map(|(param, AdamWState { num_steps, moments })| {
            let moments = Moments::from_tensors(&param.layout(), moments);
            let moments = moments.map_err(|e| e.detail("parameter", param.name()))?;
            Ok((param.key(), Means { num_steps, moments }))
        });
        self.kept = kept.collect::<Result<_>>()?;
        self.num_steps = num_steps;
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        let AdamW { lr, betas, eps, weight_decay, groups: Groups(groups), num_steps, .. } = self;
        format!(
            "AdamW lr {lr}, betas {betas:?}, eps {eps}, weight decay {weight_decay}, groups {groups:?}, after {num_steps} steps"
        )
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn check(&self, params: &[Param]) -> Result<()> {
        let is_narrow = |p: &Param| p.layout().dtype().accumulator() == DType::F32;
        let kept = self.eps as f32;
        if !(kept > 0.0 && kept.is_finite()) && params.iter().any(is_narrow) {
            let text =
                format!("eps {:e} is {kept} in f32, in which the means of gradients are kept", self.eps);
            let help = format!("use one from {:e} to {:e}", f32::MIN_POSITIVE, f32::MAX);
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        self.groups.check(params)
    }

    fn kept(&self, param: &Param) -> Option<Kept> {
        let AdamWState { num_steps, moments } = self.state(param)?;
        Some(Kept { num_steps, tensors: moments.into() })
    }

    fn kept_names(&self) -> Option<&'static [&'static str]> {
        Some(&["exp_avg", "exp_avg_sq"])
    }

    fn go_on(&mut self, num_steps: u64, kept: Vec<(Param, Kept)>) -> Result<()> {
        let state = |(param, kept): &(Param, Kept)| match &kept.tensors[..] {
            [first, second] => {
                let moments = [first.clone(), second.clone()];
                Ok((param.clone(), AdamWState { num_steps: kept.num_steps, moments }))
            }
            other => Err(unlike(param, other.len(), 2)),
        };
        let states: Vec<(Param, AdamWState)> = kept.iter().map(state).collect::<Result<_>>()?;
        self.restore(num_steps, states.iter().map(|(param, state)| (param, state.clone())))
    }

    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        let mut rates = Vec::new();
        for param in params {
            let rank = param.tensor().rank().clone();
            let kept = match self.kept.entry(param.key()) {
                Entry::Occupied(kept) => kept.into_mut(),
                Entry::Vacant(new) => {
                    new.insert(Means { num_steps: 0, moments: Moments::zeros(&rank, &param.layout())? })
                }
            };
            kept.moments.own(&rank)?;
            let t = kept.num_steps + 1;
            rates.extend(self.rates_at(param, t, lr).row());
        }
        Ok(rates)
    }

    fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()> {
        check_asked(params, |param| self.kept.contains_key(&param.key()))?;
        let mut moments: BTreeMap<Key, &mut Moments> =
            self.kept.iter_mut().map(|(key, kept)| (*key, &mut kept.moments)).collect();
        Param::update_all(params.iter().map(|(param, _)| *param), |tensors| {
            let mut steps = Vec::with_capacity(params.len());
            for (param, (of, grad)) in tensors.into_iter().zip(params) {
                let moments = moments.remove(&of.key()).expect("each parameter comes once");
                steps.push(AdamWStep { param, grad, moments });
            }
            adamw(steps, step)
        })
    }

    fn count(&mut self, params: &[&Param]) {
        self.num_steps += 1;
        for param in params {
            self.kept.entry(param.key()).and_modify(|kept| kept.num_steps += 1);
        }
    }
}
