//! Where a model is cut and in which order its passes run, by what the plan says and, if it says so, by measured times.

use super::trained;
use crate::module::Module;
use crate::placed::Model;
use crate::plan::{PassOrder, Pipeline};
use shardgrad_autograd::pipeline::{Cut, Feed, Profile, Schedule, Search, held_max};
use shardgrad_autograd::{Draw, Noise, Program};
use shardgrad_tensor::{Axis, Error, Kind, Result, Tensor};

/// What stands for the values of parameters while times are measured.
const MADE_UP: f64 = 0.02;

/// The schedule, and the records with which its stages begin.
pub(super) fn choose<M: Module>(
    model: &Model<M>,
    (pipeline, axis): (&Pipeline, Axis),
    (seed, num_microbatches): (u64, usize),
    program: &Program,
    arguments: &[Tensor],
) -> Result<(Schedule, Vec<usize>)> {
    let rank = model.rank();
    let num_ranks = rank.world().mesh().size(axis);
    let profile = |num_stages: usize| measure(model, axis, seed, (program, num_stages), arguments);
    let lists = match &pipeline.order {
        PassOrder::Named(name) => match held_max(name, num_ranks) {
            Some(held_max) => {
                let profile = profile(2 * num_ranks).or_else(|_| profile(num_ranks))?;
                return search(model, pipeline, (num_ranks, num_microbatches, held_max), program, &profile);
            }
            None => Schedule::named(name, num_ranks, num_microbatches)?,
        },
        PassOrder::Lists(lists) => fits(lists, num_ranks, num_microbatches)?.clone(),
    };
    let starts = match &pipeline.cut {
        Cut::Measured => profile(lists.num_stages())?.cut(lists.num_stages())?,
        cut => program.cut(rank, cut, lists.num_stages())?,
    };
    Ok((lists, starts))
}

/// Refuses lists for another number of ranks or microbatches, and those that no training follows.
fn fits(lists: &Schedule, num_ranks: usize, num_microbatches: usize) -> Result<&Schedule> {
    if !lists.trains() {
        let text = format!("schedule {} has no backward pass, so nothing would be trained", lists.name);
        let help = "write one for each stage and microbatch, as in B0.3, or its halves, as in I0.3 and W0.3";
        return Err(Error::new(Kind::Config, text).detail("help", help));
    }
    let there = [lists.ranks.len(), lists.num_microbatches];
    if there == [num_ranks, num_microbatches] {
        return Ok(lists);
    }
    let text = format!(
        "schedule {} is for {} ranks and {} microbatches, the run has {num_ranks} and {num_microbatches}",
        lists.name, there[0], there[1]
    );
    let help =
        format!("use {} microbatches on a pipeline axis of {} ranks, or other lists", there[1], there[0]);
    Err(Error::new(Kind::Config, text).detail("help", help))
}

fn measure<M: Module>(
    model: &Model<M>,
    axis: Axis,
    seed: u64,
    (program, num_stages): (&Program, usize),
    arguments: &[Tensor],
) -> Result<Profile> {
    let rank = model.rank();
    let parameter = |key| {
        let param = model.params().iter().find(|p| p.key() == key);
        let param = param.expect("a program uses its own model's keys");
        Tensor::full(rank, &param.layout(), MADE_UP).unwrap_or_else(|e| e.raise())
    };
    let feed = Feed {
        arguments: &|_| Ok(arguments.to_vec()),
        parameter: &parameter,
        is_trained: &trained(model),
        draw: &|_| Draw::Of(Noise { seed, step: 0, first_row: 0 }),
        weight: 1.0,
    };
    Profile::measure((rank, axis), program, num_stages, &feed)
}

/// The shorter of what is found for one stage on each rank and for two in the shape of a V.
fn search<M: Module>(
    model: &Model<M>,
    pipeline: &Pipeline,
    (num_ranks, num_microbatches, held_max): (usize, usize, usize),
    program: &Program,
    profile: &Profile,
) -> Result<(Schedule, Vec<usize>)> {
    let chain: Vec<usize> = (0..num_ranks).collect();
    let vee = (0..num_ranks).chain((0..num_ranks).rev()).collect();
    let one = |(place, live_max): (Vec<usize>, usize)| {
        let starts = match &pipeline.cut {
            Cut::Measured => profile.cut(place.len())?,
            cut => program.cut(model.rank(), cut, place.len())?,
        };
        let times = profile.stage_times(&starts);
        let search = Search { place, num_microbatches, live_max, times, transfer: profile.transfer };
        let schedule = search.run("searched")?;
        Ok((search.span(&schedule), schedule, starts))
    };
    let found: Vec<Result<(f64, Schedule, Vec<usize>)>> =
        [(chain, held_max), (vee, 2 * held_max)].into_iter().map(one).collect();
    // A cut that names places fits one of them only.
    let (fit, unfit): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
    let best = fit.into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0));
    match (best, unfit.into_iter().next()) {
        (Some((_, schedule, starts)), _) => Ok((schedule, starts)),
        (None, Some(Err(error))) => Err(error),
        (None, _) => Err(Error::new(Kind::Config, "no schedule was found")),
    }
}
