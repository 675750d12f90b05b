//! Sequence parallelism as a plan: between the products of a block, tokens are sharded over `tp`, and the gathered inputs of products
//! are gathered again in the backward pass.

use crate::llama::config;
use crate::support::{ROWS, batch, max_difference, run, values};
use crate::traces::{counts, traced};
use approx::abs_diff_eq;
use shardgrad_autograd::{Noise, Tape, Var};
use shardgrad_nn::{
    ExpertsConfig, FeedForward, Gpt2, Gpt2Config, Init, LanguageModel, Llama, LlamaConfig, LlamaKind,
    MixtureOfExperts, Model, ModelConfig, Plan, Precision,
};
use shardgrad_tensor::{DType, Phase, Rank, Record, Result, Tensor, Value};
use std::collections::BTreeMap;

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
        tape.set_noise(Some(Noise { seed: 3, step: 7, first_row: 0 }));
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
    let dropped = Gpt2Config {
        embd_pdrop: 0.2,
        resid_pdrop: 0.3,
        attn_pdrop: 0.1,
        ..Gpt2Config::new(20, 16, 12, 2, 6)
    };
    for (config, plan) in [
        (gpt2(), Plan::gpt2()),
        (dropped.into(), Plan::gpt2()),
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
                abs_diff_eq!(many.loss, alone.loss, epsilon = 1e-12),
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
    // Elements of the residual stream: 4 rows of 6 tokens of width 12 or 10.
    for (config, family, numel) in [
        (gpt2(), Plan::gpt2(), 288),
        (llama(LlamaKind::Llama), Plan::llama(), 240),
        // The sums of experts are scattered along tokens, and the norm before the router is gathered.
        (llama(LlamaKind::Mixtral), Plan::llama_moe(), 240),
    ] {
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

/// A Mixtral whose blocks also have shared experts.
fn with_shared_experts() -> Llama {
    let experts = ExpertsConfig::new(4, 2, 7);
    let config = LlamaConfig { experts: Some(experts), ..config(LlamaKind::Mixtral) };
    let mut model = Llama::new(&config);
    for block in &mut model.model.layers {
        let layer = MixtureOfExperts::new(10, 7, 4, 2, true).with_shared_experts(9).init(Init::Normal(0.3));
        block.mlp = FeedForward::MixtureOfExperts(Box::new(layer));
    }
    model
}

#[test]
fn shared_experts_are_sharded_and_added_to_the_routed_ones_before_one_collective() {
    let outcome = |mesh: &str, plan: &Plan| {
        run(mesh, |rank| {
            let model = Model::with_dtype(rank, with_shared_experts(), plan, 5, DType::F64)?;
            let tape = model.tape();
            let mut loss = 0.0;
            let records = traced(rank, || -> Result<()> {
                let ids = tape.constant(batch(rank, plan, 0..ROWS, 0)?);
                let sum = model.loss(&ids, &tape.constant(batch(rank, plan, 0..ROWS, 1)?));
                loss = sum.tensor().item()?;
                sum.backward()
            })?;
            let up = model.param("model.layers.0.mlp.shared_experts.up_proj.weight")?.layout().to_string();
            let gradients: Vec<f64> = values(&model, &tape.gradients())?.into_values().flatten().collect();
            Ok((loss, gradients, records, up))
        })
        .swap_remove(0)
    };
    let tensor = Plan::llama_moe();
    let sequence = tensor.clone().and(Plan::sequence_parallel("tp"));
    let alone = outcome("", &tensor);
    for mesh in ["tp=2", "tp=3", "ep=2", "ep=2,tp=2", "dp=2,ep=2,tp=2"] {
        for plan in [tensor.clone(), tensor.clone().exchange_experts(), sequence.clone()] {
            let many = outcome(mesh, &plan);
            assert!(abs_diff_eq!(many.0, alone.0, epsilon = 1e-12), "{mesh}: {} {}", many.0, alone.0);
            assert!(max_difference(&many.1, &alone.1) < 1e-12, "{mesh}");
        }
    }
    let (_, _, records, up) = outcome("tp=2", &sequence);
    assert_eq!(up, "f64[10, 9@tp]");
    let of_sums = |records: &[Record]| {
        let sums: Vec<Record> = records
            .iter()
            .filter(|r| r.phase == Phase::Forward && r.path.contains(".mlp."))
            .cloned()
            .collect();
        (counts(&sums), sums.iter().map(|r| r.bytes).sum::<u64>())
    };
    // Half of 4 rows of 6 tokens of width 10 in f64, for each of two blocks.
    let (calls, bytes) = of_sums(&records);
    assert_eq!((calls, bytes), (vec!["forward reduce_scatter 2".to_string()], 2 * 240 / 2 * 8));
    let (calls, bytes) = of_sums(&outcome("tp=2", &tensor).2);
    assert_eq!((calls, bytes), (vec!["forward all_reduce 2".to_string()], 2 * 240 * 8));
}

/// Rows of the batch whose activations are counted.
const B: usize = 2;
/// Tokens of a row.
const S: usize = 16;
/// The width of the model.
const H: usize = 32;
/// Its heads.
const A: usize = 4;

/// The tape of a forward pass on some rows of S tokens.
fn forward(model: &Model<Gpt2>, plan: &Plan, rows: usize) -> Result<Tape> {
    let (rank, tape) = (model.rank(), model.tape());
    tape.set_noise(Some(Noise { seed: 1, step: 0, first_row: 0 }));
    let ids: Vec<i64> = (0..rows * S).map(|i| (i * 7 % 24) as i64).collect();
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows, S])?;
    let ids: Var = tape.constant(Tensor::from_global(rank, &layout, &ids)?);
    let _loss = model.loss(&ids, &ids);
    Ok(tape)
}

