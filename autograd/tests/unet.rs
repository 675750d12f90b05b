//! A U-Net-like model: skip connections from the way down to the way up, a tied embedding at both ends, an auxiliary
//! loss and a result that is not a loss. Under every schedule, on any number of stages, it has the gradients of one
//! rank, and as many live passes as the simulation.

use approx::abs_diff_eq;
use shardgrad_autograd::pipeline::{
    NAMES, PassTimes, PipelineInputs, PipelineOutputs, Runner, Schedule, Stages,
};
use shardgrad_autograd::{Gradients, Program, ReplayNoise, Tape, Var};
use shardgrad_dist::{Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Layout, Tensor, Value};
use std::collections::BTreeMap;
use std::ops::Range;

const WIDTH: usize = 5;
const ROWS: usize = 3;
const WORDS: usize = 7;
const DEPTH: u64 = 4;
/// The key of the tied embedding, after the layers.
const TABLE: u64 = 2 * DEPTH;
/// The weight of the auxiliary loss.
const AUXILIARY: f64 = 0.25;

/// Numbers without a pattern, between -1 and 1.
fn parameter(rank: &Rank, key: u64) -> Result<Tensor> {
    let shape = if key == TABLE { vec![WORDS, WIDTH] } else { vec![WIDTH, WIDTH] };
    let number = |i: usize| ((i as f64 + 1.3) * (key as f64 + 2.7)).sin();
    let data: Vec<f64> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_host(rank, &shape, &data)
}

/// The main loss, the auxiliary loss, and the logits of each row.
fn text(args: &[Var]) -> Result<Vec<Var>> {
    let ids = &args[0];
    let tape = ids.tape().clone();
    let on = |key: u64| parameter(ids.rank(), key).map(|t| tape.leaf(key, &t));
    let table = on(TABLE)?;
    let mut h = table.embedding(ids);
    let mut skips = Vec::new();
    for layer in 0..DEPTH {
        h = h.matmul(&on(layer)?).relu();
        skips.push(h.clone());
    }
    // Ops without parameters.
    h = h.square().scale(0.5).relu().scale(0.7);
    let auxiliary = h.square().mean().scale(AUXILIARY);
    for layer in DEPTH..2 * DEPTH {
        h = h.add(&skips.pop().expect("one for each")).matmul(&on(layer)?).relu().scale(0.4);
    }
    let said = h.matmul_nt(&table);
    Ok(vec![said.square().mean(), auxiliary, said])
}

fn arguments(rank: &Rank, microbatch: usize) -> Result<Vec<Tensor>> {
    let ids: Vec<i64> = (0..ROWS).map(|r| ((3 * r + 2 * microbatch) % WORDS) as i64).collect();
    Ok(vec![Tensor::from_host(rank, &[ROWS], &ids)?])
}

/// Losses and logits by microbatch, and gradients.
type Expected = (Vec<[Vec<f64>; 3]>, BTreeMap<u64, Vec<f64>>);

