//! An own op.

use shardgrad::prelude::*;
use shardgrad::tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use shardgrad::tensor::{LocalTensor, ops::unary::Round};

/// Rounds; the gradient passes unchanged (straight-through estimator). The signature gives layouts and collectives.
#[derive(Debug)]
struct RoundThrough;

#[rustfmt::skip]
impl Op for RoundThrough {
    fn name(&self) -> &'static str { "round_through" }
    fn signature(&self) -> &str { "..m -> ..m" }
    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> { Round.forward(local, x) }
    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents { cx.cotangents(|_| cx.grad(0)) }
}

/// Quantizes to steps of 1/8.
pub(super) fn quantize(x: &Var) -> Var {
    Var::apply_one(std::rc::Rc::new(RoundThrough), &[&(x * 8.0)]) / 8.0
}

#[test]
fn gradients_pass_the_rounding() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let tape = model.tape();
        let y = quantize(&model.forward(&tape.constant(x)));
        assert!(y.tensor().to_f64()?.iter().all(|y| (y * 8.0).fract() == 0.0));
        y.sum().backward()?;
        // The gradient of the last bias is the number of rows.
        let gradient = model.grad(&tape.gradients(), "c_proj.bias")?.to_f64()?;
        assert_eq!(gradient, [8.0; 4]);
        Ok(gradient)
    });
}
