//! Rows of many lanes, computed in place.

use super::cut::{Cut, Task};
use super::recurrence::{Operand, Operands, Recurrence, UnitStates};
use crate::cpu::vectorized;
use crate::dtype::{Element, Float, Real};

/// Lanes that are advanced together, at most: their states stay in the nearest caches.
const LANES_MAX: usize = 2048;

/// Rounds to the accumulator, then to the type: a conversion that vectorizes, where one from f64 to 16 bits does not.
#[inline(always)]
fn rounded<T: Float>(x: f64) -> T {
    T::narrow(<T::Acc as Real>::lit(x))
}

/// Advances all lanes of a task, one unit after another.
pub(super) fn advance<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    unit_states: impl UnitStates<M>,
) {
    vectorized(
        #[inline(always)]
        || advance_here(cut, operands, recurrence, task, unit_states),
    );
}

/// [`advance`], compiled for the instruction set of the caller.
#[inline(always)]
fn advance_here<T: Float, C: Recurrence<I, N, M>, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: C,
    task: &mut Task<'_, T, N>,
    mut unit_states: impl UnitStates<M>,
) {
    let (inner, first_row) = (cut.shape.inner, cut.row_after(task.units.start));
    let all: [Operand<'_, T>; I] = std::array::from_fn(|k| operands.operand(k, cut.shape, C::IS_LAST_BEFORE));
    let mut states = [[0.0; LANES_MAX]; M];
    for unit in task.units.clone().map(|unit| cut.unit(unit)) {
        for lane in (0..inner).step_by(LANES_MAX) {
            let lanes = lane..(lane + LANES_MAX).min(inner);
            let width = lanes.len();
            let mut states = states.each_mut().map(|state| &mut state[..width]);
            for (m, state) in states.iter_mut().enumerate() {
                unit_states.load(unit.number, lanes.clone(), (m, state));
            }
            for i in 0..unit.num_steps {
                let step = if operands.reversed { unit.num_steps - 1 - i } else { i };
                let row = unit.first_row + step;
                let (at, to) = (row * inner + lane, (row - first_row) * inner + lane);
                let before_first = C::IS_LAST_BEFORE && unit.is_first && step == 0;
                // Loops over indices: closures would be compiled anew for each type and recurrence.
                let mut rows: [&[T]; I] = [&[]; I];
                for k in 0..I {
                    let distance = if before_first { 0 } else { all[k].distance };
                    rows[k] = &all[k].all[at - distance..][..width];
                }
                let outs = task.outs.each_mut().map(
                    #[inline(always)]
                    |out| &mut out[to..][..width],
                );
                for i in 0..width {
                    let (mut values, mut state) = ([0.0; I], [0.0; M]);
                    for k in 0..I {
                        values[k] = rows[k][i].widen().to_f64();
                    }
                    if before_first {
                        values[I - 1] = all[I - 1].first(cut.shape, at + i);
                    }
                    for m in 0..M {
                        state[m] = states[m][i];
                    }
                    let (next, results) = recurrence.step(values, state);
                    for m in 0..M {
                        states[m][i] = next[m];
                    }
                    for n in 0..N {
                        outs[n][i] = rounded(results[n]);
                    }
                }
            }
            for (m, state) in states.iter_mut().enumerate() {
                unit_states.store(unit.number, lanes.clone(), (m, state));
            }
        }
    }
}
