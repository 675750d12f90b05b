//! The overflow check of an optimizer step on the device: gradient norm, clipping factor, and skipping of steps with NaN
//! or infinity, without waiting on the host, so that the step can be captured in a CUDA graph.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::tensor::Tensor;
use crate::training_step::control::sum_over_world;
use crate::training_step::grad_norm::{contributing_locals, sum_squares};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::overflow_check::{CONTROL_WORD, OVERFLOW_CHECK};
use shardgrad_kernels::{DType, Scalar, Strides, upload_into};
use std::ops::Range;
use std::panic::Location;

/// The inputs of one optimizer step from the host.
#[derive(Clone, Debug, PartialEq)]
pub struct StepInputs {
    /// The maximum gradient norm; larger gradients are scaled down to it.
    #[doc(alias = "max_norm")]
    #[doc(alias = "clip_grad_norm_")]
    pub clip: Option<f64>,
    /// The factor by which all gradients are too large (loss scaling).
    #[doc(alias = "GradScaler")]
    pub loss_scale: f64,
    /// The caller's control numbers, summed over all ranks together with the norm.
    pub control: Vec<f64>,
    /// The rates of the optimizer, as many for each parameter, one parameter after another.
    pub rates: Vec<f64>,
}

impl StepInputs {
    /// The inputs in the order of the device memory.
    fn numbers(&self) -> Vec<f64> {
        let StepInputs { clip, loss_scale, control, rates } = self;
        let head = [clip.unwrap_or(f64::INFINITY), *loss_scale];
        head.iter().chain(control).chain(rates).copied().collect()
    }
}

/// The number of inputs before the caller's control numbers: clip and loss scale.
const INPUT_HEAD: usize = 2;
/// The number of outcome values before the control values: gradient factor, 1 or 0, norm.
const OUTCOME_HEAD: usize = 3;

/// An optimizer step whose launches are issued before the host knows whether gradients overflowed. Its inputs and its
/// outcome keep their memory as long as it lives.
///
/// Call [`OverflowCheck::check`] first, then the parameter update ([`optimizer_step`](crate::training_step::optimizer_step)), then
/// [`OverflowCheck::read`].
#[doc(alias = "found_inf")]
#[doc(alias = "GradScaler")]
#[doc(alias = "clip_grad_norm_")]
#[doc(alias = "skip_step")]
#[derive(Debug)]
pub struct OverflowCheck {
    rank: Rank,
    inputs: StepInputs,
    /// Clip, loss scale, control numbers, rates: f64.
    numbers: LocalTensor,
    /// Gradient factor, 1 or 0 (step taken or skipped), norm, then the sums of the control values over all ranks:
    /// f64.
    outcome: LocalTensor,
    has_loss: bool,
    /// The range of rates that belong to this optimizer.
    rates: Range<usize>,
}

/// The outcome of a step; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// The gradient norm, divided by the loss scale, before clipping.
    #[doc(alias = "total_norm")]
    pub grad_norm: f64,
    /// Whether the norm and all sums are finite. Otherwise the step is skipped, and parameters stay as they are.
    #[doc(alias = "found_inf")]
    pub is_applied: bool,
    /// The factor of the gradients in the update: unscaling and clipping.
    pub grad_scale: f64,
    /// The sum of the loss over all ranks, if there is one, then the sums of the control numbers.
    pub sums: Vec<f64>,
}

/// The inputs of a step that is not skipped, for optimizers that compute on the host ([`OverflowCheck::host_step`]).
#[derive(Clone, Debug, PartialEq)]
pub struct HostStep {
    /// The rates of the optimizer, as many for each parameter, one parameter after another.
    pub rates: Vec<f64>,
    /// The factor of the gradients.
    pub grad_scale: f64,
}

