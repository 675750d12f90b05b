//! AdamW: Adam with weight decay apart from the gradient. Loshchilov and Hutter, arXiv 1711.05101.

use super::step::{Group, Groups, Optimizer};
use crate::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::update::{AdamWRates, AdamWStep, Moments, step_many};
use shardgrad_tensor::{Result, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

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
    groups: Groups,
    num_steps: u64,
    moments: BTreeMap<Key, Moments>,
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
            groups: Groups::default(),
            num_steps: 0,
            moments: BTreeMap::new(),
        }
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
        self.groups.push(pattern, group);
        self
    }

    fn rates(&self, param: &Param, lr: f64, grad_scale: f64) -> AdamWRates {
        let [lr, weight_decay] = self.groups.of(param, lr, self.weight_decay);
        let [beta1, beta2] = self.betas;
        let correction = |beta: f64| 1.0 - beta.powf(self.num_steps as f64);
        AdamWRates {
            lr,
            beta1,
            beta2,
            eps: self.eps,
            weight_decay,
            correction1: correction(beta1),
            correction2: correction(beta2),
            grad_scale,
        }
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

    fn begin(&mut self) {
        self.num_steps += 1;
    }

    fn change(&mut self, params: &[(&Param, Tensor)], lr: f64, grad_scale: f64) -> Result<()> {
        let mut rates = Vec::with_capacity(params.len());
        for (param, _) in params {
            rates.push(self.rates(param, lr, grad_scale));
            if let Entry::Vacant(new) = self.moments.entry(param.key()) {
                new.insert(Moments::zeros(param.tensor().rank(), &param.layout())?);
            }
        }
        let mut moments: BTreeMap<Key, &mut Moments> =
            self.moments.iter_mut().map(|(key, moments)| (*key, moments)).collect();
        Param::update_all(params.iter().map(|(param, _)| *param), |tensors| {
            let mut steps = Vec::with_capacity(params.len());
            for ((param, (of, grad)), rates) in tensors.into_iter().zip(params).zip(rates) {
                let moments =
                    moments.remove(&of.key()).expect("they were made above, and each parameter comes once");
                steps.push(AdamWStep { param, grad, moments, rates });
            }
            step_many(steps)
        })
    }
}
