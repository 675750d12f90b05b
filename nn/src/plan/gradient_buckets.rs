//! Sizes of the buckets in which gradients are reduced over ranks.

use super::Plan;
use shardgrad_autograd::BucketBytes;
use shardgrad_tensor::Mesh;
use std::fmt;

/// In stages 2 and 3 of ZeRO, the buckets that would hold all gradients of a rank: their memory stays a small part of that of the states.
const BUCKETS_PER_PASS_MIN: usize = 16;

/// The bytes below which that does not make buckets smaller: many small calls would cost more than the memory.
const SHARE_BYTES_MIN: usize = 64 << 10;

/// Units of bytes, the largest first.
const UNITS: [(&str, usize); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Plan {
    /// Sets the bytes at which buckets of gradients are closed: of the first bucket of a backward pass, and of all others. The default
    /// is 1 MiB and 25 MiB; on a mesh of several axes and in stage 3 of ZeRO, where a backward pass also makes calls that block, 1 MiB and
    /// 4 MiB: such a call waits for at most two buckets. In stages 2 and 3, where a pass holds no whole gradients but those of its buckets,
    /// a bucket closes at 1 / 16 of a rank's gradients at the latest, but not below 64 KiB.
    ///
    /// Gradients that the same ranks reduce share a collective, in the order in which the backward pass completes them. Large buckets
    /// make few calls, small ones begin early and take less memory; a gradient of at least `others` bytes travels by itself, so that
    /// with 0 every gradient does. Results have the same bits for all sizes.
    #[doc(alias = "bucket_cap_mb")]
    #[doc(alias = "reduce_bucket_size")]
    #[must_use]
    pub fn gradient_buckets(mut self, first: usize, others: usize) -> Plan {
        self.gradient_buckets = Some(BucketBytes { first, others });
        self
    }

    /// The sizes of the buckets of gradients on a mesh with all axes, for gradients of so many bytes on a rank.
    pub(crate) fn bucket_bytes(&self, mesh: &Mesh, gradient_bytes: usize) -> BucketBytes {
        if let Some(stated) = self.gradient_buckets {
            return stated;
        }
        let stage = self.zero_on(mesh).map_or(0, |(stage, _)| stage);
        let num_axes = mesh.axes().filter(|axis| mesh.size(*axis) > 1).count();
        let BucketBytes { first, others } = match num_axes > 1 || stage == 3 {
            true => BucketBytes::between_blocking_calls(),
            false => BucketBytes::default(),
        };
        let most = match stage {
            2 | 3 => (gradient_bytes / BUCKETS_PER_PASS_MIN).max(SHARE_BYTES_MIN),
            _ => usize::MAX,
        };
        BucketBytes { first: first.min(most), others: others.min(most) }
    }

    /// Writes the line of the plan, if sizes are stated.
    pub(super) fn write_gradient_buckets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gradient_buckets {
            Some(BucketBytes { first, others }) => {
                writeln!(f, "gradient_buckets {} {}", with_unit(first), with_unit(others))
            }
            None => Ok(()),
        }
    }
}

/// Parses `FIRST OTHERS`.
pub(super) fn parse_gradient_buckets(words: &[&str]) -> Result<Plan, String> {
    let sizes: Option<Vec<usize>> = words.iter().map(|word| parse_bytes(word)).collect();
    match sizes.as_deref() {
        Some([first, others]) => Ok(Plan::new().gradient_buckets(*first, *others)),
        _ => Err("write `gradient_buckets FIRST OTHERS`, as in `gradient_buckets 1MiB 25MiB`".to_string()),
    }
}

/// The number of bytes in the largest unit that divides it.
fn with_unit(bytes: usize) -> String {
    let unit = UNITS.iter().find(|(_, size)| bytes > 0 && bytes.is_multiple_of(*size));
    unit.map_or_else(|| bytes.to_string(), |(name, size)| format!("{}{name}", bytes / size))
}

/// A number of bytes with or without a unit; `None` for other words.
fn parse_bytes(word: &str) -> Option<usize> {
    let unit = UNITS.iter().find_map(|(name, size)| Some((word.strip_suffix(name)?, *size)));
    let (number, size) = unit.unwrap_or((word, 1));
    number.parse::<usize>().ok()?.checked_mul(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(plan: &Plan, mesh: &str) -> BucketBytes {
        plan.bucket_bytes(&Mesh::parse(mesh).unwrap(), 1 << 30)
    }

    #[test]
    fn sizes_are_read_as_printed() {
        for (text, first, others) in [
            ("1MiB 25MiB", 1 << 20, 25 << 20),
            ("0 1000", 0, 1000),
            ("3KiB 2GiB", 3 << 10, 2 << 30),
            ("1025KiB 1025", 1025 << 10, 1025),
        ] {
            let plan: Plan = format!("gradient_buckets {text}\n").parse().unwrap();
            assert_eq!(on(&plan, "dp=2,tp=2"), BucketBytes { first, others });
            assert_eq!(plan.to_string(), format!("gradient_buckets {text}\n"));
        }
        assert_eq!(Plan::new().to_string(), "");
        let later =
            Plan::new().gradient_buckets(1, 2).and(Plan::new()).and(Plan::new().gradient_buckets(3, 4));
        assert_eq!(on(&later, "dp=2"), BucketBytes { first: 3, others: 4 });
    }

    #[test]
    fn buckets_between_blocking_calls_are_small() {
        let others = |plan: Plan, mesh: &str| on(&plan, mesh).others >> 20;
        assert_eq!(others(Plan::new(), "dp=2"), 25);
        assert_eq!(others(Plan::zero(2, "dp"), "dp=4,tp=1"), 25);
        assert_eq!(others(Plan::new(), "dp=2,tp=2"), 4);
        assert_eq!(others(Plan::new(), "pp=2,dp=2"), 4);
        assert_eq!(others(Plan::fsdp("fsdp"), "fsdp=2"), 4);
        assert_eq!(on(&Plan::new(), "dp=2").first, on(&Plan::new(), "dp=2,tp=2").first);
    }

    #[test]
    fn buckets_of_sharded_gradients_are_a_share_of_them() {
        let on = |plan: Plan, mesh: &str, mib: usize| {
            let bytes = plan.bucket_bytes(&Mesh::parse(mesh).unwrap(), mib << 20);
            (bytes.first >> 10, bytes.others >> 10)
        };
        assert_eq!(on(Plan::zero(1, "dp"), "dp=4", 32), (1024, 25 << 10), "gradients are whole");
        assert_eq!(on(Plan::zero(2, "dp"), "dp=4", 32), (1024, 2048));
        assert_eq!(on(Plan::fsdp("fsdp"), "dp=2,fsdp=2", 8), (512, 512));
        assert_eq!(on(Plan::zero(3, "dp"), "dp=4", 640), (1024, 4096), "no larger than between other calls");
        assert_eq!(on(Plan::zero(2, "dp"), "dp=2", 0), (64, 64));
        let stated = Plan::zero(2, "dp").gradient_buckets(3 << 20, 5 << 20);
        assert_eq!(on(stated, "dp=2", 8), (3072, 5120));
    }

    #[test]
    fn other_sizes_are_refused() {
        for words in ["", "1MiB", "1MiB 2MiB 3MiB", "1MB 2", "-1 2", "1 99999999999999GiB", "MiB 1"] {
            let error = format!("gradient_buckets {words}\n").parse::<Plan>().unwrap_err();
            assert!(error.to_string().contains("gradient_buckets FIRST OTHERS"), "{words}: {error}");
        }
    }
}
