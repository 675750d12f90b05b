//! Running a schedule: one rank's part of a step.

mod parameters;
mod leaf_sums;
mod reduce;
mod measure;

use super::action::{Action, Schedule, Transfer};
use super::stage::{GradientSlots, Stages};
use crate::id::{Gradients, Id, Key, ReplayNoise};
use crate::node::sum_cotangents;
use crate::program::Slot;
use crate::tape::{DeferredWeightGrads, Tape, Values};
use leaf_sums::PendingLeaves;
use parameters::StageParameter;
use shardgrad_dist::{Axis, AxisSet, Call, Error, Kind, Origin, Phase, Rank, Result};
use shardgrad_tensor::execution::local_tensor::LocalTensor;
use shardgrad_tensor::training_step::anomaly_report::note_received;
use shardgrad_tensor::training_step::canonical_sum::{SumTree, TreeSums};
use shardgrad_tensor::{Layout, Tensor, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::Location;
use std::time::Instant;

/// The key of a stage's first input among the leaves of a pass; smaller keys are external inputs.
const FIRST_STAGE_INPUT: Key = 1 << 32;

/// The inputs of a pipelined step.
pub struct PipelineInputs<'a> {
    /// The arguments of a microbatch. Called on ranks with a stage that reads one.
    pub arguments: &'a dyn Fn(usize) -> Result<Vec<Tensor>>,
    /// A parameter of this rank's stages, as it is stored.
    pub parameter: &'a dyn Fn(Key) -> Tensor,
    /// Whether a parameter, of any stage, is trained. All ranks must agree, because it decides which gradients they
    /// send.
    pub is_trained: &'a dyn Fn(Key) -> bool,
    /// The random numbers of a microbatch.
    pub draw: &'a dyn Fn(usize) -> ReplayNoise,
    /// The factor on the gradient of each microbatch's losses.
    pub weight: f64,
}

/// The outputs of a pipelined step on one rank.
#[derive(Debug)]
pub struct PipelineOutputs {
    /// The results of each microbatch, on the ranks that make them.
    pub results: Vec<Vec<Option<Tensor>>>,
    /// Gradients of the parameters of this rank's stages, summed over all stages that share a parameter; none if microbatches are
    /// leaves.
    pub gradients: Gradients,
    /// The sums of the gradients of this rank's stages, by key, if microbatches are leaves ([`Runner::run_leaves`]).
    pub leaf_sums: BTreeMap<Key, TreeSums<Tensor>>,
    /// The actions with their times.
    pub passes: Vec<TimedAction>,
    /// The largest number of forward passes held for their backward pass at once.
    pub peak_live: usize,
}

/// An action and when it ran.
#[derive(Clone, Copy, Debug)]
pub struct TimedAction {
    /// The action.
    pub action: Action,
    /// Its start.
    pub start: Instant,
    /// Its end.
    pub end: Instant,
}

/// Runs a schedule on one rank. The schedule must be verified for the links of the stages.
#[doc(alias = "PipelineStage")]
#[derive(Debug)]
pub struct Runner<'a> {
    /// The rank on the mesh without the pipeline axis.
    pub rank: &'a Rank,
    /// The pipeline axis of the world's mesh.
    pub axis: Axis,
    /// The stages.
    pub stages: &'a Stages,
    /// The schedule, with transfers.
    pub schedule: &'a Schedule,
}

/// The inputs of a stage in a pass, in the order of their leaves.
type StageInputs = Vec<(Slot, Layout)>;

/// The start of a backward pass: cotangents of the stage's outputs, its tape, and its inputs.
type BackwardInputs = (Vec<(Id, Tensor)>, Tape, StageInputs);

/// A microbatch in a stage between forward and backward pass.
struct InFlight {
    tape: Tape,
    stage_inputs: StageInputs,
    /// The ids of the stage's outputs and losses, at which gradients enter.
    outputs: HashMap<Slot, Id>,
}

