//! One optimizer step: all-reduce of the control word, overflow check, clipping and update, launched or captured.

use super::super::copies::{check_update_copies, is_check_due};
use super::super::grad_norm::NormTerms;
use super::super::hyperparameter::{NOT_NEGATIVE, POSITIVE, check_clip, check_range};
use super::Optimizer;
use crate::module::param::{LOST_VALUE_HELP, Param, check_no_averages};
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{
    CapturedGraph, Error, Hyperparameters, Kind, OverflowCheck, Rank, Result, StepArgs, StepReport, Tensor,
    capture,
};
use std::panic::Location;

/// One optimizer step, with the tensors that the step reads and changes.
#[derive(Debug)]
pub(crate) struct OptimizerStep {
    overflow_check: OverflowCheck,
    rank: Rank,
    /// The gradients of which the step takes the norm.
    norm_terms: NormTerms,
    /// Parameters to update, with their gradients.
    updates: Vec<(Param, Tensor)>,
    /// Whether this step compares the copies of gradients and parameters.
    compares_copies: bool,
    /// The graph of overflow check and update, if they are captured.
    graph: Option<CapturedGraph>,
}

impl OptimizerStep {
    /// Prepares a step; nothing is launched. `site` is the caller's line.
    ///
    /// # Errors
    /// As [`Optimizer::check_params`] and [`Optimizer::hyperparameters`]; `Kind::Config` for invalid arguments.
    pub(crate) fn new(
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        gradients: Gradients,
        args: StepArgs,
        site: &'static Location<'static>,
    ) -> Result<OptimizerStep> {
        OptimizerStep::prepare(optim, (rank, params), gradients, args).map_err(|e| e.at(site))
    }

    fn prepare(
        optim: &mut dyn Optimizer,
        (rank, params): (&Rank, &[Param]),
        mut gradients: Gradients,
        args: StepArgs,
    ) -> Result<OptimizerStep> {
        optim.check_params(params)?;
        check_no_averages(params, "an update would be lost when the parameters come back")?;
        let norm_terms = NormTerms::new(params, &gradients, args.norm_leaves);
        let trained = params.iter().filter(|param| !param.is_frozen());
        let updates = trained.filter_map(|param| Some((param.clone(), gradients.remove(&param.key())?)));
        let mut updates: Vec<(Param, Tensor)> = updates.collect();
        updates.sort_by_key(|(param, _)| optim.update_group(param));
        let compares_copies = is_check_due(rank, params, optim.num_steps(), args.copies_checked_every);
        let hyperparameters = hyperparameters(optim, &updates, &args)?;
        let overflow_check = OverflowCheck::new(rank, args, hyperparameters)?;
        let rank = rank.clone();
        Ok(OptimizerStep { overflow_check, rank, norm_terms, updates, compares_copies, graph: None })
    }

    /// Captures overflow check and update as a graph, or returns why they cannot be captured.
    pub(crate) fn captured(
        mut self,
        optim: &mut dyn Optimizer,
        rank: &Rank,
        site: &'static Location<'static>,
    ) -> Result<std::result::Result<OptimizerStep, Error>> {
        let written = self.written_tensors(optim);
        let captured = capture(rank, written, || {
            self.check_overflow(site)?;
            self.launch_update(optim)
        })?;
        Ok(captured.map(|(graph, ())| OptimizerStep { graph: Some(graph), ..self }))
    }

    /// Whether overflow check and update are captured.
    pub(crate) fn is_captured(&self) -> bool {
        self.graph.is_some()
    }

    /// Uploads the inputs of another captured step. `None` if they do not fit, or if the tensors that the update writes
    /// have moved.
    ///
    /// # Errors
    /// As [`OptimizerStep::new`].
    pub(crate) fn refill(
        mut self,
        optim: &mut dyn Optimizer,
        params: &[Param],
        args: &StepArgs,
        site: &'static Location<'static>,
    ) -> Result<Option<OptimizerStep>> {
        let hyperparameters = optim
            .check_params(params)
            .and_then(|()| hyperparameters(optim, &self.updates, args))
            .map_err(|e| e.at(site))?;
        let graph = self.graph.as_ref().expect("a captured step is refilled");
        let fits = self.overflow_check.upload_into(args.clone(), hyperparameters)?
            && graph.matches_inputs(&self.written_tensors(optim));
        Ok(fits.then_some(self))
    }

