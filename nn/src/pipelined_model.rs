//! `PipelinedModel`: a recorded model, cut into pipeline stages; each rank holds the parameters of its stages.

mod stage_partition;
mod gathering;

pub(crate) use gathering::with_gather_policies;
pub use gathering::{GatheringReason, StageGathering};

use crate::module::Module;
use crate::module::param::{Param, StageOwners, key_of_param};
use crate::module::precision::Precision;
use crate::plan::{PipelinePlan, Plan};
use crate::sharded_model::Model;
use shardgrad_autograd::pipeline::{PipelineInputs, PipelineOutputs, Runner, Schedule, Stages};
use shardgrad_autograd::{Gradients, Noise, OpRecord, Program, ReplayNoise, Var};
use shardgrad_tensor::training_step::canonical_sum::SumTree;
use shardgrad_tensor::{Axis, Context, Layout, Rank, Result, Tensor};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// The noise of the recording; every replay draws with the noise of its step.
const TRACING_NOISE: Noise = Noise { seed: 0, step: 0, first_row: 0 };

/// The forward function of a model: results from arguments.
pub(crate) type ForwardFn<'a> = &'a dyn Fn(&[Var]) -> Result<Vec<Var>>;

/// What a training step takes besides the model.
pub(crate) struct StepInputs<'a> {
    /// Loads the arguments of a microbatch.
    pub(crate) read: &'a dyn Fn(usize) -> Result<Vec<Tensor>>,
    /// The random numbers of a microbatch.
    pub(crate) noise: &'a dyn Fn(usize) -> Noise,
    /// The factor on the gradients of the sum of the losses.
    pub(crate) gradient_factor: f64,
    /// The forward function.
    pub(crate) forward: ForwardFn<'a>,
}

/// The training step for which a model is cut into stages.
#[derive(Clone, Copy)]
pub(crate) struct PlannedStep<'a> {
    pub(crate) num_microbatches: usize,
    /// Example arguments of a microbatch.
    pub(crate) arguments: &'a [Tensor],
    /// The bytes of memory that a rank is assumed to have; `None` for those of its device.
    pub(crate) rank_memory_bytes: Option<u64>,
    /// The bytes of the optimizer state of a parameter on this rank.
    pub(crate) optimizer_bytes: &'a dyn Fn(&Param) -> u64,
}

/// The pipeline stages of a model, with one recording for each layout of its arguments.
#[derive(Debug)]
pub(crate) struct PipelinedModel {
    axis: Axis,
    seed: u64,
    /// The schedule as it was chosen, without the transfers of these stages.
    chosen_schedule: Schedule,
    schedule: Schedule,
    /// How the stages gather parameters: those of each pipeline rank, in a dry run those of this one.
    gatherings: Vec<StageGathering>,
    /// The first recording, without hooks, decides which stage reads which parameters.
    recordings: RefCell<Vec<Recording>>,
}

/// The forward function of a model, recorded and cut into stages.
#[derive(Debug)]
struct Recording {
    arguments: Vec<Layout>,
    /// The version of the hooks that the program calls; 0 for none.
    hooks: u64,
    /// Whether dropout is recorded: training and inference may apply different ops, as attention does with dropout on its weights.
    draws: bool,
    stages: Rc<Stages>,
}

