//! CPU kernel benchmarks, through ops on unsharded tensors, on all threads of one rank.

use super::measurement::{Bench, Work, check};
use super::memory_bound::Sizes;
use shardgrad::prelude::*;

/// A benchmark case: op, operands, and a naive reference.
struct Case {
    name: &'static str,
    shapes: &'static [&'static [usize]],
    call: fn(&[Tensor]) -> Tensor,
    oracle: fn(&[Vec<f64>]) -> Vec<f64>,
    work: fn() -> Work,
}

const ROWS: usize = 512;
const WIDTH: usize = 768;
/// Batch, tokens, heads and head size of attention.
const BTHC: [usize; 4] = [2, 128, 4, 64];

/// m, k and n of matmuls.
const PRODUCTS: [[usize; 3]; 5] =
    [[256, 256, 256], [512, 512, 512], [1024, 1024, 1024], [2048, 384, 1536], [512, 768, 3072]];

const CASES: &[Case] = &[
    Case {
        name: "matmul f32 1x768x3072",
        shapes: &[&[1, WIDTH], &[WIDTH, 4 * WIDTH]],
        call: |x| x[0].matmul(&x[1]),
        oracle: |x| product(&x[0], &x[1], WIDTH, 4 * WIDTH),
        work: || Work::Flops((2 * 4 * WIDTH * WIDTH) as f64),
    },
    Case {
        name: "matmul f32 1x768x3072, weights transposed",
        shapes: &[&[1, WIDTH], &[4 * WIDTH, WIDTH]],
        call: |x| x[0].matmul_nt(&x[1]),
        oracle: |x| x[1].chunks(WIDTH).map(|w| w.iter().zip(&x[0]).map(|(w, x)| w * x).sum()).collect(),
        work: || Work::Flops((2 * 4 * WIDTH * WIDTH) as f64),
    },
    Case {
        name: "add f32 512x768",
        shapes: &[&[ROWS, WIDTH], &[ROWS, WIDTH]],
        call: |x| x[0].add(&x[1]),
        oracle: |x| x[0].iter().zip(&x[1]).map(|(a, b)| a + b).collect(),
        work: || Work::Bytes((3 * 4 * ROWS * WIDTH) as f64),
    },
    Case {
        name: "gelu f32 512x768",
        shapes: &[&[ROWS, WIDTH]],
        call: |x| x[0].gelu(),
        oracle: |x| x[0].iter().map(|x| x * (1.0 + inner(*x).tanh()) / 2.0).collect(),
        work: || Work::Bytes((2 * 4 * ROWS * WIDTH) as f64),
    },
    Case {
        name: "softmax f32 512x768",
        shapes: &[&[ROWS, WIDTH]],
        call: |x| x[0].softmax(),
        oracle: |x| x[0].chunks(WIDTH).flat_map(softmax).collect(),
        work: || Work::Bytes((2 * 4 * ROWS * WIDTH) as f64),
    },
    Case {
        name: "layer_norm f32 512x768",
        shapes: &[&[ROWS, WIDTH], &[WIDTH], &[WIDTH]],
        call: |x| x[0].layer_norm(&x[1], &x[2], 1e-5),
        oracle: layer_norm,
        work: || Work::Bytes((2 * 4 * ROWS * WIDTH) as f64),
    },
    Case {
        name: "attention f32 2x128x4x64, causal",
        shapes: &[&BTHC, &BTHC, &BTHC],
        call: |x| x[0].attention(&x[1], &x[2], true),
        oracle: attention,
        // Two matmuls over the causal half of the scores.
        work: || Work::Flops(2.0 * (BTHC[0] * BTHC[2] * BTHC[1] * BTHC[1] * BTHC[3]) as f64),
    },
];

/// Sizes of memory-bound kernels: 64 MiB, more than L2 caches hold.
const LARGE: Sizes = Sizes {
    dtype: DType::F32,
    rows: [16_384, 1024],
    side: 4096,
    heads: [4, 1024, 32, 128],
    hidden: [2048, 8192],
    logits: [512, 32_768],
    parameters: 16 << 20,
};

