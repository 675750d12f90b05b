//! How long the passes of a stage take, without the other stages.

use super::super::action::Transfer;
use super::super::simulate::Times;
use super::{Feed, Runner, Step};
use crate::program::Slot;
use shardgrad_dist::{Call, Phase, Result};
use shardgrad_tensor::{Layout, Tensor};
use std::panic::Location;
use std::time::Instant;

/// What stands for values that other stages would hand on. Not 0, so that nothing is skipped.
const MADE_UP: f64 = 0.02;

impl Runner<'_> {
    /// Seconds of each pass of a stage on the first microbatch: the shortest of `repeats`, after one that is not counted. What
    /// other stages would hand on is made up. All ranks of the slice call this together.
    ///
    /// # Errors
    /// What ops and arguments report.
    pub fn measure(&self, feed: &Feed<'_>, stage: usize, repeats: usize) -> Result<Times> {
        let live = self.stages.live(feed.is_trained);
        let mut step = self.step(feed, &live);
        let never = f64::INFINITY;
        let mut least = Times { forward: never, input: never, weight: never };
        for repeat in 0..=repeats {
            step.make_up_takes(stage)?;
            let start = Instant::now();
            step.forward(stage, 0)?;
            let forward = start.elapsed().as_secs_f64();
            step.make_up_gradients(stage)?;
            let start = Instant::now();
            step.input_gradient(stage, 0)?;
            let input = start.elapsed().as_secs_f64();
            let start = Instant::now();
            step.weight_gradient(stage, 0)?;
            let weight = start.elapsed().as_secs_f64();
            step.store.clear();
            if repeat > 0 {
                least.forward = least.forward.min(forward);
                least.input = least.input.min(input);
                least.weight = least.weight.min(weight);
            }
        }
        Ok(least)
    }

    /// Seconds from the sending of what a stage takes to its arrival on the next place: half of the shortest of `repeats` ways
    /// there and back between the first two places. All ranks call this together; those of other places get 0.
    ///
    /// # Errors
    /// What the transport reports.
    pub fn measure_transfer(&self, stage: usize, repeats: usize) -> Result<f64> {
        let world = self.rank.world();
        let here = world.coordinate(self.axis);
        if here > 1 {
            return Ok(0.0);
        }
        let taken = self.stages.stages()[stage].takes.iter().flat_map(|(_, slots)| slots);
        let layouts: Vec<Layout> = taken.map(|slot| self.stages.program().layout(*slot).clone()).collect();
        let mut least = f64::INFINITY;
        for _ in 0..=repeats {
            let start = Instant::now();
            for outward in [true, false] {
                for layout in &layouts {
                    let call = self.call(layout, Phase::Control, "", Location::caller());
                    self.one_way(layout, &call, outward == (here == 0), 1 - here)?;
                }
            }
            least = least.min(start.elapsed().as_secs_f64() / 2.0);
        }
        Ok(if here == 0 { least } else { 0.0 })
    }

    fn one_way(&self, layout: &Layout, call: &Call<'_>, sends: bool, other: usize) -> Result<()> {
        if !sends {
            return super::receive(self.rank, call, layout.clone(), other).map(drop);
        }
        let piece = made_up(self, layout)?.piece().flat(self.rank)?;
        self.post(call, &piece, other)
    }
}

fn made_up(runner: &Runner<'_>, layout: &Layout) -> Result<Tensor> {
    Tensor::full(runner.rank, layout, if layout.dtype().is_float() { MADE_UP } else { 0.0 })
}

impl Step<'_> {
    fn make_up_takes(&mut self, stage: usize) -> Result<()> {
        let runner = self.runner;
        for (from, slots) in &runner.stages.stages()[stage].takes {
            let layout = |slot: &Slot| made_up(runner, runner.stages.program().layout(*slot));
            let arrived: Result<Vec<Tensor>> = slots.iter().map(layout).collect();
            self.store.insert(Transfer { from: *from, to: stage, microbatch: 0 }, arrived?);
        }
        Ok(())
    }

    fn make_up_gradients(&mut self, stage: usize) -> Result<()> {
        let runner = self.runner;
        for (to, slots) in &runner.stages.stages()[stage].gives {
            let layout = |slot: Slot| made_up(runner, &runner.stages.program().layout(slot).dual());
            let arrived: Result<Vec<Tensor>> = self.live.of(slots).map(layout).collect();
            self.store.insert(Transfer { from: *to, to: stage, microbatch: 0 }, arrived?);
        }
        Ok(())
    }
}
