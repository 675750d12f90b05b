//! Fast paths on the CPU. A launch is cut into units, each a run of steps of the lanes of one outer index.
//!
//! The rows of a unit, its lanes at one step, are neighbours in memory. Rows of many lanes are computed in place. Rows of few lanes are
//! packed: blocks of steps of several units are transposed into f64 rows as wide as all their lanes.

use super::{BACKWARD, SCAN, SUMMARY, Shape, finite, is_reversed};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{no_float, operands, operands_and_last, read, rows_per_task, write};
use smallvec::SmallVec;
use std::ops::Range;

/// Rows of fewer lanes are packed, into rows of at least as many.
const LANES_MIN: usize = 16;
/// Lanes that are advanced together, at most: their states stay in the nearest caches.
const LANES_MAX: usize = 2048;
/// Steps of a packed block.
const PACKED_STEPS: usize = 32;
/// The lanes of a packed row, at most.
const PACKED_LANES: usize = 2 * LANES_MIN;
/// Units of few lanes, times their lanes, that keep all cores busy; a unit of fewer steps is not worth its summary.
const PACKED_BUSY: (usize, usize) = (128, 1024);
/// Fewer units of many lanes than the first number are cut into as many as the second; a unit of fewer elements than the third is not
/// worth its summary.
const ROWS_BUSY: (usize, usize, usize) = (4, 8, 1 << 15);

/// The cut of a launch into units, in memory order. Depends on the shape only.
#[derive(Clone, Copy, Debug)]
struct Cut {
    shape: Shape,
    /// The steps of a unit; the last unit of an outer index may have fewer.
    chunk: usize,
    /// The units of an outer index.
    chunks: usize,
}

/// A run of steps of an outer index.
#[derive(Clone, Copy, Debug)]
struct Unit {
    number: usize,
    /// The number of its first row in memory.
    first_row: usize,
    num_steps: usize,
    /// Whether it begins with the first step of the outer index.
    is_first: bool,
}

impl Cut {
    /// Returns the cut for a recurrence, which reads the operands of cut rows twice.
    fn new(shape: Shape) -> Cut {
        let Shape { outer, steps, inner } = shape;
        if inner < LANES_MIN {
            return Cut::into_chunks(
                shape,
                PACKED_BUSY.0.div_ceil(shape.lanes().max(1)).min(steps / PACKED_BUSY.1),
            );
        }
        if outer >= ROWS_BUSY.0 { Cut::into_chunks(shape, 1) } else { Cut::for_summary(shape) }
    }

    /// Returns the cut for a summary, which reads its operands once.
    fn for_summary(shape: Shape) -> Cut {
        let Shape { outer, steps, inner } = shape;
        if inner < LANES_MIN {
            return Cut::new(shape);
        }
        Cut::into_chunks(shape, ROWS_BUSY.1.div_ceil(outer.max(1)).min(steps * inner / ROWS_BUSY.2))
    }

    /// Returns the cut of each outer index into `count` units, at least one.
    fn into_chunks(shape: Shape, count: usize) -> Cut {
        let chunk = shape.steps.div_ceil(count.max(1)).max(1);
        Cut { shape, chunk, chunks: shape.steps.div_ceil(chunk) }
    }

    fn num_units(self) -> usize {
        self.shape.outer * self.chunks
    }

    fn unit(self, number: usize) -> Unit {
        let (outer, first_step) = (number / self.chunks, number % self.chunks * self.chunk);
        let num_steps = self.chunk.min(self.shape.steps - first_step);
        let first_row = outer * self.shape.steps + first_step;
        Unit { number, first_row, num_steps, is_first: first_step == 0 }
    }

    /// Returns the number of the row after the units before `number`.
    fn row_after(self, number: usize) -> usize {
        if number == self.num_units() {
            self.shape.outer * self.shape.steps
        } else {
            self.unit(number).first_row
        }
    }

    /// Returns the units that are advanced together.
    fn units_together(self) -> usize {
        LANES_MIN.div_ceil(self.shape.inner)
    }

