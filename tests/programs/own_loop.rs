//! A training loop of one's own: two optimizers, each with its schedule, gradient accumulation and clipping.

use shardgrad::prelude::*;

const ROWS: usize = 12;
const WIDTH: usize = 6;

/// Losses, norms and learning rates of steps with a number of microbatches.
fn train(rank: &Rank, num_microbatches: usize) -> Result<Vec<f64>> {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("c_fc").row_parallel("c_proj"));
    let model = Model::with_dtype(rank, Mlp::new(WIDTH, 4 * WIDTH), &plan, 1, DType::F64)?;
    // Triangular: up for 4 steps, down for 4 steps.
    let triangle =
        |lr: f64| LrScheduler::from_fn(move |step| lr * (4.0 - (step as f64 % 8.0 - 4.0).abs() + 1.0) / 5.0);
    let projection = ParamGroup { lr_scale: Some(0.5), ..ParamGroup::default() };
    let mut optim = Optimizers::new()
        .on("*.weight", Muon::new(0.05))
        .schedule(LrScheduler::constant(0.05).warmup(3))
        .otherwise(AdamW::new(1e-2).group("c_proj.bias", projection))
        .schedule(triangle(1e-2));
    let rows = ROWS / num_microbatches;
    let layout = plan.batch_layout(rank.mesh(), DType::F64, &[rows, WIDTH])?;
    let mut found = Vec::new();
    for step in 0..8 {
        let tape = model.tape();
        let mut losses = Vec::new();
        for microbatch in 0..num_microbatches {
            let first = (step * ROWS + microbatch * rows) * WIDTH;
            let x = tape.constant(Tensor::from_fn(rank, &layout, |i| ((first + i) as f64 * 0.7).sin())?);
            let loss = (model.forward(&x) - x * 3.0).square().mean();
            loss.backward_scaled(1.0 / num_microbatches as f64)?;
            losses.push(loss.tensor().clone());
        }
        let args =
            StepArgs { clip: Some(0.5), losses, loss_divisor: num_microbatches, ..StepArgs::new(optim.lr()) };
        let lrs = optim.lrs();
        let report = optim.step(&model, tape.gradients(), args)?;
        assert!(report.grad_norm > 0.5, "gradients are clipped");
        found.extend([report.loss, report.grad_norm]);
        found.extend(lrs);
    }
    Ok(found)
}

#[test]
fn steps_do_not_depend_on_mesh_or_microbatches() {
    let meshes = ["dp=2", "tp=2", "dp=2,tp=2", "dp=3"];
    let whole = super::same_on(meshes, 1e-9, |rank| train(rank, 1));
    let parts = super::same_on(meshes, 1e-9, |rank| train(rank, 4));
    crate::training_run::same(&whole, &parts, 1e-9, "4 microbatches");
    assert!(whole[28] < whole[0], "{whole:?}");
    let lrs = |of: usize| -> Vec<f64> { whole.iter().skip(2 + of).step_by(4).copied().collect() };
    crate::training_run::same(&lrs(0)[..4], &[0.05 / 3.0, 0.1 / 3.0, 0.05, 0.05], 1e-12, "rates of Muon");
    crate::training_run::same(&lrs(1)[..5], &[2e-3, 4e-3, 6e-3, 8e-3, 1e-2], 1e-12, "rates of AdamW");
}
