//! Recurrences: one step of one lane, the operands that it reads, and the states before and after the steps of a unit.

use crate::dtype::Float;
use crate::op::gated_scan::{Shape, finite};
use std::ops::Range;

/// A recurrence on I operands with N results and M numbers of state: one step of one lane.
pub(super) trait Recurrence<const I: usize, const N: usize, const M: usize>: Copy + Sync {
    /// Whether the last operand is read one step before.
    const IS_LAST_BEFORE: bool = false;

    /// Returns the next state and the results. On a gate of 1 and zeros otherwise, the state stays.
    fn step(self, operands: [f64; I], state: [f64; M]) -> ([f64; M], [f64; N]);
}

#[derive(Clone, Copy)]
pub(super) struct Scan;

impl Recurrence<2, 1, 1> for Scan {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [state]: [f64; 1]) -> ([f64; 1], [f64; 1]) {
        let value = a * state + x;
        ([value], [value])
    }
}

#[derive(Clone, Copy)]
pub(super) struct ReversedScan;

impl Recurrence<2, 1, 1> for ReversedScan {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [state]: [f64; 1]) -> ([f64; 1], [f64; 1]) {
        let value = state + x;
        ([a * value], [value])
    }
}

/// On a, g and the h before the step.
#[derive(Clone, Copy)]
pub(super) struct Backward;

impl Recurrence<3, 2, 1> for Backward {
    const IS_LAST_BEFORE: bool = true;

    #[inline(always)]
    fn step(self, [a, g, before]: [f64; 3], [state]: [f64; 1]) -> ([f64; 1], [f64; 2]) {
        let slope = g + state;
        ([a * slope], [slope * before, slope])
    }
}

/// The summary of [`Scan`]: its state is p and c.
#[derive(Clone, Copy)]
pub(super) struct Summary;

impl Recurrence<2, 0, 2> for Summary {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [p, c]: [f64; 2]) -> ([f64; 2], [f64; 0]) {
        ([p * a, a * c + x], [])
    }
}

/// The summary of [`ReversedScan`].
#[derive(Clone, Copy)]
pub(super) struct ReversedSummary;

impl Recurrence<2, 0, 2> for ReversedSummary {
    #[inline(always)]
    fn step(self, [a, x]: [f64; 2], [p, c]: [f64; 2]) -> ([f64; 2], [f64; 0]) {
        ([p * a, a * (c + x)], [])
    }
}

/// The operands of a recurrence.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a, T, const I: usize> {
    pub(super) all: [&'a [T]; I],
    /// What is read before the first step (outer, inner), by a recurrence that reads one step before; `None` for zeros.
    pub(super) first: Option<&'a [f64]>,
    pub(super) reversed: bool,
}

/// One operand of a recurrence.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, T> {
    pub(super) all: &'a [T],
    /// The distance from an element to the one that the operand is read at: a step, or zero.
    pub(super) distance: usize,
    /// See [`Operands::first`].
    first: Option<&'a [f64]>,
    pub(super) reversed: bool,
}

impl<'a, T: Float, const I: usize> Operands<'a, T, I> {
    pub(super) fn new(all: [&'a [T]; I], reversed: bool) -> Operands<'a, T, I> {
        Operands { all, first: None, reversed }
    }

    /// Returns operand `k`, where the last is read one step before or not.
    #[inline(always)]
    pub(super) fn operand(&self, k: usize, shape: Shape, is_last_before: bool) -> Operand<'a, T> {
        let distance = if is_last_before && k + 1 == I { shape.inner } else { 0 };
        Operand { all: self.all[k], distance, first: self.first, reversed: self.reversed }
    }
}

impl<T> Operand<'_, T> {
    /// Returns the operand before the first step, of the lane of the element `at`.
    #[inline(always)]
    pub(super) fn first(&self, shape: Shape, at: usize) -> f64 {
        let lane = || at / (shape.steps * shape.inner) * shape.inner + at % shape.inner;
        self.first.map_or(0.0, |first| first[lane()])
    }
}

/// The states of some lanes of a unit before and after its steps; a state has M numbers for each lane.
pub(super) trait UnitStates<const M: usize> {
    /// Writes number `m` of the states before the first step of the recurrence.
    fn load(&self, unit: usize, lanes: Range<usize>, state: (usize, &mut [f64]));

    /// Reads number `m` of the states after the last step.
    fn store(&mut self, unit: usize, lanes: Range<usize>, state: (usize, &mut [f64]));
}

/// The carries before all units (unit, inner), or zero.
#[derive(Clone, Copy)]
pub(super) struct Carries<'a> {
    pub(super) all: Option<&'a [f64]>,
    pub(super) inner: usize,
}

impl UnitStates<1> for Carries<'_> {
    #[inline(always)]
    fn load(&self, unit: usize, lanes: Range<usize>, (_, state): (usize, &mut [f64])) {
        match self.all {
            Some(all) => state.copy_from_slice(&all[unit * self.inner..][lanes]),
            None => state.fill(0.0),
        }
    }

    #[inline(always)]
    fn store(&mut self, _: usize, _: Range<usize>, _: (usize, &mut [f64])) {}
}

/// The summaries of units from `first` on: p and c (unit, 2, inner).
pub(super) struct Summaries<'a> {
    pub(super) all: &'a mut [f64],
    pub(super) first: usize,
    pub(super) inner: usize,
}

impl UnitStates<2> for Summaries<'_> {
    #[inline(always)]
    fn load(&self, _: usize, _: Range<usize>, (m, state): (usize, &mut [f64])) {
        state.fill(if m == 0 { 1.0 } else { 0.0 });
    }

    #[inline(always)]
    fn store(&mut self, unit: usize, lanes: Range<usize>, (m, state): (usize, &mut [f64])) {
        let all = &mut self.all[((unit - self.first) * 2 + m) * self.inner..][..self.inner];
        let finished = |x: f64| if m == 0 { finite(x) } else { x };
        all[lanes].iter_mut().zip(state).for_each(|(to, x)| *to = finished(*x));
    }
}
