//! CPU affinity: which cores threads run on.

use std::collections::BTreeSet;

/// Returns the logical CPUs that this thread may run on, in ascending order; empty if the system does not say.
#[must_use]
pub fn allowed() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    }
    Vec::new()
}

/// Returns `count` logical CPUs for threads to be pinned to, of those that this thread may run on: the first hyperthread of each physical
/// core before the second ones. Fewer, if there are not as many.
#[must_use]
pub fn choose(count: usize) -> Vec<usize> {
    let mut cpus = physical_cores_first(allowed(), siblings);
    cpus.truncate(count);
    cpus
}

/// Returns the list of logical CPUs that share a core with `cpu`, as sysfs writes it; empty if it does not.
fn siblings(cpu: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Orders logical CPUs so that those that share a core with an earlier one come last. A core is identified by the first CPU of its sibling
/// list, `0` of `0,32` and `0-1`, whether or not that CPU is among `cpus` (in a container that has a part of the machine it may not be).
fn physical_cores_first(cpus: Vec<usize>, siblings: impl Fn(usize) -> String) -> Vec<usize> {
    let core = |cpu: usize| {
        let list = siblings(cpu);
        list.trim().split([',', '-']).next().and_then(|first| first.parse().ok()).unwrap_or(cpu)
    };
    let mut seen_cores = BTreeSet::new();
    let (mut first, shared): (Vec<_>, Vec<_>) =
        cpus.into_iter().partition(|cpu| seen_cores.insert(core(*cpu)));
    first.extend(shared);
    first
}

/// Pins this thread to one core; threads that it starts later inherit that. Does nothing if the system refuses.
pub fn pin_thread(core: usize) {
    #[cfg(target_os = "linux")]
    if core < rustix::thread::CpuSet::MAX_CPU {
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        // The core may have been taken away since it was listed: the thread then runs elsewhere, only slower.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn hyperthreads_of_a_used_core_come_last() {
        type Siblings = fn(usize) -> String;
        // Lists as the system writes them.
        let ranges: Siblings = |cpu| format!("{}-{}\n", cpu / 2 * 2, cpu / 2 * 2 + 1);
        let pairs: Siblings = |cpu| format!("{},{}\n", cpu % 4, cpu % 4 + 4);
        let silent: Siblings = |_| String::new();
        for (cpus, siblings, expected) in [
            (vec![0, 1, 2, 3], ranges, vec![0, 2, 1, 3]),
            (vec![0, 1, 2, 3, 4, 5, 6, 7], pairs, vec![0, 1, 2, 3, 4, 5, 6, 7]),
            (vec![0, 1, 4, 6], pairs, vec![0, 1, 6, 4]),
            (vec![1, 3], ranges, vec![1, 3]),
            // The first CPU of the core is not available; the second one still identifies the core.
            (vec![0, 1, 3], ranges, vec![0, 3, 1]),
            (vec![5, 9], silent, vec![5, 9]),
            (vec![], ranges, vec![]),
        ] {
            assert_eq!(physical_cores_first(cpus.clone(), siblings), expected, "{cpus:?}");
        }
    }

    #[test]
    fn pinning_affects_this_thread_and_its_children_only() {
        let all = allowed();
        assert!(!all.is_empty());
        let last = all[all.len() - 1];
        let there = std::thread::spawn(move || {
            pin_thread(last);
            let inherited = std::thread::spawn(allowed).join().expect("a thread that only looks");
            (allowed(), inherited)
        });
        assert_eq!(there.join().expect("a thread that only looks"), (vec![last], vec![last]));
        assert_eq!(allowed(), all);
        let mut chosen = choose(usize::MAX);
        assert_eq!(chosen, physical_cores_first(all.clone(), siblings));
        chosen.sort_unstable();
        assert_eq!((chosen, choose(1).len()), (all.clone(), 1));
        pin_thread(usize::MAX);
        assert_eq!(allowed(), all);
    }
}
