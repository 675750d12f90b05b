//! How much memory the system lets this process take yet: what the machine has, and what limits of the process and of its control
//! groups leave.

use std::fmt;
use std::path::{Path, PathBuf};

/// Reads a file of the system; `None` where there is none.
pub(crate) type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// A bound of the memory of this process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Room {
    pub(crate) source: Source,
    /// The bound as it is set.
    pub(crate) max_bytes: u64,
    /// What is not taken yet.
    pub(crate) left_bytes: u64,
}

/// What bounds the memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Memory and swap of the machine.
    Machine,
    /// The limit of a control group.
    ControlGroup,
    /// RLIMIT_AS: everything that is mapped, used or not.
    AddressSpace,
    /// RLIMIT_DATA: private memory that may be written.
    DataSize,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Machine => "this machine",
            Source::ControlGroup => "the control group of this process",
            Source::AddressSpace => "the address space of this process (`ulimit -v`)",
            Source::DataSize => "the data size of this process (`ulimit -d`)",
        })
    }
}

/// A limit from this size on is none: version 1 of control groups says the largest number of pages.
const UNLIMITED: u64 = 1 << 60;

/// The value of the first `key : value` line of a text.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.split_once(':').filter(|(k, _)| k.trim() == key).map(|(_, v)| v.trim());
    text.lines().find_map(value)
}

/// A value that is given in kB, in bytes.
pub(crate) fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|n| n << 10)
}

/// The bounds of this process that files of the system state; none where they state nothing.
pub(crate) fn rooms(read: Read<'_>) -> Vec<Room> {
    let memory = read(Path::new("/proc/meminfo")).unwrap_or_default();
    let swap = kib(&memory, "SwapFree").unwrap_or(0);
    // Some sandboxes say 0 of what they do not know.
    let free = kib(&memory, "MemAvailable").filter(|n| *n > 0).map(|n| n.saturating_add(swap));
    let machine = free.map(|left_bytes| Room {
        source: Source::Machine,
        max_bytes: kib(&memory, "MemTotal").unwrap_or(left_bytes),
        left_bytes,
    });
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let group = groups.lines().flat_map(|line| group_rooms(line, swap, read)).min_by_key(|r| r.left_bytes);
    let limits = read(Path::new("/proc/self/limits")).unwrap_or_default();
    let status = read(Path::new("/proc/self/status")).unwrap_or_default();
    let limited = |source: Source, limit: &str, used: &str| {
        let max_bytes = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let max_bytes: u64 = max_bytes.split_whitespace().next()?.parse().ok()?;
        let left_bytes = max_bytes.saturating_sub(kib(&status, used).unwrap_or(0));
        Some(Room { source, max_bytes, left_bytes }).filter(|room| room.max_bytes < UNLIMITED)
    };
    let space = limited(Source::AddressSpace, "Max address space", "VmSize");
    let data = limited(Source::DataSize, "Max data size", "VmData");
    [machine, group, space, data].into_iter().flatten().collect()
}

