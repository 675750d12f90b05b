//! Stages: slices of a program, with what each takes from others and leaves for them.

use crate::id::Key;
use crate::program::{Program, Slot};
use crate::var::unreached;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::{Layout, op};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::panic::Location;

/// A program that is cut into stages.
#[derive(Clone, Debug)]
pub struct Stages {
    program: Program,
    stages: Vec<Stage>,
    /// How many of the results are losses.
    num_losses: usize,
    /// What has a gradient where all parameters are trained.
    live: Live,
}

/// What has a gradient in a step, so that its cotangent is handed back from stage to stage.
#[derive(Clone, Debug)]
pub(super) struct Live(HashSet<Slot>);

impl Live {
    /// What of a transfer has a gradient to send back.
    pub(super) fn of<'a>(&'a self, slots: &'a [Slot]) -> impl Iterator<Item = Slot> + 'a {
        slots.iter().copied().filter(|slot| self.0.contains(slot))
    }
}

/// One slice of a program.
#[derive(Clone, Debug, Default)]
pub struct Stage {
    /// Its records.
    pub range: Range<usize>,
    /// What it needs, by the earlier stage that makes it.
    pub takes: Vec<(usize, Vec<Slot>)>,
    /// What it makes for others, by the later stage that needs it.
    pub gives: Vec<(usize, Vec<Slot>)>,
    /// The outer slots that it reads.
    pub outers: Vec<u32>,
}

impl Stages {
    /// Cuts a program before each of some records, which are in order. The first result is its loss.
    #[must_use]
    pub fn new(program: Program, starts: &[usize]) -> Stages {
        Stages::with_losses(program, starts, 1)
    }

    /// Cuts a program whose first `num_losses` results are losses: the gradients are those of their sum. Other results come out
    /// of a step as they are.
    #[must_use]
    pub fn with_losses(program: Program, starts: &[usize], num_losses: usize) -> Stages {
        let borders: Vec<usize> =
            [0].into_iter().chain(starts.iter().copied()).chain([program.records.len()]).collect();
        let ranges: Vec<Range<usize>> = borders.windows(2).map(|w| w[0]..w[1]).collect();
        let mut stages: Vec<Stage> =
            ranges.iter().map(|range| Stage { range: range.clone(), ..Stage::default() }).collect();
        for to in 0..stages.len() {
            for slot in program.needs(ranges[to].clone()) {
                match slot {
                    Slot::Outer(outer) => stages[to].outers.push(outer),
                    Slot::Made { record, .. } => {
                        let from = stage_of(&ranges, record as usize);
                        file(&mut stages[to].takes, from, slot);
                        file(&mut stages[from].gives, to, slot);
                    }
                }
            }
        }
        let live = program.live(num_losses, |_| true);
        Stages { program, stages, num_losses, live }
    }

