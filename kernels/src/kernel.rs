//! A kernel is a value: its name, its plain reference, its fast paths and its bound.

use crate::buffer::Buffer;
use crate::cpu::Pool;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::strides::Strides;
use std::fmt;

/// One operand that a kernel reads: a typed view of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Arg<'a> {
    /// The memory.
    pub buffer: &'a Buffer,
    /// What its elements are.
    pub dtype: DType,
    /// Where they lie.
    pub view: &'a Strides,
}

impl Arg<'_> {
    /// Every element once, those that the view repeats too.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(self.view, self.dtype)
    }
}

/// One operand that a kernel writes. The buffer has a single handle.
#[derive(Debug)]
pub struct ArgMut<'a> {
    /// The memory.
    pub buffer: &'a mut Buffer,
    /// What its elements are.
    pub dtype: DType,
    /// Where they lie.
    pub view: &'a Strides,
}

/// A number passed by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real parameter (epsilon, a rate); kernels round it to their accumulator.
    Real(f64),
    /// A count, an extent, the start of a range, a seed.
    Int(i64),
}

impl Scalar {
    /// The value as f64.
    #[must_use]
    pub fn real(self) -> f64 {
        match self {
            Scalar::Real(x) => x,
            Scalar::Int(i) => i as f64,
        }
    }

    /// The value as i64.
    #[must_use]
    pub fn int(self) -> i64 {
        match self {
            Scalar::Real(x) => x as i64,
            Scalar::Int(i) => i,
        }
    }
}

/// Operands of one launch, in the order of the kernel's contract.
#[derive(Debug)]
pub struct Launch<'a> {
    /// What is read.
    pub inputs: &'a [Arg<'a>],
    /// What is written.
    pub outputs: &'a mut [ArgMut<'a>],
    /// Numbers passed by value.
    pub scalars: &'a [Scalar],
}

/// What a launch costs, whoever runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations (a multiply-add counts two).
    pub flops: u64,
    /// Bytes that must be read and written at least once.
    pub bytes: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

impl Launch<'_> {
    /// Every element of every operand once, those that a view repeats too: what is read, and what is written.
    #[must_use]
    pub fn operand_bytes(&self) -> u64 {
        self.inputs.iter().map(Arg::bytes).sum::<u64>() + self.written_bytes()
    }

    /// As [`Launch::operand_bytes`] where outputs are updated: what they hold before is read too.
    #[must_use]
    pub fn updated_bytes(&self) -> u64 {
        self.operand_bytes() + self.written_bytes()
    }

    fn written_bytes(&self) -> u64 {
        self.outputs.iter().map(|y| bytes_of(y.view, y.dtype)).sum()
    }
}

/// Every element of a view once.
fn bytes_of(view: &Strides, dtype: DType) -> u64 {
    (view.num_places() * dtype.size()) as u64
}

/// Code for the host: the plain reference ignores the pool, a fast path splits its rows over it.
pub type HostCode = fn(&Pool, &mut Launch<'_>) -> Result<(), KernelError>;

/// Code for GPUs.
#[derive(Debug)]
pub struct Gpu {
    /// CUDA C++ without includes; [`PRELUDE`](crate::gpu::PRELUDE) stands before it. Entries are `extern "C" __global__`.
    pub source: &'static str,
    /// Describes a launch. It reads dtypes, views and scalars, never contents, and gives the same plan for the same.
    pub plan: fn(&Launch<'_>, &mut LaunchPlan) -> Result<(), KernelError>,
}

/// How far a fast path may be from the reference that runs in f64: |fast - reference| is at most
/// `ulps` units in the last place of the output dtype's accumulator, measured at the scale of the output,
/// plus one rounding to the output dtype. Where that cannot hold for operands of every kind (sums of very many terms, rows far from
/// zero), the contract says what does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Units in the last place of the accumulator at the largest magnitude of the output.
    pub ulps: f64,
}

/// An operation on local memory. Its contract (operands, dtypes, formula) is the doc of the constant.
pub struct Kernel {
    /// Name in messages, traces and benches.
    pub name: &'static str,
    /// The plain loop that says what is right.
    pub reference: HostCode,
    /// The fast path on the CPU, where there is one.
    pub cpu: Option<HostCode>,
    /// The code for GPUs, where there is some.
    pub gpu: Option<Gpu>,
    /// Floating-point operations of a launch.
    pub flops: fn(&Launch<'_>) -> u64,
    /// Bytes that a launch must read and write at least once, where they are not its [`Launch::operand_bytes`]. Contents do not
    /// matter: of what an index picks, all that it could pick counts.
    pub bytes: Option<fn(&Launch<'_>) -> u64>,
    /// How far the fast path may be from the reference.
    pub bound: Bound,
}

impl Kernel {
    /// What a launch of this kernel costs.
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