/// The state of a step in progress.
struct Step<'a> {
    runner: &'a Runner<'a>,
    inputs: &'a PipelineInputs<'a>,
    trains: bool,
    /// The slots whose gradients are sent back.
    gradient_slots: &'a GradientSlots,
    /// The routes of the parameters from their stored layouts, each taken once.
    tape: Tape,
    parameters: HashMap<u32, StageParameter>,
    /// The gradients of those parameters, accumulated over the microbatches.
    sums: BTreeMap<u32, Tensor>,
    in_flight: HashMap<(usize, usize), InFlight>,
    /// Passes with deferred weight gradients.
    deferred: HashMap<(usize, usize), (Tape, DeferredWeightGrads)>,
    /// Values that were made or received and not used yet.
    transfers: HashMap<Transfer, Vec<Tensor>>,
    /// The transfers still to come from each rank, in the order in which they are sent.
    expected: HashMap<usize, VecDeque<Transfer>>,
    /// The stages of this rank whose gradients have been reduced.
    reduced: Vec<usize>,
    /// The sums of gradients over microbatches, if those are leaves.
    leaves: Option<PendingLeaves>,
    gradients: Gradients,
    results: Vec<Vec<Option<Tensor>>>,
    peak_live: usize,
}

impl Runner<'_> {
    /// Runs this rank's list of the schedule.
    ///
    /// # Errors
    /// `Kind::Config` for a schedule of another number of stages or ranks; as [`Stages::check_reached`] if no trained
    /// parameter of any stage has a gradient; the errors of ops, arguments and transfers.
    pub fn run(&self, inputs: &PipelineInputs<'_>) -> Result<PipelineOutputs> {
        self.run_summing(inputs, None)
    }

    /// Runs this rank's list of the schedule, of which microbatch i is the leaf `first + i` of a tree: the gradient of each parameter in
    /// a microbatch, in its stored layout, is the sum of a leaf, so that the sums do not depend on stages, schedule or order of arrival.
    /// Gradients of keys that other stages read too are not summed over stages: [`Runner::sum_uses`].
    ///
    /// # Errors
    /// As [`Runner::run`] and [`Stages::check_canonical_sums`].
    pub fn run_leaves(
        &self,
        inputs: &PipelineInputs<'_>,
        tree: SumTree,
        first: usize,
    ) -> Result<PipelineOutputs> {
        self.stages.check_canonical_sums()?;
        self.run_summing(inputs, Some(PendingLeaves::new(tree, first)))
    }

    fn run_summing(
        &self,
        inputs: &PipelineInputs<'_>,
        leaves: Option<PendingLeaves>,
    ) -> Result<PipelineOutputs> {
        let asked = [self.schedule.num_stages(), self.schedule.ranks.len()];
        let there = [self.stages.stages().len(), self.rank.world().mesh().size(self.axis)];
        if asked != there {
            let text = format!(
                "schedule {} is for {} stages on {} ranks, but there are {} stages on {} ranks",
                self.schedule.name, asked[0], asked[1], there[0], there[1]
            );
            return Err(Error::new(Kind::Config, text));
        }
        let list = &self.schedule.ranks[self.rank.world().coordinate(self.axis)];
        let gradient_slots = self.stages.gradient_slots(inputs.is_trained);
        let mut step = self.step(inputs, &gradient_slots);
        step.leaves = leaves;
        if step.trains {
            self.stages.check_reached(inputs.is_trained)?;
        }
        let mut passes = Vec::with_capacity(list.len());
        for &action in list {
            let start = Instant::now();
            match action {
                Action::Forward { stage, microbatch } => step.forward(stage, microbatch)?,
                Action::Backward { stage, microbatch } => step.backward(stage, microbatch)?,
                Action::InputGradient { stage, microbatch } => step.input_gradient(stage, microbatch)?,
                Action::WeightGradient { stage, microbatch } => step.weight_gradient(stage, microbatch)?,
                Action::Send(transfer) => step.send(transfer)?,
                Action::Receive(transfer) => step.receive(transfer)?,
                Action::Reduce { stage } => step.reduce(stage)?,
            }
            passes.push(TimedAction { action, start, end: Instant::now() });
        }
        step.sum_shared_parameters()?;
        let Step { results, gradients, peak_live, leaves, .. } = step;
        let leaf_sums = leaves.map(PendingLeaves::into_sums).unwrap_or_default();
        Ok(PipelineOutputs { results, gradients, leaf_sums, passes, peak_live })
    }

    /// Sends a result of a microbatch from the stage that makes it to the pipeline ranks `to`, and returns it there;
    /// `made` is the result on the rank that makes it. A collective call: every pipeline rank calls it together.
    ///
    /// # Errors
    /// `Kind::Unsupported` if no stage makes the result; errors of the transport.
    pub fn send_result(&self, output: usize, made: Option<Tensor>, to: &[usize]) -> Result<Option<Tensor>> {
        let slot = *self.stages.program().outputs.get(output).ok_or_else(missing_value)?;
        let stage = self.stages.producer(slot).ok_or_else(missing_value)?;
        let (from, here) = (self.schedule.stage_ranks[stage], self.rank.world().coordinate(self.axis));
        let layout = self.stages.program().layout(slot);
        let (path, site) = path_and_site(self.stages, slot);
        let call = self.call(layout, Phase::Forward, path, site);
        if here == from {
            let made = made.ok_or_else(missing_value)?;
            let piece = made.local().flat(self.rank)?;
            to.iter()
                .filter(|rank| **rank != from)
                .try_for_each(|rank| self.send_to(&call, &piece, *rank))?;
            return Ok(to.contains(&here).then_some(made));
        }
        let receives = to.contains(&here);
        receives.then(|| receive(self.rank, &call, layout.clone(), from)).transpose()
    }

    /// The state before the first action.
    fn step<'a>(&'a self, inputs: &'a PipelineInputs<'a>, gradient_slots: &'a GradientSlots) -> Step<'a> {
        let trains = self.schedule.trains();
        Step {
            runner: self,
            inputs,
            trains,
            gradient_slots,
            tape: self.tape(trains),
            parameters: HashMap::new(),
            sums: BTreeMap::new(),
            in_flight: HashMap::new(),
            deferred: HashMap::new(),
            transfers: HashMap::new(),
            expected: self.expected(),
            reduced: Vec::new(),
            leaves: None,
            gradients: Gradients::new(),
            results: vec![Vec::new(); self.schedule.num_microbatches],
            peak_live: 0,
        }
    }

    /// An empty tape for training or inference.
    fn tape(&self, trains: bool) -> Tape {
        match trains {
            true => Tape::new(self.rank).with_bucket_bytes(self.stages.bucket_bytes()),
            false => Tape::inference(self.rank),
        }
    }

    fn call<'a>(
        &self,
        layout: &Layout,
        phase: Phase,
        path: &'a str,
        site: &'static Location<'static>,
    ) -> Call<'a> {
        Call {
            axes: AxisSet::one(self.axis),
            dtype: layout.dtype(),
            phase,
            path,
            origin: Origin::default(),
            site,
        }
    }

    /// Sends a contiguous local tensor to another pipeline rank.
    fn send_to(&self, call: &Call<'_>, piece: &LocalTensor, to: usize) -> Result<()> {
        self.rank.world().send(call, &piece.buffer, piece.numel(), to)
    }

    /// The transfers from each rank to this one, in order.
    fn expected(&self) -> HashMap<usize, VecDeque<Transfer>> {
        let (stage_ranks, here) = (&self.schedule.stage_ranks, self.rank.world().coordinate(self.axis));
        let sends = |list: &Vec<Action>| -> VecDeque<Transfer> {
            let send = |action: &Action| match action {
                Action::Send(transfer) if stage_ranks[transfer.to] == here => Some(*transfer),
                _ => None,
            };
            list.iter().filter_map(send).collect()
        };
        self.schedule.ranks.iter().map(sends).enumerate().collect()
    }
}

