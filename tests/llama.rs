//! Training a Llama model: losses match on any mesh, and saved models load on any mesh.

use crate::max_difference::max_abs_diff;
use shardgrad::nn::{
    LanguageModel, Llama, LlamaConfig, LlamaKind, LrScheduler, ModelConfig, Trainer, TrainerConfig,
};
use shardgrad::prelude::*;
use std::ops::Range;

const ROWS: usize = 6;
const SEQ: usize = 8;
const VOCAB: usize = 19;

/// Three groups of two heads, two blocks.
fn config(dropout: f64) -> LlamaConfig {
    LlamaConfig {
        head_dim: 4,
        attention_dropout: dropout,
        ..LlamaConfig::new(LlamaKind::Llama, VOCAB, SEQ, [12, 17], 2, [6, 3])
    }
}

fn tokens(rank: &Rank, plan: &Plan, step: u64, rows: Range<usize>, shift: usize) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
    let token = |r: usize, t: usize| ((r * 5 + (t + shift) * (t + shift) + step as usize * 3) % VOCAB) as i64;
    let all: Vec<i64> = rows.flat_map(|r| (0..SEQ).map(move |t| token(r, t))).collect();
    Tensor::from_global(rank, &layout, &all)
}

fn trainer<'t>(rank: &Rank, plan: &'t Plan, dropout: f64, microbatches: usize) -> Result<Trainer<'t, Llama>> {
    let settings = TrainerConfig {
        microbatches,
        seed: 5,
        dtype: DType::F64,
        lr_scheduler: Some(LrScheduler::constant(3e-3)),
        clip: Some(1.0),
        ..TrainerConfig::new(ROWS)
    };
    let read = |rank: &Rank, step, rows: Range<usize>| {
        Ok(vec![tokens(rank, plan, step, rows.clone(), 0)?, tokens(rank, plan, step, rows, 1)?])
    };
    let loss = |model: &Llama, x: &[Var]| model.loss(&x[0], &x[1]);
    Trainer::new(rank, Llama::new(&config(dropout)), plan, AdamW::new(0.0), settings, read, loss)
}

/// Returns losses and gradient norms of some steps.
fn losses(mesh: &str, steps: usize, dropout: f64, microbatches: usize) -> Vec<f64> {
    let plan = Plan::llama();
    let ranks = World::new(Mesh::parse(mesh).unwrap()).threads(1).launch(|rank| {
        let mut trainer = trainer(rank, &plan, dropout, microbatches)?;
        let mut out = Vec::new();
        for _ in 0..steps {
            let report = trainer.step()?;
            out.extend([report.loss, report.grad_norm]);
        }
        Ok(out)
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert!(ranks.iter().all(|r| *r == ranks[0]), "{mesh}: ranks disagree");
    ranks.into_iter().next().expect("a world has a rank")
}

fn same(one: &[f64], many: &[f64], bound: f64, what: &str) {
    assert_eq!(one.len(), many.len());
    for (i, (a, b)) in one.iter().zip(many).enumerate() {
        assert!((a - b).abs() <= bound * a.abs(), "{what}, number {i}: {b}, on one rank {a}");
    }
}

#[test]
fn losses_over_100_steps_match_one_rank() {
    let one = losses("", 100, 0.0, 1);
    assert!(one[198] < 0.6 * one[0], "it learns: {} to {}", one[0], one[198]);
    for mesh in ["tp=2", "dp=2", "dp=2,tp=2", "tp=3", "pp=2", "pp=2,dp=2,tp=2"] {
        same(&one, &losses(mesh, 100, 0.0, 1), 1e-9, mesh);
    }
}

#[test]
fn dropout_and_microbatches_do_not_depend_on_the_mesh() {
    let one = losses("", 5, 0.3, 1);
    assert!((one[8] - losses("", 5, 0.0, 1)[8]).abs() > 1e-6, "dropout has an effect");
    for (mesh, microbatches) in [("dp=2", 3), ("tp=2", 2), ("pp=2,tp=3", 3), ("dp=2,pp=2", 1)] {
        same(&one, &losses(mesh, 5, 0.3, microbatches), 1e-10, &format!("{mesh} in {microbatches}"));
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
    let plan = Plan::llama();
    World::run(Mesh::parse("pp=2,tp=3").unwrap(), |rank| {
        let mut trainer = trainer(rank, &plan, 0.0, 1)?;
        trainer.step()?;
        trainer.model().save(&dir)
    })
    .unwrap();
    let one = logits("", &dir);
    for mesh in ["tp=2", "dp=2,tp=3", "dp=3"] {
        let many = logits(mesh, &dir);
        let far = max_abs_diff(&one, &many);
        assert!(one.len() == ROWS * SEQ * VOCAB && far < 1e-13, "{mesh}: {far:e}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
