//! Token-expert pairs of one rank, sorted by expert (token permutation), and what is computed on them.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::ForwardContext;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::binary::MUL;
use shardgrad_kernels::op::grouped_matmul::{FORWARD, WEIGHT_GRAD};
use shardgrad_kernels::op::index::{GATHER, SCATTER_ADD};
use shardgrad_kernels::op::sort_by_group::SORT_BY_GROUP;
use shardgrad_kernels::{DType, Kernel, Scalar, Strides};

/// The token-expert pairs of this rank, sorted by expert (token permutation).
pub(super) struct TokenExpertPairs<'a> {
    rank: &'a Rank,
    /// The index of each sorted pair in the order of rows.
    order: LocalTensor,
    /// The row (token) of each sorted pair.
    row: LocalTensor,
    /// The position in sorted order of each pair: the inverse of `order`.
    inverse_order: LocalTensor,
    /// The first sorted pair of each local expert.
    starts: LocalTensor,
    num_rows: usize,
    /// The number of experts on all ranks.
    num_experts: usize,
}

/// Where received pairs are in the order of experts.
pub(super) struct SortedOrder {
    /// The index of each sorted pair in the order of receipt.
    pub(super) order: Vec<i64>,
    /// The inverse of `order`.
    pub(super) inverse_order: Vec<i64>,
    /// The first sorted pair of each expert, and the end of the last.
    pub(super) starts: Vec<i64>,
}

impl<'a> TokenExpertPairs<'a> {
    /// Sorts the pairs of this rank's rows by the experts of label `e`.
    pub(super) fn of(local: &ForwardContext<'a>, index: &LocalTensor) -> Result<TokenExpertPairs<'a>> {
        let (rank, count) = (local.rank, index.numel());
        let [num_rows, per_row] = rows_and_width(index);
        let (num_experts, here) = local.label("e");
        let index = flatten(&index.contiguous(rank)?);
        let line = |n: usize| LocalTensor::alloc(rank, DType::I64, &[n]);
        let [mut order, mut row, mut inverse_order] = [line(count)?, line(count)?, line(count)?];
        let mut starts = line(here.len() + 1)?;
        let scalars = [here.start, num_experts, per_row.max(1)].map(|n| Scalar::Int(n as i64));
        launch(
            rank,
            &SORT_BY_GROUP,
            &[&index],
            &mut [&mut order, &mut row, &mut inverse_order, &mut starts],
            &scalars,
        )?;
        Ok(TokenExpertPairs { rank, order, row, inverse_order, starts, num_rows, num_experts })
    }

    /// Pairs that were received in some order, each with a row of its own, of `num_experts` experts in all.
    pub(super) fn received(
        rank: &'a Rank,
        order: &SortedOrder,
        num_experts: usize,
    ) -> Result<TokenExpertPairs<'a>> {
        let upload = |numbers: &[i64]| LocalTensor::upload(rank, &[numbers.len()], numbers);
        let (sorted, inverse_order) = (upload(&order.order)?, upload(&order.inverse_order)?);
        let (row, starts) = (sorted.clone(), upload(&order.starts)?);
        let num_rows = order.order.len();
        Ok(TokenExpertPairs { rank, order: sorted, row, inverse_order, starts, num_rows, num_experts })
    }

    /// The number of pairs of each expert that the pairs are sorted by. Waits for the device.
    pub(super) fn counts(&self) -> Result<Vec<i64>> {
        let starts: Vec<i64> = self.starts.download(self.rank, self.starts.numel())?;
        Ok(starts.windows(2).map(|pair| pair[1] - pair[0]).collect())
    }

