//! Stages: slices of a program, with their inputs and outputs.

use crate::id::Key;
use crate::program::{Program, Slot};
use crate::tape::no_gradient_error;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::tensor::reduce_buckets::BucketBytes;
use shardgrad_tensor::{Layout, op};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::panic::Location;

/// A program cut into stages.
#[derive(Clone, Debug)]
pub struct Stages {
    program: Program,
    stages: Vec<Stage>,
    /// The number of results that are losses.
    num_losses: usize,
    /// The slots with a gradient if all parameters are trained.
    gradient_slots: GradientSlots,
    /// The parameters whose gradients are reduced after each backward pass.
    reduced_each_pass: BTreeSet<Key>,
    /// The parameters that each pass gathers, with their gather groups.
    gathered_each_pass: BTreeMap<Key, u32>,
    bucket_bytes: BucketBytes,
}

/// The slots with a gradient in a step, whose cotangents stages send back.
#[derive(Clone, Debug)]
pub(super) struct GradientSlots(HashSet<Slot>);

impl GradientSlots {
    /// The slots of a transfer whose gradients are sent back.
    pub(super) fn filter<'a>(&'a self, slots: &'a [Slot]) -> impl Iterator<Item = Slot> + 'a {
        slots.iter().copied().filter(|slot| self.0.contains(slot))
    }
}

/// One slice of a program.
#[derive(Clone, Debug, Default)]
pub struct Stage {
    /// Its records.
    pub range: Range<usize>,
    /// The values it reads, by the earlier stage that makes them.
    pub inputs: Vec<(usize, Vec<Slot>)>,
    /// The values it makes for other stages, by the later stage that reads them.
    pub outputs: Vec<(usize, Vec<Slot>)>,
    /// The external inputs it reads, by index in the program.
    pub external_inputs: Vec<u32>,
}

impl Stages {
    /// Cuts a program before each of the given records, which are in order. The first result is the loss.
    #[must_use]
    pub fn new(program: Program, starts: &[usize]) -> Stages {
        Stages::with_losses(program, starts, 1)
    }

    /// Cuts a program whose first `num_losses` results are losses: the gradients are those of their sum. A step returns
    /// other results as they are.
    #[must_use]
    pub fn with_losses(program: Program, starts: &[usize], num_losses: usize) -> Stages {
        let borders: Vec<usize> =
            [0].into_iter().chain(starts.iter().copied()).chain([program.records.len()]).collect();
        let ranges: Vec<Range<usize>> = borders.windows(2).map(|w| w[0]..w[1]).collect();
        let mut stages: Vec<Stage> =
            ranges.iter().map(|range| Stage { range: range.clone(), ..Stage::default() }).collect();
        for to in 0..stages.len() {
            for slot in program.inputs_of(ranges[to].clone()) {
                match slot {
                    Slot::External(external) => stages[to].external_inputs.push(external),
                    Slot::Output { record, .. } => {
                        let from = stage_of(&ranges, record as usize);
                        push_slot(&mut stages[to].inputs, from, slot);
                        push_slot(&mut stages[from].outputs, to, slot);
                    }
                }
            }
        }
        for slot in &program.outputs {
            // A result that no op makes is returned by a stage that reads it, or by the first.
            let Slot::External(external) = slot else { continue };
            if stages.iter().all(|stage| !stage.external_inputs.contains(external)) {
                stages[0].external_inputs.push(*external);
            }
        }
        let gradient_slots = program.gradient_slots(num_losses, |_| true);
        let (reduced_each_pass, gathered_each_pass) = (BTreeSet::new(), BTreeMap::new());
        let bucket_bytes = BucketBytes::default();
        Stages {
            program,
            stages,
            num_losses,
            gradient_slots,
            reduced_each_pass,
            gathered_each_pass,
            bucket_bytes,
        }
    }

    /// The same stages, which reduce the gradients of some parameters to the stored layout after each backward pass, so that the sums
    /// over microbatches are sharded (ZeRO 2 and 3). All other gradients are reduced once per step.
    #[must_use]
    pub fn reducing_each_pass(self, keys: impl IntoIterator<Item = Key>) -> Stages {
        Stages { reduced_each_pass: keys.into_iter().collect(), ..self }
    }

