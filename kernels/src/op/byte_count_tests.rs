//! Bytes that launches must move, compared with counts by hand.

use super::kernel_check::{Case, Kind};
use super::{
    KERNELS, adamw, attention, batched_matmul, binary, copy, cross_entropy, embedding, index, sgd, triangular,
};
use crate::dtype::DType::{self, BF16, F16, F32};
use crate::kernel::Scalar::{self, Int, Real};
use crate::strides::Strides;

const INDEX: Kind = Kind::Fixed(DType::I64);
const F64: Kind = Kind::Fixed(DType::F64);

trait Shaped: Sized {
    /// Adds inputs of these shapes.
    fn of(self, kind: Kind, shapes: &[&[usize]]) -> Self;
    /// Adds outputs of these shapes.
    fn to(self, kind: Kind, shapes: &[&[usize]]) -> Self;
}

impl Shaped for Case<'_> {
    fn of(self, kind: Kind, shapes: &[&[usize]]) -> Self {
        shapes
            .iter()
            .fold(self, |case, shape| case.input_as(kind, shape, &vec![0.0; shape.iter().product::<usize>()]))
    }

    fn to(self, kind: Kind, shapes: &[&[usize]]) -> Self {
        shapes.iter().fold(self, |case, shape| case.output_as(kind, shape))
    }
}

#[test]
fn updated_outputs_count_as_read_and_written() {
    // The step's inputs: seven numbers per parameter, and the first two of the overflow check.
    let step = Case::new(&adamw::STEP).of(Kind::Tested, &[&[5]]).of(F64, &[&[1, 7], &[2]]);
    let step = step.to(Kind::Tested, &[&[5]]);
    // A gradient; twice the parameter and two f32 moments.
    assert_eq!(step.to(Kind::Accumulator, &[&[5], &[5]]).bytes(BF16), 10 + 56 + 16 + 2 * (10 + 20 + 20));
    let many = Case::new(&adamw::STEP).of(Kind::Tested, &[&[3], &[4]]).of(F64, &[&[2, 7], &[2]]);
    let many = many.to(Kind::Tested, &[&[3], &[3], &[3], &[4], &[4], &[4]]);
    assert_eq!(many.bytes(F32), (12 + 16) + 112 + 16 + 2 * 3 * (12 + 16));
    let step = Case::new(&sgd::STEP).of(Kind::Tested, &[&[5]]).of(F64, &[&[3], &[2]]);
    let step = step.to(Kind::Tested, &[&[5]]);
    assert_eq!(step.to(Kind::Accumulator, &[&[5]]).bytes(F16), 10 + 24 + 16 + 2 * (10 + 20));
    // A row that is added to two.
    let row = Strides::contiguous(&[3]).broadcast(&[2, 3]).unwrap();
    let sum = Case::new(&binary::ACCUMULATE).input_view(Kind::Tested, row, &[0.0; 3]);
    assert_eq!(sum.to(Kind::Tested, &[&[2, 3]]).bytes(F32), 12 + 2 * 24);
    let z = Case::new(&cross_entropy::BACKWARD).of(INDEX, &[&[2]]).of(Kind::Accumulator, &[&[2], &[2], &[2]]);
    assert_eq!(z.to(Kind::Tested, &[&[2, 3]]).bytes(BF16), 16 + 3 * 8 + 2 * 12);
}

#[test]
fn lookups_count_at_most_the_picked_rows() {
    let picked = |shape: &[usize]| {
        let case = Case::new(&embedding::FORWARD).of(Kind::Tested, &[&[7, 3]]).of(INDEX, &[shape]);
        case.to(Kind::Tested, &[&[shape, &[3]].concat()]).bytes(F32)
    };
    assert_eq!(picked(&[2]), 2 * 12 + 2 * 8 + 2 * 12);
    assert_eq!(picked(&[2, 5]), 7 * 12 + 10 * 8 + 10 * 12);
    assert_eq!(picked(&[0]), 0);
    // The gradient is written whole.
    let back = Case::new(&embedding::BACKWARD).of(INDEX, &[&[2]]).of(Kind::Tested, &[&[2, 3]]);
    assert_eq!(back.to(Kind::Tested, &[&[7, 3]]).bytes(F32), 2 * 8 + 2 * 12 + 7 * 12);

    let gathered = |index: &[usize], n: usize| {
        let case = Case::new(&index::GATHER).of(Kind::Tested, &[&[2, 7, 3]]).of(INDEX, &[index]);
        case.to(Kind::Tested, &[&[2, n, 3]]).bytes(F32)
    };
    assert_eq!(gathered(&[4], 4), 2 * 4 * 12 + 4 * 8 + 2 * 4 * 12);
    assert_eq!(gathered(&[2, 9, 3], 9), 2 * 7 * 12 + 54 * 8 + 2 * 9 * 12);
    let back = Case::new(&index::SCATTER_ADD).of(INDEX, &[&[4]]).of(Kind::Tested, &[&[2, 4, 3]]);
    assert_eq!(back.to(Kind::Tested, &[&[2, 7, 3]]).bytes(F32), 4 * 8 + 2 * 4 * 12 + 2 * 7 * 12);
}

