//! y = x w + b in one go, or with the residual around it: a layer that no rank holds a part of the sum of.

use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::ops::einsum::Einsum;
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::linear::{LINEAR, LINEAR_ADD, PRODUCT_ADD, PRODUCT_SUMS};
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::{DType, Scalar, Strides};
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// `..m k!, k! n, n -> ..m n` on x, w and b of one float dtype, where k may be several dims, and n too. The dims that are summed must
/// be whole: a product whose terms are spread over ranks is pending, and to that a bias is added once, when it is complete. So is a
/// residual r, a last argument `..m n`, that is added after the bias: y = (x w + b) + r. With it there may be no bias.
///
/// dx = g w^T, dw = x^T g and db = the sum of g over all rows; the latter two in one pass over g, pending over what splits the rows.
/// A pending db of 16-bit floats is in the accumulator. dr = g.
#[derive(Debug)]
pub struct Linear {
    signature: String,
    num_in: usize,
    num_out: usize,
    has_bias: bool,
}

/// Both cotangents of the parameters, linear in g.
#[derive(Debug)]
struct LinearGrads {
    signature: String,
    num_in: usize,
    num_out: usize,
    /// Whether that of the bias is in the accumulator.
    is_wide: bool,
}

impl Linear {
    /// A layer that sums over `num_in` dims and yields `num_out`: on x, w and b.
    #[must_use]
    pub fn new(num_in: usize, num_out: usize) -> Linear {
        let (k, n) = (labels("k", num_in, "!"), labels("n", num_out, ""));
        let signature = format!("..m{k},{k}{n},{n} -> ..m{n}");
        Linear { signature, num_in, num_out, has_bias: true }
    }

    /// The same layer with the residual around it: on x, w, perhaps b, and the residual.
    #[must_use]
    pub fn onto(num_in: usize, num_out: usize, has_bias: bool) -> Linear {
        let (k, n) = (labels("k", num_in, "!"), labels("n", num_out, ""));
        let bias = if has_bias { format!("{n},") } else { String::new() };
        let signature = format!("..m{k},{k}{n},{bias} ..m{n} -> ..m{n}");
        Linear { signature, num_in, num_out, has_bias }
    }

    /// The signature of the product with the cotangent that gives dx.
    fn back(&self) -> String {
        let (k, n) = (labels("k", self.num_in, ""), labels("n", self.num_out, ""));
        format!("..m{n},{k}{n} -> ..m{k}")
    }

    /// The signature of the product with the cotangent that gives dw alone.
    fn of_weight(&self) -> String {
        let (k, n) = (labels("k", self.num_in, ""), labels("n", self.num_out, ""));
        format!("..m{k}, ..m{n} ->{k}{n}")
    }

    /// The op that gives dw and db, for a bias that has a pending cotangent or not.
    fn grads(&self, is_wide: bool) -> LinearGrads {
        let &Linear { num_in, num_out, .. } = self;
        let (k, n) = (labels("k", num_in, "!"), labels("n", num_out, ""));
        LinearGrads { signature: format!("..m{k}, ..m{n} ->{k}{n},{n}"), num_in, num_out, is_wide }
    }
}

/// ` k0 k1` with what is said about each.
fn labels(letter: &str, count: usize, mark: &str) -> String {
    (0..count).map(|i| format!(" {letter}{i}{mark}")).collect()
}

/// A piece as one matrix, with so many dims for its columns, copied if its strides do not allow that.
pub(super) fn matrix(rank: &Rank, x: &Piece, num_columns: usize) -> Result<Piece> {
    let at = x.view.ndim() - num_columns;
    let extent = |dims: &[usize]| dims.iter().product::<usize>();
    let shape = [1, extent(&x.view.shape[..at]), extent(&x.view.shape[at..])];
    match x.view.reshape(&shape) {
        Some(view) => Ok(x.viewed(view)),
        None => Ok(x.contiguous(rank)?.viewed(Strides::contiguous(&shape))),
    }
}

