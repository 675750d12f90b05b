//! Strided operands as cuBLASLt describes them: column-major matrices, perhaps transposed.

use crate::strides::Strides;

/// A batch of matrices in the terms of cuBLASLt: column-major, perhaps transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Operand {
    /// Whether the matrix is row-major, which cuBLASLt reads as a transposed matrix.
    pub(super) transposed: bool,
    /// Elements from one column (or row, if transposed) to the next (lda).
    pub(super) leading_dim: usize,
    /// Elements from one matrix of the batch to the next.
    pub(super) batch_stride: usize,
    /// The alignment of the address in bytes, at most 256.
    pub(super) alignment: u32,
}

impl Operand {
    /// Describes a view (g, rows, columns) at an address; `None` if cuBLASLt cannot express its strides.
    pub(super) fn from_view(view: &Strides, address: u64) -> Option<Operand> {
        let ([_, rows, columns], [_, down, along]) = (dims(&view.shape), dims(&view.strides));
        let plain = leading_dim((rows, down), (columns, along));
        let plain = plain
            .map(|leading_dim| Operand { transposed: false, ..Operand::with(view, address, leading_dim) });
        plain.or_else(|| Operand::row_major(view, address))
    }

    /// Describes a view as row-major, even if it is column-major too; `None` if it is not row-major.
    pub(super) fn row_major(view: &Strides, address: u64) -> Option<Operand> {
        let ([_, rows, columns], [_, down, along]) = (dims(&view.shape), dims(&view.strides));
        leading_dim((columns, along), (rows, down))
            .map(|leading_dim| Operand::with(view, address, leading_dim))
    }

    fn with(view: &Strides, address: u64, leading_dim: usize) -> Operand {
        let [batch_stride, _, _] = dims(&view.strides);
        Operand {
            transposed: true,
            leading_dim,
            batch_stride,
            alignment: 1 << address.trailing_zeros().min(8),
        }
    }

    /// Returns the transpose, in the same memory.
    pub(super) fn transposed(self) -> Operand {
        Operand { transposed: !self.transposed, ..self }
    }
}

/// Returns the leading dimension of lines of `inner` elements at stride `near`, of which `outer` follow at stride `far`; `None` if
/// the lines are not contiguous or overlap.
fn leading_dim((inner, near): (usize, usize), (outer, far): (usize, usize)) -> Option<usize> {
    let least = inner.max(1);
    let is_expressible = (inner <= 1 || near == 1) && (outer <= 1 || far >= least);
    is_expressible.then_some(if outer <= 1 { least } else { far })
}

fn dims(list: &[usize]) -> [usize; 3] {
    list.try_into().expect("the contract asks for three dims")
}
