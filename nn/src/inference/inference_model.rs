//! `InferenceModel`: a model for evaluation and decoding on any mesh; on a pipeline each rank holds the parameters of its stage.

use crate::module::Module;
use crate::module::precision::Precision;
use crate::pipelined_model;
use crate::plan::Plan;
use crate::sharded_model::Model;
use shardgrad_autograd::pipeline::{Cut, Stages};
use shardgrad_autograd::{Program, Var};
use shardgrad_tensor::{Axis, DType, Layout, Rank, Result, Tensor, Value};

/// A model for inference on one rank of a mesh. If the plan has a pipeline and the mesh has its axis, a forward function of the
/// model is recorded and cut into one stage per pipeline rank, and this rank holds the parameters of its stage only.
///
/// Every rank builds the same model and calls its methods together with the other ranks.
#[doc(alias = "inference_mode")]
#[doc(alias = "pipeline inference")]
#[derive(Debug)]
pub struct InferenceModel<M> {
    model: Model<M>,
    pipeline: Option<InferencePipeline>,
}

/// The pipeline of an inference model.
#[derive(Debug)]
struct InferencePipeline {
    axis: Axis,
    /// The stages of the first recording; other recordings are cut by the parameters of these stages.
    stages: Stages,
    /// The pipeline rank of each stage.
    stage_ranks: Vec<usize>,
}

/// The pipeline ranks that get the first result of a forward function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultRanks {
    /// The ranks of the stage that computes the result.
    Producer,
    /// The ranks of the first stage, to which rank 0 of the world belongs.
    FirstStage,
    /// The ranks of all stages.
    AllStages,
}

impl<M: Module> InferenceModel<M> {
    /// Lays out the parameters of a module as `plan` says and initializes them in `dtype`, as
    /// [`Model::with_dtype`]. On a pipeline, `forward` is recorded on arguments of the layouts that `arguments` returns for this
    /// rank on the mesh without the pipeline axis, and cut as the plan says, [`Cut::Measured`] as [`Cut::Balanced`]; the schedule of
    /// the plan is for training and not used.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::Config` if the recording cannot be cut into as many stages as there are pipeline ranks; errors
    /// of `arguments` and `forward`.
    #[track_caller]
    pub fn new(
        rank: &Rank,
        module: M,
        plan: &Plan,
        seed: u64,
        dtype: DType,
        arguments: impl FnOnce(&Rank) -> Result<Vec<Layout>>,
        forward: impl Fn(&M, &[Var]) -> Result<Vec<Var>>,
    ) -> Result<InferenceModel<M>> {
        let Some((pipeline, axis)) = plan.pipeline_on(rank.mesh()) else {
            return Ok(InferenceModel {
                model: Model::with_dtype(rank, module, plan, seed, dtype)?,
                pipeline: None,
            });
        };
        let model = pipelined_model::stage_model(rank, axis, module, plan, Precision::of(dtype))?;
        let program = Program::record(model.rank(), &arguments(model.rank())?, None, |x| forward(&model, x))?;
        let cut = match &pipeline.cut {
            Cut::Measured => &Cut::Balanced,
            cut => cut,
        };
        let stage_ranks: Vec<usize> = (0..rank.mesh().size(axis)).collect();
        let starts = program.cut(model.rank(), cut, stage_ranks.len())?;
        let own_rank = rank.coordinate(axis);
        let stages = Stages::new(program, &starts);
        let stages = pipelined_model::with_gather_policies(stages, &model, &stage_ranks, own_rank);
        pipelined_model::init_params(&model, axis, &stages, &stage_ranks, seed)?;
        Ok(InferenceModel { model, pipeline: Some(InferencePipeline { axis, stages, stage_ranks }) })
    }

    /// Returns the model; on a pipeline it has the parameters of this rank's stage only, so that its own methods cannot run all
    /// layers.
    #[must_use]
    pub fn model(&self) -> &Model<M> {
        &self.model
    }

    /// Returns the rank on whose mesh arguments must be: without the pipeline axis, if there is one.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        self.model.rank()
    }

    /// Returns the number of pipeline stages; 1 without a pipeline.
    #[must_use]
    pub fn num_stages(&self) -> usize {
        self.pipeline.as_ref().map_or(1, |pipeline| pipeline.stage_ranks.len())
    }

    /// Runs a forward function on microbatches, which are lists of arguments of the same layouts. Dropout is off, and nothing is saved
    /// for a backward pass. Returns the results of each microbatch, with the same bits as without a pipeline. The first result is
    /// `None` on ranks outside of `first_result_on`, other results on ranks of stages that do not compute them.
    ///
    /// On a pipeline, `forward` is recorded once per call and cut so that each stage reads its own parameters only; a stage computes
    /// a microbatch while later stages compute earlier ones. Arguments that no op of this rank's stage reads need no values
    /// ([`Tensor::meta`]).
    ///
    /// # Errors
    /// Errors of `forward`, ops and collectives; `Kind::Shape` for microbatches of different layouts on a pipeline;
    /// `Kind::Unsupported` if `forward` reads the parameters in another order than the forward function of the constructor.
    #[doc(alias = "no_grad")]
    #[track_caller]
    pub fn forward(
        &self,
        microbatches: &[Vec<Tensor>],
        first_result_on: ResultRanks,
        forward: impl Fn(&M, &[Var]) -> Result<Vec<Var>>,
    ) -> Result<Vec<Vec<Option<Tensor>>>> {
        let Some(pipeline) = &self.pipeline else {
            let results_of = |arguments: &Vec<Tensor>| {
                let tape = self.model.inference_tape();
                let arguments: Vec<Var> = arguments.iter().map(|t| tape.constant(t.clone())).collect();
                Ok(forward(&self.model, &arguments)?
                    .iter()
                    .map(|result| Some(result.tensor().clone()))
                    .collect())
            };
            return microbatches.iter().map(results_of).collect();
        };
        let Some(first) = microbatches.first() else { return Ok(Vec::new()) };
        let layouts: Vec<Layout> = first.iter().map(|t| t.layout().clone()).collect();
        let program = Program::record(self.rank(), &layouts, None, |x| forward(&self.model, x))?;
        let stages = pipeline.stages.recut(program)?;
        let first = 0..stages.program().outputs.len().min(1);
        let (sent, to) = match first_result_on {
            ResultRanks::Producer => (0..0, &[][..]),
            ResultRanks::FirstStage => (first, &pipeline.stage_ranks[..1]),
            ResultRanks::AllStages => (first, &pipeline.stage_ranks[..]),
        };
        let stages = (pipeline.axis, &stages, &pipeline.stage_ranks[..]);
        pipelined_model::forward_microbatches(&self.model, stages, microbatches, sent, to)
    }
}
