//! Checkpoint and resume of a model of one's own on another mesh.

use crate::cli::Folder;
use shardgrad::prelude::*;
use std::path::Path;

module! { struct Layer { norm: RmsNorm, up: Linear, down: Linear } }
module! { struct Net { layers: Vec<Layer>, scale: Param } }

fn net() -> Net {
    let layer = || Layer { norm: RmsNorm::new(6), up: Linear::new(6, 24), down: Linear::new(24, 6) };
    Net { layers: vec![layer(), layer()], scale: Param::new(&[6]).init(Init::Ones) }
}

/// Trains from the newest checkpoint of the folder up to a step, and saves. Returns the losses.
fn train(mesh: &str, run: &Path, steps: u64) -> Vec<f64> {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .store("*", "dp@0|=");
    let losses = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let model = Model::with_dtype(rank, net(), &plan, 1, DType::F64)?;
        let (mut optim, mut losses) = (AdamW::new(1e-2), Vec::new());
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[12, 6])?;
        for step in resume(run, &model, &mut optim)?.step..steps {
            let tape = model.tape();
            // Rows of the step, so that a resumed run reads on where the saved one stopped.
            let input = tape.constant(Tensor::normal(rank, &layout, 7, step, 1.0)?);
            let x = model.layers.iter().fold(input.clone(), |x, layer| {
                let h = layer.up.forward(&layer.norm.forward(&x)).silu();
                &x + layer.down.forward(&h)
            });
            let loss = (&x * model.scale.on(&x) + input.flip(1)).square().mean();
            loss.backward()?;
            optim.update(&model, tape.gradients())?;
            losses.push(loss.item()?);
        }
        let state = RunState { step: steps, ..RunState::default() };
        checkpoint::save_weights(&Checkpoints::path_of(run, steps), &model, &optim, &state)?;
        Ok(losses)
    });
    losses.unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
}

#[test]
fn losses_go_on_on_another_mesh() {
    let folder = Folder::new("programs-resume");
    let right = train("", &folder.0.join("whole"), 10);
    let meshes = ["dp=2", "tp=2", "dp=3", "dp=2,tp=2"];
    let mut found = train("", &folder.0.join("parts"), 2);
    for (steps, mesh) in [4, 6, 8, 10].into_iter().zip(meshes) {
        let losses = train(mesh, &folder.0.join("parts"), steps);
        assert_eq!(losses.len(), 2, "{mesh} resumes from the newest checkpoint");
        found.extend(losses);
    }
    crate::training_run::same(&right, &found, 1e-9, "resumed");
    assert!(right[9] < right[0], "{right:?}");
}
