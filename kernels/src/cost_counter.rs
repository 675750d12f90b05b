//! What the launches of one back end have cost.

use crate::kernel::Cost;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sums that any thread reads and one at a time adds to, as launches of a back end come one after another: a load and a store each.
/// To lock the memory for that would take as long as half the kernel of a small launch.
#[derive(Debug, Default)]
pub(crate) struct CostCounter {
    flops: AtomicU64,
    bytes: AtomicU64,
}

impl CostCounter {
    /// Adds the cost of a launch.
    pub(crate) fn add(&self, cost: Cost) {
        raise(&self.flops, cost.flops);
        raise(&self.bytes, cost.bytes);
    }

    /// What all launches so far have cost.
    pub(crate) fn sum(&self) -> Cost {
        Cost { flops: self.flops.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

fn raise(sum: &AtomicU64, by: u64) {
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
    fn costs_add_up_whoever_launches_after_whom() {
        let counter = CostCounter::default();
        counter.add(Cost { flops: 3, bytes: 40 });
        std::thread::scope(|s| s.spawn(|| counter.add(Cost { flops: 4, bytes: 2 })).join().unwrap());
        assert_eq!(counter.sum(), Cost { flops: 7, bytes: 42 });
    }
}