impl Step<'_> {
    fn forward(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let runner = self.runner;
        let program = runner.stages.program();
        let slice = &runner.stages.stages()[stage];
        let tape = self.pass_tape(stage);
        let mut values = Values::new();
        self.bind_external_inputs(stage, microbatch, &tape, &mut values)?;
        let mut stage_inputs = Vec::new();
        for (from, slots) in &slice.inputs {
            let arrived = self.take_transfer(Transfer { from: *from, to: stage, microbatch })?;
            for (&slot, tensor) in slots.iter().zip(arrived) {
                let var = match self.gradient_slots.filter(&[slot]).next() {
                    Some(_) => tape.leaf(FIRST_STAGE_INPUT + stage_inputs.len() as Key, &tensor),
                    None => tape.constant(tensor),
                };
                stage_inputs.push((slot, var.layout().clone()));
                values.insert(slot, var);
            }
        }
        program.replay(slice.range.clone(), &mut values, (self.inputs.draw)(microbatch))?;
        tape.end_forward();
        for (to, slots) in &slice.outputs {
            let made = slots.iter().map(|slot| values[slot].tensor().clone()).collect();
            self.transfers.insert(Transfer { from: stage, to: *to, microbatch }, made);
        }
        let results = &mut self.results[microbatch];
        results.resize(program.outputs.len(), None);
        for (&slot, result) in program.outputs.iter().zip(results) {
            if runner.stages.producer(slot) == Some(stage) {
                *result = Some(values[&slot].tensor().clone());
            }
        }
        if self.trains {
            let wanted = slice.outputs.iter().flat_map(|(_, slots)| slots).chain(runner.stages.losses());
            let outputs = wanted.filter_map(|slot| Some((*slot, values.get(slot)?.id()?))).collect();
            self.in_flight.insert((stage, microbatch), InFlight { tape, stage_inputs, outputs });
            self.peak_live = self.peak_live.max(self.in_flight.len() + self.deferred.len());
        }
        Ok(())
    }

    /// Binds the arguments, parameters and constants of a stage on the tape of a pass.
    fn bind_external_inputs(
        &mut self,
        stage: usize,
        microbatch: usize,
        tape: &Tape,
        values: &mut Values,
    ) -> Result<()> {
        self.gather_small_parameters(stage);
        let program = self.runner.stages.program();
        let mut arguments = None;
        for &external in &self.runner.stages.stages()[stage].external_inputs {
            let declared = &program.external_inputs[external as usize];
            let var = if (external as usize) < program.num_arguments {
                if arguments.is_none() {
                    arguments = Some((self.inputs.arguments)(microbatch)?);
                }
                let given = arguments.iter().flatten().nth(external as usize).ok_or_else(missing_value)?;
                tape.constant(check_argument(external, microbatch, given, &declared.layout)?)
            } else if let Some(key) = declared.key {
                self.bind_parameter(stage, external, key, tape)?
            } else {
                let constant = declared.constant.as_ref().ok_or_else(missing_value)?;
                // On a dry twin of the rank of the recording there are no values.
                let is_elsewhere = self.runner.rank.is_dry_run() && constant.rank() != self.runner.rank;
                tape.constant(match is_elsewhere {
                    true => Tensor::meta(self.runner.rank, constant.layout()),
                    false => constant.clone(),
                })
            };
            values.insert(Slot::External(external), var);
        }
        Ok(())
    }

    fn backward(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (seeds, tape, stage_inputs) = self.begin_backward(stage, microbatch)?;
        tape.preload_gradients(&seeds, |key| self.take_accumulator(key));
        tape.backward_from(seeds);
        let gradients = self.store_gradients(stage, microbatch, tape.gradients(), &stage_inputs)?;
        self.accumulate(stage, microbatch, gradients)
    }

    fn input_gradient(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (seeds, tape, stage_inputs) = self.begin_backward(stage, microbatch)?;
        tape.preload_gradients(&seeds, |key| self.take_accumulator(key));
        let deferred = DeferredWeightGrads::backward_inputs(&tape, seeds, |key| key >= FIRST_STAGE_INPUT);
        let gradients = self.store_gradients(stage, microbatch, tape.input_gradients(), &stage_inputs)?;
        self.accumulate_half(stage, microbatch, gradients)?;
        self.deferred.insert((stage, microbatch), (tape, deferred));
        Ok(())
    }

    fn weight_gradient(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (tape, deferred) = self.deferred.remove(&(stage, microbatch)).ok_or_else(missing_value)?;
        deferred.preload_gradients(&tape, |key| self.take_accumulator(key));
        deferred.backward_weights(&tape);
        self.accumulate(stage, microbatch, tape.gradients())
    }

    /// Ends the in-flight state of a microbatch and collects the cotangents that arrived.
    fn begin_backward(&mut self, stage: usize, microbatch: usize) -> Result<BackwardInputs> {
        let (runner, gradient_slots) = (self.runner, self.gradient_slots);
        let pass = self.in_flight.remove(&(stage, microbatch)).ok_or_else(missing_value)?;
        let mut seeds: Vec<(Id, Tensor)> = Vec::new();
        let mut seed = |slot: &Slot, cotangent: Tensor| {
            seeds.extend(pass.outputs.get(slot).map(|id| (*id, cotangent)));
        };
        for loss in runner.stages.losses().iter().filter(|l| runner.stages.producer(**l) == Some(stage)) {
            let layout = runner.stages.program().layout(*loss).dual();
            seed(loss, Tensor::full(runner.rank, &layout, self.inputs.weight)?);
        }
        for (to, slots) in &runner.stages.stages()[stage].outputs {
            let arrived = self.take_transfer(Transfer { from: *to, to: stage, microbatch })?;
            gradient_slots.filter(slots).zip(arrived).for_each(|(slot, t)| seed(&slot, t));
        }
        Ok((seeds, pass.tape, pass.stage_inputs))
    }

    /// Stores the gradients of the stage's inputs in a backward pass for the stages that made them, and returns those of parameters.
    fn store_gradients(
        &mut self,
        stage: usize,
        microbatch: usize,
        mut gradients: Gradients,
        stage_inputs: &StageInputs,
    ) -> Result<Gradients> {
        let runner = self.runner;
        for (from, slots) in &runner.stages.stages()[stage].inputs {
            let mut back = Vec::new();
            for slot in self.gradient_slots.filter(slots) {
                let at = stage_inputs.iter().position(|(s, _)| *s == slot).expect("every slot was taken");
                let gradient = gradients.remove(&(FIRST_STAGE_INPUT + at as Key));
                let layout = stage_inputs[at].1.dual();
                back.push(gradient.map_or_else(|| Tensor::zeros(runner.rank, &layout), Ok)?);
            }
            self.transfers.insert(Transfer { from: stage, to: *from, microbatch }, back);
        }
        Ok(gradients)
    }

    /// The gradient of a parameter accumulated so far, for a pass that adds to it; none where each microbatch has a sum of its own.
    fn take_accumulator(&mut self, key: Key) -> Option<Tensor> {
        self.sums.remove(&u32::try_from(key).ok()?)
    }

    /// Adds the gradients of parameters that a backward pass has completed to those of other microbatches.
    fn accumulate(&mut self, stage: usize, microbatch: usize, gradients: Gradients) -> Result<()> {
        match self.leaves.is_some() {
            true => self.add_leaf(stage, microbatch, gradients),
            false => self.add_gradients(gradients),
        }
    }

    /// Adds the gradients of parameters that the first half of a split backward pass has computed.
    fn accumulate_half(&mut self, stage: usize, microbatch: usize, gradients: Gradients) -> Result<()> {
        match &mut self.leaves {
            Some(leaves) => leaves.keep_half(stage, microbatch, gradients),
            None => self.add_gradients(gradients)?,
        }
        Ok(())
    }

    fn add_gradients(&mut self, gradients: Gradients) -> Result<()> {
        for (external, gradient) in gradients {
            let external = external as u32;
            let sum = match self.sums.remove(&external) {
                None => gradient,
                Some(sum) => sum_cotangents(sum, gradient)?,
            };
            self.sums.insert(external, sum);
        }
        Ok(())
    }

    fn take_transfer(&mut self, transfer: Transfer) -> Result<Vec<Tensor>> {
        self.transfers.remove(&transfer).ok_or_else(missing_value)
    }

    /// The slots and layouts that a transfer carries, in order.
    fn transferred_slots(&self, transfer: Transfer) -> Vec<(Slot, Layout)> {
        let stages = self.runner.stages;
        let layout = |slot: Slot| stages.program().layout(slot).clone();
        let earlier = transfer.from.min(transfer.to);
        let later = transfer.from.max(transfer.to);
        let given = stages.stages()[earlier].outputs.iter().find(|(to, _)| *to == later);
        let slots = given.map_or(&[][..], |(_, slots)| slots);
        match transfer.is_forward() {
            true => slots.iter().map(|&slot| (slot, layout(slot))).collect(),
            false => self.gradient_slots.filter(slots).map(|slot| (slot, layout(slot).dual())).collect(),
        }
    }

    fn send(&mut self, transfer: Transfer) -> Result<()> {
        let runner = self.runner;
        let to = runner.schedule.stage_ranks[transfer.to];
        let phase = if transfer.is_forward() { Phase::Forward } else { Phase::Backward };
        for ((slot, layout), tensor) in
            self.transferred_slots(transfer).into_iter().zip(self.take_transfer(transfer)?)
        {
            let piece = tensor.local().flat(runner.rank)?;
            let (path, site) = path_and_site(runner.stages, slot);
            let call = runner.call(&layout, phase, path, site);
            runner.send_to(&call, &piece, to)?;
        }
        Ok(())
    }

    /// Waits for a transfer; keeps the transfers that the other rank sent before it.
    fn receive(&mut self, transfer: Transfer) -> Result<()> {
        let runner = self.runner;
        let from = runner.schedule.stage_ranks[transfer.from];
        while !self.transfers.contains_key(&transfer) {
            let next =
                self.expected.get_mut(&from).and_then(VecDeque::pop_front).ok_or_else(missing_value)?;
            let arrived = self.receive_next(next, from)?;
            self.transfers.insert(next, arrived);
        }
        Ok(())
    }

    /// Receives the next message of a rank, which is this transfer.
    fn receive_next(&self, transfer: Transfer, from: usize) -> Result<Vec<Tensor>> {
        let (runner, phase) =
            (self.runner, if transfer.is_forward() { Phase::Forward } else { Phase::Backward });
        let one = |(slot, layout): (Slot, Layout)| {
            let (path, site) = path_and_site(runner.stages, slot);
            receive(runner.rank, &runner.call(&layout, phase, path, site), layout.clone(), from)
        };
        self.transferred_slots(transfer).into_iter().map(one).collect()
    }
}

