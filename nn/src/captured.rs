//! The pass of a training step as captured work: forward and backward of all microbatches, from the arguments of the loss to the
//! gradients. It is captured anew whenever something else than numbers changes.

use crate::optim::LossParts;
use crate::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{Captured, Error, Kind, Rank, Result, Tensor, capture};
use std::cell::RefCell;

/// After more captures in a row than this, each of which served one step only, there are none any more: they take longer than
/// the pass itself. A loss scale that is too large at the start falls less often.
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

/// The captured pass of a trainer, if it has one now.
#[derive(Default)]
pub(crate) struct Capture {
    kept: RefCell<Option<Kept>>,
    why_not: Option<Error>,
    /// Captures in a row, up to this one, that were not replayed in a second step.
    singles: usize,
    /// Whether a device has refused once, which it may do until a step was run on it: kernels are loaded, libraries set up.
    is_put_off: bool,
}

impl Capture {
    /// A trainer without one, for a reason.
    pub(crate) fn refused(why: Error) -> Capture {
        Capture { why_not: Some(why), ..Capture::default() }
    }

    /// Why no pass is captured any more.
    pub(crate) fn why_not(&self) -> Option<&Error> {
        self.why_not.as_ref()
    }

    /// Lets go of the captured pass, and of its memory.
    pub(crate) fn forget(&self) {
        *self.kept.borrow_mut() = None;
    }

    /// What `pass` gives on the arguments of a step, at a factor of the loss, by captured work; `None` where it cannot be
    /// captured, and nothing was done.
    pub(crate) fn run(
        &mut self,
        (rank, params): (&Rank, &[Param]),
        arguments: &[Vec<Tensor>],
        factor: f64,
        pass: impl FnOnce(&[Vec<Tensor>]) -> Result<Passes>,
    ) -> Result<Option<Passes>> {
        if self.why_not.is_some() {
            return Ok(None);
        }
        let kept = match self.kept.take() {
            Some(kept) if kept.fits(params, factor) => kept.refilled(arguments)?,
            _ => None,
        };
        self.singles = if kept.is_some() { 0 } else { self.singles + 1 };
        let kept = match kept {
            Some(kept) => kept,
            None => match Kept::new((rank, params), arguments, factor, pass)? {
                Ok(kept) => kept,
                Err(why) => {
                    let was_put_off = std::mem::replace(&mut self.is_put_off, true);
                    self.why_not = Some(why).filter(|why| was_put_off || why.kind() == Kind::Unsupported);
                    return Ok(None);
                }
            },
        };
        kept.work.replay()?;
        let made = kept.made.clone();
        let why = if made.is_of_step {
            "its loss draws the random numbers of the step"
        } else if self.singles > SINGLES_MAX {
            "it had to be captured anew in each step"
        } else {
            *self.kept.get_mut() = Some(kept);
            return Ok(Some(made));
        };
        self.why_not = Some(Error::new(Kind::Unsupported, why));
        Ok(Some(made))
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
        let captured = capture(rank, &reads, || pass(&fixed))?;
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
