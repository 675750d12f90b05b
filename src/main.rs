//! The command line of shardgrad.

#![forbid(unsafe_code)]

/// Prints for people and programs. A reader that has gone away, as `head` does, ends the program without a fuss. What has
/// more to give than text prints with [`outputs::Lines`].
macro_rules! println {
    () => { $crate::said(format_args!("\n")) };
    ($($text:tt)*) => { $crate::said(format_args!("{}\n", format_args!($($text)*))) };
}

/// Tells people on stderr. That nobody can read it is no reason to fail.
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::told(format_args!("{}\n", format_args!($($text)*))) };
}

/// As `println`, without the end of the line.
macro_rules! print {
    ($($text:tt)*) => { $crate::said(format_args!($($text)*)) };
}

mod tokenizer;
mod data;
mod interrupt;
mod behind;
mod outputs;
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

/// Writes to stderr, if that can be done.
fn told(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}
