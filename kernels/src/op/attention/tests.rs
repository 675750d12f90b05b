//! Tests of attention: known values, the reference, gradients, masks and special values.

use super::*;
use crate::dtype::DType;
use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
use crate::op::kernel_check::{Case, Kind, places, values};
use crate::strides::Strides;
use approx::assert_relative_eq;

fn scalars(scale: f64, causal: bool, t_start: i64) -> [Scalar; 4] {
    [Scalar::Real(scale), Scalar::Int(i64::from(causal)), Scalar::Int(t_start), Scalar::Int(0)]
}

fn windowed(scale: f64, t_start: i64, window: i64) -> [Scalar; 4] {
    [Scalar::Real(scale), Scalar::Int(1), Scalar::Int(t_start), Scalar::Int(window)]
}

/// q, k and v for b, t, s, g, r, c.
fn inputs([b, t, s, g, r, c]: [usize; 6]) -> [Value; 3] {
    let (of_queries, of_keys) = ([b, t, g, r, c], [b, s, g, c]);
    let numel = |shape: &[usize]| shape.iter().product();
    [
        Value::real(&of_queries, &values(1, numel(&of_queries))),
        Value::real(&of_keys, &values(2, numel(&of_keys))),
        Value::real(&of_keys, &values(3, numel(&of_keys))),
    ]
}

fn attend(inputs: &[Value], scalars: &[Scalar]) -> Vec<Vec<f64>> {
    evaluate(&FORWARD, inputs, &[&inputs[0].shape, &inputs[0].shape[..4]], scalars)
}

#[test]
fn matches_known_values() {
    // One channel; scores ln 1, ln 3 and (second query, second head of the pair) twice that: ln 1, ln 9.
    let q = Value::real(&[1, 2, 1, 2, 1], &[0.0, 1.0, 1.0, 2.0]);
    let k = Value::real(&[1, 2, 1, 1], &[0.0, 3f64.ln()]);
    let v = Value::real(&[1, 2, 1, 1], &[10.0, 20.0]);
    let inputs = [q, k, v];
    let causal = attend(&inputs, &scalars(1.0, true, 0));
    let near = |found: &[f64], expected: [f64; 4]| {
        assert_relative_eq!(found, &expected[..], epsilon = 1e-14, max_relative = 0.0)
    };
    near(&causal[0], [10.0, 10.0, 17.5, 19.0]);
    near(&causal[1], [0.0, 0.0, 4f64.ln(), 10f64.ln()]);
    let all = attend(&inputs, &scalars(2.0, false, 0));
    near(&all[0], [15.0, 19.0, 19.0, 10.0 + 10.0 * 81.0 / 82.0]);
    let masked = attend(&inputs, &scalars(1.0, true, -1));
    near(&masked[0], [0.0, 0.0, 10.0, 10.0]);
    near(&masked[1], [f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0, 0.0]);
    let own = attend(&inputs, &windowed(1.0, 0, 1));
    near(&own[0], [10.0, 10.0, 20.0, 20.0]);
    near(&own[1], [0.0, 0.0, 3f64.ln(), 9f64.ln()]);
    assert_eq!(attend(&inputs, &windowed(1.0, 0, 2)), causal);
    let past = attend(&inputs, &windowed(1.0, 1, 1));
    near(&past[0], [20.0, 20.0, 0.0, 0.0]);
}

fn check_fast_path(shape: [usize; 6], scalars: &[Scalar], dtypes: &[DType]) {
    let [b, t, s, g, r, c] = shape;
    let (of_queries, of_keys) = ([b, t, g, r, c], [b, s, g, c]);
    let inputs = inputs(shape);
    let [q, k, v] = inputs.each_ref().map(|value| &value.data[..]);
    let case =
        Case::new(&FORWARD).input(&of_queries, q).input(&of_keys, k).input(&of_keys, v).scalars(scalars);
    let case = case.output(&of_queries).output_as(Kind::Accumulator, &of_queries[..4]).strided();
    case.allow(ALLOWANCE).run_for(dtypes);
    let saved = attend(&inputs, scalars);
    let d_out = values(4, q.len());
    let case =
        Case::new(&BACKWARD).input(&of_queries, q).input(&of_keys, k).input(&of_keys, v).scalars(scalars);
    case.input(&of_queries, &saved[0])
        .input_as(Kind::Accumulator, &of_queries[..4], &saved[1])
        .input(&of_queries, &d_out)
        .output(&of_queries)
        .output(&of_keys)
        .output(&of_keys)
        .strided()
        .scale(4.0)
        .allow(ALLOWANCE)
        .run_for(dtypes);
}

