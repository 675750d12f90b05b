//! Copies between all dtypes and all kinds of strides, and speed-relevant shapes.

use super::*;
use crate::kernel::{Arg, ArgMut};
use crate::op::finite_difference::{Value, evaluate_as};
use crate::op::kernel_check::{Case, Kind, values};
use crate::strides::Strides;

const FLOATS_AND_INTEGERS: [DType; 6] =
    [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::U8];

fn between(from: DType, to: DType, x: &[f64]) -> Vec<f64> {
    let input = Value { dtype: from, ..Value::real(&[x.len()], x) };
    let fast = evaluate_as(COPY.cpu.unwrap(), to, std::slice::from_ref(&input), &[&[x.len()]], &[]).remove(0);
    assert_eq!(fast, evaluate_as(plain, to, &[input], &[&[x.len()]], &[]).remove(0), "{from} {to}");
    fast
}

#[test]
fn matches_known_values() {
    // 1 + 2^-8 is a tie between two bf16 numbers, of which 1 is even; so is 1 + 3 * 2^-8, which rounds up to 1 + 2^-6.
    let halves = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.001 / 256.0];
    assert_eq!(between(DType::F32, DType::BF16, &halves), [1.0, 1.0 + 1.0 / 64.0, 1.0 + 1.0 / 128.0]);
    assert_eq!(between(DType::F64, DType::BF16, &halves), [1.0, 1.0 + 1.0 / 64.0, 1.0 + 1.0 / 128.0]);
    assert_eq!(
        between(DType::F32, DType::F16, &[65504.0, 65520.0, 1e-8, -6e-8]),
        [65504.0, f64::INFINITY, 0.0, -2f64.powi(-24)]
    );
    assert_eq!(
        between(DType::F64, DType::I64, &[2.9, -2.9, f64::NAN, 1e300]),
        [2.0, -2.0, 0.0, i64::MAX as f64]
    );
    assert_eq!(between(DType::F32, DType::U8, &[300.0, -1.0, 7.5]), [255.0, 0.0, 7.0]);
    assert_eq!(between(DType::F32, DType::Bool, &[0.25, 0.0, -0.0, f64::NAN]), [1.0, 0.0, 0.0, 1.0]);
    assert_eq!(between(DType::I64, DType::Bool, &[-4.0, 0.0]), [1.0, 0.0]);
    assert_eq!(between(DType::Bool, DType::F32, &[1.0, 0.0]), [1.0, 0.0]);
}

#[test]
fn every_pair_of_dtypes_agrees_with_the_reference() {
    let x: Vec<f64> = values(1, 301).iter().map(|x| 40.0 * x).collect();
    for from in FLOATS_AND_INTEGERS {
        for to in DType::ALL {
            between(from, to, &x);
        }
    }
}

#[test]
fn copies_match_for_all_strides() {
    let full = Strides::contiguous(&[3, 40, 37]);
    let layouts = |shape: &[usize]| {
        let gapped: Vec<usize> = shape.iter().map(|n| n + 2).collect();
        let gaps = Strides::new(shape.into(), Strides::contiguous(&gapped).strides.clone(), 5);
        [Strides::contiguous(shape), gaps]
    };
    let mut views = vec![];
    for order in [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 2, 0]] {
        let mut inverse = [0; 3];
        order.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
        let shape: Vec<usize> = order.iter().map(|&d| full.shape[d]).collect();
        views.extend(layouts(&shape).map(|view| view.permute(&inverse)));
    }
    let column = Strides::contiguous(&[3, 40, 1]).broadcast(&[3, 40, 37]).unwrap();
    let memory = values(1, 8000);
    for from in views.iter().chain([&column]) {
        for to in &views {
            let case = Case::new(&COPY).input_view(Kind::Tested, from.clone(), &memory);
            case.output_view(Kind::Tested, to.clone(), &[77.0; 8000]).run_for(&[DType::F32, DType::I64]);
        }
        let case = Case::new(&COPY).input_view(Kind::Fixed(DType::F32), from.clone(), &memory);
        case.output_view(Kind::Fixed(DType::BF16), views[3].clone(), &[77.0; 8000]).run_for(&[DType::F32]);
    }
}

#[test]
fn copies_match_over_many_and_small_tasks() {
    let x = values(3, 300 * 130);
    let transposed = Strides::contiguous(&[130, 300]).permute(&[1, 0]);
    let case = Case::new(&COPY).input_view(Kind::Tested, transposed, &x).output(&[300, 130]);
    case.run();
    Case::new(&COPY).input(&[39_000], &x).output(&[39_000]).run();
    Case::new(&COPY).input(&[], &[3.0]).output(&[]).run();
    Case::new(&COPY).input(&[0, 3], &[]).output(&[0, 3]).run();
}

#[test]
fn equal_dtypes_move_bits() {
    let big = (1i64 << 53) + 1;
    let buffer = crate::backend::upload(&*crate::cpu_backend::Cpu::backend(1), &[big, -big]).unwrap();
    let mut to = crate::backend::upload(&*crate::cpu_backend::Cpu::backend(1), &[0i64; 2]).unwrap();
    let view = Strides::contiguous(&[2]);
    for code in [COPY.cpu.unwrap(), COPY.reference] {
        let inputs = [Arg { buffer: &buffer, dtype: DType::I64, view: &view }];
        let mut outputs = [ArgMut { buffer: &mut to, dtype: DType::I64, view: &view }];
        code(&Pool::new(1), &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
        assert_eq!(to.as_slice::<i64>(), [big, -big]);
    }
}

/// Contiguous, converting and transposing copies, aligned to cache lines and not; the second thread stores too.
#[test]
fn nontemporal_copy_is_exact() {
    let cpu = crate::cpu_backend::Cpu::backend(2);
    let (side, odd) = (2912, 2900);
    let numbers: Vec<f32> = (0..side * side + 1).map(|i| i as f32).collect();
    let x = crate::backend::upload(&*cpu, &numbers).unwrap();
    let from = |view: &Strides, i: usize| numbers[element_offset(view, i)];
    for (offset, extent, is_transposed) in
        [(0, side, false), (1, side, false), (0, side, true), (1, odd, true)]
    {
        let plain = Strides::contiguous(&[extent, extent]).at(offset);
        let view = if is_transposed { plain.permute(&[1, 0]) } else { plain.clone() };
        let mut y = crate::backend::upload(&*cpu, &vec![-1f32; side * side + 1]).unwrap();
        let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
        let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &plain }];
        cpu.launch(&COPY, &mut Launch { inputs: &inputs, outputs, scalars: &[] }).unwrap();
        let numel = extent * extent;
        assert!(
            (0..numel).all(|i| y.as_slice::<f32>()[offset + i] == from(&view, i)),
            "{extent} {is_transposed}"
        );
        let rest = &y.as_slice::<f32>()[offset + numel..];
        assert!(rest.iter().chain(&y.as_slice()[..offset]).all(|&y| y == -1.0), "{extent} {is_transposed}");
    }
    let (view, mut y) = (Strides::contiguous(&[side * side]), cpu.alloc(8 * side * side).unwrap());
    let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
    let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F64, view: &view }];
    cpu.launch(&COPY, &mut Launch { inputs: &inputs, outputs, scalars: &[] }).unwrap();
    assert!(y.as_slice::<f64>().iter().zip(&numbers).all(|(&y, &x)| y == f64::from(x)));
}