/// Returns an argument if it has the recorded layout.
fn check_argument(external: u32, microbatch: usize, given: &Tensor, asked: &Layout) -> Result<Tensor> {
    if given.layout() == asked {
        return Ok(given.clone());
    }
    let given = given.layout();
    let text = format!(
        "argument {external} of microbatch {microbatch} is {given}, the stages were recorded for {asked}"
    );
    Err(Error::new(Kind::Shape, text)
        .detail("help", "a pipeline needs arguments of the same layout in all microbatches and steps"))
}

fn receive(rank: &Rank, call: &Call<'_>, layout: Layout, from: usize) -> Result<Tensor> {
    let shape = layout.local_shape(rank.coordinates());
    let buffer = rank.world().recv(call, shape.iter().product(), from)?;
    let piece = LocalTensor::from_buffer(buffer, layout.dtype(), &shape);
    let tensor = Tensor::assemble(rank, layout, piece);
    note_received(&tensor)?;
    Ok(tensor)
}

/// The path and the line of the op that makes a value.
fn path_and_site(stages: &Stages, slot: Slot) -> (&str, &'static Location<'static>) {
    match slot {
        Slot::Output { record, .. } => {
            let record = &stages.program().records[record as usize];
            (&record.path, record.site)
        }
        Slot::External(_) => ("", Location::caller()),
    }
}

fn missing_value() -> Error {
    Error::new(
        Kind::Unsupported,
        "a stage needs a value that was not made or received: call Schedule::verify before a run",
    )
}

impl std::fmt::Debug for PipelineInputs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PipelineInputs(weight {})", self.weight)
    }
}
