//! Rows of many lanes, computed in place.

use super::cut::{Cut, Task};
use super::recurrence::{Operands, Recurrence, UnitStates};
use crate::dtype::{Element, Float, Real};

/// Lanes that are advanced together, at most: their states stay in the nearest caches.
const LANES_MAX: usize = 2048;

/// Rounds to the accumulator, then to the type: a conversion that vectorizes, where one from f64 to 16 bits does not.
#[inline(always)]
fn rounded<T: Float>(x: f64) -> T {
    T::narrow(<T::Acc as Real>::lit(x))
}

/// Advances all lanes of a task, one unit after another.
#[inline(always)]
pub(super) fn advance<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    mut unit_states: impl UnitStates<M>,
) {
    let (shape, inner, first_row) = (cut.shape, cut.shape.inner, cut.row_after(task.units.start));
    let mut states = [[0.0; LANES_MAX]; M];
    for unit in task.units.clone().map(|unit| cut.unit(unit)) {
        for lane in (0..inner).step_by(LANES_MAX) {
            let lanes = lane..(lane + LANES_MAX).min(inner);
            let width = lanes.len();
            let mut states = states.each_mut().map(|state| &mut state[..width]);
            unit_states.load(unit.number, lanes.clone(), states.each_mut().map(|state| &mut **state));
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
            unit_states.store(unit.number, lanes, states);
        }
    }
}
