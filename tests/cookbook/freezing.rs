//! Freezing.

use shardgrad::prelude::*;

/// Trains the second layer alone: frozen parameters have no gradient and no optimizer state.
pub(super) fn step(model: &Model<Mlp>, optim: &mut AdamW, x: &Tensor) -> Result<usize> {
    model.freeze("c_fc.*")?; // Or model.freeze_all_but("c_proj.*")?, and Param::set_frozen for one parameter.
    let tape = model.tape();
    let loss = model.forward(&tape.constant(x.clone())).square().mean();
    loss.backward()?;
    let gradients = tape.gradients();
    let count = gradients.len();
    optim.update(model, gradients)?;
    Ok(count)
}

#[test]
fn frozen_parameters_stay() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let weights =
            || -> Result<Vec<Vec<f64>>> { model.params().iter().map(|p| p.tensor().to_f64()).collect() };
        let before = weights()?;
        assert_eq!(step(&model, &mut AdamW::new(1e-2), &x)?, 2);
        let after = weights()?;
        assert!(before[..2] == after[..2] && before[2] != after[2] && before[3] != after[3]);
        Ok(after.concat())
    });
}
