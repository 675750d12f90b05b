//! Cuts of a launch into units and tasks.

use crate::op::gated_scan::Shape;
use crate::op::rows::rows_per_task;
use smallvec::SmallVec;
use std::ops::Range;

/// Lanes of a packed row. Rows of fewer lanes are packed.
pub(super) const LANES: usize = 16;
/// Units of few lanes, times their lanes, that keep all cores busy; a unit of fewer steps is not worth its summary.
const PACKED_BUSY: (usize, usize) = (128, 1024);
/// Fewer units of many lanes than the first number are cut into as many as the second; a unit of fewer elements than the third is not
/// worth its summary.
const ROWS_BUSY: (usize, usize, usize) = (4, 8, 1 << 15);

/// The cut of a launch into units, in memory order. Depends on the shape only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) shape: Shape,
    /// The steps of a unit; the last unit of an outer index may have fewer.
    chunk: usize,
    /// The units of an outer index.
    pub(super) chunks: usize,
}

/// A run of steps of an outer index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub(super) number: usize,
    /// The number of its first row in memory.
    pub(super) first_row: usize,
    pub(super) num_steps: usize,
    /// Whether it begins with the first step of the outer index.
    pub(super) is_first: bool,
}

/// A task: units, and their rows of the outputs.
pub(super) struct Task<'a, T, const N: usize> {
    pub(super) units: Range<usize>,
    pub(super) outs: [&'a mut [T]; N],
}

impl Cut {
    /// Returns the cut for a recurrence, which reads the operands of cut rows twice.
    pub(super) fn new(shape: Shape) -> Cut {
        let Shape { outer, steps, inner } = shape;
        if inner < LANES {
            return Cut::into_chunks(
                shape,
                PACKED_BUSY.0.div_ceil(shape.lanes().max(1)).min(steps / PACKED_BUSY.1),
            );
        }
        if outer >= ROWS_BUSY.0 { Cut::into_chunks(shape, 1) } else { Cut::for_summary(shape) }
    }

    /// Returns the cut for a summary, which reads its operands once.
    pub(super) fn for_summary(shape: Shape) -> Cut {
        let Shape { outer, steps, inner } = shape;
        if inner < LANES {
            return Cut::new(shape);
        }
        Cut::into_chunks(shape, ROWS_BUSY.1.div_ceil(outer.max(1)).min(steps * inner / ROWS_BUSY.2))
    }

    /// Returns the cut of each outer index into `count` units, at least one.
    fn into_chunks(shape: Shape, count: usize) -> Cut {
        let chunk = shape.steps.div_ceil(count.max(1)).max(1);
        Cut { shape, chunk, chunks: shape.steps.div_ceil(chunk) }
    }

    pub(super) fn num_units(self) -> usize {
        self.shape.outer * self.chunks
    }

    pub(super) fn unit(self, number: usize) -> Unit {
        let (outer, first_step) = (number / self.chunks, number % self.chunks * self.chunk);
        let num_steps = self.chunk.min(self.shape.steps - first_step);
        let first_row = outer * self.shape.steps + first_step;
        Unit { number, first_row, num_steps, is_first: first_step == 0 }
    }

    /// Returns units that are advanced together, at most [`LANES`].
    pub(super) fn units(self, numbers: Range<usize>) -> SmallVec<[Unit; LANES]> {
        numbers.map(|number| self.unit(number)).collect()
    }

    /// Returns the number of the row after the units before `number`.
    pub(super) fn row_after(self, number: usize) -> usize {
        if number == self.num_units() {
            self.shape.outer * self.shape.steps
        } else {
            self.unit(number).first_row
        }
    }

    /// Returns the units that are advanced together: those that a packed row has room for.
    pub(super) fn units_together(self) -> usize {
        (LANES / self.shape.inner).max(1)
    }

    /// Returns the units of a task.
    pub(super) fn units_per_task(self) -> usize {
        rows_per_task(self.chunk * self.shape.inner).next_multiple_of(self.units_together())
    }

    /// Cuts the outputs into tasks of some units.
    pub(super) fn tasks<T, const N: usize>(self, outs: [&mut [T]; N]) -> Vec<Task<'_, T, N>> {
        let mut rest = outs;
        let starts = (0..self.num_units()).step_by(self.units_per_task());
        let task = |first: usize| {
            let units = first..(first + self.units_per_task()).min(self.num_units());
            let numel = (self.row_after(units.end) - self.row_after(first)) * self.shape.inner;
            let outs = rest.each_mut().map(|rest| {
                let (part, after) = std::mem::take(rest).split_at_mut(numel);
                *rest = after;
                part
            });
            Task { units, outs }
        };
        starts.map(task).collect()
    }
}
