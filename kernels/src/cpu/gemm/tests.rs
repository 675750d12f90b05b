//! FMA products against the definition of their bits.

use super::*;
use half::bf16;
use proptest::prelude::*;

/// The definition in the module's documentation, literally.
fn definition<T: Float>(
    [m, n, k]: [usize; 3],
    a: MatrixRef<'_, T>,
    b: MatrixRef<'_, T>,
    c: &mut [T::Acc],
    add: bool,
) {
    for (at, c) in c.iter_mut().enumerate().take(m * n) {
        let (i, j) = (at / n, at % n);
        *c = if add { *c } else { T::Acc::ZERO };
        for first in (0..k).step_by(KC) {
            let mut sum = T::Acc::ZERO;
            for p in first..k.min(first + KC) {
                let x = a.data[i * a.row_stride + p * a.col_stride].widen();
                sum = x.fma(b.data[p * b.row_stride + j * b.col_stride].widen(), sum);
            }
            *c = if first == 0 && !add { sum } else { *c + sum };
        }
    }
}

fn levels() -> Vec<Level> {
    let best = level();
    [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l as u8 <= best as u8).collect()
}

fn test_matrix<T: Float>(seed: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f64((((i + seed) * 7919) % 1000) as f64 / 700.0 - 0.7)).collect()
}

/// Strides of row-major, column-major, and twice non-contiguous matrices.
fn strides(kind: usize, rows: usize, cols: usize) -> (usize, usize) {
    [(cols, 1), (1, rows), (2 * cols + 3, 2), (1, rows + 5)][kind]
}

/// Runs a product on every instruction set; returns the first wrong element as an error.
fn check<T: Float>(dims: [usize; 3], kinds: [usize; 3], add: bool) -> Result<(), String> {
    let [m, n, k] = dims;
    let matrix = |kind, rows, cols, data| {
        let (row_stride, col_stride) = strides(kind, rows, cols);
        MatrixRef { data, row_stride, col_stride }
    };
    let (memory_a, memory_b) =
        (test_matrix::<T>(1, 2 * m * k + 9 * (m + k) + 9), test_matrix::<T>(5, 2 * n * k + 9 * (n + k) + 9));
    let (a, b) = (matrix(kinds[0], m, k, &memory_a[..]), matrix(kinds[1], k, n, &memory_b[..]));
    let mut expected = vec![T::Acc::ONE; m * n];
    definition(dims, a, b, &mut expected, add);
    let (row_stride, col_stride) = strides(kinds[2], m, n);
    for level in levels() {
        let mut memory = vec![T::Acc::ONE; 2 * m * n + 9 * (m + n) + 9];
        let c = MatrixMut { data: &mut memory[..], row_stride, col_stride };
        gemm_with_kind(KernelKind::Fma(level), &mut Scratch::default(), dims, a, b, add, c);
        for (at, want) in expected.iter().enumerate() {
            let got = memory[at / n * row_stride + at % n * col_stride];
            if got != *want {
                return Err(format!(
                    "{dims:?} {kinds:?} {level:?} {add}, element {at}: {got:?}, not {want:?}"
                ));
            }
        }
    }
    Ok(())
}

/// 150 cases, or as many as PROPTEST_CASES says.
fn cases() -> ProptestConfig {
    let default = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        default
    } else {
        ProptestConfig { cases: 150, ..default }
    }
}

proptest! {
    #![proptest_config(cases())]
    #[test]
    fn bits_are_those_of_the_definition(
        dims in [1usize..70, 1usize..70, 0usize..70],
        kinds in [0usize..4, 0usize..4, 0usize..4],
        add: bool,
    ) {
        check::<f32>(dims, kinds, add).unwrap();
        check::<f64>(dims, kinds, add).unwrap();
        check::<bf16>(dims, kinds, add).unwrap();
    }
}

#[test]
fn bits_of_large_and_skinny_products_are_those_of_the_definition() {
    let thin = [[200, 1040, 30], [1, 130, 700], [130, 1, 700], [3, 5, 1025], [25, 33, 513], [193, 40, 257]];
    // A transposed left operand is read in place for few columns and short strides, else packed.
    let transposed = [[70, 100, 300], [600, 100, 40], [30, 200, 70]];
    for dims in thin.into_iter().chain(transposed) {
        for kinds in [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]] {
            check::<f32>(dims, kinds, true).unwrap();
            check::<f64>(dims, kinds, false).unwrap();
        }
    }
}

