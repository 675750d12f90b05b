//! Products whose rows are seen once more, by whoever has written them, while they are in the cache.

use super::{BatchedMatrix, BatchedMatrixMut, batched_gemm_with_isa, isa};
use crate::cpu::Pool;
use crate::cpu::simd::blocked_gemm::Target;
use crate::dtype::Float;
use std::ops::Range;

/// Elements of a task that only ends rows: it outlasts its hand-over.
const TASK: usize = 1 << 14;

/// What is done with a run of a row of c that is whole: (row, counted over all matrices, and first column), the run, and the same
/// place in the second output (empty without one).
pub type Epilogue<'a, T> = dyn Fn([usize; 2], &mut [T], &mut [T]) + Sync + 'a;

/// An epilogue, and the second output.
pub(super) struct EpilogueOutput<'a, T> {
    dims: [usize; 3],
    other: Option<Target<T>>,
    epilogue: &'a Epilogue<'a, T>,
}

/// As [`products`](super::products), for a contiguous c: `epilogue` sees every element of c once, rounded to T, and may change it. It
/// may write to the same place of `other`, which is as large as c. How rows are cut into runs isa nothing.
///
/// # Panics
/// If a stack reaches outside of its memory, c is not contiguous, or `other` is not as large.
pub fn batched_gemm_with_epilogue<'a, T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrix<'_, T>,
    b: BatchedMatrix<'_, T>,
    c: &mut [T],
    other: Option<&'a mut [T]>,
    epilogue: &'a Epilogue<'a, T>,
) {
    let [g, m, n, _] = dims;
    assert!(c.len() == g * m * n, "c is contiguous");
    assert!(other.as_ref().is_none_or(|other| other.len() == c.len()), "the second output is as large as c");
    let other = other.map(|other| Target { start: other.as_mut_ptr(), row: n, col: 1 });
    let epilogue = EpilogueOutput { dims: [g, m, n], other, epilogue };
    let c = BatchedMatrixMut { data: c, strides: [m * n, n, 1] };
    batched_gemm_with_isa(isa(T::DTYPE, pool.precision()), pool, dims, a, b, c, Some(&epilogue));
}

impl<T: Float> EpilogueOutput<'_, T> {
    /// What is to be told of parts of a part of c, which begins at (matrix, row, column); `c` lies there.
    pub(super) fn of_part<'s>(
        epilogue: Option<&'s Self>,
        [matrix, row, col]: [usize; 3],
        c: Target<T>,
    ) -> impl Fn(Range<usize>, Range<usize>) + Sync + 's {
        move |rows, cols| {
            let Some(epilogue) = epilogue else { return };
            let [_, m, n] = epilogue.dims;
            for i in rows {
                let row = matrix * m + row + i;
                // SAFETY: `batched_gemm_with_epilogue` saw to it that both outputs are contiguous and as large as `dims` says; each part is told of
                // once, by the thread that wrote it, and `batched_gemm_with_epilogue` holds both until all threads are done.
                let [sums, other] = unsafe {
                    let sums = std::slice::from_raw_parts_mut(c.at(i, cols.start), cols.len());
                    let place = |other: Target<T>| {
                        std::slice::from_raw_parts_mut(other.at(row, col + cols.start), cols.len())
                    };
                    [sums, epilogue.other.map(place).unwrap_or_default()]
                };
                debug_assert!(col + cols.end <= n, "a part lies inside of c");
                (epilogue.epilogue)([row, col + cols.start], sums, other);
            }
        }
    }

    /// Tells of all rows, after a product that told of none.
    pub(super) fn all(&self, pool: &Pool, c: &mut BatchedMatrixMut<'_, T>) {
        let [g, m, n] = self.dims;
        let c = Target { start: c.data.as_mut_ptr(), row: n, col: 1 };
        let (rows, some) = (g * m, (TASK / n.max(1)).max(1));
        let whole = Self::of_part(Some(self), [0; 3], c);
        pool.run(rows.div_ceil(some), &|task| whole(task * some..rows.min((task + 1) * some), 0..n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::products;
    use half::bf16;

    /// The epilogue negates c and counts, in the second output, how often it saw an element, besides where.
    fn examine<T: Float>([g, m, n, k]: [usize; 4], transposed: bool, threads: usize) {
        let numbers = |seed: usize, len: usize| -> Vec<T> {
            (0..len).map(|i| T::from_f64(((i + seed) * 7919 % 15) as f64 - 7.0)).collect()
        };
        let (x, y) = (numbers(1, g * m * k), numbers(2, g * k * n));
        let a = BatchedMatrix { data: &x[..], strides: [m * k, k, 1] };
        let b =
            BatchedMatrix { data: &y[..], strides: if transposed { [k * n, 1, k] } else { [k * n, n, 1] } };
        let pool = Pool::new(threads);
        let mut right = vec![T::from_f64(9.0); g * m * n];
        products(
            &pool,
            [g, m, n, k],
            a,
            b,
            BatchedMatrixMut { data: &mut right[..], strides: [m * n, n, 1] },
        );
        let place = |row: usize, col: usize| ((3 * row + col) % 100) as f64 + 1.0;
        let mut c = vec![T::from_f64(9.0); g * m * n];
        let mut other = vec![T::default(); g * m * n];
        batched_gemm_with_epilogue(
            &pool,
            [g, m, n, k],
            a,
            b,
            &mut c,
            Some(&mut other),
            &|[row, col], c, other| {
                assert_eq!(c.len(), other.len());
                for (j, (c, other)) in c.iter_mut().zip(other).enumerate() {
                    *c = T::from_f64(-c.to_f64());
                    *other = T::from_f64(other.to_f64() + place(row, col + j));
                }
            },
        );
        for at in 0..g * m * n {
            let what = format!("element {at} of {:?}, {threads} threads", [g, m, n, k]);
            assert_eq!(c[at].to_f64(), -right[at].to_f64(), "{what}");
            assert_eq!(other[at].to_f64(), place(at / n, at % n), "{what}");
        }
        batched_gemm_with_epilogue(&pool, [g, m, n, k], a, b, &mut c, None, &|_, c, other| {
            assert!(other.is_empty());
            c.fill(T::from_f64(5.0));
        });
        assert!(c.iter().all(|c| c.to_f64() == 5.0));
    }

    #[test]
    fn every_element_is_seen_once_where_it_is() {
        // One row, one column, no terms, nothing; parts of tiles; several blocks of depth and of columns; formed together.
        let shapes = [
            [1, 1, 70, 9],
            [3, 5, 1, 4],
            [2, 3, 4, 0],
            [0, 3, 4, 5],
            [1, 4, 0, 2],
            [2, 33, 47, 13],
            [1, 61, 900, 300],
            [1, 300, 3, 70],
            [1, 260, 200, 290],
        ];
        for (dims, threads) in shapes.into_iter().flat_map(|dims| [1, 2, 3].map(|threads| (dims, threads))) {
            for transposed in [false, true] {
                examine::<f32>(dims, transposed, threads);
                examine::<f64>(dims, transposed, threads);
                examine::<bf16>(dims, transposed, threads);
            }
        }
    }
}
