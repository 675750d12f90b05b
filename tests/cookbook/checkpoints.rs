//! Checkpoints, and resuming on another mesh.

use shardgrad::prelude::*;
use std::path::Path;

/// Trains up to a step, from the newest checkpoint of the folder if there is one, on any mesh.
pub(super) fn train(model: &Model<Mlp>, x: &Tensor, run: &Path, steps: u64) -> Result<f64> {
    let (mut optim, mut last) = (AdamW::new(1e-2), 0.0);
    let start = checkpoint::resume(run, model, &mut optim)?.step;
    for _ in start..steps {
        let tape = model.tape();
        let loss = model.forward(&tape.constant(x.clone())).square().mean();
        loss.backward()?;
        optim.update(model, tape.gradients())?;
        last = loss.item()?;
    }
    let state = RunState { step: steps, ..RunState::default() };
    checkpoint::save_weights(&Checkpoints::path_of(run, steps), model, &optim, &state)?;
    Ok(last)
}

#[test]
fn run_resumes_on_every_mesh() {
    let folder = crate::cli::Folder::new("cookbook-checkpoints");
    let [whole, parts] = ["whole", "parts"].map(|name| folder.0.join(name));
    let run = |mesh: &str, dir: &Path, steps| {
        let losses = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let (model, x) = super::model_and_batch(rank)?;
            train(&model, &x, dir, steps)
        });
        losses.unwrap()[0]
    };
    let right = run("", &whole, 10);
    for (steps, mesh) in (2..).step_by(2).zip(["", "dp=2", "tp=2", "dp=2,tp=2"]) {
        run(mesh, &parts, steps);
    }
    let resumed = run("dp=4", &parts, 10);
    assert!(approx::abs_diff_eq!(resumed, right, epsilon = 1e-9 * right), "{resumed} {right}");
}
