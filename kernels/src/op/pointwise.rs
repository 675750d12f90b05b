//! Shared code of elementwise kernels: one fast loop for any strides, and one plain reference loop.
//!
//! A formula is compiled for f32, for f64 and, if it has an integer form, for i64; everything else (iteration, gathering, 16-bit elements,
//! which are widened before and rounded after) is compiled once for all formulas.

pub(crate) mod gpu;

use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Scalar};
use crate::match_float;
use crate::op::rows::{holds, write};
use crate::op::strided_iter::{StridedIter, element_offset};
use half::{bf16, f16};

/// Elements per task: enough to amortise the hand-over, and few enough for the cache of one core.
pub(crate) const TASK: usize = 1 << 14;

/// Elements gathered or widened at a time.
const GATHERED: usize = 256;

/// y = f(x0, x1, ...) in any accumulator type.
pub(crate) trait Formula<const N: usize>: Sync {
    /// The value at one element.
    fn at<R: Maths>(&self, x: [R; N]) -> R;
}

/// y_i = f(x0_i, x1_i, ...) for inputs of any strides and a contiguous y, all of one float dtype.
pub(crate) fn map<const N: usize>(
    kernel: &'static str,
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: &impl Formula<N>,
) -> Result<(), KernelError> {
    match y.dtype {
        DType::F64 => map_as::<N, f64, f64>(
            pool,
            inputs,
            y,
            #[inline(always)]
            |x| f.at(x),
        ),
        _ => shorts(
            kernel,
            pool,
            inputs,
            y,
            &compiled(
                #[inline(always)]
                |_, x| f.at::<f32>(x),
            ),
        )?,
    }
    Ok(())
}

/// y_i = f(y_i, x_i) for an input of any strides and a contiguous y, both of one float dtype.
pub(crate) fn update(
    kernel: &'static str,
    pool: &Pool,
    x: &Arg<'_>,
    y: &mut ArgMut<'_>,
    f: &impl Formula<2>,
) -> Result<(), KernelError> {
    match y.dtype {
        DType::F64 => update_as::<f64>(
            pool,
            x,
            y,
            #[inline(always)]
            |y, x| f.at([y, x]),
        ),
        _ => shorts(
            kernel,
            pool,
            [x],
            y,
            &compiled(
                #[inline(always)]
                |y, [x]: [f32; 1]| f.at([y, x]),
            ),
        )?,
    }
    Ok(())
}

/// y_i = f(x0_i, x1_i, ...) on elements of the accumulator type.
pub(crate) fn map_as<const N: usize, T: Element, U: Element>(
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: impl Fn([T; N]) -> U + Sync,
) {
    runs::<N, T, U>(
        pool,
        inputs,
        y,
        &compiled(
            #[inline(always)]
            |_, x| f(x),
        ),
    );
}

/// y_i = f(y_i, x_i) on elements of the accumulator type.
pub(crate) fn update_as<T: Element>(
    pool: &Pool,
    x: &Arg<'_>,
    y: &mut ArgMut<'_>,
    f: impl Fn(T, T) -> T + Sync,
) {
    runs::<1, T, T>(
        pool,
        [x],
        y,
        &compiled(
            #[inline(always)]
            |y, [x]| f(y, x),
        ),
    );
}

/// A loop over contiguous elements: rows of the inputs, and of y, which holds its old contents.
type Run<'f, const N: usize, T, U> = dyn Fn([&[T]; N], &mut [U]) + Sync + 'f;

/// A formula as a vectorized loop.
fn compiled<const N: usize, T: Element, U: Element>(
    f: impl Fn(U, [T; N]) -> U + Sync,
) -> impl Fn([&[T]; N], &mut [U]) + Sync {
    move |rows, y| {
        vectorized(
            #[inline(always)]
            || apply(rows, y, &f),
        );
    }
}

/// The most inputs that a formula has.
const INPUTS_MAX: usize = 3;

// Named rows, and one loop: the compiler then knows that all rows are as long as y, and vectorizes to the end. Code of `array::map` would
// be compiled for each of hundreds of formulas.
#[inline(always)]
fn apply<const N: usize, T: Element, U: Element>(rows: [&[T]; N], y: &mut [U], f: &impl Fn(U, [T; N]) -> U) {
    const { assert!(N >= 1 && N <= INPUTS_MAX, "a formula has one to three inputs") };
    let len = y.len();
    let [a, b, c] = [&rows[0][..len], &rows[if N > 1 { 1 } else { 0 }][..len], &rows[N - 1][..len]];
    for i in 0..len {
        let mut x = [a[i]; N];
        if N > 1 {
            x[1] = b[i];
        }
        if N > 2 {
            x[2] = c[i];
        }
        y[i] = f(y[i], x);
    }
}

