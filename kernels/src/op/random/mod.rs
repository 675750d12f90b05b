//! Random numbers as functions of the global element index: independent of how a tensor is sharded, of the number of threads, and of
//! earlier draws.

mod philox;
mod normal;
mod cpu;
mod gpu;

pub use philox::{bits_at, philox, uniform_at};

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{operands, read, write};
use smallvec::SmallVec;

/// y_i = a + (b - a) u_i with u_i = [`uniform_at`] (key, stream, global index of i).
///
/// - out: y, any float and shape, contiguous
/// - scalars: Int key, Int stream, Real a, Real b; then per dim of y: Int global extent, Int start of this shard
///
/// Computed in f64 and rounded once: all dtypes agree to rounding (which may round up to b). The global index is
/// row-major over the global extents. Counted: 2 operations per element.
pub static UNIFORM: Kernel = Kernel {
    name: "uniform",
    reference: uniform,
    cpu: Some(cpu::uniform),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::uniform }),
    flops: |launch| 2 * launch.outputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 1.0 },
};

/// y_i = a + b n_i with n_i normal of mean 0 and variance 1: elements 4k, 4k+1 and elements 4k+2, 4k+3 of the global
/// index are Box-Muller pairs from the [`bits_at`] of the two elements.
///
/// - out: y, any float and shape, contiguous
/// - scalars: Int key, Int stream, Real a (mean), Real b (standard deviation); then per dim of y: Int global extent,
///   Int start of this shard
///
/// Computed in f64 and rounded once: all dtypes agree to rounding. |n_i| < 6.7. Counted: 40 operations per element.
pub static NORMAL: Kernel = Kernel {
    name: "normal",
    reference: normal,
    cpu: Some(cpu::normal),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::normal }),
    flops: |launch| 40 * launch.outputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 8.0 },
};

/// y_i = x_i / (1 - p) where [`uniform_at`] (key, stream, global index of i) >= p, else 0.
///
/// - in: x, any float and shape, contiguous
/// - out: y like x
/// - scalars: Real p, Int key, Int stream; then per dim of x: Int global extent, Int start of this shard
///
/// The backward is the same kernel on the cotangent. p = 1 gives zeros. Counted: 1 operation per element.
pub static DROPOUT: Kernel = Kernel {
    name: "dropout",
    reference: dropout,
    cpu: Some(cpu::dropout),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::dropout }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 2.0 },
};

/// The position of a shard's elements in the global tensor.
#[derive(Clone, Debug)]
struct Place {
    /// Per dim: local extent, start, global stride.
    dims: SmallVec<[(u64, u64, u64); 6]>,
    /// The length of runs that are contiguous in the global index too; runs start at multiples of it.
    run: usize,
}

impl Place {
    /// Derives the positions from the local shape and the pairs of global extent and start.
    fn new(shape: &[usize], scalars: &[Scalar]) -> Place {
        let ranges: Vec<(u64, u64)> =
            scalars.chunks_exact(2).map(|pair| (pair[0].int() as u64, pair[1].int() as u64)).collect();
        debug_assert_eq!(shape.len(), ranges.len(), "a launch has an extent and a start per dim");
        let mut dims: SmallVec<[(u64, u64, u64); 6]> = SmallVec::new();
        let (mut step, mut run, mut whole) = (1, 1, true);
        for (&local, &(extent, start)) in shape.iter().zip(&ranges).rev() {
            dims.push((local as u64, start, step));
            step *= extent;
            run *= if whole { local } else { 1 };
            whole &= local as u64 == extent;
        }
        dims.reverse();
        Place { dims, run }
    }

    /// Returns the global index of a local one, both row-major.
    fn global(&self, local: usize) -> u64 {
        let (mut rest, mut index) = (local as u64, 0);
        for &(extent, start, step) in self.dims.iter().rev() {
            index += (rest % extent + start) * step;
            rest /= extent;
        }
        index
    }
}

fn seed(scalars: &[Scalar]) -> (u64, u64) {
    (scalars[0].int() as u64, scalars[1].int() as u64)
}

fn uniform(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    let ((key, stream), place) = (seed(scalars), Place::new(&y.view.shape, &scalars[4..]));
    let (a, b) = (scalars[2].real(), scalars[3].real());
    match_float!(y.dtype, T => {
        for (i, y) in write::<T>(y).iter_mut().enumerate() {
            *y = T::from_f64(a + (b - a) * uniform_at(key, stream, place.global(i)));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: UNIFORM.name, dtype: y.dtype }))
}

fn normal(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    let ((key, stream), place) = (seed(scalars), Place::new(&y.view.shape, &scalars[4..]));
    let (a, b) = (scalars[2].real(), scalars[3].real());
    match_float!(y.dtype, T => {
        for (i, y) in write::<T>(y).iter_mut().enumerate() {
            let index = place.global(i);
            let [first, second] = [index & !1, index | 1].map(|index| bits_at(key, stream, index));
            let (even, odd) = normal::normal_pair_plain(first, second);
            *y = T::from_f64(a + b * if index % 2 == 0 { even } else { odd });
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: NORMAL.name, dtype: y.dtype }))
}

fn dropout(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (p, (key, stream)) = (scalars[0].real(), seed(&scalars[1..]));
    let place = Place::new(&x.view.shape, &scalars[3..]);
    match_float!(x.dtype, T => {
        for (i, (x, y)) in read::<T>(x).iter().zip(write::<T>(y)).enumerate() {
            let is_kept = uniform_at(key, stream, place.global(i)) >= p;
            *y = if is_kept { T::from_f64(x.to_f64() / (1.0 - p)) } else { T::default() };
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: DROPOUT.name, dtype: x.dtype }))
}

#[cfg(test)]
mod tests;