/// Checks the joined backward, where q, k and v are parts of one tensor: the bits of separate cotangents, and the bound of GPU code.
fn check_joined_backward([b, t, g, c]: [usize; 4], scalars: &[Scalar], dtypes: &[DType]) {
    let (all, of_queries, of_keys) = ([b, t, 3, g, c], [b, t, g, 1, c], [b, t, g, c]);
    let qkv = values(5, all.iter().product());
    let part = |i: usize| Strides::contiguous(&all).select(2, i);
    let taken = |i: usize| places(&part(i)).into_iter().map(|at| qkv[at]).collect::<Vec<f64>>();
    let [q, k, v] = [taken(0), taken(1), taken(2)];
    let apart = [Value::real(&of_queries, &q), Value::real(&of_keys, &k), Value::real(&of_keys, &v)];
    let saved = attend(&apart, scalars);
    let with = |kernel: &'static Kernel| {
        let case = Case::new(kernel).input_view(Kind::Tested, part(0).unsqueeze(3), &qkv);
        let case = case.input_view(Kind::Tested, part(1), &qkv).input_view(Kind::Tested, part(2), &qkv);
        let case = case.input(&of_queries, &saved[0]);
        let case = case.input_as(Kind::Accumulator, &of_queries[..4], &saved[1]);
        case.input(&of_queries, &values(4, q.len())).scalars(scalars).scale(4.0).allow(ALLOWANCE)
    };
    let joined = with(&BACKWARD_JOINED).output(&all);
    joined.run_for(dtypes);
    let apart = with(&BACKWARD).output(&of_queries).output(&of_keys).output(&of_keys);
    for dtype in dtypes {
        let (joined, apart) = (joined.fast(*dtype).remove(0), apart.fast(*dtype));
        for (i, of_part) in apart.iter().enumerate() {
            let found: Vec<f64> = places(&part(i)).into_iter().map(|at| joined[at]).collect();
            assert_eq!(&found, of_part, "part {i} of {all:?} in {dtype}");
        }
    }
}

#[test]
fn joined_backward_matches_separate_cotangents() {
    check_joined_backward([1, 1, 1, 1], &scalars(1.0, true, 0), &DType::FLOATS);
    check_joined_backward([2, 5, 3, 4], &scalars(0.5, true, 0), &DType::FLOATS);
    check_joined_backward([2, 70, 2, 8], &scalars(0.3, false, 0), &[DType::F32, DType::BF16]);
    check_joined_backward([1, 130, 2, 16], &windowed(0.25, 0, 40), &[DType::F64, DType::F16]);
    check_joined_backward([1, 45, 3, 64], &scalars(0.125, true, 0), &[DType::BF16]);
    check_joined_backward([1, 9, 2, 136], &scalars(0.1, true, 0), &[DType::F32, DType::BF16]);
    for empty in [[0, 3, 2, 4], [2, 0, 2, 4], [2, 3, 0, 4], [2, 3, 2, 0]] {
        check_joined_backward(empty, &scalars(0.5, true, 0), &[DType::F32]);
    }
}

#[test]
fn fast_path_matches_the_reference() {
    check_fast_path([1, 1, 1, 1, 1, 1], &scalars(1.0, false, 0), &DType::FLOATS);
    check_fast_path([2, 5, 7, 2, 3, 4], &scalars(0.5, true, 1), &DType::FLOATS);
    check_fast_path([1, 70, 70, 2, 1, 16], &scalars(0.25, true, 0), &DType::FLOATS);
    // Whole and partial strips of queries, heads with more channels than are read in place, keys before and after the queries.
    check_fast_path([1, 100, 130, 1, 2, 72], &scalars(0.1, true, 30), &[DType::F32, DType::F16]);
    check_fast_path([1, 64, 90, 1, 1, 40], &scalars(0.1, true, -20), &[DType::F32, DType::F64]);
    check_fast_path([1, 130, 150, 1, 2, 8], &scalars(0.3, false, 0), &[DType::F32, DType::BF16]);
    check_fast_path([1, 67, 140, 1, 1, 9], &scalars(0.3, true, 73), &[DType::F32, DType::F64]);
    check_fast_path([1, 1, 300, 2, 2, 20], &scalars(0.2, true, 299), &[DType::F32, DType::BF16]);
}

