//! Optimizer steps in place: on what each rank stores, without communication, and without the host.

use crate::gate::GatedStep;
use crate::layout::Layout;
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::{adamw, sgd};
use shardgrad_kernels::{DType, Scalar};

/// The numbers of one parameter in an AdamW step; see [`adamw::STEP`] for the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWRates {
    /// Learning rate.
    pub lr: f64,
    /// Weight of the past in the mean of gradients.
    pub beta1: f64,
    /// Weight of the past in the mean of their squares.
    pub beta2: f64,
    /// Added to the root in the divisor.
    pub eps: f64,
    /// Decay: lr times this is taken off a parameter.
    pub weight_decay: f64,
    /// 1 - beta1^t at step t, counted from 1.
    pub correction1: f64,
    /// 1 - beta2^t.
    pub correction2: f64,
}

impl AdamWRates {
    /// In the order in which a step is told.
    #[must_use]
    pub fn row(&self) -> [f64; adamw::NUM_RATES] {
        let AdamWRates { lr, beta1, beta2, eps, weight_decay, correction1, correction2 } = *self;
        [lr, beta1, beta2, eps, weight_decay, correction1, correction2]
    }
}

/// The running means that AdamW keeps for one parameter: this rank's part, in the accumulator of its dtype. It holds
/// no handle of a rank, so it may cross threads with the optimizer that owns it.
#[derive(Clone, Debug)]
pub struct Moments {
    layout: Layout,
    m: Piece,
    v: Piece,
}

impl Moments {
    /// Zeros for a parameter that is stored so.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Layout` for a layout that nothing can be stored in.
    pub fn zeros(rank: &Rank, param: &Layout) -> Result<Moments> {
        param.check_storable()?;
        let layout = param.with_dtype(param.dtype().accumulator());
        let zeros = || Piece::filled(rank, layout.dtype(), &layout.local_shape(rank.coordinates()), 0.0);
        let (m, v) = (zeros()?, zeros()?);
        Ok(Moments { layout, m, v })
    }

    /// The two means as they were saved, for a parameter that is stored so.
    ///
    /// # Errors
    /// `Kind::Layout` if they lie otherwise, or are not of the accumulator of its dtype.
    pub fn from_tensors(param: &Layout, [m, v]: [Tensor; 2]) -> Result<Moments> {
        let layout = param.with_dtype(param.dtype().accumulator());
        match [&m, &v].into_iter().find(|t| *t.layout() != layout) {
            None => Ok(Moments { layout, m: m.piece().clone(), v: v.piece().clone() }),
            Some(other) => {
                let text =
                    format!("moments of {} for a parameter whose moments are {layout}", other.layout());
                Err(Error::new(Kind::Layout, text))
            }
        }
    }

    /// The two means, mean of gradients first.
    #[must_use]
    pub fn tensors(&self, rank: &Rank) -> [Tensor; 2] {
        [&self.m, &self.v].map(|piece| Tensor::assemble(rank, self.layout.clone(), piece.clone()))
    }

    /// Copies means that somebody else holds, so that they can be changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn own(&mut self, rank: &Rank) -> Result<()> {
        own(rank, &mut self.m)?;
        own(rank, &mut self.v)
    }

    fn check(&self, param: &Tensor, grad: &Tensor) -> Result<()> {
        let layout = param.layout();
        if layout.with_dtype(self.layout.dtype()) == self.layout && grad.layout() == layout {
            return Ok(());
        }
        let text = format!(
            "an AdamW step of {layout} with a gradient of {} and moments of {}",
            grad.layout(),
            self.layout
        );
        Err(Error::new(Kind::Layout, text))
    }
}

/// One parameter of an [`adamw()`] step.
#[derive(Debug)]
pub struct AdamWStep<'a> {
    /// The parameter before the step.
    pub param: Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Its means.
    pub moments: &'a mut Moments,
}

