//! A training step as captured work: its pass, which is forward and backward of all microbatches, from the arguments of the loss to
//! the gradients, and behind it the update, from the norm to the parameters. Each is captured anew whenever something else than
//! numbers changes. The host gives one right after the other and then waits for both.

use crate::optim::{LossParts, Optimizer, Report, StepArgs, Update};
use crate::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{Captured, Error, Kind, Rank, Result, Tensor, capture};
use std::cell::RefCell;
use std::panic::Location;

/// After more captures in a row than this, each of which served one step only, there are none any more: they take longer than
/// the work itself. A loss scale that is too large at the start falls less often.
const SINGLES_MAX: usize = 32;

/// What a pass leaves behind.
#[derive(Clone)]
pub(crate) struct Passes {
    /// The loss of each microbatch, as a part of the step's.
    pub(crate) losses: Vec<Tensor>,
    /// The gradients of the step times the loss scale.
    pub(crate) gradients: Gradients,
    /// Whether something of it may be of this step alone: random numbers.
    pub(crate) is_of_step: bool,
}

impl Passes {
    /// This rank's part of the loss, and the gradients.
    pub(crate) fn parts(self) -> (LossParts, Gradients) {
        (LossParts { tensors: self.losses, count: 1 }, self.gradients)
    }
}

/// A captured pass, and what it was captured for.
struct Kept {
    work: Captured,
    /// The arguments of each microbatch, at the places that the work reads.
    arguments: Vec<Vec<Tensor>>,
    made: Passes,
    factor: f64,
    frozen: Vec<bool>,
}

/// A captured update.
struct KeptUpdate {
    work: Captured,
    update: Update,
}

/// Whether one kind of work is captured, and why it is not.
#[derive(Default)]
struct Asked {
    why_not: Option<Error>,
    /// Captures in a row, up to this one, that were not replayed in a second step.
    singles: usize,
    /// Whether a device has refused once, which it may do until a step was run on it: kernels are loaded, libraries set up.
    is_put_off: bool,
}

impl Asked {
    /// What could not be captured is asked for again, once, if the device refused it.
    fn refused(&mut self, why: Error) {
        let was_put_off = std::mem::replace(&mut self.is_put_off, true);
        self.why_not = Some(why).filter(|why| was_put_off || why.kind() == Kind::Unsupported);
    }

    /// Counts a step of work that was captured before, or was not.
    fn count(&mut self, is_kept: bool) {
        self.singles = if is_kept { 0 } else { self.singles + 1 };
        if self.singles > SINGLES_MAX {
            self.end("it had to be captured anew in each step");
        }
    }

    fn end(&mut self, why: &str) {
        self.why_not = Some(Error::new(Kind::Unsupported, why));
    }
}

/// The captured step of a trainer, as far as it has one now.
#[derive(Default)]
pub(crate) struct Capture {
    /// Its gradients are what the update reads.
    update: RefCell<Option<KeptUpdate>>,
    pass: RefCell<Option<Kept>>,
    asked: Asked,
    asked_update: Asked,
}

impl Capture {
    /// A trainer without one, for a reason.
    pub(crate) fn refused(why: Error) -> Capture {
        let asked = Asked { why_not: Some(why), ..Asked::default() };
        Capture { asked, ..Capture::default() }
    }

    /// Why no pass is captured any more, or no update.
    pub(crate) fn why_not(&self) -> Option<&Error> {
        self.asked.why_not.as_ref().or(self.asked_update.why_not.as_ref())
    }

    /// Whether passes are captured.
    pub(crate) fn is_on(&self) -> bool {
        self.asked.why_not.is_none()
    }

    /// Lets go of the captured step, and of its memory.
    pub(crate) fn forget(&self) {
        *self.update.borrow_mut() = None;
        *self.pass.borrow_mut() = None;
    }

    /// What `pass` gives on the arguments of a step, at a factor of the loss, once [`Capture::step`] was called; `None` where it
    /// cannot be captured, and nothing was done. Parameters that are trained are nobody else's afterwards.
    pub(crate) fn ready(
        &mut self,
        (rank, params): (&Rank, &[Param]),
        arguments: &[Vec<Tensor>],
        factor: f64,
        pass: impl FnOnce(&[Vec<Tensor>]) -> Result<Passes>,
    ) -> Result<Option<Passes>> {
        // The update changes them in place: now, so that pass and update find them at the same places.
        params.iter().filter(|param| param.is_here() && !param.is_frozen()).try_for_each(Param::own)?;
        let kept = match self.pass.take() {
            Some(kept) if kept.fits(params, factor) => kept.refilled(arguments)?,
            _ => None,
        };
        self.asked.count(kept.is_some());
        let kept = match kept {
            Some(kept) => kept,
            None => {
                self.forget();
                match Kept::new((rank, params), arguments, factor, pass)? {
                    Ok(kept) => kept,
                    Err(why) => {
                        self.asked.refused(why);
                        return Ok(None);
                    }
                }
            }
        };
        let made = kept.made.clone();
        if made.is_of_step {
            self.asked.end("its loss draws the random numbers of the step");
        }
        *self.pass.get_mut() = Some(kept);
        Ok(Some(made))
    }

