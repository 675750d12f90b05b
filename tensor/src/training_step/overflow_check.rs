//! The overflow check of an optimizer step on the device: gradient norm, clipping factor, and skipping of steps with NaN
//! or infinity, without waiting on the host, so that the step can be captured in a CUDA graph.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::tensor::Tensor;
use crate::training_step::control::sum_over_world;
use crate::training_step::grad_norm::{contributing_locals, sum_squares};
use crate::training_step::{Auxiliary, AuxiliaryVector, StepArgs, StepReport};
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
/// The number of numbers of the control word before the control numbers: sum of squares, loss.
const WORD_HEAD: usize = OUTCOME_HEAD - CHECK_LEN;

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
    /// Gradient factor, 1 or 0 (step taken or skipped), norm; then the sums of squares, losses, control numbers, counts,
    /// auxiliary outputs and the elements of auxiliary vectors over all ranks: f64.
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
        let len = OUTCOME_HEAD + args.control.numbers().len() + num_sums(&args);
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

    /// Replaces the inputs in place. Returns false, and does nothing, if the numbers of control numbers, hyperparameters or
    /// auxiliary outputs differ, or if only one of both steps has counts.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn upload_into(&mut self, args: StepArgs, hyperparameters: Hyperparameters) -> Result<bool> {
        let is_alike = self.args.control.numbers().len() == args.control.numbers().len()
            && self.hyperparameters.iter().map(Vec::len).eq(hyperparameters.iter().map(Vec::len))
            && self.args.counts.is_some() == args.counts.is_some()
            && groups(&self.args).len() == groups(&args).len()
            && vector_lens(&self.args).eq(vector_lens(&args));
        if !is_alike || !self.inputs.buffer.is_unique() {
            return Ok(false);
        }
        let inputs = inputs(&args, &hyperparameters);
        upload_into(&**self.rank.backend(), &inputs, &mut self.inputs.buffer)?;
        (self.args, self.hyperparameters) = (args, hyperparameters);
        Ok(true)
    }

    /// Launches the gradient norm, in which every global element counts once, and the overflow check. One all_reduce over
    /// the whole mesh, which also sums losses, counts, control numbers and auxiliary outputs; none on a mesh of one rank. The
    /// host does not wait. A collective call: every rank calls it together.
    ///
    /// # Errors
    /// `Kind::Layout` for a gradient that is a partial sum, `Kind::Shape` for a loss, a count or an auxiliary output that is not
    /// a scalar; errors of the collective.
    #[doc(alias = "clip_grad_norm_")]
    #[doc(alias = "found_inf")]
    pub fn check<'a>(
        &mut self,
        gradients: impl IntoIterator<Item = &'a Tensor>,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let counted = contributing_locals(&self.rank, gradients)?;
        self.check_squares(&Squares::Locals(counted), site)
    }

    /// [`OverflowCheck::check`] with a sum of the squares of all gradients that every rank knows
    /// ([`canonical_sum_squares`](crate::training_step::grad_norm::canonical_sum_squares)).
    ///
    /// # Errors
    /// As [`OverflowCheck::check`].
    pub fn check_with_squares(&mut self, sum_squares: f64, site: &'static Location<'static>) -> Result<()> {
        self.check_squares(&Squares::Sum(sum_squares), site)
    }

    fn check_squares(&mut self, squares: &Squares, site: &'static Location<'static>) -> Result<()> {
        let rank = &self.rank.clone();
        let num_squares = squares.num_terms();
        let losses = contributing_scalars(&self.args.losses)?;
        // A group holds the terms of one sum: an auxiliary vector is as many groups as it has elements.
        let (groups, vectors) = (groups(&self.args), &self.args.auxiliary_vectors);
        let num_groups = num_sums(&self.args);
        let num_terms = groups.iter().map(|group| group.len()).chain(vectors.iter().map(|v| v.sums.len()));
        let group_len = num_terms.max().unwrap_or(0);
        let first_group = num_squares + losses.len();
        let shape = [first_group + num_groups * group_len];
        // Terms that count on other ranks are 0 here.
        let mut sums = match num_groups {
            0 => LocalTensor::alloc(rank, DType::F64, &shape)?,
            _ => LocalTensor::full(rank, DType::F64, &shape, 0.0)?,
        };
        squares.write(rank, &mut sums)?;
        let mut write = |scalars: &[Tensor], offset: usize| {
            scalars.iter().zip(offset..).try_for_each(|(scalar, offset)| {
                sums.write(rank, Strides::contiguous(&[]).at(offset), scalar.local())
            })
        };
        write(&losses, num_squares)?;
        for (group, i) in groups.iter().zip(0..) {
            write(&contributing_scalars(group)?, first_group + i * group_len)?;
        }
        let mut next_group = groups.len();
        for vector in vectors {
            let all = Strides::contiguous(&[vector.len, group_len]).at(first_group + next_group * group_len);
            for (column, i) in vector.contributing_columns()?.iter().zip(0..) {
                sums.write(rank, all.narrow(1, i, i + 1), column)?;
            }
            next_group += vector.len;
        }
        let num_control = self.args.control.numbers().len();
        let has_counts = self.args.counts.is_some();
        let mut word = LocalTensor::alloc(rank, DType::F64, &[self.outcome.numel() - CHECK_LEN])?;
        let [num_squares, num_groups, group_len] =
            [num_squares, num_groups, group_len].map(|n| Scalar::Int(n as i64));
        let scalars = [num_squares, Scalar::Real(self.args.loss_divisor as f64), num_groups, group_len];
        let control = self.input_range(INPUT_HEAD, &[num_control]);
        launch(rank, &CONTROL_WORD, &[&sums, &control], &mut [&mut word], &scalars)?;
        let word = sum_over_world(rank, word, site)?;
        let head = self.input_range(0, &[INPUT_HEAD]);
        // Auxiliary outputs come last and are not checked.
        let first_sum = WORD_HEAD + num_control;
        let checked = [first_sum + usize::from(has_counts), if has_counts { first_sum } else { 0 }];
        let checked = checked.map(|n| Scalar::Int(n as i64));
        launch(rank, &OVERFLOW_CHECK, &[&word, &head], &mut [&mut self.outcome], &checked)
    }

    /// Waits for the device and returns the report. The null back end returns a norm and a loss of 0 and this rank's own
    /// control numbers.
    ///
    /// # Errors
    /// Errors of the device, including those of earlier work. The report can be read again after an error.
    pub fn read(&self) -> Result<StepReport> {
        let StepArgs { lr, loss_scale, control, counts, auxiliary, auxiliary_vectors, .. } = &self.args;
        let report = |grad_scale: f64, skipped: bool, [grad_norm, loss]: [f64; 2], sums: &[f64]| {
            let (control_sums, sums) = sums.split_at(control.numbers().len());
            let mut sums = sums.iter().copied();
            let count = counts.as_ref().and_then(|_| sums.next());
            let auxiliary: Vec<(String, f64)> = auxiliary
                .iter()
                .map(|auxiliary| (auxiliary.name.clone(), auxiliary.value(&mut sums)))
                .collect();
            let elements =
                |vector: &AuxiliaryVector| (vector.name.clone(), sums.by_ref().take(vector.len).collect());
            StepReport {
                loss: loss / count.filter(|count| *count != 0.0).unwrap_or(1.0),
                count,
                grad_norm,
                lr: *lr,
                loss_scale: *loss_scale,
                grad_scale,
                skipped,
                control: control.with_numbers(control_sums.to_vec()),
                auxiliary,
                auxiliary_vectors: auxiliary_vectors.iter().map(elements).collect(),
            }
        };
        if !self.outcome.buffer.has_memory() {
            let zeros = vec![0.0; num_sums(&self.args)];
            let sums = [control.numbers(), &zeros].concat();
            return Ok(report(1.0 / self.args.loss_factor(), false, [0.0; 2], &sums));
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

/// The terms of the sum of squares of a step.
enum Squares {
    /// Gradients that count on this rank.
    Locals(Vec<LocalTensor>),
    /// The sum over all ranks, which the first rank of the world counts.
    Sum(f64),
}

impl Squares {
    fn num_terms(&self) -> usize {
        match self {
            Squares::Locals(locals) => locals.len(),
            Squares::Sum(_) => 1,
        }
    }

    /// Writes the terms to the front of f64 memory.
    fn write(&self, rank: &Rank, sums: &mut LocalTensor) -> Result<()> {
        match self {
            Squares::Locals(locals) => sum_squares(rank, locals, sums),
            Squares::Sum(sum) => {
                let own = if rank.world().index() == 0 { *sum } else { 0.0 };
                sums.write(rank, Strides::contiguous(&[1]), &LocalTensor::upload(rank, &[1], &[own])?)
            }
        }
    }
}

/// Returns the groups of scalars that are summed over all ranks besides the losses: counts, then auxiliary outputs.
fn groups(args: &StepArgs) -> Vec<&[Tensor]> {
    let counts = args.counts.as_deref();
    counts.into_iter().chain(args.auxiliary.iter().flat_map(Auxiliary::groups)).collect()
}

/// Returns the lengths of the auxiliary vectors.
fn vector_lens(args: &StepArgs) -> impl Iterator<Item = usize> + '_ {
    args.auxiliary_vectors.iter().map(|vector| vector.len)
}

/// Returns the number of sums over all ranks besides squares, losses and control numbers.
fn num_sums(args: &StepArgs) -> usize {
    groups(args).len() + vector_lens(args).sum::<usize>()
}

/// Returns the scalars that count on this rank.
fn contributing_scalars(scalars: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut counted = Vec::with_capacity(scalars.len());
    for scalar in scalars {
        if scalar.contributes()? {
            counted.push(scalar.clone());
        }
    }
    Ok(counted)
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
    use crate::training_step::control::world_sum;
    use crate::training_step::grad_norm::local_sum_squares;
    use crate::training_step::{AuxiliaryDivisor, ControlFlags};
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
                for weighted in [false, true] {
                    World::run(mesh.clone(), |rank| check_against_host(rank, &layout, &data, weighted))
                        .unwrap();
                }
            }
        }
    }

    /// Compares the report of a step, with counts if `weighted`, with the formulas.
    fn check_against_host(rank: &Rank, layout: &Layout, data: &[f32], weighted: bool) -> Result<()> {
        let site = Location::caller();
        let x = Tensor::from_global(rank, layout, data)?;
        let wide = x.cast(DType::F64);
        let losses = [x.sum().square(), wide.sum(), x.sum()];
        let gradients = [&x, &wide, &x];
        let own = [rank.index() as f64, -1.5];
        let (counts, labels) = ([x.sum().scale(0.5), wide.sum()], [wide.sum(), wide.sum(), x.sum()]);
        let auxiliary = |name: &str, sums: &[Tensor], divisor| Auxiliary {
            name: name.to_string(),
            sums: sums.to_vec(),
            divisor,
        };
        let clip = if weighted { 0.05 } else { 2.0 };
        let args = StepArgs {
            losses: losses.to_vec(),
            loss_divisor: 3,
            counts: weighted.then(|| counts.to_vec()),
            auxiliary: vec![
                auxiliary("mean", &losses, AuxiliaryDivisor::Number(3.0)),
                auxiliary("quotient", &[x.sum()], AuxiliaryDivisor::Counts(labels.to_vec())),
                auxiliary("nothing", &[], AuxiliaryDivisor::Counts(Vec::new())),
            ],
            ..args(Some(clip), &[("index", own[0]), ("other", own[1])])
        };
        let mut step = OverflowCheck::new(rank, args, rows())?;
        step.check(gradients, site)?;
        let mut found = step.read()?;
        let nothing = found.auxiliary.pop();
        assert!(nothing.is_some_and(|(name, value)| name == "nothing" && value.is_nan()), "{layout}");
        let sum = |parts: &[Tensor], divisor: f64| {
            let part = |sum: f64, part: &Tensor| Ok::<_, Error>(sum + part.local_contribution()? / divisor);
            parts.iter().try_fold(0.0, part)
        };
        let word = [local_sum_squares(rank, gradients)?, sum(&losses, 3.0)?, own[0], own[1]];
        let groups = [sum(&counts, 1.0)?, sum(&losses, 1.0)?, sum(&[x.sum()], 1.0)?, sum(&labels, 1.0)?];
        let sums = world_sum(rank, &[word, groups].concat(), site)?;
        let count = if weighted { sums[4] } else { 1.0 };
        let factor = 4.0 * count;
        let norm = sums[0].sqrt() / factor;
        assert_eq!(clip < norm, weighted, "{norm}");
        let expected = StepReport {
            loss: sums[1] / count,
            count: weighted.then_some(count),
            grad_norm: norm,
            lr: 0.5,
            loss_scale: Some(4.0),
            grad_scale: if weighted { clip / norm } else { 1.0 } / factor,
            skipped: false,
            control: ControlFlags::new().number("index", sums[2]).number("other", sums[3]),
            auxiliary: vec![("mean".to_string(), sums[5] / 3.0), ("quotient".to_string(), sums[6] / sums[7])],
            auxiliary_vectors: Vec::new(),
        };
        assert_eq!(found, expected, "{layout}");
        assert_eq!(found.auxiliary("quotient"), sums[6] / sums[7]);
        Ok(())
    }

    #[test]
    fn an_auxiliary_output_that_is_nan_does_not_skip_the_step_and_a_count_does() {
        World::run(Mesh::single(), |rank| {
            let nan = Tensor::from_host(rank, &[], &[f64::NAN])?;
            let x = Tensor::from_host(rank, &[2], &[3.0f32, 4.0])?;
            let skipped = |args: StepArgs| {
                let mut step = OverflowCheck::new(rank, args, rows())?;
                step.check([&x], Location::caller())?;
                Ok::<_, Error>(step.read()?.skipped)
            };
            let auxiliary = Auxiliary {
                name: "odd".into(),
                sums: vec![nan.clone()],
                divisor: AuxiliaryDivisor::Number(1.0),
            };
            assert!(!skipped(StepArgs { auxiliary: vec![auxiliary], ..args(None, &[]) })?);
            assert!(skipped(StepArgs { counts: Some(vec![nan]), ..args(None, &[]) })?);
            assert!(!skipped(StepArgs { counts: Some(Vec::new()), ..args(None, &[]) })?, "nothing counted");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn auxiliary_vectors_are_summed_over_ranks_and_microbatches() {
        let data: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let columns: Vec<f64> = (0..3).map(|c| (0..5).map(|row| f64::from(3 * row + c)).sum()).collect();
        for (mesh, text) in
            [("", "f32[5, 3]"), ("a=3", "f32[5@a, 3]"), ("a=2,b=2", "f32[5@b, 3] ~a"), ("a=2", "f32[5, 3]")]
        {
            World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &data)?;
                let vector = |name: &str, len: usize, sums: &[Tensor]| AuxiliaryVector {
                    name: name.to_string(),
                    len,
                    sums: sums.to_vec(),
                };
                let sums = [x.sum_dims(&[0]), x.cast(DType::F64).scale(2.0).sum_dims(&[0])];
                let vectors =
                    vec![vector("none", 2, &[]), vector("columns", 3, &sums), vector("one", 3, &sums[..1])];
                let scalars = vec![Auxiliary {
                    name: "scalar".into(),
                    sums: vec![x.sum()],
                    divisor: AuxiliaryDivisor::Number(1.0),
                }];
                let args = StepArgs {
                    auxiliary: scalars,
                    auxiliary_vectors: vectors,
                    ..args(None, &[("one", 1.0)])
                };
                let mut step = OverflowCheck::new(rank, args.clone(), rows())?;
                step.check([], Location::caller())?;
                let report = step.read()?;
                assert_eq!(
                    (report.auxiliary("scalar"), report.auxiliary_vector("none")),
                    (105.0, &[0.0; 2][..])
                );
                let thrice: Vec<f64> = columns.iter().map(|x| 3.0 * x).collect();
                assert_eq!(report.auxiliary_vector("columns"), thrice, "{text}");
                assert_eq!(report.auxiliary_vector("one"), columns, "{text}");
                let fewer = StepArgs { auxiliary_vectors: Vec::new(), ..args.clone() };
                assert!(!step.upload_into(fewer, rows())?, "another number of vectors");
                let long = StepArgs { auxiliary_vectors: vec![vector("long", 4, &sums[..1])], ..args };
                let mut step = OverflowCheck::new(rank, long, rows())?;
                let error = step.check([], Location::caller()).unwrap_err();
                assert_eq!(error.kind(), Kind::Shape);
                assert!(
                    error.message().contains("`long`") && error.message().contains("4 elements"),
                    "{error}"
                );
                Ok(())
            })
            .unwrap();
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
