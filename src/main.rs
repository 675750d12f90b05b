//! The `shardgrad` command line.

#![forbid(unsafe_code)]

/// Prints a line to stdout and flushes. If the reader has closed the pipe, as `head` does, the program exits silently. Commands that must
/// not end then use [`outputs::StdoutWriter`].
macro_rules! println {
    () => { $crate::write_stdout(format_args!("\n")) };
    ($($text:tt)*) => { $crate::write_stdout(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints a line to stderr. Write errors are ignored.
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::write_stderr(format_args!("{}\n", format_args!($($text)*))) };
}

/// As `println`, without the newline.
macro_rules! print {
    ($($text:tt)*) => { $crate::write_stdout(format_args!($($text)*)) };
}

mod tokenizer;
mod data;
mod interrupt;
mod background;
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
    // While this is the only thread.
    #[cfg(feature = "cuda")]
    shardgrad::kernels::cuda::reserve_hardware_queues();
    #[cfg(feature = "nccl")]
    shardgrad::nccl::pin_algorithm();
    cli::main()
}

/// Writes to stdout and flushes. Exits with code 1 on an error; a closed pipe is not reported.
fn write_stdout(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) else { return };
    if e.kind() != std::io::ErrorKind::BrokenPipe {
        eprintln!("error: cannot write to stdout: {e}");
    }
    std::process::exit(1);
}

/// Writes to stderr and ignores errors.
fn write_stderr(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}
