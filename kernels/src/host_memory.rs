//! Host memory available to this process: free memory of the machine, limits of the process (ulimit) and of its control groups
//! (cgroups).

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Reads a system file; `None` if it does not exist.
pub type ReadFile<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// A limit on the memory of this process.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryLimit {
    /// What sets the limit.
    pub source: LimitSource,
    /// The limit as set.
    pub max_bytes: u64,
    /// What remains of it.
    pub available_bytes: u64,
}

/// The source of a memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// Physical memory and swap of the machine.
    Machine,
    /// The limit of a control group.
    ControlGroup,
    /// RLIMIT_AS: all mapped memory, used or not.
    AddressSpace,
    /// RLIMIT_DATA: private writable memory.
    DataSize,
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LimitSource::Machine => "this machine",
            LimitSource::ControlGroup => "the control group of this process",
            LimitSource::AddressSpace => "the address space of this process (`ulimit -v`)",
            LimitSource::DataSize => "the data size of this process (`ulimit -d`)",
        })
    }
}

/// Limits of this size mean unlimited: cgroup v1 states the largest number of pages.
const UNLIMITED: u64 = 1 << 60;

/// Reads a file of the system, such as `/proc/meminfo`; `None` if it does not exist.
#[must_use]
pub fn read_system_file(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Returns the bytes of host memory that this process and all others of its machine, or of its control group, can still take; `None`
/// where the system does not state them.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let is_shared =
        |limit: &MemoryLimit| matches!(limit.source, LimitSource::Machine | LimitSource::ControlGroup);
    let limits = memory_limits(&read_system_file).into_iter().filter(is_shared);
    limits.map(|limit| limit.available_bytes).min()
}

/// Returns texts that processes have in common if they share the memory of [`available_bytes`]: those of the running system, of the
/// container and of the control group.
#[must_use]
pub fn sharing_texts() -> [String; 3] {
    let files = ["/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname", "/proc/self/cgroup"];
    files.map(|file| read_system_file(Path::new(file)).unwrap_or_default())
}

/// Returns the value of the first `key : value` line of a text.
#[must_use]
pub fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.split_once(':').filter(|(k, _)| k.trim() == key).map(|(_, v)| v.trim());
    text.lines().find_map(value)
}

/// Returns a field given in kB, in bytes.
#[must_use]
pub fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|n| n << 10)
}

/// Returns the memory limits of this process, from system files; none that they do not state.
#[must_use]
pub fn memory_limits(read: ReadFile<'_>) -> Vec<MemoryLimit> {
    let memory = read(Path::new("/proc/meminfo")).unwrap_or_default();
    let swap = kib(&memory, "SwapFree").unwrap_or(0);
    // Some sandboxes report 0 for unknown values.
    let free = kib(&memory, "MemAvailable").filter(|n| *n > 0).map(|n| n.saturating_add(swap));
    let machine = free.map(|available_bytes| MemoryLimit {
        source: LimitSource::Machine,
        max_bytes: kib(&memory, "MemTotal").unwrap_or(available_bytes),
        available_bytes,
    });
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let group =
        groups.lines().flat_map(|line| cgroup_limits(line, swap, read)).min_by_key(|r| r.available_bytes);
    let limits = read(Path::new("/proc/self/limits")).unwrap_or_default();
    let status = read(Path::new("/proc/self/status")).unwrap_or_default();
    let limited = |source: LimitSource, limit: &str, used: &str| {
        let max_bytes = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let max_bytes: u64 = max_bytes.split_whitespace().next()?.parse().ok()?;
        let available_bytes = max_bytes.saturating_sub(kib(&status, used).unwrap_or(0));
        Some(MemoryLimit { source, max_bytes, available_bytes })
            .filter(|memory_limit| memory_limit.max_bytes < UNLIMITED)
    };
    let space = limited(LimitSource::AddressSpace, "Max address space", "VmSize");
    let data = limited(LimitSource::DataSize, "Max data size", "VmData");
    [machine, group, space, data].into_iter().flatten().collect()
}

