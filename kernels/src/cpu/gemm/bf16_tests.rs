//! bf16 dot products: exact to rounding, with bits that do not depend on the surroundings of an element.

use super::*;
use approx::abs_diff_eq;
use half::bf16;
use proptest::prelude::*;

/// Returns multiples of `unit`, at most 7 units in size.
fn test_matrix<T: Float>(seed: usize, len: usize, unit: f64) -> Vec<T> {
    let place = |i: usize| ((i + seed) * 7919 + (i + seed) / 13 * 31) % 15;
    (0..len).map(|i| T::from_f64((place(i) as f64 - 7.0) * unit)).collect()
}

/// Strides of row-major, column-major and non-contiguous matrices, some with gaps of odd length.
fn strides(kind: usize, rows: usize, cols: usize) -> (usize, usize) {
    [(cols, 1), (1, rows), (2 * cols + 3, 2), (1, rows + 5), (cols + 3, 1)][kind]
}

/// Computes c = a b or c = 1 + a b, as rows, from operands in separate memories.
fn form<T: Float<Acc = f32>>(
    isa: Bf16Isa,
    [m, n, k]: [usize; 3],
    kinds: [usize; 3],
    add: bool,
    value: impl Fn(bool, usize, usize) -> T,
) -> Vec<f32> {
    let lay = |is_b: bool, kind: usize, rows: usize, cols: usize| {
        let (row, col) = strides(kind, rows, cols);
        // Gaps between elements must not be read.
        let mut memory = vec![T::from_f64(f64::NAN); rows * row + cols * col + 1];
        for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (i, j))) {
            memory[i * row + j * col] = value(is_b, i, j);
        }
        memory.truncate(required_len([rows, cols], row, col));
        (memory, row, col)
    };
    let ((a, a_row, a_col), (b, b_row, b_col)) = (lay(false, kinds[0], m, k), lay(true, kinds[1], k, n));
    let (c_row, c_col) = strides(kinds[2], m, n);
    let mut memory = vec![7f32; m * c_row + n * c_col + 1];
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        memory[i * c_row + j * c_col] = 1.0;
    }
    let ones = memory.iter().filter(|&&x| x == 1.0).count();
    let a = MatrixRef { data: &a[..], row_stride: a_row, col_stride: a_col };
    let b = MatrixRef { data: &b[..], row_stride: b_row, col_stride: b_col };
    let c = MatrixMut { data: &mut memory[..], row_stride: c_row, col_stride: c_col };
    gemm_with_kind(KernelKind::Bf16Dot(isa), &mut Scratch::default(), [m, n, k], a, b, add, c);
    assert_eq!(ones, m * n, "no two elements of c share memory");
    let touched: Vec<f32> = (0..m * n).map(|at| memory[at / n * c_row + at % n * c_col]).collect();
    (0..m * n).for_each(|at| memory[at / n * c_row + at % n * c_col] = 7.0);
    assert!(memory.iter().all(|&x| x == 7.0), "only c is written");
    touched
}

/// Small whole numbers, whose sums are exact in every order.
fn exact(dims: [usize; 3], kinds: [usize; 3], add: bool) -> Result<(), String> {
    exact_of::<bf16>(dims, kinds, add)?;
    exact_of::<f32>(dims, kinds, add)
}

fn exact_of<T: Float<Acc = f32>>(dims: [usize; 3], kinds: [usize; 3], add: bool) -> Result<(), String> {
    let [m, n, k] = dims;
    let (a, b) = (test_matrix::<T>(1, m * k, 1.0), test_matrix::<T>(5, k * n, 1.0));
    let value = |is_b, i, j| if is_b { b[i * n + j] } else { a[i * k + j] };
    let rows: Vec<f64> = a.iter().map(|x| x.to_f64()).collect();
    let cols: Vec<f64> = (0..n * k).map(|at| b[at % k * n + at / k].to_f64()).collect();
    let want = |at: usize| {
        let (i, j) = (at / n, at % n);
        let terms = rows[i * k..][..k].iter().zip(&cols[j * k..][..k]).map(|(x, y)| x * y);
        terms.sum::<f64>() + f64::from(u8::from(add))
    };
    let want: Vec<f64> = (0..m * n).map(want).collect();
    for &isa in Bf16Isa::available() {
        let got = form(isa, dims, kinds, add, value);
        for (at, (got, want)) in got.into_iter().zip(&want).enumerate() {
            if f64::from(got) != *want {
                return Err(format!("{isa:?} {dims:?} {kinds:?} {add}, element {at}: {got}, not {want}"));
            }
        }
    }
    Ok(())
}

#[test]
fn whole_numbers_are_exact_at_all_edges() {
    let edges = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65];
    for (at, m) in edges.into_iter().enumerate() {
        for (place, n) in edges.into_iter().enumerate() {
            let k = [1, 2, 3, 31, 32, 33, 64, 95, 0][(at + 3 * place) % 9];
            exact([m, n, k], [at % 5, place % 5, (at + place) % 5], (at + place) % 2 == 0).unwrap();
        }
    }
    for kinds in (0..125).map(|kind| [kind % 5, kind / 5 % 5, kind / 25]) {
        exact([33, 34, 37], kinds, false).unwrap();
        exact([1, 40, 70], kinds, true).unwrap();
        exact([40, 1, 70], kinds, true).unwrap();
    }
}

