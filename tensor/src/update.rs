//! Optimizer steps in place: on what each rank stores, without communication.

use crate::layout::Layout;
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::adamw::{STEP, STEP_MANY};
use shardgrad_kernels::op::sgd;
use shardgrad_kernels::{DType, Scalar};

/// The numbers of one AdamW step; see [`STEP`] for the formula.
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
    /// The factor of a gradient clip, or 1.
    pub grad_scale: f64,
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

    /// The parameter after a step. It is changed in place where nobody else holds its memory, and so are the means.
    ///
    /// # Errors
    /// `Kind::Layout` if parameter or gradient lie otherwise than the means; `Kind::OutOfMemory`.
    pub fn step(&mut self, param: Tensor, grad: &Tensor, rates: &AdamWRates) -> Result<Tensor> {
        self.check(&param, grad)?;
        let rank = param.rank().clone();
        let grad = grad.piece().contiguous(&rank)?;
        own(&rank, &mut self.m)?;
        own(&rank, &mut self.v)?;
        let AdamWRates { lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale } = *rates;
        let scalars =
            [lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale].map(Scalar::Real);
        param.update(|p| launch(&rank, &STEP, &[&grad], &mut [p, &mut self.m, &mut self.v], &scalars))
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

/// One parameter of [`step_many`].
#[derive(Debug)]
pub struct AdamWStep<'a> {
    /// The parameter before the step.
    pub param: Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Its means.
    pub moments: &'a mut Moments,
    /// Its numbers. Betas, eps and the factor of the gradient are those of the first parameter.
    pub rates: AdamWRates,
}

/// The parameters after a step each, in their order: [`Moments::step`] of many at once, and with the same bits. All parameters
/// of one dtype with the same corrections are one launch. If it fails, parameters and means are of no more use.
///
/// # Errors
/// As for [`Moments::step`].
pub fn step_many(steps: Vec<AdamWStep<'_>>) -> Result<Vec<Tensor>> {
    steps.iter().try_for_each(|step| step.moments.check(&step.param, step.grad))?;
    let Some(first) = steps.first() else { return Ok(Vec::new()) };
    let rank = &first.param.rank().clone();
    let AdamWRates { beta1, beta2, eps, grad_scale, .. } = first.rates;
    let (mut layouts, mut params) = (Vec::with_capacity(steps.len()), Vec::with_capacity(steps.len()));
    let mut others = Vec::with_capacity(steps.len());
    for AdamWStep { param, grad, moments, rates } in steps {
        layouts.push(param.layout().clone());
        params.push(param.into_own_piece()?);
        own(rank, &mut moments.m)?;
        own(rank, &mut moments.v)?;
        others.push((grad.piece().contiguous(rank)?, moments, rates));
    }
    let launch_of =
        |dtype: DType, rates: &AdamWRates| (dtype, rates.correction1.to_bits(), rates.correction2.to_bits());
    let mut launches: Vec<_> = layouts.iter().zip(&others).map(|(l, o)| launch_of(l.dtype(), &o.2)).collect();
    launches.sort_unstable();
    launches.dedup();
    for of in launches {
        let (mut grads, mut outputs) = (Vec::new(), Vec::new());
        let (_, correction1, correction2) = of;
        let [correction1, correction2] = [correction1, correction2].map(f64::from_bits);
        let mut scalars = vec![beta1, beta2, eps, correction1, correction2, grad_scale];
        for (param, (grad, moments, rates)) in params.iter_mut().zip(&mut others) {
            if launch_of(param.dtype, rates) == of {
                grads.push(&*grad);
                outputs.extend([param, &mut moments.m, &mut moments.v]);
                scalars.extend([rates.lr, rates.weight_decay]);
            }
        }
        let scalars: Vec<Scalar> = scalars.into_iter().map(Scalar::Real).collect();
        launch(rank, &STEP_MANY, &grads, &mut outputs, &scalars)?;
    }
    Ok(layouts.into_iter().zip(params).map(|(layout, p)| Tensor::assemble(rank, layout, p)).collect())
}