impl OverflowCheck {
    /// Makes a step, with or without a sum of losses, and copies its inputs to the device.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn new(rank: &Rank, inputs: StepInputs, has_loss: bool) -> Result<OverflowCheck> {
        let numbers = inputs.numbers();
        let numbers = LocalTensor::upload(rank, &[numbers.len()], &numbers)?;
        let len = OUTCOME_HEAD + 1 + usize::from(has_loss) + inputs.control.len();
        let outcome = LocalTensor::alloc(rank, DType::F64, &[len])?;
        let rates = 0..inputs.rates.len();
        Ok(OverflowCheck { rank: rank.clone(), inputs, numbers, outcome, has_loss, rates })
    }

    /// Returns the same step for an optimizer that owns a range of its rates: an optimizer may hand groups of
    /// parameters to other optimizers, each with the rates that it gave.
    ///
    /// # Panics
    /// If the range exceeds the rates.
    #[must_use]
    pub fn with_rates(&self, rates: Range<usize>) -> OverflowCheck {
        assert!(
            rates.start <= rates.end && rates.end <= self.rates.len(),
            "rates {rates:?} of {}",
            self.rates.len()
        );
        let rates = self.rates.start + rates.start..self.rates.start + rates.end;
        let (rank, inputs) = (self.rank.clone(), self.inputs.clone());
        let (numbers, outcome) = (self.numbers.clone(), self.outcome.clone());
        OverflowCheck { rank, inputs, numbers, outcome, has_loss: self.has_loss, rates }
    }

    /// Replaces the inputs in place. Returns false, and does nothing, if the numbers of control numbers or rates
    /// differ.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn upload_into(&mut self, inputs: StepInputs) -> Result<bool> {
        let lens = |inputs: &StepInputs| (inputs.control.len(), inputs.rates.len());
        if lens(&self.inputs) != lens(&inputs) || !self.numbers.buffer.is_unique() {
            return Ok(false);
        }
        upload_into(&**self.rank.backend(), &inputs.numbers(), &mut self.numbers.buffer)?;
        self.inputs = inputs;
        Ok(true)
    }

    /// Launches the gradient norm, in which every global element counts once, and the overflow check. This rank's
    /// part of the loss is the sum of some scalars, each divided by `count`. One all_reduce over the whole mesh,
    /// none on a mesh of one rank; the host does not wait. A collective call: every rank calls it together.
    ///
    /// # Errors
    /// `Kind::Layout` for a gradient that is a partial sum, `Kind::Shape` for a loss that is not a scalar; errors of
    /// the collective.
    #[doc(alias = "clip_grad_norm_")]
    #[doc(alias = "found_inf")]
    pub fn check<'a>(
        &mut self,
        gradients: impl IntoIterator<Item = &'a Tensor>,
        losses: (&[Tensor], usize),
        site: &'static Location<'static>,
    ) -> Result<()> {
        let rank = &self.rank.clone();
        let (counted, mut parts) = (contributing_locals(rank, gradients)?, Vec::new());
        for loss in losses.0 {
            if loss.contributes()? {
                parts.push(loss.local());
            }
        }
        let mut sums = LocalTensor::alloc(rank, DType::F64, &[counted.len() + parts.len()])?;
        sum_squares(rank, &counted, &mut sums)?;
        for (part, offset) in parts.into_iter().zip(counted.len()..) {
            sums.write(rank, Strides::contiguous(&[]).at(offset), part)?;
        }
        let mut word = LocalTensor::alloc(rank, DType::F64, &[self.outcome.numel() - OUTCOME_HEAD])?;
        let count = if self.has_loss { losses.1 as f64 } else { 0.0 };
        let scalars = [Scalar::Int(counted.len() as i64), Scalar::Real(count)];
        let control = self.input_range(INPUT_HEAD, &[self.inputs.control.len()]);
        launch(rank, &CONTROL_WORD, &[&sums, &control], &mut [&mut word], &scalars)?;
        let word = sum_over_world(rank, word, site)?;
        let head = self.input_range(0, &[INPUT_HEAD]);
        launch(rank, &OVERFLOW_CHECK, &[&word, &head], &mut [&mut self.outcome], &[])
    }

    /// Waits for the device and returns the outcome. The null back end returns a norm of 0 and this rank's own
    /// numbers.
    ///
    /// # Errors
    /// Errors of the device, including those of earlier work. The outcome can be read again after an error.
    pub fn read(&self) -> Result<StepOutcome> {
        let StepInputs { loss_scale, control, .. } = &self.inputs;
        if !self.outcome.buffer.has_memory() {
            let sums = self.has_loss.then_some(0.0).into_iter().chain(control.iter().copied()).collect();
            return Ok(StepOutcome { grad_norm: 0.0, is_applied: true, grad_scale: 1.0 / loss_scale, sums });
        }
        let numbers: Vec<f64> = self.outcome.download(&self.rank, self.outcome.numel())?;
        let (is_applied, sums) = (numbers[1] != 0.0, numbers[OUTCOME_HEAD + 1..].to_vec());
        Ok(StepOutcome { grad_norm: numbers[2], is_applied, grad_scale: numbers[0], sums })
    }

    /// Waits for the device and returns the inputs of the step for an optimizer on the host; `None` for a skipped
    /// step, which must leave parameters and optimizer state as they are.
    ///
    /// # Errors
    /// As [`OverflowCheck::read`]; `Kind::Unsupported` during graph capture ([`capture()`](crate::capture())), since
    /// the rates are those of one step.
    pub fn host_step(&self) -> Result<Option<HostStep>> {
        let StepOutcome { is_applied, grad_scale, .. } = self.read()?;
        Ok(is_applied.then(|| HostStep { rates: self.inputs.rates[self.rates.clone()].to_vec(), grad_scale }))
    }

    /// Checks that the step has `width` rates for each of `count` parameters, so that an optimizer does not use the
    /// rates of another.
    pub(crate) fn check_rates(&self, count: usize, width: usize) -> Result<()> {
        let given = self.rates.len();
        if given == count * width {
            return Ok(());
        }
        let text = format!("a step of {count} parameters needs {width} rates each, but has {given} rates");
        Err(Error::new(Kind::Config, text).detail(
            "help",
            "an optimizer updates the parameters whose rates it gave; select them with `OverflowCheck::with_rates`",
        ))
    }

    /// Returns the rates of all parameters on the device, one row for each parameter.
    pub(crate) fn rates(&self, width: usize) -> LocalTensor {
        self.input_range(
            INPUT_HEAD + self.inputs.control.len() + self.rates.start,
            &[self.rates.len() / width, width],
        )
    }

    /// Returns the rates of one parameter.
    pub(crate) fn row(&self, i: usize, width: usize) -> LocalTensor {
        self.input_range(INPUT_HEAD + self.inputs.control.len() + self.rates.start + i * width, &[width])
    }

    /// Returns the gradient factor and the flag (1 or 0) on the device.
    pub(crate) fn scale_and_gate(&self) -> LocalTensor {
        self.outcome.with_view(Strides::contiguous(&[2]))
    }

    fn input_range(&self, offset: usize, shape: &[usize]) -> LocalTensor {
        self.numbers.with_view(Strides::contiguous(shape).at(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::methods::value::Value;
    use crate::training_step::control::world_sum;
    use crate::training_step::grad_norm::local_sum_squares;
    use shardgrad_dist::{Kind, Mesh, World};

    fn inputs(clip: Option<f64>, control: &[f64]) -> StepInputs {
        StepInputs { clip, loss_scale: 4.0, control: control.to_vec(), rates: vec![0.5, 0.25, 0.125, 7.0] }
    }

    #[test]
    fn outcome_matches_the_host_computation() {
        let data: Vec<f32> = (0..15).map(|i| 0.1 * i as f32).collect();
        for mesh in ["", "a=1", "a=3", "a=2,b=2"] {
            for text in ["f32[5, 3]", "f32[5@a, 3]", "f32[5, 3] ~a", "f32[5@a, 3@b]"] {
                let mesh = Mesh::parse(mesh).unwrap();
                let Ok(layout) = Layout::parse(text, &mesh) else { continue };
                World::run(mesh, |rank| {
                    let site = Location::caller();
                    let x = Tensor::from_global(rank, &layout, &data)?;
                    let wide = x.cast(DType::F64);
                    let losses = [x.sum().square(), wide.sum(), x.sum()];
                    let gradients = [&x, &wide, &x];
                    let own = [rank.index() as f64, -1.5];
                    let mut step = OverflowCheck::new(rank, inputs(Some(2.0), &own), true)?;
                    step.check(gradients, (&losses, 3), site)?;
                    let found = step.read()?;
                    let loss = losses.iter().map(Tensor::local_contribution).collect::<Result<Vec<f64>>>()?;
                    let loss = loss.iter().fold(0.0, |sum, part| sum + part / 3.0);
                    let word = [local_sum_squares(rank, gradients)?, loss, own[0], own[1]];
                    let sums = world_sum(rank, &word, site)?;
                    let norm = sums[0].sqrt() / 4.0;
                    assert!(norm > 1.0, "{norm}");
                    let scale = if norm > 2.0 { 2.0 / norm } else { 1.0 } / 4.0;
                    let expected = StepOutcome {
                        grad_norm: norm,
                        is_applied: true,
                        grad_scale: scale,
                        sums: sums[1..].to_vec(),
                    };
                    assert_eq!(found, expected, "{layout}");
                    Ok(())
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn inputs_are_replaced_in_place() {
        World::run(Mesh::single(), |rank| {
            let site = Location::caller();
            let x = Tensor::from_host(rank, &[2], &[3.0f32, 4.0])?;
            let mut step = OverflowCheck::new(rank, inputs(None, &[1.0]), false)?;
            let place = step.numbers.buffer.address();
            step.check([&x], (&[], 1), site)?;
            let taken = HostStep { rates: vec![0.5, 0.25, 0.125, 7.0], grad_scale: 0.25 };
            assert_eq!(step.host_step()?, Some(taken.clone()));
            assert_eq!(
                step.read()?,
                StepOutcome { grad_norm: 1.25, is_applied: true, grad_scale: 0.25, sums: vec![1.0] }
            );
            assert!(!step.upload_into(inputs(None, &[]))?, "a different number of control numbers");
            assert!(step.upload_into(StepInputs { rates: vec![1.0; 4], ..inputs(Some(1.0), &[f64::NAN]) })?);
            assert_eq!(step.numbers.buffer.address(), place);
            step.check([&x], (&[], 1), site)?;
            assert_eq!(step.host_step()?, None);
            let found = step.read()?;
            assert_eq!((found.grad_norm, found.grad_scale, found.is_applied), (1.25, 0.2, false));
            assert_eq!(step.rates(2).to_f64(rank)?, [1.0; 4]);
            let held = step.row(1, 2);
            assert!(!step.upload_into(inputs(None, &[1.0]))?, "the memory is shared");
            drop(held);
            assert!(step.upload_into(inputs(None, &[1.0]))?);
            assert_eq!(step.row(1, 2).to_f64(rank)?, [0.125, 7.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dry_run_takes_the_step() {
        World::new(Mesh::parse("a=2").unwrap())
            .dry_run(1, |rank| {
                let x = Tensor::zeros(rank, &Layout::parse("f32[4@a]", rank.mesh())?)?;
                let mut step = OverflowCheck::new(rank, inputs(Some(1.0), &[2.5]), true)?;
                rank.trace().enable();
                step.check([&x], (&[x.sum()], 1), Location::caller())?;
                assert_eq!(rank.trace().take().len(), 1);
                let found = step.read()?;
                assert_eq!((found.is_applied, found.sums), (true, vec![0.0, 2.5]));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn norm_of_a_partial_sum_is_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            let mut step = OverflowCheck::new(rank, inputs(None, &[]), false)?;
            let error = step.check([&x], (&[], 1), Location::caller()).unwrap_err();
            assert_eq!(error.kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }
}
