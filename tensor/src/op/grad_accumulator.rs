//! Gradient accumulation inside of ops: a sum that an op may take to add its result to.

use crate::execution::local_tensor::{LocalTensor, View};
use crate::layout::lineage::Lineage;
use crate::tensor::Tensor;
use shardgrad_kernels::DType;
use std::cell::RefCell;

/// A gradient sum that an op may add its result to, for example the cotangent of a value with several uses.
///
/// A kernel that adds its result to the sum while the result is in cache (beta = 1 of GEMM, the residual gradient of a norm) saves a
/// pass over memory. An op that takes the sum returns the sum plus its result: a product rounds its result before the addition, so
/// that the bits are those of a separate addition; a norm rounds once, which differs for 16-bit floats only. A sum that no op takes
/// goes back to the owner.
#[derive(Debug, Default)]
pub struct GradAccumulator(RefCell<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Empty,
    Available(Tensor),
    /// An op has taken the sum, whose lineage stays here.
    Taken(Lineage),
}

impl GradAccumulator {
    /// An accumulator with a sum, or empty.
    #[must_use]
    pub fn new(sum: Option<Tensor>) -> GradAccumulator {
        GradAccumulator(RefCell::new(sum.map_or(State::Empty, State::Available)))
    }

    /// Takes the sum out, unless an op has taken the sum: the owner to get an unused sum back, a vjp to add to the sum by other means.
    #[must_use]
    pub fn take(&self) -> Option<Tensor> {
        match self.0.take() {
            State::Available(sum) => Some(sum),
            state => {
                self.0.replace(state);
                None
            }
        }
    }

    /// Takes the sum for an output of this dtype and view. `None` for a sum of another shape or dtype or with gaps.
    pub(super) fn accumulate_for(&self, dtype: DType, view: &View) -> Option<LocalTensor> {
        let mut state = self.0.borrow_mut();
        let State::Available(sum) = &*state else { return None };
        let local = sum.local();
        let fits = local.dtype == dtype && local.view.is_contiguous() && local.view.is_shaped_as(view);
        if !fits {
            return None;
        }
        let local = local.clone();
        *state = State::Taken(local.lineage);
        Some(local)
    }

    /// The lineage of a result whose own lineage is `own`, with the sum if an op has taken the sum.
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
    use crate::methods::value::Value;
    use crate::op::{Op, OutputOptions, apply_first};
    use crate::ops::einsum::Einsum;
    use shardgrad_dist::{Mesh, Rank, Result, World};
    use std::panic::Location;
    use std::rc::Rc;

    fn normal(rank: &Rank, dtype: DType, shape: &[usize], stream: u64) -> Result<Tensor> {
        Tensor::normal(rank, &Layout::invariant(rank.mesh(), dtype, shape), 1, stream, 1.0)
    }

    fn onto<'a>(accumulators: &'a [Option<&'a GradAccumulator>]) -> OutputOptions<'a> {
        OutputOptions { accumulators, ..OutputOptions::default() }
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        x.to_local_f64().unwrap().iter().map(|x| x.to_bits()).collect()
    }

    /// Compares a product that is accumulated onto a shared sum with the sum plus the product, for contiguous and transposed arguments.
    fn check_product(rank: &Rank, dtype: DType, signature: &str, shapes: [&[usize]; 2]) -> Result<()> {
        for transposed in [false, true] {
            let arg = |i: usize| {
                let shape = shapes[i];
                match transposed {
                    false => normal(rank, dtype, shape, i as u64),
                    true => Ok(normal(rank, dtype, &[shape[1], shape[0]], i as u64)?.permute(&[1, 0])),
                }
            };
            let (a, b) = (arg(0)?, arg(1)?);
            let product = a.einsum(signature, &b);
            let sum = normal(rank, dtype, &product.shape(), 2)?;
            let (before, expected) = (bits(&sum), bits(&sum.clone().accumulate(&product)?));
            let accumulator = GradAccumulator::new(Some(sum.clone()));
            let op: Rc<dyn Op> = Rc::new(Einsum::new(signature)?);
            let both = apply_first(&*op, &[&a, &b], onto(&[Some(&accumulator)]), Location::caller());
            let what = format!("{dtype} {signature} of {shapes:?}, transposed {transposed}");
            assert!(accumulator.take().is_none(), "{what}: the sum was not taken");
            assert!(bits(&both) == expected, "{what}: other bits than a separate addition");
            assert_eq!(bits(&sum), before, "{what}: the shared sum was overwritten");
        }
        Ok(())
    }

    #[test]
    fn accumulated_products_are_bit_identical_to_separate_additions() {
        // Empty results, empty sums, one row, one column, partial tiles, several blocks of k.
        let sizes =
            [[0, 4, 3], [5, 7, 0], [1, 70, 9], [33, 1, 130], [37, 300, 4], [61, 90, 600], [260, 200, 20]];
        for threads in [1, 3] {
            let done = World::new(Mesh::single()).threads(threads).launch(|rank| {
                for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                    for [m, n, k] in sizes {
                        check_product(rank, dtype, "m k, k n -> m n", [&[m, k], &[k, n]])?;
                        check_product(rank, dtype, "k m, k n -> m n", [&[k, m], &[k, n]])?;
                        // This product writes its output transposed.
                        check_product(rank, dtype, "k m, k n -> n m", [&[k, m], &[k, n]])?;
                    }
                }
                Ok(())
            });
            done.unwrap();
        }
    }

    #[test]
    fn sums_of_another_dtype_or_layout_are_not_taken() {
        World::run(Mesh::single(), |rank| {
            let (a, b) = (normal(rank, DType::BF16, &[4, 5], 0)?, normal(rank, DType::BF16, &[5, 6], 1)?);
            let product = a.matmul(&b);
            let sums = [
                normal(rank, DType::F32, &[4, 6], 2)?,
                normal(rank, DType::BF16, &[6, 4], 2)?.permute(&[1, 0]),
            ];
            for sum in sums {
                let accumulator = GradAccumulator::new(Some(sum.clone()));
                let op = crate::ops::einsum::matmul();
                let result = apply_first(&op, &[&a, &b], onto(&[Some(&accumulator)]), Location::caller());
                assert_eq!(bits(&result), bits(&product));
                assert!(accumulator.take().is_some_and(|left| left.ptr_eq(&sum)));
            }
            Ok(())
        })
        .unwrap();
    }
}
