//! The commands, one file each. An error is printed to stderr once; the exit code distinguishes invalid input (2) from a failed run (1).

mod ranks;
mod reproducibility;
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

use crate::data::{Corpus, ReadOptions, TokenFile, Vocabulary};
use crate::interrupt::{StopReason, catch_file_size_limit};
use ranks::Startup;
use shardgrad::autograd::Var;
use shardgrad::dist::{Process, Rank, Rendezvous};
use shardgrad::kernels::DType;
use shardgrad::kernels::cpu::simd::requested_limit;
use shardgrad::nn::checkpoint::Weights;
use shardgrad::nn::module::name::matches;
use shardgrad::nn::{CastRule, InferenceModel, LanguageModel, LoadFilter, Model, ModelConfig, Plan};
use shardgrad::tensor::training_step::control::world_sum;
use shardgrad::{Error, Kind, Result};
use std::ffi::OsString;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Commands whose ranks may be processes started by a launcher.
const MULTI_PROCESS_COMMANDS: [&str; 3] = ["train", "eval", "generate"];

/// Parses the command line, runs the command and reports its error, also to the other ranks if they have not connected yet.
pub(crate) fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    let parsed = args::config::parse(argv.clone());
    // An invalid environment is reported later, where the ranks are created.
    let joins = argv.get(1).is_some_and(|command| MULTI_PROCESS_COMMANDS.iter().any(|name| command == name));
    let process = ranks::process().ok().flatten().filter(|_| joins);
    let process =
        process.map(|process| with_access(process, parsed.as_ref().ok().map(|line| &line.command), &argv));
    if let Some(process) = process.as_ref().filter(|process| process.is_insecure() && process.rank() == 0) {
        let (host, port) = (process.host(), process.port());
        eprintln!(
            "--insecure: connections are neither authenticated nor encrypted; anyone who reaches {host}:{port} or a port of another rank can \
             take a rank, read and change gradients and weights, and end the run"
        );
    }
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

/// Adds token, encryption and listening address of the command line to a process.
fn with_access(process: Process, command: Option<&args::Command>, argv: &[OsString]) -> Process {
    match command {
        Some(args::Command::Train(args)) => args.run.access.apply(process, Some(&args.out)),
        Some(args::Command::Eval(args)) => args.run.access.apply(process, None),
        Some(args::Command::Generate(args)) => args.run.access.apply(process, None),
        Some(_) => process,
        None => {
            let (access, out) = args::AccessArgs::of_unparsed(argv);
            access.apply(process, out.as_deref())
        }
    }
}

/// Returns an error without the usage lines of clap.
fn first_line(error: &Error, argv: &[OsString]) -> Error {
    let short = |text: &str| args::truncate::with_short_arguments(text, argv);
    let first = short(error.message().lines().next().unwrap_or_default());
    error
        .details()
        .iter()
        .fold(Error::new(error.kind(), first), |e, (label, text)| e.detail(label, short(text)))
}

/// Prints an error, with long arguments truncated. After a signal or a non-finite number all processes of a run fail with the same error;
/// then only rank 0 prints the details.
fn print_error(error: &Error, argv: &[OsString]) {
    let text = match error.kind() {
        Kind::Interrupted if !ranks::is_rank_zero() => return,
        Kind::NotFinite if !ranks::is_rank_zero() => error.message().to_string(),
        _ => error.to_string(),
    };
    eprintln!("error: {}", args::truncate::with_short_arguments(&text, argv));
}

/// The error of a command, and its exit code.
struct Failure {
    error: Error,
    code: u8,
}

impl Failure {
    /// A failure after the run has started: exit code 1, whatever the kind of error.
    fn of_run(error: Error) -> Failure {
        Failure { error, code: RUN_FAILED }
    }

