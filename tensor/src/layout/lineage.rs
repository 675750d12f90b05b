//! A fingerprint of the global shapes that a tensor was computed from; ranks compare fingerprints before they reduce.
//!
//! Every rank states the global shape of the tensors that it makes, and divides a mean by it. Where two ranks state
//! different shapes (a last batch that is shorter on one of them), the local tensors may still have matching shapes, and
//! their sum would belong to neither batch. So each local tensor carries a fingerprint of the shapes of all tensors that
//! it depends on, and each redistribution compares the fingerprints. Tensors that never reach a collective are never
//! compared.

use crate::layout::Layout;

/// Digits of the golden ratio.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Digits of pi.
const START: u64 = 0x243F_6A88_85A3_08D3;

/// A fingerprint of the global shapes that a tensor depends on. Ranks that apply the same ops to tensors of the same
/// shapes get the same fingerprint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lineage(u64);

impl Lineage {
    /// No known source: the neutral element of [`Lineage::join`].
    pub const UNKNOWN: Lineage = Lineage(0);

    /// The lineage of a tensor that is created with a layout.
    #[must_use]
    pub fn of(layout: &Layout) -> Lineage {
        let start = Lineage(layout.ndim() as u64);
        layout.extents().iter().fold(start.mixed(START), |all, extent| all.mixed(*extent as u64))
    }

    /// The lineage that an op adds to that of its arguments: the shapes of outputs that no argument has, since the
    /// op may have stated them (as a slice does).
    pub(crate) fn of_new(args: &[&Layout], outputs: &[Layout]) -> Lineage {
        let is_new = |l: &&Layout| args.iter().all(|a| a.extents() != l.extents());
        outputs.iter().filter(is_new).fold(Lineage::UNKNOWN, |all, l| all.join(Lineage::of(l)))
    }

    /// Combines two lineages; combining a lineage with itself changes nothing.
    #[inline]
    #[must_use]
    pub fn join(self, other: Lineage) -> Lineage {
        if self == other || other == Lineage::UNKNOWN {
            return self;
        }
        if self == Lineage::UNKNOWN {
            return other;
        }
        self.mixed(other.0)
    }

    /// The lineage of a sum with one more term. Unlike [`Lineage::join`] this counts terms: sums of two and of three
    /// gradients from batches of one shape differ.
    pub(crate) fn plus(self, term: Lineage) -> Lineage {
        self.mixed(term.0)
    }

    /// Mixes in a number; the result depends on the number and on the order of mixing, and is never 0.
    fn mixed(self, number: u64) -> Lineage {
        let product = u128::from(self.0.rotate_left(23) ^ number) * u128::from(ODD);
        Lineage((product as u64 ^ (product >> 64) as u64) | 1)
    }

    /// Returns the fingerprint, 0 for [`Lineage::UNKNOWN`].
    #[must_use]
    pub fn fingerprint(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, Result, World};

    /// The lineage of the result of a function on zeros with some layouts.
    fn made(layouts: &[&str], f: fn(&[Tensor]) -> Tensor) -> Lineage {
        let ranks = World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let zeros = |text: &&str| Tensor::zeros(rank, &Layout::parse(text, rank.mesh())?);
            let x: Vec<Tensor> = layouts.iter().map(zeros).collect::<Result<_>>()?;
            Ok(f(&x).local().lineage)
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0]
    }

    #[test]
    fn lineage_of_a_scalar_depends_on_its_input_shapes() {
        let mean = |x: &[Tensor]| x[0].square().mean();
        let rows = made(&["f32[4@a, 3]"], mean);
        assert_eq!(rows, made(&["f32[4, 3]"], mean), "sharding does not change the lineage");
        for other in ["f32[6@a, 3]", "f32[4@a, 5]", "f32[12@a]", "f32[3@a, 4]"] {
            assert_ne!(rows, made(&[other], mean), "{other}");
        }
        // Through a redistribution, in any of several arguments, and where the op states the shape.
        let joined = |x: &[Tensor]| x[0].matmul(&x[1]).sum().add(&x[2]);
        let of = |rows: &str| made(&[&format!("f32[{rows}@a, 3]"), "f32[3, 2]", "f32[]"], joined);
        assert_eq!(of("4"), of("4"));
        assert_ne!(of("4"), of("6"));
        let cut = |n| {
            made(
                &["f32[4@a, 3]"],
                if n == 1 { |x| x[0].slice(1, 0..1).sum() } else { |x| x[0].slice(1, 0..2).sum() },
            )
        };
        assert_ne!(cut(1), cut(2));
    }

    #[test]
    fn shape_preserving_ops_keep_the_lineage() {
        let plain = made(&["f32[4@a, 3]"], |x| x[0].clone());
        assert_eq!(plain, made(&["f32[4@a, 3]"], |x| x[0].square().neg().add(&x[0])));
        assert_eq!(plain, made(&["f32[4, 3] +a"], |x| x[0].clone()));
        assert_ne!(plain, Lineage::UNKNOWN);
        assert_eq!(plain.join(Lineage::UNKNOWN).join(plain), Lineage::UNKNOWN.join(plain));
    }
}