#[test]
fn submatrix_product_has_the_bits_of_the_whole() {
    let (m, n, k) = (61, 67, 300);
    let (a, b) = (test_matrix::<f32>(1, m * k), test_matrix::<f32>(2, k * n));
    let run = |rows: std::ops::Range<usize>, cols: std::ops::Range<usize>| {
        let mut c = vec![0f32; rows.len() * cols.len()];
        let a = MatrixRef { data: &a[rows.start * k..], row_stride: k, col_stride: 1 };
        let b = MatrixRef { data: &b[cols.start..], row_stride: n, col_stride: 1 };
        let to = MatrixMut { data: &mut c[..], row_stride: cols.len(), col_stride: 1 };
        gemm(&mut Scratch::default(), [rows.len(), cols.len(), k], a, b, false, to);
        c
    };
    let whole = run(0..m, 0..n);
    for (rows, cols) in [(0..1, 0..n), (0..m, 5..6), (7..9, 3..40), (60..61, 66..67), (20..61, 1..18)] {
        let part = run(rows.clone(), cols.clone());
        for (i, j) in rows.clone().flat_map(|i| cols.clone().map(move |j| (i, j))) {
            let at = (i - rows.start) * cols.len() + j - cols.start;
            assert_eq!(part[at].to_bits(), whole[i * n + j].to_bits(), "{rows:?} {cols:?} {i} {j}");
        }
    }
}

#[test]
fn comparison_detects_another_summation_order() {
    let (k, b) = (300, test_matrix::<f32>(2, 300));
    let differs = |other: &dyn Fn(&[f32]) -> f32| {
        (0..50).any(|seed| {
            let a = test_matrix::<f32>(seed * 31, k);
            let mut expected = [0.0];
            let row = MatrixRef { data: &a[..], row_stride: k, col_stride: 1 };
            let col = MatrixRef { data: &b[..], row_stride: 1, col_stride: 1 };
            definition([1, 1, k], row, col, &mut expected, false);
            expected[0] != other(&a)
        })
    };
    let in_lanes = |a: &[f32], lanes: usize| {
        (0..lanes).map(|l| (l..k).step_by(lanes).fold(0.0, |s: f32, p| a[p].mul_add(b[p], s))).sum::<f32>()
    };
    assert!(differs(&|a| in_lanes(a, 1)), "one block instead of two");
    assert!(differs(&|a| in_lanes(a, 8)), "a sum in vector lanes");
}

#[test]
#[should_panic(expected = "b must be within its memory")]
fn short_memory_is_refused() {
    let (a, b) = ([0f32; 6], [0f32; 5]);
    let a = MatrixRef { data: &a[..], row_stride: 3, col_stride: 1 };
    let b = MatrixRef { data: &b[..], row_stride: 2, col_stride: 1 };
    gemm(
        &mut Scratch::default(),
        [2, 2, 3],
        a,
        b,
        false,
        MatrixMut { data: &mut [0f32; 4][..], row_stride: 2, col_stride: 1 },
    );
}

/// Runs batched products on several pools and compares with one product at a time, for every kernel kind for T.
fn check_batched<T: Float>(dims: [usize; 4], a_strides: [usize; 3], c_strides: [usize; 3]) {
    for isa in isa::<T>() {
        check_batched_with_isa::<T>(isa, dims, a_strides, c_strides);
    }
}

/// `None` (FMA), and the bf16 dot products for T.
fn isa<T: Float>() -> impl Iterator<Item = Option<Bf16Isa>> {
    let short = Bf16Isa::available().iter().copied().filter(|_| matches!(T::DTYPE, DType::BF16 | DType::F32));
    std::iter::once(None).chain(short.map(Some))
}

fn kind(isa: Option<Bf16Isa>) -> KernelKind {
    isa.map_or(KernelKind::Fma(level()), KernelKind::Bf16Dot)
}

