//! Sequence parallelism of the library's Llama by rules of a plan: between the products of a block, tokens are sharded over `tp`.

use crate::llama::config;
use crate::support::{ROWS, batch, max_difference, run, values};
use crate::traces::{counts, traced};
use shardgrad_nn::{Llama, LlamaKind, Model, Plan};
use shardgrad_tensor::{DType, Phase, Record, Result, Value};

/// Tokens, dim 1, are sharded between blocks and in norms; the products of a block take all tokens.
fn sequence_parallel() -> Plan {
    Plan::llama()
        .point("embed_tokens.out", "tp@1")
        .point("*.input_layernorm.out", "tp~")
        .point("*.post_attention_layernorm.out", "tp~")
        .point("*.o_proj.out", "tp@1")
        .point("*.down_proj.out", "tp@1")
        .point("model.norm.out", "tp~")
        .compute("*layernorm.weight", "tp~")
        .compute("model.norm.weight", "tp~")
}

struct Outcome {
    loss: f64,
    gradients: Vec<f64>,
    records: Vec<Record>,
    saved_bytes: usize,
}

fn outcome(mesh: &str, plan: &Plan) -> Outcome {
    run(mesh, |rank| {
        let llama = Llama::new(&config(LlamaKind::Llama));
        let model = Model::with_dtype(rank, llama, plan, 5, DType::F64)?;
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

#[test]
fn tokens_are_sharded_between_the_products_of_a_block() {
    let (alone, plan) = (outcome("", &Plan::llama()), sequence_parallel());
    for mesh in ["tp=2", "dp=2,tp=2", "tp=3"] {
        let many = outcome(mesh, &plan);
        assert!((many.loss - alone.loss).abs() < 1e-12, "{mesh}: {} {}", many.loss, alone.loss);
        assert!(max_difference(&many.gradients, &alone.gradients) < 1e-10, "{mesh}");
    }
    let (tensor, sequence) = (outcome("tp=2", &Plan::llama()), outcome("tp=2", &plan));
    let forward = |outcome: &Outcome| {
        let records: Vec<Record> = outcome
            .records
            .iter()
            .filter(|r| r.phase == Phase::Forward && r.numel() >= 40)
            .cloned()
            .collect();
        counts(&records)
    };
    // Each all-reduce is a reduce-scatter and an all-gather: two of each per block, and one at the embedding and the head.
    assert_eq!(forward(&sequence), ["forward all_gather 5", "forward reduce_scatter 5"]);
    assert_eq!(forward(&tensor), ["forward all_reduce 5"]);
    assert!(sequence.saved_bytes < tensor.saved_bytes, "{} {}", sequence.saved_bytes, tensor.saved_bytes);
}
