//! Two optimizers by name, with one norm and one clip.

use shardgrad::prelude::*;

/// Muon for the matrices of the model, AdamW for everything else, each with its own rate.
pub(super) fn optimizers() -> Optimizers {
    Optimizers::new()
        .on("*.weight", Muon::new(0.02))
        .schedule(LrScheduler::constant(0.02).warmup(10))
        .otherwise(AdamW::new(3e-4))
}

/// A step of all of them: the gradients of all parameters are clipped together.
pub(super) fn step(model: &Model<Mlp>, optim: &mut Optimizers, x: &Tensor) -> Result<StepReport> {
    let tape = model.tape();
    model.forward(&tape.constant(x.clone())).square().mean().backward()?;
    optim.step(model, tape.gradients(), StepArgs { clip: Some(1.0), ..StepArgs::new(optim.lr()) })
}

#[test]
fn matrices_and_biases_move_at_their_own_rates() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let mut optim = optimizers();
        let norms = (0..3).map(|_| step(&model, &mut optim, &x).map(|report| report.grad_norm));
        let norms = norms.collect::<Result<Vec<f64>>>()?;
        assert_eq!(optim.lrs().len(), 2);
        Ok([norms, model.param("c_fc.weight")?.tensor().to_f64()?].concat())
    });
}
