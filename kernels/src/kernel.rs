//! A kernel as a value: its name, reference implementation, fast paths and error bound.

use crate::buffer::Buffer;
use crate::cost::Cost;
use crate::cpu::Pool;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::strides::Strides;
use std::fmt;

/// An input of a launch: a typed view of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Arg<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// The dtype of its elements.
    pub dtype: DType,
    /// The view of the buffer.
    pub view: &'a Strides,
}

impl Arg<'_> {
    /// Returns the bytes of the view, counting repeated elements once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(self.view, self.dtype)
    }
}

/// An output of a launch. The buffer has exactly one handle.
#[derive(Debug)]
pub struct ArgMut<'a> {
    /// The buffer.
    pub buffer: &'a mut Buffer,
    /// The dtype of its elements.
    pub dtype: DType,
    /// The view of the buffer.
    pub view: &'a Strides,
}

/// A scalar argument, passed by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real parameter (epsilon, a learning rate); kernels round it to their accumulator type.
    Real(f64),
    /// A count, an extent, the start of a range, a seed.
    Int(i64),
}

impl Scalar {
    /// Returns the value as f64.
    #[must_use]
    pub fn real(self) -> f64 {
        match self {
            Scalar::Real(x) => x,
            Scalar::Int(i) => i as f64,
        }
    }

    /// Returns the value as i64.
    #[must_use]
    pub fn int(self) -> i64 {
        match self {
            Scalar::Real(x) => x as i64,
            Scalar::Int(i) => i,
        }
    }
}

/// The operands of one launch, in the order of the kernel's contract.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The operands that the kernel reads.
    pub inputs: &'a [Arg<'a>],
    /// The operands that the kernel writes.
    pub outputs: &'a mut [ArgMut<'a>],
    /// The scalar arguments.
    pub scalars: &'a [Scalar],
}

impl Launch<'_> {
    /// Returns the bytes of all operands, read and written, counting repeated elements once.
    #[must_use]
    pub fn operand_bytes(&self) -> u64 {
        self.inputs.iter().map(Arg::bytes).sum::<u64>() + self.written_bytes()
    }

    /// Returns [`Launch::operand_bytes`] for outputs that are updated in place: their old contents are read too.
    #[must_use]
    pub fn updated_bytes(&self) -> u64 {
        self.operand_bytes() + self.written_bytes()
    }

    fn written_bytes(&self) -> u64 {
        self.outputs.iter().map(|y| bytes_of(y.view, y.dtype)).sum()
    }
}

/// Returns the bytes of a view, counting repeated elements once.
fn bytes_of(view: &Strides, dtype: DType) -> u64 {
    (view.num_distinct() * dtype.size()) as u64
}

/// A kernel implementation on the CPU: a reference ignores the pool, a fast path splits its work over the pool's threads.
pub type CpuKernelFn = fn(&Pool, &mut Launch<'_>) -> Result<(), KernelError>;

/// A kernel implementation for GPUs.
#[derive(Debug)]
pub struct GpuCode {
    /// CUDA C++ without includes, compiled after [`PRELUDE`](crate::gpu::PRELUDE). Entry points are `extern "C" __global__`.
    pub source: &'static str,
    /// Plans a launch from dtypes, views and scalars, never from contents; equal launches get equal plans.
    pub plan: fn(&Launch<'_>, &mut LaunchPlan) -> Result<(), KernelError>,
}

/// The error bound of a fast path against the reference in f64: |fast - reference| is at most
/// `ulps` ulps of the output dtype's accumulator, measured at the scale of the output,
/// plus one rounding to the output dtype. Where that cannot hold for operands of every kind (sums of very many terms, rows far from
/// zero), the contract says what does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Units in the last place of the accumulator at the largest magnitude of the output.
    pub ulps: f64,
}

/// An operation on local memory. Its contract (operands, dtypes, formula) is the doc of the constant.
pub struct Kernel {
    /// The name in messages, traces and benchmarks.
    pub name: &'static str,
    /// The reference: a plain loop that defines the result.
    pub reference: CpuKernelFn,
    /// The fast path on the CPU, if any.
    pub cpu: Option<CpuKernelFn>,
    /// The implementation for GPUs, if any.
    pub gpu: Option<GpuCode>,
    /// Floating-point operations of a launch.
    pub flops: fn(&Launch<'_>) -> u64,
    /// Bytes that a launch must read and write at least once, if not its [`Launch::operand_bytes`]. Independent of contents:
    /// for an index, all elements that it could pick count.
    pub bytes: Option<fn(&Launch<'_>) -> u64>,
    /// The error bound of the fast paths.
    pub bound: Bound,
}

impl Kernel {
    /// Returns the cost of a launch.
    #[must_use]
    pub fn cost(&self, launch: &Launch<'_>) -> Cost {
        let bytes = self.bytes.map_or_else(|| launch.operand_bytes(), |bytes| bytes(launch));
        Cost { flops: (self.flops)(launch), bytes }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.name)
    }
}
