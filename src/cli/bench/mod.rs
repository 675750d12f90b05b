//! `bench`: how fast things are here. Each result is checked before it is timed; a wrong one is not timed.

mod line;
mod kernels;
mod collectives;
mod tape;
mod pipeline;
mod train_step;

use super::args::{BenchArgs, BenchChoice};
use line::Bench;
use shardgrad::Result;

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let bench = Bench { limit: args.seconds, json: args.json };
    let wanted = |choice| args.what.is_empty() || args.what.contains(&choice);
    if wanted(BenchChoice::Kernels) {
        kernels::run(&bench)?;
    }
    if wanted(BenchChoice::Collectives) {
        collectives::run(&bench)?;
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
    Ok(())
}
