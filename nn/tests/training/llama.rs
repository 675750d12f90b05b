//! The Llama family: identical results on every mesh, also of a saved model, and the collectives of a tensor-parallel block.

use crate::save_and_load::Folder;
use crate::support::{Outcome, ROWS, SEQ, VOCAB, batch, max_difference, near, run};
use crate::traces::{counts, traced};
use shardgrad_autograd::Noise;
use shardgrad_nn::{
    Init, Llama, LlamaConfig, LlamaKind, Model, ModelConfig, Param, Plan, model::LlamaBlock, module,
};
use shardgrad_tensor::{DType, Kind, Mesh, Phase, Rank, Result, Value, World};

/// Two groups of two heads of 4 channels, rows of width 10, 11 tokens, 2 blocks.
pub(crate) fn config(kind: LlamaKind) -> LlamaConfig {
    LlamaConfig {
        head_dim: 4,
        initializer_range: 0.3,
        ..LlamaConfig::new(kind, VOCAB, 8, [10, 7], 2, [4, 2])
    }
}

/// Four groups of one head, untied, with all biases: the heads are not a multiple of the ranks of `tp=3`.
fn biased() -> LlamaConfig {
    LlamaConfig {
        head_dim: 4,
        attention_bias: true,
        mlp_bias: true,
        tie_word_embeddings: true,
        initializer_range: 0.3,
        ..LlamaConfig::new(LlamaKind::Llama, VOCAB, 8, [10, 7], 2, [4, 4])
    }
}

fn outcome(config: &LlamaConfig, mesh: &str, noise: bool, recompute: bool) -> Outcome {
    let plan = Llama::plan(config);
    let outcomes = run(mesh, |rank| {
        let module = Llama::new(config).recompute(recompute);
        let model = Model::with_dtype(rank, module, &plan, 5, DType::F64)?;
        let tape = model.tape();
        tape.set_noise(noise.then_some(Noise { seed: 3, step: 7, first_row: 0 }));
        let ids = tape.constant(batch(rank, &plan, 0..ROWS, 0)?);
        let loss = model.loss(&ids, &tape.constant(batch(rank, &plan, 0..ROWS, 1)?));
        Outcome::of_loss(&model, &tape, &loss)
    });
    Outcome::of_ranks(outcomes, mesh)
}

