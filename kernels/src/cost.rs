//! The cost of kernel launches: floating-point operations and bytes, and a counter of both for a back end.

use std::sync::atomic::{AtomicU64, Ordering};

/// The cost of a launch; the same on every device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations (a multiply-add counts two).
    pub flops: u64,
    /// Bytes that must be read and written at least once.
    pub bytes: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

/// The summed cost of all launches of one back end. Any thread may read the sums; only one thread at a time adds to them, because
/// launches of a back end are sequential. So an addition is a plain load and store: an atomic read-modify-write would take as long as
/// half the kernel of a small launch.
#[derive(Debug, Default)]
pub(crate) struct CostCounter {
    flops: AtomicU64,
    bytes: AtomicU64,
}

impl CostCounter {
    /// Adds the cost of a launch.
    pub(crate) fn add(&self, cost: Cost) {
        add(&self.flops, cost.flops);
        add(&self.bytes, cost.bytes);
    }

    /// Returns the summed cost of all launches so far.
    pub(crate) fn sum(&self) -> Cost {
        Cost { flops: self.flops.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

fn add(sum: &AtomicU64, by: u64) {
    let before = sum.load(Ordering::Relaxed);
    if cfg!(debug_assertions) {
        let stored = sum.compare_exchange(before, before + by, Ordering::Relaxed, Ordering::Relaxed);
        assert!(stored.is_ok(), "bug: two threads launch kernels of one back end at the same time");
    } else {
        sum.store(before + by, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_costs_of_launches_from_different_threads() {
        let counter = CostCounter::default();
        counter.add(Cost { flops: 3, bytes: 40 });
        std::thread::scope(|s| s.spawn(|| counter.add(Cost { flops: 4, bytes: 2 })).join().unwrap());
        assert_eq!(counter.sum(), Cost { flops: 7, bytes: 42 });
    }
}
