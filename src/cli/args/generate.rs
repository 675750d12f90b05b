//! The options of `generate`.

use super::{RunArgs, defaults, values};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use std::path::PathBuf;

/// Options of `generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    /// Text to continue, behind the tokens with which the tokenizer begins a text
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) prompt: String,
    /// Tokens to add at most; fewer if one ends the text
    #[arg(long, value_name = "N", default_value = defaults::NEW_TOKENS, value_parser = values::count)]
    pub(crate) tokens: usize,
    /// Go on behind a token that ends a text (of config.json or generation_config.json)
    #[arg(long)]
    pub(crate) ignore_end: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Print one JSON object and nothing else on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// How the next token is chosen.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Choice of tokens")]
pub(crate) struct SamplingArgs {
    /// Below 1 likely tokens become likelier, above 1 less so
    #[arg(long, value_name = "X", default_value = defaults::TEMPERATURE, value_parser = values::positive)]
    pub(crate) temperature: f64,
    /// Choose among the K likeliest tokens only
    #[arg(long, value_name = "K", value_parser = values::count)]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = values::fraction)]
    pub(crate) top_p: Option<f64>,
    /// Always take the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub(crate) greedy: bool,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed)]
    pub(crate) seed: u64,
}
