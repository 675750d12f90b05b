//! From tensors of which global shapes the elements of a piece come: a number that ranks compare before they reduce.
//!
//! Every rank states the global shape of what it makes, and divides a mean by it. Where two ranks state unlike shapes, as with a
//! last batch that is shorter on one of them, the local parts may still fit each other, and a sum of them would be of neither.
//! So each piece carries a number that is formed of the shapes of all that flowed into it, and each change of layout compares it.
//! What flows nowhere is compared with nothing: a rank may do what it likes with tensors that the others never see.

use crate::layout::Layout;

/// Digits of the golden ratio.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Digits of pi.
const START: u64 = 0x243F_6A88_85A3_08D3;

/// A number for the global shapes that something comes from. Of ranks that apply the same ops to tensors of the same shapes it is
/// the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lineage(u64);

impl Lineage {
    /// Nothing is known; joined with another it gives way.
    pub const UNKNOWN: Lineage = Lineage(0);

    /// Of what is made in the shape of a layout.
    #[must_use]
    pub fn of(layout: &Layout) -> Lineage {
        let start = Lineage(layout.ndim() as u64);
        layout.extents().iter().fold(start.mixed(START), |all, extent| all.mixed(*extent as u64))
    }

    /// Of what an op makes of arguments with these layouts, beside what they come from: the shapes of its outputs that none of them
    /// has, which the op may have stated itself, as a slice does.
    pub(crate) fn of_new(args: &[&Layout], outputs: &[Layout]) -> Lineage {
        let is_new = |l: &&Layout| args.iter().all(|a| a.extents() != l.extents());
        outputs.iter().filter(is_new).fold(Lineage::UNKNOWN, |all, l| all.join(Lineage::of(l)))
    }

    /// Of what comes from both. To come from one thing twice is to come from it.
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

    /// Of a sum that has this one as a further term. Unlike [`Lineage::join`] it counts: sums of two and of three gradients from
    /// batches of one shape differ.
    pub(crate) fn plus(self, term: Lineage) -> Lineage {
        self.mixed(term.0)
    }

    /// Another one for each number that is mixed in, and for each order of them. One that is known is not 0.
    fn mixed(self, number: u64) -> Lineage {
        let product = u128::from(self.0.rotate_left(23) ^ number) * u128::from(ODD);
        Lineage((product as u64 ^ (product >> 64) as u64) | 1)
    }

    /// The number, 0 where nothing is known.
    #[must_use]
    pub fn mark(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, Result, World};

    /// The lineage of what a function makes of zeros of some layouts.
    fn made(layouts: &[&str], f: fn(&[Tensor]) -> Tensor) -> Lineage {
        let ranks = World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let zeros = |text: &&str| Tensor::zeros(rank, &Layout::parse(text, rank.mesh())?);
            let x: Vec<Tensor> = layouts.iter().map(zeros).collect::<Result<_>>()?;
            Ok(f(&x).piece().lineage)
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0]
    }

    #[test]
    fn a_scalar_knows_the_shapes_that_it_comes_from() {
        let mean = |x: &[Tensor]| x[0].square().mean();
        let rows = made(&["f32[4@a, 3]"], mean);
        assert_eq!(rows, made(&["f32[4, 3]"], mean), "a split is no shape");
        for other in ["f32[6@a, 3]", "f32[4@a, 5]", "f32[12@a]", "f32[3@a, 4]"] {
            assert_ne!(rows, made(&[other], mean), "{other}");
        }
        // Through a change of layout, in any of several arguments, and where the op states the shape.
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
    fn what_changes_no_shape_leaves_no_trace() {
        let plain = made(&["f32[4@a, 3]"], |x| x[0].clone());
        assert_eq!(plain, made(&["f32[4@a, 3]"], |x| x[0].square().neg().add(&x[0])));
        assert_eq!(plain, made(&["f32[4, 3] +a"], |x| x[0].clone()));
        assert_ne!(plain, Lineage::UNKNOWN);
        assert_eq!(plain.join(Lineage::UNKNOWN).join(plain), Lineage::UNKNOWN.join(plain));
    }
}
