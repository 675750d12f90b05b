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

    fn forward(&self, _: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
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

/// Runs every schedule on every number of ranks.
pub(super) fn run(bench: &Bench) -> Result<()> {
    for num_ranks in RANKS {
        for name in NAMES {
            let num_microbatches = 2 * num_ranks;
            let schedule = Schedule::named(name, num_ranks, num_microbatches)?;
            let (expected, seconds) = (simulated(&schedule), measured(name, &schedule, num_microbatches)?);
            bench.tell("pipeline", name, &format!("pp={num_ranks}"), seconds, Work::Call);
            if !bench.json {
                let more = 100.0 * (seconds / expected - 1.0);
                println!("{:12} {:.2} ms by the simulator, {more:+.1}%", "", expected * 1e3);
            }
        }
    }
    Ok(())
}

/// Seconds of a step by the simulator. The first stage has nothing to hand back.
fn simulated(schedule: &Schedule) -> f64 {
    let unit = UNIT.as_secs_f64();
    let n = schedule.num_stages();
    let links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
    let times =
        |stage: usize| Times { forward: unit, input: if stage == 0 { 0.0 } else { unit }, weight: unit };
    schedule.simulate(&links, &(0..n).map(times).collect::<Vec<_>>(), 0.0).makespan()
}

/// Seconds of a step as it runs: the median of five, after one.
fn measured(name: &str, schedule: &Schedule, num_microbatches: usize) -> Result<f64> {
    let num_ranks = schedule.ranks.len();
    let plan = Plan::pipeline("pp").schedule(name);
    let ranks = World::new(Mesh::new(&[("pp", num_ranks)])?).threads(1).launch(|rank| {
        let model = Sleeper { layers: (0..schedule.num_stages()).map(|_| Param::new(&[1])).collect() };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            Ok(vec![Tensor::from_host(rank, &[rows.len(), 1], &vec![1.0f32; rows.len()])?])
        };
        let loss = |model: &Sleeper, x: &[Var]| model.forward(&x[0]).mean();
        let settings = Settings { microbatches: num_microbatches, ..Settings::new(num_microbatches) };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(0.0), settings, read, loss)?;
        let mut seconds = Vec::new();
        for _ in 0..6 {
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
        Ok(seconds[seconds.len() / 2])
    })?;
    Ok(ranks[0])
}
