//! Known values, agreement with the reference, gradients, and large arguments.

use super::*;
use crate::kernel::Scalar;
use crate::op::finite_difference::{Value, evaluate};
use crate::op::kernel_check::{Case, values};

const ALL: [&Kernel; 15] = [
    &NEG,
    &EXP,
    &LOG,
    &SQRT,
    &TANH,
    &RELU,
    &GELU,
    &GELU_EXACT,
    &SIGMOID,
    &ERF,
    &SILU,
    &SQUARE,
    &RECIPROCAL,
    &SCALE,
    &ADD_SCALAR,
];
/// A gradient kernel, its function, and whether it takes the function's result instead of the argument.
const GRADIENTS: [(&Kernel, &Kernel, bool); 7] = [
    (&RELU_GRAD, &RELU, false),
    (&GELU_GRAD, &GELU, false),
    (&GELU_EXACT_GRAD, &GELU_EXACT, false),
    (&SIGMOID_GRAD, &SIGMOID, true),
    (&ERF_GRAD, &ERF, false),
    (&SILU_GRAD, &SILU, false),
    (&TANH_GRAD, &TANH, true),
];
const C: [Scalar; 1] = [Scalar::Real(0.1)];

fn at(kernel: &Kernel, x: &[f64]) -> Vec<f64> {
    evaluate(kernel, &[Value::real(&[x.len()], x)], &[&[x.len()]], &C).remove(0)
}

#[test]
fn matches_known_values() {
    for (kernel, x, y) in [
        (&NEG, 2.5, -2.5),
        (&EXP, 1.0, std::f64::consts::E),
        (&LOG, 2.0, std::f64::consts::LN_2),
        (&SQRT, 2.0, std::f64::consts::SQRT_2),
        (&TANH, 1.0, 0.761_594_155_955_764_9),
        (&RELU, -1.0, 0.0),
        (&RELU, 3.0, 3.0),
        (&GELU, 1.0, 0.841_191_990_608_302_2),
        (&GELU, -2.0, -0.045_402_305_912_225_8),
        (&GELU_EXACT, 1.0, 0.841_344_746_068_542_9),
        (&GELU_EXACT, -2.0, -0.045_500_263_896_358_42),
        (&SIGMOID, 1.0, 0.731_058_578_630_004_9),
        (&ERF, 0.5, 0.520_499_877_813_046_5),
        (&SILU, 1.0, 0.731_058_578_630_004_9),
        (&SQUARE, -3.0, 9.0),
        (&RECIPROCAL, 8.0, 0.125),
        (&SCALE, 30.0, 3.0),
        (&ADD_SCALAR, 1.0, 1.1),
    ] {
        let got = at(kernel, &[x])[0];
        assert!((got - y).abs() <= 1e-13, "{} {x}: {got}", kernel.name);
    }
}

#[test]
fn fast_paths_match_the_reference() {
    for kernel in ALL {
        let x: Vec<f64> = match kernel.name {
            "log" | "sqrt" => values(1, 3 * 5 * 67).iter().map(|x| x.abs()).collect(),
            _ => values(1, 3 * 5 * 67).iter().map(|x| 5.0 * x).collect(),
        };
        Case::new(kernel).input(&[3, 5, 67], &x).output(&[3, 5, 67]).scalars(&C).strided().run();
        Case::new(kernel).input(&[0, 2], &[]).output(&[0, 2]).scalars(&C).run();
    }
    Case::new(&GELU).input(&[40_001], &values(2, 40_001)).output(&[40_001]).run();
    Case::new(&EXP).input(&[300, 7], &values(2, 2100)).output(&[300, 7]).strided().run();
    for (kernel, ..) in GRADIENTS {
        let (x, dy) = (values(3, 6 * 35), values(4, 6 * 35));
        Case::new(kernel).input(&[6, 35], &x).input(&[6, 35], &dy).output(&[6, 35]).strided().run();
    }
}

#[test]
fn gradients_match_finite_differences() {
    let x: Vec<f64> = (-40..40).map(|i| f64::from(i) * 0.17 + 0.03).collect();
    let shape = [x.len()];
    for (gradient, kernel, reads_result) in GRADIENTS {
        let shifted = |h: f64| at(kernel, &x.iter().map(|x| x + h).collect::<Vec<_>>());
        let first = if reads_result { at(kernel, &x) } else { x.clone() };
        let dy = vec![2.0; x.len()];
        let inputs = [Value::real(&shape, &first), Value::real(&shape, &dy)];
        let got = evaluate(gradient, &inputs, &[&shape], &[]).remove(0);
        for (i, (up, down)) in shifted(1e-5).into_iter().zip(shifted(-1e-5)).enumerate() {
            let slope = (up - down) / 1e-5;
            assert!((got[i] - slope).abs() < 1e-8, "{} at {}: {} {slope}", gradient.name, x[i], got[i]);
        }
    }
}

#[test]
fn large_arguments_and_special_values() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let far = [-1e30, -1000.0, -50.0, 0.0, 50.0, 1000.0, 1e30];
    let ones = [1.0; 7];
    for kernel in [&GELU, &GELU_EXACT, &SILU] {
        Case::new(kernel).input(&[7], &far).output(&[7]).run();
        assert_eq!(at(kernel, &far)[4..], far[4..]);
    }
    for kernel in [&GELU_GRAD, &GELU_EXACT_GRAD, &SILU_GRAD] {
        Case::new(kernel).input(&[7], &far).input(&[7], &ones).output(&[7]).run();
    }
    let special = [nan, inf, -inf, 0.0];
    for kernel in ALL {
        Case::new(kernel).input(&[4], &special).output(&[4]).scalars(&C).run();
        assert!(at(kernel, &special)[0].is_nan(), "{}", kernel.name);
    }
    assert_eq!(at(&RECIPROCAL, &special)[1..], [0.0, -0.0, inf]);
}

#[test]
fn comparison_detects_cancellation_in_the_tail() {
    let within = |cpu| {
        let bound = Bound { ulps: 16.0 };
        let kernel = Kernel { name: "gelu", cpu, gpu: None, bound, ..GELU };
        Case::new(&kernel).input(&[3], &[-4.9, -4.5, -4.0]).output(&[3]).verify(&[DType::F32])
    };
    within(GELU.cpu).unwrap();
    within(Some(|_, launch| {
        let ([x], [y], _) = operands(launch);
        plain_as([x], y, &|[x]: [f32; 1]| {
            0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh())
        });
        Ok(())
    }))
    .unwrap_err();
}
