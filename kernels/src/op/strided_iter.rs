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
        let (inner, steps) = self.dims[self.dims.len() - 1];
        if range.is_empty() {
            return;
        }
        if self.dims.len() == 1 {
            let at = std::array::from_fn(|n| self.start[n] + range.start * steps[n]);
            return run(at, range.len());
        }
        let outer = &self.dims[..self.dims.len() - 1];
        let mut indices: SmallVec<[usize; 6]> = smallvec![0; outer.len()];
        let mut rest = range.start / inner;
        let mut at = self.start;
        for (index, (extent, steps)) in indices.iter_mut().zip(outer).rev() {
            *index = rest % extent;
            rest /= extent;
            (0..N).for_each(|n| at[n] += *index * steps[n]);
        }
        let (mut left, mut skip) = (range.len(), range.start % inner);
        loop {
            let length = (inner - skip).min(left);
            run(std::array::from_fn(|n| at[n] + skip * steps[n]), length);
            left -= length;
            skip = 0;
            if left == 0 {
                return;
            }
            for (index, (extent, steps)) in indices.iter_mut().zip(outer).rev() {
                *index += 1;
                (0..N).for_each(|n| at[n] += steps[n]);
                if *index < *extent {
                    break;
                }
                *index = 0;
                (0..N).for_each(|n| at[n] -= extent * steps[n]);
            }
        }
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