#[test]
fn heads_of_real_models_match_the_reference() {
    check_fast_path([1, 70, 150, 1, 2, 64], &scalars(0.125, true, 80), &[DType::BF16]);
    check_fast_path([1, 130, 70, 1, 1, 128], &scalars(0.09, false, 0), &[DType::BF16]);
    check_fast_path([1, 150, 150, 1, 1, 128], &windowed(0.09, 0, 90), &[DType::F16]);
    check_fast_path([1, 33, 140, 1, 3, 80], &scalars(0.1, true, 107), &[DType::F16]);
    // Numbers of query heads with programs of their own, in rows with vector loads.
    check_fast_path([1, 45, 100, 1, 4, 64], &scalars(0.125, true, 55), &[DType::BF16]);
    check_fast_path([1, 20, 70, 2, 8, 128], &scalars(0.09, true, 50), &[DType::BF16]);
    // Cases outside the tiled kernels: long heads, and negative scales, which reverse the maxima.
    check_fast_path([1, 9, 20, 1, 2, 136], &scalars(0.1, true, 11), &[DType::F32, DType::BF16]);
    check_fast_path([1, 9, 20, 1, 2, 24], &scalars(-0.2, true, 11), &[DType::BF16, DType::F16]);
}

#[test]
fn fast_path_matches_the_reference_with_sliding_windows() {
    // Windows shorter and longer than a tile of keys, across borders of tiles, and with whole tiles before them.
    for window in [1, 2, 3, 63, 64, 65, 130, 1000] {
        check_fast_path([1, 150, 150, 1, 2, 8], &windowed(0.3, 0, window), &[DType::F32]);
    }
    check_fast_path([2, 5, 7, 2, 3, 4], &windowed(0.5, 1, 3), &DType::FLOATS);
    check_fast_path([1, 300, 300, 2, 1, 16], &windowed(0.25, 0, 70), &[DType::F32, DType::BF16]);
    check_fast_path([1, 67, 340, 1, 1, 9], &windowed(0.3, 273, 100), &[DType::F32, DType::F64]);
    check_fast_path([1, 1, 300, 2, 2, 20], &windowed(0.2, 299, 20), &[DType::F32, DType::BF16]);
    // Queries before the first key, and so far after the last that the window excludes all keys.
    check_fast_path([1, 9, 6, 1, 2, 3], &windowed(1.0, -4, 2), &DType::FLOATS);
    check_fast_path([1, 200, 40, 1, 1, 3], &windowed(1.0, 0, 10), &DType::FLOATS);
}

#[test]
fn sliding_window_cost_counts_visible_keys() {
    let pairs = |t: usize, s: usize, causal, t_start, window| -> usize {
        let problem = Problem { b: 1, t, g: 1, r: 1, c: 1, s, scale: 1.0, causal, t_start, window };
        (0..t).map(|i| problem.visible(i).len()).sum()
    };
    assert_eq!(pairs(5, 5, false, 0, 2), 25);
    assert_eq!(pairs(5, 5, true, 0, 9), 15);
    assert_eq!(pairs(5, 5, true, 0, 2), 9);
    assert_eq!(pairs(2, 5, true, 3, 2), 4);
    let problem =
        Problem { b: 1, t: 256, g: 1, r: 1, c: 1, s: 256, scale: 1.0, causal: true, t_start: 0, window: 10 };
    let tiles = |first| tile::Pairs::of(problem, first, 128).map(|pairs| pairs.first_key).collect::<Vec<_>>();
    assert_eq!(
        (tiles(0), tiles(128)),
        (vec![0, 64], vec![64, 128, 192]),
        "tiles before the window are not visited"
    );
}

#[test]
fn queries_without_keys_and_empty_extents() {
    check_fast_path([1, 9, 6, 1, 2, 3], &scalars(1.0, true, -4), &DType::FLOATS);
    check_fast_path([1, 3, 6, 1, 1, 3], &scalars(1.0, true, -40), &DType::FLOATS);
    for empty in 0..6 {
        let mut shape = [2, 3, 3, 2, 2, 4];
        shape[empty] = 0;
        check_fast_path(shape, &scalars(0.5, false, 0), &[DType::F32]);
        check_fast_path(shape, &scalars(0.5, true, 0), &[DType::F32]);
    }
}

#[test]
fn special_values() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for bad in [inf, -inf, nan] {
        // Query 0 sees only the special key, query 1 an ordinary key too, query 2 is orthogonal to none.
        let case = Case::new(&FORWARD).input(&[1, 3, 1, 1, 1], &[1.0, 1.0, 2.0]);
        let case = case.input(&[1, 3, 1, 1], &[bad, 1.0, 0.5]).input(&[1, 3, 1, 1], &[1.0, 2.0, 3.0]);
        case.output(&[1, 3, 1, 1, 1])
            .output_as(Kind::Accumulator, &[1, 3, 1, 1])
            .scalars(&scalars(1.0, true, 0))
            .run();
    }
}

