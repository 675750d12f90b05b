//! y = gelu(x w1 + b1) w2, and with b2 and the residual where the hidden units are whole: two products with what stands around them.

use super::linear::{as_matrix, gradients, line, matrix, product, row_sums, turned};
use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Offer, Op, Pieces, Vjp, common_float};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::linear::{LINEAR_GELU, PRODUCT_GELU_GRAD};
use shardgrad_kernels::{DType, Strides};
use smallvec::smallvec;
use std::rc::Rc;

/// `..m d!, d! h, h, h e! -> ..m e!` on x, w1, b1 and w2 of one float dtype, with GELU in its tanh form; z = x w1 + b1 and gelu(z) are
/// kept for the backward (`..m h`). Where h is split the result is pending. With a fifth argument b2 (`e!`), h must be whole; so it must
/// with a last one, the residual r (`..m e!`), to which the layer adds. A pending w2 is completed, although y is linear in it: what is
/// kept is not.
///
/// With u = (g w2^T) gelu'(z): dx = u w1^T, dw1 = x^T u, db1 = the sum of u over all rows, dw2 = gelu(z)^T g and db2 = the sum of g.
/// One op gives all of them; those of the biases are in the accumulator where they are pending. dr = g.
#[derive(Debug)]
pub struct Mlp {
    /// Whether there is a b2.
    pub has_last_bias: bool,
    /// Whether there is an r.
    pub has_residual: bool,
}

/// Cotangents, linear in g. A backward pass in halves asks for those of x first and for those of the parameters later; u is formed in
/// both, with the same bits.
#[derive(Debug)]
struct MlpBackward {
    has_last_bias: bool,
    part: Part,
    /// Whether db1 and db2 are in the accumulator.
    is_wide: bool,
}

/// Whose cotangents are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    All,
    Input,
    Parameters,
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

    fn keeps_for(&self, wanted: &[bool]) -> Keeps {
        match self.part(wanted) {
            Some(Part::All) => self.keeps(),
            Some(Part::Input) => Keeps { inputs: &[1, 3], outputs: &[1] },
            Some(Part::Parameters) => Keeps { inputs: &[0, 3], outputs: &[1, 2] },
            None => Keeps::default(),
        }
    }

    fn volume(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        let (width, hidden) = (args[1].extent(0), args[1].extent(1));
        let rows = args[0].numel() / width.max(1);
        rows.saturating_mul(hidden).saturating_mul(width + args[3].extent(1))
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

    fn takes_sums(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let Some(part) = self.part(cx.wanted) else { return cx.each(|_| g.clone()) };
        let [x, w1, w2] = [0, 1, 3].map(|i| cx.inputs[i].as_ref());
        let [z, hidden] = [1, 2].map(|i| cx.outputs[i].as_ref());
        let read = match part {
            Part::All => [x, w1, w2, z, hidden].to_vec(),
            Part::Input => vec![w1, w2, z],
            Part::Parameters => vec![x, w2, z, hidden],
        };
        let kept = read.into_iter().map(|t| t.expect("the op keeps what its part reads"));
        let args: Vec<&Tensor> = kept.chain([&g]).collect();
        let first = usize::from(part == Part::Parameters);
        let sums: Vec<Option<&Offer>> = (first..self.num_layer_args()).map(|i| cx.sum(i)).collect();
        let is_wide = !cx.input_layouts[2].replicate().is_empty();
        let backward = MlpBackward { has_last_bias: self.has_last_bias, part, is_wide };
        let grads = Tensor::results_onto(&backward, &args, &sums);
        cx.each(|i| match i < self.num_layer_args() {
            true => grads[i - first].clone(),
            false => g.clone(),
        })
    }
}

impl Mlp {
    /// The arguments before the residual.
    fn num_layer_args(&self) -> usize {
        4 + usize::from(self.has_last_bias)
    }

    /// Which cotangents of the layer are wanted; `None` where that of the residual is all.
    fn part(&self, wanted: &[bool]) -> Option<Part> {
        match (wanted[0], wanted[1..self.num_layer_args()].contains(&true)) {
            (true, true) => Some(Part::All),
            (true, false) => Some(Part::Input),
            (false, true) => Some(Part::Parameters),
            (false, false) => None,
        }
    }
}

