//! Tests of attention with packed documents, and of outputs in the accumulator.

use super::*;
use crate::dtype::DType;
use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
use crate::op::kernel_check::{Case, Kind, values};
use approx::{abs_diff_eq, assert_abs_diff_eq};

const IDS: Kind = Kind::Fixed(DType::I64);

fn scalars(causal: bool, window: i64) -> [Scalar; 4] {
    [Scalar::Real(0.4), Scalar::Int(i64::from(causal)), Scalar::Int(0), Scalar::Int(window)]
}

/// Segment ids and positions of `b` rows of documents of these lengths; row i begins with document i.
fn packed(b: usize, lengths: &[usize]) -> [Vec<f64>; 2] {
    let of_row = |row: usize| {
        let rotated = (0..lengths.len()).map(move |i| (row + i) % lengths.len());
        rotated.flat_map(|d| (0..lengths[d]).map(move |i| [d as f64, i as f64])).collect::<Vec<_>>()
    };
    let all: Vec<[f64; 2]> = (0..b).flat_map(of_row).collect();
    [0, 1].map(|i| all.iter().map(|ids| ids[i]).collect())
}

/// q, k and v for b, t, g, r, c, and the documents of the tokens.
fn inputs([b, t, g, r, c]: [usize; 5], [segments, positions]: &[Vec<f64>; 2]) -> Vec<Value> {
    let (of_queries, of_keys) = ([b, t, g, r, c], [b, t, g, c]);
    let real = |seed, shape: &[usize]| Value::real(shape, &values(seed, shape.iter().product()));
    let ids = || [segments, positions].map(|ids| Value::index(&[b, t], ids));
    let tensors = vec![real(1, &of_queries), real(2, &of_keys), real(3, &of_keys)];
    tensors.into_iter().chain(ids()).chain(ids()).collect()
}

fn attend(inputs: &[Value], scalars: &[Scalar]) -> Vec<Vec<f64>> {
    evaluate(&FORWARD, inputs, &[&inputs[0].shape, &inputs[0].shape[..4]], scalars)
}

/// The values of some tokens of one row of (b, t, ..).
fn tokens(value: &Value, data: &[f64], row: usize, range: std::ops::Range<usize>) -> Value {
    let (t, each) = (value.shape[1], value.shape[2..].iter().product::<usize>());
    let data = &data[(row * t + range.start) * each..(row * t + range.end) * each];
    let shape = [&[1, range.len()][..], &value.shape[2..]].concat();
    Value { dtype: value.dtype, shape, data: data.to_vec() }
}

#[test]
fn packed_documents_equal_one_document_a_row() {
    let (lengths, shape) = ([3, 1, 5], [2, 9, 2, 2, 3]);
    let documents = packed(2, &lengths);
    for (causal, window) in [(false, 0), (true, 0), (true, 2)] {
        let scalars = scalars(causal, window);
        let all = inputs(shape, &documents);
        let found = attend(&all, &scalars);
        for row in 0..2 {
            let mut start = 0;
            for document in (0..3).map(|i| lengths[(row + i) % 3]) {
                let range = start..start + document;
                let part = [0, 1, 2].map(|i| tokens(&all[i], &all[i].data, row, range.clone()));
                let alone = attend(&part, &scalars);
                let lse = Value::real(&all[0].shape[..4], &found[1]);
                let together = [
                    tokens(&all[0], &found[0], row, range.clone()).data,
                    tokens(&lse, &lse.data, row, range.clone()).data,
                ];
                assert_eq!(&together[..], &alone[..], "{causal}, {window}, {range:?} of row {row}");
                start += document;
            }
        }
    }
}

/// Checks forward and backward, with outputs in the dtype of the operands and in the accumulator.
fn check(shape: [usize; 5], documents: &[Vec<f64>; 2], scalars: &[Scalar], dtypes: &[DType]) {
    let [b, t, g, r, c] = shape;
    let (of_queries, of_keys, of_ids) = ([b, t, g, r, c], [b, t, g, c], [b, t]);
    let all = inputs(shape, documents);
    let tensors = |case: Case<'static>| {
        case.input(&of_queries, &all[0].data).input(&of_keys, &all[1].data).input(&of_keys, &all[2].data)
    };
    let ids = |case: Case<'static>| {
        all[3..].iter().fold(case.scalars(scalars), |case, ids| case.input_as(IDS, &of_ids, &ids.data))
    };
    let saved = attend(&all, scalars);
    let d_out = values(4, saved[0].len());
    for kind in [Kind::Tested, Kind::Accumulator] {
        let units = |dtype| match (kind, dtype) {
            (Kind::Accumulator, DType::BF16) => ALLOWANCE * 65_536.0,
            (Kind::Accumulator, DType::F16) => ALLOWANCE * 8192.0,
            _ => ALLOWANCE,
        };
        for &dtype in dtypes {
            let case = ids(tensors(Case::new(&FORWARD))).output_as(kind, &of_queries);
            case.output_as(Kind::Accumulator, &of_queries[..4]).allow(units(dtype)).run_for(&[dtype]);
            let case = tensors(Case::new(&BACKWARD)).input(&of_queries, &saved[0]);
            let case =
                case.input_as(Kind::Accumulator, &of_queries[..4], &saved[1]).input(&of_queries, &d_out);
            let case = [&of_queries[..], &of_keys, &of_keys]
                .iter()
                .fold(ids(case), |case, shape| case.output_as(kind, shape));
            case.scale(4.0).allow(units(dtype)).run_for(&[dtype]);
        }
    }
}

