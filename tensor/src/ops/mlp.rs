//! y = gelu(x w1 + b1) w2, and with b2 and the residual where the hidden units are whole: two products with what stands around them.

use super::linear::{as_matrix, gradients, line, matrix, product, turned};
use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::Strides;
use shardgrad_kernels::op::contract::CONTRACT;
use shardgrad_kernels::op::linear::{LINEAR_GELU, PRODUCT_GELU_GRAD};
use smallvec::smallvec;
use std::rc::Rc;

/// `..m d!, d! h, h, h e! -> ..m e!` on x, w1, b1 and w2 of one float dtype, with GELU in its tanh form; z = x w1 + b1 and gelu(z) are
/// kept for the backward (`..m h`). Where h is split the result is pending. With a fifth argument b2 (`e!`), h must be whole; so it must
/// with a last one, the residual r (`..m e!`), to which the layer adds. A pending w2 is completed, although y is linear in it: what is
/// kept is not.
///
/// With u = (g w2^T) gelu'(z): dx = u w1^T, dw1 = x^T u, db1 = the sum of u over all rows, dw2 = gelu(z)^T g and db2 = the sum of g.
/// One op gives all of them. dr = g.
#[derive(Debug)]
pub struct Mlp {
    /// Whether there is a b2.
    pub has_last_bias: bool,
    /// Whether there is an r.
    pub has_residual: bool,
}

/// All cotangents, linear in g.
#[derive(Debug)]
struct MlpBackward {
    has_last_bias: bool,
}

impl Op for Mlp {
    fn name(&self) -> &'static str {
        "mlp"
    }

    fn signature(&self) -> &str {
        match (self.has_last_bias, self.has_residual) {
            (false, false) => "..m d!, d! h, h, h e! -> ..m e!, ..m h, ..m h",
            (true, false) => "..m d!, d! h!, h!, h! e!, e! -> ..m e!, ..m h!, ..m h!",
            (false, true) => "..m d!, d! h!, h!, h! e!, ..m e! -> ..m e!, ..m h!, ..m h!",
            (true, true) => "..m d!, d! h!, h!, h! e!, e!, ..m e! -> ..m e!, ..m h!, ..m h!",
        }
    }

    fn num_saved(&self) -> usize {
        2
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1, 3], outputs: &[1, 2] }
    }

    fn volume(&self, _: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        let hidden = outputs.get(1).map_or(0, Layout::numel);
        let [x, w2] = [0, 3].map(|i| args[i].shape().last().copied().unwrap_or(1));
        hidden.saturating_mul(x + w2)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let (a, w1, w2) = (matrix(rank, x[0], 1)?, matrix(rank, x[1], 1)?, matrix(rank, x[3], 1)?);
        let b1 = line(rank, x[2])?;
        let [mut y, mut z, mut hidden] = [local.output(0)?, local.output(1)?, local.output(2)?];
        as_matrix(&mut hidden, 1, |hidden| {
            as_matrix(&mut z, 1, |z| launch(rank, &LINEAR_GELU, &[&a, &w1, &b1], &mut [hidden, z], &[]))
        })?;
        let kept = matrix(rank, &hidden, 1)?;
        let (b2, residual) = x[4..].split_at(usize::from(self.has_last_bias));
        product(rank, [&kept, &w2], [b2, residual].map(|x| x.first().copied()), &mut y, 1)?;
        Ok(smallvec![y, z, hidden])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let args = [cx.input(0), cx.input(1), cx.input(3), cx.output(1), cx.output(2), &g];
        let grads = Tensor::results(Rc::new(MlpBackward { has_last_bias: self.has_last_bias }), &args);
        cx.each(|i| grads.get(i).unwrap_or(&g).clone())
    }
}

