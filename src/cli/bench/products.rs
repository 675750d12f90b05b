//! Products of f32 matrices in the shapes of transformers, on one thread and on all, beside what as many cores can do at most.

use super::line::{Bench, Work, check};
use super::roof;
use shardgrad::kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad::kernels::{Arg, ArgMut, Buffer, Launch, Strides, download, upload};
use shardgrad::prelude::*;

/// How the operands of c = a b lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lying {
    /// Both row by row.
    Plain,
    /// b column by column: weights `[out, in]` in a forward, `[in, out]` in the gradient of what they are applied to.
    BTurned,
    /// a column by column: the gradient of weights, whose terms are tokens.
    ATurned,
}

impl Lying {
    const EVERY: [Lying; 3] = [Lying::Plain, Lying::BTurned, Lying::ATurned];

    fn name(self) -> &'static str {
        match self {
            Lying::Plain => "plain",
            Lying::BTurned => "b turned",
            Lying::ATurned => "a turned",
        }
    }

    /// Rows, terms and columns of the product that activations of so many tokens, and a matrix of so many rows and columns,
    /// ask for.
    fn extents(self, tokens: usize, [rows, cols]: [usize; 2]) -> [usize; 3] {
        if self == Lying::ATurned { [rows, tokens, cols] } else { [tokens, rows, cols] }
    }
}

/// Squares.
const SIDES: [usize; 6] = [64, 128, 256, 512, 1024, 2048];
/// Tokens that attend to each other, with heads of so many channels.
const ATTENDING: [usize; 2] = [128, 256];
const CHANNELS: usize = 64;
/// Rows of activations.
const TOKENS: [usize; 3] = [512, 2048, 4096];
/// Rows and columns of weights.
const WEIGHTS: [[usize; 2]; 6] = [[384, 384], [384, 1536], [1536, 384], [768, 768], [768, 3072], [3072, 768]];
/// So many operations make a sample that the clock can tell.
const SAMPLE: f64 = 5e6;
/// Elements of a product that are held against sums in f64.
const CHECKED: usize = 64;

/// Every shape, with how its operands lie: m, k and n of an (m, k) times a (k, n) matrix.
fn shapes() -> Vec<(Lying, [usize; 3])> {
    let squares = SIDES.iter().flat_map(|&side| Lying::EVERY.map(|lying| (lying, [side; 3])));
    let heads = ATTENDING.iter().flat_map(|&t| {
        let scores = (Lying::BTurned, [t, CHANNELS, t]);
        [scores, (Lying::Plain, [t, t, CHANNELS]), (Lying::ATurned, [t, t, CHANNELS])]
    });
    let layers = TOKENS.iter().flat_map(|&tokens| {
        let each = WEIGHTS.iter().flat_map(move |&weights| Lying::EVERY.map(|lying| (lying, weights)));
        each.map(move |(lying, weights)| (lying, lying.extents(tokens, weights)))
    });
    squares.chain(heads).chain(layers).collect()
}

/// Checks and measures every shape.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![1, cores];
    counts.dedup();
    for threads in counts {
        let bench = Bench { roof: Some(roof::measure(bench, threads)?), ..*bench };
        let on = if threads == 1 { "1 thread".into() } else { format!("{threads} threads") };
        World::new(Mesh::single()).threads(threads).launch(|rank| {
            shapes().into_iter().try_for_each(|(lying, extents)| product(&bench, rank, &on, lying, extents))
        })?;
    }
    Ok(())
}

/// Checks and measures one shape, in the memory that tensors lie in.
fn product(bench: &Bench, rank: &Rank, on: &str, lying: Lying, [m, k, n]: [usize; 3]) -> Result<()> {
    let numbers = |seed: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2001) as f32 / 1000.0 - 1.0).collect()
    };
    let view = |rows: usize, cols: usize, is_turned: bool| match is_turned {
        true => Strides::contiguous(&[1, cols, rows]).permute(&[0, 2, 1]),
        false => Strides::contiguous(&[1, rows, cols]),
    };
    let (x, y) = (numbers(1, m * k), numbers(2, k * n));
    let (a, b) = (view(m, k, lying == Lying::ATurned), view(k, n, lying == Lying::BTurned));
    let (c, backend) = (view(m, n, false), &**rank.backend());
    let (from, other) = (upload(backend, &x)?, upload(backend, &y)?);
    let mut to = upload(backend, &vec![0.0f32; m * n])?;
    let call = |to: &mut Buffer| -> Result<()> {
        let inputs = &[
            Arg { buffer: &from, dtype: DType::F32, view: &a },
            Arg { buffer: &other, dtype: DType::F32, view: &b },
        ];
        let outputs = &mut [ArgMut { buffer: to, dtype: DType::F32, view: &c }];
        Ok(backend.launch(&BATCHED_MATMUL, &mut Launch { inputs, outputs, scalars: &[] })?)
    };
    call(&mut to)?;
    let case = format!("{} {m}x{k}x{n}", lying.name());
    let got = download::<f32>(backend, &to, m * n)?;
    let at = |of: &[f32], view: &Strides, i: usize, j: usize| {
        f64::from(of[i * view.strides[1] + j * view.strides[2]])
    };
    let places = || (0..CHECKED).map(|i| (i * 7919 % m, i * 104_729 % n));
    let sum = |(i, j)| (0..k).map(|p| at(&x, &a, i, p) * at(&y, &b, p, j)).sum::<f64>();
    let some: Vec<f64> = places().map(|(i, j)| at(&got, &c, i, j)).collect();
    check(&case, &some, &places().map(sum).collect::<Vec<_>>(), 1e-5)?;
    let flops = 2.0 * (m * k * n) as f64;
    let seconds = bench.seconds((SAMPLE / flops).ceil() as usize, || call(&mut to))?;
    bench.tell("products", &case, on, seconds, Work::Flops(flops));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_shape_stands_twice() {
        let shapes = shapes();
        assert_eq!(shapes.len(), 78);
        let names: HashSet<String> = shapes.iter().map(|(l, s)| format!("{} {s:?}", l.name())).collect();
        assert_eq!(names.len(), 78);
        assert!(shapes.contains(&(Lying::ATurned, [768, 4096, 3072])));
    }
}