#[test]
fn softmax_is_stable_when_the_maximum_grows() {
    // Scores that rise, fall and hardly change along the keys: a row is rescaled when its maximum grows, its neighbours are not.
    for c in [8, 72] {
        let slopes = [1.0, -1.0, 0.03125, 0.0, 0.5];
        let q: Vec<f64> = (0..5 * c).map(|n| if n % c == 0 { slopes[n / c] } else { 0.0 }).collect();
        let k: Vec<f64> =
            (0..200 * c).map(|n| if n % c == 0 { (n / c) as f64 * 0.25 } else { 0.0 }).collect();
        Case::new(&FORWARD)
            .input(&[1, 5, 1, 1, c], &q)
            .input(&[1, 200, 1, c], &k)
            .input(&[1, 200, 1, c], &values(3, 200 * c))
            .output(&[1, 5, 1, 1, c])
            .output_as(Kind::Accumulator, &[1, 5, 1, 1])
            .scalars(&scalars(1.0, false, 0))
            .allow(ALLOWANCE)
            .run();
    }
}

#[test]
fn views_with_neighbouring_channels_need_no_copy() {
    // q, k and v as slices of one product (b, t, 3, g, c), the usual layout.
    let whole = Strides::contiguous(&[2, 66, 3, 2, 8]);
    let memory = values(9, whole.numel());
    let [q, k, v] = [0, 1, 2].map(|i| whole.select(2, i));
    Case::new(&FORWARD)
        .input_view(Kind::Tested, q.unsqueeze(3), &memory)
        .input_view(Kind::Tested, k, &memory)
        .input_view(Kind::Tested, v, &memory)
        .output(&[2, 66, 2, 1, 8])
        .output_as(Kind::Accumulator, &[2, 66, 2, 1])
        .scalars(&scalars(0.35, true, 0))
        .allow(ALLOWANCE)
        .run();
}

#[test]
fn cotangents_of_sums_have_strides_of_zero() {
    for [t, c] in [[3, 4], [70, 8]] {
        let (of_queries, of_keys) = ([2, t, 2, 1, c], [2, t, 2, c]);
        let inputs = inputs([2, t, t, 2, 1, c]);
        let [q, k, v] = inputs.each_ref().map(|value| &value.data[..]);
        let scalars = scalars(0.5, true, 0);
        let saved = attend(&inputs, &scalars);
        let one = Strides::contiguous(&[1; 5]).broadcast(&of_queries).expect("one number fits any shape");
        let case = Case::new(&BACKWARD).input(&of_queries, q).input(&of_keys, k).input(&of_keys, v);
        case.input(&of_queries, &saved[0])
            .input_as(Kind::Accumulator, &of_queries[..4], &saved[1])
            .input_view(Kind::Tested, one, &[0.75])
            .output(&of_queries)
            .output(&of_keys)
            .output(&of_keys)
            .scalars(&scalars)
            .scale(4.0)
            .allow(ALLOWANCE)
            .run();
    }
}

#[test]
fn backward_matches_finite_differences() {
    let plain = [(false, 0), (true, 0), (true, 2), (true, -1)].map(|(c, start)| scalars(0.7, c, start));
    let narrow = [(0, 2), (1, 2), (2, 1), (-1, 2)].map(|(start, window)| windowed(0.7, start, window));
    for scalars in plain.into_iter().chain(narrow) {
        let inputs = inputs([2, 3, 4, 2, 2, 3]);
        let d_out = Value::real(&inputs[0].shape, &values(4, inputs[0].data.len()));
        let saved = attend(&inputs, &scalars);
        let saved = [
            Value::real(&inputs[0].shape, &saved[0]),
            Value::real(&inputs[0].shape[..4], &saved[1]),
            d_out.clone(),
        ];
        let all: Vec<Value> = inputs.iter().chain(&saved).cloned().collect();
        let shapes = inputs.each_ref().map(|value| &value.shape[..]);
        let gradients: Vec<_> =
            evaluate(&BACKWARD, &all, &shapes, &scalars).into_iter().enumerate().collect();
        check_gradients(&inputs, &gradients, |x| dot(&attend(x, &scalars)[0], &d_out.data)).unwrap();
    }
}

