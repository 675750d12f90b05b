//! Whether what a command will hold fits this machine: asked before it begins, since a system that has lent more memory than it
//! has ends the process without a word.

use super::args::RunArgs;
use super::explain::{Outline, peak_bytes, size};
use super::ranks::num_here;
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// Memory that is not given out as yet, and who says so.
#[derive(Clone, Debug, PartialEq)]
struct Room {
    bytes: u64,
    of: &'static str,
}

/// Bytes that ranks hold at least.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Need {
    /// All of them together.
    all: u64,
    /// The one that holds most.
    one: u64,
}

/// The value of the first `key : value` line of a text.
pub(super) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.split_once(':').filter(|(k, _)| k.trim() == key).map(|(_, v)| v.trim());
    text.lines().find_map(value)
}

/// A value that is given in kB, in bytes.
pub(super) fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|n| n << 10)
}

/// What this process can have yet, as far as files of the system tell: no more than the machine has left, than its group may
/// have, and than it may address.
fn room(read: &dyn Fn(&Path) -> Option<String>) -> Option<Room> {
    let about = read(Path::new("/proc/meminfo")).unwrap_or_default();
    let swap = kib(&about, "SwapFree").unwrap_or(0);
    // Some sandboxes say 0 of what they do not know.
    let free = kib(&about, "MemAvailable").filter(|n| *n > 0).map(|n| n.saturating_add(swap));
    let free = free.map(|bytes| Room { bytes, of: "this machine has" });
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let group = group_limits(&groups, read).min();
    let group =
        group.map(|n| Room { bytes: n.saturating_add(swap), of: "the control group of this process has" });
    let limits = read(Path::new("/proc/self/limits")).unwrap_or_default();
    let addressed = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
    let addressed = addressed.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    let addressed = addressed.map(|bytes| Room { bytes, of: "`ulimit -v` leaves this process" });
    [free, group, addressed].into_iter().flatten().min_by_key(|room| room.bytes)
}

/// The limits of the control groups that a process is in, of both versions, and of those that they are in.
fn group_limits<'a>(
    groups: &'a str,
    read: &'a dyn Fn(&Path) -> Option<String>,
) -> impl Iterator<Item = u64> + 'a {
    let of_line = move |line: &'a str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|one| one == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let own = Path::new(root).join(path.trim_start_matches('/'));
        let above: Vec<_> =
            own.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_path_buf).collect();
        Some(above.into_iter().filter_map(move |dir| read(&dir.join(file))?.trim().parse::<u64>().ok()))
    };
    groups.lines().filter_map(of_line).flatten()
}

/// Refuses what needs more than there is: than `limit` for a rank where that is given, else than this process can have.
fn check(what: &str, need: Need, limit: Option<u64>, room: impl FnOnce() -> Option<Room>) -> Result<()> {
    let help = "take a smaller model, --batch or --seq, more --microbatches, a narrower --dtype, or tp in place of dp, which \
                holds the weights once; `explain` shows what is held";
    let refuse = |text: String| Err(Error::new(Kind::Config, text).detail("help", help));
    if let Some(limit) = limit {
        return match need.one > limit {
            true => refuse(format!(
                "{what} needs about {} on a rank, and --memory-limit allows {}",
                size(need.one),
                size(limit)
            )),
            false => Ok(()),
        };
    }
    match room() {
        // What is left is an estimate of the system.
        Some(Room { bytes, of }) if need.all > bytes.saturating_add(bytes / 16) => {
            refuse(format!("{what} needs about {} of memory, and {of} {} left", size(need.all), size(bytes)))
                .map_err(|e| {
                    e.detail(
                        "limit",
                        "--memory-limit BYTES, for each rank, takes the place of this look at the machine",
                    )
                })
        }
        _ => Ok(()),
    }
}

