//! Products of f32 matrices in the shapes of transformers, on one thread and on all, beside what as many cores can do at most.

use super::line::{Bench, Work, check};
use super::roof;
use shardgrad::Result;
use shardgrad::kernels::cpu::Pool;
use shardgrad::kernels::cpu::gemm::{Stack, StackMut, products};

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
        let pool = Pool::new(threads);
        shapes().into_iter().try_for_each(|(lying, extents)| product(&bench, &pool, lying, extents))?;
    }
    Ok(())
}

/// Checks and measures one shape.
fn product(bench: &Bench, pool: &Pool, lying: Lying, [m, k, n]: [usize; 3]) -> Result<()> {
    let numbers = |seed: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2001) as f32 / 1000.0 - 1.0).collect()
    };
    let (x, y, mut z) = (numbers(1, m * k), numbers(2, k * n), vec![0.0f32; m * n]);
    let a = Stack { data: &x[..], strides: if lying == Lying::ATurned { [0, 1, m] } else { [0, k, 1] } };
    let b = Stack { data: &y[..], strides: if lying == Lying::BTurned { [0, 1, k] } else { [0, n, 1] } };
    let call = |z: &mut [f32]| {
        products(pool, [1, m, n, k], a, b, StackMut { data: z, strides: [m * n, n, 1] });
    };
    call(&mut z);
    let case = format!("{} {m}x{k}x{n}", lying.name());
    let places = || (0..CHECKED).map(|i| (i * 7919 % m, i * 104_729 % n));
    let at = |s: &Stack<'_, f32>, i: usize, j: usize| f64::from(s.data[i * s.strides[1] + j * s.strides[2]]);
    let right = |(i, j): (usize, usize)| (0..k).map(|p| at(&a, i, p) * at(&b, p, j)).sum::<f64>();
    let got: Vec<f64> = places().map(|(i, j)| f64::from(z[i * n + j])).collect();
    check(&case, &got, &places().map(right).collect::<Vec<_>>(), 1e-5)?;
    let flops = 2.0 * (m * k * n) as f64;
    let calls = (SAMPLE / flops).ceil() as usize;
    let seconds = bench.seconds(calls, || {
        call(&mut z);
        Ok(())
    })?;
    let on = format!("{} threads", pool.num_threads());
    bench.tell("products", &case, &on, seconds, Work::Flops(flops));
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
