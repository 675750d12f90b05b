//! Linear layers against known values and plain loops.

use super::*;
use crate::dtype::DType;
use crate::op::binary::ADD;
use crate::op::finite_difference::{Value, evaluate};
use crate::op::kernel_check::{Case, values};
use approx::assert_abs_diff_eq;

/// Extents g, m, n and k.
const SHAPES: [[usize; 4]; 7] = [
    [1, 1, 1, 1],
    [1, 5, 7, 9],
    [3, 4, 16, 6],
    [1, 33, 24, 65],
    [1, 0, 8, 3],
    [1, 6, 8, 0],
    [1, 90, 160, 12],
];

fn product_case(kernel: &'static Kernel, [g, m, n, k]: [usize; 4]) -> Case<'static> {
    let (a, b) = (values(1, g * m * k), values(2, g * k * n));
    Case::new(kernel).input(&[g, m, k], &a).input(&[g, k, n], &b).scale(1.0)
}

#[test]
fn matches_known_values() {
    let a = || Value::real(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b = || Value::real(&[1, 2, 3], &[1.0, 0.0, -1.0, 2.0, 1.0, 0.0]);
    let bias = || Value::real(&[3], &[10.0, 20.0, -40.0]);
    let c = evaluate(&LINEAR, &[a(), b(), bias()], &[&[1, 2, 3]], &[]).remove(0);
    assert_eq!(c, [15.0, 22.0, -41.0, 21.0, 24.0, -43.0]);
    let r = || Value::real(&[1, 2, 3], &[-15.0, 3.0, 0.5, 0.0, -25.0, 100.0]);
    let c_r = evaluate(&LINEAR_ADD, &[a(), b(), bias(), r()], &[&[1, 2, 3]], &[]).remove(0);
    assert_eq!(c_r, [0.0, 25.0, -40.5, 21.0, -1.0, 57.0]);
    let c_r = evaluate(&MATMUL_ADD, &[a(), b(), r()], &[&[1, 2, 3]], &[]).remove(0);
    assert_eq!(c_r, [-10.0, 5.0, -0.5, 11.0, -21.0, 97.0]);
    let both = evaluate(&LINEAR_GELU, &[a(), b(), bias()], &[&[1, 2, 3], &[1, 2, 3]], &[]);
    // For such large arguments gelu is x or 0.
    assert_eq!(both[1], c);
    assert_eq!(both[0], c.iter().map(|x| x.max(0.0)).collect::<Vec<f64>>());
    let z = Value::real(&[1, 2, 3], &[90.0, -90.0, 0.0, 90.0, 90.0, 0.0]);
    let both = evaluate(&MATMUL_GELU_GRAD, &[a(), b(), z], &[&[1, 2, 3], &[3]], &[]);
    assert_abs_diff_eq!(both[0][..], [5.0, 0.0, -0.5, 11.0, 4.0, -1.5][..], epsilon = 1e-12);
    assert_abs_diff_eq!(both[1][..], [16.0, 4.0, -2.0][..], epsilon = 1e-12);
    let both = evaluate(&MATMUL_BIAS_GRAD, &[a(), b()], &[&[1, 2, 3], &[3]], &[]);
    assert_eq!(both, [vec![5.0, 2.0, -1.0, 11.0, 4.0, -3.0], vec![3.0, 1.0, -1.0]]);
}

#[test]
fn fast_path_matches_the_reference() {
    for shape @ [g, m, n, _] in SHAPES {
        let (bias, z) = (values(3, n), values(4, g * m * n));
        let c = &[g, m, n];
        product_case(&LINEAR, shape).input(&[n], &bias).output(c).allow(1.0).run();
        product_case(&LINEAR_ADD, shape).input(&[n], &bias).input(c, &z).output(c).allow(1.0).run();
        product_case(&MATMUL_ADD, shape).input(c, &z).output(c).allow(1.0).run();
        product_case(&LINEAR_GELU, shape).input(&[n], &bias).output(c).output(c).allow(2.0).run();
        product_case(&MATMUL_GELU_GRAD, shape).input(c, &z).output(c).output(&[n]).allow(2.0).run();
        if g == 1 {
            product_case(&MATMUL_BIAS_GRAD, shape).strided().output(c).output(&[n]).run();
        }
    }
}

/// The CPU adds the residual with the bits of a separate kernel.
#[test]
fn residual_is_added_last() {
    for shape @ [g, m, n, _] in SHAPES {
        let (bias, r, c) = (values(3, n), values(4, g * m * n), &[g, m, n]);
        let with_bias = product_case(&LINEAR, shape).input(&[n], &bias).output(c);
        let without = product_case(&BATCHED_MATMUL, shape).output(c);
        let added = [
            product_case(&LINEAR_ADD, shape).input(&[n], &bias).input(c, &r).output(c),
            product_case(&MATMUL_ADD, shape).input(c, &r).output(c),
        ];
        for (layer, added) in [with_bias, without].iter().zip(added) {
            let y = layer.fast(DType::F32).remove(0);
            let sum = Case::new(&ADD).input(c, &y).input(c, &r).output(c).fast(DType::F32);
            assert_eq!(added.fast(DType::F32), sum, "{shape:?}");
        }
    }
}

#[test]
fn unsupported_dtypes_are_errors() {
    let bias = [1.0, 2.0];
    let case = product_case(&LINEAR, [1, 2, 2, 2]).input(&[2], &bias).output(&[1, 2, 2]);
    assert!(case.verify(&[DType::I64]).unwrap_err().contains("linear: no kernel for dtype i64"));
    let r = [1.0; 4];
    let case = product_case(&LINEAR_ADD, [1, 2, 2, 2]).input(&[2], &bias).input(&[1, 2, 2], &r);
    let refused = case.output(&[1, 2, 2]).verify(&[DType::I64]).unwrap_err();
    assert!(refused.contains("linear_add: no kernel for dtype i64"));
    let case = product_case(&MATMUL_ADD, [1, 2, 2, 2]).input(&[1, 2, 2], &r).output(&[1, 2, 2]);
    assert!(case.verify(&[DType::I64]).unwrap_err().contains("product_add: no kernel for dtype i64"));
    let case = product_case(&MATMUL_BIAS_GRAD, [1, 2, 2, 2]).output(&[1, 2, 2]).output(&[2]);
    assert!(case.verify(&[DType::I64]).unwrap_err().contains("product_sums: no kernel for dtype i64"));
}
