//! Commands: one file each. Errors go to stderr, once; the exit code says whose fault it was.

mod ranks;
pub(crate) mod args;
mod bench;
mod explain;
mod memory;
mod consistency;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod ops;
mod plan;
mod train;

use crate::data::{Corpus, How, TokenFile, Vocabulary};
use crate::interrupt::{StopReason, catch_file_size_limit};
use ranks::Startup;
use shardgrad::dist::{Rank, Rendezvous};
use shardgrad::nn::hf::Weights;
use shardgrad::nn::{Cast, LanguageModel, Model, ModelConfig};
use shardgrad::tensor::control::world_sum;
use shardgrad::{Error, Kind, Result};
use std::ffi::OsString;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Commands whose ranks may be processes from their start on.
const JOINING: [&str; 3] = ["train", "eval", "generate"];

/// Parses the command line, runs the command, reports the error; to the other ranks too, if it came before they had connected.
pub(crate) fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    let parsed = args::config::parse(argv.clone());
    // The environment is read again, and what is wrong with it refused, where ranks are made.
    let joins = argv.get(1).is_some_and(|command| JOINING.iter().any(|name| command == name));
    let process = ranks::process().ok().flatten().filter(|_| joins);
    let opened = process.map(|process| Rendezvous::open(&process).map(Arc::new)).transpose();
    let (done, rendezvous) = match (parsed, opened) {
        (Ok(line), Ok(rendezvous)) => {
            let startup = Startup { rendezvous: rendezvous.clone(), options: line.options };
            let done =
                catch_file_size_limit().map_err(Failure::from).and_then(|()| run(&line.command, &startup));
            (done, rendezvous)
        }
        (Ok(_), Err(e)) => (Err(e.into()), None),
        (Err(e), opened) => (Err(e.into()), opened.ok().flatten()),
    };
    let Err(Failure { error, code }) = done else { return ExitCode::SUCCESS };
    print_error(&error, &argv);
    if let Some(rendezvous) = rendezvous {
        rendezvous.fail(&first_line(&error, &argv));
    }
    ExitCode::from(code)
}

/// An error without the usage that clap puts below its first line.
fn first_line(error: &Error, argv: &[OsString]) -> Error {
    let short = |text: &str| args::echo::with_short_arguments(text, argv);
    let first = short(error.message().lines().next().unwrap_or_default());
    error
        .details()
        .iter()
        .fold(Error::new(error.kind(), first), |e, (label, text)| e.detail(label, short(text)))
}

/// Prints an error, with long arguments cut. All processes of a run end alike after a signal, or where a number is not finite: the
/// first process prints why.
fn print_error(error: &Error, argv: &[OsString]) {
    let text = match error.kind() {
        Kind::Interrupted if !ranks::leads() => return,
        Kind::NotFinite if !ranks::leads() => error.message().to_string(),
        _ => error.to_string(),
    };
    eprintln!("error: {}", args::echo::with_short_arguments(&text, argv));
}

/// Why a command did not do what it should, and the exit code for it.
struct Failure {
    error: Error,
    code: u8,
}

impl Failure {
    /// For a run that had begun well: no misuse, whatever went wrong.
    fn of_run(error: Error) -> Failure {
        Failure { error, code: RUN_FAILED }
    }

