//! GEMM with an epilogue: a function applied to finished rows of c while they are in the cache.

use super::{BatchedMatrixMut, BatchedMatrixRef, batched_gemm_with_isa, isa};
use crate::cpu::Pool;
use crate::cpu::simd::blocked_gemm::MatrixPtrMut;
use crate::dtype::Float;
use std::ops::Range;

/// Elements per task that only applies an epilogue: enough to amortise the hand-over.
const TASK_ELEMENTS: usize = 1 << 14;

/// Epilogue applied to a finished run of a row of c. Arguments: \[row, counted over the whole batch, and first column\], the run of c,
/// and the same run of the auxiliary output (empty without one).
pub type Epilogue<'a, T> = dyn Fn([usize; 2], &mut [T], &mut [T]) + Sync + 'a;

/// An epilogue with the extents of c and the auxiliary output.
pub(super) struct BoundEpilogue<'a, T> {
    dims: [usize; 3],
    aux: Option<MatrixPtrMut<T>>,
    epilogue: &'a Epilogue<'a, T>,
}

/// [`batched_gemm`](super::batched_gemm) into a contiguous c with an epilogue, which sees every element of c once, rounded to T, and may
/// change it. The epilogue may write to the same elements of `aux`, an auxiliary output as large as c. How rows are cut into runs is not
/// specified.
///
/// # Panics
/// If a matrix reaches outside of its memory, c is not contiguous, or `aux` is not as large as c.
pub fn batched_gemm_with_epilogue<'a, T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrixRef<'_, T>,
    b: BatchedMatrixRef<'_, T>,
    c: &mut [T],
    aux: Option<&'a mut [T]>,
    epilogue: &'a Epilogue<'a, T>,
) {
    let [g, m, n, _] = dims;
    assert!(c.len() == g * m * n, "c is contiguous");
    assert!(aux.as_ref().is_none_or(|aux| aux.len() == c.len()), "the second output is as large as c");
    let aux = aux.map(|aux| MatrixPtrMut { start: aux.as_mut_ptr(), row_stride: n, col_stride: 1 });
    let epilogue = BoundEpilogue { dims: [g, m, n], aux, epilogue };
    let c = BatchedMatrixMut { data: c, strides: [m * n, n, 1] };
    batched_gemm_with_isa(isa(T::DTYPE, pool.precision()), pool, dims, a, b, c, Some(&epilogue));
}

impl<'a, T: Float> BoundEpilogue<'a, T> {
    /// Returns an epilogue without an auxiliary output for a contiguous c of extents (g, m, n).
    pub(super) fn new(dims: [usize; 3], epilogue: &'a Epilogue<'a, T>) -> BoundEpilogue<'a, T> {
        BoundEpilogue { dims, aux: None, epilogue }
    }

    /// Returns the function to call for finished parts of a block of c that begins at (matrix, row, column); `c` points to the block.
    pub(super) fn for_part<'s>(
        epilogue: Option<&'s Self>,
        [matrix, row, col]: [usize; 3],
        c: MatrixPtrMut<T>,
    ) -> impl Fn(Range<usize>, Range<usize>) + Sync + 's {
        move |rows, cols| {
            let Some(epilogue) = epilogue else { return };
            let [_, m, n] = epilogue.dims;
            for i in rows {
                let row = matrix * m + row + i;
                // SAFETY: `batched_gemm_with_epilogue` checked that both outputs are contiguous and as large as `dims`; each part is
                // finished once, by the thread that wrote it, and `batched_gemm_with_epilogue` borrows both outputs until all threads are
                // done.
                let [sums, aux] = unsafe {
                    let sums = std::slice::from_raw_parts_mut(c.at(i, cols.start), cols.len());
                    let place = |aux: MatrixPtrMut<T>| {
                        std::slice::from_raw_parts_mut(aux.at(row, col + cols.start), cols.len())
                    };
                    [sums, epilogue.aux.map(place).unwrap_or_default()]
                };
                debug_assert!(col + cols.end <= n, "a part must be within c");
                (epilogue.epilogue)([row, col + cols.start], sums, aux);
            }
        }
    }

    /// Applies the epilogue to all rows, after a product that did not.
    pub(super) fn apply_to_all(&self, pool: &Pool, c: &mut BatchedMatrixMut<'_, T>) {
        let [g, m, n] = self.dims;
        let c = MatrixPtrMut { start: c.data.as_mut_ptr(), row_stride: n, col_stride: 1 };
        let (rows, rows_per_task) = (g * m, (TASK_ELEMENTS / n.max(1)).max(1));
        let whole = BoundEpilogue::for_part(Some(self), [0; 3], c);
        pool.run(rows.div_ceil(rows_per_task), &|task| {
            whole(task * rows_per_task..rows.min((task + 1) * rows_per_task), 0..n)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::batched_gemm;
    use half::bf16;

    /// Checks an epilogue that negates c and counts, in the auxiliary output, how often it sees each element, and where.
    fn check<T: Float>([g, m, n, k]: [usize; 4], transposed: bool, threads: usize) {
        let test_matrix = |seed: usize, len: usize| -> Vec<T> {
            (0..len).map(|i| T::from_f64(((i + seed) * 7919 % 15) as f64 - 7.0)).collect()
        };
        let (x, y) = (test_matrix(1, g * m * k), test_matrix(2, g * k * n));
        let a = BatchedMatrixRef { data: &x[..], strides: [m * k, k, 1] };
        let b = BatchedMatrixRef {
            data: &y[..],
            strides: if transposed { [k * n, 1, k] } else { [k * n, n, 1] },
        };
        let pool = Pool::new(threads);
        let mut expected = vec![T::from_f64(9.0); g * m * n];
        batched_gemm(
            &pool,
            [g, m, n, k],
            a,
            b,
            BatchedMatrixMut { data: &mut expected[..], strides: [m * n, n, 1] },
        );
        let place = |row: usize, col: usize| ((3 * row + col) % 100) as f64 + 1.0;
        let mut c = vec![T::from_f64(9.0); g * m * n];
        let mut aux = vec![T::default(); g * m * n];
        batched_gemm_with_epilogue(
            &pool,
            [g, m, n, k],
            a,
            b,
            &mut c,
            Some(&mut aux),
            &|[row, col], c, aux| {
                assert_eq!(c.len(), aux.len());
                for (j, (c, aux)) in c.iter_mut().zip(aux).enumerate() {
                    *c = T::from_f64(-c.to_f64());
                    *aux = T::from_f64(aux.to_f64() + place(row, col + j));
                }
            },
        );
        for at in 0..g * m * n {
            let what = format!("element {at} of {:?}, {threads} threads", [g, m, n, k]);
            assert_eq!(c[at].to_f64(), -expected[at].to_f64(), "{what}");
            assert_eq!(aux[at].to_f64(), place(at / n, at % n), "{what}");
        }
        batched_gemm_with_epilogue(&pool, [g, m, n, k], a, b, &mut c, None, &|_, c, aux| {
            assert!(aux.is_empty());
            c.fill(T::from_f64(5.0));
        });
        assert!(c.iter().all(|c| c.to_f64() == 5.0));
    }

    #[test]
    fn epilogue_sees_every_element_once_with_its_position() {
        // One row, one column, k = 0, empty; partial tiles; several blocks of depth and of columns; batches.
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
                check::<f32>(dims, transposed, threads);
                check::<f64>(dims, transposed, threads);
                check::<bf16>(dims, transposed, threads);
            }
        }
    }
}
