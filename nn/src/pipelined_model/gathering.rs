//! How a pipeline rank gathers the parameters that it stores as shards: once per step, or in each pass of a microbatch.

use super::{PlannedStep, is_trainable};
use crate::module::Module;
use crate::module::param::{Param, key_of_param};
use crate::sharded_model::Model;
use shardgrad_autograd::pipeline::{PipelineInputs, Runner, Schedule, Stages};
use shardgrad_autograd::{GatheredLifetime, Key, Noise, ReplayNoise};
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::{Axis, Layout, Result, Tensor};
use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;

/// Of the estimated peak, the share that is added for gaps in the memory of the allocator and for messages on their way.
const GAPS_SHARE: u64 = 6;

/// How the stages of a pipeline rank gather the parameters that stage 3 of ZeRO stores as shards
/// ([`Plan::gathered_bytes_max`](crate::Plan::gathered_bytes_max)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageGathering {
    /// The coordinate on the pipeline axis.
    pub pipeline_rank: usize,
    /// The bytes of the gathered form of all these parameters, in the dtype of computation.
    pub gathered_bytes: u64,
    /// Whether each pass of a microbatch gathers, group after group, rather than the step once.
    pub by_microbatch: bool,
    /// What decided.
    pub reason: GatheringReason,
}

/// What decides how often a pipeline rank gathers parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatheringReason {
    /// The bound of the plan on the gathered bytes.
    Bound(u64),
    /// The memory of the ranks of the stage.
    Memory {
        /// The estimated bytes that a rank needs if a step gathers once: the peak of a step and the optimizer state, and a sixth for gaps.
        needed_bytes: u64,
        /// The smallest number of bytes that a rank has; `None` if it is unknown.
        available_bytes: Option<u64>,
    },
}

/// Returns the stages for inference with the policies of the model's parameters: gathered once per forward pass and kept, unless their
/// gathered forms take more than the bytes that the plan states.
pub(crate) fn with_gather_policies<M: Module>(
    stages: Stages,
    model: &Model<M>,
    stage_ranks: &[usize],
    own_rank: usize,
) -> Stages {
    let bytes = gathered_bytes(&stages, model, stage_ranks, own_rank);
    let by_microbatch = model.gathered_bytes_max().is_some_and(|max| bytes > max as u64);
    let stages = reducing_each_pass(stages, model);
    if by_microbatch { gathering_each_pass(stages, model, stage_ranks, own_rank) } else { stages }
}

/// Returns the stages, which reduce gradients in each backward pass where the policies of the model's parameters say so, and gather
/// parameters once per step.
pub(super) fn reducing_each_pass<M: Module>(stages: Stages, model: &Model<M>) -> Stages {
    stages.reducing_each_pass(
        model.params().iter().filter(|p| p.gather_policy().reduces_each_round).map(Param::key),
    )
}

/// Returns the stages, of which those of a pipeline rank gather parameters in each pass.
pub(super) fn gathering_each_pass<M: Module>(
    stages: Stages,
    model: &Model<M>,
    stage_ranks: &[usize],
    pipeline_rank: usize,
) -> Stages {
    let grouped = grouped_params(&stages, model, stage_ranks, pipeline_rank);
    let gathered: Vec<(Key, u32)> = grouped.map(|(param, group)| (param.key(), group)).collect();
    stages.gathering_each_pass(gathered)
}

