//! The log of a training loop of one's own, over a resume.

use crate::cli::Folder;
use serde_json::Value;
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// Trains from a step on, and logs each step.
fn train(mesh: &str, folder: &Path, steps: std::ops::Range<u64>) {
    let (log, plan) = (Log::to(folder).unwrap(), Plan::data_parallel("dp"));
    World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let model = Model::with_dtype(rank, Mlp::new(4, 8), &plan, 1, DType::F64)?;
        let mut optim = Sgd::new(0.1);
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[8, 4])?;
        let x = Tensor::normal(rank, &layout, 7, 0, 1.0)?;
        for step in steps.clone() {
            let tape = model.tape();
            let loss = (model.forward(&tape.constant(x.clone())) - 1.0).square().mean();
            loss.backward()?;
            let args = StepArgs { losses: vec![loss.tensor().clone()], ..StepArgs::new(optim.lr()) };
            let report = optim.step(&model, tape.gradients(), args)?;
            log.report(rank, step, &report)?;
            if step % 2 == 0 {
                log.scalars(rank, step, &[("val_loss", loss.item()?)])?;
            }
        }
        Ok(())
    })
    .unwrap_or_else(|e| panic!("{mesh}: {e}"));
}

/// The objects of the log.
fn lines(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn log_has_each_step_once_and_the_same_numbers_on_every_mesh() {
    let folder = Folder::new("programs-logs");
    let numbers = |mesh: &str| {
        let folder = folder.0.join(format!("run {mesh}"));
        train(mesh, &folder, 1..6);
        let lines = lines(&folder);
        let steps: Vec<u64> = lines.iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5]);
        assert!(lines.iter().zip(1..).all(|(line, step)| line["val_loss"].is_number() == (step % 2 == 0)));
        lines
            .iter()
            .flat_map(|line| ["loss", "grad_norm", "lr"].map(|name| line[name].as_f64().unwrap()))
            .collect()
    };
    let right: Vec<f64> = numbers("");
    for mesh in ["dp=2", "dp=3", "dp=4", "dp=8"] {
        crate::training_run::same(&right, &numbers(mesh), 1e-9, mesh);
    }
    // A run that resumes after step 3, on another mesh, continues the log.
    let run = folder.0.join("run ");
    train("dp=2", &run, 4..8);
    let steps: Vec<u64> = lines(&run).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!((steps, Log::event_files(&run).len()), ((1..8).collect(), 2));
}
