//! How a stack of products is cut into tasks.

use super::BatchedMatrix;
use crate::cpu::Pool;
use crate::cpu::imbalance::TaskTimer;
use crate::cpu::simd::blocked_gemm::cols_in_place;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::{Element, Float};

/// Below so many operations a task is not worth its hand-over.
pub(super) const OPERATIONS_MIN: usize = 1 << 20;
/// Below so many operations a thread a product says nothing about the imbalance of threads: to wake one may take half as long.
const WATCHED_MIN: usize = 1 << 23;
/// Tasks a thread, where a stack has fewer products than that.
const TASKS_OF_STACK: usize = 2;
/// No task has fewer rows of c, where there are more: two of the highest tiles.
const ROWS_MIN: usize = 28;
/// No task has fewer columns of c, where there are more: two of the widest tiles.
pub(super) const COLS_MIN: usize = 64;

/// How a stack of products is cut into tasks. It may depend on the number of threads and their imbalance, since no sum is cut.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Rows of c in one task.
    pub(super) rows: usize,
    /// Columns of c in one task.
    pub(super) cols: usize,
    /// Whole products in one task, where a product is a task.
    pub(super) together: usize,
}

impl Split {
    /// The cut of a product, by so many threads with so many tasks each, that should be done first. Elements of a and of b are
    /// read by all tasks that share their rows or their columns.
    pub(super) fn of(
        [g, m, n, k]: [usize; 4],
        num_threads: usize,
        tasks_per_thread: usize,
        read_cost: ReadCost,
    ) -> Split {
        let operations = operations([m, n, k]);
        let tasks_max = if num_threads == 1 { 1 } else { tasks_per_thread * num_threads };
        let parts = (operations / OPERATIONS_MIN).min(tasks_max / g.max(1)).max(1);
        let cut = |parts: usize, row_tasks: usize| {
            let col_tasks = parts.div_ceil(row_tasks);
            let (rows, cols) = (m.div_ceil(row_tasks), n.div_ceil(col_tasks).next_multiple_of(COLS_MIN / 2));
            let fits = (row_tasks == 1 || rows >= ROWS_MIN) && (col_tasks == 1 || cols >= COLS_MIN);
            let cols = if col_tasks == 1 { n } else { cols };
            let rounds = (row_tasks * col_tasks).div_ceil(num_threads);
            let time = rounds * (rows * cols + rows * read_cost.a(cols) + cols * read_cost.b);
            fits.then_some((time, rows, cols))
        };
        // As many tasks as fit: none may be too small.
        let best = |parts: usize| (1..=parts).filter_map(|row_tasks| cut(parts, row_tasks)).min();
        let (_, rows, cols) = (1..=parts).rev().find_map(best).unwrap_or((0, m, n));
        Split { rows, cols, together: (OPERATIONS_MIN / operations.max(1)).max(1) }
    }

    /// FreeList a stack of products as the imbalance of the pool's threads suggests, and runs `part` on each part of c: the thread that does
    /// it and scratch memory of it, which matrix, its first row and column, and how many it has of both.
    pub(super) fn each(
        pool: &Pool,
        dims: [usize; 4],
        read_cost: ReadCost,
        part: impl Fn((usize, &mut Scratch), [usize; 3], [usize; 2]) + Sync,
    ) {
        let [g, m, n, k] = dims;
        let (threads, imbalance) = (pool.num_threads(), pool.imbalance());
        if threads == 1 || g > 1 {
            return Split::of(dims, threads, TASKS_OF_STACK, read_cost).run(pool, dims, part);
        }
        let even = Split::of(dims, threads, 1, read_cost);
        let is_watched = operations([m, n, k]) / threads >= WATCHED_MIN && even.is_fair([m, n], threads);
        let tasks =
            if is_watched { imbalance.tasks_per_thread_sampled() } else { imbalance.tasks_per_thread() };
        if tasks > 1 {
            return Split::of(dims, threads, tasks, read_cost).run(pool, dims, part);
        }
        if !is_watched {
            return even.run(pool, dims, part);
        }
        let watch = TaskTimer::new(imbalance, threads);
        even.run(pool, dims, |own, at, extents| watch.time(|| part(own, at, extents)));
        watch.end();
    }

    /// Whether threads that keep imbalance are done with it at about the same time: a task for each, none much smaller than others.
    fn is_fair(&self, [m, n]: [usize; 2], threads: usize) -> bool {
        let num_tasks = m.div_ceil(self.rows) * n.div_ceil(self.cols);
        num_tasks == threads && 100 * m * n >= 97 * threads * self.rows * self.cols
    }

    /// See [`Split::each`].
    fn run(
        &self,
        pool: &Pool,
        [g, m, n, _]: [usize; 4],
        part: impl Fn((usize, &mut Scratch), [usize; 3], [usize; 2]) + Sync,
    ) {
        let (row_parts, col_parts) = (m.div_ceil(self.rows), n.div_ceil(self.cols));
        let parts = row_parts * col_parts;
        pool.run_on_threads((g * parts).div_ceil(self.together), &|thread, task| {
            let mut scratch = pool.scratch_of(thread);
            for at in task * self.together..((task + 1) * self.together).min(g * parts) {
                let (matrix, at) = (at / parts, at % parts);
                let (row, col) = (at / col_parts * self.rows, at % col_parts * self.cols);
                let extents = [self.rows.min(m - row), self.cols.min(n - col)];
                part((thread, &mut scratch), [matrix, row, col], extents);
            }
        });
    }
}

fn operations([m, n, k]: [usize; 3]) -> usize {
    m.saturating_mul(n).saturating_mul(2 * k)
}

/// What it costs a task to read an element of an operand where it lies, in multiply-adds.
const IN_PLACE: usize = 4;
/// The same if it is packed first.
const PACKING: usize = 16;

/// What it costs a task to read an element of a and of b (see [`Split::of`]), in multiply-adds.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadCost {
    pub(super) b: usize,
    /// Up to so many columns of c, a is read where it lies.
    pub(super) in_place: usize,
}

impl ReadCost {
    /// Where both operands are packed.
    pub(super) const PACKED: ReadCost = ReadCost { b: PACKING, in_place: 0 };

    /// Of tiles of widened operands, that many lanes wide. They pack b, where it is not so small that it hardly counts, unless they
    /// find it packed.
    pub(super) fn of<T: Float>(
        lanes: usize,
        a: &BatchedMatrix<'_, T>,
        c_strides: [usize; 3],
        is_packed: bool,
    ) -> ReadCost {
        let is_turned = c_strides[1] == 1 && c_strides[2] != 1;
        let in_place = match a.strides {
            _ if T::DTYPE != T::Acc::DTYPE || is_turned => 0,
            [_, _, 1] => usize::MAX,
            [_, 1, step] => cols_in_place(lanes, step),
            _ => 0,
        };
        ReadCost { b: if is_packed { IN_PLACE } else { PACKING }, in_place }
    }

    /// For an element of a, by a task of so many columns. In place it is read once for each strip of columns, and packed where
    /// that would take longer.
    fn a(self, cols: usize) -> usize {
        let in_place = (PACKING * cols).div_ceil(self.in_place.max(1));
        if cols <= self.in_place { in_place.clamp(IN_PLACE, PACKING - 1) } else { PACKING }
    }
}