    /// The results that are losses.
    #[must_use]
    pub fn losses(&self) -> &[Slot] {
        &self.program.outputs[..self.num_losses.min(self.program.outputs.len())]
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The stages in order.
    #[must_use]
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The pairs of stages of which the second needs something that the first makes.
    #[must_use]
    pub fn links(&self) -> Vec<(usize, usize)> {
        let out = |(from, stage): (usize, &Stage)| -> Vec<(usize, usize)> {
            stage.gives.iter().map(|(to, _)| (from, *to)).collect()
        };
        self.stages.iter().enumerate().flat_map(out).collect()
    }

    /// The parameters that a stage reads.
    #[must_use]
    pub fn keys(&self, stage: usize) -> BTreeSet<Key> {
        let key = |outer: &u32| self.program.outers[*outer as usize].key;
        self.stages[stage].outers.iter().filter_map(key).collect()
    }

    /// The parameters with a gradient that several places read, with those places in order; `place` says where each stage
    /// lives. A place that reads one without a gradient is among them: its copy is to stay equal to the others.
    #[must_use]
    pub fn shared(&self, place: &[usize]) -> Vec<(Key, Vec<usize>)> {
        let trained = self.reached();
        let mut places: BTreeMap<Key, BTreeSet<usize>> = BTreeMap::new();
        for (stage, place) in place.iter().enumerate() {
            for key in self.keys(stage).intersection(&trained) {
                places.entry(*key).or_default().insert(*place);
            }
        }
        let several = places.into_iter().filter(|(_, places)| places.len() > 1);
        several.map(|(key, places)| (key, places.into_iter().collect())).collect()
    }

    /// Refuses losses that no gradient reaches where only the parameters for which `is_trained` holds are trained: a step would
    /// change nothing.
    ///
    /// # Errors
    /// `Kind::Unsupported` with the line that makes the loss, as [`Var::backward`](crate::Var::backward) of it.
    #[track_caller]
    pub fn check_reached(&self, is_trained: impl Fn(Key) -> bool) -> Result<()> {
        if self.reached().into_iter().any(is_trained) {
            return Ok(());
        }
        let site = match self.losses().first() {
            Some(Slot::Made { record, .. }) => self.program.records[*record as usize].site,
            _ => Location::caller(),
        };
        Err(unreached(site))
    }

    /// The parameters with a gradient.
    fn reached(&self) -> BTreeSet<Key> {
        let outers = self.program.outers.iter().enumerate();
        let live = outers.filter(|(at, _)| self.live.0.contains(&Slot::Outer(*at as u32)));
        live.filter_map(|(_, outer)| outer.key).collect()
    }

    /// The stage that makes a result of the program; `None` if the result comes from outside.
    #[must_use]
    pub fn maker(&self, slot: Slot) -> Option<usize> {
        let Slot::Made { record, .. } = slot else { return None };
        self.stages.iter().position(|s| s.range.contains(&(record as usize)))
    }

    /// The line of the first op of a stage that reads an outer slot.
    pub(super) fn first_use(&self, stage: usize, outer: u32) -> &'static Location<'static> {
        let mut records = self.program.records[self.stages[stage].range.clone()].iter();
        let first = records.find(|r| r.inputs.contains(&Slot::Outer(outer)));
        first.map_or_else(Location::caller, |r| r.site)
    }

    /// What has a gradient where only the parameters for which `is_trained` holds are trained: nothing goes back to a stage that
    /// trains none and has none that is trained before it.
    pub(super) fn live(&self, is_trained: impl Fn(Key) -> bool) -> Cow<'_, Live> {
        match self.reached().into_iter().all(&is_trained) {
            true => Cow::Borrowed(&self.live),
            false => Cow::Owned(self.program.live(self.num_losses, is_trained)),
        }
    }

    /// Refuses another program than the same model's on other shapes.
    ///
    /// # Errors
    /// `Kind::Unsupported` if the ops are not the same.
    pub fn recut(&self, program: Program) -> Result<Stages> {
        let names = |p: &Program| p.records.iter().map(|r| r.op.name()).collect::<Vec<_>>();
        if names(&program) != names(&self.program) {
            return Err(Error::new(
                Kind::Unsupported,
                "on another shape the model applies other ops, so its stages cannot stay where they are",
            ));
        }
        let starts: Vec<usize> = self.stages[1..].iter().map(|s| s.range.start).collect();
        Ok(Stages::with_losses(program, &starts, self.num_losses))
    }
}

impl Program {
    /// What has a gradient: parameters that are trained, and what is made of them by ops that have one, if it takes part in the
    /// result.
    fn live(&self, num_losses: usize, is_trained: impl Fn(Key) -> bool) -> Live {
        let mut live = self.reached(|outer| self.outers[outer].key.is_some_and(&is_trained));
        let reaching = self.reaching(num_losses);
        live.retain(|slot| reaching.contains(slot));
        Live(live)
    }

    /// What the losses depend on, by ways that a gradient takes back.
    fn reaching(&self, num_losses: usize) -> HashSet<Slot> {
        let mut reaching: HashSet<Slot> = self.outputs.iter().take(num_losses).copied().collect();
        for (at, record) in self.records.iter().enumerate().rev() {
            let made = |out: usize| Slot::Made { record: at as u32, out: out as u32 };
            if !(0..record.outputs.len()).any(|out| reaching.contains(&made(out))) {
                continue;
            }
            let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|s| self.layout(*s)).collect();
            let differentiable = op::differentiable_args(&*record.op, &layouts);
            let flows = |(i, _): &(usize, &Slot)| differentiable[*i] && !record.stops[*i];
            reaching.extend(record.inputs.iter().enumerate().filter(flows).map(|(_, slot)| *slot));
        }
        reaching
    }
}

fn stage_of(ranges: &[Range<usize>], record: usize) -> usize {
    ranges.iter().position(|r| r.contains(&record)).expect("every record is in a stage")
}

fn file(lists: &mut Vec<(usize, Vec<Slot>)>, stage: usize, slot: Slot) {
    match lists.iter_mut().find(|(known, _)| *known == stage) {
        Some((_, slots)) => slots.push(slot),
        None => lists.push((stage, vec![slot])),
    }
}