/// Decides how the stages of the pipeline ranks gather parameters: by the bound of the plan, or else by memory. Returns an entry for each
/// pipeline rank, in a dry run for this one alone; none if no parameter has a gather group. `stages` gather once per step. Without a
/// bound a collective call of all ranks of the world.
///
/// # Errors
/// Errors of the estimate, which runs a step on a dry twin, and of the collective.
pub(super) fn choose<M: Module>(
    model: &Model<M>,
    axis: Axis,
    (stages, schedule): (&Stages, &Schedule),
    arguments: &[Layout],
    step: &PlannedStep<'_>,
    site: &'static Location<'static>,
) -> Result<Vec<StageGathering>> {
    let world = model.rank().world();
    let (mesh, own_rank) = (world.mesh(), world.coordinate(axis));
    let bytes = |rank: usize| gathered_bytes(stages, model, &schedule.stage_ranks, rank);
    let has_group = |p: &Param| matches!(p.gather_policy().lifetime, GatheredLifetime::Group(_));
    if !model.params().iter().any(has_group) {
        return Ok(Vec::new());
    }
    if let Some(max) = model.gathered_bytes_max() {
        let by_bound = |pipeline_rank: usize| {
            let (gathered_bytes, max) = (bytes(pipeline_rank), max as u64);
            let (by_microbatch, reason) = (gathered_bytes > max, GatheringReason::Bound(max));
            StageGathering { pipeline_rank, gathered_bytes, by_microbatch, reason }
        };
        return Ok((0..mesh.size(axis)).map(by_bound).collect());
    }
    if model.pass_rank() != model.rank() {
        // Passes of single leaves gather their parameters before the first of them.
        return Ok(Vec::new());
    }
    let by_memory = |pipeline_rank: usize, needed_bytes: u64, available_bytes: Option<u64>| {
        let gathered_bytes = bytes(pipeline_rank);
        let is_short = available_bytes.is_some_and(|available| needed_bytes > available);
        let reason = GatheringReason::Memory { needed_bytes, available_bytes };
        StageGathering {
            pipeline_rank,
            gathered_bytes,
            by_microbatch: is_short && gathered_bytes > 0,
            reason,
        }
    };
    let peak = peak_bytes(model, axis, (stages, schedule), arguments, step)?;
    let needed = peak + peak / GAPS_SHARE;
    if world.is_dry_run() {
        return Ok(vec![by_memory(own_rank, needed, step.rank_memory_bytes)]);
    }
    let everyone = exchange(model, needed, step.rank_memory_bytes, site)?;
    let of_pipeline_rank = |pipeline_rank: usize| {
        let members =
            (0..mesh.num_ranks()).filter(|rank| mesh.coordinate(*rank)[usize::from(axis.0)] == pipeline_rank);
        let members: Vec<&RankMemory> = members.map(|rank| &everyone[rank]).collect();
        let needed = members.iter().map(|member| member.needed_bytes).max().unwrap_or(0);
        let available = members.iter().filter_map(|member| member.share_of(&everyone)).min();
        by_memory(pipeline_rank, needed, available)
    };
    Ok((0..mesh.size(axis)).map(of_pipeline_rank).collect())
}

/// The memory that a rank needs and has.
#[derive(Clone, Copy, Debug)]
struct RankMemory {
    needed_bytes: u64,
    available_bytes: Option<u64>,
    /// A number that ranks have in common if they share these bytes; 0 if they are the rank's own.
    sharers: u64,
}

impl RankMemory {
    /// The available bytes of this rank, if the ranks that share them have equal parts.
    fn share_of(&self, everyone: &[RankMemory]) -> Option<u64> {
        if self.sharers == 0 {
            return self.available_bytes;
        }
        let sharing = || everyone.iter().filter(|other| other.sharers == self.sharers);
        let least = sharing().filter_map(|other| other.available_bytes).min()?;
        Some(least / sharing().count() as u64)
    }
}

/// Exchanges the memory that each rank of the world needs and has, before any of them allocates parameters.
fn exchange<M: Module>(
    model: &Model<M>,
    needed_bytes: u64,
    assumed_bytes: Option<u64>,
    site: &'static Location<'static>,
) -> Result<Vec<RankMemory>> {
    let world = model.rank().world();
    let (available, sharers) = match (assumed_bytes, world.backend().available_memory()) {
        (Some(bytes), _) => (Some(bytes), None),
        (None, Some(memory)) => (Some(memory.bytes), memory.shared_by),
        (None, None) => (None, None),
    };
    // Numbers that f64 represents exactly.
    let hash = |text: String| {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        (hasher.finish() >> 12 | 1) as f64
    };
    let mut words = vec![0.0; 3 * world.mesh().num_ranks()];
    let own = [needed_bytes as f64, available.map_or(-1.0, |bytes| bytes as f64), sharers.map_or(0.0, hash)];
    words[3 * world.index()..][..3].copy_from_slice(&own);
    let of_rank = |words: &[f64; 3]| RankMemory {
        needed_bytes: words[0] as u64,
        available_bytes: (words[1] >= 0.0).then_some(words[1] as u64),
        sharers: words[2] as u64,
    };
    Ok(world_sum(world, &words, site)?.as_chunks().0.iter().map(of_rank).collect())
}