fn file(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Refuses a training that cannot fit. What it needs at least is what the first ranks of all stages hold in a step, of which
/// shares that are not even are the smallest.
///
/// # Errors
/// `Kind::Config`, with what to do; what the step reports.
pub(super) fn check_training(run: &RunArgs, mesh: &Mesh, name: &str, step: &Outline<'_>) -> Result<()> {
    if !run.is_on_host() {
        return Ok(());
    }
    let firsts: Vec<usize> = match mesh.axis("pp") {
        None => vec![0],
        Some(pp) => {
            let at = |stage| mesh.axes().map(|a| if a == pp { stage } else { 0 }).collect::<Vec<usize>>();
            (0..mesh.size(pp)).map(|stage| mesh.rank_at(&at(stage))).collect()
        }
    };
    // Of all ranks, those that share this machine.
    let (here, num_ranks) = (num_here(mesh) as u64, mesh.num_ranks() as u64);
    let alike = num_ranks / firsts.len() as u64;
    let peaks = firsts.into_iter().map(|rank| step.on(mesh, rank, peak_bytes));
    let peaks = peaks.collect::<Result<Vec<u64>>>()?;
    let need = Need {
        all: alike.saturating_mul(peaks.iter().sum()) / num_ranks * here,
        one: peaks.into_iter().max().unwrap_or(0),
    };
    check(&format!("training {name} on {mesh}"), need, run.memory_limit(), || room(&file))
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
    let need = Need { all: one.saturating_mul(num_here(mesh) as u64), one };
    check(&format!("{} on {mesh}", name.display()), need, run.memory_limit(), || room(&file))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 100 kB\nMemAvailable:  60 kB\nSwapFree: 4 kB\n";

    fn seen(files: &[(&str, &str)]) -> Option<Room> {
        room(&|path| files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| text.to_string()))
    }

    #[test]
    fn the_least_of_what_the_system_tells_counts() {
        let machine = ("/proc/meminfo", MEMINFO);
        let of =
            |files: &[(&str, &str)]| seen(files).map(|room| (room.bytes, room.of.split(' ').nth(1).unwrap()));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[machine]), Some((64 << 10, "machine")));
        assert_eq!(of(&[("/proc/meminfo", "MemAvailable: 0 kB\n")]), None);
        let unlimited = (
            "/proc/self/limits",
            "Max address space         unlimited            unlimited            bytes\n",
        );
        assert_eq!(of(&[machine, unlimited]), Some((64 << 10, "machine")));
        let limited = (
            "/proc/self/limits",
            "Max address space         5000                 unlimited            bytes\n",
        );
        assert_eq!(of(&[machine, limited]), Some((5000, "-v`")));
        // A group, one that it is in, and one of the first version.
        let groups = ("/proc/self/cgroup", "0::/a/b\n");
        let (own, above) =
            (("/sys/fs/cgroup/a/b/memory.max", "max\n"), ("/sys/fs/cgroup/a/memory.max", "1000\n"));
        assert_eq!(of(&[machine, groups, own]), Some((64 << 10, "machine")));
        assert_eq!(of(&[machine, groups, own, above]), Some((1000 + (4 << 10), "control")));
        let old = ("/proc/self/cgroup", "9:cpu:/x\n4:memory:/job\n");
        let limit = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000\n");
        assert_eq!(of(&[machine, old, limit]), Some((2000 + (4 << 10), "control")));
    }

    #[test]
    fn what_fits_is_never_refused_and_what_cannot_fit_is_told_in_bytes() {
        let need = Need { all: 3 << 30, one: 1 << 30 };
        let room = |bytes| move || Some(Room { bytes, of: "this machine has" });
        assert!(check("a run", need, None, room(3 << 30)).is_ok());
        assert!(check("a run", need, None, room((3 << 30) - 100)).is_ok(), "an estimate");
        assert!(check("a run", need, None, || None).is_ok());
        let error = check("a run", need, None, room(2 << 30)).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert_eq!(error.message(), "a run needs about 3.0 GiB of memory, and this machine has 2.0 GiB left");
        assert_eq!(error.details()[0].0, "help");
        // A limit that is given by hand is for each rank, and the machine is not looked at.
        assert!(check("a run", need, Some(1 << 30), room(0)).is_ok());
        let error = check("a run", need, Some(1 << 20), room(1 << 40)).unwrap_err();
        assert_eq!(error.message(), "a run needs about 1.0 GiB on a rank, and --memory-limit allows 1.0 MiB");
    }
}