    /// Returns the units of a task.
    fn units_per_task(self) -> usize {
        let (count, together) = (rows_per_task(self.chunk * self.shape.inner), self.units_together());
        count.next_multiple_of(together)
    }
}

/// A recurrence on I operands with N results and M numbers of state: one step of one lane.
trait Recurrence<const I: usize, const N: usize, const M: usize>: Copy + Sync {
    /// Returns the next state and the results. On a gate of 1 and zeros otherwise, the state stays.
    fn step(self, operands: [f64; I], state: [f64; M]) -> ([f64; M], [f64; N]);
}

#[derive(Clone, Copy)]
struct Scan;

impl Recurrence<2, 1, 1> for Scan {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [state]: [f64; 1]) -> ([f64; 1], [f64; 1]) {
        let value = a * state + x;
        ([value], [value])
    }
}

#[derive(Clone, Copy)]
struct ReversedScan;

impl Recurrence<2, 1, 1> for ReversedScan {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [state]: [f64; 1]) -> ([f64; 1], [f64; 1]) {
        let value = state + x;
        ([a * value], [value])
    }
}

/// On a, g and the h before the step.
#[derive(Clone, Copy)]
struct Backward;

impl Recurrence<3, 2, 1> for Backward {
    #[inline(always)]
    fn step(self, [a, g, before]: [f64; 3], [state]: [f64; 1]) -> ([f64; 1], [f64; 2]) {
        let slope = g + state;
        ([a * slope], [slope * before, slope])
    }
}

/// The summary of [`Scan`]: its state is p and c.
#[derive(Clone, Copy)]
struct Summary;

impl Recurrence<2, 0, 2> for Summary {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [p, c]: [f64; 2]) -> ([f64; 2], [f64; 0]) {
        ([p * a, a * c + x], [])
    }
}

/// The summary of [`ReversedScan`].
#[derive(Clone, Copy)]
struct ReversedSummary;

impl Recurrence<2, 0, 2> for ReversedSummary {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [p, c]: [f64; 2]) -> ([f64; 2], [f64; 0]) {
        ([p * a, a * (c + x)], [])
    }
}

/// The operands of a recurrence.
#[derive(Clone, Copy)]
struct Operands<'a, T, const I: usize> {
    all: [&'a [T]; I],
    /// Whether the last operand is read one step before: before the first step `first` (outer, inner), or zero.
    is_last_before: bool,
    first: Option<&'a [f64]>,
    reversed: bool,
}

