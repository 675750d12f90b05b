//! The overflow check of an optimizer step on the device: gradient norm, clipping factor, and skipping of steps with NaN
//! or infinity, without waiting on the host, so that the step can be captured in a CUDA graph.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::tensor::Tensor;
use crate::training_step::control::sum_over_world;
use crate::training_step::grad_norm::{contributing_locals, sum_squares};
use crate::training_step::{StepArgs, StepReport};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::overflow_check::{CONTROL_WORD, OVERFLOW_CHECK};
use shardgrad_kernels::{DType, Scalar, Strides, upload_into};
use std::ops::Range;
use std::panic::Location;

/// The number of inputs before the control numbers: clip and loss scale.
const INPUT_HEAD: usize = 2;
/// The number of outcome values before the control sums: gradient factor, 1 or 0, norm, sum of squares, loss.
const OUTCOME_HEAD: usize = 5;
/// The number of values that the overflow check puts before the control word.
const CHECK_LEN: usize = 3;

/// The hyperparameters of a step: one row of numbers for each parameter.
pub type Hyperparameters = Vec<Vec<f64>>;

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
    args: StepArgs,
    hyperparameters: Hyperparameters,
    /// Clip, loss scale, control numbers, hyperparameters of one parameter after another: f64.
    inputs: LocalTensor,
    /// Gradient factor, 1 or 0 (step taken or skipped), norm; then the sums of squares, loss and control numbers over all
    /// ranks: f64.
    outcome: LocalTensor,
    /// The parameters that belong to this optimizer.
    params: Range<usize>,
}

