//! Options of `generate`.

use super::{ParallelismArgs, RunArgs, defaults, values};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use std::path::PathBuf;

/// Options of `generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Hugging Face model folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    /// Text to continue; the BOS token of the tokenizer, if any, is prepended
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) prompt: String,
    /// Maximum number of new tokens (max_new_tokens); generation stops early at an end-of-text token
    #[arg(long, value_name = "N", default_value = defaults::NEW_TOKENS, value_parser = values::count)]
    pub(crate) tokens: usize,
    /// Do not stop at an end-of-text token (eos_token_id of config.json or generation_config.json)
    #[arg(long)]
    pub(crate) ignore_end: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) parallelism: ParallelismArgs,
    /// Print one JSON object on stdout and nothing else
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// Sampling options.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Sampling temperature: logits are divided by X; below 1 is more deterministic, above 1 more random
    #[arg(long, value_name = "X", default_value = defaults::TEMPERATURE, value_parser = values::positive)]
    pub(crate) temperature: f64,
    /// Sample from the K most likely tokens only
    #[arg(long, value_name = "K", value_parser = values::count)]
    pub(crate) top_k: Option<usize>,
    /// Nucleus sampling: sample from the smallest set of most likely tokens whose probability reaches P
    #[arg(long, value_name = "P", value_parser = values::fraction)]
    pub(crate) top_p: Option<f64>,
    /// Greedy decoding: always take the most likely token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub(crate) greedy: bool,
    /// Random seed of the sampling
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed)]
    pub(crate) seed: u64,
}