/// Takes an AdamW step, if it is one that is taken. The first parameter has the first [`adamw::NUM_RATES`] rates of the step
/// ([`AdamWRates::row`]), and so on. All parameters of one dtype are one launch. Parameters are changed in place where nobody else
/// holds their memory, and so are their means. They come out in their order; if it fails, parameters and means may have changed in
/// part, unless the launches were noted and not done.
///
/// # Errors
/// `Kind::Config` if the step was told other rates than those of these parameters; `Kind::Layout` if a parameter or gradient lies
/// otherwise than the means; `Kind::OutOfMemory`.
pub fn adamw(steps: Vec<AdamWStep<'_>>, of: &GatedStep) -> (Vec<Tensor>, Result<()>) {
    let steps = steps.into_iter().map(|AdamWStep { param, grad, moments }| (param, (grad, moments)));
    let own = |param: &Tensor, (grad, moments): &mut (&Tensor, &mut Moments)| {
        moments.check(param, grad)?;
        moments.own(param.rank())
    };
    in_place(steps.collect(), own, |rank, params, others| {
        of.check_rates(params.len(), adamw::NUM_RATES)?;
        let contiguous = others.iter().map(|(grad, _)| grad.piece().contiguous(rank));
        let contiguous = contiguous.collect::<Result<Vec<Piece>>>()?;
        let (rates, gate) = (of.rates(adamw::NUM_RATES), of.gate());
        let mut dtypes: Vec<DType> = params.iter().map(|param| param.dtype).collect();
        dtypes.sort_unstable();
        dtypes.dedup();
        for dtype in dtypes {
            let (mut inputs, mut outputs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
            for (i, (param, (_, moments))) in params.iter_mut().zip(&mut *others).enumerate() {
                if param.dtype == dtype {
                    inputs.push(&contiguous[i]);
                    outputs.extend([param, &mut moments.m, &mut moments.v]);
                    rows.push(Scalar::Int(i as i64));
                }
            }
            inputs.extend([&rates, &gate]);
            launch(rank, &adamw::STEP, &inputs, &mut outputs, &rows)?;
        }
        Ok(())
    })
}

/// The numbers of one parameter in a step of gradient descent with momentum; see [`sgd::STEP`] for the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdRates {
    /// Learning rate.
    pub lr: f64,
    /// Weight of the past in the velocity.
    pub momentum: f64,
    /// Decay: this times a parameter is added to its gradient.
    pub weight_decay: f64,
}

impl SgdRates {
    /// In the order in which a step is told.
    #[must_use]
    pub fn row(&self) -> [f64; sgd::NUM_RATES] {
        [self.lr, self.momentum, self.weight_decay]
    }
}

/// The velocity that gradient descent with momentum keeps for one parameter: this rank's part, in the accumulator of its
/// dtype. Like [`Moments`] it holds no handle of a rank.
#[derive(Clone, Debug)]
pub struct Velocity {
    layout: Layout,
    v: Piece,
}

impl Velocity {
    /// Zeros for a parameter that is stored so.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Layout` for a layout that nothing can be stored in.
    pub fn zeros(rank: &Rank, param: &Layout) -> Result<Velocity> {
        param.check_storable()?;
        let layout = param.with_dtype(param.dtype().accumulator());
        let v = Piece::filled(rank, layout.dtype(), &layout.local_shape(rank.coordinates()), 0.0)?;
        Ok(Velocity { layout, v })
    }

    /// The velocity as it was saved, for a parameter that is stored so.
    ///
    /// # Errors
    /// `Kind::Layout` if it lies otherwise, or is not of the accumulator of its dtype.
    pub fn from_tensor(param: &Layout, v: &Tensor) -> Result<Velocity> {
        let layout = param.with_dtype(param.dtype().accumulator());
        if *v.layout() == layout {
            return Ok(Velocity { layout, v: v.piece().clone() });
        }
        let text = format!("a velocity of {} for a parameter whose velocity is {layout}", v.layout());
        Err(Error::new(Kind::Layout, text))
    }

    /// The velocity.
    #[must_use]
    pub fn tensor(&self, rank: &Rank) -> Tensor {
        Tensor::assemble(rank, self.layout.clone(), self.v.clone())
    }

    /// Copies a velocity that somebody else holds, so that it can be changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn own(&mut self, rank: &Rank) -> Result<()> {
        own(rank, &mut self.v)
    }

    fn check(&self, param: &Tensor, grad: &Tensor) -> Result<()> {
        let layout = param.layout();
        if layout.with_dtype(self.layout.dtype()) == self.layout && grad.layout() == layout {
            return Ok(());
        }
        let text = format!(
            "an SGD step of {layout} with a gradient of {} and a velocity of {}",
            grad.layout(),
            self.layout
        );
        Err(Error::new(Kind::Layout, text))
    }
}

/// One parameter of a [`descent`].
#[derive(Debug)]
pub struct SgdStep<'a> {
    /// The parameter before the step.
    pub param: Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Its velocity.
    pub velocity: &'a mut Velocity,
}

