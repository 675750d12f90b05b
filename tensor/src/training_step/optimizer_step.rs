//! Fused optimizer steps (AdamW, SGD) in place on each rank's stored shards, without communication and without waiting
//! on the host.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::tensor::Tensor;
use crate::training_step::overflow_check::OverflowCheck;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::{adamw, sgd};
use shardgrad_kernels::{DType, Scalar};

/// The optimizer state of one parameter, this rank's shard: N local tensors of the layout of the stored parameter, in the
/// accumulator dtype.
#[derive(Clone, Debug)]
struct StateTensors<const N: usize> {
    layout: Layout,
    locals: [LocalTensor; N],
}

impl<const N: usize> StateTensors<N> {
    fn zeros(rank: &Rank, param: &Layout) -> Result<StateTensors<N>> {
        param.check_storable()?;
        let layout = param.with_dtype(param.dtype().accumulator());
        let shape = layout.local_shape(rank.coordinates());
        let zeros = (0..N).map(|_| LocalTensor::full(rank, layout.dtype(), &shape, 0.0));
        let locals = zeros.collect::<Result<Vec<LocalTensor>>>()?.try_into().expect("there are N of them");
        Ok(StateTensors { layout, locals })
    }

    /// Takes saved tensors; `what` names them in an error, with its verb.
    fn from_tensors(param: &Layout, tensors: [&Tensor; N], what: &str) -> Result<StateTensors<N>> {
        let layout = param.with_dtype(param.dtype().accumulator());
        match tensors.into_iter().find(|t| *t.layout() != layout) {
            None => Ok(StateTensors { layout, locals: tensors.map(|t| t.local().clone()) }),
            Some(other) => {
                let text = format!("{what} layout {}, the parameter needs {layout}", other.layout());
                Err(Error::new(Kind::Layout, text))
            }
        }
    }

    fn tensors(&self, rank: &Rank) -> [Tensor; N] {
        self.locals.each_ref().map(|local| Tensor::assemble(rank, self.layout.clone(), local.clone()))
    }

    /// Copies local tensors that are shared or have gaps, so that they can be written.
    fn make_unique(&mut self, rank: &Rank) -> Result<()> {
        for local in &mut self.locals {
            if !(local.view.is_contiguous() && local.buffer.is_unique()) {
                *local = local.to_dtype(rank, local.dtype)?;
            }
        }
        Ok(())
    }

    /// Prepares the state for a step: checks all layouts and makes the state unique. `names` are those of the step and the state in an
    /// error.
    fn prepare(&mut self, param: &Tensor, grad: &Tensor, names: [&str; 2]) -> Result<()> {
        let layout = param.layout();
        if layout.with_dtype(self.layout.dtype()) == self.layout && grad.layout() == layout {
            return self.make_unique(param.rank());
        }
        let ([step, state], grad, own) = (names, grad.layout(), &self.layout);
        let text =
            format!("{step} needs one layout: the parameter is {layout}, the gradient {grad}, {state} {own}");
        Err(Error::new(Kind::Layout, text))
    }
}

/// The rates of one parameter in an AdamW step; see [`adamw::STEP`] for the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWRates {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the first moment (mean of the gradients).
    #[doc(alias = "betas")]
    pub beta1: f64,
    /// Decay rate of the second moment (mean of their squares).
    pub beta2: f64,
    /// Added to the square root in the denominator.
    pub eps: f64,
    /// Decoupled weight decay: lr times this fraction of a parameter is subtracted.
    pub weight_decay: f64,
    /// 1 - beta1^t at step t, counted from 1.
    pub correction1: f64,
    /// 1 - beta2^t.
    pub correction2: f64,
}

impl AdamWRates {
    /// Returns the rates in the order of the step's inputs ([`OverflowCheck::new`]).
    #[must_use]
    pub fn row(&self) -> [f64; adamw::NUM_RATES] {
        let AdamWRates { lr, beta1, beta2, eps, weight_decay, correction1, correction2 } = *self;
        [lr, beta1, beta2, eps, weight_decay, correction1, correction2]
    }
}

/// The AdamW state of one parameter, this rank's shard: first and second moment, in the accumulator dtype. It holds no
/// handle of a rank, so it may cross threads with the optimizer that owns it.
#[doc(alias = "exp_avg")]
#[doc(alias = "exp_avg_sq")]
#[doc(alias = "optimizer_state")]
#[derive(Clone, Debug)]
pub struct Moments(StateTensors<2>);

