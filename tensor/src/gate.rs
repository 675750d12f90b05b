//! Steps of an optimizer that are given to the device before the host knows whether they are taken: norm, gate and update wait for
//! nobody, so that they can be noted once and given again.

use crate::control::{counted_once, sum_over_world, sum_squares};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::overflow_check::{CONTROL_WORD, OVERFLOW_CHECK};
use shardgrad_kernels::{DType, Scalar, Strides, upload_into};
use std::ops::Range;
use std::panic::Location;

/// What the host tells a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTold {
    /// The bound of the norm, beyond which gradients are clipped to it.
    pub clip: Option<f64>,
    /// By what all gradients are too large.
    pub loss_scale: f64,
    /// Numbers that are summed over all ranks along with the norm.
    pub control: Vec<f64>,
    /// The numbers of the rule, as many of each parameter, one parameter after the other.
    pub rates: Vec<f64>,
}

impl StepTold {
    /// As they lie in memory.
    fn numbers(&self) -> Vec<f64> {
        let StepTold { clip, loss_scale, control, rates } = self;
        let head = [clip.unwrap_or(f64::INFINITY), *loss_scale];
        head.iter().chain(control).chain(rates).copied().collect()
    }
}

/// How many numbers stand before those of the caller.
const HEAD: usize = 2;
/// How many stand before the control word in what is found.
const FOUND: usize = 3;

/// A step whose launches are given before it is known whether it is taken. What they read and write besides parameters, gradients
/// and averages lies in memory of its own, at the same place as long as it lives.
///
/// [`GatedStep::find`] comes first, then what changes parameters ([`update`](crate::update)), then [`GatedStep::read`].
#[derive(Debug)]
pub struct GatedStep {
    rank: Rank,
    told: StepTold,
    /// Bound, scale, the caller's numbers, rates: f64.
    numbers: Piece,
    /// Factor of the gradients, 1 or 0, norm, then the control word of all ranks: f64.
    found: Piece,
    has_loss: bool,
    /// The rates that are the rule's.
    rates: Range<usize>,
}

/// What a step found; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The norm of the gradients divided by the loss scale, before clipping.
    pub grad_norm: f64,
    /// Whether the norm and all sums are finite: parameters stay as they are otherwise.
    pub is_taken: bool,
    /// By what gradients are multiplied in the update.
    pub grad_scale: f64,
    /// The sum of the loss over all ranks, if there is one, then those of the caller's numbers.
    pub sums: Vec<f64>,
}

/// A step that is taken, for rules that compute on the host ([`GatedStep::taken`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// The numbers of the rule, as many of each parameter, one parameter after the other.
    pub rates: Vec<f64>,
    /// By what gradients are to be multiplied.
    pub grad_scale: f64,
}

