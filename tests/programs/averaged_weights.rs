//! Averages of weights (EMA): followed in a training loop, used for evaluation, saved and loaded.

use crate::cli::Folder;
use shardgrad::prelude::*;
use std::path::Path;

const DECAY: f64 = 0.75;

module! { struct Net { norm: RmsNorm, up: Linear, down: Linear } }

fn net() -> Net {
    Net { norm: RmsNorm::new(6), up: Linear::new(6, 18), down: Linear::new(18, 6) }
}

fn plan() -> Plan {
    Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .store("*", "dp@0|=")
}

fn loss(model: &Model<Net>, tape: &Tape, x: &Tensor) -> Var {
    let x = tape.constant(x.clone());
    let y = model.down.forward(&model.up.forward(&model.norm.forward(&x)).gelu());
    (y - x.flip(1)).square().mean()
}

/// All parameters of the model, one after another.
fn weights(model: &Model<Net>) -> Result<Vec<f64>> {
    let all: Result<Vec<Vec<f64>>> = model.params().iter().map(|param| param.tensor().to_f64()).collect();
    Ok(all?.concat())
}

/// Losses of the weights and of their averages.
fn train(rank: &Rank, saved: &Path) -> Result<Vec<f64>> {
    let model = Model::with_dtype(rank, net(), &plan(), 1, DType::F64)?;
    let (mut optim, mut ema) = (AdamW::new(2e-2), Ema::new(&model, DECAY));
    let x = Tensor::normal(rank, &plan().batch_layout(rank.mesh(), DType::F64, &[12, 6])?, 7, 0, 1.0)?;
    let mut by_hand = weights(&model)?;
    let mut found = Vec::new();
    for _ in 0..6 {
        let tape = model.tape();
        let loss = loss(&model, &tape, &x);
        loss.backward()?;
        optim.update(&model, tape.gradients())?;
        ema.update(&model)?;
        for (average, weight) in by_hand.iter_mut().zip(weights(&model)?) {
            *average = DECAY * *average + (1.0 - DECAY) * weight;
        }
        found.push(loss.item()?);
    }
    let trained = weights(&model)?;
    {
        let _averages = ema.swap_in(&model)?;
        crate::training_run::same(&by_hand, &weights(&model)?, 1e-12, "averages");
        found.push(loss(&model, &model.inference_tape(), &x).item()?);
    }
    assert_eq!(weights(&model)?, trained, "the weights are back");
    found.push(loss(&model, &model.inference_tape(), &x).item()?);

    // A checkpoint has weights, moments and averages.
    let state = RunState { step: 6, ..RunState::default() };
    checkpoint::save_weights(saved, &model, &ema.with_optimizer(&mut optim), &state)?;
    let other = Model::with_dtype(rank, net(), &plan(), 2, DType::F64)?;
    let (mut optim, mut loaded) = (AdamW::new(2e-2), Ema::new(&other, DECAY));
    checkpoint::load_weights(saved, &other, &mut loaded.with_optimizer(&mut optim))?;
    assert_eq!(weights(&other)?, trained);
    let _averages = loaded.swap_in(&other)?;
    crate::training_run::same(&by_hand, &weights(&other)?, 1e-12, "loaded averages");
    Ok(found)
}

#[test]
fn averages_do_not_depend_on_the_mesh() {
    let folder = Folder::new("programs-averaged-weights");
    let found = super::same_on(["dp=2", "tp=2", "dp=3", "dp=2,tp=2"], 1e-9, |rank| {
        train(rank, &folder.0.join(format!("checkpoint {:?}", rank.mesh().to_string())))
    });
    let [.., last, averaged, after] = found[..] else { panic!("6 steps") };
    assert!(after < last && after < averaged && averaged < found[0], "{found:?}");
}