/// The same matrix turned.
pub(super) fn turned(x: &Piece) -> Piece {
    x.viewed(x.view.permute(&[0, 2, 1]))
}

/// New memory as one matrix for the time of a call.
pub(super) fn as_matrix<T>(out: &mut Piece, num_columns: usize, call: impl FnOnce(&mut Piece) -> T) -> T {
    let whole = out.view.clone();
    let at = whole.ndim() - num_columns;
    let extent = |dims: &[usize]| dims.iter().product::<usize>();
    out.view = Strides::contiguous(&[1, extent(&whole.shape[..at]), extent(&whole.shape[at..])]).into();
    let result = call(out);
    out.view = whole;
    result
}

/// A piece without gaps as one dim.
pub(super) fn line(rank: &Rank, x: &Piece) -> Result<Piece> {
    let x = x.contiguous(rank)?;
    Ok(x.viewed(Strides::contiguous(&[x.numel()]).at(x.view.offset)))
}

/// y = a b, what stands beside it added: a line, and a residual with so many dims for its columns.
pub(super) fn product(
    rank: &Rank,
    factors: [&Piece; 2],
    [bias, residual]: [Option<&Piece>; 2],
    y: &mut Piece,
    num_columns: usize,
) -> Result<()> {
    let [a, b] = factors;
    let bias = bias.map(|x| line(rank, x)).transpose()?;
    let residual = residual.map(|x| matrix(rank, &x.contiguous(rank)?, num_columns)).transpose()?;
    as_matrix(y, num_columns, |y| match (&bias, &residual) {
        (None, None) => launch(rank, &BATCHED_MATMUL, &[a, b], &mut [y], &[]),
        (Some(bias), None) => launch(rank, &LINEAR, &[a, b, bias], &mut [y], &[]),
        (None, Some(r)) => launch(rank, &PRODUCT_ADD, &[a, b, r], &mut [y], &[]),
        (Some(bias), Some(r)) => launch(rank, &LINEAR_ADD, &[a, b, bias, r], &mut [y], &[]),
    })
}

/// dw and db as new memory: x^T g as a matrix, to which a sum is added, and the sums of g, in its dtype or its accumulator.
pub(super) fn gradients(
    rank: &Rank,
    [x, g]: [&Piece; 2],
    sum: Option<&Piece>,
    dw: &mut Piece,
    db: &mut Piece,
    num_out: usize,
) -> Result<()> {
    let x = turned(x);
    // The kernel for both adds nothing, and gives both in the dtype of g.
    if sum.is_some() || db.dtype != g.dtype {
        product(rank, [&x, g], [None, sum], dw, num_out)?;
        return row_sums(rank, g, db);
    }
    let shape = db.view.clone();
    db.view = Strides::contiguous(&[shape.numel()]).into();
    as_matrix(dw, num_out, |dw| launch(rank, &PRODUCT_SUMS, &[&x, g], &mut [dw, &mut *db], &[]))?;
    db.view = shape;
    Ok(())
}

