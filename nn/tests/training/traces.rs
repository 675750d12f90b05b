//! Counts of the collectives of a step.

use crate::llama::{config, few_keys};
use crate::support::{ROWS, Setup, run};
use shardgrad_autograd::Var;
use shardgrad_nn::model::LlamaBlock;
use shardgrad_nn::{
    AdamW, Attention, Block, Init, LayerNorm, Linear, Llama, LlamaConfig, LlamaKind, Mlp, Model, Module,
    Optimizer, Param, Plan, StepArgs, module,
};
use shardgrad_tensor::{DType, Mesh, Phase, Rank, Record, Result, Value, World};

/// How many values each collective moved in each phase, in alphabetical order: `backward all_reduce 2`. Gradients of a bucket count
/// one by one.
pub(crate) fn counts(records: &[Record]) -> Vec<String> {
    let line = |r: &Record| format!("{:?} {}", r.phase, r.op).to_lowercase();
    let lines = records.iter().flat_map(|r| r.members().map(move |_| line(r)));
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    let mut counted: Vec<(String, usize)> = Vec::new();
    for line in lines {
        match counted.last_mut() {
            Some((last, count)) if *last == line => *count += 1,
            _ => counted.push((line, 1)),
        }
    }
    counted.into_iter().map(|(line, count)| format!("{line} {count}")).collect()
}

pub(crate) fn traced(rank: &Rank, f: impl FnOnce() -> Result<()>) -> Result<Vec<Record>> {
    rank.trace().enable();
    f()?;
    rank.trace().disable();
    Ok(rank.trace().take())
}

module! {
    /// A block, and a trained parameter as its input.
    struct Fused { x: Param, block: Block }
}

module! {
    /// A block with separate projections for q, k and v.
    struct SeparateQkv { x: Param, ln_1: LayerNorm, q: Linear, k: Linear, v: Linear, o: Linear, ln_2: LayerNorm, mlp: Mlp }
}

module! {
    /// A block of Llama, and its input as a parameter.
    struct OfLlama { x: Param, block: LlamaBlock }
}

impl Fused {
    fn forward(&self, x: &Var) -> Var {
        self.block.forward(x)
    }
}

impl SeparateQkv {
    fn forward(&self, x: &Var) -> Var {
        let y = self.ln_1.forward(x);
        let (q, k, v) = (self.q.forward(&y), self.k.forward(&y), self.v.forward(&y));
        let x = x.add(&self.o.forward(&q.attention(&k, &v, true)));
        x.add(&self.mlp.forward(&self.ln_2.forward(&x)))
    }
}

fn input(width: usize) -> Param {
    Param::new(&[2, 4, width]).init(Init::Normal(1.0))
}

fn fused() -> Fused {
    Fused { x: input(12), block: Block::new(12, Attention::new(12, 3), Mlp::new(12, 24), 1e-5, 0.0) }
}

fn separate_qkv() -> SeparateQkv {
    let heads = || Linear::general(&[12], &[3, 4]);
    SeparateQkv {
        x: input(12),
        ln_1: LayerNorm::new(12),
        q: heads(),
        k: heads(),
        v: heads(),
        o: Linear::general(&[3, 4], &[12]),
        ln_2: LayerNorm::new(12),
        mlp: Mlp::new(12, 24),
    }
}

fn block_trace<M: Module>(
    plan: &Plan,
    module: impl Fn() -> M + Sync,
    x: impl Fn(&M) -> Param + Sync,
    forward: impl Fn(&M, &Var) -> Var + Sync,
) -> Vec<Record> {
    run("tp=2", |rank| {
        let model = Model::new(rank, module(), plan, 1)?;
        let tape = model.tape();
        traced(rank, || {
            let loss = forward(&model, &x(&model).on_tape(&tape)).square().mean();
            loss.backward()?;
            assert_eq!(tape.gradients().len(), model.params().len());
            Ok(())
        })
    })
    .swap_remove(0)
}

const BLOCK: [&str; 2] = ["backward all_reduce 2", "forward all_reduce 2"];

