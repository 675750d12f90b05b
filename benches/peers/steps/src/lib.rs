//! Shared code of the benchmark programs: model shape from the command line, a batch of random tokens, and timed steps, reported as the JSON line
//! that `benches/peers.py` reads.

#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Command-line arguments, all numbers.
const USAGE: &str = "BLOCKS WIDTH HEADS SEQ ROWS VOCAB STEPS_BEFORE STEPS_MIN SECONDS";

/// Shape of a GPT and of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of attention and MLP.
    pub blocks: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Sequence length.
    pub seq: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Vocabulary size.
    pub vocab: usize,
}

/// The benchmark to run, and its duration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Benchmark {
    /// The model and its batch.
    pub shape: Shape,
    steps_before: usize,
    steps_min: usize,
    limit: Duration,
}

impl Benchmark {
    /// Parses command-line arguments, without the program name. The error describes the problem and the usage.
    pub fn of(arguments: impl Iterator<Item = String>) -> Result<Benchmark, String> {
        let words: Vec<String> = arguments.collect();
        let [counts @ .., seconds] = &words[..] else { return Err(format!("usage: {USAGE}")) };
        let numbers: Vec<usize> = counts
            .iter()
            .map(|word| word.parse().ok().filter(|n| *n > 0).ok_or(format!("`{word}` is not a positive integer; usage: {USAGE}")))
            .collect::<Result<_, _>>()?;
        let [blocks, width, heads, seq, rows, vocab, steps_before, steps_min] = numbers[..] else {
            return Err(format!("{} arguments, expected 9: {USAGE}", words.len()));
        };
        if width % heads != 0 {
            return Err(format!("width {width} is not divisible by {heads} heads"));
        }
        let limit = seconds.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
        let limit = limit.ok_or(format!("`{seconds}` is not a number of seconds; usage: {USAGE}"))?;
        let shape = Shape { blocks, width, heads, seq, rows, vocab };
        Ok(Benchmark { shape, steps_before, steps_min, limit })
    }

    /// Runs steps, which return their losses, until the time is over; prints tokens per second of the timed steps, and the first and last loss.
    /// Returns the error of a failed step.
    pub fn run<E: Debug>(&self, mut step: impl FnMut() -> Result<f32, E>) -> Result<(), E> {
        let first = step()?;
        let mut last = first;
        for _ in 1..self.steps_before {
            last = step()?;
        }
        let tokens = (self.shape.rows * self.shape.seq) as f64;
        let (mut rates, began) = (Vec::new(), Instant::now());
        while rates.len() < self.steps_min || began.elapsed() < self.limit {
            let started = Instant::now();
            last = step()?;
            rates.push(tokens / started.elapsed().as_secs_f64());
        }
        println!("{{\"rates\": {rates:?}, \"losses\": [{first:?}, {last:?}]}}");
        Ok(())
    }
}

impl Shape {
    /// Returns inputs and targets, row-major: random, but equal every time.
    pub fn batch(&self) -> [Vec<u32>; 2] {
        let mut state = 0u64;
        [(); 2].map(|()| {
            (0..self.rows * self.seq).map(|_| (mixed(&mut state) % self.vocab as u64) as u32).collect()
        })
    }
}

/// Returns the next number of SplitMix64.
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Benchmark, String> {
        Benchmark::of(line.split_whitespace().map(str::to_string))
    }

    #[test]
    fn arguments_are_parsed() {
        let found = parse("4 256 8 128 2 512 2 3 0").unwrap();
        let shape = Shape { blocks: 4, width: 256, heads: 8, seq: 128, rows: 2, vocab: 512 };
        assert_eq!(found, Benchmark { shape, steps_before: 2, steps_min: 3, limit: Duration::ZERO });
        let wrong = [
            "",
            "4 256 8 128 2 512 2 3",
            "4 256 8 128 2 x 2 3 1",
            "4 256 7 128 2 512 2 3 1",
            "4 0 8 128 2 512 2 3 1",
        ];
        for line in [&wrong[..], &["4 256 8 128 2 512 2 3 -1", "4 256 8 128 2 512 2 3 soon"]].concat() {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn steps_are_counted() {
        let mut steps = 0;
        let counted = parse("1 1 1 1 1 1 2 3 0").unwrap().run(|| {
            steps += 1;
            Ok::<f32, String>(1.0)
        });
        assert_eq!((counted, steps), (Ok(()), 5));
        assert_eq!(parse("1 1 1 1 1 1 2 3 0").unwrap().run(|| Err("no memory")), Err("no memory"));
    }

    #[test]
    fn batch_is_random_and_reproducible() {
        let shape = parse("1 1 1 64 4 10 1 1 0").unwrap().shape;
        let [ids, targets] = shape.batch();
        assert_eq!((ids.len(), targets.len()), (256, 256));
        assert!(
            (0..10).all(|id| ids.contains(&id) && targets.contains(&id)) && ids.iter().all(|&id| id < 10)
        );
        assert!(ids != targets && shape.batch() == [ids, targets]);
    }
}
