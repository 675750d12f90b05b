//! Stage partitioning: chooses the cut of a model into stages and its schedule, by the plan or by measured times.

use super::{is_trainable, param_of};
use crate::module::Module;
use crate::plan::{PipelinePlan, PipelineSchedule};
use crate::sharded_model::Model;
use shardgrad_autograd::pipeline::{Cut, PipelineInputs, Profile, Schedule, ScheduleSearch, in_flight_max};
use shardgrad_autograd::{Noise, Program, ReplayNoise};
use shardgrad_tensor::{Axis, Error, Kind, Result, Tensor};

/// The value of all parameters during profiling.
const DUMMY_PARAM_VALUE: f64 = 0.02;

/// Returns the schedule, and the index of the first record of each stage.
pub(super) fn choose<M: Module>(
    model: &Model<M>,
    pipeline: &PipelinePlan,
    axis: Axis,
    seed: u64,
    num_microbatches: usize,
    program: &Program,
    arguments: &[Tensor],
) -> Result<(Schedule, Vec<usize>)> {
    let rank = model.pass_rank();
    let num_ranks = rank.world().mesh().size(axis);
    let profile = |num_stages: usize| measure(model, axis, seed, program, num_stages, arguments);
    let lists = match &pipeline.schedule {
        PipelineSchedule::Named(name) => match in_flight_max(name, num_ranks) {
            Some(in_flight_max) => {
                let profile = profile(2 * num_ranks).or_else(|_| profile(num_ranks))?;
                return search(
                    model,
                    pipeline,
                    num_ranks,
                    num_microbatches,
                    in_flight_max,
                    program,
                    &profile,
                );
            }
            None => Schedule::named(name, num_ranks, num_microbatches)?,
        },
        PipelineSchedule::Actions(lists) => check_action_lists(lists, num_ranks, num_microbatches)?.clone(),
    };
    let starts = match &pipeline.cut {
        Cut::Measured => profile(lists.num_stages())?.cut(lists.num_stages())?,
        cut => program.cut(rank, cut, lists.num_stages())?,
    };
    Ok((lists, starts))
}

/// Rejects action lists for another number of ranks or microbatches, and lists without backward passes.
fn check_action_lists(lists: &Schedule, num_ranks: usize, num_microbatches: usize) -> Result<&Schedule> {
    if !lists.trains() {
        let text = format!("schedule {} has no backward pass, so it cannot train", lists.name);
        let help = "add a backward action for each stage and microbatch, as in B0.3, or a split one, as in I0.3 and W0.3";
        return Err(Error::new(Kind::Config, text).detail("help", help));
    }
    let expected = [lists.ranks.len(), lists.num_microbatches];
    if expected == [num_ranks, num_microbatches] {
        return Ok(lists);
    }
    let text = format!(
        "schedule {} is for {} ranks and {} microbatches, but the run has {num_ranks} and {num_microbatches}",
        lists.name, expected[0], expected[1]
    );
    let help = format!(
        "use {} microbatches on a pipeline axis of {} ranks, or another schedule",
        expected[1], expected[0]
    );
    Err(Error::new(Kind::Config, text).detail("help", help))
}

/// Profiles the program, cut into `num_stages` stages.
fn measure<M: Module>(
    model: &Model<M>,
    axis: Axis,
    seed: u64,
    program: &Program,
    num_stages: usize,
    arguments: &[Tensor],
) -> Result<Profile> {
    let rank = model.pass_rank();
    let parameter = |key| {
        let layout = param_of(model, key).pass_layout();
        Tensor::full(rank, &layout, DUMMY_PARAM_VALUE).unwrap_or_else(|e| e.raise())
    };
    let feed = PipelineInputs {
        arguments: &|_| Ok(arguments.to_vec()),
        parameter: &parameter,
        is_trained: &is_trainable(model),
        draw: &|_| ReplayNoise::Of(Noise { seed, step: 0, first_row: 0 }),
        weight: 1.0,
    };
    Profile::measure((rank, axis), program, num_stages, &feed)
}

/// Searches schedules with one stage per rank and with two stages per rank in V shape, and returns the faster.
fn search<M: Module>(
    model: &Model<M>,
    pipeline: &PipelinePlan,
    num_ranks: usize,
    num_microbatches: usize,
    in_flight_max: usize,
    program: &Program,
    profile: &Profile,
) -> Result<(Schedule, Vec<usize>)> {
    let chain: Vec<usize> = (0..num_ranks).collect();
    let v_shape = (0..num_ranks).chain((0..num_ranks).rev()).collect();
    let search_one = |(stage_ranks, live_max): (Vec<usize>, usize)| {
        let starts = match &pipeline.cut {
            Cut::Measured => profile.cut(stage_ranks.len())?,
            cut => program.cut(model.pass_rank(), cut, stage_ranks.len())?,
        };
        let times = profile.stage_times(&starts);
        let search =
            ScheduleSearch { stage_ranks, num_microbatches, live_max, times, transfer: profile.transfer };
        let schedule = search.run("searched")?;
        Ok((search.span(&schedule), schedule, starts))
    };
    let found: Vec<Result<(f64, Schedule, Vec<usize>)>> =
        [(chain, in_flight_max), (v_shape, 2 * in_flight_max)].into_iter().map(search_one).collect();
    // A cut that names layers fits only one of the two numbers of stages.
    let (found, failed): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
    let best = found.into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0));
    match (best, failed.into_iter().next()) {
        (Some((_, schedule, starts)), _) => Ok((schedule, starts)),
        (None, Some(Err(error))) => Err(error),
        (None, _) => Err(Error::new(Kind::Config, "the search found no schedule; name one, such as 1f1b")),
    }
}