#[test]
fn fast_paths_match_the_reference() {
    let narrow = [DType::F32, DType::BF16];
    check([2, 9, 2, 3, 4], &packed(2, &[3, 1, 5]), &scalars(true, 0), &DType::FLOATS);
    check([2, 9, 2, 1, 4], &packed(2, &[3, 1, 5]), &scalars(false, 0), &DType::FLOATS);
    // Documents that begin inside of tiles, tiles of other documents, whole and partial strips of queries.
    check([2, 150, 1, 2, 16], &packed(2, &[70, 9, 71]), &scalars(true, 0), &narrow);
    check([1, 300, 1, 1, 8], &packed(1, &[10, 250, 40]), &scalars(true, 30), &[DType::F64, DType::F16]);
    check([1, 140, 1, 2, 64], &packed(1, &[60, 80]), &scalars(false, 0), &[DType::BF16]);
    check([1, 70, 1, 1, 128], &packed(1, &[30, 40]), &scalars(true, 0), &[DType::BF16]);
    for empty in 0..5 {
        let mut shape = [2, 4, 2, 2, 4];
        shape[empty] = 0;
        let lengths: &[usize] = if shape[1] == 0 { &[] } else { &[1, 3] };
        check(shape, &packed(shape[0], lengths), &scalars(true, 0), &[DType::F32]);
    }
}

#[test]
fn positions_and_not_the_order_of_tokens_decide() {
    // One document whose tokens are in another order: each query sees what it sees in order.
    let order = [3, 0, 2, 4, 1];
    let (segments, positions) = (vec![0.0; 5], order.map(f64::from).to_vec());
    for window in [0, 2] {
        let all = inputs([1, 5, 1, 1, 2], &[segments.clone(), positions.clone()]);
        let found = attend(&all, &scalars(true, window));
        let mut sorted: Vec<usize> = (0..5).collect();
        sorted.sort_by_key(|&at| order[at]);
        let in_order = [0, 1, 2].map(|i| {
            let data = sorted.iter().flat_map(|&at| &all[i].data[at * 2..][..2]).copied().collect();
            Value { data, ..all[i].clone() }
        });
        let expected = attend(&in_order, &scalars(true, window));
        for (rank, &at) in sorted.iter().enumerate() {
            let [found, expected] = [&found[0][at * 2..][..2], &expected[0][rank * 2..][..2]];
            assert!(abs_diff_eq!(found, expected, epsilon = 1e-14), "token {at}");
        }
        check(
            [1, 5, 1, 1, 2],
            &[segments.clone(), positions.clone()],
            &scalars(true, window),
            &DType::FLOATS,
        );
    }
}

#[test]
fn backward_matches_finite_differences() {
    for (causal, window) in [(false, 0), (true, 0), (true, 2)] {
        let scalars = scalars(causal, window);
        let all = inputs([2, 4, 2, 2, 3], &packed(2, &[1, 3]));
        let saved = attend(&all, &scalars);
        let d_out = Value::real(&all[0].shape, &values(4, all[0].data.len()));
        let more = [
            Value::real(&all[0].shape, &saved[0]),
            Value::real(&all[0].shape[..4], &saved[1]),
            d_out.clone(),
        ];
        let (tensors, ids) = all.split_at(3);
        let given = [tensors, &more, ids].concat();
        let shapes = [0, 1, 2].map(|i| &all[i].shape[..]);
        let gradients: Vec<_> =
            evaluate(&BACKWARD, &given, &shapes, &scalars).into_iter().enumerate().collect();
        let loss = |x: &[Value]| dot(&attend(&[x, ids].concat(), &scalars)[0], &d_out.data);
        check_gradients(tensors, &gradients, loss).unwrap();
    }
}

/// Sums of cotangents over parts of the keys, with o and lse of all keys, are those of all keys.
#[test]
fn cotangents_of_parts_of_the_keys_add_up() {
    let shape = [1, 6, 1, 2, 3];
    let all = inputs(shape, &packed(1, &[6]));
    let plain = [Scalar::Real(0.4), Scalar::Int(1), Scalar::Int(0), Scalar::Int(0)];
    let saved = attend(&all[..3], &plain);
    let d_out = Value::real(&all[0].shape, &values(4, saved[0].len()));
    let backward = |keys: std::ops::Range<usize>| {
        let [k, v] = [1, 2].map(|i| tokens(&all[i], &all[i].data, 0, keys.clone()));
        let mut scalars = plain;
        scalars[2] = Scalar::Int(-(keys.start as i64));
        let shapes = [all[0].shape.clone(), k.shape.clone(), v.shape.clone()];
        let (o, lse) = (Value::real(&all[0].shape, &saved[0]), Value::real(&all[0].shape[..4], &saved[1]));
        let given = [all[0].clone(), k, v, o, lse, d_out.clone()];
        evaluate(&BACKWARD, &given, &[&shapes[0], &shapes[1], &shapes[2]], &scalars)
    };
    let (whole, first, last) = (backward(0..6), backward(0..2), backward(2..6));
    let joined = [1, 2].map(|i| [&first[i][..], &last[i]].concat());
    assert_eq!(whole[1..], joined);
    let sums: Vec<f64> = first[0].iter().zip(&last[0]).map(|(a, b)| a + b).collect();
    assert_abs_diff_eq!(whole[0][..], sums[..], epsilon = 1e-14);
}
