//! A diagonal of matrices, y_(.., i) = x_(.., i, i + d), and the transpose: matrices of zeros with one diagonal filled.

use super::labels::{invalid_argument, unsplit};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputLayouts, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Strides};
use smallvec::smallvec;
use std::rc::Rc;

/// A diagonal of `rows` by `cols` matrices.
#[derive(Clone, Copy, Debug)]
struct MatrixDiagonal {
    rows: usize,
    cols: usize,
    /// Columns right of the main diagonal; rows below it if negative.
    offset: isize,
}

impl MatrixDiagonal {
    /// The row and the column of the first element of the diagonal.
    fn start(self) -> [usize; 2] {
        if self.offset < 0 { [self.offset.unsigned_abs(), 0] } else { [0, self.offset.unsigned_abs()] }
    }

    /// The number of elements of the diagonal.
    fn len(self) -> usize {
        let [row, col] = self.start();
        self.rows.saturating_sub(row).min(self.cols.saturating_sub(col))
    }

    /// The view of the diagonal in a view of the matrices.
    fn view_of(self, view: &Strides) -> Strides {
        let (mut diagonal, [row, col], last) = (view.geometry(), self.start(), view.ndim() - 1);
        let (row_step, col_step) = (view.strides[last - 1], view.strides[last]);
        diagonal.shape.truncate(last - 1);
        diagonal.strides.truncate(last - 1);
        diagonal.shape.push(self.len());
        diagonal.strides.push(row_step + col_step);
        if self.len() > 0 {
            diagonal.offset += row * row_step + col * col_step;
        }
        diagonal.into()
    }
}

/// A diagonal of the matrices in the last two dims, as a view: y_(.., i) = x_(.., i, i + d); `..m r! c! -> ..m d`.
///
/// Any dtype; no element moves. Rows and columns must not be sharded. Linear. Gradient: dx = g on the diagonal, 0
/// elsewhere.
#[doc(alias = "diag")]
#[derive(Debug)]
pub struct Diagonal(MatrixDiagonal);

/// Square matrices with the elements of the last dim on a diagonal, 0 elsewhere: `..m d! -> ..m r c`.
///
/// Any dtype. The last dim must not be sharded. Linear. Gradient: dx = the diagonal of g.
#[doc(alias = "diag")]
#[derive(Debug)]
pub struct DiagEmbed(MatrixDiagonal);

impl Diagonal {
    /// The diagonal `offset` columns right of the main one (rows below it if negative) of tensors of shape `shape`.
    ///
    /// # Errors
    /// `Kind::Shape` if there are fewer than two dims.
    pub fn of(shape: &[usize], offset: isize) -> Result<Rc<dyn Op>> {
        let [.., rows, cols] = *shape else {
            return invalid_argument(format!(
                "diagonal: needs matrices in the last two dims, got a tensor of {} dims",
                shape.len()
            ));
        };
        Ok(Rc::new(Diagonal(MatrixDiagonal { rows, cols, offset })))
    }
}

impl DiagEmbed {
    /// The op that puts the elements of the last dim on the diagonal `offset` columns right of the main one.
    ///
    /// # Errors
    /// `Kind::Shape` for a scalar.
    pub fn square(shape: &[usize], offset: isize) -> Result<Rc<dyn Op>> {
        let [.., n] = *shape else {
            return invalid_argument("diag_embed: needs at least one dim, got a scalar");
        };
        let side = n + offset.unsigned_abs();
        Ok(Rc::new(DiagEmbed(MatrixDiagonal { rows: side, cols: side, offset })))
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

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        shape.truncate(shape.len().saturating_sub(2));
        shape.push(self.0.len());
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].with_view(self.0.view_of(&x[0].view))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| cx.cotangent(i, DiagEmbed(self.0), &[&cx.grad(0)]))
    }
}

impl Op for DiagEmbed {
    fn name(&self) -> &'static str {
        "diag_embed"
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

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        shape.pop();
        shape.extend([self.0.rows, self.0.cols]);
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let mut out = LocalTensor::full(local.rank, x[0].dtype, &shape, 0.0)?;
        let at = self.0.view_of(&out.view);
        out.write(local.rank, at, x[0])?;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| cx.cotangent(i, Diagonal(self.0), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let of = |shape: &[usize], offset| {
        Case::fixed_shape(
            Diagonal::of(shape, offset).expect("matrices of the case"),
            vec![Input::real(shape)],
        )
        .exact()
    };
    let square = |shape: &[usize], offset| {
        Case::fixed_shape(
            DiagEmbed::square(shape, offset).expect("a dim of the case"),
            vec![Input::real(shape)],
        )
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
    use crate::methods::shaping::Shaping;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_diagonals_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.diagonal(0).to_host::<i64>()?, [1, 5]);
            assert_eq!(x.diagonal(1).to_host::<i64>()?, [2, 6]);
            assert_eq!(x.diagonal(-1).to_host::<i64>()?, [4]);
            assert_eq!(x.diagonal(-2).to_host::<i64>()?, [0i64; 0]);
            let y = Tensor::from_host(rank, &[2], &[7i64, 8])?;
            assert_eq!(y.diag_embed(0).to_host::<i64>()?, [7, 0, 0, 8]);
            assert_eq!(y.diag_embed(1).to_host::<i64>()?, [0, 7, 0, 0, 0, 8, 0, 0, 0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn tensors_of_too_few_dims_are_refused() {
        assert!(Diagonal::of(&[3], 0).is_err());
        assert!(DiagEmbed::square(&[], 0).is_err());
    }
}
