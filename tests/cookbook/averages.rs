//! Averaged weights (EMA), swapped in for evaluation.

use shardgrad::prelude::*;

/// A step, after which the averages follow the weights: `ema` is `Ema::new(&model, 0.999)`.
pub(super) fn step(model: &Model<Mlp>, optim: &mut AdamW, ema: &mut Ema, x: &Tensor) -> Result<()> {
    let tape = model.tape();
    model.forward(&tape.constant(x.clone())).square().mean().backward()?;
    optim.update(model, tape.gradients())?;
    ema.update(model)
}

/// The loss of the averaged weights. The weights come back when the guard is dropped.
pub(super) fn evaluate(model: &Model<Mlp>, ema: &Ema, x: &Tensor) -> Result<f64> {
    let _averages = ema.swap_in(model)?;
    let tape = Tape::inference(model.rank());
    model.forward(&tape.constant(x.clone())).square().mean().item()
}

#[test]
fn averages_stand_in_for_the_weights_and_leave() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let (mut optim, mut ema) = (AdamW::new(0.1), Ema::new(&model, 0.5));
        for _ in 0..3 {
            step(&model, &mut optim, &mut ema, &x)?;
        }
        let before = model.param("c_fc.weight")?.tensor().to_f64()?;
        let loss = evaluate(&model, &ema, &x)?;
        assert_eq!(model.param("c_fc.weight")?.tensor().to_f64()?, before);
        let tape = Tape::inference(model.rank());
        let own = model.forward(&tape.constant(x)).square().mean().item()?;
        assert!((own - loss).abs() > 1e-6, "the averages lag behind: {own} {loss}");
        Ok(vec![loss, own])
    });
}
