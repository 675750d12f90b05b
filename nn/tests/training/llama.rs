//! The Llama family: losses and gradients are the same on every mesh.

use crate::support::{Outcome, ROWS, VOCAB, batch, near, run};
use shardgrad_autograd::Noise;
use shardgrad_nn::{Llama, LlamaConfig, LlamaKind, Model, Plan};
use shardgrad_tensor::{DType, Kind, Mesh, Result, World};

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