impl OverflowCheck {
    /// Makes a step and copies its inputs to the device. The optimizer states the hyperparameters of each parameter.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn new(rank: &Rank, args: StepArgs, hyperparameters: Hyperparameters) -> Result<OverflowCheck> {
        let inputs = inputs(&args, &hyperparameters);
        let inputs = LocalTensor::upload(rank, &[inputs.len()], &inputs)?;
        let len = OUTCOME_HEAD + args.control.numbers().len();
        let outcome = LocalTensor::alloc(rank, DType::F64, &[len])?;
        let params = 0..hyperparameters.len();
        Ok(OverflowCheck { rank: rank.clone(), args, hyperparameters, inputs, outcome, params })
    }

    /// Returns the same step for an optimizer that owns a range of its parameters: an optimizer may hand groups of
    /// parameters to other optimizers, each with the hyperparameters that it gave.
    ///
    /// # Panics
    /// If the range exceeds the parameters.
    #[must_use]
    pub fn for_params(&self, params: Range<usize>) -> OverflowCheck {
        assert!(
            params.start <= params.end && params.end <= self.params.len(),
            "parameters {params:?} of {}",
            self.params.len()
        );
        let params = self.params.start + params.start..self.params.start + params.end;
        OverflowCheck {
            rank: self.rank.clone(),
            args: self.args.clone(),
            hyperparameters: self.hyperparameters.clone(),
            inputs: self.inputs.clone(),
            outcome: self.outcome.clone(),
            params,
        }
    }

    /// Replaces the inputs in place. Returns false, and does nothing, if the numbers of control numbers or
    /// hyperparameters differ.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn upload_into(&mut self, args: StepArgs, hyperparameters: Hyperparameters) -> Result<bool> {
        let is_alike = self.args.control.numbers().len() == args.control.numbers().len()
            && self.hyperparameters.iter().map(Vec::len).eq(hyperparameters.iter().map(Vec::len));
        if !is_alike || !self.inputs.buffer.is_unique() {
            return Ok(false);
        }
        let inputs = inputs(&args, &hyperparameters);
        upload_into(&**self.rank.backend(), &inputs, &mut self.inputs.buffer)?;
        (self.args, self.hyperparameters) = (args, hyperparameters);
        Ok(true)
    }

    /// Launches the gradient norm, in which every global element counts once, and the overflow check. One all_reduce over
    /// the whole mesh, which also sums losses and control numbers; none on a mesh of one rank. The host does not wait. A
    /// collective call: every rank calls it together.
    ///
    /// # Errors
    /// `Kind::Layout` for a gradient that is a partial sum, `Kind::Shape` for a loss that is not a scalar; errors of
    /// the collective.
    #[doc(alias = "clip_grad_norm_")]
    #[doc(alias = "found_inf")]
    pub fn check<'a>(
        &mut self,
        gradients: impl IntoIterator<Item = &'a Tensor>,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let rank = &self.rank.clone();
        let (counted, mut losses) = (contributing_locals(rank, gradients)?, Vec::new());
        for loss in &self.args.losses {
            if loss.contributes()? {
                losses.push(loss.local());
            }
        }
        let mut sums = LocalTensor::alloc(rank, DType::F64, &[counted.len() + losses.len()])?;
        sum_squares(rank, &counted, &mut sums)?;
        for (loss, offset) in losses.into_iter().zip(counted.len()..) {
            sums.write(rank, Strides::contiguous(&[]).at(offset), loss)?;
        }
        let mut word = LocalTensor::alloc(rank, DType::F64, &[self.outcome.numel() - CHECK_LEN])?;
        let scalars = [Scalar::Int(counted.len() as i64), Scalar::Real(self.args.loss_divisor as f64)];
        let control = self.input_range(INPUT_HEAD, &[self.args.control.numbers().len()]);
        launch(rank, &CONTROL_WORD, &[&sums, &control], &mut [&mut word], &scalars)?;
        let word = sum_over_world(rank, word, site)?;
        let head = self.input_range(0, &[INPUT_HEAD]);
        launch(rank, &OVERFLOW_CHECK, &[&word, &head], &mut [&mut self.outcome], &[])
    }

    /// Waits for the device and returns the report. The null back end returns a norm and a loss of 0 and this rank's own
    /// control numbers.
    ///
    /// # Errors
    /// Errors of the device, including those of earlier work. The report can be read again after an error.
    pub fn read(&self) -> Result<StepReport> {
        let StepArgs { lr, loss_scale, control, .. } = &self.args;
        let report = |grad_scale: f64, skipped: bool, [grad_norm, loss]: [f64; 2], sums: &[f64]| StepReport {
            loss,
            grad_norm,
            lr: *lr,
            loss_scale: *loss_scale,
            grad_scale,
            skipped,
            control: control.with_numbers(sums.to_vec()),
        };
        if !self.outcome.buffer.has_memory() {
            return Ok(report(1.0 / self.args.loss_factor(), false, [0.0; 2], control.numbers()));
        }
        let outcome: Vec<f64> = self.outcome.download(&self.rank, self.outcome.numel())?;
        let (head, sums) = outcome.split_first_chunk::<OUTCOME_HEAD>().expect("the outcome has a head");
        let [grad_scale, is_taken, grad_norm, _, loss] = *head;
        Ok(report(grad_scale, is_taken == 0.0, [grad_norm, loss], sums))
    }

    /// Waits for the device and returns the hyperparameters of each parameter and the factor of the gradients, for
    /// optimizers that compute on the host; `None` for a skipped step, which must leave parameters and optimizer state as
    /// they are.
    ///
    /// # Errors
    /// As [`OverflowCheck::read`]; `Kind::Unsupported` during graph capture ([`capture()`](crate::capture())), since
    /// the hyperparameters are those of one step.
    pub fn host_update(&self) -> Result<Option<(Hyperparameters, f64)>> {
        let StepReport { skipped, grad_scale, .. } = self.read()?;
        Ok((!skipped).then(|| (self.hyperparameters[self.params.clone()].to_vec(), grad_scale)))
    }

    /// Checks that the step has `width` hyperparameters for each of `count` parameters, so that an optimizer does not use
    /// those of another.
    pub(crate) fn check_hyperparameters(&self, count: usize, width: usize) -> Result<()> {
        let own = &self.hyperparameters[self.params.clone()];
        if own.len() == count && own.iter().all(|row| row.len() == width) {
            return Ok(());
        }
        let given: usize = own.iter().map(Vec::len).sum();
        let text = format!(
            "a step of {count} parameters needs {width} hyperparameters each, but has {given} hyperparameters"
        );
        Err(Error::new(Kind::Config, text).detail(
            "help",
            "an optimizer updates the parameters whose hyperparameters it gave; select them with `OverflowCheck::for_params`",
        ))
    }

    /// Returns the hyperparameters of all parameters on the device, one row of `width` for each parameter.
    pub(crate) fn hyperparameters(&self, width: usize) -> LocalTensor {
        self.input_range(self.offset(0), &[self.params.len(), width])
    }

    /// Returns the `width` hyperparameters of one parameter.
    pub(crate) fn row(&self, i: usize, width: usize) -> LocalTensor {
        self.input_range(self.offset(i), &[width])
    }

    /// Returns the gradient factor and the flag (1 or 0) on the device.
    pub(crate) fn scale_and_gate(&self) -> LocalTensor {
        self.outcome.with_view(Strides::contiguous(&[2]))
    }

    /// Returns the position in the inputs of the hyperparameters of a parameter.
    fn offset(&self, i: usize) -> usize {
        let before = self.hyperparameters[..self.params.start + i].iter().map(Vec::len).sum::<usize>();
        INPUT_HEAD + self.args.control.numbers().len() + before
    }

    fn input_range(&self, offset: usize, shape: &[usize]) -> LocalTensor {
        self.inputs.with_view(Strides::contiguous(shape).at(offset))
    }
}

