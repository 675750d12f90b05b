//! Iteration over operands with any strides: mergeable dims are merged, and the innermost dim is visited in runs.

use crate::strides::Strides;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// The iteration order of N operands of one shape.
#[derive(Clone, Debug)]
pub(crate) struct StridedIter<const N: usize> {
    /// Extent and stride per operand, outermost first; never empty.
    dims: SmallVec<[(usize, [usize; N]); 6]>,
    start: [usize; N],
}

impl<const N: usize> StridedIter<N> {
    /// Iterates over all elements, row-major.
    #[inline]
    pub(crate) fn new(views: [&Strides; N]) -> StridedIter<N> {
        StridedIter::over(views, 0..views[0].ndim(), views.map(|v| v.offset))
    }

    /// Iterates over some dims, row-major, from given offsets.
    #[inline]
    pub(crate) fn over(views: [&Strides; N], dims: Range<usize>, start: [usize; N]) -> StridedIter<N> {
        debug_assert!(views.iter().all(|v| v.shape == views[0].shape), "the contract asks for one shape");
        let dims = dims.map(|d| (views[0].shape[d], views.map(|v| v.strides[d])));
        StridedIter::merged(dims, start)
    }

    /// Iterates over all elements in the memory order of the first operand, whatever the order of its dims.
    pub(crate) fn in_memory_order(views: [&Strides; N]) -> StridedIter<N> {
        debug_assert!(views.iter().all(|v| v.shape == views[0].shape), "the contract asks for one shape");
        let dims = (0..views[0].ndim()).map(|d| (views[0].shape[d], views.map(|v| v.strides[d])));
        let mut dims: SmallVec<[(usize, [usize; N]); 6]> = dims.collect();
        dims.sort_by_key(|(_, steps)| std::cmp::Reverse(steps[0]));
        StridedIter::merged(dims.into_iter(), views.map(|v| v.offset))
    }

    #[inline]
    fn merged(from: impl Iterator<Item = (usize, [usize; N])>, start: [usize; N]) -> StridedIter<N> {
        let mut dims: SmallVec<[(usize, [usize; N]); 6]> = SmallVec::new();
        for (extent, steps) in from.filter(|&(extent, _)| extent != 1) {
            match dims.last_mut() {
                Some((outer, outer_steps)) if (0..N).all(|n| outer_steps[n] == steps[n] * extent) => {
                    *outer *= extent;
                    *outer_steps = steps;
                }
                _ => dims.push((extent, steps)),
            }
        }
        if dims.is_empty() {
            dims = smallvec![(1, [1; N])];
        }
        StridedIter { dims, start }
    }

    /// Returns the number of elements.
    #[inline]
    pub(crate) fn numel(&self) -> usize {
        self.dims.iter().map(|&(extent, _)| extent).product()
    }

    /// Returns the merged dims: extent and stride per operand, outermost first.
    #[inline]
    pub(crate) fn dims(&self) -> &[(usize, [usize; N])] {
        &self.dims
    }

    /// Returns the strides of the innermost dim.
    #[inline]
    pub(crate) fn steps(&self) -> [usize; N] {
        self.dims[self.dims.len() - 1].1
    }

    /// Restricts the iteration to `rows` of the outermost merged dim.
    pub(crate) fn rows(&self, rows: Range<usize>) -> StridedIter<N> {
        let mut part = self.clone();
        (0..N).for_each(|n| part.start[n] += rows.start * part.dims[0].1[n]);
        part.dims[0].0 = rows.len();
        part
    }

    /// Returns the iteration with two merged dims, `first` and the innermost, fixed at index 0.
    pub(crate) fn without_dim_and_innermost(&self, first: usize) -> StridedIter<N> {
        let kept = self.dims[..self.dims.len() - 1].iter().enumerate().filter(|&(d, _)| d != first);
        StridedIter::merged(kept.map(|(_, &dim)| dim), self.start)
    }

    /// Returns the operands' offsets of element number `position`.
    #[inline]
    pub(crate) fn at(&self, mut position: usize) -> [usize; N] {
        let mut at = self.start;
        for (extent, steps) in self.dims.iter().rev() {
            let index = position % extent;
            position /= extent;
            (0..N).for_each(|n| at[n] += index * steps[n]);
        }
        at
    }

    /// Calls `run(offsets, length)` for runs along the innermost dim that cover the elements number `range` in order.
    #[inline(always)]
    pub(crate) fn for_each_run(&self, range: Range<usize>, mut run: impl FnMut([usize; N], usize)) {
        let mut runs = Runs::of(self, range);
        while runs.left > 0 {
            let (at, length) = runs.run;
            run(at, length);
            runs.advance();
        }
    }
}

/// A walk over the runs of a range of elements. Apart from what is done with a run, so that it is compiled once for each N.
struct Runs<'a, const N: usize> {
    inner: usize,
    /// All dims but the innermost.
    outer: &'a [(usize, [usize; N])],
    /// The index in each outer dim.
    indices: SmallVec<[usize; 6]>,
    /// The offsets of the first element of the row.
    row: [usize; N],
    /// The offsets of the first element of the run, and its length.
    run: ([usize; N], usize),
    /// The elements from the run on.
    left: usize,
}