/// Calls a function for runs of elements that are contiguous, or gathered.
fn runs<const N: usize, T: Element, U: Element>(
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    run: &Run<'_, N, T, U>,
) {
    debug_assert!(
        inputs.iter().all(|x| holds::<T>(x.dtype) && x.view.shape == y.view.shape),
        "as the contract asks"
    );
    let memory = inputs.map(|x| x.buffer.as_slice::<T>());
    if inputs.iter().all(|x| x.view.is_contiguous()) {
        // Nearly all operands are contiguous. Finding that out costs less than an iteration.
        return pool.chunks(write::<U>(y), TASK, |i, y| {
            run(std::array::from_fn(|n| &memory[n][inputs[n].view.offset + i * TASK..][..y.len()]), y);
        });
    }
    let iter = StridedIter::new(inputs.map(|x| x.view));
    let steps = iter.steps();
    pool.chunks(write::<U>(y), TASK, |i, y| {
        let mut buffers = (steps != [1; N]).then(|| [[T::default(); GATHERED]; N]);
        let mut done = 0;
        iter.for_each_run(i * TASK..i * TASK + y.len(), |mut at, length| {
            let y = &mut y[done..done + length];
            done += length;
            let Some(buffers) = &mut buffers else {
                return run(std::array::from_fn(|n| &memory[n][at[n]..at[n] + length]), y);
            };
            for y in y.chunks_mut(GATHERED) {
                let mut buffers = buffers.iter_mut();
                let rows = std::array::from_fn(|n| row(memory[n], at[n], steps[n], y.len(), buffers.next()));
                (0..N).for_each(|n| at[n] += y.len() * steps[n]);
                run(rows, y);
            }
        });
    });
}

/// Returns elements of one operand as a contiguous slice: in place, or gathered.
fn row<'s, T: Element>(
    memory: &'s [T],
    at: usize,
    step: usize,
    length: usize,
    buffer: Option<&'s mut [T; GATHERED]>,
) -> &'s [T] {
    match (step, buffer) {
        (0, Some(buffer)) => {
            buffer[..length].fill(memory[at]);
            &buffer[..length]
        }
        (2.., Some(buffer)) => {
            let from = memory[at..].iter().step_by(step);
            buffer[..length].iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            &buffer[..length]
        }
        _ => &memory[at..at + length],
    }
}

/// Runs of f32, or of 16-bit floats as f32.
fn shorts<const N: usize>(
    kernel: &'static str,
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    run: &Run<'_, N, f32, f32>,
) -> Result<(), KernelError> {
    match y.dtype {
        DType::F32 => runs(pool, inputs, y, run),
        DType::BF16 => runs::<N, bf16, bf16>(pool, inputs, y, &|rows, y| widened(rows, y, run)),
        DType::F16 => runs::<N, f16, f16>(pool, inputs, y, &|rows, y| widened(rows, y, run)),
        dtype => return Err(KernelError::DType { kernel, dtype }),
    }
    Ok(())
}

/// One run of 16-bit floats: widened, computed, rounded once.
fn widened<const N: usize, T: Float<Acc = f32>>(rows: [&[T]; N], y: &mut [T], run: &Run<'_, N, f32, f32>) {
    let mut wide = [[0.0; GATHERED]; N];
    let mut sums = [0.0; GATHERED];
    for (i, y) in y.chunks_mut(GATHERED).enumerate() {
        vectorized(
            #[inline(always)]
            || {
                for n in 0..N {
                    let row = &rows[n][i * GATHERED..][..y.len()];
                    wide[n].iter_mut().zip(row).for_each(|(wide, x)| *wide = x.widen());
                }
                sums.iter_mut().zip(&*y).for_each(|(sum, y)| *sum = y.widen());
            },
        );
        run(std::array::from_fn(|n| &wide[n][..y.len()]), &mut sums[..y.len()]);
        vectorized(
            #[inline(always)]
            || y.iter_mut().zip(&sums).for_each(|(y, sum)| *y = T::narrow(*sum)),
        );
    }
}

/// Splits an output of any strides into parts of at least `rows_min` rows of the outermost dim: `iter` visits it (its first operand) in
/// memory order; `task` gets the part of the iteration, the memory that it covers and the offset of that memory.
pub(crate) fn scatter<const N: usize, U: Element>(
    pool: &Pool,
    iter: &StridedIter<N>,
    y: &mut ArgMut<'_>,
    rows_min: usize,
    task: impl Fn(&StridedIter<N>, &mut [U], usize) + Sync,
) {
    let (rows, steps) = iter.dims()[0];
    let numel = iter.numel();
    if numel == 0 {
        return;
    }
    let (start, step) = (y.view.offset, steps[0]);
    let memory = &mut y.buffer.as_mut::<U>().expect("an output buffer has one handle")[start..y.view.reach()];
    assert!(rows == 1 || memory.len() <= rows * step, "the contract asks for an output without overlap");
    let per_task = (TASK / (numel / rows)).max(rows_min);
    pool.chunks(memory, (per_task * step).max(1), |i, memory| {
        let first = i * per_task;
        task(&iter.rows(first..rows.min(first + per_task)), memory, start + first * step);
    });
}

/// y_i = f(x0_i, x1_i, ...) in f64, element by element.
pub(crate) fn plain<const N: usize>(
    kernel: &'static str,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: &dyn Fn([f64; N]) -> f64,
) -> Result<(), KernelError> {
    match_float!(y.dtype, T => plain_as(inputs, y, &|x: [T; N]| {
        T::from_f64(f(std::array::from_fn(|n| x[n].to_f64())))
    }), else return Err(KernelError::DType { kernel, dtype: y.dtype }));
    Ok(())
}