    /// For a run that was stopped, with its state saved.
    fn stopped(error: Error, reason: StopReason) -> Failure {
        Failure { error, code: reason.exit_code() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { code: exit_code(&error), error }
    }
}

fn run(command: &args::Command, startup: &Startup) -> Result<(), Failure> {
    let done = match command {
        args::Command::Train(args) => return train::run(args, startup),
        args::Command::Inspect(args) => return inspect::run(args),
        args::Command::Eval(args) => eval::run(args, startup),
        args::Command::Generate(args) => generate::run(args, startup),
        args::Command::Explain(args) => explain::run(args),
        args::Command::Plan(args) => plan::run(args),
        args::Command::Ops(args) => ops::run(args),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => bench::run(args),
    };
    Ok(done?)
}

/// The exit code of a run that failed.
const RUN_FAILED: u8 = 1;

/// 2 for misuse or bad input, 1 for a run that failed. A run that was stopped with its state saved has a code of its own
/// ([`Failure::stopped`]).
fn exit_code(error: &Error) -> u8 {
    match error.kind() {
        Kind::Shape
        | Kind::DType
        | Kind::Layout
        | Kind::Mesh
        | Kind::Unsupported
        | Kind::Checkpoint
        | Kind::Config
        | Kind::Data
        | Kind::Io => 2,
        _ => RUN_FAILED,
    }
}

/// Refuses an encoder, which learns nothing from a text in which no token is hidden.
fn refuse_texts(config: &ModelConfig) -> Result<()> {
    if config.is_causal() {
        return Ok(());
    }
    let why = "an encoder predicts tokens that are hidden from it; a text does not say which";
    let help = "use --tokens FILE with `input_ids` and `labels`, i64 [N, T], -100 where nothing is asked for";
    Err(Error::new(Kind::Unsupported, why).detail("help", help))
}

/// Rows of token numbers that a model has positions for, before they are [checked](TokenFile::checked).
///
/// # Errors
/// As [`TokenFile::begin`]; `Kind::Data` naming the file for rows that are too long.
fn token_rows(path: &Path, config: &ModelConfig) -> Result<TokenFile> {
    let file = TokenFile::begin(path, &Vocabulary::new(config))?;
    let (seq, positions) = (file.seq(), config.positions());
    if seq <= positions {
        return Ok(file);
    }
    let why = format!("{}: rows have {seq} tokens, the model {positions} positions", path.display());
    Err(Error::new(Kind::Data, why)
        .detail("help", "give --tokens a file of shorter rows, or take a model with more positions"))
}

/// How long ranks wait for one that reads or writes: a disk may stall for long.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// Does what a disk or a reader may hold up on one rank; the others wait for it, whatever `--timeout` says. Every rank calls
/// this together.
///
/// # Errors
/// What `f` reports, and the collective at its end.
#[track_caller]
fn together<T>(rank: &Rank, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let site = Location::caller();
    rank.patiently(PATIENCE, || {
        let done = f()?;
        world_sum(rank, &[0.0], site)?;
        Ok(done)
    })
}

/// Fills a model from its folder; the first rank says which weights had another dtype than the model. Every rank calls this
/// together.
fn load(model: &Model<LanguageModel>, dir: &Path, cast: Cast) -> Result<()> {
    together(model.rank(), || {
        let casts = model.load_as(dir, cast)?;
        let is_rank_zero = model.rank().world().index() == 0;
        if !casts.is_empty() && is_rank_zero {
            eprintln!("{}: {casts}", dir.display());
        }
        if is_rank_zero {
            report_unverified(dir);
        }
        Ok(())
    })
}

/// Reports that the files of a model folder hold no checksums, as those of other programs and older releases.
fn report_unverified(dir: &Path) {
    if Weights::open(dir).is_ok_and(|weights| weights.num_without_checksum() > 0) {
        eprintln!("{}: its files hold no checksums, so that they could not be verified", dir.display());
    }
}

/// The documents that are named, or the sources of the working directory.
fn documents(named: &[PathBuf], how: &How<'_>) -> Result<Corpus> {
    if named.is_empty() { Corpus::from_sources(Path::new("."), how) } else { Corpus::open(named, how) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::dist::{Mesh, World};

    #[test]
    fn ranks_wait_for_the_disk_of_one_longer_than_for_anything_else() {
        let world = || World::new(Mesh::parse("dp=2").unwrap()).timeout(Duration::from_millis(100));
        let slow = |rank: &Rank| {
            if rank.index() == 0 {
                std::thread::sleep(Duration::from_millis(800));
            }
            Ok(rank.index())
        };
        assert_eq!(world().launch(|rank| together(rank, || slow(rank))).unwrap(), [0, 1]);
        // Who fails is not waited for, and patience is over afterwards.
        let failed = world().launch(|rank| {
            together(rank, || match rank.index() {
                0 => Err(Error::new(Kind::Io, "no disk")),
                _ => Ok(()),
            })
        });
        assert_eq!(failed.unwrap_err().message(), "no disk");
        let late = world().launch(|rank| {
            together(rank, || Ok(()))?;
            slow(rank)?;
            world_sum(rank, &[0.0], Location::caller())
        });
        assert_eq!(late.unwrap_err().kind(), Kind::Timeout);
    }
}
