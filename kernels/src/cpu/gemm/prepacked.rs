//! Prepacked right operands of GEMM: packed by the first product that reads a cached operand
//! ([`PackCache`](crate::cpu::pack_cache::PackCache)).

use super::BatchedMatrixRef;
use crate::buffer::{Buffer, bytes_of};
use crate::cpu::Pool;
use crate::cpu::pack_cache::OperandView;
use crate::cpu::simd::pack::KC;
use crate::cpu::simd::prepacked::{PackedB, PackedSteps, pack_steps};
use crate::dtype::{Element, Float};
use std::sync::Arc;

/// A product of more rows amortizes packing, so that caching gains little. Does not apply to operands that are widened: those are packed
/// again for every [`ROWS_PER_ROUNDING`](super::ROWS_PER_ROUNDING) rows.
const ROWS_MAX: usize = 512;
/// Columns packed in one task: rows of their panels are written in turn, and rows of more panels, which are pages apart, would evict each
/// other from the L1 cache.
const COLS: usize = 256;

/// Returns the packed form of b ([`PackedB`]) from the pack cache, packing b on a miss, for a product of extents (m, n, k) that would pack
/// b. `None` if b is not a cached operand, there is no memory, or caching gains little.
pub(super) fn prepack<T: Float>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    b: BatchedMatrixRef<'_, T>,
    packs: impl FnOnce() -> bool,
) -> Option<Buffer> {
    let block = |first: usize| PackedSteps { depth: KC.min(k - first), from: first };
    let blocks = || (0..k).step_by(KC).map(block).collect();
    prepack_steps(pool, [m, n, k], b, PackedBlocks { cut: None, blocks: &blocks }, packs)
}

/// The blocks of steps in which an operand is packed.
pub(super) struct PackedBlocks<'a> {
    /// Identifies the blocks among those of all products of the same extents; `None` for blocks of [`KC`] steps.
    pub(super) cut: Option<Arc<[usize]>>,
    /// Returns the blocks.
    pub(super) blocks: &'a dyn Fn() -> Vec<PackedSteps>,
}

/// [`prepack`] for given blocks of steps.
pub(super) fn prepack_steps<T: Float>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    b: BatchedMatrixRef<'_, T>,
    PackedBlocks { cut, blocks }: PackedBlocks<'_>,
    packs: impl FnOnce() -> bool,
) -> Option<Buffer> {
    let pack_cache = pool.pack_cache()?;
    let bytes = prepacked_bytes::<T>([m, n, k], packs)?;
    let (strides, width) = ([b.strides[1], b.strides[2]], PackedB::<T::Acc>::width(n));
    let view = OperandView { extents: [k, n], strides, dtype: T::DTYPE, cut };
    pack_cache.get_or_pack(bytes_of(b.data), &view, bytes, |packed| {
        let packed = packed.as_mut::<T::Acc>().expect("what was just taken has one handle");
        let mut rest = &mut packed[..width * k];
        let mut parts = Vec::new();
        for steps in blocks() {
            let (block, after) = rest.split_at_mut(width * steps.depth);
            parts.extend(
                block.chunks_mut(COLS * steps.depth).enumerate().map(|(i, to)| (steps, i * COLS, to)),
            );
            rest = after;
        }
        pool.chunks(&mut parts, 1, |_, parts| {
            for (steps, col, to) in parts {
                pack_steps((b.data, strides), [n, k], *steps, *col, to);
            }
        });
    })
}

