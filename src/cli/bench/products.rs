//! f32 matmul benchmark (GEMM) in the shapes of transformers, on one thread and on all cores, relative to the roofline.

use super::measurement::{Bench, Work, check};
use super::roofline;
use shardgrad::kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad::kernels::{Arg, ArgMut, Buffer, Launch, Strides, download, upload};
use shardgrad::prelude::*;

/// Which operand of c = a b is transposed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transposed {
    /// Both are row-major.
    Neither,
    /// b is column-major: weights `[out, in]` in the forward pass, `[in, out]` in the input gradient.
    B,
    /// a is column-major: the weight gradient, summed over tokens.
    A,
}

impl Transposed {
    const EVERY: [Transposed; 3] = [Transposed::Neither, Transposed::B, Transposed::A];

    fn name(self) -> &'static str {
        match self {
            Transposed::Neither => "plain",
            Transposed::B => "b transposed",
            Transposed::A => "a transposed",
        }
    }

    /// Returns m, k and n for activations of `tokens` rows and a weight matrix.
    fn extents(self, tokens: usize, [rows, cols]: [usize; 2]) -> [usize; 3] {
        if self == Transposed::A { [rows, tokens, cols] } else { [tokens, rows, cols] }
    }
}

/// Square matrices.
const SIDES: [usize; 6] = [64, 128, 256, 512, 1024, 2048];
/// Sequence lengths of attention, and head size.
const ATTENDING: [usize; 2] = [128, 256];
const CHANNELS: usize = 64;
/// Rows of activations.
const TOKENS: [usize; 3] = [512, 2048, 4096];
/// Rows and columns of weights.
const WEIGHTS: [[usize; 2]; 6] = [[384, 384], [384, 1536], [1536, 384], [768, 768], [768, 3072], [3072, 768]];
/// FLOPs per sample, enough for the clock resolution.
const SAMPLE: f64 = 5e6;
/// Number of elements compared with sums in f64.
const CHECKED: usize = 64;

/// Returns all cases: the transposed operand, and m, k and n.
fn shapes() -> Vec<(Transposed, [usize; 3])> {
    let squares = SIDES.iter().flat_map(|&side| Transposed::EVERY.map(|transposed| (transposed, [side; 3])));
    let heads = ATTENDING.iter().flat_map(|&t| {
        let scores = (Transposed::B, [t, CHANNELS, t]);
        [scores, (Transposed::Neither, [t, t, CHANNELS]), (Transposed::A, [t, t, CHANNELS])]
    });
    let layers = TOKENS.iter().flat_map(|&tokens| {
        let each = WEIGHTS
            .iter()
            .flat_map(move |&weights| Transposed::EVERY.map(|transposed| (transposed, weights)));
        each.map(move |(transposed, weights)| (transposed, transposed.extents(tokens, weights)))
    });
    squares.chain(heads).chain(layers).collect()
}

/// Checks and measures every shape.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![1, cores];
    counts.dedup();
    for threads in counts {
        let bench = Bench { roofline: Some(roofline::measure(bench, threads)?), ..*bench };
        let on = if threads == 1 { "1 thread".into() } else { format!("{threads} threads") };
        World::new(Mesh::single()).threads(threads).launch(|rank| {
            shapes()
                .into_iter()
                .try_for_each(|(transposed, extents)| product(&bench, rank, &on, transposed, extents))
        })?;
    }
    Ok(())
}

/// Checks and measures one shape, on buffers of the CPU back end.
fn product(
    bench: &Bench,
    rank: &Rank,
    on: &str,
    transposed: Transposed,
    [m, k, n]: [usize; 3],
) -> Result<()> {
    let numbers = |seed: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2001) as f32 / 1000.0 - 1.0).collect()
    };
    let view = |rows: usize, cols: usize, is_transposed: bool| match is_transposed {
        true => Strides::contiguous(&[1, cols, rows]).permute(&[0, 2, 1]),
        false => Strides::contiguous(&[1, rows, cols]),
    };
    let (x, y) = (numbers(1, m * k), numbers(2, k * n));
    let (a, b) = (view(m, k, transposed == Transposed::A), view(k, n, transposed == Transposed::B));
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
    let case = format!("{} {m}x{k}x{n}", transposed.name());
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
    bench.report("products", &case, on, seconds, Work::Flops(flops));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn product_shapes_are_distinct() {
        let shapes = shapes();
        assert_eq!(shapes.len(), 78);
        let names: HashSet<String> = shapes.iter().map(|(l, s)| format!("{} {s:?}", l.name())).collect();
        assert_eq!(names.len(), 78);
        assert!(shapes.contains(&(Transposed::A, [768, 4096, 3072])));
    }
}