impl PipelinedModel {
    /// Records the forward function on the example arguments of a step, cuts the recording into stages, verifies the schedule, and
    /// initializes the parameters of this rank's stages. `model` is on the slice of the world without the pipeline axis. If the cut or
    /// the schedule depends on times, the stages are profiled first. How often stages gather parameters is decided before these have
    /// values.
    #[track_caller]
    pub(crate) fn new<M: Module>(
        model: &Model<M>,
        pipeline: &PipelinePlan,
        axis: Axis,
        seed: u64,
        step: &PlannedStep<'_>,
        forward: ForwardFn<'_>,
    ) -> Result<PipelinedModel> {
        let (site, PlannedStep { num_microbatches, arguments, .. }) = (Location::caller(), *step);
        let rank = model.pass_rank();
        let layouts: Vec<Layout> = arguments.iter().map(|t| t.layout().clone()).collect();
        let program = Program::record(rank, &layouts, Some(Noise { seed, ..TRACING_NOISE }), forward)?;
        let (chosen_schedule, starts) =
            stage_partition::choose(model, pipeline, axis, seed, num_microbatches, &program, arguments)?;
        let own_rank = rank.world().coordinate(axis);
        let stages = Stages::new(program, &starts).with_bucket_bytes(model.bucket_bytes());
        let stages = gathering::reducing_each_pass(stages, model);
        let schedule = with_transfers(&chosen_schedule, &stages)?;
        let gatherings = gathering::choose(model, axis, (&stages, &schedule), &layouts, step, site)?;
        let own = gatherings.iter().find(|gathering| gathering.pipeline_rank == own_rank);
        let stages = match own.is_some_and(|own| own.by_microbatch) {
            true => gathering::gathering_each_pass(stages, model, &schedule.stage_ranks, own_rank),
            false => stages,
        };
        init_params(model, axis, &stages, &schedule.stage_ranks, seed)?;
        let first = Recording { arguments: layouts, hooks: 0, draws: true, stages: Rc::new(stages) };
        let recordings = RefCell::new(vec![first]);
        Ok(PipelinedModel { axis, seed, chosen_schedule, schedule, gatherings, recordings })
    }

    /// The schedule, with transfers.
    pub(crate) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// How the stages gather parameters.
    pub(crate) fn gatherings(&self) -> &[StageGathering] {
        &self.gatherings
    }

    /// Whether this rank's stages gather parameters in each pass.
    pub(crate) fn gathers_by_microbatch(&self) -> bool {
        self.first_stages().gathers_each_pass()
    }

    /// The first record of each stage, and its path in the model.
    pub(crate) fn stage_starts(&self) -> Vec<(usize, Rc<str>)> {
        let stages = self.first_stages();
        let records = &stages.program().records;
        let path = |at: usize| records.get(at).map_or_else(|| Rc::from(""), |r| r.path.clone());
        stages.stages().iter().map(|stage| (stage.range.start, path(stage.range.start))).collect()
    }

    /// The stages of the first recording.
    fn first_stages(&self) -> Rc<Stages> {
        self.recordings.borrow()[0].stages.clone()
    }

    /// Returns the stages for arguments of these layouts, in training (`draws`) or in inference, cut by the parameters of the stages of
    /// the first recording. They call the current hooks of the model; recordings of earlier hooks are dropped.
    fn stages<M: Module>(
        &self,
        model: &Model<M>,
        arguments: &[Layout],
        draws: bool,
        forward: ForwardFn<'_>,
    ) -> Result<Rc<Stages>> {
        let hooks = model.hooks().current();
        let is_current =
            |known: &&Recording| known.hooks == hooks && known.draws == draws && known.arguments == arguments;
        if let Some(known) = self.recordings.borrow().iter().find(is_current) {
            return Ok(known.stages.clone());
        }
        let noise = draws.then_some(Noise { seed: self.seed, ..TRACING_NOISE });
        let program = Program::record(model.pass_rank(), arguments, noise, forward)?;
        let stages = Rc::new(self.first_stages().recut(program)?);
        let mut recordings = self.recordings.borrow_mut();
        recordings.retain(|known| known.hooks == 0 || known.hooks == hooks);
        recordings.push(Recording { arguments: arguments.to_vec(), hooks, draws, stages: stages.clone() });
        Ok(stages)
    }

    /// The ops of this rank's stages.
    pub(crate) fn records(&self, rank: &Rank) -> Vec<OpRecord> {
        let (stages, own_rank) = (self.first_stages(), rank.world().coordinate(self.axis));
        let own =
            stages.stages().iter().zip(&self.schedule.stage_ranks).filter(|(_, rank)| **rank == own_rank);
        own.flat_map(|(stage, _)| stages.program().records[stage.range.clone()].to_vec()).collect()
    }

