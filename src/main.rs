//! The command line of shardgrad.

#![forbid(unsafe_code)]

/// Prints for people and programs. A reader that has gone away, as `head` does, ends the program without a fuss, but for
/// one that has more to give than text (see [`outlive_stdout`]).
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
use std::sync::atomic::{AtomicBool, Ordering};

fn main() -> ExitCode {
    cli::main()
}

/// Whether the program goes on when stdout is gone.
static OUTLIVES: AtomicBool = AtomicBool::new(false);
/// Whether stdout is gone.
static GONE: AtomicBool = AtomicBool::new(false);

/// From now on a stdout that is gone or full ends nothing: what the program leaves in files matters more.
fn outlive_stdout() {
    OUTLIVES.store(true, Ordering::Relaxed);
}

/// Writes to stdout at once. If nobody reads it any more, there is nothing left to do, or nothing left to say.
fn said(text: Arguments<'_>) {
    if GONE.load(Ordering::Relaxed) {
        return;
    }
    let mut out = std::io::stdout().lock();
    let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) else { return };
    let unread = e.kind() == std::io::ErrorKind::BrokenPipe;
    if OUTLIVES.load(Ordering::Relaxed) {
        GONE.store(true, Ordering::Relaxed);
        if !unread {
            eprintln!("cannot write to stdout: {e}; the run goes on without it");
        }
        return;
    }
    if !unread {
        eprintln!("error: cannot write to stdout: {e}");
    }
    std::process::exit(1);
}

/// Writes to stderr, if that can be done.
fn told(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}
