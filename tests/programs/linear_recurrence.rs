//! A gated linear recurrence h_t = a_t h_(t-1) + x_t over the tokens of a row: by doubling, with ops of the library alone, as an op of
//! one's own, and by `gated_scan`, which also takes tokens that are sharded.

use shardgrad::prelude::*;
use shardgrad::tensor::LocalTensor;
use shardgrad::tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};

const ROWS: usize = 4;
const TOKENS: usize = 12;
const WIDTH: usize = 8;

/// The recurrence in log2(tokens) rounds: after a round each h_t covers twice as many tokens.
fn scan_by_doubling(x: &Var, gates: &Var) -> Var {
    let (tokens, mut reach) = (x.shape()[1], 1);
    let (mut a, mut h) = (gates.clone(), x.clone());
    while reach < tokens {
        let earlier = |x: &Var, first| x.slice(1, 0..tokens - reach).pad_with(1, reach, 0, first);
        (a, h) = (&a * earlier(&a, 1.0), &h + &a * earlier(&h, 0.0));
        reach *= 2;
    }
    h
}

/// The recurrence over dim 1 of x and a, in f64 on the host: rows and channels may be sharded, tokens may not.
#[derive(Debug)]
struct Recurrence;

impl Op for Recurrence {
    fn name(&self) -> &'static str {
        "recurrence"
    }

    fn signature(&self) -> &str {
        "b t! c, b t! c -> b t! c"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let shape = &x[0].view.shape;
        let (mut h, a, width) = (x[0].to_f64(local.rank)?, x[1].to_f64(local.rank)?, shape[2]);
        let stride = (shape[1] * width).max(1);
        for i in 0..h.len() {
            if i % stride >= width {
                h[i] += a[i] * h[i - width];
            }
        }
        Ok([LocalTensor::upload(local.rank, shape, &h)?].into_iter().collect())
    }

    /// dx_t = dh_t + a_(t+1) dx_(t+1), the recurrence from the last token to the first, and da_t = dx_t h_(t-1).
    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (a, h) = (cx.input(1), cx.output(0));
        let earlier = |x: &Tensor| x.slice(1, 0..x.shape()[1] - 1).pad(1, 1, 0);
        let reversed = Tensor::apply_one(Recurrence, &[&cx.grad(0).flip(1), &earlier(&a.flip(1))]);
        let dx = reversed.flip(1);
        cx.cotangents(|i| if i == 0 { dx.clone() } else { &dx * earlier(h) })
    }
}

module! { struct Mixer { gate: Linear, input: Linear, output: Linear } }

impl Mixer {
    fn new() -> Mixer {
        Mixer {
            gate: Linear::new(WIDTH, 2 * WIDTH),
            input: Linear::new(WIDTH, 2 * WIDTH),
            output: Linear::new(2 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: &Var, scan: impl Fn(&Var, &Var) -> Var) -> Var {
        let gates = (self.gate.forward(x) + 2.0).sigmoid();
        let inputs = self.input.forward(x) * (1.0 - &gates);
        self.output.forward(&scan(&inputs, &gates))
    }
}

/// Losses of steps: each token learns the mean of the tokens so far.
fn train(rank: &Rank, scan: impl Fn(&Var, &Var) -> Var) -> Result<Vec<f64>> {
    let tensor =
        Plan::tensor_parallel("tp").column_parallel("gate").column_parallel("input").row_parallel("output");
    let plan = Plan::data_parallel("dp").and(Plan::context_parallel("cp")).and(tensor);
    let model = Model::with_dtype(rank, Mixer::new(), &plan, 1, DType::F64)?;
    let mut optim = AdamW::new(1e-2);
    let layout = plan.batch_layout(rank.mesh(), DType::F64, &[ROWS, TOKENS, WIDTH])?;
    let number = |i: usize| ((i * 7 + i / WIDTH * 5) % 11) as f64 / 11.0;
    let mean = |i: usize| {
        let token = i / WIDTH % TOKENS;
        (0..=token).map(|t| number(i - (token - t) * WIDTH)).sum::<f64>() / (token + 1) as f64
    };
    let (x, means) = (Tensor::from_fn(rank, &layout, number)?, Tensor::from_fn(rank, &layout, mean)?);
    let mut losses = Vec::new();
    for _ in 0..10 {
        let tape = model.tape();
        let y = model.forward(&tape.constant(x.clone()), &scan);
        let loss = (y - tape.constant(means.clone())).square().mean();
        loss.backward()?;
        optim.update(&model, tape.gradients())?;
        losses.push(loss.item()?);
    }
    Ok(losses)
}

#[test]
fn doubling_own_op_and_scan_give_the_same_losses_on_every_mesh() {
    let doubling =
        super::same_on(["dp=2", "tp=2", "dp=2,tp=2", "tp=4"], 1e-9, |rank| train(rank, scan_by_doubling));
    let own = super::same_on(["dp=2", "tp=2", "dp=2,tp=2", "tp=4"], 1e-9, |rank| {
        train(rank, |x, gates| Var::apply_one(Recurrence, &[x, gates]))
    });
    crate::training_run::same(&doubling, &own, 1e-9, "own op");
    let scan = super::same_on(["dp=2", "tp=2", "cp=3", "cp=2,tp=2"], 1e-9, |rank| {
        train(rank, |x, gates| x.gated_scan(gates, 1))
    });
    crate::training_run::same(&doubling, &scan, 1e-9, "gated_scan");
    assert!(scan[9] < 0.7 * scan[0], "{scan:?}");
}
