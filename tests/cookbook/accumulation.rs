//! Gradient accumulation.

use shardgrad::prelude::*;

/// Steps on the mean loss of several microbatches.
pub(super) fn step(model: &Model<Mlp>, optim: &mut AdamW, microbatches: &[Tensor]) -> Result<StepReport> {
    let (tape, count) = (model.tape(), microbatches.len());
    let mut losses = Vec::new();
    for x in microbatches {
        let loss = model.forward(&tape.constant(x.clone())).square().mean();
        loss.backward_scaled(1.0 / count as f64)?;
        losses.push(loss.tensor().clone());
    }
    let args = StepArgs { losses, loss_divisor: count, ..StepArgs::new(optim.lr()) };
    optim.step(model, tape.gradients(), args)
}

#[test]
fn microbatches_give_the_loss_of_the_batch() {
    let found = super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let mut optim = AdamW::new(1e-2);
        let rows = super::plan().batch_layout(rank.mesh(), DType::F64, &[4, 4])?;
        let halves = [0..4, 4..8].map(|half| x.gathered().slice(0, half).to_layout(&rows));
        let reports = [step(&model, &mut optim, &halves)?, step(&model, &mut optim, &[x])?];
        Ok(reports.map(|report| report.loss).to_vec())
    });
    assert!(found[1] < found[0]);
}
