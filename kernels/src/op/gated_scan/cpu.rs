//! Fast paths on the CPU. A launch is cut into units, each a run of steps of the lanes of one outer index.
//!
//! The rows of a unit, its lanes at one step, are neighbours in memory. Rows of many lanes are computed in place ([`wide_rows`]), rows of
//! few lanes are packed ([`packed_lanes`]).

mod cut;
mod recurrence;
mod wide_rows;
mod packed_lanes;

use super::{BACKWARD, SCAN, SUMMARY, Shape, finite, is_reversed};
use crate::cpu::Pool;
use crate::dtype::Float;
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{no_float, operands, operands_and_last, read, write};
use cut::{Cut, LANES, Task};
use recurrence::{
    Backward, Carries, Operands, Recurrence, ReversedScan, ReversedSummary, Scan, Summaries, Summary,
    UnitStates,
};

/// Advances all lanes of a task.
fn advance<T: Float, const I: usize, const N: usize, const M: usize>(
    cut: Cut,
    operands: Operands<'_, T, I>,
    recurrence: impl Recurrence<I, N, M>,
    task: &mut Task<'_, T, N>,
    states: impl UnitStates<M>,
) {
    if cut.shape.inner < LANES {
        packed_lanes::advance(cut, operands, recurrence, task, states);
    } else {
        wide_rows::advance(cut, operands, recurrence, task, states);
    }
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
    let states = Carries { all: carries, inner: cut.shape.inner };
    pool.chunks(&mut cut.tasks(outs), 1, |_, tasks| {
        tasks.iter_mut().for_each(|task| advance(cut, operands, recurrence, task, states));
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
        let states = Summaries { all, first: units.start, inner };
        advance(cut, operands, recurrence, &mut Task { units, outs: [] }, states);
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
        let operands = Operands { all, first: edges.map(|e| e.1), reversed: true };
        let outs = [write::<T>(da), write::<T>(dx)];
        run_in_chunks(pool, shape, operands, edges.map(|e| e.0), outs, Backward);
        Ok(())
    }, else no_float(BACKWARD.name, a.dtype))
}