impl Moments {
    /// Makes zeros for a parameter with a stored layout.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Layout` for a layout that is not storable.
    pub fn zeros(rank: &Rank, param: &Layout) -> Result<Moments> {
        StateTensors::zeros(rank, param).map(Moments)
    }

    /// Makes the moments from saved tensors, for a parameter with a stored layout.
    ///
    /// # Errors
    /// `Kind::Layout` if their layout or dtype does not match the parameter.
    pub fn from_tensors(param: &Layout, [m, v]: [Tensor; 2]) -> Result<Moments> {
        StateTensors::from_tensors(param, [&m, &v], "the moments have").map(Moments)
    }

    /// Returns the moments as tensors, first moment first.
    #[must_use]
    pub fn tensors(&self, rank: &Rank) -> [Tensor; 2] {
        self.0.tensors(rank)
    }

    /// Copies shared moments, so that they can be changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn make_unique(&mut self, rank: &Rank) -> Result<()> {
        self.0.make_unique(rank)
    }
}

/// One parameter of an [`adamw()`] step.
#[derive(Debug)]
pub struct AdamWStep<'a> {
    /// The parameter before the step.
    pub param: Tensor,
    /// The gradient.
    pub grad: &'a Tensor,
    /// The moments.
    pub moments: &'a mut Moments,
}

/// Updates parameters with AdamW, unless the overflow check skips the step. Parameter i uses row i of the step's hyperparameters,
/// [`adamw::NUM_RATES`] values ([`AdamWRates::row`]). All parameters of one dtype take one launch. Parameters and
/// moments are changed in place where their memory is not shared. The parameters are returned in their order; after an
/// error, parameters and moments may be partly updated, unless the launches were captured and not run.
///
/// # Errors
/// `Kind::Config` if the step has another number of hyperparameters; `Kind::Layout` if the layouts of parameter, gradient and
/// moments do not match; `Kind::OutOfMemory`.
#[doc(alias = "AdamW")]
#[doc(alias = "fused")]
#[doc(alias = "_fused_adamw")]
#[doc(alias = "multi_tensor_apply")]
pub fn adamw(steps: Vec<AdamWStep<'_>>, check: &OverflowCheck) -> (Vec<Tensor>, Result<()>) {
    let steps = steps.into_iter().map(|AdamWStep { param, grad, moments }| (param, (grad, moments)));
    let prepare = |param: &Tensor, (grad, moments): &mut (&Tensor, &mut Moments)| {
        moments.0.prepare(param, grad, ["an AdamW step", "the moments"])
    };
    update_in_place(steps.collect(), prepare, |rank, params, others| {
        check.check_hyperparameters(params.len(), adamw::NUM_RATES)?;
        let contiguous = others.iter().map(|(grad, _)| grad.local().contiguous(rank));
        let contiguous = contiguous.collect::<Result<Vec<LocalTensor>>>()?;
        let (rates, gate) = (check.hyperparameters(adamw::NUM_RATES), check.scale_and_gate());
        let mut dtypes: Vec<DType> = params.iter().map(|param| param.dtype).collect();
        dtypes.sort_unstable();
        dtypes.dedup();
        for dtype in dtypes {
            let (mut inputs, mut outputs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
            for (i, (param, (_, moments))) in params.iter_mut().zip(&mut *others).enumerate() {
                if param.dtype == dtype {
                    inputs.push(&contiguous[i]);
                    outputs.push(param);
                    outputs.extend(&mut moments.0.locals);
                    rows.push(Scalar::Int(i as i64));
                }
            }
            inputs.extend([&rates, &gate]);
            launch(rank, &adamw::STEP, &inputs, &mut outputs, &rows)?;
        }
        Ok(())
    })
}

/// The rates of one parameter in an SGD step with momentum; see [`sgd::STEP`] for the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdRates {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the velocity.
    pub momentum: f64,
    /// Weight decay: this fraction of a parameter is added to its gradient.
    pub weight_decay: f64,
}

impl SgdRates {
    /// Returns the rates in the order of the step's inputs ([`OverflowCheck::new`]).
    #[must_use]
    pub fn row(&self) -> [f64; sgd::NUM_RATES] {
        [self.lr, self.momentum, self.weight_decay]
    }
}

/// The SGD state of one parameter, this rank's shard: the velocity, in the accumulator dtype. Like [`Moments`] it holds
/// no handle of a rank.
#[doc(alias = "momentum_buffer")]
#[derive(Clone, Debug)]
pub struct Velocity(StateTensors<1>);