/// Where a version of control groups states limits, use and what of the use is a cache of files.
struct Files {
    root: &'static str,
    max: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const VERSION_2: Files = Files {
    root: "/sys/fs/cgroup",
    max: "memory.max",
    used: "memory.current",
    cached: ["inactive_file", "active_file"],
};
const VERSION_1: Files = Files {
    root: "/sys/fs/cgroup/memory",
    max: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

/// The bounds by the control group that a line of `/proc/self/cgroup` names, and by the groups around it. Of a group outside of what
/// this process sees, the limits are those of the root.
fn group_rooms(line: &str, swap: u64, read: Read<'_>) -> Vec<Room> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let files = match controllers {
        "" => &VERSION_2,
        list if list.split(',').any(|one| one == "memory") => &VERSION_1,
        _ => return Vec::new(),
    };
    let inside: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let inside = if inside.contains(&"..") { &[][..] } else { &inside[..] };
    let folders = (0..=inside.len())
        .map(|n| inside[..n].iter().fold(PathBuf::from(files.root), |folder, part| folder.join(part)));
    folders.filter_map(|folder| group_room(&folder, files, swap, read)).collect()
}

fn group_room(folder: &Path, files: &Files, swap: u64, read: Read<'_>) -> Option<Room> {
    let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
    let max_bytes = number(files.max).filter(|max| *max < UNLIMITED)?;
    let stat = read(&folder.join("memory.stat")).unwrap_or_default();
    let stated = |key: &str| stat.lines().find_map(|l| l.strip_prefix(key)?.trim().parse::<u64>().ok());
    // The system takes caches of files back when memory is asked for.
    let cached: u64 = files.cached.iter().filter_map(|key| stated(key)).sum();
    let used = number(files.used).unwrap_or(0).saturating_sub(cached);
    let swap = number("memory.swap.max")
        .map_or(swap, |max| swap.min(max.saturating_sub(number("memory.swap.current").unwrap_or(0))));
    let left_bytes = max_bytes.saturating_sub(used).saturating_add(swap);
    Some(Room { source: Source::ControlGroup, max_bytes, left_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: (&str, &str) =
        ("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable:  60 kB\nSwapFree: 4 kB\n");

    /// What files state: the sources, with bounds and what is left.
    fn stated(files: &[(&str, &str)]) -> Vec<(Source, u64, u64)> {
        let text = |path: &Path| files.iter().find(|(name, _)| Path::new(name) == path);
        let rooms = rooms(&|path| text(path).map(|(_, text)| text.to_string()));
        rooms.into_iter().map(|room| (room.source, room.max_bytes, room.left_bytes)).collect()
    }

    #[test]
    fn the_machine_has_memory_and_swap() {
        assert_eq!(stated(&[]), []);
        assert_eq!(stated(&[MEMORY]), [(Source::Machine, 100 << 10, 64 << 10)]);
        assert_eq!(stated(&[("/proc/meminfo", "MemAvailable: 0 kB\n")]), []);
    }

    #[test]
    fn limits_of_the_process_count_less_what_is_mapped() {
        let line = |name: &str, value: &str| format!("{name:<26}{value:<21}unlimited            bytes\n");
        let unlimited = line("Max address space", "unlimited") + &line("Max data size", "unlimited");
        assert_eq!(stated(&[("/proc/self/limits", &unlimited)]), []);
        let limits = line("Max data size", "9000") + &line("Max address space", "50000");
        let status = ("/proc/self/status", "Name: x\nVmSize:\t      30 kB\nVmData:\t  2 kB\n");
        let expected =
            [(Source::AddressSpace, 50_000, 50_000 - 30_720), (Source::DataSize, 9000, 9000 - 2048)];
        assert_eq!(stated(&[("/proc/self/limits", &limits), status]), expected);
    }

    #[test]
    fn the_tightest_control_group_counts_less_its_use() {
        let group = ("/proc/self/cgroup", "0::/a/b\n");
        let own = ("/sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(stated(&[group, own]), []);
        let around = ("/sys/fs/cgroup/a/memory.max", "100000\n");
        assert_eq!(stated(&[group, own, around]), [(Source::ControlGroup, 100_000, 100_000)]);
        let used = ("/sys/fs/cgroup/a/memory.current", "60000\n");
        let stat = ("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 10000\nactive_file 5000\n");
        let left = |files: &[(&str, &str)]| stated(files).last().map(|room| room.2);
        assert_eq!(left(&[group, around, used]), Some(40_000));
        assert_eq!(left(&[group, around, used, stat]), Some(55_000), "caches are given back");
        assert_eq!(left(&[MEMORY, group, around, used]), Some(40_000 + 4096));
        let no_swap = ("/sys/fs/cgroup/a/memory.swap.max", "0\n");
        assert_eq!(left(&[MEMORY, group, around, used, no_swap]), Some(40_000));
    }

    #[test]
    fn control_groups_of_version_1_and_roots_of_namespaces_count() {
        let old = ("/proc/self/cgroup", "9:cpu:/x\n4:memory:/job\n");
        let limit = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "20000\n");
        let used = ("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "7000\n");
        let stat = ("/sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 1000\n");
        assert_eq!(stated(&[old, limit, used, stat]), [(Source::ControlGroup, 20_000, 14_000)]);
        let none = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(stated(&[old, none]), []);
        let root = ("/sys/fs/cgroup/memory.max", "5000\n");
        for path in ["0::/\n", "0::/../other\n", "0::/unseen/here\n"] {
            assert_eq!(stated(&[("/proc/self/cgroup", path), root]), [(Source::ControlGroup, 5000, 5000)]);
        }
    }

    #[test]
    fn fields_of_proc_are_read() {
        let text = "processor\t: 0\nmodel name\t: A B: C\nMemTotal:       16 kB\nMemFree: x kB\n";
        assert_eq!((field(text, "model name"), field(text, "name")), (Some("A B: C"), None));
        assert_eq!((kib(text, "MemTotal"), kib(text, "MemFree")), (Some(16 << 10), None));
    }
}