    /// The same stages, of which each forward and backward pass gathers some parameters group by group and frees them after use
    /// (ZeRO 3 by microbatch). All other parameters are gathered once per step and kept.
    #[must_use]
    pub fn gathering_each_pass(self, groups: impl IntoIterator<Item = (Key, u32)>) -> Stages {
        Stages { gathered_each_pass: groups.into_iter().collect(), ..self }
    }

    /// Whether each pass gathers parameters.
    #[must_use]
    pub fn gathers_each_pass(&self) -> bool {
        !self.gathered_each_pass.is_empty()
    }

    /// The gather group of an external input that each pass gathers; `None` for all others.
    pub(super) fn gather_group(&self, external: u32) -> Option<u32> {
        let key = self.program.external_inputs[external as usize].key?;
        self.gathered_each_pass.get(&key).copied()
    }

    /// The gather groups that a forward pass of a stage uses, in order.
    pub(super) fn gather_order(&self, stage: usize) -> Vec<u32> {
        if !self.gathers_each_pass() {
            return Vec::new();
        }
        let records = &self.program.records[self.stages[stage].range.clone()];
        let group = |slot: &Slot| match slot {
            Slot::External(external) => self.gather_group(*external),
            Slot::Output { .. } => None,
        };
        let mut order: Vec<u32> =
            records.iter().flat_map(|record| &record.inputs).filter_map(group).collect();
        order.dedup();
        order
    }

    /// The same stages, which reduce gradients in buckets of a size.
    #[must_use]
    pub fn with_bucket_bytes(self, bucket_bytes: BucketBytes) -> Stages {
        Stages { bucket_bytes, ..self }
    }

    /// The sizes of the buckets of gradients.
    pub(super) fn bucket_bytes(&self) -> BucketBytes {
        self.bucket_bytes
    }

