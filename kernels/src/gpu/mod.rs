//! Launch plans: the GPU launches of a kernel, as values. The CUDA back end runs a plan on a GPU; the tests run the same plan on the
//! host.

#[cfg(all(test, feature = "cuda"))]
pub(crate) mod shim;

use crate::dtype::{DType, Element};
use half::{bf16, f16};
use std::borrow::Cow;
use std::fmt::Write as _;

/// Declarations that precede the source of every kernel: types, conversions, block reductions.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// The number of fault records of a rank: one for each kernel that checks indices.
pub const FAULTS_MAX: usize = 64;

/// Returns the CUDA C++ type of a dtype; bool is a byte.
#[must_use]
pub fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "i64",
        DType::U8 | DType::Bool => "u8",
    }
}

/// Returns the unsigned integer type of the size of a dtype, for kernels that only move bits.
#[must_use]
pub fn bits_name(dtype: DType) -> &'static str {
    match dtype.size() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

/// Returns the bits of a value rounded to a dtype, as a [`GridArg::I64`].
#[must_use]
pub fn bits_of(dtype: DType, value: f64) -> i64 {
    match dtype {
        DType::F64 => value.to_bits().cast_signed(),
        DType::F32 => i64::from((value as f32).to_bits()),
        DType::BF16 => i64::from(<bf16 as Element>::from_f64(value).to_bits()),
        DType::F16 => i64::from(<f16 as Element>::from_f64(value).to_bits()),
        DType::I64 => value as i64,
        DType::U8 | DType::Bool => i64::from(value as u8),
    }
}

/// The dims of N strided operands, padded in front with dims of extent 1 to 1, 4, 8, 16, .. dims, so that few programs are compiled.
#[derive(Clone, Debug)]
pub(crate) struct PaddedDims<const N: usize> {
    /// Outermost first.
    pub(crate) extents: Vec<i64>,
    /// Strides in elements, by operand.
    pub(crate) steps: [Vec<i64>; N],
}

impl<const N: usize> PaddedDims<N> {
    /// Converts the innermost extent to a number of vectors, rounded up.
    pub(crate) fn in_vectors(mut self, vector: usize) -> PaddedDims<N> {
        if let Some(inner) = self.extents.last_mut() {
            *inner = (*inner as usize).div_ceil(vector) as i64;
        }
        self
    }

    /// Returns the extents, then the strides of each operand, for a [`GridArg::I64s`].
    pub(crate) fn numbers(&self) -> Vec<i64> {
        self.extents.iter().chain(self.steps.iter().flatten()).copied().collect()
    }
}

/// Pads dims, given as the extent and the stride of each operand.
pub(crate) fn padded_dims<const N: usize>(dims: &[(usize, [usize; N])]) -> PaddedDims<N> {
    let count = if dims.len() <= 1 { 1 } else { dims.len().next_power_of_two().max(4) };
    let padding = count - dims.len();
    let pad = |with: i64| std::iter::repeat_n(with, padding);
    PaddedDims {
        extents: pad(1).chain(dims.iter().map(|(extent, _)| *extent as i64)).collect(),
        steps: std::array::from_fn(|n| pad(0).chain(dims.iter().map(|(_, steps)| steps[n] as i64)).collect()),
    }
}

/// The plan of a launch: steps that run in order, and the scratch memory that they share.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchPlan {
    steps: Vec<Step>,
    scratch: Vec<usize>,
    extra_ulps: f64,
    shared_bytes_max: u32,
}

/// One step of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A grid of thread blocks that runs an entry of the kernel's source.
    Grid(Grid),
    /// A batched matrix product by the library of the device.
    Matmul(Matmul),
}

/// A grid launch of one entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// The `__global__` function to run.
    pub entry: &'static str,
    /// Macros for the compilation of the source; each set of values is a separate program.
    pub defines: Vec<(&'static str, Cow<'static, str>)>,
    /// Blocks along x, y and z. None is launched if one of them is 0.
    pub blocks: [u32; 3],
    /// Threads per block, along x: a multiple of 32, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory per block, in addition to the static ones. Above 48 KiB, the back end raises the attribute
    /// `MAX_DYNAMIC_SHARED_SIZE_BYTES` of the entry to this value.
    pub shared_bytes: u32,
    /// The arguments of the entry.
    pub args: Vec<GridArg>,
}

impl Grid {
    /// Returns the program to compile: [`PRELUDE`], then [`Grid::body`]. The macros follow the prelude, so that they cannot change it.
    #[must_use]
    pub fn program(&self, source: &str) -> String {
        format!("{PRELUDE}{}", self.body(source))
    }

