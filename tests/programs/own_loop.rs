//! A training loop of one's own: schedule, gradient accumulation and clipping.

use shardgrad::prelude::*;

const ROWS: usize = 12;
const WIDTH: usize = 6;

/// Losses, norms and learning rates of steps with a number of microbatches.
fn train(rank: &Rank, num_microbatches: usize) -> Result<Vec<f64>> {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("c_fc").row_parallel("c_proj"));
    let model = Model::with_dtype(rank, Mlp::new(WIDTH, 4 * WIDTH), &plan, 1, DType::F64)?;
    let mut optim =
        AdamW::new(1e-2).group("*.bias", ParamGroup { lr_scale: Some(0.5), ..ParamGroup::default() });
    // Triangular: up for 4 steps, down for 4 steps.
    let schedule = LrScheduler::from_fn(|step| 1e-2 * (4.0 - (step as f64 % 8.0 - 4.0).abs() + 1.0) / 5.0);
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
        let args = StepArgs {
            clip: Some(0.5),
            losses,
            loss_divisor: num_microbatches,
            ..StepArgs::new(schedule.lr(step))
        };
        let report = optim.step(&model, tape.gradients(), args)?;
        assert!(report.grad_norm > 0.5, "gradients are clipped");
        found.extend([report.loss, report.grad_norm, report.lr]);
    }
    Ok(found)
}

#[test]
fn steps_do_not_depend_on_mesh_or_microbatches() {
    let meshes = ["dp=2", "tp=2", "dp=2,tp=2", "dp=3"];
    let whole = super::same_on(meshes, 1e-9, |rank| train(rank, 1));
    let parts = super::same_on(meshes, 1e-9, |rank| train(rank, 4));
    crate::training_run::same(&whole, &parts, 1e-9, "4 microbatches");
    assert!(whole[21] < whole[0], "{whole:?}");
}
