//! Mixtures of experts on one rank: results against a token-by-token reference, and the load-balancing loss.

use crate::support::{max_difference, run};
use shardgrad_nn::{Init, MixtureOfExperts, Model, Plan, load_balancing_loss};
use shardgrad_tensor::{DType, Layout, Tensor, Value};

/// The rows of a matrix.
fn rows(x: &[f64], width: usize) -> Vec<&[f64]> {
    x.chunks_exact(width).collect()
}

/// x times a matrix with `columns` columns.
fn times(x: &[f64], w: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).map(|j| x.iter().enumerate().map(|(i, x)| x * w[i * columns + j]).sum()).collect()
}

/// Reference result of the layer for one row, expert by expert.
fn reference(
    x: &[f64],
    gate: &[f64],
    stacks: [&[f64]; 3],
    [hidden, count, top_k]: [usize; 3],
    renormalize: bool,
) -> Vec<f64> {
    let d = x.len();
    let logits = times(x, gate, count);
    let sum: f64 = logits.iter().map(|z| z.exp()).sum();
    let mut scored: Vec<(f64, usize)> = logits.iter().map(|z| z.exp() / sum).zip(0..).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.truncate(top_k);
    let all: f64 = if renormalize { scored.iter().map(|s| s.0).sum() } else { 1.0 };
    let mut y = vec![0.0; d];
    for (score, e) in scored {
        let of = |stack: &[f64]| stack[e * d * hidden..][..d * hidden].to_vec();
        let (gates, ups) = (times(x, &of(stacks[0]), hidden), times(x, &of(stacks[1]), hidden));
        let units: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let found = times(&units, &of(stacks[2]), d);
        y.iter_mut().zip(found).for_each(|(y, found)| *y += score / all * found);
    }
    y
}

#[test]
fn mixture_of_experts_matches_a_token_by_token_reference() {
    let [d, hidden, count, top_k] = [5, 7, 6, 3];
    for renormalize in [false, true] {
        let ranks = run("", |rank| {
            let layer = MixtureOfExperts::new(d, hidden, count, top_k, renormalize).init(Init::Normal(0.8));
            let model = Model::with_dtype(rank, layer, &Plan::new(), 3, DType::F64)?;
            let x = Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, &[2, 4, d]), 1, 0, 1.0)?;
            let (y, routes) = model.forward(&model.inference_tape().constant(x.clone()));
            assert_eq!(routes.index.shape()[..], [2, 4, top_k]);
            let of = |name: &str| model.param(name)?.tensor().to_f64();
            let stacks =
                ["experts.gate_proj", "experts.up_proj", "experts.down_proj"].map(|name| of(name).unwrap());
            let stacks = stacks.each_ref().map(|stack| &stack[..]);
            let (x, gate) = (x.to_f64()?, of("gate.weight")?);
            let expected = rows(&x, d)
                .into_iter()
                .map(|x| reference(x, &gate, stacks, [hidden, count, top_k], renormalize));
            Ok(max_difference(&expected.flatten().collect::<Vec<f64>>(), &y.tensor().to_f64()?))
        });
        assert!(ranks[0] < 1e-14, "{:e}, renormalize {renormalize}", ranks[0]);
    }
}

#[test]
fn load_balancing_loss_matches_a_hand_computed_value() {
    run("", |rank| {
        let tape = shardgrad_autograd::Tape::new(rank);
        let host =
            |x: [f64; 2]| Ok::<_, shardgrad_tensor::Error>(tape.constant(Tensor::from_host(rank, &[2], &x)?));
        // Two layers of four rows: experts selected 6 and 2 times, with mean scores of 3/4 and 1/4.
        let usage = [[host([4.0, 0.0])?, host([3.5, 0.5])?], [host([2.0, 2.0])?, host([2.5, 1.5])?]];
        assert_eq!(load_balancing_loss(&usage, 8).item()?, 2.0 * (0.75 * 0.75 + 0.25 * 0.25));
        Ok(())
    });
}