fn check_batched_with_isa<T: Float>(
    isa: Option<Bf16Isa>,
    dims: [usize; 4],
    a_strides: [usize; 3],
    c_strides: [usize; 3],
) {
    let [g, m, n, k] = dims;
    let (a, b) = (test_matrix::<T>(1, 2 * g * m * k), test_matrix::<T>(7, g * k * n));
    let b_strides = [k * n, n, 1];
    let len = batched_required_len([g, m, n], c_strides);
    let mut expected = vec![T::from_f64(9.0); len];
    for p in 0..g {
        let mut one = vec![T::Acc::ZERO; m * n];
        let x =
            MatrixRef { data: &a[p * a_strides[0]..], row_stride: a_strides[1], col_stride: a_strides[2] };
        let y = MatrixRef { data: &b[p * k * n..], row_stride: n, col_stride: 1 };
        let to = MatrixMut { data: &mut one[..], row_stride: n, col_stride: 1 };
        gemm_with_kind(kind(isa), &mut Scratch::default(), [m, n, k], x, y, false, to);
        for (at, value) in one.into_iter().enumerate() {
            expected[p * c_strides[0] + at / n * c_strides[1] + at % n * c_strides[2]] = T::narrow(value);
        }
    }
    for threads in [1, 2, 3] {
        let mut c = vec![T::from_f64(9.0); len];
        let (x, y) = (
            BatchedMatrixRef { data: &a[..], strides: a_strides },
            BatchedMatrixRef { data: &b[..], strides: b_strides },
        );
        let to = BatchedMatrixMut { data: &mut c[..], strides: c_strides };
        batched_gemm_with_isa(isa, &Pool::new(threads), dims, x, y, to, None);
        assert!(c == expected, "{} {isa:?} {dims:?} {c_strides:?} on {threads} threads", T::DTYPE);
    }
}

