//! Training a Llama model: losses match on any mesh and schedule, and saved models load on any mesh.

use crate::training_run::{ROWS, Run, SEQ, same, tokens};
use approx::abs_diff_ne;
use shardgrad::nn::{LanguageModel, LlamaConfig, LlamaKind, ModelConfig};
use shardgrad::prelude::*;
use shardgrad_testing::max_difference;

const VOCAB: usize = 19;

/// A run of a model with three groups of two heads and four blocks.
fn run(steps: usize, dropout: f64) -> Run {
    let config = LlamaConfig {
        head_dim: 4,
        attention_dropout: dropout,
        ..LlamaConfig::new(LlamaKind::Llama, VOCAB, SEQ, [12, 17], 4, [6, 3])
    };
    Run { config: config.into(), plan: Plan::llama(), ..Run::new(steps) }
}

#[test]
fn losses_over_50_steps_match_one_rank() {
    let one = run(50, 0.0).losses("");
    assert!(one[98] < 0.85 * one[0], "it learns: {} to {}", one[0], one[98]);
    for mesh in ["tp=2", "dp=2", "dp=2,tp=2", "tp=3"] {
        same(&one, &run(50, 0.0).losses(mesh), 1e-9, mesh);
    }
    for (mesh, schedule) in
        [("pp=2", "1f1b"), ("pp=4", "gpipe"), ("pp=2,dp=2", "zb-h1"), ("pp=2,dp=2,tp=2", "zb-v")]
    {
        let plan = Plan::llama().pipeline_schedule(schedule);
        let many = Run { plan, microbatches: 3, ..run(50, 0.0) };
        same(&one, &many.losses(mesh), 1e-9, &format!("{mesh} {schedule}"));
    }
}

#[test]
fn dropout_and_microbatches_do_not_depend_on_the_mesh() {
    let one = run(5, 0.3).losses("");
    assert!(abs_diff_ne!(one[8], run(5, 0.0).losses("")[8], epsilon = 1e-6), "dropout has an effect");
    for (mesh, microbatches) in [("dp=2", 3), ("tp=2", 2), ("pp=2,tp=3", 3), ("dp=2,pp=2", 1)] {
        let many = Run { microbatches, ..run(5, 0.3) };
        same(&one, &many.losses(mesh), 1e-10, &format!("{mesh} in {microbatches}"));
    }
}

/// Returns the gathered logits of a batch, for a model folder.
fn logits(mesh: &str, dir: &std::path::Path) -> Vec<f64> {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let config = ModelConfig::read(dir)?;
        let plan = LanguageModel::plan(&config);
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 99, config.dtype())?;
        model.load(dir)?;
        model.forward(&model.inference_tape().constant(tokens(rank, &plan, 0, 0..ROWS, 0)?)).tensor().to_f64()
    });
    ranks.unwrap().swap_remove(0)
}

#[test]
fn model_saved_on_one_mesh_loads_on_another() {
    let dir = std::env::temp_dir().join(format!("shardgrad-llama-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let run = run(1, 0.0);
    World::run(Mesh::parse("pp=2,tp=3").unwrap(), |rank| {
        let mut trainer = run.trainer(rank)?;
        trainer.step()?;
        trainer.model().save(&dir)
    })
    .unwrap();
    let one = logits("", &dir);
    for mesh in ["tp=2", "dp=2,tp=3", "dp=3"] {
        let many = logits(mesh, &dir);
        let far = max_difference(&one, &many);
        assert!(one.len() == ROWS * SEQ * VOCAB && far < 1e-13, "{mesh}: {far:e}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
