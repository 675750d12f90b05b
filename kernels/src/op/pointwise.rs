//! What the elementwise kernels share: one loop for any strides, one plain loop that says what is right.

pub(crate) mod gpu;

use crate::cpu::{Pool, vectorized};
use crate::dtype::Element;
use crate::kernel::{Arg, ArgMut, Scalar};
use crate::op::rows::{holds, write};
use crate::op::walk::{Walk, place};

/// Elements of one task: it outlasts its hand-over, and its data fit the cache of one core.
pub(crate) const TASK: usize = 1 << 14;

/// Elements that are gathered at a time from operands that do not lie side by side.
const GATHERED: usize = 256;

/// y_i = f(x0_i, x1_i, ...) for inputs of any strides and a contiguous y.
pub(crate) fn map<const N: usize, T: Element, U: Element>(
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: impl Fn([T; N]) -> U + Sync,
) {
    update(
        pool,
        inputs,
        y,
        #[inline(always)]
        |_, x| f(x),
    );
}

/// y_i = f(y_i, (x0_i, x1_i, ...)) for inputs of any strides and a contiguous y.
pub(crate) fn update<const N: usize, T: Element, U: Element>(
    pool: &Pool,
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: impl Fn(U, [T; N]) -> U + Sync,
) {
    debug_assert!(
        inputs.iter().all(|x| holds::<T>(x.dtype) && x.view.shape == y.view.shape),
        "as the contract asks"
    );
    let memory = inputs.map(|x| x.buffer.as_slice::<T>());
    let walk = Walk::new(inputs.map(|x| x.view));
    let steps = walk.steps();
    let at_once = if steps == [1; N] { usize::MAX } else { GATHERED };
    pool.chunks(write::<U>(y), TASK, |i, y| {
        let mut done = 0;
        walk.runs(i * TASK..i * TASK + y.len(), |mut at, length| {
            for y in y[done..done + length].chunks_mut(at_once) {
                let mut gathered = [[T::default(); GATHERED]; N];
                let mut buffers = gathered.iter_mut();
                let rows = std::array::from_fn(|n| row(memory[n], at[n], steps[n], y.len(), buffers.next()));
                (0..N).for_each(|n| at[n] += y.len() * steps[n]);
                vectorized(
                    #[inline(always)]
                    || apply(rows, y, &f),
                );
            }
            done += length;
        });
    });
}

/// Elements of one operand side by side: where they lie, or gathered if they lie apart.
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

#[inline(always)]
fn apply<const N: usize, T: Element, U: Element>(rows: [&[T]; N], y: &mut [U], f: &impl Fn(U, [T; N]) -> U) {
    let rows = rows.map(|row| &row[..y.len()]);
    for (i, y) in y.iter_mut().enumerate() {
        *y = f(*y, rows.map(|x| x[i]));
    }
}

/// Cuts an output of any strides into parts: `walk` visits it (its first operand) in memory order; `task` gets the
/// part of the walk, the memory that it covers and where that begins.
pub(crate) fn scatter<const N: usize, U: Element>(
    pool: &Pool,
    walk: &Walk<N>,
    y: &mut ArgMut<'_>,
    task: impl Fn(&Walk<N>, &mut [U], usize) + Sync,
) {
    let (rows, steps) = walk.dims()[0];
    let numel = walk.numel();
    if numel == 0 {
        return;
    }
    let (start, step) = (y.view.offset, steps[0]);
    let memory = &mut y.buffer.as_mut::<U>().expect("an output buffer has one handle")[start..y.view.reach()];
    assert!(rows == 1 || memory.len() <= rows * step, "the contract asks for an output without overlap");
    let per_task = (TASK / (numel / rows)).max(1);
    pool.chunks(memory, (per_task * step).max(1), |i, memory| {
        let first = i * per_task;
        task(&walk.rows(first..rows.min(first + per_task)), memory, start + first * step);
    });
}

