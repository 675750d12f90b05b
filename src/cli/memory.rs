//! Refuses a command that needs more memory than this process can have, before it begins: a system that has lent more memory than it
//! has ends the process without a message.

pub(super) mod room;

use super::args::RunArgs;
use super::explain::{Outline, Peak, largest_ranks, size};
use super::ranks::{num_here, process};
use room::{Room, Source, rooms};
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// Bytes that ranks hold at their peaks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Need {
    /// All ranks of this machine together.
    machine: u64,
    /// The ranks of this process.
    process: u64,
    /// The rank that holds most, where prepacked operands give way to the limit of a rank.
    one: u64,
    /// Threads that this process starts.
    num_threads: u64,
}

/// What an allocator needs beside the largest sum of its buffers: gaps between them, as one part in so many.
const GAPS: u64 = 8;

/// Address space for a thread: the arena that malloc reserves for it, and its stack.
const THREAD_BYTES: u64 = (64 + 8) << 20;
/// Memory for a thread that counts as data: its stack.
const STACK_BYTES: u64 = 8 << 20;
/// What a process takes beside tensors and threads; the allocators leave so much, and refuse otherwise.
const MARGIN_BYTES: u64 = 16 << 20;
/// Threads beside those of ranks: one writes files, one waits for signals.
const HELPERS: u64 = 2;

impl Need {
    /// What counts against a bound.
    fn against(&self, source: Source) -> u64 {
        let beside = |bytes: u64| MARGIN_BYTES.saturating_add(self.num_threads.saturating_mul(bytes));
        let with_gaps = self.process.saturating_add(self.process / GAPS);
        match source {
            Source::Machine | Source::ControlGroup => self.machine,
            Source::AddressSpace => with_gaps.saturating_add(beside(THREAD_BYTES)),
            Source::DataSize => with_gaps.saturating_add(beside(STACK_BYTES)),
        }
    }
}

/// Refuses what needs more than there is: than `limit` for a rank where that is given, else than this process can have.
fn check(what: &str, need: Need, limit: Option<u64>, rooms: &[Room]) -> Result<()> {
    let help = "take a smaller model, --batch or --seq, more --microbatches, a narrower --dtype, or tp in place of dp, which \
                holds the weights once; `explain` shows what is held";
    let refuse = |text: String| Error::new(Kind::Config, text).detail("help", help);
    if let Some(limit) = limit {
        let (one, most) = (size(need.one), size(limit));
        let text = format!("{what} needs about {one} on a rank, and --memory-limit allows {most}");
        return if need.one > limit { Err(refuse(text)) } else { Ok(()) };
    }
    for Room { source, left_bytes, .. } in rooms {
        // What a machine has left is an estimate of the system.
        let slack = if *source == Source::Machine { left_bytes / 16 } else { 0 };
        let need = need.against(*source);
        if need > left_bytes.saturating_add(slack) {
            let (need, left) = (size(need), size(*left_bytes));
            let error = refuse(format!("{what} needs about {need} of memory, and {source} has {left} left"));
            let by_hand = "--memory-limit BYTES, for each rank, takes the place of this look at the machine";
            return Err(error.detail("limit", by_hand));
        }
    }
    Ok(())
}

