//! Activation checkpointing with dropout and microbatches: the recomputed forward pass of a block draws the same masks
//! as the first one.

use shardgrad_autograd::{Noise, Tape, Var};
use shardgrad_dist::{Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Layout, Tensor, Value};

const ROWS: usize = 6;
const WIDTH: usize = 8;
const STEP: u64 = 5;
/// The dropout probability; 1 / (1 - P) is exact.
const P: f64 = 0.5;

fn noise(first_row: usize) -> Option<Noise> {
    Some(Noise { seed: 3, step: STEP, first_row: first_row as u64 })
}

/// Dropout by a key, for the step and rows of the tape.
fn dropped(x: &Var, key: u64) -> Var {
    let noise = x.tape().noise().expect("it was set");
    x.dropout_of_step(P, key, noise.step, noise.first_row)
}

/// Runs a block, with or without recomputation in the backward pass.
fn in_block(recompute: bool, args: &[Var], block: impl Fn(&[Var]) -> Var) -> Result<Var> {
    if !recompute {
        return Ok(block(args));
    }
    Ok(args[0].tape().checkpoint(args, |args| Ok(vec![block(args)]))?.remove(0))
}

/// Rows of the batch, sharded over an axis `dp` if there is one.
fn rows(rank: &Rank, dtype: DType, rows: std::ops::Range<usize>) -> Result<Tensor> {
    let split = if rank.mesh().axis("dp").is_some() { "@dp" } else { "" };
    let layout = Layout::parse(&format!("f64[{}{split}, {WIDTH}]", rows.len()), rank.mesh())?;
    let element = |at: usize| 1.0 + (at * 7 % 11) as f64 / 8.0;
    let data: Vec<f64> = (rows.start * WIDTH..rows.end * WIDTH).map(element).collect();
    Ok(Tensor::from_global(rank, &layout, &data)?.cast(dtype))
}

/// The row ranges of a number of microbatches.
fn cut(microbatches: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let each = ROWS / microbatches;
    (0..microbatches).map(move |m| m * each..(m + 1) * each)
}

/// The dropout output of the whole batch, and the gradient of its sum.
fn masked(mesh: &str, microbatches: usize, recompute: bool) -> [Vec<f64>; 2] {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let tape = Tape::new(rank);
        let (mut made, mut gradients) = (Vec::new(), Vec::new());
        for own in cut(microbatches) {
            tape.set_noise(noise(own.start));
            let x = tape.leaf(own.start as u64, &rows(rank, DType::F64, own.clone())?);
            let y = in_block(recompute, &[x], |a| dropped(&a[0], 1))?;
            made.extend(y.tensor().to_f64()?);
            // The next microbatch sets its noise before the backward pass of this one.
            tape.set_noise(noise(own.end));
            y.sum().backward()?;
        }
        for gradient in tape.gradients().values() {
            gradients.extend(gradient.to_f64()?);
        }
        Ok([made, gradients])
    });
    ranks.unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
}

#[test]
fn checkpointed_dropout_gradient_uses_the_forward_mask() {
    let [whole, slope] = masked("", 1, false);
    let mask: Vec<bool> = whole.iter().map(|y| *y != 0.0).collect();
    let row = |r: usize| &mask[r * WIDTH..(r + 1) * WIDTH];
    assert!(mask.contains(&true) && mask.contains(&false) && (1..ROWS).all(|r| row(r) != row(0)), "{mask:?}");
    assert!(slope.iter().zip(&mask).all(|(g, kept)| *g == if *kept { 2.0 } else { 0.0 }), "{slope:?}");
    for mesh in ["", "dp=2", "dp=3", "tp=2"] {
        for microbatches in [1, 2, 3, 6] {
            for recompute in [false, true] {
                let [made, gradient] = masked(mesh, microbatches, recompute);
                let what = format!("{mesh}, {microbatches} microbatches, recomputation {recompute}");
                assert_eq!(made, whole, "{what}");
                assert_eq!(gradient, slope, "{what}");
            }
        }
    }
}

/// Two blocks with weights and two masks each.
fn text(x: &Var, w: [&Tensor; 2], recompute: bool) -> Result<Var> {
    let tape = x.tape().clone();
    let mut y = x.clone();
    for layer in 0..2 {
        let weights = [0, 1].map(|i| tape.leaf(i, w[i as usize]));
        let args = [&[y], &weights[..]].concat();
        y = in_block(recompute, &args, |a| {
            let hidden = dropped(&a[0].matmul(&a[1]).gelu(), 2 * layer);
            dropped(&hidden.matmul(&a[2]), 2 * layer + 1).add(&a[0])
        })?;
    }
    Ok(y.square().sum())
}

/// Losses and gradients, as bits. `ahead`: all forward passes run, each on its own tape, before the first backward
/// pass.
fn outcome(
    rank: &Rank,
    dtype: DType,
    microbatches: usize,
    [recompute, ahead]: [bool; 2],
) -> Result<Vec<u64>> {
    let weight =
        |key| Tensor::normal(rank, &Layout::invariant(rank.mesh(), dtype, &[WIDTH, WIDTH]), key, 1, 0.3);
    let w = [weight(1)?, weight(2)?];
    let one = Tape::new(rank);
    let (mut losses, mut tapes) = (Vec::new(), Vec::new());
    for own in cut(microbatches) {
        let tape = if ahead { Tape::new(rank) } else { one.clone() };
        tape.set_noise(noise(own.start));
        let loss = text(&tape.constant(rows(rank, dtype, own.clone())?), [&w[0], &w[1]], recompute)?;
        match ahead {
            true => tapes.push((tape, loss.clone())),
            false => loss.backward()?,
        }
        losses.push(loss.tensor().to_f64()?);
    }
    let mut found: Vec<f64> = losses.concat();
    for (tape, loss) in tapes {
        tape.set_noise(None);
        loss.backward()?;
        for gradient in tape.gradients().values() {
            found.extend(gradient.to_f64()?);
        }
    }
    for gradient in one.gradients().values() {
        found.extend(gradient.to_f64()?);
    }
    Ok(found.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn checkpointing_is_bitwise_neutral_with_dropout() {
    for mesh in ["", "dp=2", "tp=2"] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            for (microbatches, ahead) in [(1, false), (2, false), (3, false), (3, true)] {
                let of = |recompute| {
                    let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                        outcome(rank, dtype, microbatches, [recompute, ahead])
                    });
                    made.unwrap_or_else(|e| panic!("{mesh}: {e}"))
                };
                let (kept, again) = (of(false), of(true));
                assert!(kept == again, "{mesh} in {dtype}, {microbatches} microbatches, ahead: {ahead}");
            }
        }
    }
}
