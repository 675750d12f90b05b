//! A model on a pipeline: recorded, cut, and filled only where its parameters are used.

mod choose;

use crate::module::Module;
use crate::param::{Home, Param};
use crate::placed::Model;
use crate::plan::{Pipeline, Plan};
use crate::precision::Precision;
use shardgrad_autograd::pipeline::{Feed, Outcome, Runner, Schedule, Stages};
use shardgrad_autograd::{Draw, Noise, OpRecord, Program, Var};
use shardgrad_tensor::{Axis, Context, Layout, Rank, Result, Tensor};
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

/// What random ops are recorded with; every replay draws its own.
const RECORDED: Noise = Noise { seed: 0, step: 0, first_row: 0 };

/// The model text: results from arguments.
pub(crate) type Text<'a> = &'a dyn Fn(&[Var]) -> Result<Vec<Var>>;

/// The stages of a model, one recording for each shape of its arguments.
#[derive(Debug)]
pub(crate) struct Staged {
    axis: Axis,
    seed: u64,
    schedule: Schedule,
    recordings: RefCell<Vec<(Vec<Layout>, Rc<Stages>)>>,
}

impl Staged {
    /// Records the model's text on arguments such as these, cuts it, proves the schedule, and draws the parameters of
    /// this rank's stage. The model is on the slice of the world without the axis. Where cut or schedule depend on
    /// times, those are measured first.
    #[track_caller]
    pub(crate) fn new<M: Module>(
        model: &Model<M>,
        (pipeline, axis): (&Pipeline, Axis),
        (seed, num_microbatches): (u64, usize),
        arguments: &[Tensor],
        text: Text<'_>,
    ) -> Result<Staged> {
        let rank = model.rank();
        let here = rank.world().coordinate(axis);
        let layouts: Vec<Layout> = arguments.iter().map(|t| t.layout().clone()).collect();
        let program = Program::record(rank, &layouts, Some(Noise { seed, ..RECORDED }), text)?;
        let (schedule, starts) =
            choose::choose(model, (pipeline, axis), (seed, num_microbatches), &program, arguments)?;
        let stages = Stages::new(program, &starts);
        let links = stages.links();
        let schedule = schedule.with_transfers(&links);
        schedule.verify(&links)?;
        let keys: Vec<_> = (0..schedule.num_stages()).map(|stage| stages.keys(stage)).collect();
        for param in model.params() {
            let uses = |stage: &usize| keys[*stage].contains(&param.key());
            let mut places: Vec<usize> = (0..keys.len()).filter(uses).map(|s| schedule.place[s]).collect();
            places.sort_unstable();
            places.dedup();
            if places.is_empty() {
                // A parameter that no op uses still has a value to save.
                places.push(0);
            }
            param.fill(rank, seed, Some(Home { axis, places, here }))?;
        }
        let recordings = RefCell::new(vec![(layouts, Rc::new(stages))]);
        Ok(Staged { axis, seed, schedule, recordings })
    }

    /// The schedule, transfers included.
    pub(crate) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The records with which stages begin, and where in the model those are.
    pub(crate) fn starts(&self) -> Vec<(usize, Rc<str>)> {
        let stages = self.recordings.borrow()[0].1.clone();
        let records = &stages.program().records;
        let path = |at: usize| records.get(at).map_or_else(|| Rc::from(""), |r| r.path.clone());
        stages.stages().iter().map(|stage| (stage.range.start, path(stage.range.start))).collect()
    }

    /// The stages for arguments of these layouts, cut as the first recording was.
    fn stages(&self, rank: &Rank, arguments: &[Layout], text: Text<'_>) -> Result<Rc<Stages>> {
        if let Some((_, stages)) = self.recordings.borrow().iter().find(|(known, _)| known == arguments) {
            return Ok(stages.clone());
        }
        let program = Program::record(rank, arguments, Some(Noise { seed: self.seed, ..RECORDED }), text)?;
        let stages = Rc::new(self.recordings.borrow()[0].1.recut(program)?);
        self.recordings.borrow_mut().push((arguments.to_vec(), stages.clone()));
        Ok(stages)
    }

    /// The ops of a rank's stages.
    pub(crate) fn records(&self, rank: &Rank) -> Vec<OpRecord> {
        let (stages, here) = (self.recordings.borrow()[0].1.clone(), rank.world().coordinate(self.axis));
        let own = stages.stages().iter().zip(&self.schedule.place).filter(|(_, place)| **place == here);
        own.flat_map(|(stage, _)| stages.program().records[stage.range.clone()].to_vec()).collect()
    }

    /// A step of the schedule on all microbatches, whose arguments `read` gives; its gradients bear a factor. Every
    /// microbatch has arguments of one shape. A loss that no gradient reaches is refused on every stage: no stage knows by
    /// itself what is frozen on others.
    pub(crate) fn train<M: Module>(
        &self,
        model: &Model<M>,
        read: &dyn Fn(usize) -> Result<Vec<Tensor>>,
        noise: &dyn Fn(usize) -> Noise,
        loss_scale: f64,
    ) -> Result<Outcome> {
        let stages = self.recordings.borrow()[0].1.clone();
        let runner =
            Runner { rank: model.rank(), axis: self.axis, stages: &stages, schedule: &self.schedule };
        runner.run(&Feed {
            arguments: read,
            parameter: &parameters(model),
            is_trained: &trained(model),
            draw: &|microbatch| Draw::Of(noise(microbatch)),
            weight: loss_scale / self.schedule.num_microbatches as f64,
        })
    }

    /// The result on some arguments, on the ranks of the stage that makes it; nothing is drawn, no gradient is kept.
    pub(crate) fn infer<M: Module>(
        &self,
        model: &Model<M>,
        arguments: &[Tensor],
        text: Text<'_>,
    ) -> Result<Option<Tensor>> {
        let layouts: Vec<Layout> = arguments.iter().map(|t| t.layout().clone()).collect();
        let stages = self.stages(model.rank(), &layouts, text)?;
        let schedule = Schedule::forward_only(&self.schedule.place, self.schedule.ranks.len())?;
        let links = stages.links();
        let schedule = schedule.with_transfers(&links);
        schedule.verify(&links)?;
        let runner = Runner { rank: model.rank(), axis: self.axis, stages: &stages, schedule: &schedule };
        let outcome = runner.run(&Feed {
            arguments: &|_| Ok(arguments.to_vec()),
            parameter: &parameters(model),
            is_trained: &trained(model),
            draw: &|_| Draw::Off,
            weight: 1.0,
        })?;
        Ok(outcome.results.into_iter().flatten().next().flatten())
    }
}

/// Parameters by key; what happens next is said to be theirs.
fn parameters<M: Module>(model: &Model<M>) -> impl Fn(u64) -> Tensor {
    move |key| {
        let param =
            model.params().iter().find(|p| p.key() == key).expect("a program uses its own model's keys");
        Context::of(model.rank()).set_path(&param.path());
        param.tensor()
    }
}

/// Whether parameters are trained, by key, those of other stages too.
fn trained<M: Module>(model: &Model<M>) -> impl Fn(u64) -> bool {
    let frozen: HashSet<u64> = model.params().iter().filter(|p| p.is_frozen()).map(Param::key).collect();
    move |key| !frozen.contains(&key)
}

/// The model of a plan on the ranks that share a place on the pipeline axis, without values.
pub(crate) fn outline<M: Module>(
    rank: &Rank,
    axis: Axis,
    module: M,
    plan: &Plan,
    precision: Precision,
) -> Result<Model<M>> {
    Model::outline(&rank.slice(axis), module, plan, precision)
}