    /// Replays the pass that is ready, and behind it the step of an optimizer on what it makes; `None` where only the pass was, since
    /// the step cannot be captured. `began` is set while parameters may be of no step.
    pub(crate) fn step(
        &mut self,
        optim: &mut dyn Optimizer,
        of: (&Rank, &[Param]),
        made: (&Gradients, &LossParts),
        args: StepArgs<'_>,
        began: &mut bool,
    ) -> Result<Option<Report>> {
        // Told to the device before the pass, so that nothing lies between that and the update.
        let update = match self.is_on() && self.asked_update.why_not.is_none() {
            true => self.ready_update(optim, of, made, args)?,
            false => None,
        };
        let pass = self.pass.take().expect("a pass is ready");
        pass.work.replay()?;
        *self.pass.get_mut() = Some(pass).filter(|_| self.is_on());
        let Some(kept) = update else { return Ok(None) };
        *began = true;
        kept.work.replay().map_err(|error| kept.update.failed(began, error))?;
        let report = kept.update.end(optim, began)?;
        *self.update.get_mut() = Some(kept).filter(|_| self.asked_update.why_not.is_none());
        Ok(Some(report))
    }

    /// The update that reads what the pass makes, captured and told its numbers; `None` if it cannot be.
    fn ready_update(
        &mut self,
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        (gradients, loss): (&Gradients, &LossParts),
        args: StepArgs<'_>,
    ) -> Result<Option<KeptUpdate>> {
        let kept = match self.update.take() {
            Some(kept) => kept.refilled(optim, params, args)?,
            None => None,
        };
        self.asked_update.count(kept.is_some());
        if kept.is_some() {
            return Ok(kept);
        }
        let update = Update::new(optim, (rank, params), (gradients.clone(), Some(loss.clone())), args)?;
        Ok(match KeptUpdate::new(optim, rank, update)? {
            Ok(kept) => Some(kept),
            Err(why) => {
                let text = format!("its optimizer: {}", why.message());
                self.asked_update.refused(Error::new(why.kind(), text));
                None
            }
        })
    }
}

impl KeptUpdate {
    /// An update that is captured, or why it cannot be.
    fn new(
        optim: &mut dyn Optimizer,
        rank: &Rank,
        mut update: Update,
    ) -> Result<std::result::Result<KeptUpdate, Error>> {
        let site = Location::caller();
        let written = update.written(optim);
        let captured = capture(rank, written, || {
            update.find(site)?;
            update.change(optim)
        })?;
        Ok(captured.map(|(work, ())| KeptUpdate { work, update }))
    }

    /// This update told other numbers; `None` if it cannot be told these, or if what it changes lies elsewhere.
    fn refilled(
        mut self,
        optim: &mut dyn Optimizer,
        params: &[Param],
        args: StepArgs<'_>,
    ) -> Result<Option<KeptUpdate>> {
        let fits =
            self.update.upload_into(optim, params, args)? && self.work.finds(&self.update.written(optim));
        Ok(fits.then_some(self))
    }
}

impl Kept {
    /// A pass that is captured, or why it cannot be.
    fn new(
        (rank, params): (&Rank, &[Param]),
        arguments: &[Vec<Tensor>],
        factor: f64,
        pass: impl FnOnce(&[Vec<Tensor>]) -> Result<Passes>,
    ) -> Result<Result<Kept>> {
        let mut fixed = Vec::with_capacity(arguments.len());
        for all in arguments {
            let copies: Option<Vec<Tensor>> = all.iter().map(Tensor::copied).collect::<Result<_>>()?;
            let Some(copies) = copies else {
                let text = "an argument of its loss is a view of other memory";
                return Ok(Err(Error::new(Kind::Unsupported, text)));
            };
            fixed.push(copies);
        }
        let reads: Vec<Tensor> = params.iter().map(Param::tensor).collect();
        let frozen = params.iter().map(Param::is_frozen).collect();
        let captured = capture(rank, reads, || pass(&fixed))?;
        Ok(captured.map(|(work, made)| Kept { work, arguments: fixed, made, factor, frozen }))
    }

    /// Whether parameters lie where they did, and what is passed by value is the same.
    fn fits(&self, params: &[Param], factor: f64) -> bool {
        let stored: Vec<Tensor> = params.iter().map(Param::tensor).collect();
        self.factor.to_bits() == factor.to_bits()
            && params.iter().map(Param::is_frozen).eq(self.frozen.iter().copied())
            && self.work.finds(&stored)
    }

    /// This pass with other arguments in its memory; `None` if they lie otherwise than those that it was captured with.
    fn refilled(mut self, arguments: &[Vec<Tensor>]) -> Result<Option<Kept>> {
        let counts = |all: &[Vec<Tensor>]| all.iter().map(Vec::len).collect::<Vec<usize>>();
        if counts(&self.arguments) != counts(arguments) {
            return Ok(None);
        }
        for (fixed, new) in self.arguments.iter_mut().flatten().zip(arguments.iter().flatten()) {
            let own = std::mem::replace(fixed, new.clone());
            let Some(filled) = own.refilled(new)? else { return Ok(None) };
            *fixed = filled;
        }
        Ok(Some(self))
    }
}
