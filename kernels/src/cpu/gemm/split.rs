//! How a batch of products is split into tasks for the threads of a pool.

use super::BatchedMatrixRef;
use crate::cpu::Pool;
use crate::cpu::imbalance::TaskTimer;
use crate::cpu::simd::blocked_gemm::cols_in_place;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::{Element, Float};

/// Fewest operations per task: fewer do not pay for the hand-over.
pub(super) const FLOPS_MIN: usize = 1 << 20;
/// Fewest operations per thread of a product that is timed for the imbalance estimate: waking a thread may take half as long.
const TIMED_FLOPS_MIN: usize = 1 << 23;
/// Tasks per thread, for a batch of fewer products.
const TASKS_PER_THREAD_BATCHED: usize = 2;
/// Fewest rows of c per task, where c has more: two of the highest tiles.
const ROWS_MIN: usize = 28;
/// Fewest columns of c per task, where c has more: two of the widest tiles.
pub(super) const COLS_MIN: usize = 64;

/// How a batch of products is split into tasks. The split may depend on the number of threads and their imbalance, since no sum is cut.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Rows of c in one task.
    pub(super) rows: usize,
    /// Columns of c in one task.
    pub(super) cols: usize,
    /// Whole products in one task, where a product is a task.
    pub(super) products_per_task: usize,
}

impl Split {
    /// Returns the fastest split for a number of threads and tasks per thread. Every task that shares rows or columns reads those elements
    /// of a or b again, at `read_cost`.
    pub(super) fn new(
        [g, m, n, k]: [usize; 4],
        num_threads: usize,
        tasks_per_thread: usize,
        read_cost: ReadCost,
    ) -> Split {
        let flops = flops([m, n, k]);
        let tasks_max = if num_threads == 1 { 1 } else { tasks_per_thread * num_threads };
        let parts = (flops / FLOPS_MIN).min(tasks_max / g.max(1)).max(1);
        let cut = |parts: usize, row_tasks: usize| {
            let col_tasks = parts.div_ceil(row_tasks);
            let (rows, cols) = (m.div_ceil(row_tasks), n.div_ceil(col_tasks).next_multiple_of(COLS_MIN / 2));
            let fits = (row_tasks == 1 || rows >= ROWS_MIN) && (col_tasks == 1 || cols >= COLS_MIN);
            let cols = if col_tasks == 1 { n } else { cols };
            let rounds = (row_tasks * col_tasks).div_ceil(num_threads);
            let time = rounds * (rows * cols + rows * read_cost.a(cols) + cols * read_cost.b);
            fits.then_some((time, rows, cols))
        };
        // As many tasks as fit the minimum sizes.
        let best = |parts: usize| (1..=parts).filter_map(|row_tasks| cut(parts, row_tasks)).min();
        let (_, rows, cols) = (1..=parts).rev().find_map(best).unwrap_or((0, m, n));
        Split { rows, cols, products_per_task: (FLOPS_MIN / flops.max(1)).max(1) }
    }

    /// Splits a batch of products by the imbalance estimate of the pool's threads, and runs `part` on each part of c. Arguments: the thread
    /// number and its scratch memory, \[matrix, first row, first column\], \[rows, columns\].
    pub(super) fn for_each_part(
        pool: &Pool,
        dims: [usize; 4],
        read_cost: ReadCost,
        part: impl Fn((usize, &mut Scratch), [usize; 3], [usize; 2]) + Sync,
    ) {
        let [g, m, n, k] = dims;
        let (threads, imbalance) = (pool.num_threads(), pool.imbalance());
        if threads == 1 || g > 1 {
            return Split::new(dims, threads, TASKS_PER_THREAD_BATCHED, read_cost).run(pool, dims, part);
        }
        let even = Split::new(dims, threads, 1, read_cost);
        let is_timed = flops([m, n, k]) / threads >= TIMED_FLOPS_MIN && even.is_balanced([m, n], threads);
        let tasks =
            if is_timed { imbalance.tasks_per_thread_sampled() } else { imbalance.tasks_per_thread() };
        if tasks > 1 {
            return Split::new(dims, threads, tasks, read_cost).run(pool, dims, part);
        }
        if !is_timed {
            return even.run(pool, dims, part);
        }
        let timer = TaskTimer::new(imbalance, threads);
        even.run(pool, dims, |own, at, extents| timer.time(|| part(own, at, extents)));
        timer.finish();
    }

    /// Returns whether threads of equal speed finish at about the same time: one task per thread, none much smaller than the others.
    fn is_balanced(&self, [m, n]: [usize; 2], threads: usize) -> bool {
        let num_tasks = m.div_ceil(self.rows) * n.div_ceil(self.cols);
        num_tasks == threads && 100 * m * n >= 97 * threads * self.rows * self.cols
    }

    /// See [`Split::for_each_part`].
    fn run(
        &self,
        pool: &Pool,
        [g, m, n, _]: [usize; 4],
        part: impl Fn((usize, &mut Scratch), [usize; 3], [usize; 2]) + Sync,
    ) {
        let (row_parts, col_parts) = (m.div_ceil(self.rows), n.div_ceil(self.cols));
        let parts = row_parts * col_parts;
        pool.run_on_threads((g * parts).div_ceil(self.products_per_task), &|thread, task| {
            let mut scratch = pool.scratch_for(thread);
            for at in task * self.products_per_task..((task + 1) * self.products_per_task).min(g * parts) {
                let (matrix, at) = (at / parts, at % parts);
                let (row, col) = (at / col_parts * self.rows, at % col_parts * self.cols);
                let extents = [self.rows.min(m - row), self.cols.min(n - col)];
                part((thread, &mut scratch), [matrix, row, col], extents);
            }
        });
    }
}

fn flops([m, n, k]: [usize; 3]) -> usize {
    m.saturating_mul(n).saturating_mul(2 * k)
}

/// Cost for a task to read an element of an operand in place, in multiply-adds.
const COST_IN_PLACE: usize = 4;
/// Cost for a task to read an element that is packed first.
const COST_PACKING: usize = 16;

/// Cost for a task to read an element of a and of b ([`Split::new`]), in multiply-adds.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadCost {
    pub(super) b: usize,
    /// The number of columns of c up to which a is read in place.
    pub(super) in_place: usize,
}

impl ReadCost {
    /// The cost if both operands are packed.
    pub(super) const PACKED: ReadCost = ReadCost { b: COST_PACKING, in_place: 0 };

    /// The cost for FMA micro-kernels of `lanes` lanes. They pack b (reading a small b in place hardly matters) unless b is prepacked.
    pub(super) fn of<T: Float>(
        lanes: usize,
        a: &BatchedMatrixRef<'_, T>,
        c_strides: [usize; 3],
        is_packed: bool,
    ) -> ReadCost {
        let is_transposed = c_strides[1] == 1 && c_strides[2] != 1;
        let in_place = match a.strides {
            _ if T::DTYPE != T::Acc::DTYPE || is_transposed => 0,
            [_, _, 1] => usize::MAX,
            [_, 1, step] => cols_in_place(lanes, step),
            _ => 0,
        };
        ReadCost { b: if is_packed { COST_IN_PLACE } else { COST_PACKING }, in_place }
    }

    /// Returns the cost per element of a, for a task of `cols` columns. In place, each panel of columns reads the element once; packing
    /// is chosen where that would take longer.
    fn a(self, cols: usize) -> usize {
        let in_place = (COST_PACKING * cols).div_ceil(self.in_place.max(1));
        if cols <= self.in_place { in_place.clamp(COST_IN_PLACE, COST_PACKING - 1) } else { COST_PACKING }
    }
}
