//! Evaluation and inference where bits must not depend on the mesh: validation losses and predictions of a trained model, bit for bit.

use crate::canonical_sums::{Run, gpt2};
use crate::llama;
use crate::support::{SEQ, VOCAB, batch, max_difference, run};
use shardgrad_nn::{Deterministic, ExpertsConfig, LanguageModel, LlamaConfig, LlamaKind};
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::{DType, Value};
use shardgrad_testing::sample;
use std::panic::Location;

/// The validation loss after a step, its count, and the logits of some rows, which all ranks must agree on.
fn evaluated(of: &Run, mesh: &str) -> Vec<f64> {
    let plan = LanguageModel::plan(&of.config);
    let ranks = run(mesh, |rank| {
        let mut trainer = of.trainer(rank, &plan, 1)?;
        trainer.step()?;
        let ids = batch(trainer.rank(), &plan, 0..2, 0)?;
        let part = trainer.partial_loss(&[ids.clone(), ids.clone()])?;
        let mut numbers = world_sum(rank, &[part.sum, part.count.unwrap_or(0.0)], Location::caller())?;
        let logits = trainer.infer(&[ids], |model, x| model.forward(&x[0]))?;
        assert_eq!(logits.shape().as_slice(), [2, SEQ, VOCAB]);
        numbers.extend(logits.cast(DType::F32).to_f64()?);
        Ok(numbers)
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{mesh}: ranks disagree");
    ranks[0].clone()
}

/// Panics if numbers have other bits.
fn assert_same(found: &[f64], alone: &[f64], what: &str) {
    let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(found) == bits(alone), "{what}: differs by {:e}", max_difference(found, alone));
}

const MESHES: [&str; 9] =
    ["pp=2", "tp=2", "tp=4", "dp=2", "pp=2,tp=2", "pp=2,dp=2", "dp=2,tp=2", "cp=2", "dp=2,cp=2"];

#[test]
fn validation_losses_and_predictions_have_the_bits_of_one_rank() {
    let llama = || llama::config(LlamaKind::Llama);
    let mixtral =
        LlamaConfig { experts: Some(ExpertsConfig::new(4, 2, 9)), ..llama::config(LlamaKind::Mixtral) };
    for (number, (of, what)) in [
        // Dropout on attention weights: another op than attention without.
        (Run::new(gpt2()), "gpt2"),
        (Run { dtype: DType::BF16, ..Run::new(gpt2()) }, "gpt2 in bf16"),
        (Run::new(llama().into()), "llama"),
        (Run::new(mixtral.into()), "mixtral"),
    ]
    .into_iter()
    .enumerate()
    {
        let alone = evaluated(&of, "");
        for mesh in sample(number, MESHES) {
            assert_same(&evaluated(&of, mesh), &alone, &format!("{what} on {mesh}"));
        }
    }
    // The order of the mesh shows in the bits.
    let plain = Run { deterministic: Deterministic::Run, ..Run::new(gpt2()) };
    assert!(evaluated(&plain, "tp=2") != evaluated(&plain, ""));
}
