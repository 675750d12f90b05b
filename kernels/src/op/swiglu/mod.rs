//! SwiGLU: y = silu(g) u with silu(g) = g / (1 + e^-g), and its gradient. Shazeer, arXiv 2002.05202.

use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::formula::{gate_slope, sigmoid};
use crate::op::gpu_rows::{flat, float};
use crate::op::pointwise::{Formula, TASK, gpu, map, map_as, names, plain, plain_as, pointwise, two_reals};
use crate::op::rows::{operands, read, write};

pointwise! {
    ///
    /// - in: g, u: one float dtype and shape, any strides
    /// - out: y, same dtype and shape, contiguous
    FORWARD "swiglu" 5 8.0 |[g, u], _| g * sigmoid(g) * u;
}

/// With s = 1 / (1 + e^-g): dg = dy u s (1 + g (1 - s)), du = dy g s.
///
/// - in: g, u, dy: one float dtype and shape, contiguous
/// - out: dg, du like g
///
/// Counted: 11 operations per element.
pub static BACKWARD: Kernel = Kernel {
    name: "swiglu_backward",
    reference,
    cpu: Some(cpu),
    gpu: Some(GpuCode { source: BACKWARD_SOURCE, plan: plan_backward }),
    flops: |launch| 11 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// The CUDA source of the backward.
const BACKWARD_SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// Plans the backward on a GPU: one grid, one chunk per thread.
fn plan_backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, n) = (float(BACKWARD.name, launch)?, launch.inputs[0].view.numel());
    let mut args: Vec<GridArg> = [0, 1, 2].map(GridArg::Input).into();
    args.extend([GridArg::Output(0), GridArg::Output(1), GridArg::I64(n as i64)]);
    plan.grid(flat(launch, dtype, "swiglu_backward", n, args));
    Ok(())
}

#[inline(always)]
fn cotangents<R: Maths>(g: R, u: R, dy: R) -> (R, R) {
    let s = sigmoid(g);
    (dy * u * gate_slope(g, s, R::ONE), dy * (g * s))
}

fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([g, u, dy], [dg, du], _) = operands(launch);
    match_float!(g.dtype, T => {
        let (g, u, dy) = (read::<T>(g), read::<T>(u), read::<T>(dy));
        for (i, (dg, du)) in write::<T>(dg).iter_mut().zip(write::<T>(du)).enumerate() {
            let found = cotangents(g[i].to_f64(), u[i].to_f64(), dy[i].to_f64());
            (*dg, *du) = (T::from_f64(found.0), T::from_f64(found.1));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: g.dtype }))
}

fn cpu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([g, u, dy], [dg, du], _) = operands(launch);
    match_float!(g.dtype, T => {
        let (g, u, dy) = (read::<T>(g), read::<T>(u), read::<T>(dy));
        pool.chunks2((write::<T>(dg), TASK), (write::<T>(du), TASK), |i, dg, du| {
            let [g, u, dy] = [g, u, dy].map(|x| &x[i * TASK..][..dg.len()]);
            vectorized(#[inline(always)] || {
                for ((((dg, du), g), u), dy) in dg.iter_mut().zip(du).zip(g).zip(u).zip(dy) {
                    let found = cotangents(g.widen(), u.widen(), dy.widen());
                    (*dg, *du) = (T::narrow(found.0), T::narrow(found.1));
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: g.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, values};
    use crate::strides::Strides;
    use approx::assert_abs_diff_eq;

    #[test]
    fn matches_known_values() {
        // e^-g = 1/3 where g = ln 3: s = 3/4 and the slope is 3/4 + 3/16 ln 3.
        let l = 3f64.ln();
        let (g, u) = (Value::real(&[2], &[l, 0.0]), Value::real(&[2], &[2.0, 5.0]));
        let y = evaluate(&FORWARD, &[g.clone(), u.clone()], &[&[2]], &[]).remove(0);
        assert_abs_diff_eq!(y[0], 1.5 * l, epsilon = 1e-15);
        assert_eq!(y[1..], [0.0]);
        let dy = Value::real(&[2], &[1.0, 4.0]);
        let found = evaluate(&BACKWARD, &[g, u, dy], &[&[2], &[2]], &[]);
        assert_abs_diff_eq!([found[0][0], found[1][0]][..], [1.5 + 0.375 * l, 0.75 * l][..], epsilon = 1e-15);
        assert_eq!([&found[0][1..], &found[1][1..]], [[10.0], [0.0]]);
    }

    #[test]
    fn fast_paths_match_the_reference() {
        for shape in [vec![1], vec![3, 33], vec![0, 4], vec![40_000]] {
            let n = shape.iter().product();
            let [g, u, dy] = [1, 2, 3].map(|seed| values(seed, n));
            let wide: Vec<f64> = g.iter().map(|x| 20.0 * x).collect();
            for g in [&g, &wide] {
                Case::new(&FORWARD).input(&shape, g).input(&shape, &u).output(&shape).strided().run();
                let case = Case::new(&BACKWARD).input(&shape, g).input(&shape, &u).input(&shape, &dy);
                case.output(&shape).output(&shape).scale(1.0).run();
            }
        }
    }

    #[test]
    fn broadcast_operand_is_read_in_place() {
        let column = Strides::contiguous(&[5, 1]).broadcast(&[5, 7]).expect("a column repeats");
        let case =
            Case::new(&FORWARD).input_view(crate::op::kernel_check::Kind::Tested, column, &values(1, 5));
        case.input(&[5, 7], &values(2, 35)).output(&[5, 7]).run();
    }

    #[test]
    fn backward_matches_finite_differences() {
        let inputs = [Value::real(&[3, 4], &values(5, 12)), Value::real(&[3, 4], &values(6, 12))];
        let dy = Value::real(&[3, 4], &values(7, 12));
        let all = [inputs[0].clone(), inputs[1].clone(), dy.clone()];
        let found = evaluate(&BACKWARD, &all, &[&[3, 4], &[3, 4]], &[]);
        let loss = |x: &[Value]| dot(&evaluate(&FORWARD, x, &[&[3, 4]], &[])[0], &dy.data);
        check_gradients(&inputs, &[(0, found[0].clone()), (1, found[1].clone())], loss).unwrap();
        let wrong: Vec<f64> = found[0].iter().map(|x| x * 1.001).collect();
        assert!(check_gradients(&inputs, &[(0, wrong)], loss).is_err());
    }
}
