//! The time of a stage's passes, measured without the other stages.

use super::super::action::Transfer;
use super::super::simulate::PassTimes;
use super::{PipelineInputs, Runner, Step};
use crate::program::Slot;
use shardgrad_dist::{Call, Phase, Result};
use shardgrad_tensor::{Layout, Tensor};
use std::panic::Location;
use std::time::Instant;

/// The value of placeholders for the values of other stages. Not 0, so that no kernel takes a shortcut for zeros.
const PLACEHOLDER: f64 = 0.02;

impl Runner<'_> {
    /// The seconds of each pass of a stage on the first microbatch: the smallest of `repeats` measurements after a
    /// warm-up. Values of other stages are placeholders. All ranks of the slice call this together.
    ///
    /// # Errors
    /// The errors of ops and arguments.
    pub fn measure(&self, inputs: &PipelineInputs<'_>, stage: usize, repeats: usize) -> Result<PassTimes> {
        let gradient_slots = self.stages.gradient_slots(inputs.is_trained);
        let mut step = self.step(inputs, &gradient_slots);
        let never = f64::INFINITY;
        let mut least = PassTimes { forward: never, input: never, weight: never };
        for repeat in 0..=repeats {
            step.fill_stage_inputs(stage)?;
            let start = Instant::now();
            step.forward(stage, 0)?;
            let forward = start.elapsed().as_secs_f64();
            step.fill_output_gradients(stage)?;
            let start = Instant::now();
            step.input_gradient(stage, 0)?;
            let input = start.elapsed().as_secs_f64();
            let start = Instant::now();
            step.weight_gradient(stage, 0)?;
            let weight = start.elapsed().as_secs_f64();
            step.transfers.clear();
            if repeat > 0 {
                least.forward = least.forward.min(forward);
                least.input = least.input.min(input);
                least.weight = least.weight.min(weight);
            }
        }
        Ok(least)
    }

    /// The seconds of a transfer of a stage's inputs to the next pipeline rank: half of the smallest of `repeats` round
    /// trips between the first two pipeline ranks. All ranks call this together; those of other pipeline ranks get 0.
    ///
    /// # Errors
    /// The errors of the transport.
    pub fn measure_transfer(&self, stage: usize, repeats: usize) -> Result<f64> {
        let world = self.rank.world();
        let here = world.coordinate(self.axis);
        if here > 1 {
            return Ok(0.0);
        }
        let taken = self.stages.stages()[stage].inputs.iter().flat_map(|(_, slots)| slots);
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
        let piece = placeholder(self, layout)?.local().flat(self.rank)?;
        self.send_to(call, &piece, other)
    }
}

fn placeholder(runner: &Runner<'_>, layout: &Layout) -> Result<Tensor> {
    Tensor::full(runner.rank, layout, if layout.dtype().is_float() { PLACEHOLDER } else { 0.0 })
}

impl Step<'_> {
    fn fill_stage_inputs(&mut self, stage: usize) -> Result<()> {
        let runner = self.runner;
        for (from, slots) in &runner.stages.stages()[stage].inputs {
            let layout = |slot: &Slot| placeholder(runner, runner.stages.program().layout(*slot));
            let arrived: Result<Vec<Tensor>> = slots.iter().map(layout).collect();
            self.transfers.insert(Transfer { from: *from, to: stage, microbatch: 0 }, arrived?);
        }
        Ok(())
    }

    fn fill_output_gradients(&mut self, stage: usize) -> Result<()> {
        let runner = self.runner;
        for (to, slots) in &runner.stages.stages()[stage].outputs {
            let layout = |slot: Slot| placeholder(runner, &runner.stages.program().layout(slot).dual());
            let arrived: Result<Vec<Tensor>> = self.gradient_slots.filter(slots).map(layout).collect();
            self.transfers.insert(Transfer { from: *to, to: stage, microbatch: 0 }, arrived?);
        }
        Ok(())
    }
}
