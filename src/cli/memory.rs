//! Memory check before a run: rejects a command that needs more memory than is available. Otherwise the kernel's OOM killer may end the
//! process without a message.

use super::args::RunArgs;
use super::explain::{PeakMemory, StepSpec, format_bytes, largest_ranks};
use super::inference_model;
use super::ranks::{num_local_ranks, process};
use shardgrad::kernels::host_memory::{
    LimitSource, MemoryLimit, available_bytes, memory_limits, read_system_file,
};
use shardgrad::nn::ModelConfig;
use shardgrad::prelude::*;
use std::path::Path;

/// Peak memory of a run, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct MemoryNeed {
    /// Sum over all ranks of this machine.
    machine: u64,
    /// Sum over the ranks of this process.
    process: u64,
    /// Maximum over ranks, with prepacked operands dropped under the limit of a rank.
    one: u64,
    /// Number of threads of this process.
    num_threads: u64,
}

/// Fragmentation of the allocator: gaps of up to 1/6 of the buffers. How large they are depends on the instruction set, which decides the
/// sizes of prepacked operands.
const FRAGMENTATION: u64 = 6;

/// Address space per thread: its malloc arena and its stack.
const THREAD_BYTES: u64 = (64 + 8) << 20;
/// Data size per thread: its stack.
const STACK_BYTES: u64 = 8 << 20;
/// Memory of a process besides tensors and threads, which the allocators leave free.
const MARGIN_BYTES: u64 = 16 << 20;
/// Threads besides those of ranks: one writes files, one waits for signals.
const NUM_HELPER_THREADS: u64 = 2;

impl MemoryNeed {
    /// Returns the bytes that count against a limit.
    fn bytes_counted_by(&self, source: LimitSource) -> u64 {
        let process_overhead =
            |bytes: u64| MARGIN_BYTES.saturating_add(self.num_threads.saturating_mul(bytes));
        let with_fragmentation = self.process.saturating_add(self.process / FRAGMENTATION);
        match source {
            LimitSource::Machine | LimitSource::ControlGroup => self.machine,
            LimitSource::AddressSpace => with_fragmentation.saturating_add(process_overhead(THREAD_BYTES)),
            LimitSource::DataSize => with_fragmentation.saturating_add(process_overhead(STACK_BYTES)),
        }
    }
}

/// Rejects a run that needs more than `limit` per rank, if given, else more than the limits of the system.
fn check(what: &str, need: MemoryNeed, limit: Option<u64>, memory_limits: &[MemoryLimit]) -> Result<()> {
    let help = "use a smaller model, --batch or --seq, more --microbatches, a 16-bit --dtype, or tp instead of dp, which \
                shards the weights; `explain` prints the memory of a step";
    let refuse = |text: String| Error::new(Kind::Config, text).detail("help", help);
    if let Some(limit) = limit {
        let (one, most) = (format_bytes(need.one), format_bytes(limit));
        let text = format!("{what} needs about {one} per rank, but --memory-limit is {most}");
        return if need.one > limit { Err(refuse(text)) } else { Ok(()) };
    }
    for MemoryLimit { source, available_bytes, .. } in memory_limits {
        // The free memory of a machine is an estimate of the system.
        let slack = if *source == LimitSource::Machine { available_bytes / 16 } else { 0 };
        let need = need.bytes_counted_by(*source);
        if need > available_bytes.saturating_add(slack) {
            let (need, left) = (format_bytes(need), format_bytes(*available_bytes));
            let error = refuse(format!("{what} needs about {need} of memory, but {source} has {left} left"));
            let by_hand = "--memory-limit BYTES (per rank) replaces this check";
            return Err(error.detail("limit", by_hand));
        }
    }
    Ok(())
}

/// Returns the memory of a rank by which a pipeline decides how often it gathers parameters: its limit, or else an equal part of the free
/// memory of the host. `None` if that is unknown, and on a GPU.
pub(super) fn rank_memory_bytes(run: &RunArgs, mesh: &Mesh) -> Option<u64> {
    let part = || Some(available_bytes()? / num_local_ranks(mesh) as u64);
    run.memory_limit().or_else(|| part().filter(|_| run.is_on_host()))
}

/// Returns the peak memory of the largest rank of each stage, with prepacked operands dropped under a limit (0: none).
fn peaks(mesh: &Mesh, step: &StepSpec<'_>, limit: u64) -> Result<Vec<PeakMemory>> {
    largest_ranks(mesh).into_iter().map(|rank| step.dry_run(mesh, rank, limit, PeakMemory::measure)).collect()
}

/// Returns the memory that a rank needs under a limit. Messages fit into the fragmentation allowance.
pub(super) fn bytes_under_limit(mesh: &Mesh, step: &StepSpec<'_>, limit: u64) -> Result<u64> {
    let bucket = peaks(mesh, step, 1)?.iter().map(|peak| peak.bucket).max().unwrap_or(0);
    let peaks = peaks(mesh, step, without_fragmentation(limit.saturating_sub(bucket)).max(1))?;
    Ok(peaks.iter().map(|peak| with_fragmentation(peak.buffers)).max().unwrap_or(0) + bucket)
}