#[test]
fn triangular_counts_the_kept_triangle() {
    let bytes = |scalars: [i64; 4]| {
        let case = Case::new(&triangular::TRIANGULAR)
            .of(Kind::Tested, &[&[2, 3, 4]])
            .to(Kind::Tested, &[&[2, 3, 4]]);
        case.scalars(&scalars.map(Int)).bytes(F32)
    };
    // Two matrices of three rows, all of which are written.
    assert_eq!(bytes([1, 0, 0, 0]), 2 * (4 + 3 + 2) * 4 + 96);
    assert_eq!(bytes([0, -1, 0, 0]), 2 * (1 + 2) * 4 + 96);
    assert_eq!(bytes([1, 0, 3, 0]), 2 * 4 + 96);
    assert_eq!(bytes([1, 0, 9, 0]), 96);
}

#[test]
fn attention_counts_the_visible_keys_and_values() {
    let scalars = |causal: i64, t_start: i64, window: i64| -> [Scalar; 4] {
        [Real(1.0), Int(causal), Int(t_start), Int(window)]
    };
    let (q, k) = (&[1, 2, 1, 2, 4][..], &[1, 6, 1, 4][..]);
    let forward = Case::new(&attention::FORWARD).of(Kind::Tested, &[q, k, k]).to(Kind::Tested, &[q]);
    let forward = forward.to(Kind::Accumulator, &[&q[..4]]);
    let back = Case::new(&attention::BACKWARD).of(Kind::Tested, &[q, k, k, q]);
    let back = back.of(Kind::Accumulator, &[&q[..4]]).of(Kind::Tested, &[q]).to(Kind::Tested, &[q, k, k]);
    for ([causal, t_start, window], keys) in [
        ([0, 0, 0], 6),
        // The second query sees one key more than the first.
        ([1, 1, 0], 3),
        // Keys 3 and 4, and 4 and 5.
        ([1, 4, 2], 3),
        ([1, 4, 0], 6),
        ([1, -5, 0], 0),
    ] {
        let scalars = scalars(causal, t_start, window);
        let bytes = forward.clone().scalars(&scalars).bytes(F32);
        assert_eq!(bytes, 64 + 2 * keys * 16 + 64 + 16, "{scalars:?}");
        let bytes = back.clone().scalars(&scalars).bytes(F32);
        assert_eq!(bytes, 3 * 64 + 2 * keys * 16 + 16 + 64 + 2 * 96, "{scalars:?}");
    }
    let q = &[1, 3, 1, 1, 4][..];
    let k = &[1, 3, 1, 4][..];
    let joined = Case::new(&attention::BACKWARD_JOINED).of(Kind::Tested, &[q, k, k, q]);
    let joined = joined.of(Kind::Accumulator, &[&q[..4]]).of(Kind::Tested, &[q]);
    let joined = joined.to(Kind::Tested, &[&[1, 3, 3, 1, 4]]);
    assert_eq!(joined.scalars(&scalars(1, 0, 0)).bytes(F32), 5 * 48 + 12 + 3 * 48);
}

#[test]
fn other_kernels_count_their_operands_once() {
    let own: Vec<&str> = KERNELS.iter().filter(|kernel| kernel.bytes.is_some()).map(|k| k.name).collect();
    let known = [
        "accumulate",
        "attention",
        "attention_backward",
        "attention_backward_joined",
        "attention_merge",
        "cross_entropy_backward",
        "embedding",
        "gather",
        "triangle",
        "adamw",
        "sgd",
    ];
    assert_eq!(own, known);
    // A bias, and a matrix shared by a batch, count once.
    let bias = Strides::contiguous(&[3]).broadcast(&[2, 3]).unwrap();
    let sum = Case::new(&binary::ADD).of(Kind::Tested, &[&[2, 3]]).input_view(Kind::Tested, bias, &[0.0; 3]);
    assert_eq!(sum.to(Kind::Tested, &[&[2, 3]]).bytes(F32), 24 + 12 + 24);
    let shared = Strides::contiguous(&[4, 5]).broadcast(&[2, 4, 5]).unwrap();
    let stack = Case::new(&batched_matmul::BATCHED_MATMUL).of(Kind::Tested, &[&[2, 3, 4]]);
    let stack = stack.input_view(Kind::Tested, shared, &[0.0; 20]).to(Kind::Tested, &[&[2, 3, 5]]);
    assert_eq!(stack.bytes(F32), 96 + 80 + 120);
    // Rows appended in a larger memory, as in a KV cache.
    let room = Strides::contiguous(&[4, 3]).narrow(0, 2, 4);
    let append = Case::new(&copy::COPY).of(Kind::Tested, &[&[2, 3]]);
    assert_eq!(append.output_view(Kind::Tested, room, &[0.0; 12]).bytes(F32), 24 + 24);
}