/// The bytes that one block of GPT-2 saves for backward on a rank of `tp` ranks, for B rows in bf16: the activations alone. With
/// dropout before the additions to the residual stream.
fn activation_bytes_per_block(tp: usize, plan: &Plan, dropout: f64, recompute: bool) -> usize {
    let saved = |layers: usize, rows: usize| {
        run(&format!("tp={tp}"), |rank: &Rank| {
            let config = Gpt2Config { resid_pdrop: dropout, ..Gpt2Config::new(24, S, H, layers, A) };
            let module = Gpt2::new(&config).recompute(recompute);
            let model = Model::with_precision(rank, module, plan, 5, Precision::mixed(DType::BF16))?;
            Ok(forward(&model, plan, rows)?.saved_bytes())
        })
        .swap_remove(0)
    };
    // Weights do not grow with the rows, and embeddings and head not with the blocks.
    let of_rows = |layers: usize| saved(layers, 2 * B) - saved(layers, B);
    of_rows(3) - of_rows(2)
}

#[test]
fn activation_bytes_of_a_block_follow_closed_formulas() {
    let (tensor, sequence) = (Plan::gpt2(), Plan::gpt2().and(Plan::sequence_parallel("tp")));
    // Two bytes for each number: both inputs of norms and both of column-parallel layers; q, k, v, the output of attention, and input
    // and output of GELU, which tensor parallelism shards. f32 statistics: two of each norm and token, one of each head and token.
    let (replicated, sharded) = (8 * H + 16, 24 * H + 4 * A);
    for t in [1, 2, 4] {
        for dropout in [0.0, 0.1] {
            let [tensor, sequence] =
                [&tensor, &sequence].map(|plan| activation_bytes_per_block(t, plan, dropout, false));
            assert_eq!(tensor, S * B * (replicated + sharded / t), "t = {t}, dropout {dropout}");
            assert_eq!(sequence, S * B * (replicated + sharded) / t, "t = {t}, dropout {dropout}");
        }
        let of_inputs = [&tensor, &sequence].map(|plan| activation_bytes_per_block(t, plan, 0.0, true));
        assert_eq!(of_inputs, [2 * S * B * H, 2 * S * B * H / t], "t = {t}, recomputed");
    }
}

/// The bytes for B rows of what a block of GPT-2 saves on a rank of `tp` ranks, by the path in the block and the op that saves first.
fn named_bytes(tp: usize, plan: &Plan) -> BTreeMap<String, usize> {
    let saved = |rows: usize| {
        run(&format!("tp={tp}"), |rank: &Rank| {
            let precision = Precision::mixed(DType::BF16);
            let model =
                Model::with_precision(rank, Gpt2::new(&Gpt2Config::new(24, S, H, 3, A)), plan, 5, precision)?;
            Ok(forward(&model, plan, rows)?.saved_buffers())
        })
        .swap_remove(0)
    };
    // Weights do not grow with the rows.
    let (few, many) = (saved(B), saved(2 * B));
    assert_eq!(few.len(), many.len());
    let mut bytes = BTreeMap::new();
    for (few, many) in few.iter().zip(&many).filter(|(few, many)| few.bytes < many.bytes) {
        if let Some(path) = few.path.strip_prefix("h.1.") {
            *bytes.entry(format!("{path} {}", few.op)).or_default() += many.bytes - few.bytes;
        }
    }
    bytes
}

/// What a block saves for each token, in bytes: what tensor parallelism copies to each rank, and what it shards.
const NAMED: [(&str, usize, usize); 5] = [
    // Queries, keys, values and outputs, and a statistic of each head.
    ("attn.c_attn.out qkv_packed_attention", 0, 8 * H + 4 * A),
    ("attn.c_attn.weight linear", 2 * H, 0),
    // The input, mean and scale.
    ("ln_1.bias layer_norm", 2 * H + 8, 0),
    ("ln_2.bias layer_norm", 2 * H + 8, 0),
    // The input, and input and output of GELU.
    ("mlp.c_fc.out mlp", 2 * H, 16 * H),
];

#[test]
fn each_named_activation_is_divided_by_the_ranks() {
    let (tensor, sequence) = (Plan::gpt2(), Plan::gpt2().and(Plan::sequence_parallel("tp")));
    let named = |bytes: &dyn Fn(usize, usize) -> usize| -> BTreeMap<String, usize> {
        NAMED
            .iter()
            .map(|(name, copied, sharded)| ((*name).to_string(), S * B * bytes(*copied, *sharded)))
            .collect()
    };
    for t in [1, 2, 4] {
        assert_eq!(named_bytes(t, &tensor), named(&|copied, sharded| copied + sharded / t), "t = {t}");
        assert_eq!(named_bytes(t, &sequence), named(&|copied, sharded| (copied + sharded) / t), "t = {t}");
    }
}

/// The same plan, which keeps gathered inputs for the backward pass.
fn without_regathering(plan: &Plan) -> Plan {
    let text = plan.to_string();
    let kept: Vec<&str> = text.lines().filter(|line| !line.starts_with("regather")).collect();
    kept.join("\n").parse().unwrap()
}