/// Takes a step of gradient descent, as [`adamw()`] does; after Nesterov, it looks ahead. The first parameter has the first
/// [`sgd::NUM_RATES`] rates of the step ([`SgdRates::row`]), and so on.
///
/// # Errors
/// `Kind::Config` if the step was told other rates than those of these parameters; `Kind::Layout` if a parameter or gradient lies
/// otherwise than the velocity; `Kind::OutOfMemory`.
pub fn descent(steps: Vec<SgdStep<'_>>, nesterov: bool, of: &GatedStep) -> (Vec<Tensor>, Result<()>) {
    let steps = steps.into_iter().map(|SgdStep { param, grad, velocity }| (param, (grad, velocity)));
    let own = |param: &Tensor, (grad, velocity): &mut (&Tensor, &mut Velocity)| {
        velocity.check(param, grad)?;
        velocity.own(param.rank())
    };
    in_place(steps.collect(), own, |rank, params, others| {
        of.check_rates(params.len(), sgd::NUM_RATES)?;
        let (gate, scalars) = (of.gate(), [Scalar::Int(i64::from(nesterov))]);
        for (i, (param, (grad, velocity))) in params.iter_mut().zip(others).enumerate() {
            let (grad, rates) = (grad.piece().contiguous(rank)?, of.row(i, sgd::NUM_RATES));
            launch(rank, &sgd::STEP, &[&grad, &rates, &gate], &mut [param, &mut velocity.v], &scalars)?;
        }
        Ok(())
    })
}

/// Changes parameters on memory that nobody else holds, with what a rule keeps of each; they come out whatever becomes of it.
fn in_place<K>(
    steps: Vec<(Tensor, K)>,
    own: impl Fn(&Tensor, &mut K) -> Result<()>,
    change: impl FnOnce(&Rank, &mut [Piece], &mut [K]) -> Result<()>,
) -> (Vec<Tensor>, Result<()>) {
    let (mut params, mut kept): (Vec<Tensor>, Vec<K>) = steps.into_iter().unzip();
    let ready = params.iter_mut().zip(&mut kept).try_for_each(|(param, kept)| {
        own(param, kept)?;
        param.own()
    });
    let Some(rank) = params.first().map(|param| param.rank().clone()).filter(|_| ready.is_ok()) else {
        return (params, ready);
    };
    let parts = params.into_iter().map(|param| param.into_parts().expect("nobody else holds it"));
    let (layouts, mut pieces): (Vec<Layout>, Vec<Piece>) = parts.unzip();
    let done = change(&rank, &mut pieces, &mut kept);
    let params = layouts.into_iter().zip(pieces);
    (params.map(|(layout, piece)| Tensor::assemble(&rank, layout, piece)).collect(), done)
}

