//! Which cores threads run on.

/// The cores that this thread may run on, in ascending order; none where the system does not say.
#[must_use]
pub fn allowed() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    }
    Vec::new()
}

/// As many cores as threads are to have, of those that this thread may run on: places that share a core with one taken before come
/// last. Fewer, if there are not as many.
#[must_use]
pub fn apart(count: usize) -> Vec<usize> {
    let mut cores = allowed();
    cores.sort_by_key(|core| shares(*core));
    cores.truncate(count);
    cores
}

/// Whether a place is not the first one of its core, as the system tells: `0,32` and `0-1` begin with the first.
fn shares(core: usize) -> bool {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    let first = list.trim().split([',', '-']).next().and_then(|first| first.parse::<usize>().ok());
    first.is_some_and(|first| first != core)
}

/// Lets this thread run on one core only; threads that it starts later begin there too. Nothing happens where the system
/// refuses.
pub fn stay_on(core: usize) {
    #[cfg(target_os = "linux")]
    if core < rustix::thread::CpuSet::MAX_CPU {
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        // A core that was taken away since it was listed: the thread goes on elsewhere, only slower.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_was_told_to_and_lets_others_be() {
        let all = allowed();
        assert!(!all.is_empty());
        let last = all[all.len() - 1];
        let there = std::thread::spawn(move || {
            stay_on(last);
            let inherited = std::thread::spawn(allowed).join().expect("a thread that only looks");
            (allowed(), inherited)
        });
        assert_eq!(there.join().expect("a thread that only looks"), (vec![last], vec![last]));
        assert_eq!(allowed(), all);
        let mut apart_all = apart(usize::MAX);
        assert!(!shares(apart_all[0]) || all.iter().all(|core| shares(*core)));
        apart_all.sort_unstable();
        assert_eq!((apart_all, apart(1).len()), (all.clone(), 1));
        stay_on(usize::MAX);
        assert_eq!(allowed(), all);
    }
}
