//! The command line of shardgrad.

#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "this is the room that talks to people")]

/// Prints for people and programs. A reader that has gone away, as `head` does, ends the program without a fuss.
macro_rules! println {
    () => { $crate::said(format_args!("\n")) };
    ($($text:tt)*) => { $crate::said(format_args!("{}\n", format_args!($($text)*))) };
}

/// As `println`, without the end of the line.
macro_rules! print {
    ($($text:tt)*) => { $crate::said(format_args!($($text)*)) };
}

mod tokenizer;
mod data;
mod interrupt;
mod metrics;
mod plot;
mod timeline;
mod trace;
mod train;
mod cli;

use std::fmt::Arguments;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}

/// Writes to stdout at once. If nobody reads it any more, there is nothing left to do.
fn said(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) else { return };
    if e.kind() != std::io::ErrorKind::BrokenPipe {
        eprintln!("error: cannot write to stdout: {e}");
    }
    std::process::exit(1);
}
