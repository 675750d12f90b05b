//! Tests of random numbers: known values, shards against the whole tensor, and moments of the distributions.

use super::*;
use crate::dtype::DType;
use crate::op::finite_difference::{Value, evaluate, evaluate_as};
use crate::op::kernel_check::{Case, values};
use approx::abs_diff_eq;

/// The scalars of a shard, given per dim as (global extent, start).
fn shard(first: &[Scalar], dims: &[(usize, usize)]) -> Vec<Scalar> {
    let pairs = dims.iter().flat_map(|&(extent, start)| [extent, start]);
    first.iter().copied().chain(pairs.map(|n| Scalar::Int(n as i64))).collect()
}

fn drawn(a: f64, b: f64) -> [Scalar; 4] {
    [Scalar::Int(-7), Scalar::Int(1 << 40), Scalar::Real(a), Scalar::Real(b)]
}

fn dropped(p: f64) -> [Scalar; 3] {
    [Scalar::Real(p), Scalar::Int(3), Scalar::Int(5)]
}

#[test]
fn positions_match_known_values() {
    // Rows 1..3 and columns 2..5 of a tensor of 4 x 10.
    let place = Place::new(&[2, 3], &shard(&[], &[(4, 1), (10, 2)]));
    assert_eq!((0..6).map(|i| place.global(i)).collect::<Vec<_>>(), [12, 13, 14, 22, 23, 24]);
    assert_eq!(place.run, 3);
    assert_eq!(Place::new(&[2, 10], &shard(&[], &[(4, 1), (10, 0)])).run, 20);
    assert_eq!(Place::new(&[2, 3, 10], &shard(&[], &[(4, 1), (5, 1), (10, 0)])).run, 30);
    assert_eq!(Place::new(&[], &[]).global(0), 0);
}

#[test]
fn elements_match_known_values() {
    let y = evaluate(&UNIFORM, &[], &[&[2]], &shard(&drawn(10.0, 30.0), &[(100, 6)])).remove(0);
    let expected = [6, 7].map(|i| 10.0 + 20.0 * uniform_at(-7i64 as u64, 1 << 40, i));
    assert_eq!(y, expected);
    let x = Value::real(&[4], &[1.0, 2.0, 3.0, f64::NAN]);
    let u: Vec<f64> = (0..4).map(|i| uniform_at(3, 5, i)).collect();
    let p = u[1].max(u[3]);
    let y = evaluate(&DROPOUT, &[x], &[&[4]], &shard(&dropped(p), &[(4, 0)])).remove(0);
    for i in 0..3 {
        assert_eq!(y[i], if u[i] >= p { (i + 1) as f64 / (1.0 - p) } else { 0.0 });
    }
}

#[test]
fn fast_path_matches_the_reference() {
    for (shape, dims) in [
        (vec![], vec![]),
        (vec![1], vec![(9, 3)]),
        (vec![300], vec![(301, 1)]),
        (vec![3, 70], vec![(4, 1), (75, 3)]),
        (vec![0, 4], vec![(9, 2), (4, 0)]),
        (vec![5, 0], vec![(9, 2), (4, 4)]),
        (vec![2, 3, 5000], vec![(2, 0), (7, 2), (5000, 0)]),
    ] {
        let numel = shape.iter().product();
        Case::new(&UNIFORM).output(&shape).scalars(&shard(&drawn(-1.5, 2.0), &dims)).run();
        Case::new(&NORMAL).output(&shape).scalars(&shard(&drawn(0.25, 3.0), &dims)).run();
        for p in [0.0, 0.3, 1.0] {
            let case = Case::new(&DROPOUT).input(&shape, &values(1, numel));
            case.output(&shape).scalars(&shard(&dropped(p), &dims)).run();
        }
    }
}

#[test]
fn shard_has_the_bits_of_the_slice_of_the_whole() {
    let (rows, columns) = (6, 150);
    let x = values(1, rows * columns);
    for dtype in [DType::F32, DType::BF16] {
        for (kernel, first) in
            [(&UNIFORM, &drawn(0.0, 1.0)[..]), (&NORMAL, &drawn(0.0, 1.0)), (&DROPOUT, &dropped(0.4))]
        {
            let draw = |row: std::ops::Range<usize>, column: std::ops::Range<usize>| {
                let shape = [row.len(), column.len()];
                let places = row.clone().flat_map(|r| column.clone().map(move |c| r * columns + c));
                let data: Vec<f64> = places.map(|place| x[place]).collect();
                let inputs = [Value { dtype, shape: shape.to_vec(), data }];
                let inputs = if kernel.name == DROPOUT.name { &inputs[..] } else { &[] };
                let scalars = shard(first, &[(rows, row.start), (columns, column.start)]);
                evaluate_as(kernel.cpu.unwrap(), dtype, inputs, &[&shape], &scalars).remove(0)
            };
            let whole = draw(0..rows, 0..columns);
            for (row, column) in
                [(0..3, 0..columns), (3..6, 0..columns), (0..rows, 7..80), (2..5, 81..150), (1..2, 3..4)]
            {
                let part = draw(row.clone(), column.clone());
                let mut slice = row.flat_map(|r| whole[r * columns..][column.clone()].to_vec());
                assert!(
                    part.iter().all(|x| slice.next().unwrap().to_bits() == x.to_bits()),
                    "{}",
                    kernel.name
                );
            }
        }
    }
}

#[test]
fn moments_are_those_of_the_distribution() {
    let n = 1_000_000;
    let draw = |kernel: &Kernel| {
        let y =
            evaluate_as(kernel.cpu.unwrap(), DType::F32, &[], &[&[n]], &shard(&drawn(0.0, 1.0), &[(n, 0)]))
                .remove(0);
        [1, 2, 3, 4].map(|power| y.iter().map(|y| y.powi(power)).sum::<f64>() / n as f64)
    };
    for (found, exact) in
        [(draw(&UNIFORM), [0.5, 1.0 / 3.0, 0.25, 0.2]), (draw(&NORMAL), [0.0, 1.0, 0.0, 3.0])]
    {
        for (f, e) in found.iter().zip(exact) {
            assert!(abs_diff_eq!(*f, e, epsilon = 0.01 * (1.0 + e)), "{found:?}");
        }
    }
}

#[test]
fn all_dtypes_agree_to_rounding() {
    let scalars = shard(&drawn(0.0, 1.0), &[(999, 0)]);
    let [wide, narrow] = [DType::F64, DType::BF16]
        .map(|dtype| evaluate_as(NORMAL.cpu.unwrap(), dtype, &[], &[&[999]], &scalars).remove(0));
    assert!(wide.iter().zip(narrow).all(|(&w, n)| half::bf16::from_f64(w).to_f64() == n));
}