    /// Whether the gradient of an external input is reduced after each backward pass.
    pub(super) fn reduces_each_pass(&self, external: u32) -> bool {
        let key = self.program.external_inputs[external as usize].key;
        key.is_some_and(|key| self.reduced_each_pass.contains(&key))
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

    /// The pairs of stages (from, to) of which the second reads values of the first.
    #[must_use]
    pub fn links(&self) -> Vec<(usize, usize)> {
        let out = |(from, stage): (usize, &Stage)| -> Vec<(usize, usize)> {
            stage.outputs.iter().map(|(to, _)| (from, *to)).collect()
        };
        self.stages.iter().enumerate().flat_map(out).collect()
    }

    /// The parameters that a stage reads.
    #[must_use]
    pub fn keys(&self, stage: usize) -> BTreeSet<Key> {
        let key = |external: &u32| self.program.external_inputs[*external as usize].key;
        self.stages[stage].external_inputs.iter().filter_map(key).collect()
    }

    /// The trained parameters that several pipeline ranks read (tied weights), with those ranks in order; `stage_ranks` gives
    /// the rank of each stage. A rank that reads a parameter without a gradient is included, because its copy must stay
    /// equal to the others.
    #[must_use]
    pub fn shared_parameters(&self, stage_ranks: &[usize]) -> Vec<(Key, Vec<usize>)> {
        let trained = self.keys_with_gradient();
        let mut ranks: BTreeMap<Key, BTreeSet<usize>> = BTreeMap::new();
        for (stage, rank) in stage_ranks.iter().enumerate() {
            for key in self.keys(stage).intersection(&trained) {
                ranks.entry(*key).or_default().insert(*rank);
            }
        }
        let several = ranks.into_iter().filter(|(_, ranks)| ranks.len() > 1);
        several.map(|(key, ranks)| (key, ranks.into_iter().collect())).collect()
    }

    /// Refuses losses without a gradient, if only the parameters for which `is_trained` holds are trained: a step would
    /// change nothing.
    ///
    /// # Errors
    /// `Kind::Unsupported` with the line that makes the loss, as [`Var::backward`](crate::Var::backward) of the loss.
    #[track_caller]
    pub fn check_reached(&self, is_trained: impl Fn(Key) -> bool) -> Result<()> {
        if self.keys_with_gradient().into_iter().any(is_trained) {
            return Ok(());
        }
        let site = match self.losses().first() {
            Some(Slot::Output { record, .. }) => self.program.records[*record as usize].site,
            _ => Location::caller(),
        };
        Err(no_gradient_error(site))
    }

    /// Checks that the stages add the cotangents of each value in the order of a backward pass without stages, so that gradients have
    /// the same bits: the later stages add theirs first, each in one sum.
    ///
    /// # Errors
    /// `Kind::Unsupported`, naming the value, for a value whose sum the stages would group otherwise, for a parameter whose use in the
    /// model several stages read, and for a checkpointed block that a border cuts.
    pub fn check_canonical_sums(&self) -> Result<()> {
        let refused = |what: String| {
            Err(Error::new(
                Kind::Unsupported,
                format!("{what}, so the order of its sum depends on the stages"),
            )
            .detail("help", "cut the pipeline between layers, or give up the promise (--deterministic run)"))
        };
        let records = &self.program.records;
        let uses_in = |stage: usize, slot: Slot| {
            let inputs = records[self.stages[stage].range.clone()].iter().flat_map(|record| &record.inputs);
            inputs.filter(|used| **used == slot).count()
        };
        for slot in &self.gradient_slots.0 {
            let readers: Vec<usize> =
                (0..self.stages.len()).filter(|stage| uses_in(*stage, *slot) > 0).collect();
            match *slot {
                Slot::External(external) if readers.len() > 1 => {
                    let at = self.first_use(readers[0], external);
                    return refused(format!("stages {readers:?} read one use of a parameter"))
                        .map_err(|e| e.at(at));
                }
                Slot::Output { record, .. } => {
                    let maker = self.producer(*slot);
                    let later: Vec<usize> =
                        readers.into_iter().filter(|reader| Some(*reader) != maker).collect();
                    if later.len() > 2 || later.len() == 2 && uses_in(later[0], *slot) > 1 {
                        let path = &records[record as usize].path;
                        return refused(format!("stages {later:?} read a value made at `{path}`"));
                    }
                }
                Slot::External(_) => {}
            }
        }
        let borders = self.stages.iter().map(|stage| stage.range.start);
        let is_cut =
            |border: &usize| self.program.blocks.iter().any(|b| b.start < *border && *border < b.end);
        match borders.into_iter().find(is_cut) {
            Some(border) => {
                refused(format!("a stage begins within a checkpointed block, at `{}`", records[border].path))
            }
            None => Ok(()),
        }
    }

    /// The parameters with a gradient.
    pub(super) fn keys_with_gradient(&self) -> BTreeSet<Key> {
        let external_inputs = self.program.external_inputs.iter().enumerate();
        let gradient_slots =
            external_inputs.filter(|(at, _)| self.gradient_slots.0.contains(&Slot::External(*at as u32)));
        gradient_slots.filter_map(|(_, external)| external.key).collect()
    }

    /// The stage that makes a slot; of an external input, the first stage that reads it.
    #[must_use]
    pub fn producer(&self, slot: Slot) -> Option<usize> {
        self.stages.iter().position(|stage| match slot {
            Slot::Output { record, .. } => stage.range.contains(&(record as usize)),
            Slot::External(external) => stage.external_inputs.contains(&external),
        })
    }

    /// The line of the first op of a stage that reads an external input.
    pub(super) fn first_use(&self, stage: usize, external: u32) -> &'static Location<'static> {
        let mut records = self.program.records[self.stages[stage].range.clone()].iter();
        let first = records.find(|r| r.inputs.contains(&Slot::External(external)));
        first.map_or_else(Location::caller, |r| r.site)
    }

    /// The slots with a gradient if only the parameters for which `is_trained` holds are trained. No gradient is sent
    /// to a stage that trains no parameter and has no trained parameter before it.
    pub(super) fn gradient_slots(&self, is_trained: impl Fn(Key) -> bool) -> Cow<'_, GradientSlots> {
        match self.keys_with_gradient().into_iter().all(&is_trained) {
            true => Cow::Borrowed(&self.gradient_slots),
            false => Cow::Owned(self.program.gradient_slots(self.num_losses, is_trained)),
        }
    }