/// Checks and measures every case.
pub(super) fn run(bench: &Bench) -> Result<()> {
    World::run(Mesh::single(), |rank| {
        for (dims, dtype) in PRODUCTS.iter().flat_map(|dims| [(dims, DType::F32), (dims, DType::BF16)]) {
            matmul(bench, rank, *dims, dtype)?;
        }
        for case in CASES {
            let (args, values) = draw(rank, DType::F32, case.shapes)?;
            check(case.name, &(case.call)(&args).to_f64()?, &(case.oracle)(&values), 1e-5)?;
            let seconds = bench.seconds(1, || {
                let _ = (case.call)(&args);
                Ok(())
            })?;
            bench.report("kernels", case.name, "", seconds, (case.work)());
        }
        let own = &**rank.backend();
        LARGE.small().cases().iter().try_for_each(|case| case.check(own, own, 1e-5))?;
        LARGE.cases().iter().try_for_each(|case| case.measure(bench, "kernels", own))
    })?;
    Ok(())
}

/// Draws random operands; returns tensors and values.
fn draw(rank: &Rank, dtype: DType, shapes: &[&[usize]]) -> Result<(Vec<Tensor>, Vec<Vec<f64>>)> {
    let layout = |shape: &&[usize]| Layout::invariant(rank.mesh(), dtype, shape);
    let draw = |(i, shape): (usize, &&[usize])| Tensor::uniform(rank, &layout(shape), 7, i as u64, -1.0, 1.0);
    let args: Vec<Tensor> = shapes.iter().enumerate().map(draw).collect::<Result<_>>()?;
    let values = args.iter().map(Tensor::to_f64).collect::<Result<_>>()?;
    Ok((args, values))
}

/// Checks and measures a matmul.
fn matmul(bench: &Bench, rank: &Rank, [m, k, n]: [usize; 3], dtype: DType) -> Result<()> {
    let name = format!("matmul {dtype} {m}x{k}x{n}");
    let (args, values) = draw(rank, dtype, &[&[m, k], &[k, n]])?;
    let tolerance = if dtype == DType::BF16 { 1.0 / 256.0 } else { 1e-5 };
    check(&name, &args[0].matmul(&args[1]).to_f64()?, &product(&values[0], &values[1], k, n), tolerance)?;
    let seconds = bench.seconds(1, || {
        let _ = args[0].matmul(&args[1]);
        Ok(())
    })?;
    bench.report("kernels", &name, "", seconds, Work::Flops(2.0 * (m * k * n) as f64));
    Ok(())
}

fn inner(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))
}

/// Naive matmul of an (m, k) and a (k, n) matrix.
fn product(a: &[f64], b: &[f64], k: usize, n: usize) -> Vec<f64> {
    let mut c = vec![0.0; a.len() / k * n];
    for (row, out) in a.chunks(k).zip(c.chunks_mut(n)) {
        for (x, other) in row.iter().zip(b.chunks(n)) {
            out.iter_mut().zip(other).for_each(|(c, y)| *c += x * y);
        }
    }
    c
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|x| x.exp()).sum();
    row.iter().map(|x| x.exp() / sum).collect()
}

fn layer_norm(x: &[Vec<f64>]) -> Vec<f64> {
    let normed = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
        let scaled = row.iter().zip(x[1].iter().zip(&x[2]));
        scaled.map(|(r, (w, b))| (r - mean) / (var + 1e-5).sqrt() * w + b).collect::<Vec<_>>()
    };
    x[0].chunks(WIDTH).flat_map(normed).collect()
}

fn attention(x: &[Vec<f64>]) -> Vec<f64> {
    let [b, t, h, c] = BTHC;
    let row = |of: usize, i: usize, s: usize, j: usize| {
        let at = ((i * t + s) * h + j) * c;
        &x[of][at..at + c]
    };
    let mut out = Vec::with_capacity(b * t * h * c);
    for (i, s, j) in (0..b).flat_map(|i| (0..t).flat_map(move |s| (0..h).map(move |j| (i, s, j)))) {
        let score = |p: usize| row(0, i, s, j).iter().zip(row(1, i, p, j)).map(|(q, k)| q * k).sum::<f64>();
        let weights = softmax(&(0..=s).map(|p| score(p) / (c as f64).sqrt()).collect::<Vec<_>>());
        out.extend(
            (0..c).map(|e| weights.iter().enumerate().map(|(p, w)| w * row(2, i, p, j)[e]).sum::<f64>()),
        );
    }
    out
}
