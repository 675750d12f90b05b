//! y_(.., i) = x_(.., i, i + d): a diagonal of matrices, and the transpose: matrices of zeros but for one diagonal.

use super::labels::{misuse, whole};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, infer_by_signature};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Strides};
use std::rc::Rc;

/// Which diagonal of which matrices.
#[derive(Clone, Copy, Debug)]
struct Place {
    rows: usize,
    cols: usize,
    /// Columns to the right of the main diagonal, or rows below it if negative.
    offset: isize,
}

impl Place {
    /// The row and the column in which the diagonal begins.
    fn start(self) -> [usize; 2] {
        if self.offset < 0 { [self.offset.unsigned_abs(), 0] } else { [0, self.offset.unsigned_abs()] }
    }

    /// How many elements it has.
    fn len(self) -> usize {
        let [row, col] = self.start();
        self.rows.saturating_sub(row).min(self.cols.saturating_sub(col))
    }

    /// The view of it.
    fn of(self, view: &Strides) -> Strides {
        let (mut seen, [row, col], last) = (view.geometry(), self.start(), view.ndim() - 1);
        let (row_step, col_step) = (view.strides[last - 1], view.strides[last]);
        seen.shape.truncate(last - 1);
        seen.strides.truncate(last - 1);
        seen.shape.push(self.len());
        seen.strides.push(row_step + col_step);
        if self.len() > 0 {
            seen.offset += row * row_step + col * col_step;
        }
        seen.into()
    }
}

/// `..m r! c! -> ..m d`: a view, no element moves. Any dtype. Linear. dx = g on the diagonal of zeros.
#[derive(Debug)]
pub struct Diagonal(Place);

/// `..m d! -> ..m r c`: any dtype. Linear. dx = the diagonal of g.
#[derive(Debug)]
pub struct DiagonalOf(Place);

impl Diagonal {
    /// The diagonal `offset` columns to the right of the main one (rows below it, if negative) of matrices that are the
    /// last two dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there are fewer than two dims.
    pub fn of(shape: &[usize], offset: isize) -> Result<Rc<dyn Op>> {
        let [.., rows, cols] = *shape else {
            return misuse(format!("diagonal: a tensor of {} dims has no matrices", shape.len()));
        };
        Ok(Rc::new(Diagonal(Place { rows, cols, offset })))
    }
}

impl DiagonalOf {
    /// Square matrices with the elements of the last dim on that diagonal.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no dim.
    pub fn square(shape: &[usize], offset: isize) -> Result<Rc<dyn Op>> {
        let [.., n] = *shape else { return misuse("diagonal_of: a scalar has no dim of elements") };
        let side = n + offset.unsigned_abs();
        Ok(Rc::new(DiagonalOf(Place { rows: side, cols: side, offset })))
    }
}

impl Op for Diagonal {
    fn name(&self) -> &'static str {
        "diagonal"
    }

    fn signature(&self) -> &str {
        "..m r! c! -> ..m d"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if !want.is_empty() {
            return infer_by_signature(self, context, args, dtypes, want);
        }
        let mut shape = args[0].shape();
        shape.truncate(shape.len().saturating_sub(2));
        shape.push(self.0.len());
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &shape)])
    }

    fn forward(&self, _: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Ok([x[0].viewed(self.0.of(&x[0].view))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| Tensor::apply_with(Rc::new(DiagonalOf(self.0)), &[&cx.grad(0)], cx.goal(i)))
    }
}

impl Op for DiagonalOf {
    fn name(&self) -> &'static str {
        "diagonal_of"
    }

    fn signature(&self) -> &str {
        "..m d! -> ..m r c"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if !want.is_empty() {
            return infer_by_signature(self, context, args, dtypes, want);
        }
        let mut shape = args[0].shape();
        shape.pop();
        shape.extend([self.0.rows, self.0.cols]);
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &shape)])
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let mut out = Piece::filled(local.rank, x[0].dtype, &shape, 0.0)?;
        let at = self.0.of(&out.view);
        out.write(local.rank, at, x[0])?;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| Tensor::apply_with(Rc::new(Diagonal(self.0)), &[&cx.grad(0)], cx.goal(i)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let of = |shape: &[usize], offset| {
        Case::fixed(Diagonal::of(shape, offset).expect("matrices of the case"), vec![Input::real(shape)])
            .exact()
    };
    let square = |shape: &[usize], offset| {
        Case::fixed(DiagonalOf::square(shape, offset).expect("a dim of the case"), vec![Input::real(shape)])
            .exact()
    };
    vec![
        of(&[5, 4], 0),
        of(&[2, 3, 5], 1),
        of(&[5, 3], -2),
        of(&[2, 3], 7),
        of(&[0, 3], 0),
        square(&[5], 0),
        square(&[2, 3], -1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn diagonals_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.diagonal(0).to_host::<i64>()?, [1, 5]);
            assert_eq!(x.diagonal(1).to_host::<i64>()?, [2, 6]);
            assert_eq!(x.diagonal(-1).to_host::<i64>()?, [4]);
            assert_eq!(x.diagonal(-2).to_host::<i64>()?, [0i64; 0]);
            let y = Tensor::from_host(rank, &[2], &[7i64, 8])?;
            assert_eq!(y.diagonal_of(0).to_host::<i64>()?, [7, 0, 0, 8]);
            assert_eq!(y.diagonal_of(1).to_host::<i64>()?, [0, 7, 0, 0, 0, 8, 0, 0, 0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_has_no_matrices_is_refused() {
        assert!(Diagonal::of(&[3], 0).is_err());
        assert!(DiagonalOf::square(&[], 0).is_err());
    }
}
