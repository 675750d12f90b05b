//! An MLP that learns the product of two numbers, with data and tensor parallelism: `cargo run --release --example mlp -- --mesh dp=2,tp=2`.

#![allow(clippy::print_stdout, reason = "an example talks to people")]

use shardgrad::prelude::*;

module! { struct Net { up: Linear, down: Linear } }

impl Net {
    fn forward(&self, x: &Var) -> Var {
        self.down.forward(&self.up.forward(x).gelu())
    }
}

fn main() -> Result<()> {
    let mesh = std::env::args().skip(1).last().unwrap_or("dp=2".into());
    let plan =
        Plan::data_parallel("dp").and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"));
    World::run(Mesh::parse(&mesh)?, |rank| {
        let net = Net { up: Linear::new(2, 64), down: Linear::new(64, 1) };
        let model = Model::new(rank, net, &plan, 1)?;
        let mut optim = AdamW::new(1e-2);
        let rows = plan.batch_layout(rank.mesh(), DType::F32, &[256, 2])?;
        let x = Tensor::uniform(rank, &rows, 7, 0, -1.0, 1.0)?;
        let y = x.slice(1, 0..1).mul(&x.slice(1, 1..2));
        for step in 0..=200 {
            let tape = model.tape();
            let guess = model.forward(&tape.constant(x.clone()));
            let loss = guess.sub(&tape.constant(y.clone())).square().mean();
            loss.backward()?;
            optim.update(&model, tape.gradients())?;
            let loss = loss.item()?;
            if step % 50 == 0 && rank.index() == 0 {
                println!("step {step:3}  loss {loss:.6}");
            }
        }
        Ok(())
    })?;
    Ok(())
}
