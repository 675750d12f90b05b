//! Functions of one element, and their gradients.
//!
//! Each is stated once as an expression over [`Maths`]; the reference evaluates it in f64, the fast path in the
//! accumulator type, vectorised. In: x (and dy for gradients), one shape, any strides, one float dtype. Out: y,
//! contiguous, same shape and dtype. Scalars: Real c where the formula has one.

use super::rows::write;
use super::runs::{Walk, each_run};
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Bound, Kernel, Launch};
use crate::match_float;

/// sqrt(2 / pi), of the tanh form of GELU.
const ROOT_TWO_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
const GELU_CUBIC: f64 = 0.044_715;

/// 1 / (1 + exp(-x)).
#[inline(always)]
fn sigmoid<R: Maths>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

/// tanh of the inner polynomial of GELU.
#[inline(always)]
fn gelu_tanh<R: Maths>(x: R) -> R {
    let cubic = x * x * x;
    (R::lit(ROOT_TWO_OVER_PI) * cubic.fma(R::lit(GELU_CUBIC), x)).tanh()
}

#[inline(always)]
fn gelu_grad<R: Maths>(x: R, dy: R) -> R {
    let t = gelu_tanh(x);
    let inner = R::lit(ROOT_TWO_OVER_PI) * (R::lit(3.0 * GELU_CUBIC) * x * x + R::ONE);
    dy * R::lit(0.5) * ((R::ONE + t) + x * (R::ONE - t * t) * inner)
}

#[inline(always)]
fn silu_grad<R: Maths>(x: R, dy: R) -> R {
    let s = sigmoid(x);
    dy * s * (R::ONE + x * (R::ONE - s))
}