impl<'a, T: Float, const I: usize> Operands<'a, T, I> {
    fn new(all: [&'a [T]; I], reversed: bool) -> Operands<'a, T, I> {
        Operands { all, is_last_before: false, first: None, reversed }
    }

    /// Returns the distance from an element to the one that operand `k` is read at.
    #[inline(always)]
    fn distance(&self, k: usize, shape: Shape) -> usize {
        if self.is_last_before && k + 1 == I { shape.inner } else { 0 }
    }

    /// Returns the last operand before the first step, of the lane of the element `at`.
    #[inline(always)]
    fn first(&self, shape: Shape, at: usize) -> f64 {
        let lane = || at / (shape.steps * shape.inner) * shape.inner + at % shape.inner;
        self.first.map_or(0.0, |first| first[lane()])
    }
}

/// A task: units, and their rows of the outputs.
struct Task<'a, T, const N: usize> {
    units: Range<usize>,
    outs: [&'a mut [T]; N],
}

/// Rounds to the accumulator, then to the type: a conversion that vectorizes, where one from f64 to 16 bits does not.
#[inline(always)]
fn rounded<T: Float>(x: f64) -> T {
    T::narrow(<T::Acc as Real>::lit(x))
}

/// Advances all lanes of a task: calls `start` with the states of some lanes of a unit before its steps, and `finish` after them.
#[inline(always)]
fn advance<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    start: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
    finish: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
) {
    if cut.shape.inner < LANES_MIN {
        advance_packed(cut, operands, recurrence, task, start, finish);
    } else {
        advance_rows(cut, operands, recurrence, task, start, finish);
    }
}

/// [`advance`] on the rows of units, one unit after another.
#[inline(always)]
fn advance_rows<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    mut start: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
    mut finish: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
) {
    let (shape, inner, first_row) = (cut.shape, cut.shape.inner, cut.row_after(task.units.start));
    let mut states = [[0.0; LANES_MAX]; M];
    for unit in task.units.clone().map(|unit| cut.unit(unit)) {
        for lane in (0..inner).step_by(LANES_MAX) {
            let lanes = lane..(lane + LANES_MAX).min(inner);
            let width = lanes.len();
            let mut states = states.each_mut().map(|state| &mut state[..width]);
            start(unit.number, lanes.clone(), states.each_mut().map(|state| &mut **state));
            for i in 0..unit.num_steps {
                let step = if operands.reversed { unit.num_steps - 1 - i } else { i };
                let row = unit.first_row + step;
                let (at, to) = (row * inner + lane, (row - first_row) * inner + lane);
                let before_first = unit.is_first && step == 0 && operands.is_last_before;
                let rows: [&[T]; I] = std::array::from_fn(
                    #[inline(always)]
                    |k| {
                        let distance = if before_first { 0 } else { operands.distance(k, shape) };
                        &operands.all[k][at - distance..][..width]
                    },
                );
                let mut out = task.outs.each_mut().map(
                    #[inline(always)]
                    |out| &mut out[to..][..width],
                );
                for i in 0..width {
                    let mut values = rows.map(
                        #[inline(always)]
                        |row| row[i].widen().to_f64(),
                    );
                    if before_first {
                        values[I - 1] = operands.first(shape, at + i);
                    }
                    let state = states.each_ref().map(
                        #[inline(always)]
                        |state| state[i],
                    );
                    let (next, results) = recurrence.step(values, state);
                    (0..M).for_each(|m| states[m][i] = next[m]);
                    (0..N).for_each(|n| out[n][i] = rounded(results[n]));
                }
            }
            finish(unit.number, lanes, states);
        }
    }
}

/// Widens one lane of rows into packed rows: lane by lane, since a loop over the few lanes of a row costs more than its elements.
#[inline(always)]
fn widen_lane<'a, T: Float>(
    rows: impl Iterator<Item = (&'a mut [f64; PACKED_LANES], &'a [T])>,
    lane: usize,
    column: usize,
) {
    for (to, from) in rows {
        to[column + lane] = from[lane].widen().to_f64();
    }
}

/// Rounds one lane of packed rows.
#[inline(always)]
fn round_lane<'a, T: Float>(
    rows: impl Iterator<Item = (&'a mut [T], &'a [f64; PACKED_LANES])>,
    lane: usize,
    column: usize,
) {
    for (to, from) in rows {
        to[lane] = rounded(from[column + lane]);
    }
}

/// Some steps of a unit in the order of the recurrence: consecutive rows, reversed or not.
#[derive(Clone, Copy)]
struct Block {
    first_row: usize,
    num_rows: usize,
    /// Whether the first row is the first step of its outer index.
    is_first: bool,
    reversed: bool,
}

impl Block {
    /// Returns the block of a unit from position `begin` of its steps on, of at most [`PACKED_STEPS`] rows.
    #[inline(always)]
    fn of(unit: &Unit, begin: usize, reversed: bool) -> Block {
        let num_rows = unit.num_steps.saturating_sub(begin).min(PACKED_STEPS);
        let first = if reversed { unit.num_steps.saturating_sub(begin + num_rows) } else { begin };
        Block { first_row: unit.first_row + first, num_rows, is_first: unit.is_first && first == 0, reversed }
    }

