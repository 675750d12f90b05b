//! Rows of few lanes, packed: blocks of steps of several units are transposed into rows of all their lanes, so that a step of all lanes is
//! one vector operation. A single lane would wait for its own multiplications.
//!
//! Each part of a block is compiled for the instruction sets on its own: reading and writing once per type, not once per recurrence, and
//! the steps once per accumulator.

use super::cut::{Cut, LANES, Task, Unit};
use super::recurrence::{Operand, Operands, Recurrence, UnitStates};
use crate::cpu::simd::prefetch;
use crate::cpu::simd::transpose_block::{SQUARE, transpose_block};
use crate::cpu::vectorized;
use crate::dtype::{Float, Real};
use std::ops::Range;

/// Steps of a block, at most: long runs of memory, and blocks of all operands that stay in the nearest caches.
const STEPS: usize = 128;

/// A block of an operand or a result as in memory: the steps of a lane are neighbours.
type LaneMajor<R> = [[R; STEPS]; LANES];
/// A block of an operand or a result as the recurrence takes it: the lanes of a step are neighbours.
type StepMajor<R> = [[R; LANES]; STEPS];

/// The rows of a unit that are in a block.
#[derive(Clone, Copy)]
struct BlockRows {
    first: usize,
    count: usize,
    /// Whether the first row is the first step of its outer index.
    is_first: bool,
}

impl BlockRows {
    /// Returns the rows of the block that begins at step `begin` of each unit; none if the unit has fewer steps.
    #[inline(always)]
    fn of(unit: &Unit, begin: usize) -> BlockRows {
        let count = unit.num_steps.saturating_sub(begin).min(STEPS);
        let first = unit.first_row + begin.min(unit.num_steps);
        BlockRows { first, count, is_first: unit.is_first && begin == 0 }
    }
}

/// The units that are advanced together.
struct Group<'a> {
    units: &'a [Unit],
    cut: Cut,
}

impl Group<'_> {
    /// Returns the steps of the longest unit.
    fn num_steps(&self) -> usize {
        self.units.iter().map(|unit| unit.num_steps).max().unwrap_or(0)
    }

    /// Returns the elements of the block of a unit that is read after the block from step `begin` on: of the same unit, or of the next
    /// group.
    #[inline(always)]
    fn later_block(&self, unit: &Unit, begin: usize, reversed: bool) -> Range<usize> {
        let inner = self.cut.shape.inner;
        let of = |unit: &Unit, begin: usize| {
            let rows = BlockRows::of(unit, begin);
            rows.first * inner..(rows.first + rows.count) * inner
        };
        let last = |unit: &Unit| (unit.num_steps - 1) / STEPS * STEPS;
        let next = unit.number + self.cut.units_together();
        match reversed {
            false if begin < last(unit) => of(unit, begin + STEPS),
            true if begin > 0 => of(unit, begin - STEPS),
            _ if next < self.cut.num_units() => {
                let next = self.cut.unit(next);
                of(&next, if reversed { last(&next) } else { 0 })
            }
            _ => 0..0,
        }
    }

    /// Reads an operand of the block of steps `steps`; a unit of fewer steps is padded.
    fn read<T: Float>(
        &self,
        operand: Operand<'_, T>,
        padding: T::Acc,
        steps: Range<usize>,
        block: &mut LaneMajor<T::Acc>,
    ) {
        vectorized(
            #[inline(always)]
            || self.read_here(operand, padding, steps, block),
        );
    }

    /// [`Group::read`], compiled for the instruction set of the caller.
    #[inline(always)]
    fn read_here<T: Float>(
        &self,
        operand: Operand<'_, T>,
        padding: T::Acc,
        steps: Range<usize>,
        block: &mut LaneMajor<T::Acc>,
    ) {
        let (shape, inner, Operand { all, distance, .. }) = (self.cut.shape, self.cut.shape.inner, operand);
        for (unit, lanes) in self.units.iter().zip(block.chunks_exact_mut(inner)) {
            let rows = BlockRows::of(unit, steps.start);
            // Before the first step of an outer index is no row.
            let edge = usize::from(distance > 0 && rows.is_first);
            let (at, numel) = ((rows.first + edge) * inner - distance, (rows.count - edge) * inner);
            let from = &all[at..][..numel];
            prefetch(&all[self.later_block(unit, steps.start, operand.reversed)]);
            if let ([to], Ok(from)) = (&mut *lanes, <&[T; STEPS]>::try_from(from)) {
                // A loop of constant length.
                *to = std::array::from_fn(
                    #[inline(always)]
                    |i| from[i].widen(),
                );
                continue;
            }
            for (lane, to) in lanes.iter_mut().enumerate() {
                let (to, rest) = to[..steps.len()].split_at_mut(rows.count);
                rest.fill(padding);
                let (first, to) = to.split_at_mut(edge);
                if let [first] = first {
                    // The operand is of type T, and this element too, so that the conversion is exact.
                    *first = T::Acc::lit(operand.first(shape, rows.first * inner + lane));
                }
                if inner == 1 {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
                } else if let Some(from) = from.get(lane..) {
                    to.iter_mut().zip(from.iter().step_by(inner)).for_each(|(to, from)| *to = from.widen());
                }
            }
        }
    }

    /// Writes a result of the block from step `begin` on to an output that begins at row `first_row`.
    fn write<T: Float>(&self, block: &LaneMajor<T::Acc>, begin: usize, out: (&mut [T], usize)) {
        vectorized(
            #[inline(always)]
            || self.write_here(block, begin, out),
        );
    }

    /// [`Group::write`], compiled for the instruction set of the caller.
    #[inline(always)]
    fn write_here<T: Float>(
        &self,
        block: &LaneMajor<T::Acc>,
        begin: usize,
        (out, first_row): (&mut [T], usize),
    ) {
        let inner = self.cut.shape.inner;
        for (unit, lanes) in self.units.iter().zip(block.chunks_exact(inner)) {
            let rows = BlockRows::of(unit, begin);
            let to = &mut out[(rows.first - first_row) * inner..][..rows.count * inner];
            if let ([from], Ok(to)) = (lanes, <&mut [T; STEPS]>::try_from(&mut *to)) {
                // A loop of constant length.
                *to = std::array::from_fn(
                    #[inline(always)]
                    |i| T::narrow(from[i]),
                );
                continue;
            }
            for (lane, from) in lanes.iter().enumerate() {
                if inner == 1 {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = T::narrow(*from));
                } else if let Some(to) = to.get_mut(lane..) {
                    let to = to.iter_mut().step_by(inner);
                    to.zip(from).for_each(|(to, from)| *to = T::narrow(*from));
                }
            }
        }
    }
}

