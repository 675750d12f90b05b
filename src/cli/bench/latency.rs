//! Latency benchmark: what a training step waits for the network, between threads whose calls have a latency and between processes over
//! TCP. Compares buckets that are reduced while the backward pass goes on, one bucket after the pass, and one call for each gradient.

use super::measurement::{Bench, Work, check};
use super::training::synthetic_batch;
use shardgrad::dist::{Phase, Process, Record};
use shardgrad::nn::{Gpt2Config, LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::net::TcpListener;
use std::ops::Range;
use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

/// Warmup steps, whose losses are compared.
const STEPS_BEFORE: usize = 2;
/// Timed steps; the median counts.
const STEPS: usize = 5;
const MESH: &str = "dp=2";
/// Preset, rows and tokens between threads: a step of many small gradients.
const SMALL: (&str, usize, usize) = ("tiny", 8, 64);
/// The latencies of their calls.
const LATENCIES: [Duration; 2] = [Duration::ZERO, Duration::from_millis(10)];
/// Preset, rows and tokens between processes: a step of a few full buckets.
const LARGE: (&str, usize, usize) = ("m", 2, 256);
/// The latency of a call between processes of a slow network.
const SLOW: Duration = Duration::from_millis(100);

/// How gradients are reduced: a name, and the bytes of the first bucket and of all others; `None` for the default.
type Buckets = (&'static str, Option<[usize; 2]>);

const BUCKETS: [Buckets; 3] = [
    ("buckets", None),
    ("one bucket, not overlapped", Some([usize::MAX; 2])),
    ("one call per gradient", Some([0; 2])),
];

/// A model, its batch, and how its gradients are reduced.
#[derive(Clone, Debug)]
struct Step {
    config: ModelConfig,
    rows: usize,
    seq: usize,
    buckets: Option<[usize; 2]>,
}

/// The losses of the warmup steps, the median seconds of a step, and its reductions of gradients.
type Outcome = (Vec<f64>, f64, Vec<Record>);

/// Runs the benchmark.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let (name, rows, seq) = SMALL;
    let step = Step::of(SMALL)?;
    let case =
        |what: &str, latency: Duration| format!("{name}, {rows} x {seq}, {} ms: {what}", latency.as_millis());
    let mut losses = None;
    for latency in LATENCIES {
        for (what, buckets) in BUCKETS {
            let step = Step { buckets, ..step.clone() };
            let world = World::new(Mesh::parse(MESH)?).threads(1).delay_calls(latency);
            let (found, seconds, records) = world.launch(|rank| step.run(rank))?.swap_remove(0);
            // The same bits.
            check("the losses", &found, losses.get_or_insert_with(|| found.clone()), 0.0)?;
            let what = format!("{what}, {} calls", records.len());
            bench.report("latency", &case(&what, latency), MESH, seconds, Work::Call);
        }
    }
    over_tcp(bench)
}

/// Measures computing alone, the reductions alone, and steps of two processes, over the local network and with a latency.
fn over_tcp(bench: &Bench) -> Result<()> {
    let (name, rows, seq) = LARGE;
    let step = Step::of(LARGE)?;
    for latency in [Duration::ZERO, SLOW] {
        let report = |what: &str, mesh: &str, seconds: f64| {
            let case = format!("{name}, {rows} x {seq}, {} ms: {what}", latency.as_millis());
            bench.report("tcp", &case, mesh, seconds, Work::Call);
        };
        let half = Step { rows: rows / 2, ..step.clone() };
        let alone = || World::new(Mesh::single()).threads(1).launch(|rank| half.run(rank));
        // As many processes compute as later do.
        let (one, other) = thread::scope(|scope| {
            let other = scope.spawn(alone);
            (alone(), other.join().expect("a launch catches panics"))
        });
        other?;
        report("compute of one rank alone, its rows", "", one?.swap_remove(0).1);
        let (losses, overlapped, records) = of_processes(latency, |rank| step.run(rank))?;
        let wire = of_processes(latency, |rank| reduce_alone(rank, &records))?;
        report("wire, the same calls alone", MESH, wire);
        report("step, buckets overlapped", MESH, overlapped);
        let last = Step { buckets: Some([usize::MAX; 2]), ..step.clone() };
        let (found, blocking, _) = of_processes(latency, |rank| last.run(rank))?;
        check("the losses", &found, &losses, 0.0)?;
        report("step, one bucket, not overlapped", MESH, blocking);
    }
    Ok(())
}

/// Runs a function on two ranks, each of which joins as a process on this machine. Returns the result of rank 0.
fn of_processes<T: Send>(latency: Duration, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<T> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let join = |rank: usize| {
        let process = Process::new(rank, 2, "127.0.0.1", port)?;
        World::new(Mesh::parse(MESH)?).threads(1).delay_calls(latency).join(&process, &f)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let own = join(0);
        other.join().expect("a join catches panics").and(own)
    })
}

/// The median seconds of the all-reduces of a step, alone.
fn reduce_alone(rank: &Rank, records: &[Record]) -> Result<f64> {
    let layout = |record: &Record| {
        let whole = Layout::invariant(rank.mesh(), record.dtype, &[record.numel()]);
        let axis = record.axes.iter().next().expect("a reduction has an axis");
        (whole.with_placement(axis, Placement::Partial), whole)
    };
    let layouts: Vec<(Layout, Layout)> = records.iter().map(layout).collect();
    let sums: Vec<Tensor> =
        layouts.iter().map(|(partial, _)| Tensor::zeros(rank, partial)).collect::<Result<_>>()?;
    let mut seconds = Vec::new();
    for _ in 0..STEPS {
        let started = Instant::now();
        for (sum, (_, whole)) in sums.iter().zip(&layouts) {
            sum.to_layout_at(whole, Location::caller())?;
        }
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[STEPS / 2])
}

impl Step {
    fn of((preset, rows, seq): (&str, usize, usize)) -> Result<Step> {
        let config = Gpt2Config::preset(preset)
            .ok_or_else(|| Error::new(Kind::Config, format!("no preset `{preset}`")))?;
        Ok(Step { config: config.into(), rows, seq, buckets: None })
    }

    fn run(&self, rank: &Rank) -> Result<Outcome> {
        let Step { config, rows, seq, buckets } = self;
        let plan = LanguageModel::plan(config);
        let plan = match *buckets {
            Some([first, others]) => plan.gradient_buckets(first, others),
            None => plan,
        };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            synthetic_batch(rank, &plan, [config.vocab_size(), *seq], step, rows)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let model = LanguageModel::new(config);
        let settings = TrainerConfig { copies_checked_every: 0, ..TrainerConfig::new(*rows) };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
        let mut losses = Vec::new();
        for _ in 0..STEPS_BEFORE {
            rank.trace().take();
            rank.trace().enable();
            losses.push(trainer.step()?.loss);
        }
        rank.trace().disable();
        let mut records = rank.trace().take();
        records.retain(|record| record.phase == Phase::Backward);
        let mut seconds = Vec::new();
        for _ in 0..STEPS {
            let started = Instant::now();
            trainer.step()?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok((losses, seconds[STEPS / 2], records))
    }
}
