//! The options of `plan`.

use super::values::{self, Order};
use clap::Args;
use shardgrad::autograd::pipeline::Times;
use std::path::PathBuf;

/// Options of `plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    /// Order of passes: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, searched (searched-6 to hold
    /// 6 microbatches at most), or a file with lists
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b", value_parser = values::schedule)]
    pub(crate) schedule: Order,
    /// Ranks of the pipeline [default: 4, or those of the file]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) stages: Option<usize>,
    /// Equal parts that the batch is cut into [default: 8, or those of the file]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) microbatches: Option<usize>,
    /// Times of a rank's forward pass, gradients of inputs, gradients of weights
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = values::times)]
    pub(crate) times: Times,
    /// Time from the end of a pass to the arrival of what it made
    #[arg(long, value_name = "T", default_value = "0", value_parser = values::transfer)]
    pub(crate) transfer: f64,
    /// Prove that nobody waits in a circle even if a send waits for its receive, with transfers put where that holds
    #[arg(long)]
    pub(crate) blocking: bool,
    /// Write the lists as a text file, for `train --schedule FILE` (with transfers if --blocking)
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// Draw the timeline, with the memory of each rank below
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object a pass, and one for the whole
    #[arg(long)]
    pub(crate) json: bool,
}
