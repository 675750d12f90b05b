//! y = x w + b in one go: a layer that no rank holds a part of the sum of.

use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::ops::einsum::Einsum;
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::Strides;
use shardgrad_kernels::op::linear::{LINEAR, PRODUCT_SUMS};
use smallvec::smallvec;
use std::rc::Rc;

/// `..m k!, k! n, n -> ..m n` on x, w and b of one float dtype, where k may be several dims, and n too. The dims that are summed must
/// be whole: a product whose terms are spread over ranks is pending, and to that a bias is added once, when it is complete.
///
/// dx = g w^T, dw = x^T g and db = the sum of g over all rows; the latter two in one pass over g, pending over what splits the rows.
#[derive(Debug)]
pub struct Linear {
    signature: String,
    num_in: usize,
    num_out: usize,
}

/// Both cotangents of the parameters, linear in g.
#[derive(Debug)]
struct LinearGrads {
    signature: String,
    num_in: usize,
    num_out: usize,
}

impl Linear {
    /// A layer that sums over `num_in` dims and yields `num_out`.
    #[must_use]
    pub fn new(num_in: usize, num_out: usize) -> Linear {
        let (k, n) = (labels("k", num_in, "!"), labels("n", num_out, ""));
        Linear { signature: format!("..m{k},{k}{n},{n} -> ..m{n}"), num_in, num_out }
    }

    /// The signature of the product with the cotangent that gives dx.
    fn back(&self) -> String {
        let (k, n) = (labels("k", self.num_in, ""), labels("n", self.num_out, ""));
        format!("..m{n},{k}{n} -> ..m{k}")
    }

    /// The op that gives dw and db.
    fn grads(&self) -> LinearGrads {
        let &Linear { num_in, num_out, .. } = self;
        let (k, n) = (labels("k", num_in, "!"), labels("n", num_out, ""));
        LinearGrads { signature: format!("..m{k}, ..m{n} ->{k}{n},{n}"), num_in, num_out }
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
    Ok(x.viewed(Strides { offset: x.view.offset, ..Strides::contiguous(&[x.numel()]) }))
}

/// dw and db as new memory: x^T g as a matrix, and the sums of g.
pub(super) fn gradients(
    rank: &Rank,
    x: &Piece,
    g: &Piece,
    dw: &mut Piece,
    db: &mut Piece,
    num_out: usize,
) -> Result<()> {
    let (x, shape) = (turned(x), db.view.clone());
    db.view = Strides::contiguous(&[shape.numel()]).into();
    as_matrix(dw, num_out, |dw| launch(rank, &PRODUCT_SUMS, &[&x, g], &mut [dw, &mut *db], &[]))?;
    db.view = shape;
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
        Keeps::of_product(wanted)
    }

    fn volume(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let (a, w) = (matrix(rank, x[0], self.num_in)?, matrix(rank, x[1], self.num_out)?);
        let b = line(rank, x[2])?;
        let mut y = local.output(0)?;
        as_matrix(&mut y, self.num_out, |y| launch(rank, &LINEAR, &[&a, &w, &b], &mut [y], &[]))?;
        Ok(smallvec![y])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let parameters = (cx.wanted[1] || cx.wanted[2])
            .then(|| Tensor::results(Rc::new(self.grads()), &[cx.input(0), &g]));
        cx.each(|i| match (i, &parameters) {
            (0, _) | (_, None) => Tensor::apply_with(Einsum::of(self.back()), &[&g, cx.input(1)], cx.goal(0)),
            (i, Some(both)) => both[i - 1].clone(),
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

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let rank = local.rank;
        let (a, g) = (matrix(rank, x[0], self.num_in)?, matrix(rank, x[1], self.num_out)?);
        let (mut dw, mut db) = (local.output(0)?, local.output(1)?);
        gradients(rank, &a, &g, &mut dw, &mut db, self.num_out)?;
        Ok(smallvec![dw, db])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let case = |num_in, num_out, shapes: [&[usize]; 3]| {
        Case::new(Rc::new(Linear::new(num_in, num_out)), shapes.map(real).to_vec()).exact()
    };
    vec![
        case(1, 1, [&[5, 7], &[7, 4], &[4]]),
        case(1, 2, [&[2, 3, 5], &[5, 3, 2], &[3, 2]]),
        case(2, 1, [&[2, 3, 2], &[3, 2, 4], &[4]]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_layer_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2, 3], &[1.0f64, 0.0, -1.0, 2.0, 1.0, 0.0])?;
            let b = Tensor::from_host(rank, &[3], &[10.0f64, 20.0, 30.0])?;
            assert_eq!(x.linear(&w, &b).to_host::<f64>()?, [15.0, 22.0, 29.0, 21.0, 24.0, 27.0]);
            Ok(())
        })
        .unwrap();
    }
}
