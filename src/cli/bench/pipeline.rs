//! Pipeline schedule benchmark: measured step times compared with the simulator. Stages sleep instead of computing, so that few cores suffice
//! for any number of ranks.

use super::measurement::{Bench, Work};
use shardgrad::autograd::pipeline::{NAMES, PassTimes, Schedule};
use shardgrad::prelude::*;
use shardgrad::tensor::LocalTensor;
use shardgrad::tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// How long each pass of a stage sleeps.
const UNIT: Duration = Duration::from_millis(5);
/// Numbers of ranks.
const RANKS: [usize; 3] = [2, 4, 8];
/// Maximum number of timed steps, after one warmup step.
const STEPS_MAX: usize = 5;
/// Measuring time of a schedule relative to other benchmarks.
const TIME_FACTOR: u32 = 25;

/// y = x, sleeping in every pass; w only has a gradient.
#[derive(Debug)]
struct SleepOp;

impl Op for SleepOp {
    fn name(&self) -> &'static str {
        "nap"
    }

    fn signature(&self) -> &str {
        "..m d, d -> ..m d"
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        std::thread::sleep(UNIT);
        Ok(LocalTensors::from_iter([x[0].clone()]))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|arg| {
            std::thread::sleep(UNIT);
            let zeros = || Tensor::zeros(cx.rank, &cx.cotangent_layout(arg)).unwrap_or_else(|e| e.raise());
            if arg == 0 { cx.grad(0) } else { zeros() }
        })
    }
}

module! { struct Sleeper { layers: Vec<Param> } }

impl Sleeper {
    fn forward(&self, x: &Var) -> Var {
        self.layers.iter().fold(x.clone(), |x, layer| {
            let w = layer.on(&x);
            Var::apply(Rc::new(SleepOp), &[&x, &w]).remove(0)
        })
    }
}

/// Ranks and microbatches of schedules that are built and verified but not run.
const LONG: (usize, usize) = (64, 512);

/// Runs every schedule on every number of ranks.
pub(super) fn run(bench: &Bench) -> Result<()> {
    for name in NAMES {
        let seconds = bench.seconds(1, || {
            let schedule = Schedule::named(name, LONG.0, LONG.1)?;
            let links = chain(schedule.num_stages());
            schedule.with_transfers(&links).verify(&links).map(drop)
        })?;
        bench.report(
            "pipeline-list",
            name,
            &format!("pp={}, {} microbatches", LONG.0, LONG.1),
            seconds,
            Work::Call,
        );
    }
    for num_ranks in RANKS {
        for name in NAMES {
            let (schedule, num_sleeps, seconds) = measured(bench, name, num_ranks)?;
            let expected = simulated(&schedule, &num_sleeps);
            bench.report("pipeline", name, &format!("pp={num_ranks}"), seconds, Work::Call);
            if !bench.json {
                let more = 100.0 * (seconds / expected - 1.0);
                println!("{:12} {:.2} ms simulated, {more:+.1}%", "", expected * 1e3);
            }
        }
    }
    Ok(())
}

fn chain(num_stages: usize) -> Vec<(usize, usize)> {
    (1..num_stages).map(|s| (s - 1, s)).collect()
}

/// Returns the simulated seconds of a step with the given number of sleeping ops per stage. The first stage sends no input gradient, so all of its
/// backward counts as weight gradient.
fn simulated(schedule: &Schedule, num_sleeps: &[usize]) -> f64 {
    let unit = UNIT.as_secs_f64();
    let times = |(stage, num_sleeps): (usize, &usize)| {
        let each = *num_sleeps as f64 * unit;
        match stage {
            0 => PassTimes { forward: each, input: 0.0, weight: (2.0 * each - unit).max(0.0) },
            _ => PassTimes { forward: each, input: each, weight: each },
        }
    };
    let times: Vec<PassTimes> = num_sleeps.iter().enumerate().map(times).collect();
    schedule.simulate(&chain(num_sleeps.len()), &times, 0.0).makespan()
}

/// Runs a schedule with two microbatches per rank; returns the schedule, the sleeping ops of each stage, and the median seconds per step.
fn measured(bench: &Bench, name: &str, num_ranks: usize) -> Result<(Schedule, Vec<usize>, f64)> {
    let num_microbatches = 2 * num_ranks;
    let num_layers = Schedule::named(name, num_ranks, num_microbatches)?.num_stages();
    // Per rank and step: forward, input and weight gradient of every layer.
    let num_sleeps = 3 * num_microbatches * num_layers / num_ranks;
    let num_steps =
        ((bench.limit * TIME_FACTOR).as_secs_f64() / (num_sleeps as f64 * UNIT.as_secs_f64())) as usize;
    let num_steps = num_steps.clamp(1, STEPS_MAX);
    let plan = Plan::pipeline_parallel("pp").pipeline_schedule(name);
    let ranks = World::new(Mesh::new(&[("pp", num_ranks)])?).threads(1).launch(|rank| {
        let model = Sleeper { layers: (0..num_layers).map(|_| Param::new(&[1])).collect() };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            Ok(vec![Tensor::from_host(rank, &[rows.len(), 1], &vec![1.0f32; rows.len()])?])
        };
        let loss = |model: &Sleeper, x: &[Var]| model.forward(&x[0]).mean();
        let settings =
            TrainerConfig { microbatches: num_microbatches, ..TrainerConfig::new(num_microbatches) };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(0.0), settings, read, loss)?;
        let mut seconds = Vec::new();
        for _ in 0..=num_steps {
            let started = std::time::Instant::now();
            let report = trainer.step()?;
            seconds.push(started.elapsed().as_secs_f64());
            if report.loss != 1.0 {
                let text = format!("{name}: the loss is {}, expected 1; not timed", report.loss);
                return Err(Error::new(Kind::NotFinite, text));
            }
        }
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        let schedule = trainer.pipeline_schedule().cloned().expect("the mesh has a pipeline axis");
        // The sleeping ops come first.
        let starts = trainer.stage_starts().into_iter().map(|(start, _)| start.min(num_layers));
        let borders: Vec<usize> = starts.chain([num_layers]).collect();
        let num_sleeps = borders.windows(2).map(|w| w[1] - w[0]).collect();
        Ok((schedule, num_sleeps, seconds[seconds.len() / 2]))
    })?;
    Ok(ranks.into_iter().next().expect("a world has a rank"))
}