    /// Packs operand `k` of these rows as columns from `column` on, and pads with the operand on which the state stays.
    #[inline(always)]
    fn pack<T: Float, const I: usize>(
        self,
        (k, operands): (usize, &Operands<'_, T, I>),
        shape: Shape,
        column: usize,
        packed: &mut [[f64; PACKED_LANES]; PACKED_STEPS],
    ) {
        let (inner, distance) = (shape.inner, operands.distance(k, shape));
        let (rows, padding) = packed.split_at_mut(self.num_rows);
        padding.iter_mut().for_each(|row| row[column..][..inner].fill(if k == 0 { 1.0 } else { 0.0 }));
        // Before the first step of an outer index is no row.
        let has_edge = distance > 0 && self.is_first && self.num_rows > 0;
        let rows = match (has_edge, self.reversed) {
            (false, _) => rows,
            (true, reversed) => {
                let (edge, rows) = match reversed {
                    true => rows.split_last_mut(),
                    false => rows.split_first_mut(),
                }
                .expect("the block has rows");
                for (i, to) in edge[column..][..inner].iter_mut().enumerate() {
                    *to = operands.first(shape, self.first_row * inner + i);
                }
                rows
            }
        };
        let begin = (self.first_row + usize::from(has_edge)) * inner - distance;
        let from = &operands.all[k][begin..][..rows.len() * inner];
        for lane in 0..inner {
            let from = from.chunks_exact(inner);
            if self.reversed {
                widen_lane(rows.iter_mut().zip(from.rev()), lane, column);
            } else {
                widen_lane(rows.iter_mut().zip(from), lane, column);
            }
        }
    }

    /// Rounds packed results into the rows of an output that begins at `first_row`.
    #[inline(always)]
    fn unpack<T: Float>(
        self,
        packed: &[[f64; PACKED_LANES]; PACKED_STEPS],
        (inner, column): (usize, usize),
        (out, first_row): (&mut [T], usize),
    ) {
        let out = &mut out[(self.first_row - first_row) * inner..][..self.num_rows * inner];
        for lane in 0..inner {
            let rows = out.chunks_exact_mut(inner);
            if self.reversed {
                round_lane(rows.rev().zip(packed), lane, column);
            } else {
                round_lane(rows.zip(packed), lane, column);
            }
        }
    }
}

/// [`advance`] on blocks of steps of several units, packed into f64 rows: a single lane would wait for its own multiplications.
#[inline(always)]
fn advance_packed<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    mut start: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
    mut finish: impl FnMut(usize, Range<usize>, [&mut [f64]; M]),
) {
    let (shape, inner, first_row) = (cut.shape, cut.shape.inner, cut.row_after(task.units.start));
    let mut packed = [[[0.0; PACKED_LANES]; PACKED_STEPS]; I];
    let mut results = [[[0.0; PACKED_LANES]; PACKED_STEPS]; N];
    let mut states = [[0.0; PACKED_LANES]; M];
    for first in task.units.clone().step_by(cut.units_together()) {
        let numbers = first..(first + cut.units_together()).min(task.units.end);
        let group: SmallVec<[Unit; LANES_MIN]> = numbers.map(|number| cut.unit(number)).collect();
        for (u, unit) in group.iter().enumerate() {
            start(unit.number, 0..inner, states.each_mut().map(|state| &mut state[u * inner..][..inner]));
        }
        let num_steps = group.iter().map(|unit| unit.num_steps).max().unwrap_or(0);
        for begin in (0..num_steps).step_by(PACKED_STEPS) {
            for (u, unit) in group.iter().enumerate() {
                let block = Block::of(unit, begin, operands.reversed);
                for (k, packed) in packed.iter_mut().enumerate() {
                    block.pack((k, &operands), shape, u * inner, packed);
                }
            }
            for i in 0..PACKED_STEPS {
                let rows = packed.each_ref().map(|packed| &packed[i]);
                let mut out = results.each_mut().map(|results| &mut results[i]);
                for lane in 0..PACKED_LANES {
                    let values = rows.map(
                        #[inline(always)]
                        |row| row[lane],
                    );
                    let state = states.each_ref().map(
                        #[inline(always)]
                        |state| state[lane],
                    );
                    let (next, found) = recurrence.step(values, state);
                    (0..M).for_each(|m| states[m][lane] = next[m]);
                    (0..N).for_each(|n| out[n][lane] = found[n]);
                }
            }
            for (u, unit) in group.iter().enumerate() {
                let block = Block::of(unit, begin, operands.reversed);
                for (results, out) in results.iter().zip(&mut task.outs) {
                    block.unpack(results, (inner, u * inner), (out, first_row));
                }
            }
        }
        for (u, unit) in group.iter().enumerate() {
            finish(unit.number, 0..inner, states.each_mut().map(|state| &mut state[u * inner..][..inner]));
        }
    }
}