#[test]
fn tensor_parallel_block_needs_two_all_reduces_each_way() {
    let plan = Plan::new()
        .store("c_attn.weight", "tp@2")
        .store("c_attn.bias", "tp@1")
        .store("c_proj.weight", "tp@0");
    let plan = plan.and(Plan::tensor_parallel("tp").column_parallel("c_fc"));
    let records = block_trace(&plan, fused, |m| m.x.clone(), Fused::forward);
    assert_eq!(counts(&records), BLOCK);
    let paths: Vec<&str> = records.iter().map(|r| r.path.as_str()).collect();
    assert_eq!(paths[..2], ["block.attn.c_proj.out", "block.mlp.c_proj.out"]);
    assert!(paths[2].starts_with("block.mlp.c_fc") && paths[3].starts_with("block.attn.c_attn"), "{paths:?}");
    assert!(records.iter().all(|r| r.numel() == 2 * 4 * 12), "each moves one activation");
}

#[test]
fn tensor_parallel_block_of_llama_needs_two_all_reduces_each_way() {
    let parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
    let plan = parts.iter().fold(Plan::tensor_parallel("tp"), |plan, part| plan.column_parallel(part));
    let plan = plan.row_parallel("o_proj").row_parallel("down_proj");
    for kind in [LlamaKind::Llama, LlamaKind::Qwen2] {
        let module =
            || OfLlama { x: input(10), block: Llama::new(&config(kind)).model.layers.swap_remove(0) };
        let records = block_trace(&plan, module, |m| m.x.clone(), |m, x| m.block.forward(x));
        assert_eq!(counts(&records), BLOCK, "{kind:?}");
        let paths: Vec<&str> = records.iter().map(|r| r.path.as_str()).collect();
        assert_eq!(paths[..2], ["block.self_attn.o_proj.out", "block.mlp.down_proj.out"]);
        assert!(records.iter().all(|r| r.numel() == 2 * 4 * 10), "each moves one activation");
    }
}

#[test]
fn separate_qkv_projections_need_no_more_collectives() {
    let attention = Plan::tensor_parallel("tp")
        .column_parallel("q")
        .column_parallel("k")
        .column_parallel("v")
        .row_parallel("o");
    let plan = attention.column_parallel("c_fc").row_parallel("c_proj");
    let records = block_trace(&plan, separate_qkv, |m| m.x.clone(), SeparateQkv::forward);
    assert_eq!(counts(&records), BLOCK);
    // Another plan has other counts, so the counts above are no artifact of counting.
    let forward = |plan: &Plan| {
        let mut records = block_trace(plan, separate_qkv, |m| m.x.clone(), SeparateQkv::forward);
        records.retain(|r| r.phase == Phase::Forward);
        counts(&records)
    };
    let sequence = plan.point("o.out", "tp@1").point("c_fc.input", "tp~");
    let one_each = ["forward all_gather 1", "forward all_reduce 1", "forward reduce_scatter 1"];
    assert_eq!(forward(&sequence), one_each, "a bias that meets a partial sum completes it for all");
    let stated = sequence.point("c_proj.out", "tp@1");
    assert_eq!(forward(&stated), ["forward all_gather 1", "forward reduce_scatter 2"]);
}

/// One step on one rank, update included, without reads from the device.
fn step(rank: &Rank, setup: &Setup) -> Result<Vec<Record>> {
    let model = setup.model(rank)?;
    let tape = model.tape();
    traced(rank, || {
        for _ in 0..setup.microbatches {
            let ids = crate::support::batch(rank, &setup.plan, 0..ROWS, 0)?;
            model.loss(&tape.constant(ids.clone()), &tape.constant(ids)).backward()?;
        }
        let gradients = tape.gradients();
        assert_eq!(gradients.len(), model.params().len());
        AdamW::new(0.1).step(&model, gradients, StepArgs { clip: Some(1.0), ..StepArgs::new(0.1) })?;
        Ok(())
    })
}

/// Collectives of forward and backward of a step on rank 0.
fn step_trace(setup: &Setup, mesh: &str) -> Vec<Record> {
    let mut records = run(mesh, |rank| step(rank, setup)).swap_remove(0);
    records.retain(|r| r.phase != Phase::Control);
    records
}

