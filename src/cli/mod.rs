//! Commands: one file each. Errors go to stderr, once; the exit code says whose fault it was.

pub(crate) mod args;
mod eval;
mod explain;
mod generate;
mod train;

use clap::Parser;
use shardgrad::{Error, Kind};
use std::process::ExitCode;

/// Parses the command line, runs the command, reports the error.
pub(crate) fn main() -> ExitCode {
    let done = match args::Cli::parse().command {
        args::Command::Train(args) => train::run(&args),
        args::Command::Eval(args) => eval::run(&args),
        args::Command::Generate(args) => generate::run(&args),
        args::Command::Explain(args) => explain::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(exit_code(&error))
        }
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