#[test]
fn whole_numbers_are_exact_over_blocks_and_panels() {
    for kind in 0..2 {
        // More than one block of the depth, of rows that are packed, and of columns that are.
        exact([33, 17, 2 * BF16_KC + 5], [kind, 1 - kind, 0], false).unwrap();
        exact([300, 33, BF16_KC], [kind, kind, 0], true).unwrap();
        exact([3, 300, BF16_KC + 32], [0, kind, kind], true).unwrap();
        exact([70, 2100, 1000], [kind, kind, 0], false).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn whole_numbers_are_exact(
        dims in [1usize..100, 1usize..100, 0usize..100],
        kinds in [0usize..5, 0usize..5, 0usize..5],
        add: bool,
    ) {
        exact(dims, kinds, add).unwrap();
    }
}

#[test]
fn sums_are_within_the_stated_error() {
    near::<bf16>(0.0);
    near::<f32>(2f64.powi(-7));
}

/// Compares with sums in f64; each product may be off by `part` of its size.
fn near<T: Float<Acc = f32>>(part: f64) {
    for [m, n, k] in [[3, 40, 33], [20, 5, 500], [2, 3, 5000]] {
        let (a, b) = (test_matrix::<T>(1, m * k, 0.37), test_matrix::<T>(5, k * n, 1.3));
        let value = |is_b, i, j| if is_b { b[i * n + j] } else { a[i * k + j] };
        for &isa in Bf16Isa::available() {
            let got = form(isa, [m, n, k], [0, 0, 0], false, value);
            for (at, got) in got.into_iter().enumerate() {
                let term = |p: usize| a[at / n * k + p].to_f64() * b[p * n + at % n].to_f64();
                let (want, size): (f64, f64) = ((0..k).map(term).sum(), (0..k).map(|p| term(p).abs()).sum());
                // Each of the roundings is at most half a unit of a sum that is no larger than `size`.
                let roundings = (k.min(BF16_KC) + k / BF16_KC + 1) as f64;
                let epsilon = (roundings * 2f64.powi(-24) + part) * size;
                assert!(
                    abs_diff_eq!(f64::from(got), want, epsilon = epsilon),
                    "{isa:?} {} {m} {n} {k} element {at}: {got}, not {want}",
                    T::DTYPE
                );
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_position_of_an_element() {
    same_bits::<bf16>();
    same_bits::<f32>();
}

fn same_bits<T: Float<Acc = f32>>() {
    let (m, n, k) = (70, 67, BF16_KC + 77);
    let (a, b) = (test_matrix::<T>(1, m * k, 0.37), test_matrix::<T>(2, k * n, 1.3));
    for &isa in Bf16Isa::available() {
        let run = |rows: std::ops::Range<usize>, cols: std::ops::Range<usize>, kinds| {
            let value = |is_b, i: usize, j: usize| match is_b {
                true => b[i * n + cols.start + j],
                false => a[(rows.start + i) * k + j],
            };
            form(isa, [rows.len(), cols.len(), k], kinds, false, value)
        };
        let whole = run(0..m, 0..n, [0, 0, 0]);
        for (rows, cols) in [(0..1, 0..n), (0..m, 5..6), (7..9, 3..40), (69..70, 66..67), (20..61, 1..18)] {
            for kinds in [[0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0], [2, 2, 2]] {
                let part = run(rows.clone(), cols.clone(), kinds);
                for (i, j) in rows.clone().flat_map(|i| cols.clone().map(move |j| (i, j))) {
                    let at = (i - rows.start) * cols.len() + j - cols.start;
                    let same = part[at].to_bits() == whole[i * n + j].to_bits();
                    assert!(same, "{isa:?} {rows:?} {cols:?} {kinds:?} {i} {j}");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row_and_column() {
    let (m, n, k) = (18, 35, 40);
    let value = |is_b: bool, i: usize, j: usize| match (is_b, i, j) {
        (false, 3, 7) => f32::NAN,
        (true, 9, 33) => f32::INFINITY,
        _ => 0.5,
    };
    for &isa in Bf16Isa::available() {
        let of_bf16 = form(isa, [m, n, k], [0, 0, 0], false, |b, i, j| bf16::from_f32(value(b, i, j)));
        let of_f32 = form(isa, [m, n, k], [0, 0, 0], false, value);
        for (at, got) in of_bf16.into_iter().enumerate().chain(of_f32.into_iter().enumerate()) {
            let expected = match (at / n, at % n) {
                (3, _) => got.is_nan(),
                (_, 33) => got == f32::INFINITY,
                _ => got == 10.0,
            };
            assert!(expected, "{isa:?} {at}: {got}");
        }
    }
}

#[test]
fn f32_extremes_round_to_infinity_and_zero() {
    for &isa in Bf16Isa::available() {
        let largest = form(isa, [1, 1, 1], [0, 0, 0], false, |is_b, _, _| if is_b { 0.5 } else { f32::MAX });
        assert_eq!(largest, [f32::INFINITY]);
        let smallest = |is_b: bool, _, _| if is_b { 4.0 } else { f32::MIN_POSITIVE / 2.0 };
        assert_eq!(form(isa, [1, 1, 1], [0, 0, 0], false, smallest), [0.0]);
    }
}

#[test]
fn f32_operands_are_rounded_once_to_nearest() {
    // 1 + 3 * 2^-8 is a tie between two bf16 numbers; its square shows which was chosen: 1 + 2^-6, whose last bit is even.
    let x = 1.0 + 3.0 * 2f32.powi(-8);
    for &isa in Bf16Isa::available() {
        assert_eq!(form(isa, [1, 1, 1], [0, 0, 0], false, |_, _, _| x), [1.015_625f32 * 1.015_625]);
    }
}