impl Op for MlpBackward {
    fn name(&self) -> &'static str {
        "mlp_backward"
    }

    fn signature(&self) -> &str {
        match self.has_last_bias {
            false => "..m d!, d! h, h e!, ..m h, ..m h, ..m e! -> ..m d!, d! h, h, h e!",
            true => "..m d!, d! h!, h! e!, ..m h!, ..m h!, ..m e! -> ..m d!, d! h!, h!, h! e!, e!",
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[5]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let matrices = x.iter().map(|x| matrix(rank, x, 1)).collect::<Result<Vec<_>>>()?;
        let [x, w1, w2, z, hidden, g] = &matrices[..] else {
            unreachable!("the signature has six arguments")
        };
        let z = z.contiguous(rank)?;
        let mut outputs: Pieces =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let mut u = Piece::alloc(rank, g.dtype, &z.view.shape)?;
        let shape = outputs[2].view.clone();
        outputs[2].view = Strides::contiguous(&[shape.numel()]).into();
        launch(rank, &PRODUCT_GELU_GRAD, &[g, &turned(w2), &z], &mut [&mut u, &mut outputs[2]], &[])?;
        outputs[2].view = shape;
        as_matrix(&mut outputs[0], 1, |dx| launch(rank, &CONTRACT, &[&u, &turned(w1)], &mut [dx], &[]))?;
        as_matrix(&mut outputs[1], 1, |dw| launch(rank, &CONTRACT, &[&turned(x), &u], &mut [dw], &[]))?;
        match &mut outputs[3..] {
            [dw2, db2] => gradients(rank, hidden, g, dw2, db2, 1)?,
            [dw2] => as_matrix(dw2, 1, |dw| launch(rank, &CONTRACT, &[&turned(hidden), g], &mut [dw], &[]))?,
            _ => unreachable!("the signature has four results or five"),
        }
        Ok(outputs)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let case = |has_last_bias, has_residual, shapes: &[&[usize]]| {
        let op = Rc::new(Mlp { has_last_bias, has_residual });
        Case::new(op, shapes.iter().map(|shape| real(shape)).collect())
    };
    vec![
        case(false, false, &[&[4, 3], &[3, 5], &[5], &[5, 2]]),
        case(false, false, &[&[2, 3, 4], &[4, 3], &[3], &[3, 5]]),
        case(true, false, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[2]]),
        case(false, true, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[4, 2]]),
        case(true, true, &[&[4, 3], &[3, 5], &[5], &[5, 2], &[2], &[4, 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op;
    use crate::ops::embedding::Embedding;
    use crate::ops::layer_norm::LayerNorm;
    use crate::ops::linear::Linear;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn far_from_zero_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Beyond 16 gelu(x) is x or 0.
            let x = Tensor::from_host(rank, &[1, 1], &[1.0f64])?;
            let w1 = Tensor::from_host(rank, &[1, 3], &[20.0f64, -20.0, 10.0])?;
            let b1 = Tensor::from_host(rank, &[3], &[10.0f64, 0.0, 10.0])?;
            let w2 = Tensor::from_host(rank, &[3, 2], &[1.0f64, 2.0, 5.0, 7.0, 0.5, 0.25])?;
            let b2 = Tensor::from_host(rank, &[2], &[-1.0f64, 1.0])?;
            assert_eq!(x.mlp(&w1, &b1, &w2, None).to_host::<f64>()?, [40.0, 65.0]);
            assert_eq!(x.mlp(&w1, &b1, &w2, Some(&b2)).to_host::<f64>()?, [39.0, 66.0]);
            let r = Tensor::from_host(rank, &[1, 2], &[0.5f64, -6.0])?;
            let onto = |has_last_bias| Rc::new(Mlp { has_last_bias, has_residual: true });
            let both = Tensor::apply_one(onto(true), &[&x, &w1, &b1, &w2, &b2, &r]);
            assert_eq!(both.to_host::<f64>()?, [39.5, 60.0]);
            let one = Tensor::apply_one(onto(false), &[&x, &w1, &b1, &w2, &r]);
            assert_eq!(one.to_host::<f64>()?, [40.5, 59.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn volumes_by_hand() {
        World::run(Mesh::single(), |rank| {
            let layout = |shape: &[usize]| Layout::invariant(rank.mesh(), DType::F32, shape);
            let volume = |op: &dyn Op, args: &[&[usize]], outputs: &[&[usize]]| {
                let [args, outputs] =
                    [args, outputs].map(|s| s.iter().map(|s| layout(s)).collect::<Vec<_>>());
                op::volume(op, rank, &args.iter().collect::<Vec<_>>(), &outputs)
            };
            let of_mlp: [&[usize]; 4] = [&[2, 3, 4], &[4, 16], &[16], &[16, 5]];
            let mlp = Mlp { has_last_bias: false, has_residual: false };
            // Six rows of 16 hidden units, to each of which 4 units lead, and from which it leads to 5.
            assert_eq!(volume(&mlp, &of_mlp, &[&[2, 3, 5], &[2, 3, 16], &[2, 3, 16]]), 6 * 16 * 9);
            assert_eq!(volume(&Linear::new(1, 1), &[&[2, 3, 4], &[4, 5], &[5]], &[&[2, 3, 5]]), 6 * 4 * 5);
            let rows: [&[usize]; 2] = [&[50_000, 8], &[2, 3]];
            assert_eq!(volume(&Embedding, &rows, &[&[2, 3, 8]]), 48, "the table is not read as a whole");
            assert_eq!(
                volume(
                    &LayerNorm { eps: 1.0, has_residual: false },
                    &[&[6, 8], &[8], &[8]],
                    &[&[6, 8], &[6], &[6]]
                ),
                48
            );
            Ok(())
        })
        .unwrap();
    }
}
