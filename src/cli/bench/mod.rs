//! `bench`: how fast things are here. Each result is checked before it is timed; a wrong one is not timed.

mod line;
mod roof;
mod chart;
mod steps;
mod case;
mod memory;
mod kernels;
mod products;
mod collectives;
mod tape;
mod pipeline;
mod train_step;
mod growth;
mod card;

use super::args::{BenchArgs, BenchChoice};
use crate::outputs::check_target;
use line::Bench;
use shardgrad::kernels::Device;
use shardgrad::{Error, Kind, Result};

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let plain = Bench { limit: args.seconds, json: args.json, roof: None, device: Device::Cpu };
    let wanted = |choice: BenchChoice| match args.what.is_empty() {
        true => !choice.takes_minutes(),
        false => args.what.contains(&choice),
    };
    if wanted(BenchChoice::Growth) {
        // Found out before minutes are spent.
        check_target("--picture", &args.picture, [])?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rated = [BenchChoice::Kernels, BenchChoice::TrainStep, BenchChoice::Presets, BenchChoice::Growth];
    let roof = rated.into_iter().any(wanted).then(|| roof::measure(&plain, cores)).transpose()?;
    let bench = Bench { roof, ..plain };
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
        train_step::run(&bench)?;
    }
    if wanted(BenchChoice::Presets) {
        train_step::run_large(&bench)?;
    }
    if wanted(BenchChoice::Growth) {
        growth::run(&bench, &args.picture)?;
    }
    let on_card = Bench { device: args.device, ..plain };
    let asked = wanted(BenchChoice::CardKernels) || wanted(BenchChoice::CardSteps);
    if asked && args.device == Device::Cpu {
        let why = "card-kernels and card-steps measure a card, and --device cpu is none";
        return Err(Error::new(Kind::Config, why).detail("help", "use --device cuda or cuda:N"));
    }
    if wanted(BenchChoice::CardKernels) {
        card::run(&on_card)?;
    }
    if wanted(BenchChoice::CardSteps) {
        card::run_steps(&on_card)?;
    }
    Ok(())
}