fn reference(num_microbatches: usize) -> Expected {
    let ranks = World::run(Mesh::single(), |rank| {
        let tape = Tape::new(rank);
        let mut all = Vec::new();
        for microbatch in 0..num_microbatches {
            let args: Vec<Var> = arguments(rank, microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let results = text(&args)?;
            let values: Result<Vec<Vec<f64>>> = results.iter().map(|r| r.tensor().to_f64()).collect();
            all.push(values?.try_into().expect("three results"));
            results[0].add(&results[1]).scale(1.0 / num_microbatches as f64).backward()?;
        }
        Ok((all, values(&tape.gradients())?))
    });
    ranks.unwrap().remove(0)
}

fn values(gradients: &Gradients) -> Result<BTreeMap<u64, Vec<f64>>> {
    gradients.iter().map(|(key, g)| Ok((*key, g.to_f64()?))).collect()
}

fn close(a: &[f64], b: &[f64], what: &str) {
    let scale = b.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    assert!(abs_diff_eq!(a, b, epsilon = 1e-12 * scale), "{what}: {a:?}, on one rank {b:?}");
}

fn recorded(rank: &Rank) -> Result<Program> {
    Program::record(rank, &[Layout::invariant(rank.mesh(), DType::I64, &[ROWS])], None, text)
}

/// The longest run of records that read no parameter.
fn bare(program: &Program) -> Range<usize> {
    let reads = |at: usize| {
        let slots = program.records[at].inputs.iter();
        slots.filter(|s| matches!(s, shardgrad_autograd::Slot::External(_))).count() > 0
    };
    let mut best = 0..0;
    let mut from = 0;
    for at in 0..=program.records.len() {
        if at == program.records.len() || reads(at) {
            best = if at - from > best.len() { from..at } else { best };
            from = at + 1;
        }
    }
    best
}

/// Cuts with one stage without parameters (with three or more stages), and stages of two or of many records.
fn starts(program: &Program, num_stages: usize) -> Vec<usize> {
    let bare = bare(program);
    let mut starts: Vec<usize> = [bare.start, bare.end].into_iter().take(num_stages - 1).collect();
    let free = (1..program.records.len()).filter(|at| *at < bare.start || *at > bare.end);
    let free: Vec<usize> = free.collect();
    let left = (num_stages - 1).saturating_sub(2);
    // Close together at the front, far apart at the back.
    starts.extend((0..left).map(|i| free[(i * i * (free.len() - left) / (left * left).max(1)) + i]));
    starts.sort_unstable();
    starts
}

/// One rank's step, with the live passes that the verification and the simulation give, and the parameters of its
/// stages.
fn step(
    rank: &Rank,
    name: &str,
    num_microbatches: usize,
) -> Result<(PipelineOutputs, Vec<Vec<usize>>, Vec<u64>)> {
    let axis = rank.mesh().axis("pp").unwrap();
    let (here, place) = (rank.slice(axis), rank.coordinate(axis));
    let schedule = Schedule::named(name, rank.mesh().size(axis), num_microbatches)?;
    let program = recorded(&here)?;
    let cuts = starts(&program, schedule.num_stages());
    let stages = Stages::with_losses(program, &cuts, 2);
    let links = stages.links();
    let schedule = schedule.with_transfers(&links);
    let proved = schedule.verify(&links)?.peak_live;
    let even = vec![PassTimes { forward: 1.0, input: 1.0, weight: 1.0 }; schedule.num_stages()];
    let timeline = schedule.simulate(&links, &even, 0.0);
    let most = |rank: usize| timeline.live(rank).iter().map(|(_, n)| *n).max().unwrap_or(0);
    let simulated: Vec<usize> = (0..schedule.ranks.len()).map(most).collect();
    let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
    let outcome = runner.run(&PipelineInputs {
        arguments: &|m| arguments(&here, m),
        parameter: &|key| parameter(&here, key).unwrap(),
        is_trained: &|_| true,
        draw: &|_| ReplayNoise::Off,
        weight: 1.0 / num_microbatches as f64,
    })?;
    let mine = (0..schedule.num_stages()).filter(|stage| schedule.stage_ranks[*stage] == place);
    let mut keys: Vec<u64> = mine.flat_map(|stage| stages.keys(stage)).collect();
    keys.sort_unstable();
    keys.dedup();
    Ok((outcome, vec![proved, simulated], keys))
}

/// Runs a schedule and compares it with one rank.
fn check(name: &str, num_ranks: usize, num_microbatches: usize, expected: &Expected) {
    let what = format!("{name} on {num_ranks} ranks, {num_microbatches} microbatches");
    let mesh = Mesh::new(&[("pp", num_ranks)]).unwrap();
    let ranks = World::run(mesh, |rank| {
        let (outcome, peaks, keys) = step(rank, name, num_microbatches)?;
        let result = |t: &Option<Tensor>| t.as_ref().map(Tensor::to_f64).transpose();
        let results: Result<Vec<Vec<Option<Vec<f64>>>>> =
            outcome.results.iter().map(|all| all.iter().map(result).collect()).collect();
        Ok((results?, values(&outcome.gradients)?, outcome.peak_live, peaks, keys))
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut seen = vec![[0; 3]; num_microbatches];
    for (rank, (results, gradients, counted, peaks, keys)) in ranks.into_iter().enumerate() {
        assert_eq!([counted, counted], [peaks[0][rank], peaks[1][rank]], "{what}: held by rank {rank}");
        for (microbatch, all) in results.iter().enumerate() {
            for (at, value) in all.iter().enumerate() {
                if let Some(value) = value {
                    seen[microbatch][at] += 1;
                    close(value, &expected.0[microbatch][at], &format!("{what}: result {at}"));
                }
            }
        }
        assert_eq!(gradients.keys().copied().collect::<Vec<u64>>(), keys, "{what}");
        for (key, gradient) in gradients {
            close(&gradient, &expected.1[&key], &format!("{what}: gradient of {key}"));
        }
    }
    assert!(seen.iter().flatten().all(|n| *n == 1), "{what}: {seen:?}");
}

#[test]
fn every_schedule_matches_one_rank_and_the_simulated_live_passes() {
    for num_ranks in [2, 3, 4, 8] {
        for num_microbatches in [num_ranks, 2 * num_ranks + 1] {
            let expected = reference(num_microbatches);
            for name in NAMES {
                match Schedule::named(name, num_ranks, num_microbatches) {
                    Ok(_) => check(name, num_ranks, num_microbatches, &expected),
                    Err(error) => {
                        let near = format!("use {} microbatches", 3 * num_ranks);
                        assert!(name == "interleaved" && error.to_string().contains(&near), "{error}");
                    }
                }
            }
        }
    }
}

#[test]
fn test_cuts_are_uneven_with_one_stage_without_parameters() {
    let stages = World::new(Mesh::single()).dry_run(0, |rank| {
        let program = recorded(rank)?;
        let all = [2, 3, 4, 6, 8, 16].map(|n| {
            let stages = Stages::with_losses(program.clone(), &starts(&program, n), 2);
            let lens: Vec<usize> = stages.stages().iter().map(|s| s.range.len()).collect();
            let bare = (0..n).filter(|s| stages.keys(*s).is_empty() && lens[*s] > 1).count();
            let skips = stages.links().iter().filter(|(from, to)| to - from > 1).count();
            (n, lens, bare, skips)
        });
        Ok(all.to_vec())
    });
    for (n, lens, bare, skips) in stages.unwrap() {
        assert_eq!(lens.len(), n);
        assert!(lens.iter().max() >= lens.iter().min().map(|least| least + 2).as_ref(), "{lens:?}");
        assert!(n < 3 || (bare >= 1 && skips >= 1), "{n}: {lens:?}, {bare} bare, {skips} skips");
    }
}