/// Cuts the outputs into tasks of some units.
fn tasks<T, const N: usize>(cut: Cut, outs: [&mut [T]; N]) -> Vec<Task<'_, T, N>> {
    let mut rest = outs;
    let starts = (0..cut.num_units()).step_by(cut.units_per_task());
    let task = |first: usize| {
        let units = first..(first + cut.units_per_task()).min(cut.num_units());
        let numel = (cut.row_after(units.end) - cut.row_after(first)) * cut.shape.inner;
        let outs = rest.each_mut().map(|rest| {
            let (part, after) = std::mem::take(rest).split_at_mut(numel);
            *rest = after;
            part
        });
        Task { units, outs }
    };
    starts.map(task).collect()
}

/// Runs a recurrence over all units from the carries before them (unit, inner), or zero.
fn run<T: Float, const I: usize, const N: usize>(
    pool: &Pool,
    cut: Cut,
    operands: Operands<'_, T, I>,
    carries: Option<&[f64]>,
    outs: [&mut [T]; N],
    recurrence: impl Recurrence<I, N, 1>,
) {
    let inner = cut.shape.inner;
    pool.chunks(&mut tasks(cut, outs), 1, |_, tasks| {
        for task in tasks {
            vectorized(
                #[inline(always)]
                || {
                    let start = |unit: usize, lanes: Range<usize>, [state]: [&mut [f64]; 1]| match carries {
                        Some(carries) => state.copy_from_slice(&carries[unit * inner..][lanes]),
                        None => state.fill(0.0),
                    };
                    advance(cut, operands, recurrence, task, start, |_, _, _| ());
                },
            );
        }
    });
}

/// Returns the summaries of all units: p and c (unit, 2, inner).
fn summaries<T: Float>(
    pool: &Pool,
    cut: Cut,
    operands: Operands<'_, T, 2>,
    recurrence: impl Recurrence<2, 0, 2>,
) -> Vec<f64> {
    let inner = cut.shape.inner;
    let mut all = filled_or_unwind(0.0, cut.num_units() * 2 * inner);
    let per_task = cut.units_per_task();
    pool.chunks(&mut all, per_task * 2 * inner, |i, all| {
        let units = i * per_task..((i + 1) * per_task).min(cut.num_units());
        let first = units.start;
        let mut task = Task { units, outs: [] };
        vectorized(
            #[inline(always)]
            || {
                let start = |_: usize, _: Range<usize>, [p, c]: [&mut [f64]; 2]| {
                    p.fill(1.0);
                    c.fill(0.0);
                };
                let finish = |unit: usize, lanes: Range<usize>, [p, c]: [&mut [f64]; 2]| {
                    let (all_p, all_c) = all[(unit - first) * 2 * inner..][..2 * inner].split_at_mut(inner);
                    all_c[lanes.clone()].copy_from_slice(c);
                    all_p[lanes].iter_mut().zip(p).for_each(|(to, p)| *to = finite(*p));
                };
                advance(cut, operands, recurrence, &mut task, start, finish);
            },
        );
    });
    all
}

/// [`summaries`] in the order of the operands.
fn summaries_in_order<T: Float>(pool: &Pool, cut: Cut, operands: Operands<'_, T, 2>) -> Vec<f64> {
    match operands.reversed {
        true => summaries(pool, cut, operands, ReversedSummary),
        false => summaries(pool, cut, operands, Summary),
    }
}

