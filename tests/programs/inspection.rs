//! Inspecting sharded values, parameters and gradients.

use shardgrad::prelude::*;

module! { struct Net { up: Linear, down: Linear } }

#[test]
fn values_and_gradients_are_read_by_name_on_every_mesh() {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .store("*", "dp@0|@1|=");
    super::same_on(["dp=2", "tp=2", "dp=2,tp=2", "dp=3"], 1e-9, |rank| {
        let net = Net { up: Linear::new(3, 8), down: Linear::new(8, 6) };
        let model = Model::with_dtype(rank, net, &plan, 1, DType::F64)?;
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[6, 3])?;
        let tape = model.tape();
        let hidden = model.up.forward(&tape.constant(Tensor::normal(rank, &layout, 7, 0, 1.0)?)).gelu();
        let loss = model.down.forward(&hidden).square().mean();
        loss.backward()?;
        let gradients = tape.gradients();

        // A sharded value, on every rank; after the backward pass as a tensor, since its graph is gone.
        let hidden = hidden.tensor();
        let shown = hidden.show()?;
        assert!(shown.starts_with(&hidden.layout().to_string()), "{shown}");
        assert_eq!(hidden.gathered().shape()[..], [6, 8]);
        let mut numbers = hidden.to_f64()?;
        // A row of a parameter, a slice of a gradient, and norms.
        let weight = model.param("up.weight")?.tensor();
        numbers.extend(weight.gathered().select(0, 1).to_f64()?);
        let gradient = model.grad(&gradients, "down.weight")?;
        assert_eq!(gradient.layout(), model.param("down.weight")?.tensor().layout());
        numbers.extend(gradient.whole_along(1).slice(1, 2..4).to_f64()?);
        for param in model.params() {
            let norm = |x: &Tensor| -> Result<f64> { Ok(x.square().sum().item()?.sqrt()) };
            numbers.extend([norm(&param.tensor())?, norm(model.grad(&gradients, &param.name())?)?]);
        }
        // What a rank itself holds.
        let own = weight.to_local_f64()?.len();
        assert!(own <= 24 && (rank.mesh().num_ranks() == 1) == (own == 24), "{own} numbers on a rank");
        Ok(numbers)
    });
}