impl GatedStep {
    /// A step of which nothing is known; with a sum of losses, or without. The host's numbers are copied to the device.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn new(rank: &Rank, told: StepTold, has_loss: bool) -> Result<GatedStep> {
        let numbers = told.numbers();
        let numbers = Piece::upload(rank, &[numbers.len()], &numbers)?;
        let len = FOUND + 1 + usize::from(has_loss) + told.control.len();
        let found = Piece::alloc(rank, DType::F64, &[len])?;
        let rates = 0..told.rates.len();
        Ok(GatedStep { rank: rank.clone(), told, numbers, found, has_loss, rates })
    }

    /// The same step for a rule that gave some of its rates, by their place among those of this one: a rule may hand parts of its
    /// parameters on to others, each with the rates that it gave.
    ///
    /// # Panics
    /// If there are no such rates.
    #[must_use]
    pub fn of_rates(&self, rates: Range<usize>) -> GatedStep {
        assert!(
            rates.start <= rates.end && rates.end <= self.rates.len(),
            "rates {rates:?} of {}",
            self.rates.len()
        );
        let rates = self.rates.start + rates.start..self.rates.start + rates.end;
        let (rank, told) = (self.rank.clone(), self.told.clone());
        let (numbers, found) = (self.numbers.clone(), self.found.clone());
        GatedStep { rank, told, numbers, found, has_loss: self.has_loss, rates }
    }

    /// Takes other numbers of the host, at the same place. False, and nothing is done, if there are not as many of each kind.
    ///
    /// # Errors
    /// What the device reports.
    pub fn upload_into(&mut self, told: StepTold) -> Result<bool> {
        let lens = |told: &StepTold| (told.control.len(), told.rates.len());
        if lens(&self.told) != lens(&told) || !self.numbers.buffer.is_unique() {
            return Ok(false);
        }
        upload_into(&**self.rank.backend(), &told.numbers(), &mut self.numbers.buffer)?;
        self.told = told;
        Ok(true)
    }

    /// Gives the launches that find the norm of some gradients, every global element of which counts once, and what follows from it.
    /// This rank's part of the loss is the sum of some scalars, each divided by `count`. One all-reduce over the whole mesh in all,
    /// none on a mesh of one rank; the host waits for nothing. Every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Layout` for a gradient that is a pending sum, `Kind::Shape` for a loss that is no scalar; what the collective reports.
    pub fn find<'a>(
        &mut self,
        gradients: impl IntoIterator<Item = &'a Tensor>,
        losses: (&[Tensor], usize),
        site: &'static Location<'static>,
    ) -> Result<()> {
        let rank = &self.rank.clone();
        let (counted, mut parts) = (counted_once(rank, gradients)?, Vec::new());
        for loss in losses.0 {
            if loss.counts_once()? {
                parts.push(loss.piece());
            }
        }
        let mut sums = Piece::alloc(rank, DType::F64, &[counted.len() + parts.len()])?;
        sum_squares(rank, &counted, &mut sums)?;
        for (part, offset) in parts.into_iter().zip(counted.len()..) {
            sums.write(rank, Strides::contiguous(&[]).at(offset), part)?;
        }
        let mut word = Piece::alloc(rank, DType::F64, &[self.found.numel() - FOUND])?;
        let count = if self.has_loss { losses.1 as f64 } else { 0.0 };
        let scalars = [Scalar::Int(counted.len() as i64), Scalar::Real(count)];
        let control = self.told_part(HEAD, &[self.told.control.len()]);
        launch(rank, &CONTROL_WORD, &[&sums, &control], &mut [&mut word], &scalars)?;
        let word = sum_over_world(rank, word, site)?;
        let head = self.told_part(0, &[HEAD]);
        launch(rank, &OVERFLOW_CHECK, &[&word, &head], &mut [&mut self.found], &[])
    }

    /// What was found, once all work that was given is done. On the null back end, which has no numbers, a norm of 0 and this rank's
    /// own numbers.
    ///
    /// # Errors
    /// What the device reports, and among it what earlier work had to report. Whether the step is taken can be asked again then.
    pub fn read(&self) -> Result<Found> {
        let StepTold { loss_scale, control, .. } = &self.told;
        if !self.found.buffer.has_memory() {
            let sums = self.has_loss.then_some(0.0).into_iter().chain(control.iter().copied()).collect();
            return Ok(Found { grad_norm: 0.0, is_taken: true, grad_scale: 1.0 / loss_scale, sums });
        }
        let numbers: Vec<f64> = self.found.front(&self.rank, self.found.numel())?;
        let (is_taken, sums) = (numbers[1] != 0.0, numbers[FOUND + 1..].to_vec());
        Ok(Found { grad_norm: numbers[2], is_taken, grad_scale: numbers[0], sums })
    }

    /// The numbers of a step that is taken, on the host, which waits for them; `None` for one that is not, which must leave parameters
    /// and averages as they are.
    ///
    /// # Errors
    /// As [`GatedStep::read`]; `Kind::Unsupported` while work is captured ([`capture()`](crate::capture())), since these are of one step.
    pub fn taken(&self) -> Result<Option<Taken>> {
        let Found { is_taken, grad_scale, .. } = self.read()?;
        Ok(is_taken.then(|| Taken { rates: self.told.rates[self.rates.clone()].to_vec(), grad_scale }))
    }

    /// Refuses a step whose rates are not those of so many parameters, so many of each: another rule's would be taken for them.
    pub(crate) fn check_rates(&self, count: usize, width: usize) -> Result<()> {
        let told = self.rates.len();
        if told == count * width {
            return Ok(());
        }
        let text = format!("a step of {count} parameters with {width} rates each was told {told} rates");
        Err(Error::new(Kind::Config, text).detail(
            "help",
            "a rule changes the parameters whose rates it gave; `GatedStep::of_rates` parts a step",
        ))
    }

    /// The rates of all parameters on the device, so many in a row.
    pub(crate) fn rates(&self, width: usize) -> Piece {
        self.told_part(HEAD + self.told.control.len() + self.rates.start, &[self.rates.len() / width, width])
    }

    /// The rates of one parameter.
    pub(crate) fn row(&self, i: usize, width: usize) -> Piece {
        self.told_part(HEAD + self.told.control.len() + self.rates.start + i * width, &[width])
    }

    /// Factor and gate on the device.
    pub(crate) fn gate(&self) -> Piece {
        self.found.viewed(Strides::contiguous(&[2]))
    }

    fn told_part(&self, offset: usize, shape: &[usize]) -> Piece {
        self.numbers.viewed(Strides::contiguous(shape).at(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{local_sum_squares_once, world_sum};
    use crate::layout::Layout;
    use crate::value::Value;
    use shardgrad_dist::{Kind, Mesh, World};

    fn told(clip: Option<f64>, control: &[f64]) -> StepTold {
        StepTold { clip, loss_scale: 4.0, control: control.to_vec(), rates: vec![0.5, 0.25, 0.125, 7.0] }
    }

    #[test]
    fn what_is_found_is_what_the_host_computes() {
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
                    let mut step = GatedStep::new(rank, told(Some(2.0), &own), true)?;
                    step.find(gradients, (&losses, 3), site)?;
                    let found = step.read()?;
                    let loss = losses.iter().map(Tensor::local_part_once).collect::<Result<Vec<f64>>>()?;
                    let loss = loss.iter().fold(0.0, |sum, part| sum + part / 3.0);
                    let word = [local_sum_squares_once(rank, gradients)?, loss, own[0], own[1]];
                    let sums = world_sum(rank, &word, site)?;
                    let norm = sums[0].sqrt() / 4.0;
                    assert!(norm > 1.0, "{norm}");
                    let scale = if norm > 2.0 { 2.0 / norm } else { 1.0 } / 4.0;
                    let expected = Found {
                        grad_norm: norm,
                        is_taken: true,
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
    fn a_step_is_filled_anew_in_place() {
        World::run(Mesh::single(), |rank| {
            let site = Location::caller();
            let x = Tensor::from_host(rank, &[2], &[3.0f32, 4.0])?;
            let mut step = GatedStep::new(rank, told(None, &[1.0]), false)?;
            let place = step.numbers.buffer.address();
            step.find([&x], (&[], 1), site)?;
            let taken = Taken { rates: vec![0.5, 0.25, 0.125, 7.0], grad_scale: 0.25 };
            assert_eq!(step.taken()?, Some(taken.clone()));
            assert_eq!(
                step.read()?,
                Found { grad_norm: 1.25, is_taken: true, grad_scale: 0.25, sums: vec![1.0] }
            );
            assert!(!step.upload_into(told(None, &[]))?, "another number of numbers");
            assert!(step.upload_into(StepTold { rates: vec![1.0; 4], ..told(Some(1.0), &[f64::NAN]) })?);
            assert_eq!(step.numbers.buffer.address(), place);
            step.find([&x], (&[], 1), site)?;
            assert_eq!(step.taken()?, None);
            let found = step.read()?;
            assert_eq!((found.grad_norm, found.grad_scale, found.is_taken), (1.25, 0.2, false));
            assert_eq!(step.rates(2).to_f64(rank)?, [1.0; 4]);
            let held = step.row(1, 2);
            assert!(!step.upload_into(told(None, &[1.0]))?, "somebody else reads it");
            drop(held);
            assert!(step.upload_into(told(None, &[1.0]))?);
            assert_eq!(step.row(1, 2).to_f64(rank)?, [0.125, 7.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn without_numbers_a_step_is_taken() {
        World::new(Mesh::parse("a=2").unwrap())
            .dry_run(1, |rank| {
                let x = Tensor::zeros(rank, &Layout::parse("f32[4@a]", rank.mesh())?)?;
                let mut step = GatedStep::new(rank, told(Some(1.0), &[2.5]), true)?;
                rank.trace().enable();
                step.find([&x], (&[x.sum()], 1), Location::caller())?;
                assert_eq!(rank.trace().take().len(), 1);
                let found = step.read()?;
                assert_eq!((found.is_taken, found.sums), (true, vec![0.0, 2.5]));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn a_pending_sum_has_no_norm_yet() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            let mut step = GatedStep::new(rank, told(None, &[]), false)?;
            let error = step.find([&x], (&[], 1), Location::caller()).unwrap_err();
            assert_eq!(error.kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }
}
