//! Walking several views of one shape together: dims that allow it are merged, the innermost is a plain loop.

use crate::cpu::Pool;
use crate::strides::{Dims, Strides};
use std::ops::Range;

/// About how many elements one task handles.
const TASK: usize = 1 << 14;

/// N views of one shape, merged as far as all of them allow.
#[derive(Debug)]
pub(crate) struct Walk<const N: usize> {
    outer: Dims,
    outer_strides: [Dims; N],
    start: [usize; N],
    /// Elements of an innermost run.
    pub(crate) run: usize,
    /// Distance between neighbours of a run, per view.
    pub(crate) steps: [usize; N],
}

impl<const N: usize> Walk<N> {
    /// The merged walk over views that have the same shape.
    pub(crate) fn new(views: [&Strides; N]) -> Walk<N> {
        let mut shape = Dims::new();
        let mut strides: [Dims; N] = std::array::from_fn(|_| Dims::new());
        for d in 0..views[0].ndim() {
            let extent = views[0].shape[d];
            debug_assert!(views.iter().all(|v| v.shape[d] == extent), "views walked together have one shape");
            if extent == 1 {
                continue;
            }
            let last = shape.len().wrapping_sub(1);
            let joins = !shape.is_empty() && (0..N).all(|i| strides[i][last] == views[i].strides[d] * extent);
            if joins {
                shape[last] *= extent;
                (0..N).for_each(|i| strides[i][last] = views[i].strides[d]);
            } else {
                shape.push(extent);
                (0..N).for_each(|i| strides[i].push(views[i].strides[d]));
            }
        }
        let run = shape.pop().unwrap_or(1);
        let steps = std::array::from_fn(|i| strides[i].pop().unwrap_or(1));
        Walk { outer: shape, outer_strides: strides, start: views.map(|v| v.offset), run, steps }
    }

    /// The number of runs.
    pub(crate) fn num_runs(&self) -> usize {
        if self.run == 0 { 0 } else { self.outer.iter().product() }
    }

    /// How many runs make a task.
    fn runs_per_task(&self) -> usize {
        (TASK / self.run.max(1)).max(1)
    }

    /// Calls `visit` with where each view's run begins, for a range of runs in row-major order.
    #[inline(always)]
    pub(crate) fn runs(&self, range: Range<usize>, mut visit: impl FnMut([usize; N])) {
        if range.is_empty() {
            return;
        }
        let mut index = Dims::from_elem(0, self.outer.len());
        let (mut at, mut rest) = (self.start, range.start);
        for d in (0..self.outer.len()).rev() {
            index[d] = rest % self.outer[d];
            rest /= self.outer[d];
            (0..N).for_each(|i| at[i] += index[d] * self.outer_strides[i][d]);
        }
        for _ in range {
            visit(at);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                (0..N).for_each(|i| at[i] += self.outer_strides[i][d]);
                if index[d] < self.outer[d] {
                    break;
                }
                (0..N).for_each(|i| at[i] -= self.outer[d] * self.outer_strides[i][d]);
                index[d] = 0;
            }
        }
    }
}

/// Writes a contiguous output run by run: `fill(starts of the inputs, elements of the output, steps of the inputs)`.
/// `walk` walks the inputs; the output has their shape. Long runs are cut, so that every task has about as much to do.
pub(crate) fn each_run<T: Send, const N: usize>(
    pool: &Pool,
    walk: &Walk<N>,
    out: &mut [T],
    fill: impl Fn([usize; N], &mut [T], [usize; N]) + Sync,
) {
    if out.is_empty() {
        return;
    }
    if walk.num_runs() == 1 {
        pool.chunks(out, TASK, |task, part| {
            let at = std::array::from_fn(|i| walk.start[i] + task * TASK * walk.steps[i]);
            fill(at, part, walk.steps);
        });
        return;
    }
    let per_task = walk.runs_per_task();
    pool.chunks(out, per_task * walk.run, |task, part| {
        let first = task * per_task;
        let mut rows = part.chunks_mut(walk.run);
        walk.runs(first..(first + per_task).min(walk.num_runs()), |at| {
            fill(at, rows.next().expect("one row of the output for each run"), walk.steps);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_merge_when_all_views_allow_it() {
        let a = Strides::contiguous(&[2, 3, 4]);
        let bias = Strides::contiguous(&[4]).broadcast(&[2, 3, 4]).unwrap();
        let walk = Walk::new([&a, &a]);
        assert_eq!((walk.num_runs(), walk.run, walk.steps), (1, 24, [1, 1]));
        let walk = Walk::new([&a, &bias]);
        assert_eq!((walk.num_runs(), walk.run, walk.steps), (6, 4, [1, 1]));
        let mut seen = Vec::new();
        walk.runs(1..4, |at| seen.push(at));
        assert_eq!(seen, [[4, 0], [8, 0], [12, 0]]);
    }

    #[test]
    fn a_permuted_walk_visits_every_element() {
        let a = Strides::contiguous(&[2, 3, 4]).permute(&[2, 0, 1]);
        let walk = Walk::new([&a]);
        let mut seen = vec![0; 24];
        walk.runs(0..walk.num_runs(), |[at]| (0..walk.run).for_each(|i| seen[at + i * walk.steps[0]] += 1));
        assert!(seen.iter().all(|n| *n == 1));
    }
}
