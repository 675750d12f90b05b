//! Following a schedule: one rank's side of a step.

mod reduce;
mod measure;

use super::action::{Action, Schedule, Transfer};
use super::stage::{Live, Stages};
use crate::halves::Rest;
use crate::id::{Draw, Gradients, Id, Key};
use crate::program::Slot;
use crate::replay::Values;
use crate::tape::Tape;
use crate::tape::sums::sum_of;
use crate::var::Var;
use shardgrad_dist::{Axis, AxisSet, Call, Error, Kind, Origin, Phase, Rank, Result};
use shardgrad_tensor::control::note_sent;
use shardgrad_tensor::piece::Piece;
use shardgrad_tensor::{Layout, PackCacheGuard, Tensor, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::Location;
use std::time::Instant;

/// Takes stand behind all outer slots among the leaves of a pass.
const TAKEN: Key = 1 << 32;

/// What a step works on.
pub struct Feed<'a> {
    /// The arguments of a microbatch. Asked on ranks whose stage reads one.
    pub arguments: &'a dyn Fn(usize) -> Result<Vec<Tensor>>,
    /// A parameter of this rank's stages as it is stored.
    pub parameter: &'a dyn Fn(Key) -> Tensor,
    /// Whether a parameter is trained, of whatever stage: alike on all ranks, as it says what they hand back to each other.
    pub is_trained: &'a dyn Fn(Key) -> bool,
    /// What random ops of a microbatch draw.
    pub draw: &'a dyn Fn(usize) -> Draw,
    /// By what the gradient of each microbatch's losses counts.
    pub weight: f64,
}

/// What a step leaves on a rank.
#[derive(Debug)]
pub struct Outcome {
    /// The results of each microbatch, on the ranks that make them.
    pub results: Vec<Vec<Option<Tensor>>>,
    /// Gradients of the parameters of this rank's stages, completed over all stages that share one.
    pub gradients: Gradients,
    /// What was done, and when.
    pub passes: Vec<Passed>,
    /// The largest number of forward passes that were kept for their backward pass at once.
    pub peak_live: usize,
}

/// An action as it happened.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// Which action.
    pub action: Action,
    /// When it was begun.
    pub start: Instant,
    /// When it was done.
    pub end: Instant,
}

/// A rank that follows a schedule. The schedule has been verified for the links of the stages.
#[derive(Debug)]
pub struct Runner<'a> {
    /// The rank on the mesh without the pipeline axis.
    pub rank: &'a Rank,
    /// The axis of the world's mesh along which stages lie.
    pub axis: Axis,
    /// The stages.
    pub stages: &'a Stages,
    /// What to do, transfers included.
    pub schedule: &'a Schedule,
}

/// What a stage took from others, as leaves in this order.
type Taken = Vec<(Slot, Layout)>;

/// What a backward pass starts from: cotangents of what the stage made, its tape, and what it took.
type Landed = (Vec<(Id, Tensor)>, Tape, Taken);

/// A microbatch in a stage between its two passes.
struct Flight {
    tape: Tape,
    takes: Taken,
    /// Where the gradients of what was made for others go.
    made: HashMap<Slot, Id>,
}

/// What is there in the middle of a step.
struct Step<'a> {
    runner: &'a Runner<'a>,
    feed: &'a Feed<'a>,
    trains: bool,
    /// What is handed back.
    live: &'a Live,
    /// Parameters in the layouts in which they are computed with, made once; held for the microbatches to come.
    tape: Tape,
    computed: HashMap<u32, (Var, Option<PackCacheGuard>)>,
    /// Sums of their cotangents over the microbatches.
    sums: BTreeMap<u32, Tensor>,
    flights: HashMap<(usize, usize), Flight>,
    /// Passes whose parameters' gradients are still to come.
    halved: HashMap<(usize, usize), (Tape, Rest)>,
    /// What has been made or received and not been used yet.
    store: HashMap<Transfer, Vec<Tensor>>,
    /// What is still to come from each rank, in the order in which it is sent.
    expected: HashMap<usize, VecDeque<Transfer>>,
    /// Stages of this rank whose gradients have been reduced.
    reduced: Vec<usize>,
    gradients: Gradients,
    results: Vec<Vec<Option<Tensor>>>,
    peak_live: usize,
}