impl<'a, const N: usize> Runs<'a, N> {
    fn of(iter: &'a StridedIter<N>, range: Range<usize>) -> Runs<'a, N> {
        let (outer, innermost) = iter.dims.split_at(iter.dims.len() - 1);
        let (inner, steps) = innermost[0];
        let mut runs = Runs {
            inner,
            outer,
            indices: smallvec![0; outer.len()],
            row: iter.start,
            run: (iter.start, 0),
            left: range.len(),
        };
        if range.is_empty() {
            return runs;
        }
        let (mut number, skip) =
            if outer.is_empty() { (0, range.start) } else { (range.start / inner, range.start % inner) };
        for d in (0..outer.len()).rev() {
            let (extent, steps) = outer[d];
            runs.indices[d] = number % extent;
            number /= extent;
            let index = runs.indices[d];
            (0..N).for_each(|n| runs.row[n] += index * steps[n]);
        }
        (0..N).for_each(|n| runs.run.0[n] = runs.row[n] + skip * steps[n]);
        runs.run.1 = (inner - skip).min(runs.left);
        runs
    }

    /// Goes on to the next run.
    #[inline]
    fn advance(&mut self) {
        self.left -= self.run.1;
        if self.left == 0 {
            return;
        }
        for d in (0..self.outer.len()).rev() {
            let (extent, steps) = self.outer[d];
            self.indices[d] += 1;
            (0..N).for_each(|n| self.row[n] += steps[n]);
            if self.indices[d] < extent {
                break;
            }
            self.indices[d] = 0;
            (0..N).for_each(|n| self.row[n] -= extent * steps[n]);
        }
        self.run = (self.row, self.inner.min(self.left));
    }
}

/// Returns the offset of element number `position` of a view: the plain way, for references.
pub(crate) fn element_offset(view: &Strides, mut position: usize) -> usize {
    let mut place = view.offset;
    for (extent, step) in view.shape.iter().zip(&view.strides).rev() {
        place += position % extent * step;
        position /= extent;
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visited<const N: usize>(iter: &StridedIter<N>, range: Range<usize>) -> Vec<[usize; N]> {
        let (mut all, steps) = (vec![], iter.steps());
        iter.for_each_run(range, |at, length| {
            all.extend((0..length).map(|i| std::array::from_fn::<_, N, _>(|n| at[n] + i * steps[n])));
        });
        all
    }

    #[test]
    fn runs_visit_every_element_in_row_major_order() {
        let plain = Strides::contiguous(&[3, 1, 4, 5]);
        let views = [
            plain.clone(),
            plain.narrow(2, 1, 3),
            plain.permute(&[3, 0, 2, 1]),
            plain.select(0, 2).unsqueeze(1),
        ];
        for view in &views {
            let other = Strides::contiguous(&view.shape);
            let iter = StridedIter::new([view, &other]);
            assert_eq!(iter.numel(), view.numel());
            for range in [0..view.numel(), 0..1, 3..view.numel() - 1, 7..7] {
                let expected: Vec<_> = range.clone().map(|i| [element_offset(view, i), i]).collect();
                assert_eq!(visited(&iter, range.clone()), expected);
                assert!(range.map(|i| iter.at(i)).eq(expected));
            }
        }
    }

    #[test]
    fn mergeable_dims_are_merged() {
        let view = Strides::contiguous(&[2, 3, 4, 5]);
        assert_eq!(StridedIter::new([&view]).dims(), [(120, [1])]);
        assert_eq!(StridedIter::new([&view.narrow(1, 0, 2)]).dims(), [(2, [60]), (40, [1])]);
        let transposed = view.permute(&[3, 2, 1, 0]);
        assert_eq!(StridedIter::in_memory_order([&transposed]).dims(), [(120, [1])]);
        let bias = Strides::contiguous(&[5]).broadcast(&[2, 3, 4, 5]).unwrap();
        assert_eq!(StridedIter::new([&bias, &view]).dims(), [(24, [0, 5]), (5, [1, 1])]);
        assert_eq!(StridedIter::new([&Strides::contiguous(&[])]).numel(), 1);
        assert_eq!(StridedIter::new([&Strides::contiguous(&[2, 0])]).numel(), 0);
    }

    #[test]
    fn rows_and_fixed_dims() {
        let view = Strides::contiguous(&[2, 3, 4]).narrow(2, 0, 2);
        let iter = StridedIter::new([&view]);
        assert_eq!(iter.dims(), [(6, [4]), (2, [1])]);
        assert_eq!(visited(&iter.rows(2..4), 0..4), [[8], [9], [12], [13]]);
        let transposed = StridedIter::new([&Strides::contiguous(&[2, 3, 4]).permute(&[2, 0, 1])]);
        assert_eq!(transposed.dims(), [(4, [1]), (6, [4])]);
        assert_eq!(visited(&transposed.without_dim_and_innermost(0), 0..1), [[0]]);
        let apart = StridedIter::new([&Strides::contiguous(&[2, 3, 4]).permute(&[2, 1, 0])]);
        assert_eq!(visited(&apart.without_dim_and_innermost(0), 0..3), [[0], [4], [8]]);
    }
}