    /// Runs the schedule forward and backward on all microbatches, which have one shape. The gradients are those of the sum of the
    /// losses times a factor. The forward function is recorded again if the hooks of the model have changed.
    /// If no parameter of the loss is trainable, every stage returns an error: no stage knows by itself what is frozen on other
    /// stages.
    ///
    /// With `leaves`, microbatch i is leaf `leaves.1 + i` of a tree, and the outputs have sums of gradients by use instead of gradients
    /// ([`PipelinedModel::sum_uses`]).
    pub(crate) fn train_step<M: Module>(
        &self,
        model: &Model<M>,
        step: &StepInputs<'_>,
        leaves: Option<(SumTree, usize)>,
    ) -> Result<PipelineOutputs> {
        self.with_runner(model, step.forward, |runner| {
            let inputs = PipelineInputs {
                arguments: step.read,
                parameter: &param_values(model),
                is_trained: &is_trainable(model),
                draw: &|microbatch| ReplayNoise::Of((step.noise)(microbatch)),
                weight: step.gradient_factor,
            };
            match leaves {
                Some((tree, first)) => runner.run_leaves(&inputs, tree, first),
                None => runner.run(&inputs),
            }
        })
    }

    /// Sums the gradients of the uses of each parameter, over the stages that have them, in the order of the program. Every rank calls
    /// this together.
    ///
    /// # Errors
    /// As [`Runner::sum_uses`].
    pub(crate) fn sum_uses<M: Module>(
        &self,
        model: &Model<M>,
        uses: Gradients,
        forward: ForwardFn<'_>,
    ) -> Result<Gradients> {
        let stored = |key: u64| {
            let param = param_of(model, key);
            Context::of(model.rank()).set_path(&param.shared_name());
            param.tensor()
        };
        self.with_runner(model, forward, |runner| {
            runner.sum_uses(uses, &key_of_param, &stored, &is_trainable(model))
        })
    }

