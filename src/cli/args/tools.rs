//! Options of the commands that look around: the op table, the machine, speeds.

use clap::{Args, ValueEnum};
use shardgrad::kernels::Device;

/// Options of `ops`.
#[derive(Args, Clone, Debug)]
pub(crate) struct OpsArgs {
    /// Print one JSON object a line
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,
    /// Print docs/ops.md
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// Options of `inspect`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    /// Folder of a model, of a checkpoint, or of a run (its --out)
    #[arg(value_name = "DIR")]
    pub(crate) dir: std::path::PathBuf,
    /// Print one JSON object and nothing else on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object and nothing else on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure [default: what takes seconds]
    #[arg(value_enum, value_name = "WHAT")]
    pub(crate) what: Vec<BenchChoice>,
    /// Seconds for each line
    #[arg(long, value_name = "SECONDS", default_value = "0.2", value_parser = super::values::seconds)]
    pub(crate) seconds: std::time::Duration,
    /// Where `growth` draws its picture
    #[arg(long, value_name = "FILE", default_value = "growth.svg")]
    pub(crate) picture: std::path::PathBuf,
    /// Where `card-kernels` and `card-steps` measure: cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cuda", value_parser = super::values::device)]
    pub(crate) device: Device,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `bench` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchChoice {
    /// Kernels on all cores
    Kernels,
    /// Products of f32 in 78 shapes, on one thread and on all: less than a minute
    Products,
    /// Collectives between ranks
    Collectives,
    /// The cost of an op beside its kernel, plain and on a mesh
    Tape,
    /// Pipeline schedules of sleeping stages, beside the simulator
    Pipeline,
    /// Whole training steps of the preset tiny
    TrainStep,
    /// Whole training steps of the presets s, m and l: a minute or two
    Presets,
    /// Rates and memory over length, width, depth, microbatches and ranks: minutes
    Growth,
    /// Kernels on an NVIDIA card
    CardKernels,
    /// Whole training steps of GPT-2 124M and Llama 3 8B on an NVIDIA card
    CardSteps,
}

impl BenchChoice {
    /// Whether it is done only if asked for.
    pub(crate) fn takes_minutes(self) -> bool {
        use BenchChoice::{CardKernels, CardSteps, Growth, Presets, Products};
        matches!(self, Products | Presets | Growth | CardKernels | CardSteps)
    }
}
