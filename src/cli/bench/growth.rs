//! Scaling benchmark: throughput and memory over sequence length, width, depth, microbatches, ranks and message sizes.

use super::chart::{self, Panel};
use super::collectives;
use super::measurement::Bench;
use super::training::Training;
use shardgrad::nn::Gpt2Config;
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// Vocabulary, positions, width, blocks and heads of the base model.
const BASE: [usize; 5] = [512, 128, 256, 4, 4];
const ROWS: usize = 8;
const LENGTHS: [usize; 7] = [128, 256, 512, 1024, 2048, 4096, 8192];
const WIDTHS: [usize; 5] = [64, 128, 256, 512, 1024];
const DEPTHS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const MICROBATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];
const RANKS: [usize; 5] = [1, 2, 4, 8, 16];
/// Elements (f32) of the all-reduce over two ranks.
const SUMMED: [usize; 7] = [1, 16, 256, 4096, 65_536, 1 << 20, 1 << 24];

const TOKENS: &str = "tokens per second";
const MEMORY: &str = "peak MiB of tensors";

/// Runs all measurements and draws them into a file.
pub(super) fn run(bench: &Bench, path: &Path) -> Result<()> {
    let mut panels = Vec::new();
    let length = |t: usize| Training::new(with(|base| base[1] = t), 1, t);
    panels.extend(both(bench, "sequence length (one sequence)", &LENGTHS, length)?);
    let width = |d: usize| Training::new(with(|base| (base[2], base[4]) = (d, d / 64)), ROWS, BASE[1]);
    panels.extend(both(bench, "width", &WIDTHS, width)?);
    let depth = |n: usize| Training::new(with(|base| base[3] = n), ROWS, BASE[1]);
    panels.extend(both(bench, "blocks", &DEPTHS, depth)?);
    let with_microbatches = |n: usize| Training { microbatches: n, ..Training::new(with(|_| ()), 32, 64) };
    panels.extend(both(bench, "microbatches (32 sequences of 64 tokens)", &MICROBATCHES, with_microbatches)?);
    let ranks = |n: usize| Training {
        mesh: format!("dp={n}"),
        threads: Some(1),
        ..Training::new(with(|_| ()), 16, BASE[1])
    };
    panels.extend(both(bench, "dp ranks, one thread each", &RANKS, ranks)?);
    let sums =
        SUMMED.map(|numel| collectives::all_reduce(bench, numel).map(|s| (4.0 * numel as f64, s * 1e6)));
    let points = sums.into_iter().collect::<Result<Vec<_>>>()?;
    panels.push(Panel { x: "bytes of an all-reduce over two ranks", y: "microseconds", points });
    let title = format!("GPT of {} blocks, width {}, f32: scaling", BASE[3], BASE[2]);
    std::fs::write(path, chart::draw(&title, &panels)?)
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))?;
    if !bench.json {
        println!("chart written to {}", path.display());
    }
    Ok(())
}

fn with(change: impl Fn(&mut [usize; 5])) -> Gpt2Config {
    let mut base = BASE;
    change(&mut base);
    let [vocab, positions, width, blocks, heads] = base;
    Gpt2Config::new(vocab, positions, width, blocks, heads)
}

/// Measures throughput and memory over one quantity.
fn both(
    bench: &Bench,
    what: &'static str,
    values: &[usize],
    training: impl Fn(usize) -> Training,
) -> Result<[Panel; 2]> {
    let (mut rates, mut memory) = (Vec::new(), Vec::new());
    for &value in values {
        let training = training(value);
        // Reference losses: one rank, one microbatch.
        let plain = Training { mesh: String::new(), microbatches: 1, ..training.clone() };
        let one = plain.run()?.losses;
        let found = training.report(bench, "growth", &format!("{value} {what}"), &one)?;
        rates.push((value as f64, (training.rows * training.seq) as f64 / found.seconds));
        memory.push((value as f64, found.peak_bytes as f64 / 1_048_576.0));
    }
    Ok([Panel { x: what, y: TOKENS, points: rates }, Panel { x: what, y: MEMORY, points: memory }])
}
