//! c = a b for a stack of matrices.

use crate::cpu::Pool;
use crate::cpu::gemm::{Stack, StackMut, products};
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, Kernel, Launch};
use crate::match_float;

/// c[g] = a[g] b[g]. In: a (g, m, k), b (g, k, n), any strides, one float dtype. Out: c (g, m, n), any strides without
/// overlap, same dtype. Sums run over k in order, in the accumulator type, and are rounded once; k = 0 gives zeros.
pub static CONTRACT: Kernel = Kernel {
    name: "contract",
    reference,
    cpu: Some(fast),
    flops: |l| 2 * l.inputs[0].view.numel() as u64 * l.outputs[0].view.shape[2] as u64,
    bound: Bound { ulps: 64.0 },
};

fn dims(launch: &Launch<'_>) -> [usize; 4] {
    let (a, c) = (&launch.inputs[0].view.shape, &launch.outputs[0].view.shape);
    [c[0], c[1], c[2], a[2]]
}

fn strides(x: &[usize]) -> [usize; 3] {
    x.try_into().expect("a contraction has three dims")
}

fn memory<'a, T: Element>(x: &Arg<'a>) -> &'a [T] {
    if x.view.numel() == 0 { &[] } else { &x.buffer.as_slice::<T>()[x.view.offset..] }
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let dims = dims(launch);
    let (a, b, c) = (&launch.inputs[0], &launch.inputs[1], &mut launch.outputs[0]);
    if c.view.numel() == 0 {
        return Ok(());
    }
    match_float!(a.dtype, T => {
        let (sa, sb, sc) = (strides(&a.view.strides), strides(&b.view.strides), strides(&c.view.strides));
        let data = &mut c.buffer.as_mut::<T>().expect("an output has one handle")[c.view.offset..];
        let (a, b) = (Stack { data: memory::<T>(a), strides: sa }, Stack { data: memory::<T>(b), strides: sb });
        products(pool, dims, a, b, StackMut { data, strides: sc });
    }, else return Err(KernelError::DType { kernel: "contract", dtype: a.dtype }));
    Ok(())
}

fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let [g, m, n, k] = dims(launch);
    let (a, b, c) = (&launch.inputs[0], &launch.inputs[1], &mut launch.outputs[0]);
    let at = |s: &[usize], p: usize, i: usize, j: usize| p * s[0] + i * s[1] + j * s[2];
    match_float!(a.dtype, T => {
        let (x, y) = (memory::<T>(a), memory::<T>(b));
        let out = c.buffer.as_mut::<T>().expect("an output has one handle");
        for p in 0..g {
            for i in 0..m {
                for j in 0..n {
                    let term = |l| x[at(&a.view.strides, p, i, l)].to_f64() * y[at(&b.view.strides, p, l, j)].to_f64();
                    out[c.view.offset + at(&c.view.strides, p, i, j)] = T::from_f64((0..k).map(term).sum());
                }
            }
        }
    }, else return Err(KernelError::DType { kernel: "contract", dtype: a.dtype }));
    Ok(())
}
