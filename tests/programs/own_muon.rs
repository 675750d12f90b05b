//! Muon written as an optimizer of one's own: the library gathers each matrix to one rank and scatters the result.

use shardgrad::prelude::*;
use std::collections::BTreeMap;

/// Momentum whose matrices are orthogonalized by five Newton-Schulz iterations, after Jordan et al. 2024.
#[derive(Debug)]
struct OwnMuon {
    lr: f64,
    momentum: f64,
    num_steps: u64,
    velocities: BTreeMap<String, Tensor>,
}

impl OwnMuon {
    fn new(lr: f64) -> OwnMuon {
        OwnMuon { lr, momentum: 0.95, num_steps: 0, velocities: BTreeMap::new() }
    }
}

/// The direction of a whole matrix: singular values of about 1.
fn orthogonalized(matrix: &Tensor) -> Tensor {
    let is_tall = matrix.shape()[0] > matrix.shape()[1];
    let wide = |x: Tensor| if is_tall { x.transpose(0, 1) } else { x };
    let x = wide(matrix.clone());
    let norm = x.square().sum().sqrt() + 1e-7;
    let x = (0..5).fold(x / norm, |x, _| {
        let gram = x.matmul(&x.transpose(0, 1));
        3.4445 * &x + (2.0315 * gram.matmul(&gram) - 4.7750 * gram).matmul(&x)
    });
    wide(x)
}

impl Optimizer for OwnMuon {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        format!("own Muon lr {}, momentum {}, after {} steps", self.lr, self.momentum, self.num_steps)
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn count_step(&mut self, _: &[&Param]) {
        self.num_steps += 1;
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let Some((rates, grad_scale)) = step.host_update()? else { return Ok(()) };
        let mut updates = Vec::new();
        for (param, gradient) in params {
            // Shards: no rank sees the whole gradient here.
            let new = gradient * ((1.0 - self.momentum) * grad_scale);
            let before = self.velocities.get(&param.name());
            let velocity = before.map_or_else(|| new.clone(), |before| before * self.momentum + &new);
            updates.push((*param, &velocity * self.momentum + new));
            self.velocities.insert(param.name(), velocity);
        }
        let directions = self.map_matrices(&updates, &mut |matrix| {
            let scale = (matrix.fan_out as f64 / matrix.fan_in as f64).max(1.0).sqrt();
            Ok(orthogonalized(&matrix.value) * scale)
        })?;
        for (((param, _), direction), rate) in params.iter().zip(directions).zip(rates) {
            param.set_tensor(param.tensor() - direction * rate[0])?;
        }
        Ok(())
    }
}

module! { struct Layer { up: Linear, down: Linear } }
module! { struct Net { layers: Vec<Layer> } }

/// Losses and norms of clipped steps.
fn train(rank: &Rank, mut optim: impl Optimizer) -> Result<Vec<f64>> {
    let layer = || Layer { up: Linear::new(6, 20).without_bias(), down: Linear::new(20, 6).without_bias() };
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .store("*", "dp@0|@1|=");
    let model = Model::with_dtype(rank, Net { layers: vec![layer(), layer()] }, &plan, 1, DType::F64)?;
    let x = Tensor::normal(rank, &plan.batch_layout(rank.mesh(), DType::F64, &[12, 6])?, 7, 0, 1.0)?;
    let mut found = Vec::new();
    for _ in 0..8 {
        let tape = model.tape();
        let input = tape.constant(x.clone());
        let y = model
            .layers
            .iter()
            .fold(input.clone(), |x, layer| &x + layer.down.forward(&layer.up.forward(&x).relu().square()));
        let loss = (y - input.flip(1)).square().mean();
        loss.backward()?;
        let losses = vec![loss.tensor().clone()];
        let args = StepArgs { clip: Some(1.0), losses, ..StepArgs::new(optim.lr()) };
        let report = optim.step(&model, tape.gradients(), args)?;
        found.extend([report.loss, report.grad_norm]);
    }
    Ok(found)
}

#[test]
fn own_rule_takes_the_steps_of_the_librarys_on_every_mesh() {
    let meshes = ["dp=2", "tp=2", "dp=3", "dp=2,tp=2"];
    let own = super::same_on(meshes, 1e-8, |rank| train(rank, OwnMuon::new(0.02)));
    let of_library = super::same_on(meshes, 1e-8, |rank| train(rank, Muon::new(0.02)));
    crate::training_run::same(&own, &of_library, 1e-8, "Muon of the library");
    assert!(own[14] < own[0], "{own:?}");
}