    /// Launches the all-reduce of the control word (gradient norm, losses, control flags) over the whole mesh, and the
    /// overflow check, which also computes the clipping factor. Both are part of the graph of a captured step. Compares copies
    /// first, if this step does.
    ///
    /// # Errors
    /// `Kind::Diverged` for copies that differ; errors of the collective and of the kernels.
    pub(crate) fn check_overflow(&mut self, site: &'static Location<'static>) -> Result<()> {
        if self.graph.is_some() {
            return Ok(());
        }
        if self.compares_copies {
            check_update_copies(&self.updates, site)?;
        }
        self.norm_terms.check(&self.rank, &mut self.overflow_check, site)
    }

    /// Launches the update, or replays the graph, waits for the report, and counts the step unless it was skipped.
    /// `in_progress` is true while parameters may belong to no step.
    ///
    /// # Errors
    /// Errors of the kernels and of the device. Parameters are lost then, unless the overflow check had already stopped
    /// the update, as it does when the device finds a fault in the gradients.
    pub(crate) fn apply(&self, optim: &mut dyn Optimizer, in_progress: &mut bool) -> Result<StepReport> {
        *in_progress = true;
        let launched = match &self.graph {
            Some(graph) => graph.replay(),
            None => self.launch_update(optim),
        };
        let report = match launched.and_then(|()| self.overflow_check.read()) {
            Ok(report) => report,
            Err(error) => return Err(self.fail(in_progress, error)),
        };
        if !report.skipped {
            optim.count_step(&self.updates.iter().map(|(param, _)| param).collect::<Vec<&Param>>());
        }
        *in_progress = false;
        Ok(report)
    }

    /// Launches the optimizer's kernels.
    fn launch_update(&self, optim: &mut dyn Optimizer) -> Result<()> {
        let updates: Vec<(&Param, Tensor)> =
            self.updates.iter().map(|(param, gradient)| (param, gradient.clone())).collect();
        optim.apply_update(&updates, &self.overflow_check)
    }

    /// Returns all tensors that the update writes: parameters and their optimizer state.
    fn written_tensors(&self, optim: &dyn Optimizer) -> Vec<Tensor> {
        let written = |(param, _): &(Param, Tensor)| {
            let state = optim.param_state(param).into_iter().flat_map(|state| state.tensors);
            std::iter::once(param.tensor()).chain(state).collect::<Vec<Tensor>>()
        };
        self.updates.iter().flat_map(written).collect()
    }

    /// Extends the error of a failed update by the parameters that are lost, if there are any.
    fn fail(&self, in_progress: &mut bool, error: Error) -> Error {
        if let Ok(StepReport { skipped: true, .. }) = self.overflow_check.read() {
            *in_progress = false;
            return error;
        }
        self.updates.iter().for_each(|(param, _)| param.clear_value());
        let Some((first, _)) = self.updates.first() else { return error };
        let (first, count) = (first.name(), self.updates.len());
        error.detail(
            "lost",
            format!("{count} parameters, beginning with `{first}`, may belong to no step; {LOST_VALUE_HELP}"),
        )
    }
}

/// Checks the arguments of a step and returns the hyperparameters of each parameter to update.
fn hyperparameters(
    optim: &mut dyn Optimizer,
    updates: &[(Param, Tensor)],
    args: &StepArgs,
) -> Result<Hyperparameters> {
    check_args(optim.num_steps() + 1, args)?;
    let params: Vec<&Param> = updates.iter().map(|(param, _)| param).collect();
    optim.hyperparameters(&params, args.lr)
}

/// Refuses arguments of a step that reverse the update or produce weights that are not finite.
fn check_args(step: u64, args: &StepArgs) -> Result<()> {
    check_range(format_args!("the learning rate of step {step}"), args.lr, NOT_NEGATIVE)
        .map_err(|e| e.detail("help", "check the learning-rate schedule (LrScheduler)"))?;
    check_clip(args.clip)?;
    check_range("the loss scale", args.loss_factor(), POSITIVE)
        .map_err(|e| e.detail("help", "use a power of two of at least 1"))?;
    if args.loss_divisor > 0 {
        return Ok(());
    }
    let text = "the loss divisor is 0, but must be at least 1";
    Err(Error::new(Kind::Config, text)
        .detail("help", "use the number of microbatches whose losses are passed"))
}