/// Returns the inputs in the order of the device memory.
fn inputs(args: &StepArgs, hyperparameters: &[Vec<f64>]) -> Vec<f64> {
    let head = [args.clip.unwrap_or(f64::INFINITY), args.loss_factor()];
    let rows = hyperparameters.iter().flatten();
    head.iter().chain(args.control.numbers()).chain(rows).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::methods::value::Value;
    use crate::training_step::ControlFlags;
    use crate::training_step::control::world_sum;
    use crate::training_step::grad_norm::local_sum_squares;
    use shardgrad_dist::{Kind, Mesh, World};

    fn args(clip: Option<f64>, control: &[(&'static str, f64)]) -> StepArgs {
        let control = control.iter().fold(ControlFlags::new(), |all, (name, x)| all.number(name, *x));
        StepArgs { clip, loss_scale: Some(4.0), control, ..StepArgs::new(0.5) }
    }

    /// The hyperparameters of two parameters.
    fn rows() -> Vec<Vec<f64>> {
        vec![vec![0.5, 0.25], vec![0.125, 7.0]]
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
                    let args = StepArgs {
                        losses: losses.to_vec(),
                        loss_divisor: 3,
                        ..args(Some(2.0), &[("index", own[0]), ("other", own[1])])
                    };
                    let mut step = OverflowCheck::new(rank, args, rows())?;
                    step.check(gradients, site)?;
                    let found = step.read()?;
                    let loss = losses.iter().map(Tensor::local_contribution).collect::<Result<Vec<f64>>>()?;
                    let loss = loss.iter().fold(0.0, |sum, part| sum + part / 3.0);
                    let word = [local_sum_squares(rank, gradients)?, loss, own[0], own[1]];
                    let sums = world_sum(rank, &word, site)?;
                    let norm = sums[0].sqrt() / 4.0;
                    assert!(norm > 1.0, "{norm}");
                    let scale = if norm > 2.0 { 2.0 / norm } else { 1.0 } / 4.0;
                    let expected = StepReport {
                        loss: sums[1],
                        grad_norm: norm,
                        lr: 0.5,
                        loss_scale: Some(4.0),
                        grad_scale: scale,
                        skipped: false,
                        control: ControlFlags::new().number("index", sums[2]).number("other", sums[3]),
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
            let one = |x: f64| args(None, &[("one", x)]);
            let mut step = OverflowCheck::new(rank, one(1.0), rows())?;
            let place = step.inputs.buffer.address();
            step.check([&x], site)?;
            assert_eq!(step.host_update()?, Some((rows(), 0.25)));
            assert_eq!(step.for_params(1..2).host_update()?, Some((rows().split_off(1), 0.25)));
            let report = step.read()?;
            assert_eq!((report.grad_norm, report.skipped, report.grad_scale), (1.25, false, 0.25));
            assert_eq!((report.loss, report.control.get("one")), (0.0, 1.0));
            assert!(!step.upload_into(args(None, &[]), rows())?, "a different number of control numbers");
            assert!(!step.upload_into(one(1.0), rows().split_off(1))?, "a different number of parameters");
            let clipped = StepArgs { clip: Some(1.0), ..one(f64::NAN) };
            assert!(step.upload_into(clipped, vec![vec![1.0; 2]; 2])?);
            assert_eq!(step.inputs.buffer.address(), place);
            step.check([&x], site)?;
            assert_eq!(step.host_update()?, None);
            let report = step.read()?;
            assert_eq!((report.grad_norm, report.grad_scale, report.skipped), (1.25, 0.2, true));
            assert_eq!(step.hyperparameters(2).to_f64(rank)?, [1.0; 4]);
            let held = step.row(1, 2);
            assert!(!step.upload_into(one(1.0), rows())?, "the memory is shared");
            drop(held);
            assert!(step.upload_into(one(1.0), rows())?);
            assert_eq!(step.row(1, 2).to_f64(rank)?, [0.125, 7.0]);
            assert_eq!(step.for_params(1..2).row(0, 2).to_f64(rank)?, [0.125, 7.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dry_run_takes_the_step() {
        World::new(Mesh::parse("a=2").unwrap())
            .dry_run(1, |rank| {
                let x = Tensor::zeros(rank, &Layout::parse("f32[4@a]", rank.mesh())?)?;
                let args = StepArgs { losses: vec![x.sum()], ..args(Some(1.0), &[("own", 2.5)]) };
                let mut step = OverflowCheck::new(rank, args, rows())?;
                rank.trace().enable();
                step.check([&x], Location::caller())?;
                assert_eq!(rank.trace().take().len(), 1);
                let report = step.read()?;
                assert_eq!((report.skipped, report.loss, report.control.get("own")), (false, 0.0, 2.5));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn norm_of_a_partial_sum_is_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            let mut step = OverflowCheck::new(rank, args(None, &[]), Vec::new())?;
            let error = step.check([&x], Location::caller()).unwrap_err();
            assert_eq!(error.kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }
}