#[test]
fn batched_products_match_single_products() {
    for [g, m, n, k] in [[1, 200, 300, 64], [3, 1, 700, 40], [70, 9, 10, 33], [2, 260, 5, 90], [4, 3, 5, 0]] {
        let (rows, transposed, shared) = ([m * k, k, 1], [m * k, 1, m], [0, k, 1]);
        check_batched::<f32>([g, m, n, k], rows, [m * n, n, 1]);
        check_batched::<f32>([g, m, n, k], transposed, [m * n, 1, m]);
        check_batched::<f64>([g, m, n, k], shared, [n, g * n, 1]);
        check_batched::<bf16>([g, m, n, k], rows, [2 * m * n, 2 * n, 2]);
        check_batched::<bf16>([g, m, n, k], transposed, [m * n, 1, m]);
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    // More columns and a greater depth than a block has; a last panel of each kind that is not full.
    let [m, n, k] = [181, 811, 300];
    for a in [[m * k, k, 1], [m * k, 1, m]] {
        check_batched::<f32>([1, m, n, k], a, [m * n, n, 1]);
        check_batched::<f64>([1, m, n, k], a, [m * n, n, 1]);
        check_batched::<f32>([1, m, n, k], a, [m * n, 1, m]);
    }
}

#[test]
fn gemv_has_the_bits_of_a_row_of_gemm() {
    for [g, n, k] in
        [[1, 1, 7], [2, 31, 300], [1, 1500, 513], [3, 70, 256], [1, 2600, 700], [2, 5, 0], [1, 32, 31]]
    {
        let (a, b) = (test_matrix::<f32>(1, g * 2 * k + 9), test_matrix::<f32>(4, g * k * n));
        let (narrow_a, narrow_b) = (test_matrix::<bf16>(1, g * 2 * k + 9), test_matrix::<bf16>(4, g * k * n));
        for b_strides in [[k * n, n, 1], [k * n, 1, k], [0, n, 1]] {
            for isa in isa::<f32>() {
                gemv(isa, [g, n, k], &a, &b, b_strides);
            }
            for isa in isa::<bf16>() {
                gemv(isa, [g, n, k], &narrow_a, &narrow_b, b_strides);
            }
        }
    }
}

/// Compares the first of two rows with the product of that row alone, on several pools.
fn gemv<T: Float>(isa: Option<Bf16Isa>, [g, n, k]: [usize; 3], a: &[T], b: &[T], b_strides: [usize; 3]) {
    let form = |m: usize, threads: usize| {
        let mut c = vec![T::from_f64(9.0); g * m * n];
        let (x, y) = (
            BatchedMatrixRef { data: a, strides: [2 * k, k, 1] },
            BatchedMatrixRef { data: b, strides: b_strides },
        );
        let to = BatchedMatrixMut { data: &mut c[..], strides: [m * n, n, 1] };
        batched_gemm_with_isa(isa, &Pool::new(threads), [g, m, n, k], x, y, to, None);
        c
    };
    let two = form(2, 1);
    for threads in [1, 2, 3] {
        let one = form(1, threads);
        for p in 0..g {
            assert!(
                one[p * n..][..n] == two[2 * p * n..][..n],
                "{isa:?} {g} {n} {k} {b_strides:?} {threads}"
            );
        }
    }
}

#[test]
fn large_products_are_split_and_small_products_share_tasks() {
    let packed = ReadCost::PACKED;
    let [in_place, few_in_place] = [usize::MAX, 64].map(|in_place| ReadCost { in_place, ..packed });
    let cut = |dims, num_threads, reading| Split::new(dims, num_threads, 1, reading);
    assert_eq!(cut([1, 64, 64, 64], 2, packed), Split { rows: 64, cols: 64, products_per_task: 2 });
    assert_eq!(cut([1, 1024, 1024, 1024], 1, packed), Split { rows: 1024, cols: 1024, products_per_task: 1 });
    assert_eq!(cut([1, 1024, 1024, 1024], 2, packed), Split { rows: 512, cols: 1024, products_per_task: 1 });
    assert_eq!(
        cut([1, 1024, 1024, 1024], 2, in_place),
        Split { rows: 1024, cols: 512, products_per_task: 1 }
    );
    assert_eq!(cut([1, 1024, 1024, 1024], 4, packed), Split { rows: 512, cols: 512, products_per_task: 1 });
    assert_eq!(cut([1, 3072, 768, 512], 2, packed), Split { rows: 1536, cols: 768, products_per_task: 1 });
    let transposed = Split { rows: 128, cols: 64, products_per_task: 1 };
    assert_eq!(
        cut([1, 128, 128, 128], 2, few_in_place),
        transposed,
        "a task of half of the columns reads a in place"
    );
    let fine = Split::new([1, 1024, 256, 1024], 2, 4, few_in_place);
    assert_eq!(
        fine,
        Split { rows: 128, cols: 256, products_per_task: 1 },
        "few columns would read all of a too often"
    );
    let rows = Split { rows: 171, cols: 512, products_per_task: 1 };
    assert_eq!(cut([1, 512, 512, 512], 3, in_place), rows, "192 columns would take longer");
    assert_eq!(cut([1, 20, 4096, 512], 4, packed).rows, 20, "few rows are not cut");
    assert_eq!(cut([1, 1, 50257, 768], 4, in_place).rows, 1);
    assert!(cut([1, 1, 50257, 768], 4, in_place).cols < 20_000);
    assert!(cut([96, 16, 16, 16], 2, packed).products_per_task > 8);
    assert_eq!(cut([3, 512, 512, 512], 2, packed), Split { rows: 512, cols: 512, products_per_task: 1 });
    let fine = Split::new([1, 1024, 1024, 1024], 2, 4, packed);
    assert_eq!(fine, Split { rows: 256, cols: 512, products_per_task: 1 }, "threads of different imbalance");
    for threads in 1..=64 {
        for (m, n, k) in [
            (128, 64, 2048),
            (64, 256, 768),
            (32, 768, 768),
            (256, 64, 4096),
            (100, 100, 10_000),
            (60, 20, 9000),
        ] {
            let tasks = |each| {
                let split = Split::new([1, m, n, k], threads, each, packed);
                m.div_ceil(split.rows) * n.div_ceil(split.cols)
            };
            assert!(tasks(4) >= tasks(1), "{threads} threads, {m} {n}: finer tasks are no fewer");
            assert!(tasks(1) > 1 || threads == 1, "{threads} threads, {m} {n}: what can be cut is");
        }
    }
    for (m, n) in [(1, 1), (27, 63), (29, 1), (1, 65), (57, 200)] {
        let split = cut([1, m, n, 100_000], 3, packed);
        assert!(split.rows.min(m) * split.cols.min(n) > 0, "every task has something to do");
    }
}

#[test]
#[should_panic(expected = "elements of c share no memory")]
fn overlapping_output_is_refused() {
    let one = BatchedMatrixRef { data: &[0f32; 64][..], strides: [16, 4, 1] };
    batched_gemm(
        &Pool::new(2),
        [4, 4, 4, 4],
        one,
        one,
        BatchedMatrixMut { data: &mut [0f32; 64][..], strides: [0, 4, 1] },
    );
}