macro_rules! functions {
    ($($(#[$doc:meta])* $static:ident $fn:ident $flops:literal $ulps:literal |$x:ident, $c:ident| $value:expr;)*) => {$(
        #[inline(always)]
        fn $fn<R: Maths>($x: R, $c: R) -> R { let _ = $c; $value }
        $(#[$doc])*
        pub static $static: Kernel = Kernel {
            name: stringify!($fn),
            reference: |_, launch| reference1(stringify!($fn), launch, $fn::<f64>),
            cpu: Some(|pool, launch| {
                match_float!(launch.inputs[0].dtype, T => fast1::<T>(pool, launch, $fn::<<T as Float>::Acc>),
                    else return refuse(stringify!($fn), launch));
                Ok(())
            }),
            flops: |l| $flops * l.inputs[0].view.numel() as u64,
            bound: Bound { ulps: $ulps },
        };
    )*};
}

macro_rules! gradients {
    ($($(#[$doc:meta])* $static:ident $fn:ident $flops:literal $ulps:literal |$x:ident, $dy:ident| $value:expr;)*) => {$(
        #[inline(always)]
        fn $fn<R: Maths>($x: R, $dy: R) -> R { $value }
        $(#[$doc])*
        pub static $static: Kernel = Kernel {
            name: stringify!($fn),
            reference: |_, launch| reference2(stringify!($fn), launch, $fn::<f64>),
            cpu: Some(|pool, launch| {
                match_float!(launch.inputs[0].dtype, T => fast2::<T>(pool, launch, $fn::<<T as Float>::Acc>),
                    else return refuse(stringify!($fn), launch));
                Ok(())
            }),
            flops: |l| $flops * l.inputs[0].view.numel() as u64,
            bound: Bound { ulps: $ulps },
        };
    )*};
}

functions! {
    /// y = -x.
    NEG neg 1 0.0 |x, c| -x;
    /// y = e^x.
    EXP exp 1 4.0 |x, c| x.exp();
    /// y = ln x; negative infinity at 0, not-a-number below.
    LOG log 1 4.0 |x, c| x.ln();
    /// y = sqrt x; not-a-number below 0.
    SQRT sqrt 1 1.0 |x, c| x.root();
    /// y = tanh x.
    TANH tanh 1 4.0 |x, c| x.tanh();
    /// y = x where x > 0, else 0. Not-a-number stays.
    RELU relu 1 0.0 |x, c| if x > R::ZERO || x != x { x } else { R::ZERO };
    /// y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    GELU gelu 10 8.0 |x, c| R::lit(0.5) * x * (R::ONE + gelu_tanh(x));
    /// y = x / (1 + e^-x).
    SILU silu 4 8.0 |x, c| x * sigmoid(x);
    /// y = x^2.
    SQUARE square 1 1.0 |x, c| x * x;
    /// y = 1 / x.
    RECIPROCAL reciprocal 1 1.0 |x, c| R::ONE / x;
    /// y = c x.
    SCALE scale 1 2.0 |x, c| x * c;
    /// y = x + c.
    ADD_SCALAR add_scalar 1 2.0 |x, c| x + c;
}

gradients! {
    /// dx of GELU from x and dy.
    GELU_GRAD gelu_gradient 20 16.0 |x, dy| gelu_grad(x, dy);
    /// dx of SiLU from x and dy.
    SILU_GRAD silu_gradient 8 16.0 |x, dy| silu_grad(x, dy);
    /// dx of ReLU from x and dy: dy where x > 0, else 0.
    RELU_GRAD relu_gradient 1 0.0 |x, dy| if x > R::ZERO { dy } else { R::ZERO };
    /// dx of tanh from y and dy: (1 - y^2) dy.
    TANH_GRAD tanh_gradient 3 4.0 |y, dy| (R::ONE - y * y) * dy;
}

fn refuse(kernel: &'static str, launch: &Launch<'_>) -> Result<(), KernelError> {
    Err(KernelError::DType { kernel, dtype: launch.inputs[0].dtype })
}

fn scalar(launch: &Launch<'_>) -> f64 {
    launch.scalars.first().map_or(0.0, |c| c.real())
}

fn fast1<T: Float>(pool: &Pool, launch: &mut Launch<'_>, f: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync + Copy) {
    let (x, c) = (&launch.inputs[0], <T::Acc as Real>::lit(scalar(launch)));
    let (walk, x) = (Walk::new([x.view]), x.buffer.as_slice::<T>());
    each_run(pool, &walk, write(&mut launch.outputs[0]), |[at], out: &mut [T], [step]| {
        vectorized(
            #[inline(always)]
            || match step {
                1 => {
                    let x = &x[at..at + out.len()];
                    out.iter_mut().zip(x).for_each(|(y, x)| *y = T::narrow(f(x.widen(), c)));
                }
                _ => out
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, y)| *y = T::narrow(f(x[at + i * step].widen(), c))),
            },
        );
    });
}

fn fast2<T: Float>(pool: &Pool, launch: &mut Launch<'_>, f: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync + Copy) {
    super::binary::zip_runs::<T, T>(pool, launch, |a, b| T::narrow(f(a.widen(), b.widen())));
}

fn reference1(
    name: &'static str,
    launch: &mut Launch<'_>,
    f: fn(f64, f64) -> f64,
) -> Result<(), KernelError> {
    let (x, c) = (&launch.inputs[0], scalar(launch));
    match_float!(x.dtype, T => {
        let (walk, from) = (Walk::new([x.view]), x.buffer.as_slice::<T>());
        let mut values = Vec::with_capacity(x.view.numel());
        walk.runs(0..walk.num_runs(), |[at]| values.extend((0..walk.run).map(|i| from[at + i * walk.steps[0]].to_f64())));
        let out = write::<T>(&mut launch.outputs[0]);
        out.iter_mut().zip(values).for_each(|(y, x)| *y = T::from_f64(f(x, c)));
    }, else return refuse(name, launch));
    Ok(())
}

fn reference2(
    name: &'static str,
    launch: &mut Launch<'_>,
    f: fn(f64, f64) -> f64,
) -> Result<(), KernelError> {
    match_float!(launch.inputs[0].dtype, T => {
        super::binary::zip_runs::<T, T>(&Pool::new(1), launch, |a, b| T::from_f64(f(a.to_f64(), b.to_f64())));
    }, else return refuse(name, launch));
    Ok(())
}
