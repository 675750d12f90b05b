//! Clipping and a schedule of the learning rate.

use shardgrad::prelude::*;

/// Warmup and cosine decay; gradients above norm 1 are scaled down to it.
pub(super) fn step(model: &Model<Mlp>, optim: &mut AdamW, x: &Tensor, step: usize) -> Result<StepReport> {
    let schedule = LrScheduler::constant(1e-2).warmup(10).cosine(100, 1e-3);
    let tape = model.tape();
    let loss = model.forward(&tape.constant(x.clone())).square().mean();
    loss.backward()?;
    let losses = vec![loss.tensor().clone()];
    let args = StepArgs { clip: Some(1.0), losses, ..StepArgs::new(schedule.lr(step)) };
    optim.step(model, tape.gradients(), args) // The report has the norm before clipping.
}

#[test]
fn large_gradients_are_scaled_to_norm_1() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let report = step(&model, &mut AdamW::new(1.0), &x.scale(100.0), 0)?;
        assert!(report.grad_norm > 1.0 && report.lr == 1e-3);
        let scaled = report.grad_scale * report.grad_norm;
        assert!(approx::abs_diff_eq!(scaled, 1.0, epsilon = 1e-6), "{report:?}");
        Ok(vec![report.loss])
    });
}
