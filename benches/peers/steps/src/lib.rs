//! What the programs that train have in common: the shape that `benches/peers.py` asks for, one batch of random
//! tokens, and steps that are timed and told in the line that it reads.

#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// What stands on the command line, all in numbers.
const USAGE: &str = "BLOCKS WIDTH HEADS SEQ ROWS VOCAB STEPS_BEFORE STEPS_MIN SECONDS";

/// Extents of a GPT and of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of attention and MLP.
    pub blocks: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Heads that the channels are split into.
    pub heads: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Different tokens.
    pub vocab: usize,
}

/// What to measure, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// The model and its batch.
    pub shape: Shape,
    steps_before: usize,
    steps_min: usize,
    limit: Duration,
}

impl Asked {
    /// Reads the arguments of a command line, without the name of the program. The error says what is wrong with
    /// them, and what is expected.
    pub fn of(arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
        let words: Vec<String> = arguments.collect();
        let [counts @ .., seconds] = &words[..] else { return Err(format!("usage: {USAGE}")) };
        let numbers: Vec<usize> = counts
            .iter()
            .map(|word| word.parse().ok().filter(|n| *n > 0).ok_or(format!("`{word}` is no count: {USAGE}")))
            .collect::<Result<_, _>>()?;
        let [blocks, width, heads, seq, rows, vocab, steps_before, steps_min] = numbers[..] else {
            return Err(format!("{} arguments instead of 9: {USAGE}", words.len()));
        };
        if width % heads != 0 {
            return Err(format!("{width} channels cannot be split into {heads} heads"));
        }
        let limit = seconds.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
        let limit = limit.ok_or(format!("`{seconds}` is no number of seconds: {USAGE}"))?;
        let shape = Shape { blocks, width, heads, seq, rows, vocab };
        Ok(Asked { shape, steps_before, steps_min, limit })
    }

    /// Makes steps, which give their losses, until the time is over, and prints the tokens a second of those after
    /// the first few, and the first loss and the last. The error is that of the step.
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
    /// Tokens of every row, one row after the other, and those that should follow them: random, and the same every
    /// time.
    pub fn batch(&self) -> [Vec<u32>; 2] {
        let mut state = 0u64;
        [(); 2].map(|()| {
            (0..self.rows * self.seq).map(|_| (mixed(&mut state) % self.vocab as u64) as u32).collect()
        })
    }
}

/// The next number of SplitMix64.
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<Asked, String> {
        Asked::of(line.split_whitespace().map(str::to_string))
    }

    #[test]
    fn a_command_line_is_read() {
        let found = asked("4 256 8 128 2 512 2 3 0").unwrap();
        let shape = Shape { blocks: 4, width: 256, heads: 8, seq: 128, rows: 2, vocab: 512 };
        assert_eq!(found, Asked { shape, steps_before: 2, steps_min: 3, limit: Duration::ZERO });
        let wrong = [
            "",
            "4 256 8 128 2 512 2 3",
            "4 256 8 128 2 x 2 3 1",
            "4 256 7 128 2 512 2 3 1",
            "4 0 8 128 2 512 2 3 1",
        ];
        for line in [&wrong[..], &["4 256 8 128 2 512 2 3 -1", "4 256 8 128 2 512 2 3 soon"]].concat() {
            assert!(asked(line).is_err(), "{line}");
        }
    }

    #[test]
    fn steps_are_counted() {
        let mut steps = 0;
        let counted = asked("1 1 1 1 1 1 2 3 0").unwrap().run(|| {
            steps += 1;
            Ok::<f32, String>(1.0)
        });
        assert_eq!((counted, steps), (Ok(()), 5));
        assert_eq!(asked("1 1 1 1 1 1 2 3 0").unwrap().run(|| Err("no memory")), Err("no memory"));
    }

    #[test]
    fn a_batch_is_random_and_the_same() {
        let shape = asked("1 1 1 64 4 10 1 1 0").unwrap().shape;
        let [ids, targets] = shape.batch();
        assert_eq!((ids.len(), targets.len()), (256, 256));
        assert!(
            (0..10).all(|id| ids.contains(&id) && targets.contains(&id)) && ids.iter().all(|&id| id < 10)
        );
        assert!(ids != targets && shape.batch() == [ids, targets]);
    }
}
