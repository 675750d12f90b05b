//! The command line of shardgrad.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is the room that talks to people")]

mod data;
mod interrupt;
mod metrics;
mod plot;
mod timeline;
mod trace;
mod train;
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
