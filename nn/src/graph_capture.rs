//! Graph capture of training steps (CUDA graphs). Two graphs: the pass, which is forward and backward of all
//! microbatches from the arguments of the loss to the gradients; and the update, from the gradient norm to the
//! parameters. Each is captured again when anything but numbers changes. The host launches both graphs and waits
//! once.

use crate::module::param::Param;
use crate::optim::{Optimizer, OptimizerStep, PartialLoss, StepArgs, UpdateReport};
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{CapturedGraph, Error, Kind, Rank, Result, Tensor, capture};
use std::cell::RefCell;
use std::panic::Location;

/// Captures in a row, each replayed in one step only, after which capture is disabled: capturing costs more than the
/// work itself. A loss scale that is too large at the start falls less often than that.
const RECAPTURES_MAX: usize = 32;

/// Results of forward and backward of all microbatches.
#[derive(Clone)]
pub(crate) struct PassOutputs {
    /// Terms of this rank's partial loss, one for each microbatch.
    pub(crate) losses: Vec<Tensor>,
    /// Gradients of the step times the loss scale.
    pub(crate) gradients: Gradients,
    /// Whether the results depend on the step other than by arguments and parameters: random numbers were drawn.
    pub(crate) depends_on_step: bool,
}

impl PassOutputs {
    /// Returns this rank's partial loss, and the gradients.
    pub(crate) fn into_loss_and_gradients(self) -> (PartialLoss, Gradients) {
        (PartialLoss { tensors: self.losses, count: 1 }, self.gradients)
    }
}

/// Captured graph of a pass, and the values that the graph is valid for.
struct CapturedPass {
    graph: CapturedGraph,
    /// Arguments of each microbatch, in the memory that the graph reads.
    arguments: Vec<Vec<Tensor>>,
    outputs: PassOutputs,
    factor: f64,
    frozen: Vec<bool>,
}

/// Captured graph of an update.
struct CapturedUpdate {
    graph: CapturedGraph,
    update: OptimizerStep,
}

/// Whether the pass or the update is captured, and why not.
#[derive(Default)]
struct CaptureStatus {
    refusal: Option<Error>,
    /// Captures in a row, including the current one, that were not replayed in a second step.
    recaptures: usize,
    /// Whether the device has refused once. A device may refuse until it has run a step without capture, which loads
    /// kernels and sets up libraries.
    is_retry: bool,
}

impl CaptureStatus {
    /// Records a refusal. `Kind::Unsupported` counts at once, a refusal by the device only the second time.
    fn refused(&mut self, reason: Error) {
        let was_retry = std::mem::replace(&mut self.is_retry, true);
        self.refusal = Some(reason).filter(|reason| was_retry || reason.kind() == Kind::Unsupported);
    }

    /// Counts a step that reused a graph, or did not.
    fn count_step(&mut self, is_reused: bool) {
        self.recaptures = if is_reused { 0 } else { self.recaptures + 1 };
        if self.recaptures > RECAPTURES_MAX {
            self.disable("the graph had to be captured again in each step");
        }
    }

    fn disable(&mut self, reason: &str) {
        self.refusal = Some(Error::new(Kind::Unsupported, reason));
    }
}

/// Captured graphs of a trainer's step, as far as there are any.
#[doc(alias = "make_graphed_callables")]
#[doc(alias = "CUDA graph")]
#[derive(Default)]
pub(crate) struct StepCapture {
    /// Captured update; reads the gradients of `pass`.
    update: RefCell<Option<CapturedUpdate>>,
    pass: RefCell<Option<CapturedPass>>,
    pass_status: CaptureStatus,
    update_status: CaptureStatus,
}

impl StepCapture {
    /// Returns a capture that is disabled for a reason.
    pub(crate) fn disabled(reason: Error) -> StepCapture {
        let pass_status = CaptureStatus { refusal: Some(reason), ..CaptureStatus::default() };
        StepCapture { pass_status, ..StepCapture::default() }
    }