impl Op for MlpBackward {
    fn name(&self) -> &'static str {
        "mlp_backward"
    }

    fn signature(&self) -> &str {
        match (self.part, self.has_last_bias) {
            (Part::All, false) => "..m d!, d! h, h e!, ..m h, ..m h, ..m e! -> ..m d!, d! h, h, h e!",
            (Part::All, true) => {
                "..m d!, d! h!, h! e!, ..m h!, ..m h!, ..m e! -> ..m d!, d! h!, h!, h! e!, e!"
            }
            (Part::Input, false) => "d! h, h e!, ..m h, ..m e! -> ..m d!",
            (Part::Input, true) => "d! h!, h! e!, ..m h!, ..m e! -> ..m d!",
            (Part::Parameters, false) => "..m d!, h e!, ..m h, ..m h, ..m e! -> d! h, h, h e!",
            (Part::Parameters, true) => "..m d!, h! e!, ..m h!, ..m h!, ..m e! -> d! h!, h!, h! e!, e!",
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        match self.part {
            Part::All => &[&[5]],
            Part::Input => &[&[3]],
            Part::Parameters => &[&[4]],
        }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        // dx, if there is one, then weights and biases in turn.
        let first = usize::from(self.part != Part::Parameters);
        let is_bias = |i: usize| i > first && (i - first) % 2 == 1;
        let of = |i| if self.is_wide && is_bias(i) { dtype.accumulator() } else { dtype };
        Ok((0..num_outputs).map(of).collect())
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let matrices = x.iter().map(|x| matrix(rank, x, 1)).collect::<Result<Vec<_>>>()?;
        let (x, w1, [w2, z], hidden, g) = match (self.part, &matrices[..]) {
            (Part::All, [x, w1, w2, z, hidden, g]) => (Some(x), Some(w1), [w2, z], Some(hidden), g),
            (Part::Input, [w1, w2, z, g]) => (None, Some(w1), [w2, z], None, g),
            (Part::Parameters, [x, w2, z, hidden, g]) => (Some(x), None, [w2, z], Some(hidden), g),
            _ => unreachable!("the signature says how many arguments there are"),
        };
        let z = z.contiguous(rank)?;
        let mut outputs: Pieces =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let mut u = Piece::alloc(rank, g.dtype, &z.view.shape)?;
        let num_before = usize::from(w1.is_some());
        let (dx, params) = outputs.split_at_mut(num_before);
        // Of x alone the sums of u are of no use, and small. The product gives them in its own dtype only.
        let num_hidden = z.view.shape[2];
        let mut unused = None;
        let sums = match params.get_mut(1) {
            Some(db1) if db1.dtype == g.dtype => db1,
            _ => unused.insert(Piece::alloc(rank, g.dtype, &[num_hidden])?),
        };
        let shape = std::mem::replace(&mut sums.view, Strides::contiguous(&[num_hidden]).into());
        launch(rank, &PRODUCT_GELU_GRAD, &[g, &turned(w2), &z], &mut [&mut u, &mut *sums], &[])?;
        sums.view = shape;
        if let Some(db1) = params.get_mut(1).filter(|db1| db1.dtype != g.dtype) {
            row_sums(rank, &u, db1)?;
        }
        if let (Some(w1), [dx]) = (w1, dx) {
            product(rank, [&u, &turned(w1)], [None, local.take_sum(0).as_ref()], dx, 1)?;
        }
        if let (Some(x), Some(hidden), [dw1, _, rest @ ..]) = (x, hidden, params) {
            let [sum1, sum2] = [0, 2].map(|i| local.take_sum(num_before + i));
            product(rank, [&turned(x), &u], [None, sum1.as_ref()], dw1, 1)?;
            match rest {
                [dw2, db2] => gradients(rank, [hidden, g], sum2.as_ref(), dw2, db2, 1)?,
                [dw2] => product(rank, [&turned(hidden), g], [None, sum2.as_ref()], dw2, 1)?,
                _ => unreachable!("there are four parameters at most, and three at least"),
            }
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
    use std::panic::Location;

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
            assert_eq!(volume(&mlp, &of_mlp, &[&[2, 3, 5]]), 6 * 16 * 9, "of what a program tells");
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

    #[test]
    fn halves_of_the_backward_pass_form_what_they_are_asked_for() {
        World::run(Mesh::single(), |rank| {
            let real = |shape: &[usize], stream| {
                Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, shape), 1, stream, 1.0)
            };
            let (m, d, h) = (6, 64, 64);
            let inputs =
                [real(&[m, d], 0)?, real(&[d, h], 1)?, real(&[h], 2)?, real(&[h, d], 3)?, real(&[d], 4)?];
            let op = Mlp { has_last_bias: true, has_residual: false };
            let outputs = op::apply(&op, &inputs.each_ref(), &[], Location::caller())?;
            let g = real(&[m, d], 5)?;
            let layouts = |tensors: &[Tensor]| tensors.iter().map(|t| t.layout().clone()).collect::<Vec<_>>();
            let pulled = |wanted: [bool; 5]| {
                let keeps = op.keeps_for(&wanted);
                let kept = |all: &[Tensor], which: &[usize]| -> Vec<Option<Tensor>> {
                    all.iter().enumerate().map(|(i, t)| which.contains(&i).then(|| t.clone())).collect()
                };
                let before = rank.backend().cost().flops;
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &kept(&inputs, keeps.inputs),
                    outputs: &kept(&outputs, keeps.outputs),
                    input_layouts: &layouts(&inputs),
                    output_layouts: &layouts(&outputs),
                    grads: &[Some(g.clone())],
                    wanted: &wanted,
                    taken: std::cell::RefCell::default(),
                    sums: &[],
                });
                let values: Vec<Option<Vec<f64>>> =
                    cotangents.iter().map(|c| c.as_ref().map(|c| c.to_f64().unwrap())).collect();
                (values, rank.backend().cost().flops - before)
            };
            let (all, of_all) = pulled([true; 5]);
            let (input, of_input) = pulled([true, false, false, false, false]);
            let (params, of_params) = pulled([false, true, true, true, true]);
            assert_eq!((&input[0], &params[1..]), (&all[0], &all[1..]), "the same bits");
            assert!(input[1..].iter().chain(&params[..1]).all(Option::is_none));
            // Two products of four, three of four.
            let product = 2 * (m * d * h) as u64;
            let products = [of_all, of_input, of_params].map(|flops| flops / product);
            assert_eq!(products, [4, 2, 3], "{of_all} {of_input} {of_params}, {product} in a product");
            Ok(())
        })
        .unwrap();
    }
}