impl Velocity {
    /// Makes zeros for a parameter with a stored layout.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Layout` for a layout that is not storable.
    pub fn zeros(rank: &Rank, param: &Layout) -> Result<Velocity> {
        StateTensors::zeros(rank, param).map(Velocity)
    }

    /// Makes the velocity from a saved tensor, for a parameter with a stored layout.
    ///
    /// # Errors
    /// `Kind::Layout` if its layout or dtype does not match the parameter.
    pub fn from_tensor(param: &Layout, v: &Tensor) -> Result<Velocity> {
        StateTensors::from_tensors(param, [v], "the velocity has").map(Velocity)
    }

    /// Returns the velocity as a tensor.
    #[must_use]
    pub fn tensor(&self, rank: &Rank) -> Tensor {
        let [velocity] = self.0.tensors(rank);
        velocity
    }

    /// Copies a shared velocity, so that it can be changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn make_unique(&mut self, rank: &Rank) -> Result<()> {
        self.0.make_unique(rank)
    }
}

/// One parameter of an [`sgd()`] step.
#[derive(Debug)]
pub struct SgdStep<'a> {
    /// The parameter before the step.
    pub param: Tensor,
    /// The gradient.
    pub grad: &'a Tensor,
    /// The velocity.
    pub velocity: &'a mut Velocity,
}

/// Updates parameters with SGD and momentum, as [`adamw()`] does; `nesterov` selects Nesterov momentum. Parameter i uses
/// row i of the step's rates, [`sgd::NUM_RATES`] values ([`SgdRates::row`]).
///
/// # Errors
/// `Kind::Config` if the step has another number of hyperparameters; `Kind::Layout` if the layouts of parameter, gradient and
/// velocity do not match; `Kind::OutOfMemory`.
#[doc(alias = "SGD")]
pub fn sgd(steps: Vec<SgdStep<'_>>, nesterov: bool, check: &OverflowCheck) -> (Vec<Tensor>, Result<()>) {
    let steps = steps.into_iter().map(|SgdStep { param, grad, velocity }| (param, (grad, velocity)));
    let prepare = |param: &Tensor, (grad, velocity): &mut (&Tensor, &mut Velocity)| {
        velocity.0.prepare(param, grad, ["an SGD step", "the velocity"])
    };
    update_in_place(steps.collect(), prepare, |rank, params, others| {
        check.check_hyperparameters(params.len(), sgd::NUM_RATES)?;
        let (gate, scalars) = (check.scale_and_gate(), [Scalar::Int(i64::from(nesterov))]);
        for (i, (param, (grad, velocity))) in params.iter_mut().zip(others).enumerate() {
            let (grad, rates) = (grad.local().contiguous(rank)?, check.row(i, sgd::NUM_RATES));
            let [v] = &mut velocity.0.locals;
            launch(rank, &sgd::STEP, &[&grad, &rates, &gate], &mut [param, v], &scalars)?;
        }
        Ok(())
    })
}

