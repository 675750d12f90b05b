//! Graph capture of training steps (CUDA graphs). Two graphs: the pass, which is forward and backward of all
//! microbatches from the arguments of the loss to the gradients; and the update, from the gradient norm to the
//! parameters. Each is captured again when anything but numbers changes. The host launches both graphs and waits
//! once.

use super::Trainer;
use super::forward_backward::PassOutputs;
use crate::module::Module;
use crate::module::param::Param;
use crate::optim::{Optimizer, OptimizerStep};
use shardgrad_tensor::{CapturedGraph, Error, Kind, Rank, Result, StepArgs, Tensor, capture};
use std::cell::RefCell;
use std::panic::Location;

/// Captures in a row, each replayed in one step only, after which capture is disabled: capturing costs more than the
/// work itself. A loss scale that is too large at the start falls less often than that.
const RECAPTURES_MAX: usize = 32;

/// Captured graph of a pass, and the values that the graph is valid for.
struct CapturedPass {
    graph: CapturedGraph,
    /// Arguments of each microbatch, in the memory that the graph reads.
    arguments: Vec<Vec<Tensor>>,
    outputs: PassOutputs,
    factor: f64,
    frozen: Vec<bool>,
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
pub(super) struct StepCapture {
    /// Captured update; reads the gradients of `pass`.
    update: RefCell<Option<OptimizerStep>>,
    pass: RefCell<Option<CapturedPass>>,
    pass_status: CaptureStatus,
    update_status: CaptureStatus,
}

impl StepCapture {
    /// Returns a capture that is disabled for a reason.
    pub(super) fn disabled(reason: Error) -> StepCapture {
        let pass_status = CaptureStatus { refusal: Some(reason), ..CaptureStatus::default() };
        StepCapture { pass_status, ..StepCapture::default() }
    }

    /// Returns why the pass, or the update, is not captured.
    pub(super) fn refusal(&self) -> Option<&Error> {
        self.pass_status.refusal.as_ref().or(self.update_status.refusal.as_ref())
    }

    /// Whether passes are captured.
    pub(super) fn is_enabled(&self) -> bool {
        self.pass_status.refusal.is_none()
    }

    /// Drops the captured graphs and their memory.
    pub(super) fn clear(&self) {
        *self.update.borrow_mut() = None;
        *self.pass.borrow_mut() = None;
    }

    /// Captures `pass` on the arguments of a step and a loss factor, or reuses the captured graph with new arguments.
    /// Returns the results that [`StepCapture::replay_pass`] will compute; `None` if the pass cannot be captured, in which
    /// case nothing ran. Afterwards no other tensor shares the memory of the trained parameters.
    fn prepare_pass(
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
        Ok(Some(PassOutputs { is_captured: true, ..outputs }))
    }

    /// Captures the update that reads the results of the pass, or reuses the captured graph with new inputs. `None` if the
    /// update cannot be captured.
    fn prepare_update(
        &mut self,
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        pass: &PassOutputs,
        args: &StepArgs,
        site: &'static Location<'static>,
    ) -> Result<Option<OptimizerStep>> {
        if !self.is_enabled() || self.update_status.refusal.is_some() {
            return Ok(None);
        }
        let captured = match self.update.take() {
            Some(captured) => captured.refill(optim, params, args, site)?,
            None => None,
        };
        self.update_status.count_step(captured.is_some());
        if captured.is_some() {
            return Ok(captured);
        }
        let update = OptimizerStep::new(optim, (rank, params), pass.gradients.clone(), args.clone(), site)?;
        Ok(match update.captured(optim, rank, site)? {
            Ok(captured) => Some(captured),
            Err(reason) => {
                let text = format!("the optimizer cannot be captured: {}", reason.message());
                self.update_status.refused(Error::new(reason.kind(), text));
                None
            }
        })
    }

    /// Replays the prepared pass, if this step has one. Drops the graph if passes are no longer captured.
    pub(super) fn replay_pass(&mut self) -> Result<()> {
        let Some(pass) = self.pass.take() else { return Ok(()) };
        pass.graph.replay()?;
        *self.pass.get_mut() = Some(pass).filter(|_| self.is_enabled());
        Ok(())
    }

    /// Keeps a captured update for the next step.
    pub(super) fn keep_update(&mut self, update: OptimizerStep) {
        let is_kept = update.is_captured() && self.update_status.refusal.is_none();
        *self.update.get_mut() = Some(update).filter(|_| is_kept);
    }
}

impl<M: Module> Trainer<'_, M> {
    /// Captures forward and backward of all microbatches, or prepares the captured graph for the arguments of this step;
    /// runs them if they cannot be captured.
    pub(super) fn captured_pass(&mut self) -> Result<PassOutputs> {
        let arguments = (0..self.config.microbatches).map(|microbatch| self.load_microbatch(microbatch));
        let arguments: Vec<Vec<Tensor>> = arguments.collect::<Result<_>>()?;
        let mut capture = std::mem::take(&mut self.capture);
        let pass =
            |arguments: &[Vec<Tensor>]| self.plain_pass(|microbatch| Ok(arguments[microbatch].clone()));
        let outputs =
            capture.prepare_pass((self.rank(), self.model.params()), &arguments, self.loss_factor(), pass);
        self.passes.borrow_mut().clear();
        self.capture = capture;
        match outputs? {
            Some(outputs) => Ok(outputs),
            None => self.plain_pass(|microbatch| Ok(arguments[microbatch].clone())),
        }
    }

    /// Prepares the update by the results of a pass: captured if the pass is, and if the update can be captured.
    pub(super) fn prepare_update(&mut self, pass: PassOutputs, args: StepArgs) -> Result<OptimizerStep> {
        let Trainer { model, optim, capture, site, .. } = self;
        let rank_and_params = (model.rank(), model.params());
        let args = pass.losses.step_args(args);
        let captured = match pass.is_captured {
            true => capture.prepare_update(&mut **optim, rank_and_params, &pass, &args, site)?,
            false => None,
        };
        match captured {
            Some(captured) => Ok(captured),
            None => OptimizerStep::new(&mut **optim, rank_and_params, pass.gradients, args, site),
        }
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
