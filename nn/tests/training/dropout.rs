//! Dropout masks: the same in a plain loop, on every mesh, and in a replayed recording.

use crate::support::{Setup, run};
use approx::{abs_diff_eq, abs_diff_ne};
use shardgrad_autograd::{Noise, Var};
use shardgrad_nn::{
    AdamW, Deterministic, Dropout, Gpt2Config, Linear, Model, Plan, Trainer, TrainerConfig, module,
};
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::{DType, Layout, Rank, Result, Tensor, Value};
use std::ops::Range;
use std::panic::Location;

const ROWS: usize = 4;

module! {
    /// Two linear layers, and a dropout layer that the forward function can use several times.
    struct Noisy { up: Linear, drop: Dropout, down: Linear }
}

impl Noisy {
    fn new() -> Noisy {
        Noisy { up: Linear::new(6, 10), drop: Dropout::new(0.5), down: Linear::new(10, 6) }
    }
}

/// Losses of three steps with learning rate 0, and the loss in inference, of a forward function on a mesh.
fn losses(mesh: &str, deterministic: Deterministic, forward: fn(&Noisy, &Var) -> Var) -> Vec<f64> {
    let plan = Plan::pipeline_parallel("pp").and(Plan::data_parallel("dp"));
    let mut ranks = run(mesh, |rank| {
        let settings = TrainerConfig {
            dtype: DType::F64,
            seed: 3,
            microbatches: 2,
            deterministic,
            ..TrainerConfig::new(ROWS)
        };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            let layout = plan.batch_layout(rank.mesh(), DType::F64, &[rows.len(), 6])?;
            let all: Vec<f64> =
                rows.flat_map(|row| (0..6).map(move |i| ((row * 5 + i * 3) % 7) as f64)).collect();
            Ok(vec![Tensor::from_global(rank, &layout, &all)?])
        };
        let loss = |model: &Noisy, x: &[Var]| forward(model, &x[0]);
        let mut trainer = Trainer::new(rank, Noisy::new(), &plan, AdamW::new(0.0), settings, read, loss)?;
        let mut found = Vec::new();
        for _ in 0..3 {
            found.push(trainer.step()?.loss);
        }
        let part = trainer.partial_loss(&read(trainer.rank(), 0, 0..ROWS / 2)?)?;
        found.extend(world_sum(trainer.rank(), &[part.sum], Location::caller())?);
        Ok(found)
    });
    ranks.swap_remove(0)
}

/// The losses on one rank, checked to be the same on all meshes: bit for bit where bits must not depend on the mesh, and to rounding.
fn same(forward: fn(&Noisy, &Var) -> Var) -> Vec<f64> {
    let canonical = Deterministic::Mesh { batch_leaves: ROWS, sum_leaves: 8 };
    let [plain, exact] = [Deterministic::Run, canonical].map(|promise| losses("", promise, forward));
    for mesh in ["dp=2", "pp=2", "pp=2,dp=2"] {
        let here = losses(mesh, Deterministic::Run, forward);
        let near = abs_diff_eq!(here[..], plain[..], epsilon = 1e-9);
        assert!(near && here.len() == 4, "{mesh}: {here:?} {plain:?}");
        assert_eq!(losses(mesh, canonical, forward), exact, "{mesh}");
    }
    plain
}

#[test]
fn dropout_with_an_explicit_key_draws_the_same_mask_in_every_step() {
    let plain = same(|m, x| m.down.forward(&m.up.forward(x)).square().mean());
    let keyed = same(|m, x| m.down.forward(&m.up.forward(x).dropout(0.5, 42, 7, 0)).square().mean());
    assert!(keyed[0] == keyed[1] && keyed[1] == keyed[2], "{keyed:?}");
    assert!(abs_diff_ne!(plain[3], keyed[3], epsilon = 1e-3), "explicit dropout also drops in inference");
}

#[test]
fn a_dropout_layer_draws_another_mask_in_each_use_and_step() {
    let drawn = same(|m, x| m.down.forward(&m.drop.forward(&m.up.forward(x))).square().mean());
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2], "{drawn:?}");
    let twice = same(|m, x| {
        let y = m.up.forward(x);
        m.down.forward(&m.drop.forward(&y).sub(&m.drop.forward(&y))).square().mean()
    });
    assert!(twice[..3].iter().all(|loss| *loss > 1e-3), "the two masks differ: {twice:?}");
}

#[test]
fn activation_checkpointing_draws_the_same_mask_again() {
    run("", |rank| {
        let model = Model::with_dtype(rank, Noisy::new(), &Plan::new(), 3, DType::F64)?;
        let x = Tensor::from_fn(rank, &Layout::invariant(rank.mesh(), DType::F64, &[ROWS, 6]), |i| {
            (i % 7) as f64
        })?;
        let outcome = |checkpointed: bool| -> Result<(f64, Vec<f64>)> {
            let tape = model.tape();
            tape.set_noise(Some(Noise { seed: 3, step: 1, first_row: 0 }));
            let forward = |x: &[Var]| {
                let y = model.up.forward(&x[0]);
                Ok(vec![model.drop.forward(&y).sub(&model.drop.forward(&y).scale(0.5))])
            };
            let x = tape.constant(x.clone());
            let y = if checkpointed { tape.checkpoint(&[x], forward)? } else { forward(&[x])? };
            let loss = model.down.forward(&model.drop.forward(&y[0])).square().mean();
            loss.backward()?;
            let gradient = tape.gradients().remove(&model.up.weight.key()).expect("it has one");
            Ok((loss.item()?, gradient.to_f64()?))
        };
        assert!(outcome(true)? == outcome(false)?);
        Ok(())
    });
}

#[test]
fn dropout_of_a_model_is_independent_of_mesh_and_microbatches() {
    let config = Gpt2Config { embd_pdrop: 0.1, attn_pdrop: 0.2, resid_pdrop: 0.3, ..Setup::new().config };
    let noisy = Setup { config, noise: true, ..Setup::new() };
    let alone = noisy.outcome("");
    for (mesh, microbatches) in [("", 2), ("dp=2", 1), ("dp=2,tp=2", 2), ("tp=3", 1)] {
        Setup { microbatches, ..noisy.clone() }
            .outcome(mesh)
            .assert_near(&alone, &format!("{microbatches} microbatches on {mesh}"));
    }
    let without_noise = Setup { noise: false, ..noisy.clone() }.outcome("");
    without_noise.assert_near(&Setup::new().outcome(""), "a tape without noise");
    assert!(abs_diff_ne!(without_noise.loss, alone.loss, epsilon = 1e-3), "dropout does something");
}
