//! Sequence parallelism as a plan: between the products of a block, tokens are sharded over `tp`, and the gathered inputs of products
//! are gathered again in the backward pass.

use crate::llama::config;
use crate::support::{ROWS, batch, max_difference, run, values};
use crate::traces::{counts, traced};
use shardgrad_nn::{Gpt2Config, LanguageModel, LlamaKind, Model, ModelConfig, Plan};
use shardgrad_tensor::{DType, Phase, Record, Result, Value};

struct Outcome {
    loss: f64,
    gradients: Vec<f64>,
    records: Vec<Record>,
    saved_bytes: usize,
}

fn gpt2() -> ModelConfig {
    Gpt2Config::new(20, 16, 12, 2, 6).into()
}

fn llama(kind: LlamaKind) -> ModelConfig {
    config(kind).into()
}

/// Loss, gradients, collectives and saved bytes of a training pass on rank 0 of a mesh.
fn outcome(config: &ModelConfig, mesh: &str, plan: &Plan, recompute: bool) -> Outcome {
    run(mesh, |rank| {
        let module = LanguageModel::new(config).recompute(recompute);
        let model = Model::with_dtype(rank, module, plan, 5, DType::F64)?;
        let tape = model.tape();
        let (mut loss, mut saved_bytes, mut gradients) = (0.0, 0, Vec::new());
        let mut records = traced(rank, || -> Result<()> {
            let ids = tape.constant(batch(rank, plan, 0..ROWS, 0)?);
            let sum = model.loss(&ids, &tape.constant(batch(rank, plan, 0..ROWS, 1)?));
            (loss, saved_bytes) = (sum.tensor().item()?, tape.saved_bytes());
            sum.backward()?;
            Ok(())
        })?;
        records.retain(|r| r.phase != Phase::Control);
        for gradient in values(&model, &tape.gradients())?.into_values() {
            gradients.extend(gradient);
        }
        Ok(Outcome { loss, gradients, records, saved_bytes })
    })
    .swap_remove(0)
}

/// The collectives of activations: those of parameters and of the loss are smaller or other calls.
fn calls(outcome: &Outcome, phase: Phase) -> Vec<String> {
    let is_activation = |r: &&Record| r.phase == phase && r.numel() >= 40 && r.path.contains(".out");
    let records: Vec<Record> = outcome.records.iter().filter(is_activation).cloned().collect();
    counts(&records)
}

#[test]
fn every_family_computes_the_numbers_of_one_rank() {
    let sequence = |family: Plan| family.and(Plan::sequence_parallel("tp"));
    for (config, plan) in [
        (gpt2(), Plan::gpt2()),
        (llama(LlamaKind::Llama), Plan::llama()),
        (llama(LlamaKind::Qwen2), Plan::llama()),
        (llama(LlamaKind::Mixtral), Plan::llama_moe()),
    ] {
        let alone = outcome(&config, "", &plan, false);
        for (mesh, recompute) in
            [("tp=2", false), ("tp=2", true), ("dp=2,tp=2", false), ("tp=3", false), ("fsdp=2,tp=2", false)]
        {
            let many = outcome(&config, mesh, &sequence(plan.clone()), recompute);
            assert!(
                (many.loss - alone.loss).abs() < 1e-12,
                "{config:?} {mesh}: {} {}",
                many.loss,
                alone.loss
            );
            assert!(max_difference(&many.gradients, &alone.gradients) < 1e-12, "{config:?} {mesh}");
        }
    }
}

/// Bytes of the collectives of activations in the forward pass.
fn forward_bytes(outcome: &Outcome) -> u64 {
    let of_activation = |r: &&Record| r.phase == Phase::Forward && r.numel() >= 40;
    outcome.records.iter().filter(of_activation).map(|r| r.bytes).sum()
}

#[test]
fn all_reduces_become_reduce_scatters_and_all_gathers() {
    // Elements of the residual stream: 4 rows of 6 tokens of width 12, and of 5 tokens of width 12.
    for (config, family, numel) in
        [(gpt2(), Plan::gpt2(), 288), (llama(LlamaKind::Llama), Plan::llama(), 240)]
    {
        let sequence = family.clone().and(Plan::sequence_parallel("tp"));
        let [tensor, sequence, kept] = [family, sequence.clone(), without_regathering(&sequence)]
            .map(|plan| outcome(&config, "tp=2", &plan, false));
        // Two of each per block, and one at the embedding and the head.
        assert_eq!(calls(&sequence, Phase::Forward), ["forward all_gather 5", "forward reduce_scatter 5"]);
        assert_eq!(forward_bytes(&sequence), forward_bytes(&tensor));
        // The adjoints of these, and each gathered input again.
        assert_eq!(
            calls(&sequence, Phase::Backward),
            ["backward all_gather 10", "backward reduce_scatter 5"]
        );
        assert_eq!(calls(&kept, Phase::Backward), ["backward all_gather 5", "backward reduce_scatter 5"]);
        // Each gathered input is kept as this rank's half of the tokens.
        assert_eq!(kept.saved_bytes - sequence.saved_bytes, 5 * numel / 2 * size_of::<f64>());
        assert!(sequence.saved_bytes < tensor.saved_bytes);
    }
}

/// The same plan, which keeps gathered inputs for the backward pass.
fn without_regathering(plan: &Plan) -> Plan {
    let text = plan.to_string();
    let kept: Vec<&str> = text.lines().filter(|line| !line.starts_with("regather")).collect();
    kept.join("\n").parse().unwrap()
}