    /// The rank that computes the pairs.
    pub(super) fn rank(&self) -> &'a Rank {
        self.rank
    }

    /// The number of pairs.
    pub(super) fn count(&self) -> usize {
        self.order.numel()
    }

    /// The row of a matrix for each pair, in sorted order.
    pub(super) fn gather_rows(&self, x: &LocalTensor) -> Result<LocalTensor> {
        self.gather(x, &self.row)
    }

    /// Reorders one number per pair from the order of rows to sorted order.
    pub(super) fn permute(&self, p: &LocalTensor) -> Result<LocalTensor> {
        let column = flatten(&p.contiguous(self.rank)?);
        self.gather(&column.with_view(column.view.unsqueeze(1)), &self.order)
    }

    /// Reorders one number per pair from sorted order to the order of rows.
    pub(super) fn unpermute(&self, p: &LocalTensor) -> Result<LocalTensor> {
        self.gather(p, &self.inverse_order)
    }

    fn gather(&self, x: &LocalTensor, index: &LocalTensor) -> Result<LocalTensor> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let mut y = LocalTensor::alloc(self.rank, x.dtype, &[1, index.numel(), width])?;
        let x = x.with_view(Strides::contiguous(&[1, n, width]).at(x.view.offset));
        let scalars = [Scalar::Int(0), Scalar::Int(n as i64)];
        launch(self.rank, &GATHER, &[&x, index], &mut [&mut y], &scalars)?;
        Ok(y.with_view(Strides::contiguous(&[index.numel(), width])))
    }

    /// Sums the pairs of each row.
    pub(super) fn combine(&self, x: &LocalTensor, y: &mut LocalTensor) -> Result<()> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let x = x.with_view(Strides::contiguous(&[1, n, width]));
        let view = std::mem::replace(&mut y.view, Strides::contiguous(&[1, self.num_rows, width]).into());
        let scalars = [Scalar::Int(0), Scalar::Int(self.num_rows as i64)];
        launch(self.rank, &SCATTER_ADD, &[&self.row, &x], &mut [&mut *y], &scalars)?;
        y.view = view;
        Ok(())
    }

    /// Multiplies each pair with the matrix of its expert (grouped GEMM).
    pub(super) fn grouped_matmul(&self, x: &LocalTensor, w: &LocalTensor) -> Result<LocalTensor> {
        let mut y = LocalTensor::alloc(self.rank, x.dtype, &[self.count(), w.view.shape[2]])?;
        launch(self.rank, &FORWARD, &[x, w, &self.starts], &mut [&mut y], &self.scalars())?;
        Ok(y)
    }

    /// The gradients of the matrices of a grouped product.
    pub(super) fn weight_gradient(
        &self,
        x: &LocalTensor,
        dy: &LocalTensor,
        dw: &mut LocalTensor,
    ) -> Result<()> {
        launch(self.rank, &WEIGHT_GRAD, &[x, dy, &self.starts], &mut [dw], &self.scalars())
    }

    fn scalars(&self) -> [Scalar; 1] {
        [Scalar::Int(self.num_experts as i64)]
    }

    /// Joins matrices of one row per pair along their columns.
    pub(super) fn join_columns(&self, parts: &[&LocalTensor]) -> Result<LocalTensor> {
        let width = |part: &LocalTensor| part.view.shape[1];
        let (n, all) = (parts[0].view.shape[0], parts.iter().map(|part| width(part)).sum());
        let mut joined = LocalTensor::alloc(self.rank, parts[0].dtype, &[n, all])?;
        let mut start = 0;
        for part in parts {
            let at = joined.view.narrow(1, start, start + width(part));
            joined.write(self.rank, at, part)?;
            start += width(part);
        }
        Ok(joined)
    }

    /// Cuts a matrix along its columns.
    pub(super) fn split_columns<const N: usize>(
        &self,
        x: &LocalTensor,
        widths: [usize; N],
    ) -> Result<[LocalTensor; N]> {
        let mut start = 0;
        let parts = widths.map(|width| {
            let part = x.with_view(x.view.narrow(1, start, start + width));
            start += width;
            part
        });
        let mut copies = parts.clone();
        for (copy, part) in copies.iter_mut().zip(&parts) {
            *copy = part.flat(self.rank)?;
        }
        Ok(copies)
    }

    /// Runs an elementwise kernel on two tensors of one shape.
    pub(super) fn binary(&self, kernel: &Kernel, a: &LocalTensor, b: &LocalTensor) -> Result<LocalTensor> {
        let mut y = LocalTensor::alloc(self.rank, a.dtype, &a.view.shape)?;
        launch(self.rank, kernel, &[a, b], &mut [&mut y], &[])?;
        Ok(y)
    }

    /// Multiplies each row with a number.
    pub(super) fn scale_rows(&self, x: &LocalTensor, by: &LocalTensor) -> Result<LocalTensor> {
        let repeated = by.view.broadcast(&x.view.shape).expect("a column repeats to any width");
        self.binary(&MUL, x, &by.with_view(repeated))
    }

    /// The dot product of each row of a with the same row of b.
    pub(super) fn row_dots(&self, a: &LocalTensor, b: &LocalTensor) -> Result<LocalTensor> {
        let (n, width) = (a.view.shape[0], a.view.shape[1]);
        let mut y = LocalTensor::alloc(self.rank, a.dtype, &[n, 1, 1])?;
        let (a, b) = (a.with_view(a.view.unsqueeze(1)), b.with_view(b.view.unsqueeze(2)));
        debug_assert_eq!(b.view.shape[..], [n, width, 1], "both are (n, width)");
        launch(self.rank, &BATCHED_MATMUL, &[&a, &b], &mut [&mut y], &[])?;
        Ok(y.with_view(Strides::contiguous(&[n, 1])))
    }
}

/// The number of rows and the extent of the last dim.
fn rows_and_width(x: &LocalTensor) -> [usize; 2] {
    let (width, dims) = x.view.shape.split_last().expect("the signature names a last dim");
    [dims.iter().product(), *width]
}

/// A contiguous tensor as one dim.
fn flatten(x: &LocalTensor) -> LocalTensor {
    x.with_view(Strides::contiguous(&[x.numel()]).at(x.view.offset))
}

/// A tensor as a contiguous matrix of rows of its last dim.
pub(super) fn flatten_rows(rank: &Rank, x: &LocalTensor) -> Result<LocalTensor> {
    let x = x.contiguous(rank)?;
    Ok(x.with_view(Strides::contiguous(&rows_and_width(&x)).at(x.view.offset)))
}

/// A view of batched matrices, transposed.
pub(super) fn transposed(w: &LocalTensor) -> LocalTensor {
    w.with_view(w.view.permute(&[0, 2, 1]))
}