/// Copies a piece that somebody else holds, or that has gaps, so that it can be written.
fn own(rank: &Rank, piece: &mut Piece) -> Result<()> {
    if !(piece.view.is_contiguous() && piece.buffer.is_unique()) {
        *piece = piece.converted(rank, piece.dtype)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::StepTold;
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

    /// A step that multiplies gradients by a half, with some rates.
    fn halving(rank: &Rank, rates: Vec<f64>) -> Result<GatedStep> {
        let told = StepTold { clip: None, loss_scale: 2.0, control: Vec::new(), rates };
        let mut step = GatedStep::new(rank, told, false)?;
        step.find([], (&[], 1), Location::caller())?;
        Ok(step)
    }

    /// One parameter after an AdamW step.
    fn one(param: Tensor, grad: &Tensor, moments: &mut Moments, rates: AdamWRates) -> Result<Tensor> {
        let of = halving(param.rank(), rates.row().to_vec())?;
        let (mut params, done) = adamw(vec![AdamWStep { param, grad, moments }], &of);
        done.map(|()| params.remove(0))
    }

    /// One parameter after a step of descent.
    fn descended(
        param: Tensor,
        grad: &Tensor,
        velocity: &mut Velocity,
        (rates, nesterov): (SgdRates, bool),
    ) -> Result<Tensor> {
        let of = halving(param.rank(), rates.row().to_vec())?;
        let (mut params, done) = descent(vec![SgdStep { param, grad, velocity }], nesterov, &of);
        done.map(|()| params.remove(0))
    }

    #[test]
    fn a_step_by_hand_on_split_parameters() {
        // g = 2: m = 0/2 + 2/2 = 1, v = 0 + 4/4 = 1; the update is (1 / 0.5) / (sqrt(1 / 0.25) + 2) = 0.5.
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[3@tp]", rank.mesh())?;
            let param = Tensor::from_global(rank, &layout, &[8.0f64, 4.0, 0.0])?;
            let kept = param.clone();
            let grad = Tensor::full(rank, &layout, 4.0)?;
            let mut moments = Moments::zeros(rank, &layout)?;
            let stepped = one(param, &grad, &mut moments, RATES)?;
            assert_eq!(stepped.to_f64()?, [8.0 - 0.4 - 0.05, 4.0 - 0.2 - 0.05, -0.05]);
            assert_eq!(kept.to_f64()?, [8.0, 4.0, 0.0], "a value that somebody holds does not change");
            for mean in moments.tensors(rank) {
                assert_eq!(mean.to_f64()?, [1.0; 3]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn steps_happen_in_place_and_clones_do_not_share() {
        World::run(Mesh::single(), |rank| {
            let layout = Layout::invariant(rank.mesh(), DType::F32, &[5]);
            let param = Tensor::zeros(rank, &layout)?;
            let grad = Tensor::full(rank, &layout, 1.0)?;
            let address = param.piece().buffer.address();
            let mut moments = Moments::zeros(rank, &layout)?;
            let param = one(param, &grad, &mut moments, RATES)?;
            assert_eq!(param.piece().buffer.address(), address);
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
    fn many_are_stepped_as_one_by_one() {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let texts = ["f32[5@tp]", "f64[3]", "f32[2, 40]", "bf16[7@tp]", "f32[1@tp]", "f64[9@tp]"];
            let layouts = texts.map(|text| Layout::parse(text, rank.mesh()).unwrap());
            let tensor = |i: usize, key| {
                let wide = Tensor::normal(rank, &layouts[i].with_dtype(DType::F64), key, i as u64, 1.0)?;
                let piece = wide.piece().converted(rank, layouts[i].dtype())?;
                Ok::<_, Error>(Tensor::assemble(rank, layouts[i].clone(), piece))
            };
            let rates = |i: usize| AdamWRates { lr: 0.1 * i as f64, weight_decay: 0.01 * i as f64, ..RATES };
            let zeros = layouts.iter().map(|layout| Moments::zeros(rank, layout));
            let mut moments = zeros.collect::<Result<Vec<Moments>>>()?;
            // Means that somebody else holds stay as they are.
            let mut other = moments.clone();
            let of = halving(rank, (0..texts.len()).flat_map(|i| rates(i).row()).collect())?;
            for round in 0..3 {
                let grads = (0..texts.len()).map(|i| tensor(i, round)).collect::<Result<Vec<Tensor>>>()?;
                let kept = tensor(2, 9)?;
                let mut steps = Vec::new();
                for (i, moments) in moments.iter_mut().enumerate() {
                    let param = if i == 2 { kept.clone() } else { tensor(i, 9)? };
                    steps.push(AdamWStep { param, grad: &grads[i], moments });
                }
                let (stepped, done) = adamw(steps, &of);
                done?;
                for (i, many) in stepped.into_iter().enumerate() {
                    let one = one(tensor(i, 9)?, &grads[i], &mut other[i], rates(i))?;
                    assert_eq!((many.to_f64()?, many.layout()), (one.to_f64()?, one.layout()));
                }
                assert_eq!(kept.to_f64()?, tensor(2, 9)?.to_f64()?, "a value that somebody holds");
            }
            for (many, one) in moments.iter().zip(&other) {
                let [a, b] = [many, one].map(|m| m.tensors(rank).map(|t| t.to_f64().unwrap()));
                assert_eq!(a, b);
            }
            assert!(adamw(Vec::new(), &of).0.is_empty());
            // What fails hands the parameters out all the same.
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
    fn what_does_not_fit_is_refused() {
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
    fn descent_by_hand_on_split_parameters() {
        // g = 0.5 * 4 + 0.5 w = 6, 4, 2: v = g at first, then v = 0.5 v + g.
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[3@tp]", rank.mesh())?;
            let param = Tensor::from_global(rank, &layout, &[8.0f64, 4.0, 0.0])?;
            let grad = Tensor::full(rank, &layout, 4.0)?;
            let rates = SgdRates { lr: 0.5, momentum: 0.5, weight_decay: 0.5 };
            let mut velocity = Velocity::zeros(rank, &layout)?;
            let param = descended(param, &grad, &mut velocity, (rates, false))?;
            assert_eq!(param.to_f64()?, [5.0, 2.0, -1.0]);
            let mut ahead = Velocity::from_tensor(&layout, &velocity.tensor(rank))?;
            let plain = descended(param.clone(), &grad, &mut velocity, (rates, false))?;
            // g = 4.5, 3, 1.5 and v = 7.5, 5, 2.5.
            assert_eq!(plain.to_f64()?, [1.25, -0.5, -2.25]);
            assert_eq!(velocity.tensor(rank).to_f64()?, [7.5, 5.0, 2.5]);
            let nesterov = descended(param, &grad, &mut ahead, (rates, true))?;
            assert_eq!(nesterov.to_f64()?, [5.0 - 4.125, 2.0 - 2.75, -1.0 - 1.375]);
            let whole = Tensor::zeros(rank, &Layout::parse("f64[3]", rank.mesh())?)?;
            assert!(descended(whole.clone(), &grad, &mut velocity, (rates, false)).is_err());
            assert!(Velocity::from_tensor(&layout, &whole).is_err());
            Ok(())
        })
        .unwrap();
    }
}