    /// Calls a function with the runner of the current stages in training.
    fn with_runner<M: Module, T>(
        &self,
        model: &Model<M>,
        forward: ForwardFn<'_>,
        run: impl FnOnce(&Runner<'_>) -> Result<T>,
    ) -> Result<T> {
        let (first, arguments) = (self.first_stages(), self.recordings.borrow()[0].arguments.clone());
        let stages = self.stages(model, &arguments, true, forward)?;
        // A watched point may be cut off from the op before it, so that other stages exchange values.
        let schedule = match stages.links() == first.links() {
            true => Cow::Borrowed(&self.schedule),
            false => Cow::Owned(with_transfers(&self.chosen_schedule, &stages)?),
        };
        run(&Runner { rank: model.pass_rank(), axis: self.axis, stages: &stages, schedule: &schedule })
    }

    /// Runs the stages forward for inference, without dropout and without gradients. Returns each result on the ranks of the stage
    /// that computes it, `None` on the others.
    pub(crate) fn forward_step<M: Module>(
        &self,
        model: &Model<M>,
        arguments: &[Tensor],
        forward: ForwardFn<'_>,
    ) -> Result<Vec<Option<Tensor>>> {
        let layouts: Vec<Layout> = arguments.iter().map(|t| t.layout().clone()).collect();
        let stages = self.stages(model, &layouts, false, forward)?;
        let stages = (self.axis, &*stages, &self.schedule.stage_ranks[..]);
        let results = forward_microbatches(model, stages, &[arguments.to_vec()], 0..0, &[])?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Runs another forward function of the model for inference, recorded once per call, and returns its results on all pipeline
    /// ranks.
    pub(crate) fn infer<M: Module>(
        &self,
        model: &Model<M>,
        arguments: &[Tensor],
        forward: ForwardFn<'_>,
    ) -> Result<Vec<Tensor>> {
        let layouts: Vec<Layout> = arguments.iter().map(|t| t.layout().clone()).collect();
        let program = Program::record(model.pass_rank(), &layouts, None, forward)?;
        let stages = self.first_stages().recut(program)?;
        let num_results = stages.program().outputs.len();
        let all: Vec<usize> = (0..model.rank().world().mesh().size(self.axis)).collect();
        let stages = (self.axis, &stages, &self.schedule.stage_ranks[..]);
        let results = forward_microbatches(model, stages, &[arguments.to_vec()], 0..num_results, &all)?;
        Ok(results.into_iter().flatten().flatten().collect())
    }
}

/// Returns a schedule with the transfers between these stages, verified.
fn with_transfers(schedule: &Schedule, stages: &Stages) -> Result<Schedule> {
    let links = stages.links();
    let schedule = schedule.with_transfers(&links);
    schedule.verify(&links)?;
    Ok(schedule)
}

/// Runs stages on a pipeline axis, given with the pipeline rank of each, forward for inference on microbatches of one shape. Returns
/// the results of each microbatch on the ranks of the stages that compute them, but those of the range `sent` on the pipeline ranks
/// `to`.
pub(crate) fn forward_microbatches<M: Module>(
    model: &Model<M>,
    (axis, stages, stage_ranks): (Axis, &Stages, &[usize]),
    microbatches: &[Vec<Tensor>],
    sent: Range<usize>,
    to: &[usize],
) -> Result<Vec<Vec<Option<Tensor>>>> {
    let num_ranks = model.rank().world().mesh().size(axis);
    let schedule = Schedule::forward_only(stage_ranks, num_ranks, microbatches.len())?;
    let schedule = with_transfers(&schedule, stages)?;
    let runner = Runner { rank: model.pass_rank(), axis, stages, schedule: &schedule };
    let outputs = runner.run(&PipelineInputs {
        arguments: &|microbatch| Ok(microbatches[microbatch].clone()),
        parameter: &param_values(model),
        is_trained: &is_trainable(model),
        draw: &|_| ReplayNoise::Off,
        weight: 1.0,
    })?;
    let mut results = outputs.results;
    for of_microbatch in &mut results {
        of_microbatch.resize(stages.program().outputs.len(), None);
        for at in sent.clone() {
            of_microbatch[at] = runner.send_result(at, of_microbatch[at].take(), to)?;
        }
    }
    Ok(results)
}

/// Assigns each parameter to the pipeline ranks whose stages read it, and initializes the parameters of this rank.
#[track_caller]
pub(crate) fn init_params<M: Module>(
    model: &Model<M>,
    axis: Axis,
    stages: &Stages,
    stage_ranks: &[usize],
    seed: u64,
) -> Result<()> {
    let own_rank = model.rank().world().coordinate(axis);
    let keys: Vec<_> = (0..stage_ranks.len()).map(|stage| stages.keys(stage)).collect();
    for param in model.params() {
        let uses = |stage: &usize| keys[*stage].iter().any(|key| key_of_param(*key) == param.key());
        let mut ranks: Vec<usize> = (0..keys.len()).filter(uses).map(|stage| stage_ranks[stage]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        if ranks.is_empty() {
            // A parameter that no op uses still has a value to save, on the first stage.
            ranks.push(0);
        }
        param.init_value(model.rank(), seed, Some(StageOwners { axis, ranks, own_rank }))?;
    }
    Ok(())
}

/// Returns the lookup of parameter values by key. A lookup also sets the parameter's name as the path of the following op.
fn param_values<M: Module>(model: &Model<M>) -> impl Fn(u64) -> Tensor {
    move |key| {
        let param = param_of(model, key);
        Context::of(model.rank()).set_path(&param.shared_name());
        param.pass_tensor()
    }
}

/// Returns the parameter of which a key of a program is a use.
pub(crate) fn param_of<M: Module>(model: &Model<M>, key: u64) -> &Param {
    let param = model.params().iter().find(|p| p.key() == key_of_param(key));
    param.expect("a program uses its own model's keys")
}

/// Returns the predicate whether the parameter of a key is trainable, also for parameters of other stages.
fn is_trainable<M: Module>(model: &Model<M>) -> impl Fn(u64) -> bool {
    let frozen: HashSet<u64> = model.params().iter().filter(|p| p.is_frozen()).map(Param::key).collect();
    move |key| !frozen.contains(&key_of_param(key))
}

/// Returns a model without values on the slice of the mesh without the pipeline axis: the ranks of one pipeline stage.
pub(crate) fn stage_model<M: Module>(
    rank: &Rank,
    axis: Axis,
    module: M,
    plan: &Plan,
    precision: Precision,
) -> Result<Model<M>> {
    Model::without_values(&rank.slice(axis), module, plan, precision)
}