    /// Cuts another program of the same model, such as the model's forward function on other shapes, so that no stage
    /// reads a parameter that it does not read in this program: each op goes to the earliest stage that is not before
    /// the stage of the previous op and reads all parameters of the op. A stage may get no op.
    ///
    /// # Errors
    /// `Kind::Unsupported` for an op whose parameters no such stage reads.
    pub fn recut(&self, program: Program) -> Result<Stages> {
        let keys: Vec<BTreeSet<Key>> = (0..self.stages.len()).map(|stage| self.keys(stage)).collect();
        let mut starts = Vec::with_capacity(self.stages.len() - 1);
        for (at, record) in program.records.iter().enumerate() {
            let key = |slot: &Slot| match slot {
                Slot::External(external) => program.external_inputs[*external as usize].key,
                Slot::Output { .. } => None,
            };
            let reads_all =
                |stage: &usize| record.inputs.iter().filter_map(key).all(|key| keys[*stage].contains(&key));
            let stage = (starts.len()..keys.len()).find(reads_all).ok_or_else(|| {
                let (name, path) = (record.op.name(), &record.path);
                let text =
                    format!("no stage from {} on holds the parameters of {name} at `{path}`", starts.len());
                let help = "a model reads its parameters in one order, whatever the shapes of its arguments";
                Error::new(Kind::Unsupported, text).detail("help", help).at(record.site)
            })?;
            starts.resize(stage, at);
        }
        starts.resize(keys.len() - 1, program.records.len());
        let (reduced_each_pass, gathered_each_pass) =
            (self.reduced_each_pass.clone(), self.gathered_each_pass.clone());
        let stages = Stages::with_losses(program, &starts, self.num_losses);
        Ok(Stages { reduced_each_pass, gathered_each_pass, bucket_bytes: self.bucket_bytes, ..stages })
    }
}

impl Program {
    /// The slots with a gradient: trained parameters, and results of differentiable ops on them that the losses depend
    /// on.
    fn gradient_slots(&self, num_losses: usize, is_trained: impl Fn(Key) -> bool) -> GradientSlots {
        let mut gradient_slots =
            self.slots_with_gradient(|external| self.external_inputs[external].key.is_some_and(&is_trained));
        let slots_reaching_losses = self.slots_reaching_losses(num_losses);
        gradient_slots.retain(|slot| slots_reaching_losses.contains(slot));
        GradientSlots(gradient_slots)
    }

    /// The slots that the losses depend on through differentiable ops.
    fn slots_reaching_losses(&self, num_losses: usize) -> HashSet<Slot> {
        let mut slots_reaching_losses: HashSet<Slot> =
            self.outputs.iter().take(num_losses).copied().collect();
        for (at, record) in self.records.iter().enumerate().rev() {
            let made = |out: usize| Slot::Output { record: at as u32, out: out as u32 };
            if !(0..record.outputs.len()).any(|out| slots_reaching_losses.contains(&made(out))) {
                continue;
            }
            let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|s| self.layout(*s)).collect();
            let differentiable = op::differentiable_args(&*record.op, &layouts);
            let flows = |(i, _): &(usize, &Slot)| differentiable[*i] && !record.stops_gradient[*i];
            slots_reaching_losses
                .extend(record.inputs.iter().enumerate().filter(flows).map(|(_, slot)| *slot));
        }
        slots_reaching_losses
    }
}

fn stage_of(ranges: &[Range<usize>], record: usize) -> usize {
    ranges.iter().position(|r| r.contains(&record)).expect("every record is in a stage")
}

fn push_slot(lists: &mut Vec<(usize, Vec<Slot>)>, stage: usize, slot: Slot) {
    match lists.iter_mut().find(|(known, _)| *known == stage) {
        Some((_, slots)) => slots.push(slot),
        None => lists.push((stage, vec![slot])),
    }
}