/// Advances all lanes by the steps of a block.
fn advance_block<R: Real, const I: usize, const N: usize, const M: usize>(
    recurrence: impl Recurrence<I, N, M>,
    operands: &[StepMajor<R>; I],
    results: &mut [StepMajor<R>; N],
    states: &mut [[f64; LANES]; M],
    order: (usize, bool),
) {
    vectorized(
        #[inline(always)]
        || advance_block_here(recurrence, operands, results, states, order),
    );
}

/// [`advance_block`], compiled for the instruction set of the caller.
#[inline(always)]
fn advance_block_here<R: Real, const I: usize, const N: usize, const M: usize>(
    recurrence: impl Recurrence<I, N, M>,
    operands: &[StepMajor<R>; I],
    results: &mut [StepMajor<R>; N],
    states: &mut [[f64; LANES]; M],
    (num_steps, reversed): (usize, bool),
) {
    // A copy, which the compiler keeps in registers.
    let mut now = *states;
    for i in 0..num_steps {
        let step = if reversed { num_steps - 1 - i } else { i };
        // Loops over indices: closures would be compiled anew for each recurrence.
        let (zeros, mut found) = ([R::ZERO; LANES], [[R::ZERO; LANES]; N]);
        let mut rows = [&zeros; I];
        for k in 0..I {
            rows[k] = &operands[k][step];
        }
        for lane in 0..LANES {
            let (mut values, mut state) = ([0.0; I], [0.0; M]);
            for k in 0..I {
                values[k] = rows[k][lane].to_f64();
            }
            for m in 0..M {
                state[m] = now[m][lane];
            }
            let (next, of_lane) = recurrence.step(values, state);
            for m in 0..M {
                now[m][lane] = next[m];
            }
            for n in 0..N {
                found[n][lane] = R::lit(of_lane[n]);
            }
        }
        for n in 0..N {
            results[n][step] = found[n];
        }
    }
    *states = now;
}

/// Advances all lanes of a task, as many units at a time as a packed row has room for.
pub(super) fn advance<T: Float, C: Recurrence<I, N, M>, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: C,
    task: &mut Task<'_, T, N>,
    mut unit_states: impl UnitStates<M>,
) {
    let (inner, first_row) = (cut.shape.inner, cut.row_after(task.units.start));
    let mut lane_major: LaneMajor<T::Acc> = [[T::Acc::ZERO; STEPS]; LANES];
    let mut inputs: [StepMajor<T::Acc>; I] = [[[T::Acc::ZERO; LANES]; STEPS]; I];
    let mut results: [StepMajor<T::Acc>; N] = [[[T::Acc::ZERO; LANES]; STEPS]; N];
    let mut states = [[0.0; LANES]; M];
    for first in task.units.clone().step_by(cut.units_together()) {
        let units = cut.units(first..(first + cut.units_together()).min(task.units.end));
        for (u, unit) in units.iter().enumerate() {
            for (m, state) in states.iter_mut().enumerate() {
                unit_states.load(unit.number, 0..inner, (m, &mut state[u * inner..][..inner]));
            }
        }
        let group = Group { units: &units, cut };
        let num_blocks = group.num_steps().div_ceil(STEPS);
        for i in 0..num_blocks {
            let begin = STEPS * if operands.reversed { num_blocks - 1 - i } else { i };
            let num_steps = (group.num_steps() - begin).min(STEPS).next_multiple_of(SQUARE);
            for (k, input) in inputs.iter_mut().enumerate() {
                // On a gate of 1 and zeros otherwise, the state stays.
                let padding = if k == 0 { T::Acc::ONE } else { T::Acc::ZERO };
                group.read(
                    operands.operand(k, cut.shape, C::IS_LAST_BEFORE),
                    padding,
                    begin..begin + num_steps,
                    &mut lane_major,
                );
                transpose_block(&lane_major, input, [LANES, num_steps]);
            }
            advance_block(recurrence, &inputs, &mut results, &mut states, (num_steps, operands.reversed));
            for (result, out) in results.iter().zip(&mut task.outs) {
                transpose_block(result, &mut lane_major, [num_steps, LANES]);
                group.write(&lane_major, begin, (out, first_row));
            }
        }
        for (u, unit) in units.iter().enumerate() {
            for (m, state) in states.iter_mut().enumerate() {
                unit_states.store(unit.number, 0..inner, (m, &mut state[u * inner..][..inner]));
            }
        }
    }
}