    /// Returns the macros, then the kernel's source.
    #[must_use]
    pub fn body(&self, source: &str) -> String {
        let mut text = String::new();
        for (name, value) in &self.defines {
            // The text of a long formula has several lines.
            let value = value.replace('\n', " ");
            writeln!(text, "#define {name} {value}").expect("a string takes everything");
        }
        text + source
    }
}

/// One argument of an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum GridArg {
    /// The address of the first element of an input's view.
    Input(usize),
    /// The address of the first element of an output's view.
    Output(usize),
    /// The address of memory from [`LaunchPlan::scratch`].
    Scratch(usize),
    /// The address of the fault record of this kernel (`Fault *` of the prelude), for indices out of range.
    Fault,
    /// The address of the fault records of all kernels of a rank: [`FAULTS_MAX`] records, which are zero unless a kernel met an index out
    /// of range since the host last read them.
    Faults,
    /// `int`.
    I32(i32),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// A struct of `long long`, by value: extents and strides.
    I64s(Vec<i64>),
    /// A struct of pointers, by value: addresses of inputs, outputs and scratch memory.
    Addresses(Vec<GridArg>),
}

/// A batched matrix product of operands of the launch: c = a b with a (g, m, k), b (g, k, n), c (g, m, n), of any strides that the
/// kernel allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// The input that is a.
    pub a: usize,
    /// The input that is b.
    pub b: usize,
    /// The output that is c.
    pub c: usize,
    /// The operation on c before rounding, and its further operands.
    pub epilogue: Epilogue,
}

/// The epilogue of a product. All except `Plain` require a contiguous c and contiguous further operands; sums over i include all rows
/// of the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Epilogue {
    /// c = a b.
    #[default]
    Plain,
    /// c_ij = (a b)_ij + bias_j.
    Bias {
        /// The input (n) that is added.
        bias: usize,
    },
    /// c_ij = (a b)_ij + residual_ij, + bias_j if there is a bias.
    Add {
        /// The input (n) that is added, if any.
        bias: Option<usize>,
        /// The input, like c, that is added.
        residual: usize,
    },
    /// pre_gelu_ij = (a b)_ij + bias_j, and c = gelu(pre_gelu), in the tanh form.
    BiasGelu {
        /// The input (n) that is added.
        bias: usize,
        /// The output, like c, that saves the input of gelu.
        pre_gelu: usize,
    },
    /// c = a b without a batch, and sums_j = the sum of b_ij over i: the gradient of a bias.
    BiasGrad {
        /// The output (n).
        sums: usize,
    },
}

impl LaunchPlan {
    /// Creates an empty plan for a GPU with at most `shared_bytes_max` bytes of shared memory per block.
    #[must_use]
    pub fn new(shared_bytes_max: u32) -> LaunchPlan {
        LaunchPlan { steps: Vec::new(), scratch: Vec::new(), extra_ulps: 0.0, shared_bytes_max }
    }

    /// Returns the most bytes of shared memory per block: 227 KiB on capability 9.0, 163 on 8.0, 99 on 8.6, 8.9 and 12.0.
    #[must_use]
    pub fn shared_bytes_max(&self) -> u32 {
        self.shared_bytes_max
    }

    /// Adds a grid; does nothing if it has no blocks.
    pub fn grid(&mut self, grid: Grid) {
        debug_assert!(grid.threads.is_multiple_of(32) && (1..=1024).contains(&grid.threads), "{grid:?}");
        if !grid.blocks.contains(&0) {
            self.steps.push(Step::Grid(grid));
        }
    }

    /// Adds a batched matrix product.
    pub fn matmul(&mut self, matmul: Matmul) {
        self.steps.push(Step::Matmul(matmul));
    }

    /// Adds scratch memory that all steps share: arbitrary contents, aligned to 256 bytes. Returns the argument for its address.
    pub fn scratch(&mut self, bytes: usize) -> GridArg {
        self.scratch.push(bytes);
        GridArg::Scratch(self.scratch.len() - 1)
    }

    /// Allows an error beyond the bound of the kernel, in ulps of the output dtype at the largest magnitude of the output, for operands
    /// that are rounded to 16 bits for tensor cores.
    pub fn allow_extra_ulps(&mut self, ulps: f64) {
        self.extra_ulps = ulps;
    }

    /// Returns the ulps of [`LaunchPlan::allow_extra_ulps`], else 0.
    #[must_use]
    pub fn extra_ulps(&self) -> f64 {
        self.extra_ulps
    }

    /// Returns the steps, in order.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the bytes of each scratch allocation.
    #[must_use]
    pub fn scratch_bytes(&self) -> &[usize] {
        &self.scratch
    }
}
