//! Agreement with the reference, gradients, large arguments, and points without a derivative. The table of ops in the crate `tensor` has
//! known values.

use super::*;
use crate::kernel::Scalar;
use crate::op::finite_difference::{Value, evaluate};
use crate::op::kernel_check::{Case, values};
use approx::abs_diff_eq;

/// The functions of the table.
fn functions() -> impl Iterator<Item = &'static Kernel> {
    TABLE.iter().filter(|(_, inputs)| names(inputs) == 1).map(|(kernel, _)| *kernel)
}

/// Each gradient kernel of the table with its function, `GELU_GRAD` with `GELU`, and whether it takes the function's result instead of the
/// argument.
fn gradients() -> impl Iterator<Item = (&'static Kernel, &'static Kernel, bool)> {
    TABLE.iter().filter(|(_, inputs)| names(inputs) == 2).map(|(gradient, inputs)| {
        let of = gradient.name.strip_suffix("_grad").expect("the name of a gradient");
        let function = functions().find(|kernel| kernel.name == of).expect("the function of a gradient");
        (*gradient, function, inputs.starts_with("[y"))
    })
}

const C: [Scalar; 2] = [Scalar::Real(0.25), Scalar::Real(0.75)];

/// Returns whether a function has no real value for negative arguments.
fn is_one_sided(kernel: &Kernel) -> bool {
    ["log", "sqrt", "rsqrt", "pow_scalar"].iter().any(|name| kernel.name.starts_with(name))
}

fn at(kernel: &Kernel, x: &[f64]) -> Vec<f64> {
    evaluate(kernel, &[Value::real(&[x.len()], x)], &[&[x.len()]], &C).remove(0)
}

#[test]
fn table_has_functions_and_gradients_that_read_argument_or_result() {
    assert_eq!(functions().count() + gradients().count(), TABLE.len());
    let reads_result =
        |of: &Kernel| gradients().find(|(kernel, ..)| kernel.name == of.name).map(|found| found.2);
    assert_eq!([&TANH_GRAD, &GELU_GRAD, &GELU].map(reads_result), [Some(true), Some(false), None]);
}

#[test]
fn fast_paths_match_the_reference() {
    for kernel in functions() {
        let spread = values(1, 3 * 5 * 67).into_iter().map(|x| 5.0 * x);
        let x: Vec<f64> = spread.map(|x| if is_one_sided(kernel) { x.abs() } else { x }).collect();
        Case::new(kernel).input(&[3, 5, 67], &x).output(&[3, 5, 67]).scalars(&C).strided().run();
        Case::new(kernel).input(&[0, 2], &[]).output(&[0, 2]).scalars(&C).run();
    }
    Case::new(&GELU).input(&[40_001], &values(2, 40_001)).output(&[40_001]).run();
    Case::new(&EXP).input(&[300, 7], &values(2, 2100)).output(&[300, 7]).strided().run();
    for (kernel, ..) in gradients() {
        let spread = values(3, 6 * 35).into_iter();
        let x: Vec<f64> = spread.map(|x| if is_one_sided(kernel) { x.abs() + 0.1 } else { x }).collect();
        let case = Case::new(kernel).input(&[6, 35], &x).input(&[6, 35], &values(4, 6 * 35));
        case.output(&[6, 35]).scalars(&C).strided().run();
    }
}

#[test]
fn gradients_match_finite_differences() {
    for (gradient, kernel, reads_result) in gradients() {
        let start = if is_one_sided(kernel) { 1 } else { -40 };
        let x: Vec<f64> = (start..40).map(|i| f64::from(i) * 0.17 + 0.03).collect();
        let shape = [x.len()];
        let shifted = |h: f64| at(kernel, &x.iter().map(|x| x + h).collect::<Vec<_>>());
        let first = if reads_result { at(kernel, &x) } else { x.clone() };
        let inputs = [Value::real(&shape, &first), Value::real(&shape, &vec![2.0; x.len()])];
        let got = evaluate(gradient, &inputs, &[&shape], &C).remove(0);
        for (i, (up, down)) in shifted(1e-5).into_iter().zip(shifted(-1e-5)).enumerate() {
            let slope = (up - down) / 1e-5;
            let near = abs_diff_eq!(got[i], slope, epsilon = 1e-8 * (1.0 + slope.abs()));
            assert!(near, "{} at {}: {} {slope}", gradient.name, x[i], got[i]);
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
    let special = [nan, inf, -inf, 0.0, -0.0, 1e30, -1e30];
    for kernel in functions() {
        Case::new(kernel).input(&[4], &special[..4]).output(&[4]).scalars(&C).run();
        Case::new(kernel).input(&[7], &special).output(&[7]).scalars(&C).run_for(&[DType::F64, DType::F32]);
        assert!(at(kernel, &special)[0].is_nan(), "{}", kernel.name);
    }
    assert_eq!(at(&RECIPROCAL, &special)[1..4], [0.0, -0.0, inf]);
}

#[test]
fn gradients_at_non_differentiable_points_match_known_values() {
    let grad = |kernel: &Kernel, x: f64| {
        let inputs = [Value::real(&[1], &[x]), Value::real(&[1], &[2.0])];
        evaluate(kernel, &inputs, &[&[1]], &C).remove(0)[0]
    };
    assert_eq!([grad(&ABS_GRAD, 0.0), grad(&LEAKY_RELU_GRAD, 0.0), grad(&ELU_GRAD, 0.0)], [0.0, 0.5, 0.5]);
    assert_eq!([0.25, 0.75, 0.8, 0.2, f64::NAN].map(|x| grad(&CLAMP_GRAD, x)), [2.0, 2.0, 0.0, 0.0, 0.0]);
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
