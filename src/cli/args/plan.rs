//! Options of `plan`.

use super::values::{self, ScheduleArg};
use clap::Args;
use shardgrad::autograd::pipeline::PassTimes;
use std::path::PathBuf;

/// Options of `plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    /// Pipeline schedule: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, searched (list scheduling by
    /// --times; searched-6: at most 6 microbatches in memory), or a file written by --save
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b", value_parser = values::schedule)]
    pub(crate) schedule: ScheduleArg,
    /// Pipeline ranks [default: 4, or as in the file]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) stages: Option<usize>,
    /// Microbatches per step [default: 8, or as in the file]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) microbatches: Option<usize>,
    /// Time per rank and microbatch of the forward pass, the input gradients and the weight gradients, in any unit
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = values::times)]
    pub(crate) times: PassTimes,
    /// Transfer time between two stages, in the unit of --times
    #[arg(long, value_name = "T", default_value = "0", value_parser = values::transfer)]
    pub(crate) transfer: f64,
    /// Verify that the schedule is free of deadlock with blocking (rendezvous) sends, and place its transfers accordingly
    #[arg(long)]
    pub(crate) blocking: bool,
    /// Write the schedule as a text file for `train --schedule FILE` (with transfers if --blocking)
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// Draw the timeline as SVG, with the microbatches each rank holds
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object per pass, and one with the totals
    #[arg(long)]
    pub(crate) json: bool,
}
