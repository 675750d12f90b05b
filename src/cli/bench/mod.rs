//! `bench`: benchmarks. Every result is checked before it is timed.

mod measurement;
mod roofline;
mod chart;
mod training;
mod kernel_case;
mod memory_bound;
mod kernels;
mod products;
mod collectives;
mod tape;
mod pipeline;
mod growth;
mod sharded_data;
mod latency;
mod gpu;

use super::args::{BenchArgs, BenchChoice};
use crate::outputs::check_target;
use measurement::Bench;
use shardgrad::kernels::Device;
use shardgrad::{Error, Kind, Result};

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let plain = Bench { limit: args.seconds, json: args.json, roofline: None, device: Device::Cpu };
    let wanted = |choice: BenchChoice| match args.what.is_empty() {
        true => !choice.takes_minutes(),
        false => args.what.contains(&choice),
    };
    if wanted(BenchChoice::Growth) {
        // Checked before minutes are spent.
        check_target("--picture", &args.picture, [])?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rated = [BenchChoice::Kernels, BenchChoice::TrainStep, BenchChoice::Presets, BenchChoice::Growth];
    let roofline = rated.into_iter().any(wanted).then(|| roofline::measure(&plain, cores)).transpose()?;
    let bench = Bench { roofline, ..plain };
    if wanted(BenchChoice::Kernels) {
        kernels::run(&bench)?;
    }
    if wanted(BenchChoice::Products) {
        products::run(&plain)?;
    }
    if wanted(BenchChoice::Collectives) {
        collectives::run(&plain)?;
    }
    if wanted(BenchChoice::Tape) {
        tape::run(&bench)?;
    }
    if wanted(BenchChoice::Pipeline) {
        pipeline::run(&bench)?;
    }
    if wanted(BenchChoice::TrainStep) {
        training::run_tiny(&bench)?;
    }
    if wanted(BenchChoice::Presets) {
        training::run_presets(&bench)?;
    }
    if wanted(BenchChoice::Growth) {
        growth::run(&bench, &args.picture)?;
    }
    if wanted(BenchChoice::ShardedData) {
        sharded_data::run(&plain)?;
    }
    if wanted(BenchChoice::Latency) {
        latency::run(&plain)?;
    }
    let gpu_bench = Bench { device: args.device, ..plain };
    let on_gpu = [BenchChoice::CardKernels, BenchChoice::CardSteps, BenchChoice::CardLlama];
    if on_gpu.into_iter().any(wanted) && args.device == Device::Cpu {
        let why = "card-kernels, card-steps and card-llama run on a GPU, but --device is cpu";
        return Err(Error::new(Kind::Config, why).detail("help", "use --device cuda or cuda:N"));
    }
    if wanted(BenchChoice::CardKernels) {
        gpu::run(&gpu_bench)?;
    }
    if wanted(BenchChoice::CardSteps) {
        gpu::run_gpt2(&gpu_bench)?;
    }
    if wanted(BenchChoice::CardLlama) {
        gpu::run_llama(&gpu_bench)?;
    }
    Ok(())
}
