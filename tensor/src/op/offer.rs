//! Sums that are offered to an op: it may take one up and give its result added to it.

use crate::lineage::Lineage;
use crate::piece::{Piece, View};
use crate::tensor::Tensor;
use shardgrad_dist::Rank;
use shardgrad_kernels::{DType, Device};
use std::cell::RefCell;

/// What was added up before for a result, the cotangent of a value that has several uses, say. A kernel that adds to it what it
/// makes, while that is in the cache, saves a pass over both. Whoever takes it up gives the sum in the place of its own result,
/// with the bits of the sum of what was offered and of the result, rounded before. What nobody takes up comes back.
#[derive(Debug, Default)]
pub struct Offer(RefCell<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Nothing,
    Here(Tensor),
    /// What the sum came from.
    Taken(Lineage),
}

impl Offer {
    /// Of a sum, if there is one.
    #[must_use]
    pub fn new(sum: Option<Tensor>) -> Offer {
        Offer(RefCell::new(sum.map_or(State::Nothing, State::Here)))
    }

    /// The sum, unless it was taken up. Who offers takes what is left back; a vjp that takes it adds to it by other means.
    #[must_use]
    pub fn take(&self) -> Option<Tensor> {
        match self.0.take() {
            State::Here(sum) => Some(sum),
            state => {
                self.0.replace(state);
                None
            }
        }
    }

    /// Takes the sum up for new memory of a dtype under a view. None that lies otherwise or with gaps, and none on cards: their
    /// libraries round a product and its sum once where others do twice.
    pub(super) fn take_for(&self, rank: &Rank, dtype: DType, view: &View) -> Option<Piece> {
        let mut state = self.0.borrow_mut();
        let State::Here(sum) = &*state else { return None };
        let piece = sum.piece();
        let fits = piece.dtype == dtype && piece.view.is_contiguous() && piece.view.is_shaped_as(view);
        if !fits || matches!(rank.backend().device(), Device::Cuda(_)) {
            return None;
        }
        let piece = piece.clone();
        *state = State::Taken(piece.lineage);
        Some(piece)
    }

    /// What a result comes from that alone would come from `own`.
    pub(super) fn lineage(&self, own: Lineage) -> Lineage {
        match &*self.0.borrow() {
            State::Taken(sum) => sum.plus(own),
            _ => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::ops::einsum::Einsum;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, Result, World};
    use std::rc::Rc;

    fn normal(rank: &Rank, dtype: DType, shape: &[usize], stream: u64) -> Result<Tensor> {
        Tensor::normal(rank, &Layout::invariant(rank.mesh(), dtype, shape), 1, stream, 1.0)
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        x.to_local_f64().unwrap().iter().map(|x| x.to_bits()).collect()
    }

    /// A product of plain and of turned arguments onto a sum that somebody holds, beside the product and the sum of both.
    fn examine(rank: &Rank, dtype: DType, signature: &str, shapes: [&[usize]; 2]) -> Result<()> {
        for turned in [false, true] {
            let arg = |i: usize| {
                let shape = shapes[i];
                match turned {
                    false => normal(rank, dtype, shape, i as u64),
                    true => Ok(normal(rank, dtype, &[shape[1], shape[0]], i as u64)?.permute(&[1, 0])),
                }
            };
            let (a, b) = (arg(0)?, arg(1)?);
            let product = a.einsum(signature, &b);
            let sum = normal(rank, dtype, &product.shape(), 2)?;
            let (before, expected) = (bits(&sum), bits(&sum.clone().accumulate(&product)?));
            let offer = Offer::new(Some(sum.clone()));
            let op = Rc::new(Einsum::new(signature)?);
            let both = Tensor::apply_onto(op, &[&a, &b], product.layout().clone(), Some(&offer));
            let what = format!("{dtype} {signature} of {shapes:?}, turned {turned}");
            assert!(offer.take().is_none(), "{what}: not taken up");
            assert!(bits(&both) == expected, "{what}: other bits");
            assert_eq!(bits(&sum), before, "{what}: written over");
        }
        Ok(())
    }

    #[test]
    fn a_product_onto_a_sum_has_the_bits_of_the_sum_of_both() {
        // Nothing, sums over nothing, one row, one column, parts of tiles, several blocks of depth.
        let sizes =
            [[0, 4, 3], [5, 7, 0], [1, 70, 9], [33, 1, 130], [37, 300, 4], [61, 90, 600], [260, 200, 20]];
        for threads in [1, 3] {
            let done = World::new(Mesh::single()).threads(threads).launch(|rank| {
                for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                    for [m, n, k] in sizes {
                        examine(rank, dtype, "m k, k n -> m n", [&[m, k], &[k, n]])?;
                        examine(rank, dtype, "k m, k n -> m n", [&[k, m], &[k, n]])?;
                        // Such a product writes its matrix turned.
                        examine(rank, dtype, "k m, k n -> n m", [&[k, m], &[k, n]])?;
                    }
                }
                Ok(())
            });
            done.unwrap();
        }
    }

    #[test]
    fn what_lies_otherwise_stays() {
        World::run(Mesh::single(), |rank| {
            let (a, b) = (normal(rank, DType::BF16, &[4, 5], 0)?, normal(rank, DType::BF16, &[5, 6], 1)?);
            let product = a.matmul(&b);
            let sums = [
                normal(rank, DType::F32, &[4, 6], 2)?,
                normal(rank, DType::BF16, &[6, 4], 2)?.permute(&[1, 0]),
            ];
            for sum in sums {
                let offer = Offer::new(Some(sum.clone()));
                let op = crate::ops::einsum::matmul();
                let made = Tensor::apply_onto(op, &[&a, &b], product.layout().clone(), Some(&offer));
                assert_eq!(bits(&made), bits(&product));
                assert!(offer.take().is_some_and(|left| left.same_as(&sum)));
            }
            Ok(())
        })
        .unwrap();
    }
}
