//! `MatrixStack`: which elements of a sharded tensor are a matrix, and which part of a matrix a rank holds.

use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::placement::Placement;
use shardgrad_dist::{Axis, Error, Kind, Result};
use shardgrad_kernels::Strides;
use std::ops::Range;

/// How a tensor is made of matrices: the first dims count the matrices, the others are the rows and then the columns
/// of each matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixStack {
    pub(super) layout: Layout,
    num_stack_dims: usize,
    rows: usize,
    columns: usize,
}

impl MatrixStack {
    /// Returns the matrices of a tensor with a layout, whose elements in order are a tensor of shape `shape`: the last two
    /// dims of `shape` are the rows and columns of a matrix, the dims before them count matrices.
    ///
    /// # Errors
    /// `Kind::Shape` if `shape` has fewer than two dims or another number of elements, or if a dim of the layout holds
    /// parts of several matrices; `Kind::Layout` for a partial sum.
    pub fn new(layout: &Layout, shape: &[usize]) -> Result<MatrixStack> {
        let refuse = |why: &str| {
            let text = format!("{layout} cannot be read as matrices of shape {shape:?}: {why}");
            Error::new(Kind::Shape, text).detail(
                "help",
                "state the matrix with Param::with_file_shape, or give the parameter another optimizer",
            )
        };
        let [stack @ .., rows, columns] = shape else {
            return Err(refuse("a matrix has two dims"));
        };
        if !layout.partial().is_empty() {
            return Err(Error::new(
                Kind::Layout,
                format!("{layout} is a partial sum, which has no matrices"),
            ));
        }
        if shape.iter().product::<usize>() != layout.numel() {
            return Err(refuse("the numbers of elements differ"));
        }
        let count: usize = stack.iter().product();
        let is_prefix = |k: &usize| layout.extents()[..*k].iter().product::<usize>() == count;
        match (0..=layout.ndim()).find(is_prefix) {
            Some(num_stack_dims) => {
                Ok(MatrixStack { layout: layout.clone(), num_stack_dims, rows: *rows, columns: *columns })
            }
            None => Err(refuse("no leading dims count the matrices")),
        }
    }

    /// Returns the number of matrices.
    #[must_use]
    pub fn num_matrices(&self) -> usize {
        self.layout.extents()[..self.num_stack_dims].iter().product()
    }

    /// Returns the shape of each matrix.
    #[must_use]
    pub fn matrix_shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Returns the work for a matrix that owners are balanced by: that of the product with its own transpose.
    pub(super) fn work(&self) -> u128 {
        let (short, long) = (self.rows.min(self.columns) as u128, self.rows.max(self.columns) as u128);
        short * short * long
    }

    /// Returns the position of a matrix in the dims that count matrices.
    fn position(&self, index: usize) -> Vec<usize> {
        let mut rest = index;
        let mut position: Vec<usize> = Vec::with_capacity(self.num_stack_dims);
        for extent in self.layout.extents()[..self.num_stack_dims].iter().rev() {
            position.push(rest % extent);
            rest /= extent;
        }
        position.reverse();
        position
    }

    /// Returns the part of a matrix that a rank holds, in the dims of rows and columns; `None` if it holds nothing.
    pub(super) fn part(&self, index: usize, coordinates: &[usize]) -> Option<Vec<Range<usize>>> {
        let held = |(d, i): (usize, usize)| self.layout.range(d, coordinates).contains(&i);
        if !self.position(index).into_iter().enumerate().all(held) {
            return None;
        }
        let part: Vec<Range<usize>> =
            (self.num_stack_dims..self.layout.ndim()).map(|d| self.layout.range(d, coordinates)).collect();
        (!part.iter().any(Range::is_empty)).then_some(part)
    }

    /// Returns the view of this rank's part of a matrix in its local tensor.
    pub(super) fn local_view(&self, local: &LocalTensor, index: usize, coordinates: &[usize]) -> Strides {
        let mut view = (*local.view).clone();
        for (d, i) in self.position(index).into_iter().enumerate() {
            let start = i - self.layout.range(d, coordinates).start;
            view = view.narrow(d, start, start + 1);
        }
        view
    }

    /// Returns the shape of a whole matrix in the dims of the layout, where dims that count matrices have extent 1.
    pub(super) fn whole_shape(&self) -> Vec<usize> {
        let ones = std::iter::repeat_n(1, self.num_stack_dims);
        ones.chain(self.layout.extents()[self.num_stack_dims..].iter().copied()).collect()
    }

    /// Returns the view of a part in a whole matrix.
    pub(super) fn part_of_whole(&self, whole: &LocalTensor, part: &[Range<usize>]) -> Strides {
        let dims = part.iter().enumerate();
        dims.fold((*whole.view).clone(), |view, (d, r)| view.narrow(self.num_stack_dims + d, r.start, r.end))
    }

    /// Whether a rank sends its part of a matrix to the owner: among copies, the rank with the owner's coordinates.
    pub(super) fn is_source(&self, rank: &[usize], owner: &[usize]) -> bool {
        let mesh = self.layout.mesh();
        let is_copy = |a: &Axis| !matches!(self.layout.placement(*a), Placement::Shard(_));
        mesh.axes().filter(is_copy).all(|a| rank[usize::from(a.0)] == owner[usize::from(a.0)])
    }
}