/// Estimates the most bytes that this rank holds in a step whose stages gather once: the peak of its passes on a dry twin, with its stored
/// parameters, and the optimizer state.
fn peak_bytes<M: Module>(
    model: &Model<M>,
    axis: Axis,
    (stages, schedule): (&Stages, &Schedule),
    arguments: &[Layout],
    step: &PlannedStep<'_>,
) -> Result<u64> {
    let twin = model.rank().dry_twin();
    let keys = keys_of(stages, &schedule.stage_ranks, twin.world().coordinate(axis));
    let own: Vec<&Param> = model.params().iter().filter(|param| keys.contains(&param.key())).collect();
    let stored = |param: &&Param| Ok((param.key(), Tensor::zeros(&twin, &param.layout())?));
    let stored: HashMap<Key, Tensor> = own.iter().map(stored).collect::<Result<_>>()?;
    let inputs = PipelineInputs {
        arguments: &|_| arguments.iter().map(|layout| Tensor::zeros(&twin, layout)).collect(),
        parameter: &|key| stored[&key_of_param(key)].clone(),
        is_trained: &is_trainable(model),
        draw: &|_| ReplayNoise::Of(Noise { seed: 0, step: 0, first_row: 0 }),
        weight: 1.0,
    };
    let outputs = Runner { rank: &twin, axis, stages, schedule }.run(&inputs)?;
    let peak = twin.backend().memory().peak_bytes as u64;
    drop(outputs);
    Ok(peak + own.iter().map(|param| (step.optimizer_bytes)(param)).sum::<u64>())
}

/// The keys of the parameters that the stages of a pipeline rank read.
fn keys_of(stages: &Stages, stage_ranks: &[usize], pipeline_rank: usize) -> BTreeSet<Key> {
    let own = (0..stage_ranks.len()).filter(|stage| stage_ranks[*stage] == pipeline_rank);
    own.flat_map(|stage| stages.keys(stage)).map(key_of_param).collect()
}

/// The parameters of a pipeline rank that have a gather group, with their groups.
fn grouped_params<'m, M: Module>(
    stages: &Stages,
    model: &'m Model<M>,
    stage_ranks: &[usize],
    pipeline_rank: usize,
) -> impl Iterator<Item = (&'m Param, u32)> {
    let keys = keys_of(stages, stage_ranks, pipeline_rank);
    model.params().iter().filter_map(move |param| match param.gather_policy().lifetime {
        GatheredLifetime::Group(group) if keys.contains(&param.key()) => Some((param, group)),
        _ => None,
    })
}

/// The bytes of the gathered forms of the parameters of a pipeline rank that have a gather group, on the last rank, which has the most
/// bytes of all. They follow from layouts alone.
fn gathered_bytes<M: Module>(
    stages: &Stages,
    model: &Model<M>,
    stage_ranks: &[usize],
    pipeline_rank: usize,
) -> u64 {
    let bytes = |layout: Layout| {
        let mesh = layout.mesh();
        let last: Vec<usize> = mesh.axes().map(|axis| mesh.size(axis) - 1).collect();
        layout.local_shape(&last).iter().product::<usize>() * layout.dtype().size()
    };
    let grouped = grouped_params(stages, model, stage_ranks, pipeline_rank);
    grouped.map(|(param, _)| param.compute_layout().map_or(0, bytes) as u64).sum()
}