/// Returns the carries before all units (unit, inner), from those before the rows (outer, inner).
fn carries_of<T: Float>(
    pool: &Pool,
    cut: Cut,
    operands: Operands<'_, T, 2>,
    carry: Option<&[f64]>,
) -> Vec<f64> {
    let (inner, chunks) = (cut.shape.inner, cut.chunks);
    let summaries = summaries_in_order(pool, cut, operands);
    let mut carries = filled_or_unwind(0.0, cut.num_units() * inner);
    for outer in 0..cut.shape.outer {
        for i in 0..inner {
            let mut state = carry.map_or(0.0, |carry| carry[outer * inner + i]);
            for number in 0..chunks {
                let unit = outer * chunks + if operands.reversed { chunks - 1 - number } else { number };
                carries[unit * inner + i] = state;
                let summary = &summaries[unit * 2 * inner..][..2 * inner];
                state = summary[i] * state + summary[inner + i];
            }
        }
    }
    carries
}

/// Runs a recurrence, whose first two operands are the gates and the terms, from the carries before the rows (outer, inner), or zero.
fn run_in_chunks<T: Float, const I: usize, const N: usize>(
    pool: &Pool,
    shape: Shape,
    operands: Operands<'_, T, I>,
    carry: Option<&[f64]>,
    outs: [&mut [T]; N],
    recurrence: impl Recurrence<I, N, 1>,
) {
    if shape.numel() == 0 {
        return;
    }
    let cut = Cut::new(shape);
    if cut.chunks == 1 {
        return run(pool, cut, operands, carry, outs, recurrence);
    }
    let gates_and_terms = Operands::new([operands.all[0], operands.all[1]], operands.reversed);
    let carries = carries_of(pool, cut, gates_and_terms, carry);
    run(pool, cut, operands, Some(&carries), outs, recurrence);
}

pub(super) fn scan(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let reversed = is_reversed(launch);
    let ([a, x], carry, [h]) = operands_and_last(launch);
    let shape = Shape::of(a);
    match_float!(a.dtype, T => {
        let operands = Operands::new([read::<T>(a), read::<T>(x)], reversed);
        let (carry, h) = (carry.map(read::<f64>), [write::<T>(h)]);
        match reversed {
            true => run_in_chunks(pool, shape, operands, carry, h, ReversedScan),
            false => run_in_chunks(pool, shape, operands, carry, h, Scan),
        }
        Ok(())
    }, else no_float(SCAN.name, a.dtype))
}

pub(super) fn summary(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let reversed = is_reversed(launch);
    let ([a, x], [out], _) = operands(launch);
    let (shape, inner) = (Shape::of(a), Shape::of(a).inner);
    match_float!(a.dtype, T => {
        let out = write::<f64>(out);
        let (p, c) = out.split_at_mut(shape.lanes());
        p.fill(1.0);
        c.fill(0.0);
        if shape.numel() == 0 {
            return Ok(());
        }
        let cut = Cut::for_summary(shape);
        let all = summaries_in_order(pool, cut, Operands::new([read::<T>(a), read::<T>(x)], reversed));
        for unit in 0..cut.num_units() {
            let unit = if reversed { cut.num_units() - 1 - unit } else { unit };
            let summary = &all[unit * 2 * inner..][..2 * inner];
            let lanes = unit / cut.chunks * inner..(unit / cut.chunks + 1) * inner;
            for (i, lane) in lanes.enumerate() {
                p[lane] *= summary[i];
                c[lane] = summary[i] * c[lane] + summary[inner + i];
            }
        }
        p.iter_mut().for_each(|p| *p = finite(*p));
        Ok(())
    }, else no_float(SUMMARY.name, a.dtype))
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, h, g], edges, [da, dx]) = operands_and_last(launch);
    let shape = Shape::of(a);
    match_float!(a.dtype, T => {
        let edges = edges.map(|edges| read::<f64>(edges).split_at(shape.lanes()));
        let all = [read::<T>(a), read::<T>(g), read::<T>(h)];
        let operands = Operands { all, is_last_before: true, first: edges.map(|e| e.1), reversed: true };
        let outs = [write::<T>(da), write::<T>(dx)];
        run_in_chunks(pool, shape, operands, edges.map(|e| e.0), outs, Backward);
        Ok(())
    }, else no_float(BACKWARD.name, a.dtype))
}