/// Files of a cgroup version: limit, usage, and the part of the usage that is page cache.
struct CgroupFiles {
    root: &'static str,
    max: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const CGROUP_V2: CgroupFiles = CgroupFiles {
    root: "/sys/fs/cgroup",
    max: "memory.max",
    used: "memory.current",
    cached: ["inactive_file", "active_file"],
};
const CGROUP_V1: CgroupFiles = CgroupFiles {
    root: "/sys/fs/cgroup/memory",
    max: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

/// Returns the limits of the control group in a line of `/proc/self/cgroup`, and of its parents. For a group outside the cgroup namespace
/// these are the limits of the root.
fn cgroup_limits(line: &str, swap: u64, read: ReadFile<'_>) -> Vec<MemoryLimit> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let files = match controllers {
        "" => &CGROUP_V2,
        list if list.split(',').any(|one| one == "memory") => &CGROUP_V1,
        _ => return Vec::new(),
    };
    let inside: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let inside = if inside.contains(&"..") { &[][..] } else { &inside[..] };
    let folders = (0..=inside.len())
        .map(|n| inside[..n].iter().fold(PathBuf::from(files.root), |folder, part| folder.join(part)));
    folders.filter_map(|folder| cgroup_limit(&folder, files, swap, read)).collect()
}

fn cgroup_limit(folder: &Path, files: &CgroupFiles, swap: u64, read: ReadFile<'_>) -> Option<MemoryLimit> {
    let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
    let max_bytes = number(files.max).filter(|max| *max < UNLIMITED)?;
    let stat = read(&folder.join("memory.stat")).unwrap_or_default();
    let stated = |key: &str| stat.lines().find_map(|l| l.strip_prefix(key)?.trim().parse::<u64>().ok());
    // The kernel reclaims page cache when memory is needed.
    let cached: u64 = files.cached.iter().filter_map(|key| stated(key)).sum();
    let used = number(files.used).unwrap_or(0).saturating_sub(cached);
    let swap = number("memory.swap.max")
        .map_or(swap, |max| swap.min(max.saturating_sub(number("memory.swap.current").unwrap_or(0))));
    let available_bytes = max_bytes.saturating_sub(used).saturating_add(swap);
    Some(MemoryLimit { source: LimitSource::ControlGroup, max_bytes, available_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: (&str, &str) =
        ("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable:  60 kB\nSwapFree: 4 kB\n");

    /// Returns source, limit and available bytes as stated by the given files.
    fn stated(files: &[(&str, &str)]) -> Vec<(LimitSource, u64, u64)> {
        let text = |path: &Path| files.iter().find(|(name, _)| Path::new(name) == path);
        let memory_limits = memory_limits(&|path| text(path).map(|(_, text)| text.to_string()));
        memory_limits
            .into_iter()
            .map(|memory_limit| (memory_limit.source, memory_limit.max_bytes, memory_limit.available_bytes))
            .collect()
    }

    #[test]
    fn machine_limit_is_memory_plus_swap() {
        assert_eq!(stated(&[]), []);
        assert_eq!(stated(&[MEMORY]), [(LimitSource::Machine, 100 << 10, 64 << 10)]);
        assert_eq!(stated(&[("/proc/meminfo", "MemAvailable: 0 kB\n")]), []);
    }

    #[test]
    fn process_limits_subtract_mapped_memory() {
        let line = |name: &str, value: &str| format!("{name:<26}{value:<21}unlimited            bytes\n");
        let unlimited = line("Max address space", "unlimited") + &line("Max data size", "unlimited");
        assert_eq!(stated(&[("/proc/self/limits", &unlimited)]), []);
        let limits = line("Max data size", "9000") + &line("Max address space", "50000");
        let status = ("/proc/self/status", "Name: x\nVmSize:\t      30 kB\nVmData:\t  2 kB\n");
        let expected = [
            (LimitSource::AddressSpace, 50_000, 50_000 - 30_720),
            (LimitSource::DataSize, 9000, 9000 - 2048),
        ];
        assert_eq!(stated(&[("/proc/self/limits", &limits), status]), expected);
    }

    #[test]
    fn tightest_cgroup_limit_subtracts_usage() {
        let group = ("/proc/self/cgroup", "0::/a/b\n");
        let own = ("/sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(stated(&[group, own]), []);
        let around = ("/sys/fs/cgroup/a/memory.max", "100000\n");
        assert_eq!(stated(&[group, own, around]), [(LimitSource::ControlGroup, 100_000, 100_000)]);
        let used = ("/sys/fs/cgroup/a/memory.current", "60000\n");
        let stat = ("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 10000\nactive_file 5000\n");
        let left = |files: &[(&str, &str)]| stated(files).last().map(|memory_limit| memory_limit.2);
        assert_eq!(left(&[group, around, used]), Some(40_000));
        assert_eq!(left(&[group, around, used, stat]), Some(55_000), "page cache is reclaimable");
        assert_eq!(left(&[MEMORY, group, around, used]), Some(40_000 + 4096));
        let no_swap = ("/sys/fs/cgroup/a/memory.swap.max", "0\n");
        assert_eq!(left(&[MEMORY, group, around, used, no_swap]), Some(40_000));
    }

    #[test]
    fn cgroup_v1_and_namespace_roots_are_read() {
        let old = ("/proc/self/cgroup", "9:cpu:/x\n4:memory:/job\n");
        let limit = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "20000\n");
        let used = ("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "7000\n");
        let stat = ("/sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 1000\n");
        assert_eq!(stated(&[old, limit, used, stat]), [(LimitSource::ControlGroup, 20_000, 14_000)]);
        let none = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(stated(&[old, none]), []);
        let root = ("/sys/fs/cgroup/memory.max", "5000\n");
        for path in ["0::/\n", "0::/../other\n", "0::/unseen/here\n"] {
            assert_eq!(
                stated(&[("/proc/self/cgroup", path), root]),
                [(LimitSource::ControlGroup, 5000, 5000)]
            );
        }
    }

    #[test]
    fn proc_fields_are_parsed() {
        let text = "processor\t: 0\nmodel name\t: A B: C\nMemTotal:       16 kB\nMemFree: x kB\n";
        assert_eq!((field(text, "model name"), field(text, "name")), (Some("A B: C"), None));
        assert_eq!((kib(text, "MemTotal"), kib(text, "MemFree")), (Some(16 << 10), None));
    }
}
