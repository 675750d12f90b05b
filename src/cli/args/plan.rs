//! The options of `plan`.

use super::values;
use clap::Args;
use shardgrad::autograd::pipeline::Times;
use std::path::PathBuf;

/// Options of `plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    /// Order of passes: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half
    #[arg(long, value_name = "NAME", default_value = "1f1b", value_parser = values::schedule)]
    pub(crate) schedule: String,
    /// Ranks of the pipeline
    #[arg(long, value_name = "N", default_value = "4", value_parser = values::count)]
    pub(crate) stages: usize,
    /// Equal parts that the batch is cut into
    #[arg(long, value_name = "N", default_value = "8", value_parser = values::count)]
    pub(crate) microbatches: usize,
    /// Times of a rank's forward pass, gradients of inputs, gradients of weights
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = values::times)]
    pub(crate) times: Times,
    /// Time from the end of a pass to the arrival of what it made
    #[arg(long, value_name = "T", default_value = "0", value_parser = values::not_negative)]
    pub(crate) transfer: f64,
    /// Draw the timeline, with the memory of each rank below
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object a pass, and one for the whole
    #[arg(long)]
    pub(crate) json: bool,
}