/// Rejects a training run whose step or save does not fit, judged by the largest rank of each stage.
///
/// # Errors
/// `Kind::Config` with help; errors of the dry run.
pub(super) fn check_training(run: &RunArgs, mesh: &Mesh, name: &str, step: &StepSpec<'_>) -> Result<()> {
    if !run.is_on_host() {
        return Ok(());
    }
    let peaks = peaks(mesh, step, 0)?;
    let num_alike = (mesh.num_ranks() / peaks.len()) as u64;
    let all = peaks.iter().map(PeakMemory::total).sum::<u64>();
    let one = run.memory_limit().map_or(Ok(0), |limit| bytes_under_limit(mesh, step, limit))?;
    let need = need_of_ranks(run, mesh, all.saturating_mul(num_alike), one);
    check(&format!("training {name} on {mesh}"), need, run.memory_limit(), &memory_limits(&read_system_file))
}

/// Rejects a model whose weights do not fit, judged by the largest rank of each stage.
///
/// # Errors
/// As [`check_training`].
pub(super) fn check_model(run: &RunArgs, name: &Path, config: &ModelConfig, plan: &Plan) -> Result<()> {
    if !run.is_on_host() {
        return Ok(());
    }
    let mesh = &run.mesh;
    let peak_of = |rank: usize| {
        World::new(mesh.clone()).dry_run(rank, |rank| {
            let _model = inference_model(rank, config, plan, run.dtype)?;
            Ok(rank.backend().memory().peak_bytes as u64)
        })
    };
    let peaks: Vec<u64> = largest_ranks(mesh).into_iter().map(peak_of).collect::<Result<_>>()?;
    let num_alike = (mesh.num_ranks() / peaks.len()) as u64;
    let all = peaks.iter().sum::<u64>().saturating_mul(num_alike);
    let need = need_of_ranks(run, mesh, all, peaks.into_iter().max().unwrap_or(0));
    check(
        &format!("{} on {mesh}", name.display()),
        need,
        run.memory_limit(),
        &memory_limits(&read_system_file),
    )
}

/// Distributes the memory of all ranks over this machine and this process.
fn need_of_ranks(run: &RunArgs, mesh: &Mesh, all: u64, one: u64) -> MemoryNeed {
    let (num_local_ranks, num_ranks) = (num_local_ranks(mesh) as u64, mesh.num_ranks() as u64);
    let machine = (u128::from(all) * u128::from(num_local_ranks) / u128::from(num_ranks)) as u64;
    let is_process = process().ok().flatten().is_some();
    let own = if is_process { 1 } else { num_ranks };
    MemoryNeed {
        machine,
        process: all / num_ranks * own,
        one,
        num_threads: NUM_HELPER_THREADS + own * run.threads_per_rank(num_local_ranks as usize) as u64,
    }
}

fn with_fragmentation(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / FRAGMENTATION)
}

/// Returns the bytes of buffers that fit a limit including fragmentation.
fn without_fragmentation(limit: u64) -> u64 {
    limit - limit.div_ceil(FRAGMENTATION + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory_limit(source: LimitSource, available_bytes: u64) -> [MemoryLimit; 1] {
        [MemoryLimit { source, max_bytes: available_bytes, available_bytes }]
    }

    #[test]
    fn memory_check_accepts_what_fits_and_reports_bytes() {
        let need = MemoryNeed { machine: 3 << 30, process: 3 << 30, one: 1 << 30, num_threads: 4 };
        let machine = |bytes| memory_limit(LimitSource::Machine, bytes);
        assert!(check("a run", need, None, &machine(3 << 30)).is_ok());
        assert!(check("a run", need, None, &machine((3 << 30) - 100)).is_ok(), "an estimate");
        assert!(check("a run", need, None, &[]).is_ok());
        let error = check("a run", need, None, &machine(2 << 30)).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert_eq!(error.message(), "a run needs about 3.0 GiB of memory, but this machine has 2.0 GiB left");
        assert_eq!(error.details()[0].0, "help");
        // An explicit limit is per rank and replaces the check of the machine.
        assert!(check("a run", need, Some(1 << 30), &machine(0)).is_ok());
        let error = check("a run", need, Some(1 << 20), &machine(1 << 40)).unwrap_err();
        assert_eq!(error.message(), "a run needs about 1.0 GiB per rank, but --memory-limit is 1.0 MiB");
    }

    #[test]
    fn threads_and_fragmentation_count_against_process_limits() {
        let need = MemoryNeed { machine: 8 << 30, process: 1 << 30, one: 1 << 30, num_threads: 4 };
        let tensors = (1u64 << 30) + (1 << 30) / FRAGMENTATION + MARGIN_BYTES;
        for (source, bytes) in [
            (LimitSource::AddressSpace, tensors + 4 * THREAD_BYTES),
            (LimitSource::DataSize, tensors + 4 * STACK_BYTES),
        ] {
            assert!(check("a run", need, None, &memory_limit(source, bytes)).is_ok());
            let error = check("a run", need, None, &memory_limit(source, bytes - 1)).unwrap_err();
            assert!(error.message().contains(&format!(" of memory, but {source} has ")), "{error}");
            assert!(
                check("a run", need, Some(2 << 30), &memory_limit(source, 0)).is_ok(),
                "an explicit limit"
            );
        }
    }

    #[test]
    fn memory_limit_includes_fragmentation() {
        for limit in [1 << 20, 20_000_000, 20_000_001, 47_518_272] {
            assert!(with_fragmentation(without_fragmentation(limit)) <= limit, "{limit}");
            assert!(with_fragmentation(without_fragmentation(limit) + 2) > limit, "{limit}");
        }
    }
}
