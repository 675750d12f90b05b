//! What layers and texts draw at random: the same numbers in a loop, on every mesh and where a recorded text is replayed.

use crate::support::run;
use shardgrad_autograd::{Noise, Var};
use shardgrad_nn::{AdamW, Dropout, Linear, Model, Plan, Settings, Trainer, module};
use shardgrad_tensor::control::world_sum;
use shardgrad_tensor::{DType, Layout, Rank, Result, Tensor, Value};
use std::ops::Range;
use std::panic::Location;

const ROWS: usize = 4;

module! {
    /// Two products, and dropout that a text may use as often as it likes.
    struct Noisy { up: Linear, drop: Dropout, down: Linear }
}

impl Noisy {
    fn new() -> Noisy {
        Noisy { up: Linear::new(6, 10), drop: Dropout::new(0.5), down: Linear::new(10, 6) }
    }
}

/// Losses of three steps that change nothing, and the loss in inference, of one text on a mesh.
fn losses(mesh: &str, text: fn(&Noisy, &Var) -> Var) -> Vec<f64> {
    let plan = Plan::pipeline("pp").and(Plan::data("dp"));
    let mut ranks = run(mesh, |rank| {
        let settings = Settings { dtype: DType::F64, seed: 3, microbatches: 2, ..Settings::new(ROWS) };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            let layout = plan.batch_layout(rank.mesh(), DType::F64, &[rows.len(), 6])?;
            let all: Vec<f64> =
                rows.flat_map(|row| (0..6).map(move |i| ((row * 5 + i * 3) % 7) as f64)).collect();
            Ok(vec![Tensor::from_global(rank, &layout, &all)?])
        };
        let loss = |model: &Noisy, x: &[Var]| text(model, &x[0]);
        let mut trainer = Trainer::new(rank, Noisy::new(), &plan, AdamW::new(0.0), settings, read, loss)?;
        let mut found = Vec::new();
        for _ in 0..3 {
            found.push(trainer.step(&[])?.loss);
        }
        let part = trainer.loss_part(&read(trainer.rank(), 0, 0..ROWS / 2)?)?;
        found.extend(world_sum(trainer.rank(), &[part], Location::caller())?);
        Ok(found)
    });
    ranks.swap_remove(0)
}

fn same(text: fn(&Noisy, &Var) -> Var) -> Vec<f64> {
    let alone = losses("", text);
    for mesh in ["dp=2", "pp=2", "pp=2,dp=2"] {
        let here = losses(mesh, text);
        let near = here.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(near && here.len() == 4, "{mesh}: {here:?} {alone:?}");
    }
    alone
}

#[test]
fn numbers_of_a_key_of_the_text_are_the_same_in_every_step() {
    let plain = same(|m, x| m.down.forward(&m.up.forward(x)).square().mean());
    let keyed = same(|m, x| m.down.forward(&m.up.forward(x).dropout(0.5, 42, 7, 0)).square().mean());
    assert!(keyed[0] == keyed[1] && keyed[1] == keyed[2], "{keyed:?}");
    assert!((plain[3] - keyed[3]).abs() > 1e-3, "the text asks for them in inference too");
}

#[test]
fn a_layer_draws_other_numbers_in_each_use_and_each_step() {
    let drawn = same(|m, x| m.down.forward(&m.drop.forward(&m.up.forward(x))).square().mean());
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2], "{drawn:?}");
    let twice = same(|m, x| {
        let y = m.up.forward(x);
        m.down.forward(&m.drop.forward(&y).sub(&m.drop.forward(&y))).square().mean()
    });
    assert!(twice[..3].iter().all(|loss| *loss > 1e-3), "masks that differ leave something: {twice:?}");
}

#[test]
fn what_is_computed_again_draws_what_it_drew() {
    run("", |rank| {
        let model = Model::with_dtype(rank, Noisy::new(), &Plan::new(), 3, DType::F64)?;
        let x = Tensor::from_fn(rank, &Layout::invariant(rank.mesh(), DType::F64, &[ROWS, 6]), |i| {
            (i % 7) as f64
        })?;
        let made = |again: bool| -> Result<(f64, Vec<f64>)> {
            let tape = model.tape();
            tape.set_noise(Some(Noise { seed: 3, step: 1, first_row: 0 }));
            let text = |x: &[Var]| {
                let y = model.up.forward(&x[0]);
                Ok(vec![model.drop.forward(&y).sub(&model.drop.forward(&y).scale(0.5))])
            };
            let x = tape.constant(x.clone());
            let y = if again { tape.checkpoint(&[x], text)? } else { text(&[x])? };
            let loss = model.down.forward(&model.drop.forward(&y[0])).square().mean();
            loss.backward()?;
            let gradient = tape.gradients().remove(&model.up.weight.key()).expect("it has one");
            Ok((loss.item()?, gradient.to_f64()?))
        };
        assert!(made(true)? == made(false)?);
        Ok(())
    });
}