    /// Returns why the pass, or the update, is not captured.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.pass_status.refusal.as_ref().or(self.update_status.refusal.as_ref())
    }

    /// Whether passes are captured.
    pub(crate) fn is_enabled(&self) -> bool {
        self.pass_status.refusal.is_none()
    }

    /// Drops the captured graphs and their memory.
    pub(crate) fn clear(&self) {
        *self.update.borrow_mut() = None;
        *self.pass.borrow_mut() = None;
    }

    /// Captures `pass` on the arguments of a step and a loss factor, or reuses the captured graph with new arguments.
    /// Returns the results that [`StepCapture::replay`] will compute; `None` if the pass cannot be captured, in which
    /// case nothing ran. Afterwards no other tensor shares the memory of the trained parameters.
    pub(crate) fn prepare(
        &mut self,
        (rank, params): (&Rank, &[Param]),
        arguments: &[Vec<Tensor>],
        factor: f64,
        pass: impl FnOnce(&[Vec<Tensor>]) -> Result<PassOutputs>,
    ) -> Result<Option<PassOutputs>> {
        // The update writes parameters in place: copy shared ones first, so that pass and update use the same addresses.
        params
            .iter()
            .filter(|param| param.is_local() && !param.is_frozen())
            .try_for_each(Param::make_unique)?;
        let captured = match self.pass.take() {
            Some(captured) if captured.is_reusable(params, factor) => captured.refill(arguments)?,
            _ => None,
        };
        self.pass_status.count_step(captured.is_some());
        let captured = match captured {
            Some(captured) => captured,
            None => {
                self.clear();
                match CapturedPass::new((rank, params), arguments, factor, pass)? {
                    Ok(captured) => captured,
                    Err(reason) => {
                        self.pass_status.refused(reason);
                        return Ok(None);
                    }
                }
            }
        };
        let outputs = captured.outputs.clone();
        if outputs.depends_on_step {
            self.pass_status.disable("the loss draws random numbers of the step (dropout)");
        }
        *self.pass.get_mut() = Some(captured);
        Ok(Some(outputs))
    }

    /// Replays the prepared pass, and then the captured update by `optim` on its results. Returns `None` if the
    /// update cannot be captured, in which case only the pass ran. `in_progress` is true while parameters may belong
    /// to no step.
    pub(crate) fn replay(
        &mut self,
        optim: &mut dyn Optimizer,
        rank_and_params: (&Rank, &[Param]),
        outputs: (&Gradients, &PartialLoss),
        args: StepArgs<'_>,
        in_progress: &mut bool,
    ) -> Result<Option<UpdateReport>> {
        // Upload before the pass, so that nothing comes between pass and update.
        let update = match self.is_enabled() && self.update_status.refusal.is_none() {
            true => self.prepare_update(optim, rank_and_params, outputs, args)?,
            false => None,
        };
        let pass = self.pass.take().expect("a pass is ready");
        pass.graph.replay()?;
        *self.pass.get_mut() = Some(pass).filter(|_| self.is_enabled());
        let Some(captured) = update else { return Ok(None) };
        *in_progress = true;
        captured.graph.replay().map_err(|error| captured.update.fail(in_progress, error))?;
        let report = captured.update.finish(optim, in_progress)?;
        *self.update.get_mut() = Some(captured).filter(|_| self.update_status.refusal.is_none());
        Ok(Some(report))
    }

    /// Captures the update that reads the results of the pass, or reuses the captured graph with new hyperparameters.
    /// `None` if the update cannot be captured.
    fn prepare_update(
        &mut self,
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        (gradients, loss): (&Gradients, &PartialLoss),
        args: StepArgs<'_>,
    ) -> Result<Option<CapturedUpdate>> {
        let captured = match self.update.take() {
            Some(captured) => captured.refill(optim, params, args)?,
            None => None,
        };
        self.update_status.count_step(captured.is_some());
        if captured.is_some() {
            return Ok(captured);
        }
        let update =
            OptimizerStep::new(optim, (rank, params), (gradients.clone(), Some(loss.clone())), args)?;
        Ok(match CapturedUpdate::new(optim, rank, update)? {
            Ok(captured) => Some(captured),
            Err(reason) => {
                let text = format!("the optimizer cannot be captured: {}", reason.message());
                self.update_status.refused(Error::new(reason.kind(), text));
                None
            }
        })
    }
}