    /// A run that was stopped after saving its state: exit code 128 + signal.
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
    requested_limit().map_err(|why| Error::new(Kind::Config, why))?;
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

/// Returns 2 for invalid options or input, 1 for a failed run. A run stopped after saving its state has another code
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

/// Rejects text input for encoders, which need masked tokens and labels.
fn refuse_text_for_encoder(config: &ModelConfig) -> Result<()> {
    if config.is_causal() {
        return Ok(());
    }
    let why = "an encoder is trained on masked tokens; plain text has no labels";
    let help = "use --tokens FILE with `input_ids` and `labels`, i64 [N, T]; label -100 is ignored";
    Err(Error::new(Kind::Unsupported, why).detail("help", help))
}

/// Opens a token file whose rows fit the positions of a model; its contents are not [checked](TokenFile::checked) yet.
///
/// # Errors
/// As [`TokenFile::open_header`]; `Kind::Data` naming the file for rows that are too long.
fn token_rows(path: &Path, config: &ModelConfig) -> Result<TokenFile> {
    let file = TokenFile::open_header(path, &Vocabulary::new(config))?;
    let (seq, positions) = (file.seq(), config.max_positions());
    if seq <= positions {
        return Ok(file);
    }
    let why = format!("{}: rows have {seq} tokens, but the model has {positions} positions", path.display());
    Err(Error::new(Kind::Data, why)
        .detail("help", "use a --tokens file with shorter rows, or a model with more positions"))
}

/// Timeout of collectives that wait for file I/O of another rank: a disk may stall for long.
const DISK_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Runs file I/O on every rank and then a barrier, with [`DISK_TIMEOUT`] instead of `--timeout`, so that ranks wait for one whose disk
/// stalls. Collective: every rank calls it.
///
/// # Errors
/// The error of `f`, or of the barrier.
#[track_caller]
fn collective_io<T>(rank: &Rank, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let site = Location::caller();
    rank.with_timeout(DISK_TIMEOUT, || {
        let done = f()?;
        world_sum(rank, &[0.0], site)?;
        Ok(done)
    })
}

/// Tokens of the row on which [`inference_model`] records a model to cut it into pipeline stages.
const RECORDED_TOKENS: usize = 128;

/// Builds a language model for inference, without loading weights.
fn inference_model(
    rank: &Rank,
    config: &ModelConfig,
    plan: &Plan,
    dtype: DType,
) -> Result<InferenceModel<LanguageModel>> {
    let ids = |rank: &Rank| {
        let shape = [1, RECORDED_TOKENS.min(config.max_positions())];
        Ok(vec![plan.batch_layout(rank.mesh(), DType::I64, &shape)?])
    };
    let forward = |model: &LanguageModel, ids: &[Var]| Ok(vec![model.forward_from_batch(ids)]);
    InferenceModel::new(rank, LanguageModel::new(config), plan, 0, dtype, ids, forward)
}

/// Loads the weights of a model from a folder; rank 0 reports which were converted from another dtype. A folder may lack the biases that
/// balance experts: they begin at 0. Collective.
fn load(model: &Model<LanguageModel>, dir: &Path, cast: CastRule) -> Result<()> {
    collective_io(model.rank(), || {
        let biases = "*.e_score_correction_bias";
        let casts = match model.params().iter().any(|param| matches(biases, &param.name())) {
            true => model.load_filtered(dir, cast, &LoadFilter::new().may_lack(biases))?,
            false => model.load_as(dir, cast)?,
        };
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

/// Reports that the files of a model folder have no checksums, like those of other programs and older releases.
fn report_unverified(dir: &Path) {
    if Weights::open(dir).is_ok_and(|weights| weights.num_without_checksum() > 0) {
        eprintln!("{}: the files have no checksums and were not verified", dir.display());
    }
}

/// Opens the text of the given paths, or the source files of the working directory.
fn open_corpus(named: &[PathBuf], options: &ReadOptions<'_>) -> Result<Corpus> {
    if named.is_empty() {
        Corpus::from_sources(Path::new("."), options)
    } else {
        Corpus::open(named, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::dist::{Mesh, World};

    #[test]
    fn collective_io_waits_longer_than_the_timeout() {
        let world = || World::new(Mesh::parse("dp=2").unwrap()).timeout(Duration::from_millis(100));
        let slow = |rank: &Rank| {
            if rank.index() == 0 {
                std::thread::sleep(Duration::from_millis(800));
            }
            Ok(rank.index())
        };
        assert_eq!(world().launch(|rank| collective_io(rank, || slow(rank))).unwrap(), [0, 1]);
        // A failed rank is not waited for, and the timeout is restored afterwards.
        let failed = world().launch(|rank| {
            collective_io(rank, || match rank.index() {
                0 => Err(Error::new(Kind::Io, "no disk")),
                _ => Ok(()),
            })
        });
        assert_eq!(failed.unwrap_err().message(), "no disk");
        let late = world().launch(|rank| {
            collective_io(rank, || Ok(()))?;
            slow(rank)?;
            world_sum(rank, &[0.0], Location::caller())
        });
        assert_eq!(late.unwrap_err().kind(), Kind::Timeout);
    }
}