#[test]
fn dry_run_records_the_same_trace() {
    let sharded = Setup::new().plan.store("*.weight", "dp@0").compute("*", "dp~");
    for (mesh, plan) in [("dp=2,tp=2", Plan::gpt2()), ("tp=3", Plan::gpt2()), ("dp=2,tp=2", sharded)] {
        let setup = Setup { plan, recompute: mesh == "tp=3", ..Setup::new() };
        for (index, real) in run(mesh, |rank| step(rank, &setup)).into_iter().enumerate() {
            let dry =
                World::new(Mesh::parse(mesh).unwrap()).dry_run(index, |rank| step(rank, &setup)).unwrap();
            assert_eq!(dry, real, "{mesh}, rank {index}");
        }
    }
}

#[test]
fn gradients_are_reduced_once_per_step_for_any_number_of_microbatches() {
    for microbatches in [1, 2, 4] {
        let records = step_trace(&Setup { microbatches, ..Setup::new() }, "dp=2");
        assert_eq!(counts(&records), ["backward all_reduce 28"], "{microbatches} microbatches");
    }
    // Stored as shards: gathered once, reduce-scattered once.
    let plan = Setup::new().plan.store("*.weight", "dp@0").store("*.bias", "dp@0").compute("*", "dp~");
    for microbatches in [1, 2] {
        let records = step_trace(&Setup { microbatches, plan: plan.clone(), ..Setup::new() }, "dp=2");
        assert_eq!(
            counts(&records),
            ["backward reduce_scatter 28", "forward all_gather 28"],
            "{microbatches} microbatches"
        );
    }
}

#[test]
fn tensor_parallel_model_has_expected_collectives() {
    // Per block 2 and 2; the embedding 1 forward; the loss 3 numbers a token forward; the head 1 backward.
    assert_eq!(counts(&step_trace(&Setup::new(), "tp=2")), ["backward all_reduce 5", "forward all_reduce 8"]);
    let both = step_trace(&Setup::new(), "dp=2,tp=2");
    assert_eq!(counts(&both), ["backward all_reduce 33", "forward all_reduce 8"]);
    let alone = step_trace(&Setup::new(), "");
    assert!(alone.is_empty(), "{:?}", counts(&alone));
    assert!(both.iter().all(|r| r.dtype == DType::F64 && r.phase != Phase::Control));
}

#[test]
fn tensor_and_data_parallel_llamas_have_expected_collectives() {
    let step_of = |mesh: &str, config: &LlamaConfig| {
        let mut records = run(mesh, |rank| {
            let plan = Llama::plan(config);
            let model = Model::with_dtype(rank, Llama::new(config), &plan, 5, DType::F64)?;
            let tape = model.tape();
            traced(rank, || {
                let ids = tape.constant(crate::support::batch(rank, &plan, 0..ROWS, 0)?);
                model.loss(&ids, &ids).backward()?;
                assert_eq!(tape.gradients().len(), model.params().len());
                Ok(())
            })
        })
        .swap_remove(0);
        records.retain(|r| r.phase != Phase::Control);
        counts(&records)
    };
    let step = |mesh: &str, kind| step_of(mesh, &config(kind));
    // Per block 2 and 2; the embedding 1 forward; the loss 3 numbers per token forward; the output layer 1 backward.
    assert_eq!(step("tp=2", LlamaKind::Llama), ["backward all_reduce 5", "forward all_reduce 8"]);
    // The QK-norms are shared by all heads: their gradients are reduced once a step, two per block.
    assert_eq!(step("tp=2", LlamaKind::Qwen3), ["backward all_reduce 9", "forward all_reduce 8"]);
    // Replicated key heads: the gradients of their weights are reduced once a step, two per block.
    let few = few_keys(LlamaKind::Llama, 1);
    assert_eq!(step_of("tp=2", &few), ["backward all_reduce 9", "forward all_reduce 8"]);
    // Each gradient once: 3 of the model and 9 per block.
    assert_eq!(step("dp=2", LlamaKind::Llama), ["backward all_reduce 21"]);
    assert_eq!(step("dp=2,tp=2", LlamaKind::Mistral), ["backward all_reduce 26", "forward all_reduce 8"]);
    assert!(step("", LlamaKind::Llama).is_empty());
}