/// o, lse, dq, dk and dv of the fast path in f32 or bf16.
fn everything(dtype: DType, inputs: &[Value], d_out: &[f64], scalars: &[Scalar]) -> Vec<Vec<f64>> {
    let q = &inputs[0].shape;
    let attend = Case::new(&FORWARD).output(q).output_as(Kind::Accumulator, &q[..4]).scalars(scalars);
    let given = |case: Case<'static>| inputs.iter().fold(case, |case, x| case.input(&x.shape, &x.data));
    let mut found = given(attend).fast(dtype);
    let differentiate = given(Case::new(&BACKWARD).scalars(scalars)).input(q, &found[0]);
    let differentiate = differentiate.input_as(Kind::Accumulator, &q[..4], &found[1]).input(q, d_out);
    let differentiate = differentiate.output(q).output(&inputs[1].shape).output(&inputs[2].shape);
    found.extend(differentiate.fast(dtype));
    found
}

/// The elements `range` of a dim.
fn narrowed(value: &Value, dim: usize, range: std::ops::Range<usize>) -> Value {
    let view = Strides::contiguous(&value.shape).narrow(dim, range.start, range.end);
    let data: Vec<f64> = crate::op::kernel_check::places(&view).into_iter().map(|p| value.data[p]).collect();
    Value { dtype: value.dtype, shape: view.shape.to_vec(), data }
}

#[test]
fn bits_of_a_head_do_not_depend_on_other_heads() {
    let inputs = inputs([2, 100, 100, 3, 2, 20]);
    let d_out = Value::real(&inputs[0].shape, &values(4, inputs[0].data.len()));
    let scalars = scalars(0.2, true, 0);
    let [one, d_one] = [&inputs[..], std::slice::from_ref(&d_out)]
        .map(|values| values.iter().map(|x| narrowed(&narrowed(x, 0, 1..2), 2, 1..2)).collect::<Vec<_>>());
    let shapes =
        [&inputs[0].shape[..], &inputs[0].shape[..4], &inputs[0].shape, &inputs[1].shape, &inputs[2].shape];
    for dtype in [DType::F32, DType::BF16] {
        let whole = everything(dtype, &inputs, &d_out.data, &scalars);
        let alone = everything(dtype, &one, &d_one[0].data, &scalars);
        for ((whole, alone), shape) in whole.iter().zip(alone).zip(shapes) {
            let part = narrowed(&narrowed(&Value::real(shape, whole), 0, 1..2), 2, 1..2);
            assert!(part.data.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype}");
        }
    }
}

#[test]
fn bits_of_a_query_do_not_depend_on_other_queries() {
    let inputs = inputs([1, 150, 150, 1, 2, 20]);
    let [q, k, v] = &inputs;
    let d_out = Value::real(&q.shape, &values(4, q.data.len()));
    for (window, dtype) in [0, 1, 40, 90].into_iter().flat_map(|w| [(w, DType::F32), (w, DType::BF16)]) {
        let whole = everything(dtype, &inputs, &d_out.data, &windowed(0.2, 0, window));
        for range in [0..1, 37..150, 100..101, 3..70] {
            let part = [narrowed(q, 1, range.clone()), k.clone(), v.clone()];
            let d_part = narrowed(&d_out, 1, range.clone());
            let found = everything(dtype, &part, &d_part.data, &windowed(0.2, range.start as i64, window));
            for (i, shape) in [(0, &q.shape[..]), (1, &q.shape[..4]), (2, &q.shape)] {
                let expected = narrowed(&Value::real(shape, &whole[i]), 1, range.clone());
                let same = expected.data.iter().zip(&found[i]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtype}, window {window}, queries {range:?}, result {i}");
            }
        }
    }
}

#[test]
fn too_many_sequences_for_a_grid_are_an_error() {
    let memory = crate::buffer::Allocator::default();
    let plan = |b: usize| {
        let views = [&[b, 1, 1, 1, 1][..], &[b, 1, 1, 1], &[b, 1, 1, 1]].map(Strides::contiguous);
        let buffers = [(); 3].map(|()| memory.alloc(4 * b).unwrap());
        let arg = |i: usize| Arg { buffer: &buffers[i], dtype: DType::F32, view: &views[i] };
        let scalars = scalars(1.0, true, 0);
        let launch = Launch { inputs: &[0, 1, 2].map(arg), outputs: &mut [], scalars: &scalars };
        gpu::forward(&launch, &mut crate::gpu::LaunchPlan::new(99 << 10))
    };
    plan(65_535).unwrap();
    assert!(plan(65_536).unwrap_err().to_string().contains("65536 sequences with 1 key heads"));
}