/// Reads a file of the system.
pub(super) fn file(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The peaks of the ranks that hold most, one of each stage, where prepacked operands give way to a limit (0: none).
fn peaks(mesh: &Mesh, step: &Outline<'_>, limit: u64) -> Result<Vec<Peak>> {
    largest_ranks(mesh).into_iter().map(|rank| step.limited(mesh, rank, limit, Peak::of)).collect()
}

/// The limit that a rank needs at least, if it is given this one. Messages find room in the gaps.
pub(super) fn need_under(mesh: &Mesh, step: &Outline<'_>, limit: u64) -> Result<u64> {
    let peaks = peaks(mesh, step, without_gaps(limit).max(1))?;
    Ok(peaks.iter().map(|peak| with_gaps(peak.buffers)).max().unwrap_or(0))
}

/// Refuses a training that cannot fit: a step, or a save of the model, on the ranks of each stage that hold most.
///
/// # Errors
/// `Kind::Config`, with what to do; what the step reports.
pub(super) fn check_training(run: &RunArgs, mesh: &Mesh, name: &str, step: &Outline<'_>) -> Result<()> {
    if !run.is_on_host() {
        return Ok(());
    }
    let peaks = peaks(mesh, step, 0)?;
    let num_alike = (mesh.num_ranks() / peaks.len()) as u64;
    let all = peaks.iter().map(Peak::all).sum::<u64>();
    let one = run.memory_limit().map_or(Ok(0), |limit| need_under(mesh, step, limit))?;
    let need = of_ranks(run, mesh, all.saturating_mul(num_alike), one);
    check(&format!("training {name} on {mesh}"), need, run.memory_limit(), &rooms(&file))
}

/// Refuses a model that cannot fit as it is.
///
/// # Errors
/// As [`check_training`].
pub(super) fn check_model(run: &RunArgs, name: &Path, config: &ModelConfig) -> Result<()> {
    if !run.is_on_host() {
        return Ok(());
    }
    let (mesh, plan) = (&run.mesh, LanguageModel::plan(config));
    let one = World::new(mesh.clone()).dry_run(0, |rank| {
        let _model = Model::with_dtype(rank, LanguageModel::new(config), &plan, 0, run.dtype)?;
        Ok(rank.backend().memory().peak_bytes as u64)
    })?;
    let need = of_ranks(run, mesh, one.saturating_mul(mesh.num_ranks() as u64), one);
    check(&format!("{} on {mesh}", name.display()), need, run.memory_limit(), &rooms(&file))
}

/// What is needed of this machine and by this process, where all ranks of a mesh need so much together.
fn of_ranks(run: &RunArgs, mesh: &Mesh, all: u64, one: u64) -> Need {
    let (num_here, num_ranks) = (num_here(mesh) as u64, mesh.num_ranks() as u64);
    let machine = (u128::from(all) * u128::from(num_here) / u128::from(num_ranks)) as u64;
    let is_process = process().ok().flatten().is_some();
    let own = if is_process { 1 } else { num_ranks };
    Need {
        machine,
        process: all / num_ranks * own,
        one,
        num_threads: HELPERS + own * run.threads_of_a_rank(num_here as usize) as u64,
    }
}

fn with_gaps(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / GAPS)
}

/// The most bytes of buffers that fit a limit with their gaps.
fn without_gaps(limit: u64) -> u64 {
    limit - limit / (GAPS + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(source: Source, left_bytes: u64) -> [Room; 1] {
        [Room { source, max_bytes: left_bytes, left_bytes }]
    }

    #[test]
    fn what_fits_is_never_refused_and_what_cannot_fit_is_told_in_bytes() {
        let need = Need { machine: 3 << 30, process: 3 << 30, one: 1 << 30, num_threads: 4 };
        let machine = |bytes| room(Source::Machine, bytes);
        assert!(check("a run", need, None, &machine(3 << 30)).is_ok());
        assert!(check("a run", need, None, &machine((3 << 30) - 100)).is_ok(), "an estimate");
        assert!(check("a run", need, None, &[]).is_ok());
        let error = check("a run", need, None, &machine(2 << 30)).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert_eq!(error.message(), "a run needs about 3.0 GiB of memory, and this machine has 2.0 GiB left");
        assert_eq!(error.details()[0].0, "help");
        // A limit that is given by hand is for each rank, and the machine is not looked at.
        assert!(check("a run", need, Some(1 << 30), &machine(0)).is_ok());
        let error = check("a run", need, Some(1 << 20), &machine(1 << 40)).unwrap_err();
        assert_eq!(error.message(), "a run needs about 1.0 GiB on a rank, and --memory-limit allows 1.0 MiB");
    }

    #[test]
    fn threads_and_gaps_count_against_limits_of_the_process() {
        let need = Need { machine: 8 << 30, process: 1 << 30, one: 1 << 30, num_threads: 4 };
        let tensors = (1u64 << 30) + (1 << 27) + MARGIN_BYTES;
        for (source, bytes) in [
            (Source::AddressSpace, tensors + 4 * THREAD_BYTES),
            (Source::DataSize, tensors + 4 * STACK_BYTES),
        ] {
            assert!(check("a run", need, None, &room(source, bytes)).is_ok());
            let error = check("a run", need, None, &room(source, bytes - 1)).unwrap_err();
            assert!(error.message().contains(&format!(" of memory, and {source} has ")), "{error}");
            assert!(check("a run", need, Some(2 << 30), &room(source, 0)).is_ok(), "a limit by hand");
        }
    }

    #[test]
    fn a_limit_holds_buffers_with_their_gaps() {
        for limit in [1 << 20, 20_000_000, 20_000_001, 47_518_272] {
            assert!(with_gaps(without_gaps(limit)) <= limit, "{limit}");
            assert!(with_gaps(without_gaps(limit) + 2) > limit, "{limit}");
        }
    }
}