/// Returns the bytes of the packed form of b for a product of extents (m, n, k); `None` if caching gains little.
pub(super) fn prepacked_bytes<T: Float>(
    [m, n, k]: [usize; 3],
    packs: impl FnOnce() -> bool,
) -> Option<usize> {
    if k == 0 || m > ROWS_MAX && T::DTYPE == T::Acc::DTYPE || !packs() {
        return None;
    }
    PackedB::<T::Acc>::width(n).checked_mul(k)?.checked_mul(size_of::<T::Acc>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Allocator;
    use crate::cpu::gemm::{BatchedMatrixMut, batched_gemm, batched_gemm_with_epilogue};
    use crate::cpu::pack_cache::PackCache;
    use half::bf16;

    /// Creates a pool with a pack cache without a memory limit.
    fn keeping(threads: usize) -> (Pool, Arc<PackCache>) {
        let pack_cache = Arc::new(PackCache::new(Allocator::default()));
        (Pool::new(threads).with_pack_cache(pack_cache.clone()), pack_cache)
    }

    fn numbers<T: Float>(seed: usize, len: usize) -> Vec<T> {
        (0..len).map(|i| T::from_f64((((i + seed) * 7919) % 1000) as f64 / 700.0 - 0.7)).collect()
    }

    fn buffer<T: Float>(data: &[T]) -> Buffer {
        let mut buffer = Allocator::default().alloc(size_of_val(data)).unwrap();
        buffer.as_mut::<T>().unwrap().copy_from_slice(data);
        buffer
    }

    /// Returns offset and strides of a layout: row-major, column-major, or strided in both dims.
    fn layout(kind: usize, [k, n]: [usize; 2]) -> (usize, [usize; 3]) {
        [(0, [0, n, 1]), (5, [0, 1, k + 3]), (3, [0, 2 * n + 3, 2]), (7, [0, n + 9, 1])][kind]
    }

    fn get_or_pack<T: Float>(
        pool: &Pool,
        [m, n, k]: [usize; 3],
        a: BatchedMatrixRef<'_, T>,
        b: BatchedMatrixRef<'_, T>,
    ) -> [Vec<T>; 2] {
        let mut c = vec![T::from_f64(9.0); m * n];
        batched_gemm(pool, [1, m, n, k], a, b, BatchedMatrixMut { data: &mut c[..], strides: [m * n, n, 1] });
        let mut epilogue = vec![T::from_f64(9.0); m * n];
        batched_gemm_with_epilogue(pool, [1, m, n, k], a, b, &mut epilogue, None, &|[row, col], c, _| {
            let place = |j| (row * n + col + j) as f64;
            c.iter_mut().enumerate().for_each(|(j, c)| *c = T::from_f64(c.to_f64() + place(j)));
        });
        [c, epilogue]
    }

    /// Runs several products with one b, cached and not; returns the number of packed forms of b.
    fn examine<T: Float>([m, n, k]: [usize; 3], kind: usize, threads: usize) -> usize {
        let (offset, strides) = layout(kind, [k, n]);
        let memory = buffer(&numbers::<T>(2, offset + 2 * (k + 9) * (n + 9)));
        let data = &memory.as_slice::<T>()[offset..];
        let (pool, pack_cache) = keeping(threads);
        let hold = pack_cache.hold(&memory);
        for (seed, transposed) in [(1, false), (4, true), (7, false)] {
            let x = numbers::<T>(seed, m * k);
            let a =
                BatchedMatrixRef { data: &x[..], strides: if transposed { [0, 1, m] } else { [0, k, 1] } };
            let b = BatchedMatrixRef { data, strides };
            let (held, right) =
                (get_or_pack(&pool, [m, n, k], a, b), get_or_pack(&Pool::new(1), [m, n, k], a, b));
            assert!(held == right, "{} {m} {n} {k}, kind {kind}, {threads} threads", T::DTYPE);
        }
        let [operands, forms] = pack_cache.counts();
        assert_eq!(operands, 1);
        drop(hold);
        assert_eq!(pack_cache.counts(), [0, 0], "nothing is packed of what does not recur any more");
        forms
    }

    #[test]
    fn prepacked_operands_give_the_same_bits() {
        // Partial panels, partial blocks of columns and of depth, tasks by rows and by columns.
        let shapes =
            [[29, 33, 5], [64, 100, 300], [57, 801, 70], [90, 40, 513], [70, 560, 256], [300, 70, 9]];
        for (dims, threads) in shapes.into_iter().flat_map(|dims| [1, 2, 3].map(|threads| (dims, threads))) {
            for kind in 0..4 {
                for forms in [
                    examine::<f32>(dims, kind, threads),
                    examine::<f64>(dims, kind, threads),
                    if crate::cpu::gemm::has_bf16_dot() { 1 } else { examine::<bf16>(dims, kind, threads) },
                ] {
                    assert!(forms <= 1, "one packed form serves every product: {dims:?}");
                }
            }
        }
        for (dims, kind, packed) in [
            ([64, 100, 300], 0, 1),
            ([64, 100, 300], 1, 1),
            ([ROWS_MAX, 100, 300], 0, 1),
            ([ROWS_MAX + 1, 100, 300], 0, 0),
            ([8, 100, 300], 0, 0),
            ([64, 100, 0], 0, 0),
            ([1, 100, 300], 0, 0),
        ] {
            assert_eq!(examine::<f32>(dims, kind, 2), packed, "{dims:?}, kind {kind}");
        }
    }

    #[test]
    fn products_read_the_prepacked_operand() {
        let (m, n, k) = (64, 96, 300);
        let memory = buffer(&numbers::<f32>(2, k * n));
        let (pool, pack_cache) = keeping(2);
        let _hold = pack_cache.hold(&memory);
        let b = memory.as_slice::<f32>();
        let view = OperandView { extents: [k, n], strides: [n, 1], dtype: f32::DTYPE, cut: None };
        let bytes = PackedB::<f32>::width(n) * k * 4;
        let packed = pack_cache.get_or_pack(bytes_of(b), &view, bytes, |packed| {
            packed.as_mut::<f32>().unwrap().fill(0.0);
        });
        let x = numbers::<f32>(1, m * k);
        let a = BatchedMatrixRef { data: &x[..], strides: [0, k, 1] };
        let [c, _] = get_or_pack(&pool, [m, n, k], a, BatchedMatrixRef { data: b, strides: [0, n, 1] });
        assert!(c.iter().all(|c| *c == 0.0), "zeros were packed in the place of b");
        // Parts of b, also those of like extents, and b transposed are other operands.
        for (from, n, strides) in [(0, n - 32, [0, n, 1]), (32, n - 32, [0, n, 1]), (0, n, [0, 1, k])] {
            let b = BatchedMatrixRef { data: &b[from..], strides };
            assert!(
                get_or_pack(&pool, [m, n, k], a, b) == get_or_pack(&Pool::new(1), [m, n, k], a, b),
                "{from} {n}"
            );
        }
        assert_eq!(pack_cache.counts(), [1, 4]);
        assert!(packed.is_some_and(|mut packed| !packed.is_unique()));
    }

    #[test]
    fn operand_stays_cached_until_its_last_guard_is_dropped() {
        let memory = buffer(&numbers::<f32>(2, 100 * 300));
        let (pool, pack_cache) = keeping(1);
        let [first, second] = [(); 2].map(|()| pack_cache.hold(&memory));
        let x = numbers::<f32>(1, 64 * 300);
        let a = BatchedMatrixRef { data: &x[..], strides: [0, 300, 1] };
        let b = BatchedMatrixRef { data: memory.as_slice::<f32>(), strides: [0, 100, 1] };
        get_or_pack(&pool, [64, 100, 300], a, b);
        drop(first);
        assert_eq!(pack_cache.counts(), [1, 1]);
        drop(second);
        assert_eq!((pack_cache.counts(), pack_cache.is_in_use()), ([0, 0], false));
    }
}
