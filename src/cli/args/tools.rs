//! Options of `ops`, `inspect`, `doctor` and `bench`.

use clap::{Args, ValueEnum};
use shardgrad::kernels::Device;

/// Options of `ops`.
#[derive(Args, Clone, Debug)]
pub(crate) struct OpsArgs {
    /// Print one JSON object per line
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,
    /// Print the table as Markdown (docs/ops.md)
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// Options of `inspect`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    /// Model folder, checkpoint folder, or run folder (its --out)
    #[arg(value_name = "DIR")]
    pub(crate) dir: std::path::PathBuf,
    /// Print one JSON object on stdout and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object on stdout and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Benchmarks to run [default: those that take seconds]
    #[arg(value_enum, value_name = "WHAT")]
    pub(crate) what: Vec<BenchChoice>,
    /// Measuring time per result line, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "0.2", value_parser = super::values::seconds)]
    pub(crate) seconds: std::time::Duration,
    /// SVG file that `growth` draws
    #[arg(long, value_name = "FILE", default_value = "growth.svg")]
    pub(crate) picture: std::path::PathBuf,
    /// GPU for `card-kernels`, `card-steps` and `card-llama`: cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cuda", value_parser = super::values::device)]
    pub(crate) device: Device,
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchChoice {
    /// CPU kernels on all cores
    Kernels,
    /// f32 matmuls in 78 shapes, on one thread and on all cores; under a minute
    Products,
    /// Collectives between ranks: all-reduce, reduce-scatter, all-gather, all-to-all
    Collectives,
    /// Overhead per op (dispatch, tape, layouts), without and with a mesh
    Tape,
    /// Pipeline schedules with sleeping stages, compared with the simulator
    Pipeline,
    /// Training steps of preset tiny
    TrainStep,
    /// Training steps of presets s, m and l; a minute or two
    Presets,
    /// Throughput and memory over sequence length, width, depth, microbatches and ranks; minutes
    Growth,
    /// Memory, bytes and time of ZeRO, FSDP and hybrid sharding with pipelines and tensor parallelism, as a Markdown table; minutes
    ShardedData,
    /// Training steps between threads whose calls have a latency, and between processes over TCP: what overlaps; a minute or two
    Latency,
    /// Kernels on an NVIDIA GPU
    CardKernels,
    /// Training steps of GPT-2 124M on an NVIDIA GPU
    CardSteps,
    /// Training steps of Llama 3 8B on an NVIDIA GPU of 100 GiB or more, of half of it on a smaller one
    CardLlama,
}

impl BenchChoice {
    /// Returns whether the benchmark runs only if named.
    pub(crate) fn takes_minutes(self) -> bool {
        use BenchChoice::{
            CardKernels, CardLlama, CardSteps, Growth, Latency, Presets, Products, ShardedData,
        };
        let is_on_gpu = matches!(self, CardKernels | CardSteps | CardLlama);
        is_on_gpu || matches!(self, Products | Presets | Growth | ShardedData | Latency)
    }
}