/// Updates parameters and their optimizer state on unshared memory; returns the parameters even if the update fails.
fn update_in_place<K>(
    steps: Vec<(Tensor, K)>,
    prepare: impl Fn(&Tensor, &mut K) -> Result<()>,
    change: impl FnOnce(&Rank, &mut [LocalTensor], &mut [K]) -> Result<()>,
) -> (Vec<Tensor>, Result<()>) {
    let (mut params, mut state): (Vec<Tensor>, Vec<K>) = steps.into_iter().unzip();
    let ready = params.iter_mut().zip(&mut state).try_for_each(|(param, state)| {
        prepare(param, state)?;
        param.make_unique()
    });
    let Some(rank) = params.first().map(|param| param.rank().clone()).filter(|_| ready.is_ok()) else {
        return (params, ready);
    };
    let parts = params.into_iter().map(|param| param.into_parts().expect("the parameter was made unique"));
    let (layouts, mut locals): (Vec<Layout>, Vec<LocalTensor>) = parts.unzip();
    let done = change(&rank, &mut locals, &mut state);
    let params = layouts.into_iter().zip(locals);
    (params.map(|(layout, local)| Tensor::assemble(&rank, layout, local)).collect(), done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training_step::StepArgs;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;
    use std::panic::Location;

    const RATES: AdamWRates = AdamWRates {
        lr: 0.1,
        beta1: 0.5,
        beta2: 0.75,
        eps: 2.0,
        weight_decay: 0.5,
        correction1: 0.5,
        correction2: 0.25,
    };

    /// A step that halves gradients, with the hyperparameters of each parameter.
    fn halving(rank: &Rank, hyperparameters: Vec<Vec<f64>>) -> Result<OverflowCheck> {
        let args = StepArgs { loss_scale: Some(2.0), ..StepArgs::new(0.1) };
        let mut step = OverflowCheck::new(rank, args, hyperparameters)?;
        step.check([], Location::caller())?;
        Ok(step)
    }

    /// One parameter after an AdamW step.
    fn one(param: Tensor, grad: &Tensor, moments: &mut Moments, rates: AdamWRates) -> Result<Tensor> {
        let of = halving(param.rank(), vec![rates.row().to_vec()])?;
        let (mut params, done) = adamw(vec![AdamWStep { param, grad, moments }], &of);
        done.map(|()| params.remove(0))
    }

    /// One parameter after an SGD step.
    fn sgd_step(
        param: Tensor,
        grad: &Tensor,
        velocity: &mut Velocity,
        (rates, nesterov): (SgdRates, bool),
    ) -> Result<Tensor> {
        let of = halving(param.rank(), vec![rates.row().to_vec()])?;
        let (mut params, done) = sgd(vec![SgdStep { param, grad, velocity }], nesterov, &of);
        done.map(|()| params.remove(0))
    }

    #[test]
    fn adamw_on_sharded_parameters_matches_hand_computed_values() {
        // g = 2: m = 0/2 + 2/2 = 1, v = 0 + 4/4 = 1; the update is (1 / 0.5) / (sqrt(1 / 0.25) + 2) = 0.5.
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[3@tp]", rank.mesh())?;
            let param = Tensor::from_global(rank, &layout, &[8.0f64, 4.0, 0.0])?;
            let shared = param.clone();
            let grad = Tensor::full(rank, &layout, 4.0)?;
            let mut moments = Moments::zeros(rank, &layout)?;
            let stepped = one(param, &grad, &mut moments, RATES)?;
            assert_eq!(stepped.to_f64()?, [8.0 - 0.4 - 0.05, 4.0 - 0.2 - 0.05, -0.05]);
            assert_eq!(shared.to_f64()?, [8.0, 4.0, 0.0], "a shared value does not change");
            for mean in moments.tensors(rank) {
                assert_eq!(mean.to_f64()?, [1.0; 3]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn updates_are_in_place_and_clones_are_independent() {
        World::run(Mesh::single(), |rank| {
            let layout = Layout::invariant(rank.mesh(), DType::F32, &[5]);
            let param = Tensor::zeros(rank, &layout)?;
            let grad = Tensor::full(rank, &layout, 1.0)?;
            let address = param.local().buffer.address();
            let mut moments = Moments::zeros(rank, &layout)?;
            let param = one(param, &grad, &mut moments, RATES)?;
            assert_eq!(param.local().buffer.address(), address);
            let mut other = moments.clone();
            let values = |m: &Moments| -> Result<Vec<Vec<f64>>> {
                m.tensors(rank).iter().map(Tensor::to_f64).collect()
            };
            let before = values(&moments)?;
            let _ = one(param, &grad, &mut other, RATES)?;
            assert_eq!(values(&moments)?, before);
            assert!(values(&other)?.iter().zip(&before).all(|(new, old)| new != old));
            let saved = Moments::from_tensors(&layout, moments.tensors(rank))?;
            assert_eq!(saved.tensors(rank)[1].to_f64()?, moments.tensors(rank)[1].to_f64()?);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn batched_update_matches_single_updates() {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let texts = ["f32[5@tp]", "f64[3]", "f32[2, 40]", "bf16[7@tp]", "f32[1@tp]", "f64[9@tp]"];
            let layouts = texts.map(|text| Layout::parse(text, rank.mesh()).unwrap());
            let tensor = |i: usize, key| {
                let wide = Tensor::normal(rank, &layouts[i].with_dtype(DType::F64), key, i as u64, 1.0)?;
                let local = wide.local().to_dtype(rank, layouts[i].dtype())?;
                Ok::<_, Error>(Tensor::assemble(rank, layouts[i].clone(), local))
            };
            let rates = |i: usize| AdamWRates { lr: 0.1 * i as f64, weight_decay: 0.01 * i as f64, ..RATES };
            let zeros = layouts.iter().map(|layout| Moments::zeros(rank, layout));
            let mut moments = zeros.collect::<Result<Vec<Moments>>>()?;
            // Shared moments stay as they are.
            let mut other = moments.clone();
            let of = halving(rank, (0..texts.len()).map(|i| rates(i).row().to_vec()).collect())?;
            for round in 0..3 {
                let grads = (0..texts.len()).map(|i| tensor(i, round)).collect::<Result<Vec<Tensor>>>()?;
                let shared = tensor(2, 9)?;
                let mut steps = Vec::new();
                for (i, moments) in moments.iter_mut().enumerate() {
                    let param = if i == 2 { shared.clone() } else { tensor(i, 9)? };
                    steps.push(AdamWStep { param, grad: &grads[i], moments });
                }
                let (stepped, done) = adamw(steps, &of);
                done?;
                for (i, many) in stepped.into_iter().enumerate() {
                    let one = one(tensor(i, 9)?, &grads[i], &mut other[i], rates(i))?;
                    assert_eq!((many.to_f64()?, many.layout()), (one.to_f64()?, one.layout()));
                }
                assert_eq!(shared.to_f64()?, tensor(2, 9)?.to_f64()?, "a shared value does not change");
            }
            for (many, one) in moments.iter().zip(&other) {
                let [a, b] = [many, one].map(|m| m.tensors(rank).map(|t| t.to_f64().unwrap()));
                assert_eq!(a, b);
            }
            assert!(adamw(Vec::new(), &of).0.is_empty());
            // A failed step returns the parameters.
            let (param, grad) = (tensor(0, 9)?, &tensor(2, 9)?);
            let wrong = AdamWStep { param, grad, moments: &mut moments[0] };
            let (params, done) = adamw(vec![wrong], &of);
            assert_eq!(done.unwrap_err().kind(), Kind::Layout);
            assert_eq!(params[0].to_f64()?, tensor(0, 9)?.to_f64()?);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn mismatched_layouts_are_refused() {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let parse = |text| Layout::parse(text, rank.mesh());
            let (split, whole) = (parse("f32[4@tp]")?, parse("f32[4]")?);
            assert!(Moments::zeros(rank, &parse("f32[4] ~tp")?).is_err());
            let mut moments = Moments::zeros(rank, &split)?;
            let (param, grad) = (Tensor::zeros(rank, &split)?, Tensor::zeros(rank, &whole)?);
            let wrong = one(param, &grad, &mut moments, RATES);
            assert_eq!(wrong.unwrap_err().kind(), Kind::Layout);
            assert!(Moments::from_tensors(&whole, moments.tensors(rank)).is_err());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn sgd_on_sharded_parameters_matches_hand_computed_values() {
        // g = 0.5 * 4 + 0.5 w = 6, 4, 2: v = g at first, then v = 0.5 v + g.
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[3@tp]", rank.mesh())?;
            let param = Tensor::from_global(rank, &layout, &[8.0f64, 4.0, 0.0])?;
            let grad = Tensor::full(rank, &layout, 4.0)?;
            let rates = SgdRates { lr: 0.5, momentum: 0.5, weight_decay: 0.5 };
            let mut velocity = Velocity::zeros(rank, &layout)?;
            let param = sgd_step(param, &grad, &mut velocity, (rates, false))?;
            assert_eq!(param.to_f64()?, [5.0, 2.0, -1.0]);
            let mut ahead = Velocity::from_tensor(&layout, &velocity.tensor(rank))?;
            let plain = sgd_step(param.clone(), &grad, &mut velocity, (rates, false))?;
            // g = 4.5, 3, 1.5 and v = 7.5, 5, 2.5.
            assert_eq!(plain.to_f64()?, [1.25, -0.5, -2.25]);
            assert_eq!(velocity.tensor(rank).to_f64()?, [7.5, 5.0, 2.5]);
            let nesterov = sgd_step(param, &grad, &mut ahead, (rates, true))?;
            assert_eq!(nesterov.to_f64()?, [5.0 - 4.125, 2.0 - 2.75, -1.0 - 1.375]);
            let whole = Tensor::zeros(rank, &Layout::parse("f64[3]", rank.mesh())?)?;
            assert!(sgd_step(whole.clone(), &grad, &mut velocity, (rates, false)).is_err());
            assert!(Velocity::from_tensor(&layout, &whole).is_err());
            Ok(())
        })
        .unwrap();
    }
}
