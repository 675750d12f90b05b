//! Pipeline schedules as they run, beside what the simulator says of them. Stages sleep instead of computing, so that a
//! few cores are enough for any number of ranks.

use super::line::{Bench, Work};
use shardgrad::autograd::pipeline::{NAMES, Schedule, Times};
use shardgrad::prelude::*;
use shardgrad::tensor::Piece;
use shardgrad::tensor::op::{Cotangents, Local, Op, Pieces, Vjp};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// How long each pass of a stage sleeps.
const UNIT: Duration = Duration::from_millis(5);
/// Numbers of ranks.
const RANKS: [usize; 3] = [2, 4, 8];
/// Steps that are timed, at most, after one that is not.
const STEPS_MAX: usize = 5;
/// Naps take long: a schedule is given so many times the time of another case, which is enough for all steps by default.
const PATIENCE: u32 = 25;

/// y = x, in a time of its own in every pass; w is there to have a gradient.
#[derive(Debug)]
struct Nap;

impl Op for Nap {
    fn name(&self) -> &'static str {
        "nap"
    }

    fn signature(&self) -> &str {
        "..m d, d -> ..m d"
    }

    fn forward(&self, _: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        std::thread::sleep(UNIT);
        Ok(Pieces::from_iter([x[0].clone()]))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|arg| {
            std::thread::sleep(UNIT);
            let zeros = || Tensor::zeros(cx.rank, &cx.goal(arg)).unwrap_or_else(|e| e.raise());
            if arg == 0 { cx.grad(0) } else { zeros() }
        })
    }
}

module! { struct Sleeper { layers: Vec<Param> } }

impl Sleeper {
    fn forward(&self, x: &Var) -> Var {
        self.layers.iter().fold(x.clone(), |x, layer| {
            let w = layer.on(&x);
            Var::apply(Rc::new(Nap), &[&x, &w]).remove(0)
        })
    }
}

/// Ranks and microbatches of the lists that are made and proved without being run.
const LONG: (usize, usize) = (64, 512);

/// Runs every schedule on every number of ranks.
pub(super) fn run(bench: &Bench) -> Result<()> {
    for name in NAMES {
        let seconds = bench.seconds(1, || {
            let schedule = Schedule::named(name, LONG.0, LONG.1)?;
            let links = chain(schedule.num_stages());
            schedule.with_transfers(&links).verify(&links).map(drop)
        })?;
        bench.tell(
            "pipeline-list",
            name,
            &format!("pp={}, {} microbatches", LONG.0, LONG.1),
            seconds,
            Work::Call,
        );
    }
    for num_ranks in RANKS {
        for name in NAMES {
            let (schedule, naps, seconds) = measured(bench, name, num_ranks)?;
            let expected = simulated(&schedule, &naps);
            bench.tell("pipeline", name, &format!("pp={num_ranks}"), seconds, Work::Call);
            if !bench.json {
                let more = 100.0 * (seconds / expected - 1.0);
                println!("{:12} {:.2} ms by the simulator, {more:+.1}%", "", expected * 1e3);
            }
        }
    }
    Ok(())
}

fn chain(num_stages: usize) -> Vec<(usize, usize)> {
    (1..num_stages).map(|s| (s - 1, s)).collect()
}

/// Seconds of a step by the simulator, whose stages nap so often. The first stage has nothing to hand back, so what goes from
/// nap to nap in it is not waited for.
fn simulated(schedule: &Schedule, naps: &[usize]) -> f64 {
    let unit = UNIT.as_secs_f64();
    let times = |(stage, naps): (usize, &usize)| {
        let each = *naps as f64 * unit;
        match stage {
            0 => Times { forward: each, input: 0.0, weight: (2.0 * each - unit).max(0.0) },
            _ => Times { forward: each, input: each, weight: each },
        }
    };
    let times: Vec<Times> = naps.iter().enumerate().map(times).collect();
    schedule.simulate(&chain(naps.len()), &times, 0.0).makespan()
}

/// The lists that were run with two microbatches a rank, the naps of each stage, and seconds of a step as it ran: the
/// median of those that there was time for.
fn measured(bench: &Bench, name: &str, num_ranks: usize) -> Result<(Schedule, Vec<usize>, f64)> {
    let num_microbatches = 2 * num_ranks;
    let num_layers = Schedule::named(name, num_ranks, num_microbatches)?.num_stages();
    // Of a rank in a step: forward, input and weight of every layer.
    let naps = 3 * num_microbatches * num_layers / num_ranks;
    let num_steps = ((bench.limit * PATIENCE).as_secs_f64() / (naps as f64 * UNIT.as_secs_f64())) as usize;
    let num_steps = num_steps.clamp(1, STEPS_MAX);
    let plan = Plan::pipeline("pp").schedule(name);
    let ranks = World::new(Mesh::new(&[("pp", num_ranks)])?).threads(1).launch(|rank| {
        let model = Sleeper { layers: (0..num_layers).map(|_| Param::new(&[1])).collect() };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            Ok(vec![Tensor::from_host(rank, &[rows.len(), 1], &vec![1.0f32; rows.len()])?])
        };
        let loss = |model: &Sleeper, x: &[Var]| model.forward(&x[0]).mean();
        let settings = Settings { microbatches: num_microbatches, ..Settings::new(num_microbatches) };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(0.0), settings, read, loss)?;
        let mut seconds = Vec::new();
        for _ in 0..=num_steps {
            let started = std::time::Instant::now();
            let report = trainer.step(&[])?;
            seconds.push(started.elapsed().as_secs_f64());
            if report.loss != 1.0 {
                let text = format!("{name}: the loss is {} instead of 1; not timed", report.loss);
                return Err(Error::new(Kind::NotFinite, text));
            }
        }
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        let schedule = trainer.schedule().cloned().expect("the mesh has a pipeline axis");
        // The naps are the first ops.
        let starts = trainer.stage_starts().into_iter().map(|(start, _)| start.min(num_layers));
        let borders: Vec<usize> = starts.chain([num_layers]).collect();
        let naps = borders.windows(2).map(|w| w[1] - w[0]).collect();
        Ok((schedule, naps, seconds[seconds.len() / 2]))
    })?;
    Ok(ranks.into_iter().next().expect("a world has a rank"))
}