/// y_i = f(x0_i, x1_i, ...) on elements of the accumulator type, element by element.
pub(crate) fn plain_as<const N: usize, T: Element, U: Element>(
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: &dyn Fn([T; N]) -> U,
) {
    let memory = inputs.map(|x| x.buffer.as_slice::<T>());
    for (i, y) in write::<U>(y).iter_mut().enumerate() {
        *y = f(std::array::from_fn(|n| memory[n][element_offset(inputs[n].view, i)]));
    }
}

/// Returns the scalars of an elementwise kernel, 0 for missing ones.
pub(crate) fn two_reals(scalars: &[Scalar]) -> [f64; 2] {
    std::array::from_fn(|i| scalars.get(i).map_or(0.0, |c| c.real()))
}

/// Returns the number of names in a pattern such as `[x, dy]`.
pub(crate) const fn names(pattern: &str) -> usize {
    let (mut commas, mut at) = (0, 0);
    while at < pattern.len() {
        commas += (pattern.as_bytes()[at] == b',') as usize;
        at += 1;
    }
    commas + 1
}

/// Defines a table of elementwise kernels, one per line: constant, kernel name, operations per element, bound in ulps,
/// inputs and two scalars (0 if a launch has fewer), formula, and optionally the formula for i64. The float formula is compiled for f32 and
/// f64; the reference evaluates it in f64. The text of both is also compiled as CUDA C++ (see [`crate::op::formula`]), and starts the doc
/// of the kernel: a line's own doc says what the formula does not. `TABLE` has all of them.
macro_rules! pointwise {
    (@integers $x:tt) => { (None, "") };
    (@integers $x:tt $integers:expr) => { (Some(|$x| $integers), stringify!($integers)) };
    (@doc_of_scalars _) => { "" };
    (@doc_of_scalars $c:tt) => { concat!(", with the scalars `", stringify!($c), "`") };
    (@doc_of_integers) => { "" };
    (@doc_of_integers $integers:expr) => { concat!(", in i64 to `", stringify!($integers), "`") };
    ($($(#[$doc:meta])* $name:ident $text:literal $flops:literal $ulps:literal
        |$x:tt, $c:tt| $formula:expr $(, $integers:expr)?;)*) => {
        /// The kernels of the table, each with the names of its inputs.
        pub(super) const TABLE: &[(&Kernel, &str)] = &[$((&$name, stringify!($x))),*];
        $(#[doc = concat!(
            "Maps `", stringify!($x), "` to `", stringify!($formula), "`",
            pointwise!(@doc_of_integers $($integers)?), pointwise!(@doc_of_scalars $c), ".",
        )]
        $(#[$doc])*
        pub static $name: Kernel = {
            const INPUTS: usize = names(stringify!($x));
            const INTEGERS: (Option<fn([i64; INPUTS]) -> i64>, &str) =
                pointwise!(@integers $x $($integers)?);
            struct Line([f64; 2]);
            impl Formula<INPUTS> for Line {
                #[inline(always)]
                fn at<R: Maths>(&self, $x: [R; INPUTS]) -> R {
                    let $c = [R::lit(self.0[0]), R::lit(self.0[1])];
                    $formula
                }
            }
            fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
                let (inputs, [y], scalars) = operands::<INPUTS, 1>(launch);
                let (inputs, line) = (inputs.each_ref(), Line(two_reals(scalars)));
                match (y.dtype, INTEGERS.0) {
                    (DType::I64, Some(formula)) => plain_as::<INPUTS, i64, i64>(inputs, y, &formula),
                    _ => plain($text, inputs, y, &|x| line.at(x))?,
                }
                Ok(())
            }
            fn cpu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
                let (inputs, [y], scalars) = operands::<INPUTS, 1>(launch);
                let (inputs, line) = (inputs.each_ref(), Line(two_reals(scalars)));
                match (y.dtype, INTEGERS.0) {
                    (DType::I64, Some(formula)) => map_as::<INPUTS, i64, i64>(pool, inputs, y, formula),
                    _ => map($text, pool, inputs, y, &line)?,
                }
                Ok(())
            }
            fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
                let dtype = launch.outputs[0].dtype;
                let [args, scalars] = [stringify!($x), stringify!($c)];
                let text = match dtype {
                    DType::I64 if INTEGERS.0.is_some() => INTEGERS.1,
                    dtype if dtype.is_float() => stringify!($formula),
                    dtype => return Err(KernelError::DType { kernel: $text, dtype }),
                };
                gpu::numbers(plan, launch, gpu::Formula { args, scalars, text });
                Ok(())
            }
            Kernel {
                name: $text,
                reference,
                cpu: Some(cpu),
                gpu: Some(GpuCode { source: gpu::SOURCE, plan }),
                flops: |launch| $flops * launch.outputs[0].view.numel() as u64,
                bytes: None,
                bound: Bound { ulps: $ulps },
            }
        };
        )*
    };
}
pub(crate) use pointwise;
