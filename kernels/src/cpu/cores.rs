//! Which cores threads run on.

use std::collections::BTreeSet;

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
    let mut places = in_turn(allowed(), siblings);
    places.truncate(count);
    places
}

/// The places that are of one core with a place, as the system tells; empty where it does not.
fn siblings(place: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{place}/topology/thread_siblings_list");
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Places in the order in which threads are to have them. A core is known by the first place of its list, `0` of `0,32` and `0-1`,
/// whether that is among the places or not, as in a container that has a part of the machine.
fn in_turn(places: Vec<usize>, siblings: impl Fn(usize) -> String) -> Vec<usize> {
    let core = |place: usize| {
        let list = siblings(place);
        list.trim().split([',', '-']).next().and_then(|first| first.parse().ok()).unwrap_or(place)
    };
    let mut taken = BTreeSet::new();
    let (mut all, shared): (Vec<_>, Vec<_>) =
        places.into_iter().partition(|place| taken.insert(core(*place)));
    all.extend(shared);
    all
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
    fn places_that_share_a_core_with_one_taken_before_come_last() {
        type Siblings = fn(usize) -> String;
        // Lists as the system writes them.
        let ranges: Siblings = |place| format!("{}-{}\n", place / 2 * 2, place / 2 * 2 + 1);
        let pairs: Siblings = |place| format!("{},{}\n", place % 4, place % 4 + 4);
        let silent: Siblings = |_| String::new();
        for (places, siblings, expected) in [
            (vec![0, 1, 2, 3], ranges, vec![0, 2, 1, 3]),
            (vec![0, 1, 2, 3, 4, 5, 6, 7], pairs, vec![0, 1, 2, 3, 4, 5, 6, 7]),
            (vec![0, 1, 4, 6], pairs, vec![0, 1, 6, 4]),
            (vec![1, 3], ranges, vec![1, 3]),
            // The first place of a core belongs to somebody else; its second is free all the same.
            (vec![0, 1, 3], ranges, vec![0, 3, 1]),
            (vec![5, 9], silent, vec![5, 9]),
            (vec![], ranges, vec![]),
        ] {
            assert_eq!(in_turn(places.clone(), siblings), expected, "{places:?}");
        }
    }

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
        assert_eq!(apart_all, in_turn(all.clone(), siblings));
        apart_all.sort_unstable();
        assert_eq!((apart_all, apart(1).len()), (all.clone(), 1));
        stay_on(usize::MAX);
        assert_eq!(allowed(), all);
    }
}