/// The sums of a matrix over its rows, as new memory of its dtype or its accumulator.
pub(super) fn row_sums(rank: &Rank, g: &Piece, sums: &mut Piece) -> Result<()> {
    let line = Strides::contiguous(&[sums.numel()]).into();
    let shape = std::mem::replace(&mut sums.view, line);
    let columns = g.viewed(g.view.permute(&[2, 0, 1]));
    launch(rank, &SUM, &[&columns], &mut [&mut *sums], &[Scalar::Int(2), Scalar::Real(1.0)])?;
    sums.view = shape;
    Ok(())
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[] }
    }

    fn keeps_for(&self, wanted: &[bool]) -> Keeps {
        // The cotangent of the residual is g itself.
        Keeps::of_product(&wanted[..2 + usize::from(self.has_bias)])
    }

    fn volume(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let (a, w) = (matrix(rank, x[0], self.num_in)?, matrix(rank, x[1], self.num_out)?);
        let (b, residual) = x[2..].split_at(usize::from(self.has_bias));
        let mut y = local.output(0)?;
        product(rank, [&a, &w], [b, residual].map(|x| x.first().copied()), &mut y, self.num_out)?;
        Ok(smallvec![y])
    }

    fn takes_sums(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let parameters = (self.has_bias && (cx.wanted[1] || cx.wanted[2])).then(|| {
            let grads = self.grads(!cx.input_layouts[2].replicate().is_empty());
            Tensor::results_onto(&grads, &[cx.input(0), &g], &[cx.sum(1)])
        });
        let onto = |i: usize, signature: String, args: &[&Tensor]| {
            Tensor::apply_onto(Einsum::of(signature), args, cx.goal(i), cx.sum(i))
        };
        cx.each(|i| match (i, &parameters) {
            (0, _) => onto(0, self.back(), &[&g, cx.input(1)]),
            (1 | 2, Some(both)) => both[i - 1].clone(),
            (1, None) => onto(1, self.of_weight(), &[cx.input(0), &g]),
            _ => g.clone(),
        })
    }
}

impl Op for LinearGrads {
    fn name(&self) -> &'static str {
        "linear_grads"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, if self.is_wide { dtype.accumulator() } else { dtype }]))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let (a, g) = (matrix(rank, x[0], self.num_in)?, matrix(rank, x[1], self.num_out)?);
        let (mut dw, mut db) = (local.output(0)?, local.output(1)?);
        gradients(rank, [&a, &g], local.take_sum(0).as_ref(), &mut dw, &mut db, self.num_out)?;
        Ok(smallvec![dw, db])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let case = |num_in, num_out, shapes: [&[usize]; 3]| {
        Case::new(Rc::new(Linear::new(num_in, num_out)), shapes.map(real).to_vec()).exact()
    };
    let onto = |num_in, num_out, shapes: &[&[usize]]| {
        let op = Rc::new(Linear::onto(num_in, num_out, shapes.len() == 4));
        Case::new(op, shapes.iter().map(|shape| real(shape)).collect()).exact()
    };
    vec![
        case(1, 1, [&[5, 7], &[7, 4], &[4]]),
        case(1, 2, [&[2, 3, 5], &[5, 3, 2], &[3, 2]]),
        case(2, 1, [&[2, 3, 2], &[3, 2, 4], &[4]]),
        onto(1, 1, &[&[5, 7], &[7, 4], &[4], &[5, 4]]),
        onto(2, 1, &[&[2, 3, 2], &[3, 2, 4], &[4], &[2, 4]]),
        onto(1, 1, &[&[5, 7], &[7, 4], &[5, 4]]),
        onto(1, 2, &[&[3, 5], &[5, 3, 2], &[3, 3, 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_layer_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2, 3], &[1.0f64, 0.0, -1.0, 2.0, 1.0, 0.0])?;
            let b = Tensor::from_host(rank, &[3], &[10.0f64, 20.0, 30.0])?;
            assert_eq!(x.linear(&w, &b).to_host::<f64>()?, [15.0, 22.0, 29.0, 21.0, 24.0, 27.0]);
            let r = Tensor::from_host(rank, &[2, 3], &[1.0f64, 2.0, 3.0, -1.0, -2.0, -3.0])?;
            let both = Tensor::apply_one(Rc::new(Linear::onto(1, 1, true)), &[&x, &w, &b, &r]);
            assert_eq!(both.to_host::<f64>()?, [16.0, 24.0, 32.0, 20.0, 22.0, 24.0]);
            let one = Tensor::apply_one(Rc::new(Linear::onto(1, 1, false)), &[&x, &w, &r]);
            assert_eq!(one.to_host::<f64>()?, [6.0, 4.0, 2.0, 10.0, 2.0, -6.0]);
            Ok(())
        })
        .unwrap();
    }
}