impl Runner<'_> {
    /// Runs the lists of this rank.
    ///
    /// # Errors
    /// `Kind::Config` for a schedule of another number of stages or ranks; as [`Stages::check_reached`] if no parameter that is
    /// trained has a gradient, wherever it lives; what ops, arguments and transfers report.
    pub fn run(&self, feed: &Feed<'_>) -> Result<Outcome> {
        let asked = [self.schedule.num_stages(), self.schedule.ranks.len()];
        let there = [self.stages.stages().len(), self.rank.world().mesh().size(self.axis)];
        if asked != there {
            let text = format!(
                "schedule {} is for {} stages on {} ranks, there are {} on {}",
                self.schedule.name, asked[0], asked[1], there[0], there[1]
            );
            return Err(Error::new(Kind::Config, text));
        }
        let list = &self.schedule.ranks[self.rank.world().coordinate(self.axis)];
        let live = self.stages.live(feed.is_trained);
        let mut step = self.step(feed, &live);
        if step.trains {
            self.stages.check_reached(feed.is_trained)?;
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
            passes.push(Passed { action, start, end: Instant::now() });
        }
        step.sum_shared()?;
        let Step { results, gradients, peak_live, .. } = step;
        Ok(Outcome { results, gradients, passes, peak_live })
    }

    /// Nothing is there yet.
    fn step<'a>(&'a self, feed: &'a Feed<'a>, live: &'a Live) -> Step<'a> {
        let trains = self.schedule.trains();
        Step {
            runner: self,
            feed,
            trains,
            live,
            tape: if trains { Tape::new(self.rank) } else { Tape::inference(self.rank) },
            computed: HashMap::new(),
            sums: BTreeMap::new(),
            flights: HashMap::new(),
            halved: HashMap::new(),
            store: HashMap::new(),
            expected: self.expected(),
            reduced: Vec::new(),
            gradients: Gradients::new(),
            results: vec![Vec::new(); self.schedule.num_microbatches],
            peak_live: 0,
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

    /// Sends the numbers of a flat piece to another place.
    fn post(&self, call: &Call<'_>, piece: &Piece, to: usize) -> Result<()> {
        self.rank.world().send(call, &piece.buffer, piece.numel(), to)
    }

    /// What one rank sends to this one, in order.
    fn expected(&self) -> HashMap<usize, VecDeque<Transfer>> {
        let (place, here) = (&self.schedule.place, self.rank.world().coordinate(self.axis));
        let sends = |list: &Vec<Action>| -> VecDeque<Transfer> {
            let send = |action: &Action| match action {
                Action::Send(transfer) if place[transfer.to] == here => Some(*transfer),
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
        let (slice, rank) = (&runner.stages.stages()[stage], runner.rank);
        let tape = if self.trains { Tape::new(rank) } else { Tape::inference(rank) };
        let mut values = Values::new();
        self.bring_outers(stage, microbatch, &tape, &mut values)?;
        let mut takes = Vec::new();
        for (from, slots) in &slice.takes {
            let arrived = self.take(Transfer { from: *from, to: stage, microbatch })?;
            for (&slot, tensor) in slots.iter().zip(arrived) {
                let var = match self.live.of(&[slot]).next() {
                    Some(_) => tape.leaf(TAKEN + takes.len() as Key, &tensor),
                    None => tape.constant(tensor),
                };
                takes.push((slot, var.layout().clone()));
                values.insert(slot, var);
            }
        }
        program.replay(slice.range.clone(), &mut values, (self.feed.draw)(microbatch))?;
        for (to, slots) in &slice.gives {
            let made = slots.iter().map(|slot| values[slot].tensor().clone()).collect();
            self.store.insert(Transfer { from: stage, to: *to, microbatch }, made);
        }
        let results = &mut self.results[microbatch];
        results.resize(program.outputs.len(), None);
        for (&slot, result) in program.outputs.iter().zip(results) {
            if runner.stages.maker(slot) == Some(stage) {
                *result = Some(values[&slot].tensor().clone());
            }
        }
        if self.trains {
            let wanted = slice.gives.iter().flat_map(|(_, slots)| slots).chain(runner.stages.losses());
            let made = wanted.filter_map(|slot| Some((*slot, values.get(slot)?.id()?))).collect();
            self.flights.insert((stage, microbatch), Flight { tape, takes, made });
            self.peak_live = self.peak_live.max(self.flights.len() + self.halved.len());
        }
        Ok(())
    }

    /// Arguments, parameters and constants of a stage, on the tape of a pass.
    fn bring_outers(
        &mut self,
        stage: usize,
        microbatch: usize,
        tape: &Tape,
        values: &mut Values,
    ) -> Result<()> {
        let program = self.runner.stages.program();
        let mut arguments = None;
        for &outer in &self.runner.stages.stages()[stage].outers {
            let declared = &program.outers[outer as usize];
            let var = if (outer as usize) < program.num_arguments {
                if arguments.is_none() {
                    arguments = Some((self.feed.arguments)(microbatch)?);
                }
                let given = arguments.iter().flatten().nth(outer as usize).ok_or_else(missing)?;
                tape.constant(check_argument(outer, microbatch, given, &declared.layout)?)
            } else if let Some(key) = declared.key {
                let computed = self.computed(stage, outer, key);
                let leaf = computed.requires_grad() && self.trains;
                let tensor = computed.tensor();
                match leaf {
                    true => tape.leaf_summed(Key::from(outer), tensor, declared.sums),
                    false => tape.constant(tensor.clone()),
                }
            } else {
                tape.constant(declared.constant.clone().ok_or_else(missing)?)
            };
            values.insert(Slot::Outer(outer), var);
        }
        Ok(())
    }

    /// A parameter in the layout in which the stage computes with it; brought there once a step.
    fn computed(&mut self, stage: usize, outer: u32, key: Key) -> Var {
        let (tape, feed, stages) = (&self.tape, self.feed, self.runner.stages);
        let is_reused = self.results.len() > 1;
        let bring = || {
            let stored = (feed.parameter)(key);
            let leaf = if (feed.is_trained)(key) { tape.leaf(key, &stored) } else { tape.constant(stored) };
            let program = stages.program();
            let computed =
                leaf.in_layout(&program.outers[outer as usize].layout, stages.first_use(stage, outer));
            let reuse = is_reused.then(|| computed.tensor().reuse());
            (computed, reuse)
        };
        self.computed.entry(outer).or_insert_with(bring).0.clone()
    }

    fn backward(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (seeds, tape, takes) = self.land(stage, microbatch)?;
        tape.begin_with(&seeds, |key| self.take_sum(key));
        tape.backward_from(seeds);
        self.hand_back(stage, microbatch, &tape, &takes)
    }

    fn input_gradient(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (seeds, tape, takes) = self.land(stage, microbatch)?;
        tape.begin_with(&seeds, |key| self.take_sum(key));
        let rest = tape.backward_towards(seeds, |key| key >= TAKEN);
        self.hand_back(stage, microbatch, &tape, &takes)?;
        self.halved.insert((stage, microbatch), (tape, rest));
        Ok(())
    }

    fn weight_gradient(&mut self, stage: usize, microbatch: usize) -> Result<()> {
        let (tape, rest) = self.halved.remove(&(stage, microbatch)).ok_or_else(missing)?;
        tape.begin_rest_with(&rest, |key| self.take_sum(key));
        tape.backward_rest(rest);
        self.add_up(tape.gradients())
    }

    /// Ends the flight of a microbatch, with the cotangents that have arrived.
    fn land(&mut self, stage: usize, microbatch: usize) -> Result<Landed> {
        let (runner, live) = (self.runner, self.live);
        let flight = self.flights.remove(&(stage, microbatch)).ok_or_else(missing)?;
        let mut seeds: Vec<(Id, Tensor)> = Vec::new();
        let mut seed = |slot: &Slot, cotangent: Tensor| {
            seeds.extend(flight.made.get(slot).map(|id| (*id, cotangent)));
        };
        for loss in runner.stages.losses().iter().filter(|l| runner.stages.maker(**l) == Some(stage)) {
            let layout = runner.stages.program().layout(*loss).dual();
            seed(loss, Tensor::full(runner.rank, &layout, self.feed.weight)?);
        }
        for (to, slots) in &runner.stages.stages()[stage].gives {
            let arrived = self.take(Transfer { from: *to, to: stage, microbatch })?;
            live.of(slots).zip(arrived).for_each(|(slot, t)| seed(&slot, t));
        }
        Ok((seeds, flight.tape, flight.takes))
    }

    /// Files the gradients that a tape has collected: of what the stage took, for those that made it; of parameters,
    /// added up.
    fn hand_back(&mut self, stage: usize, microbatch: usize, tape: &Tape, takes: &Taken) -> Result<()> {
        let runner = self.runner;
        let mut gradients = tape.gradients();
        for (from, slots) in &runner.stages.stages()[stage].takes {
            let mut back = Vec::new();
            for slot in self.live.of(slots) {
                let at = takes.iter().position(|(s, _)| *s == slot).expect("every slot was taken");
                let gradient = gradients.remove(&(TAKEN + at as Key));
                let layout = takes[at].1.dual();
                back.push(gradient.map_or_else(|| Tensor::zeros(runner.rank, &layout), Ok)?);
            }
            self.store.insert(Transfer { from: stage, to: *from, microbatch }, back);
        }
        self.add_up(gradients)
    }

    /// What microbatches have added up for a parameter so far, for a pass that adds to it.
    fn take_sum(&mut self, key: Key) -> Option<Tensor> {
        self.sums.remove(&u32::try_from(key).ok()?)
    }

    /// Adds cotangents of parameters to those of other microbatches.
    fn add_up(&mut self, gradients: Gradients) -> Result<()> {
        for (outer, gradient) in gradients {
            let outer = outer as u32;
            let sum = match self.sums.remove(&outer) {
                None => gradient,
                Some(sum) => sum_of(sum, gradient)?,
            };
            self.sums.insert(outer, sum);
        }
        Ok(())
    }

    fn take(&mut self, transfer: Transfer) -> Result<Vec<Tensor>> {
        self.store.remove(&transfer).ok_or_else(missing)
    }

    /// The layouts that a transfer carries, one after another, with the records that made the values.
    fn cargo(&self, transfer: Transfer) -> Vec<(Slot, Layout)> {
        let stages = self.runner.stages;
        let layout = |slot: Slot| stages.program().layout(slot).clone();
        let earlier = transfer.from.min(transfer.to);
        let later = transfer.from.max(transfer.to);
        let given = stages.stages()[earlier].gives.iter().find(|(to, _)| *to == later);
        let slots = given.map_or(&[][..], |(_, slots)| slots);
        match transfer.is_forward() {
            true => slots.iter().map(|&slot| (slot, layout(slot))).collect(),
            false => self.live.of(slots).map(|slot| (slot, layout(slot).dual())).collect(),
        }
    }

    fn send(&mut self, transfer: Transfer) -> Result<()> {
        let runner = self.runner;
        let to = runner.schedule.place[transfer.to];
        let phase = if transfer.is_forward() { Phase::Forward } else { Phase::Backward };
        for ((slot, layout), tensor) in self.cargo(transfer).into_iter().zip(self.take(transfer)?) {
            let piece = tensor.piece().flat(runner.rank)?;
            let (path, site) = place_of(runner.stages, slot);
            let call = runner.call(&layout, phase, path, site);
            runner.post(&call, &piece, to)?;
        }
        Ok(())
    }

    /// Waits for a transfer; those that the other rank has sent before it are kept.
    fn receive(&mut self, transfer: Transfer) -> Result<()> {
        let runner = self.runner;
        let from = runner.schedule.place[transfer.from];
        while !self.store.contains_key(&transfer) {
            let next = self.expected.get_mut(&from).and_then(VecDeque::pop_front).ok_or_else(missing)?;
            let arrived = self.accept(next, from)?;
            self.store.insert(next, arrived);
        }
        Ok(())
    }

    /// Receives the next message of a rank, which is this transfer.
    fn accept(&self, transfer: Transfer, from: usize) -> Result<Vec<Tensor>> {
        let (runner, phase) =
            (self.runner, if transfer.is_forward() { Phase::Forward } else { Phase::Backward });
        let one = |(slot, layout): (Slot, Layout)| {
            let (path, site) = place_of(runner.stages, slot);
            receive(runner.rank, &runner.call(&layout, phase, path, site), layout.clone(), from)
        };
        self.cargo(transfer).into_iter().map(one).collect()
    }
}

/// An argument, if it is as the program was recorded for.
fn check_argument(outer: u32, microbatch: usize, given: &Tensor, asked: &Layout) -> Result<Tensor> {
    if given.layout() == asked {
        return Ok(given.clone());
    }
    let given = given.layout();
    let text = format!(
        "argument {outer} of microbatch {microbatch} is {given}, the stages were recorded for {asked}"
    );
    Err(Error::new(Kind::Shape, text)
        .detail("help", "on a pipeline the microbatches of all steps have arguments of one layout"))
}

fn receive(rank: &Rank, call: &Call<'_>, layout: Layout, from: usize) -> Result<Tensor> {
    let shape = layout.local_shape(rank.coordinates());
    let buffer = rank.world().recv(call, shape.iter().product(), from)?;
    let piece = Piece::received(buffer, layout.dtype(), &shape);
    let tensor = Tensor::assemble(rank, layout, piece);
    note_sent(&tensor)?;
    Ok(tensor)
}

/// Where in the model, and by which line, a value is made.
fn place_of(stages: &Stages, slot: Slot) -> (&str, &'static Location<'static>) {
    match slot {
        Slot::Made { record, .. } => {
            let record = &stages.program().records[record as usize];
            (&record.path, record.site)
        }
        Slot::Outer(_) => ("", Location::caller()),
    }
}

fn missing() -> Error {
    Error::new(Kind::Unsupported, "a stage needs a value that is not there; the schedule was not verified")
}

impl std::fmt::Debug for Feed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Feed(weight {})", self.weight)
    }
}