impl CapturedUpdate {
    /// Captures an update, or returns why it cannot be captured.
    fn new(
        optim: &mut dyn Optimizer,
        rank: &Rank,
        mut update: OptimizerStep,
    ) -> Result<std::result::Result<CapturedUpdate, Error>> {
        let site = Location::caller();
        let written = update.written_tensors(optim);
        let captured = capture(rank, written, || {
            update.check_overflow(site)?;
            update.apply(optim)
        })?;
        Ok(captured.map(|(graph, ())| CapturedUpdate { graph, update }))
    }

    /// Uploads the hyperparameters of another step. `None` if they do not fit, or if the tensors that the update
    /// writes have moved.
    fn refill(
        mut self,
        optim: &mut dyn Optimizer,
        params: &[Param],
        args: StepArgs<'_>,
    ) -> Result<Option<CapturedUpdate>> {
        let fits = self.update.upload_into(optim, params, args)?
            && self.graph.matches_inputs(&self.update.written_tensors(optim));
        Ok(fits.then_some(self))
    }
}

impl CapturedPass {
    /// Captures a pass, or returns why it cannot be captured.
    fn new(
        (rank, params): (&Rank, &[Param]),
        arguments: &[Vec<Tensor>],
        factor: f64,
        pass: impl FnOnce(&[Vec<Tensor>]) -> Result<PassOutputs>,
    ) -> Result<Result<CapturedPass>> {
        let mut static_arguments = Vec::with_capacity(arguments.len());
        for all in arguments {
            let copies: Option<Vec<Tensor>> = all.iter().map(Tensor::static_copy).collect::<Result<_>>()?;
            let Some(copies) = copies else {
                let text = "an argument of the loss is a view of other memory";
                return Ok(Err(Error::new(Kind::Unsupported, text)));
            };
            static_arguments.push(copies);
        }
        let reads: Vec<Tensor> = params.iter().map(Param::tensor).collect();
        let frozen = params.iter().map(Param::is_frozen).collect();
        let captured = capture(rank, reads, || pass(&static_arguments))?;
        Ok(captured.map(|(graph, outputs)| CapturedPass {
            graph,
            arguments: static_arguments,
            outputs,
            factor,
            frozen,
        }))
    }

    /// Whether the parameters are at the captured addresses, and the values that the graph contains are unchanged.
    fn is_reusable(&self, params: &[Param], factor: f64) -> bool {
        let stored: Vec<Tensor> = params.iter().map(Param::tensor).collect();
        self.factor.to_bits() == factor.to_bits()
            && params.iter().map(Param::is_frozen).eq(self.frozen.iter().copied())
            && self.graph.matches_inputs(&stored)
    }

    /// Copies the arguments of another step into the memory that the graph reads. `None` if their layouts differ from
    /// the captured ones.
    fn refill(mut self, arguments: &[Vec<Tensor>]) -> Result<Option<CapturedPass>> {
        let counts = |all: &[Vec<Tensor>]| all.iter().map(Vec::len).collect::<Vec<usize>>();
        if counts(&self.arguments) != counts(arguments) {
            return Ok(None);
        }
        for (argument, new) in self.arguments.iter_mut().flatten().zip(arguments.iter().flatten()) {
            let own = std::mem::replace(argument, new.clone());
            let Some(filled) = own.copy_from(new)? else { return Ok(None) };
            *argument = filled;
        }
        Ok(Some(self))
    }
}
