//! AdamW: Adam with decoupled weight decay. Loshchilov and Hutter, arXiv 1711.05101.

use super::hyperparameter::{BELOW_ONE, NOT_NEGATIVE, POSITIVE, check_setting};
use super::optimizer::{Optimizer, OptimizerState, check_hyperparameters_requested, wrong_num_tensors};
use super::param_group::{ParamGroup, ParamGroups};
use crate::module::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::training_step::optimizer_step::{AdamWRates, AdamWStep, Moments, adamw};
use shardgrad_tensor::{DType, Error, Hyperparameters, Kind, OverflowCheck, Result, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// AdamW optimizer.
///
/// ```text
/// m = b1 m + (1 - b1) g
/// v = b2 v + (1 - b2) g^2
/// w = w - lr decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// ```
///
/// t counts the updates of this parameter: a parameter that was frozen begins with 1. Decay applies to parameters of
/// two or more dims (in files). The moments have the layout of the stored parameter and its accumulator dtype (f32
/// for the 16-bit floats). Every rank has an optimizer of its own and steps it together with the other ranks.
#[doc(alias = "optax.adamw")]
#[doc(alias = "torch.optim.AdamW")]
#[doc(alias = "Adam")]
#[derive(Clone, Debug)]
pub struct AdamW {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    groups: ParamGroups,
    num_steps: u64,
    states: BTreeMap<Key, MomentState>,
}

/// State of one parameter.
#[derive(Clone, Debug)]
struct MomentState {
    num_steps: u64,
    moments: Moments,
}

/// State of [`AdamW`] for one parameter.
#[derive(Clone, Debug)]
pub struct AdamWState {
    /// Number of updates of the parameter.
    pub num_steps: u64,
    /// First and second moment (running means of gradients and of their squares), laid out as the stored parameter.
    pub moments: [Tensor; 2],
}

impl AdamW {
    /// Returns AdamW with betas 0.9 and 0.999, eps 1e-8 and no weight decay.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a learning rate that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn new(lr: f64) -> AdamW {
        check_setting("the learning rate", lr, NOT_NEGATIVE);
        AdamW {
            lr,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            groups: ParamGroups::default(),
            num_steps: 0,
            states: BTreeMap::new(),
        }
    }

    /// Sets the decay rates of the two moments.
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

    /// Sets the term added to the square root in the denominator. [`Optimizer::check_params`] refuses models in whose
    /// moment dtype eps is 0 or infinite.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if eps is not above 0, or not finite.
    #[track_caller]
    #[must_use]
    pub fn eps(self, eps: f64) -> AdamW {
        check_setting("eps", eps, POSITIVE);
        AdamW { eps, ..self }
    }

    /// Sets the weight decay of parameters of two or more dims: each step subtracts lr times decay times the
    /// parameter.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the decay is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> AdamW {
        check_setting("the weight decay", weight_decay, NOT_NEGATIVE);
        AdamW { weight_decay, ..self }
    }

    /// Adds a parameter group: other settings for parameters whose names match a pattern. Later groups take
    /// precedence, setting by setting. [`Optimizer::check_params`] refuses a pattern that matches no parameter.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a setting that is negative or not finite.
    #[doc(alias = "param_groups")]
    #[track_caller]
    #[must_use]
    pub fn group(mut self, pattern: &str, group: ParamGroup) -> AdamW {
        self.groups.push(pattern, group);
        self
    }

    /// Returns the hyperparameters of update number `t` (from 1) of a parameter.
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

    /// Returns the state of a parameter, once an update of the parameter was tried.
    #[doc(alias = "state_dict")]
    #[must_use]
    pub fn state(&self, param: &Param) -> Option<AdamWState> {
        let MomentState { num_steps, moments } = self.states.get(&param.key())?;
        Some(AdamWState { num_steps: *num_steps, moments: moments.tensors(param.tensor().rank()) })
    }

    /// Restores the state after `num_steps` steps: the state of each parameter that has been updated.
    ///
    /// # Errors
    /// `Kind::Layout` if moments have another layout than their stored parameter; `Kind::DType`.
    #[doc(alias = "load_state_dict")]
    pub fn restore<'a>(
        &mut self,
        num_steps: u64,
        states: impl IntoIterator<Item = (&'a Param, AdamWState)>,
    ) -> Result<()> {
        let restored = states.into_iter().map(|(param, AdamWState { num_steps, moments })| {
            let moments = Moments::from_tensors(&param.layout(), moments);
            let moments = moments.map_err(|e| e.detail("parameter", param.name()))?;
            Ok((param.key(), MomentState { num_steps, moments }))
        });
        self.states = restored.collect::<Result<_>>()?;
        self.num_steps = num_steps;
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        let AdamW { lr, betas: [beta1, beta2], eps, weight_decay, groups, num_steps, .. } = self;
        format!(
            "AdamW lr {lr}, betas [{beta1}, {beta2}], eps {eps}, weight decay {weight_decay}, groups {groups}, after {num_steps} steps"
        )
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn check_params(&self, params: &[Param]) -> Result<()> {
        let has_f32_moments = |p: &Param| p.layout().dtype().accumulator() == DType::F32;
        let eps = self.eps as f32;
        if !(eps > 0.0 && eps.is_finite()) && params.iter().any(has_f32_moments) {
            let text = format!("eps {:e} is {eps} in f32, the dtype of the moments", self.eps);
            let help = format!("use an eps from {:e} to {:e}", f32::MIN_POSITIVE, f32::MAX);
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        self.groups.check(params)
    }

    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        let AdamWState { num_steps, moments } = self.state(param)?;
        Some(OptimizerState { num_steps, tensors: moments.into() })
    }

    fn state_names(&self, _: &Param) -> Option<Vec<&'static str>> {
        Some(vec!["exp_avg", "exp_avg_sq"])
    }

    fn load_state(&mut self, num_steps: u64, states: Vec<(Param, OptimizerState)>) -> Result<()> {
        let to_moments = |(param, state): &(Param, OptimizerState)| match &state.tensors[..] {
            [first, second] => {
                let moments = [first.clone(), second.clone()];
                Ok((param.clone(), AdamWState { num_steps: state.num_steps, moments }))
            }
            other => Err(wrong_num_tensors(param, other.len(), 2)),
        };
        let states: Vec<(Param, AdamWState)> = states.iter().map(to_moments).collect::<Result<_>>()?;
        self.restore(num_steps, states.iter().map(|(param, state)| (param, state.clone())))
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        let mut rows = Vec::with_capacity(params.len());
        for param in params {
            let rank = param.tensor().rank().clone();
            let state = match self.states.entry(param.key()) {
                Entry::Occupied(state) => state.into_mut(),
                Entry::Vacant(new) => {
                    new.insert(MomentState { num_steps: 0, moments: Moments::zeros(&rank, &param.layout())? })
                }
            };
            state.moments.make_unique(&rank)?;
            let t = state.num_steps + 1;
            rows.push(self.rates_at(param, t, lr).row().to_vec());
        }
        Ok(rows)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        check_hyperparameters_requested(params, |param| self.states.contains_key(&param.key()))?;
        let mut moments: BTreeMap<Key, &mut Moments> =
            self.states.iter_mut().map(|(key, state)| (*key, &mut state.moments)).collect();
        Param::update_all(params.iter().map(|(param, _)| *param), |tensors| {
            let mut steps = Vec::with_capacity(params.len());
            for (param, (of, grad)) in tensors.into_iter().zip(params) {
                let moments = moments.remove(&of.key()).expect("each parameter comes once");
                steps.push(AdamWStep { param, grad, moments });
            }
            adamw(steps, step)
        })
    }

    fn count_step(&mut self, params: &[&Param]) {
        self.num_steps += 1;
        for param in params {
            self.states.entry(param.key()).and_modify(|state| state.num_steps += 1);
        }
    }
}