#[test]
fn query_heads_must_be_a_multiple_of_key_heads() {
    for heads in [[4, 3], [4, 0], [2, 4], [0, 0]] {
        let config = LlamaConfig::new(LlamaKind::Llama, VOCAB, 8, [16, 7], 1, heads);
        let error = World::run(Mesh::single(), |_| {
            let _ = Llama::new(&config);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Config, "{error}");
        assert_eq!(
            error.message(),
            format!("{} query heads are not a multiple of {} key heads", heads[0], heads[1])
        );
        assert!(error.site().is_some_and(|site| site.file().ends_with("training/llama.rs")), "{error}");
    }
}

#[test]
fn losses_and_gradients_do_not_depend_on_the_mesh() {
    for kind in LlamaKind::ALL {
        let config = config(kind);
        let alone = outcome(&config, "", false, false);
        let biases = if kind == LlamaKind::Qwen2 { 3 } else { 0 };
        let norms = if kind.has_head_norms() { 2 } else { 0 };
        let gates = usize::from(kind.has_experts());
        assert_eq!(
            alone.gradients.len(),
            3 + 2 * (9 + biases + norms + gates),
            "every parameter has a gradient"
        );
        for (name, gradient) in &alone.gradients {
            let zero_by_nature = name.ends_with("k_proj.bias");
            assert!(gradient.iter().any(|g| g.abs() > 1e-9) || zero_by_nature, "{name} is not reached");
        }
        for mesh in ["tp=2", "dp=2", "dp=2,tp=2", "dp=3"] {
            outcome(&config, mesh, false, false).assert_near(&alone, &format!("{kind:?} on {mesh}"));
        }
    }
}

#[test]
fn heads_can_be_sharded_unevenly_with_empty_ranks() {
    let alone = outcome(&biased(), "", false, false);
    for mesh in ["tp=2", "tp=3", "dp=2,tp=3"] {
        outcome(&biased(), mesh, false, false).assert_near(&alone, mesh);
    }
    let grouped = config(LlamaKind::Llama);
    let alone = outcome(&grouped, "", false, false);
    outcome(&grouped, "tp=3", false, false).assert_near(&alone, "two groups over three ranks");
}

/// One or two key heads of five query heads each, with biases or norms.
pub(crate) fn few_keys(kind: LlamaKind, key_heads: usize) -> LlamaConfig {
    let new = LlamaConfig::new(kind, VOCAB, 8, [10, 7], 2, [5 * key_heads, key_heads]);
    LlamaConfig { head_dim: 4, initializer_range: 0.3, ..new }
}

#[test]
fn fewer_key_heads_than_ranks_are_replicated() {
    for (kind, key_heads) in [(LlamaKind::Llama, 1), (LlamaKind::Qwen2, 2), (LlamaKind::Qwen3, 1)] {
        let config = few_keys(kind, key_heads);
        let alone = outcome(&config, "", false, false);
        for mesh in ["tp=2", "tp=3", "dp=2,tp=4"] {
            outcome(&config, mesh, false, false).assert_near(&alone, &format!("{kind:?} on {mesh}"));
        }
    }
    run("tp=3", |rank| {
        let model = Model::new(rank, Llama::new(&few_keys(LlamaKind::Qwen2, 2)), &Plan::llama(), 1)?;
        let layout = |name: &str| -> Result<String> {
            Ok(model.param(&format!("model.layers.1.self_attn.{name}"))?.tensor().layout().to_string())
        };
        assert_eq!(layout("q_proj.weight")?, "f32[10, 2, 5@tp, 4]");
        assert_eq!(layout("q_proj.bias")?, "f32[2, 5@tp, 4]");
        assert_eq!(
            (layout("k_proj.weight")?, layout("v_proj.bias")?),
            ("f32[10, 2, 4]".into(), "f32[2, 4]".into())
        );
        assert_eq!(layout("o_proj.weight")?, "f32[2, 5@tp, 4, 10]");
        Ok(())
    });
}

#[test]
fn dropout_and_activation_checkpointing_are_independent_of_the_mesh() {
    let config = LlamaConfig { attention_dropout: 0.3, ..config(LlamaKind::Llama) };
    let alone = outcome(&config, "", true, false);
    assert!(!near(alone.loss, outcome(&config, "", false, false).loss), "dropout has an effect");
    for mesh in ["tp=2", "dp=2,tp=2"] {
        outcome(&config, mesh, true, false).assert_near(&alone, mesh);
    }
    let again = outcome(&config, "tp=2", true, true);
    again.assert_near(&alone, "recomputed");
    assert!(again.saved_bytes < alone.saved_bytes / 2);
}

#[test]
fn model_saved_on_one_mesh_loads_on_another() {
    let folder = Folder::new("llama");
    let config = config(LlamaKind::Llama);
    let model = |rank: &Rank, config: &LlamaConfig, seed: u64| {
        Model::with_dtype(rank, Llama::new(config), &Llama::plan(config), seed, DType::F64)
    };
    let logits = |rank: &Rank, model: &Model<Llama>| {
        let ids = batch(rank, &Llama::plan(&config), 0..ROWS, 0)?;
        model.forward(&model.inference_tape().constant(ids)).tensor().to_f64()
    };
    // Two groups over three ranks.
    let saved = run("tp=3", |rank| {
        let model = model(rank, &config, 5)?;
        model.save(&folder.0)?;
        logits(rank, &model)
    });
    for mesh in ["", "tp=2", "dp=3", "dp=2,tp=3"] {
        let loaded = run(mesh, |rank| {
            let ModelConfig::Llama(read) = ModelConfig::read(&folder.0)? else { panic!("a Llama") };
            let model = model(rank, &read, 99)?;
            model.load(&folder.0)?;
            logits(rank, &model)
        });
        let far = max_difference(&saved[0], &loaded[0]);
        assert!(saved[0].len() == ROWS * SEQ * VOCAB && far < 1e-12, "{mesh}: {far:e}");
    }
}

module! {
    /// A block, and its input as a parameter.
    struct Alone { x: Param, block: LlamaBlock }
}

#[test]
fn a_tensor_parallel_block_needs_two_all_reduces_each_way() {
    for kind in [LlamaKind::Llama, LlamaKind::Qwen2] {
        let records = run("tp=2", |rank| {
            let block = Llama::new(&config(kind)).model.layers.swap_remove(0);
            let module = Alone { x: Param::new(&[2, 4, 10]).init(Init::Normal(1.0)), block };
            let parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
            let plan =
                parts.iter().fold(Plan::tensor_parallel("tp"), |plan, part| plan.column_parallel(part));
            let model = Model::new(rank, module, &plan.row_parallel("o_proj").row_parallel("down_proj"), 1)?;
            let tape = model.tape();
            traced(rank, || {
                model.block.forward(&model.x.on_tape(&tape)).square().mean().backward()?;
                assert_eq!(tape.gradients().len(), model.params().len());
                Ok(())
            })
        })
        .swap_remove(0);
        assert_eq!(counts(&records), ["backward all_reduce 2", "forward all_reduce 2"], "{kind:?}");
        let paths: Vec<&str> = records.iter().map(|r| r.path.as_str()).collect();
        assert_eq!(paths[..2], ["block.self_attn.o_proj.out", "block.mlp.down_proj.out"]);
        assert!(records.iter().all(|r| r.numel() == 2 * 4 * 10), "each moves one activation");
    }
}

#[test]
fn tensor_and_data_parallel_models_need_the_expected_collectives() {
    let step_of = |mesh: &str, config: &LlamaConfig| {
        let mut records = run(mesh, |rank| {
            let plan = Llama::plan(config);
            let model = Model::with_dtype(rank, Llama::new(config), &plan, 5, DType::F64)?;
            let tape = model.tape();
            traced(rank, || {
                let ids = tape.constant(batch(rank, &plan, 0..ROWS, 0)?);
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
