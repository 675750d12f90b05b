//! Commands: one file each. Errors go to stderr, once; the exit code says whose fault it was.

pub(crate) mod args;
mod bench;
mod doctor;
mod eval;
mod explain;
mod generate;
mod ops;
mod plan;
mod train;

use crate::data::Corpus;
use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};
use std::path::Path;
use std::process::ExitCode;

/// Parses the command line, runs the command, reports the error.
pub(crate) fn main() -> ExitCode {
    let done = args::config::parse(std::env::args_os().collect()).and_then(|cli| run(&cli.command));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn run(command: &args::Command) -> Result<()> {
    match command {
        args::Command::Train(args) => train::run(args),
        args::Command::Eval(args) => eval::run(args),
        args::Command::Generate(args) => generate::run(args),
        args::Command::Explain(args) => explain::run(args),
        args::Command::Plan(args) => plan::run(args),
        args::Command::Ops(args) => ops::run(args),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => bench::run(args),
    }
}

/// 2 for misuse or bad input, 130 after SIGINT, 1 for a run that failed.
fn exit_code(error: &Error) -> u8 {
    match error.kind() {
        Kind::Interrupted => 130,
        Kind::Shape
        | Kind::DType
        | Kind::Layout
        | Kind::Mesh
        | Kind::Unsupported
        | Kind::Checkpoint
        | Kind::Config
        | Kind::Data
        | Kind::Io => 2,
        _ => 1,
    }
}

/// The text of a file, or the sources of the working directory.
fn text(file: Option<&Path>) -> Result<Corpus> {
    match file {
        Some(path) => Corpus::from_file(path),
        None => Corpus::from_sources(Path::new(".")),
    }
}

/// Text is read as bytes: refuses a model that does not have one token a byte value.
fn check_bytes(config: &ModelConfig) -> Result<()> {
    if config.vocab_size() >= Corpus::VOCAB {
        return Ok(());
    }
    let why = format!("a vocabulary of {} tokens is too small for bytes of text", config.vocab_size());
    Err(Error::new(Kind::Config, why).detail("help", "use --tokens FILE, or a model with 256 tokens or more"))
}