/// The numbers of one step of gradient descent with momentum; see [`sgd::STEP`] for the
/// formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdRates {
    /// Learning rate.
    pub lr: f64,
    /// Weight of the past in the velocity.
    pub momentum: f64,
    /// Decay: this times a parameter is added to its gradient.
    pub weight_decay: f64,
    /// The factor of a gradient clip, or 1.
    pub grad_scale: f64,
    /// Whether the step looks ahead, after Nesterov.
    pub nesterov: bool,
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

    /// The parameter after a step. It is changed in place where nobody else holds its memory, and so is the velocity.
    ///
    /// # Errors
    /// `Kind::Layout` if parameter or gradient lie otherwise than the velocity; `Kind::OutOfMemory`.
    pub fn step(&mut self, param: Tensor, grad: &Tensor, rates: &SgdRates) -> Result<Tensor> {
        let layout = param.layout().clone();
        if layout.with_dtype(self.layout.dtype()) != self.layout || *grad.layout() != layout {
            let text = format!(
                "an SGD step of {layout} with a gradient of {} and a velocity of {}",
                grad.layout(),
                self.layout
            );
            return Err(Error::new(Kind::Layout, text));
        }
        let rank = param.rank().clone();
        let grad = grad.piece().contiguous(&rank)?;
        own(&rank, &mut self.v)?;
        let SgdRates { lr, momentum, weight_decay, grad_scale, nesterov } = *rates;
        let [lr, momentum, weight_decay, grad_scale] =
            [lr, momentum, weight_decay, grad_scale].map(Scalar::Real);
        let scalars = [lr, momentum, weight_decay, grad_scale, Scalar::Int(i64::from(nesterov))];
        param.update(|p| launch(&rank, &sgd::STEP, &[&grad], &mut [p, &mut self.v], &scalars))
    }
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
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    const RATES: AdamWRates = AdamWRates {
        lr: 0.1,
        beta1: 0.5,
        beta2: 0.75,
        eps: 2.0,
        weight_decay: 0.5,
        correction1: 0.5,
        correction2: 0.25,
        grad_scale: 0.5,
    };

    #[test]
    fn a_step_by_hand_on_split_parameters() {
        // g = 2: m = 0/2 + 2/2 = 1, v = 0 + 4/4 = 1; the update is (1 / 0.5) / (sqrt(1 / 0.25) + 2) = 0.5.
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[3@tp]", rank.mesh())?;
            let param = Tensor::from_global(rank, &layout, &[8.0f64, 4.0, 0.0])?;
            let kept = param.clone();
            let grad = Tensor::full(rank, &layout, 4.0)?;
            let mut moments = Moments::zeros(rank, &layout)?;
            let stepped = moments.step(param, &grad, &RATES)?;
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
            let param = moments.step(param, &grad, &RATES)?;
            assert_eq!(param.piece().buffer.address(), address);
            let mut other = moments.clone();
            let values = |m: &Moments| -> Result<Vec<Vec<f64>>> {
                m.tensors(rank).iter().map(Tensor::to_f64).collect()
            };
            let before = values(&moments)?;
            let _ = other.step(param, &grad, &RATES)?;
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
            for round in 0..3 {
                let grads = (0..texts.len()).map(|i| tensor(i, round)).collect::<Result<Vec<Tensor>>>()?;
                let kept = tensor(2, 9)?;
                let mut steps = Vec::new();
                for (i, moments) in moments.iter_mut().enumerate() {
                    let param = if i == 2 { kept.clone() } else { tensor(i, 9)? };
                    steps.push(AdamWStep { param, grad: &grads[i], moments, rates: rates(i) });
                }
                for (i, many) in step_many(steps)?.into_iter().enumerate() {
                    let one = other[i].step(tensor(i, 9)?, &grads[i], &rates(i))?;
                    assert_eq!((many.to_f64()?, many.layout()), (one.to_f64()?, one.layout()));
                }
                assert_eq!(kept.to_f64()?, tensor(2, 9)?.to_f64()?, "a value that somebody holds");
            }
            for (many, one) in moments.iter().zip(&other) {
                let [a, b] = [many, one].map(|m| m.tensors(rank).map(|t| t.to_f64().unwrap()));
                assert_eq!(a, b);
            }
            assert!(step_many(Vec::new())?.is_empty());
            let (param, grad) = (tensor(0, 9)?, &tensor(2, 9)?);
            let wrong = AdamWStep { param, grad, moments: &mut moments[0], rates: RATES };
            assert_eq!(step_many(vec![wrong]).unwrap_err().kind(), Kind::Layout);
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
            let wrong = moments.step(Tensor::zeros(rank, &split)?, &Tensor::zeros(rank, &whole)?, &RATES);
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
            let rates =
                SgdRates { lr: 0.5, momentum: 0.5, weight_decay: 0.5, grad_scale: 0.5, nesterov: false };
            let mut velocity = Velocity::zeros(rank, &layout)?;
            let param = velocity.step(param, &grad, &rates)?;
            assert_eq!(param.to_f64()?, [5.0, 2.0, -1.0]);
            let mut ahead = Velocity::from_tensor(&layout, &velocity.tensor(rank))?;
            let plain = velocity.step(param.clone(), &grad, &rates)?;
            // g = 4.5, 3, 1.5 and v = 7.5, 5, 2.5.
            assert_eq!(plain.to_f64()?, [1.25, -0.5, -2.25]);
            assert_eq!(velocity.tensor(rank).to_f64()?, [7.5, 5.0, 2.5]);
            let nesterov = ahead.step(param, &grad, &SgdRates { nesterov: true, ..rates })?;
            assert_eq!(nesterov.to_f64()?, [5.0 - 4.125, 2.0 - 2.75, -1.0 - 1.375]);
            let whole = Tensor::zeros(rank, &Layout::parse("f64[3]", rank.mesh())?)?;
            assert!(velocity.step(whole.clone(), &grad, &rates).is_err());
            assert!(Velocity::from_tensor(&layout, &whole).is_err());
            Ok(())
        })
        .unwrap();
    }
}
