//! An MLP with squared ReLU and learned scales.

use shardgrad::prelude::*;

const WIDTH: usize = 12;

module! { struct Layer { norm: RmsNorm, gain: Param, up: Linear, down: Linear, scale: Param } }

impl Layer {
    fn new() -> Layer {
        Layer {
            norm: RmsNorm::new(WIDTH),
            gain: Param::new(&[]).init(Init::Ones),
            up: Linear::new(WIDTH, 3 * WIDTH).without_bias(),
            down: Linear::new(3 * WIDTH, WIDTH).without_bias(),
            scale: Param::new(&[WIDTH]).init(Init::Ones),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        let h = self.up.forward(&self.norm.forward(x)).relu().square();
        let y = self.down.forward(&(&h * self.gain.on(x)));
        x + y * self.scale.on(x)
    }
}

module! { struct Net { layers: Vec<Layer> } }

#[test]
fn losses_do_not_depend_on_the_mesh() {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .store("scale", "dp@0|=");
    let losses = super::same_on(["dp=2", "tp=2", "dp=2,tp=2", "dp=3"], 1e-9, |rank| {
        let net = Net { layers: (0..3).map(|_| Layer::new()).collect() };
        let model = Model::with_dtype(rank, net, &plan, 1, DType::F64)?;
        let mut optim = Sgd::new(0.05);
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[6, WIDTH])?;
        let x = Tensor::normal(rank, &layout, 7, 0, 1.0)?;
        let mut losses = Vec::new();
        for _ in 0..10 {
            let tape = model.tape();
            let x = tape.constant(x.clone());
            let y = model.layers.iter().fold(x.clone(), |x, layer| layer.forward(&x));
            let loss = (y - x.flip(1)).square().mean();
            loss.backward()?;
            let gradients = tape.gradients();
            assert_eq!(gradients.len(), 15, "scales and gains have gradients too");
            optim.update(&model, gradients)?;
            losses.push(loss.item()?);
        }
        Ok(losses)
    });
    assert!(losses[9] < losses[0], "{losses:?}");
}