/// y_i = f(x0_i, x1_i, ...), element by element.
pub(crate) fn plain<const N: usize, T: Element>(
    inputs: [&Arg<'_>; N],
    y: &mut ArgMut<'_>,
    f: impl Fn([T; N]) -> T,
) {
    let memory = inputs.map(|x| x.buffer.as_slice::<T>());
    for (i, y) in write::<T>(y).iter_mut().enumerate() {
        *y = f(std::array::from_fn(|n| memory[n][place(inputs[n].view, i)]));
    }
}

/// The scalars of an elementwise kernel, 0 where there are fewer than two.
pub(crate) fn two_reals(scalars: &[Scalar]) -> [f64; 2] {
    std::array::from_fn(|i| scalars.get(i).map_or(0.0, |c| c.real()))
}

/// How many names a pattern such as `[x, dy]` holds.
pub(crate) const fn names(pattern: &str) -> usize {
    let (mut commas, mut at) = (0, 0);
    while at < pattern.len() {
        commas += (pattern.as_bytes()[at] == b',') as usize;
        at += 1;
    }
    commas + 1
}

/// A table of elementwise kernels, one a line: name, name in messages, operations an element, bound in units of the
/// last place, inputs and two scalars (0 where a launch has fewer), formula, and the formula for i64 where there is one. The
/// float formula is compiled for f32 and f64; the reference evaluates it in f64. The text of both is CUDA C++ too (see
/// [`crate::op::formula`]).
macro_rules! pointwise {
    (@integers $x:tt) => { (None, "") };
    (@integers $x:tt $integers:expr) => { (Some(|$x| $integers), stringify!($integers)) };
    ($($(#[$doc:meta])* $name:ident $text:literal $flops:literal $ulps:literal
        |$x:tt, $c:tt| $formula:expr $(, $integers:expr)?;)*) => {$(
        $(#[$doc])*
        pub static $name: Kernel = {
            const INPUTS: usize = names(stringify!($x));
            const INTEGERS: (Option<fn([i64; INPUTS]) -> i64>, &str) =
                pointwise!(@integers $x $($integers)?);
            #[inline(always)]
            fn formula<R: Maths>($x: [R; INPUTS], $c: [R; 2]) -> R {
                $formula
            }
            fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
                let (inputs, [y], scalars) = operands::<INPUTS, 1>(launch);
                let (inputs, c) = (inputs.each_ref(), two_reals(scalars));
                match (y.dtype, INTEGERS.0) {
                    (DType::I64, Some(formula)) => plain::<INPUTS, i64>(inputs, y, formula),
                    (dtype, _) => match_float!(dtype, T => plain::<INPUTS, T>(inputs, y, |x| {
                        T::from_f64(formula(x.map(Element::to_f64), c))
                    }), else return Err(KernelError::DType { kernel: $text, dtype })),
                }
                Ok(())
            }
            fn cpu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
                let (inputs, [y], scalars) = operands::<INPUTS, 1>(launch);
                let (inputs, c) = (inputs.each_ref(), two_reals(scalars));
                match (y.dtype, INTEGERS.0) {
                    (DType::I64, Some(formula)) => map::<INPUTS, i64, i64>(pool, inputs, y, formula),
                    (dtype, _) => match_float!(dtype, T => {
                        let c = c.map(<T as Float>::Acc::lit);
                        map::<INPUTS, T, T>(
                            pool,
                            inputs,
                            y,
                            #[inline(always)]
                            |x| T::narrow(formula(x.map(Float::widen), c)),
                        );
                    }, else return Err(KernelError::DType { kernel: $text, dtype })),
                }
                Ok(())
            }
            fn plan(launch: &Launch<'_>, plan: &mut Plan) -> Result<(), KernelError> {
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
                gpu: Some(Gpu { source: gpu::SOURCE, plan }),
                flops: |launch| $flops * launch.outputs[0].view.numel() as u64,
                bound: Bound { ulps: $ulps },
            }
        };
    )*};
}
pub(crate) use pointwise;
