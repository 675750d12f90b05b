//! What a kernel asks of a GPU, as a value. A launch is described before anything runs: a driver runs the description
//! on a card, and the tests run the same description on the host.

#[cfg(all(test, feature = "cuda"))]
pub(crate) mod shim;

use crate::dtype::{DType, Element};
use half::{bf16, f16};
use std::borrow::Cow;
use std::fmt::Write as _;

/// Declarations that stand before the source of every kernel: types, conversions, reductions in a block.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// How many kernels can note an index that points outside: more than look at indices.
pub const FAULTS_MAX: usize = 64;

/// What elements of a dtype are in CUDA C++; truth values are bytes.
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

/// What elements of a dtype are where bits are moved: an unsigned integer of the same size.
#[must_use]
pub fn bits_name(dtype: DType) -> &'static str {
    match dtype.size() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

/// The bits of an element with the given value, rounded as elements are, as a [`GridArg::I64`] carries them.
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

/// Dims of a walk over N operands in front of which dims of extent 1 stand, so that programs know few numbers of dims:
/// 1, 4, 8, 16, ..
#[derive(Clone, Debug)]
pub(crate) struct PaddedDims<const N: usize> {
    /// Outermost first.
    pub(crate) extents: Vec<i64>,
    /// Distances in elements, by operand.
    pub(crate) steps: [Vec<i64>; N],
}

impl<const N: usize> PaddedDims<N> {
    /// The same with the innermost extent counted in vectors, the last of which may be part of one.
    pub(crate) fn in_vectors(mut self, vector: usize) -> PaddedDims<N> {
        if let Some(inner) = self.extents.last_mut() {
            *inner = (*inner as usize).div_ceil(vector) as i64;
        }
        self
    }

    /// Extents, then the distances of one operand after the other, as a [`GridArg::I64s`] carries them.
    pub(crate) fn numbers(&self) -> Vec<i64> {
        self.extents.iter().chain(self.steps.iter().flatten()).copied().collect()
    }
}

/// Pads dims: extent and distance per operand.
pub(crate) fn padded_dims<const N: usize>(dims: &[(usize, [usize; N])]) -> PaddedDims<N> {
    let count = if dims.len() <= 1 { 1 } else { dims.len().next_power_of_two().max(4) };
    let padding = count - dims.len();
    let pad = |with: i64| std::iter::repeat_n(with, padding);
    PaddedDims {
        extents: pad(1).chain(dims.iter().map(|(extent, _)| *extent as i64)).collect(),
        steps: std::array::from_fn(|n| pad(0).chain(dims.iter().map(|(_, steps)| steps[n] as i64)).collect()),
    }
}

/// What a launch is made of: steps that run one after another, and memory that lives while they do.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchPlan {
    steps: Vec<Step>,
    scratch: Vec<usize>,
    allowance: f64,
    shared_bytes_max: u32,
}

/// One step of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Blocks of threads that run an entry of the kernel's source.
    Grid(Grid),
    /// c = a b for stacks of matrices, by the library of the device.
    Matmul(Matmul),
}

/// Blocks of threads that run one entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// The function to run.
    pub entry: &'static str,
    /// Macros under which the source is compiled: each set of them is a program of its own.
    pub defines: Vec<(&'static str, Cow<'static, str>)>,
    /// Blocks along x, y and z. None is launched if one of them is 0.
    pub blocks: [u32; 3],
    /// Threads of a block, along x; a multiple of 32 and at most 1024.
    pub threads: u32,
    /// Bytes of shared memory of a block that the launch sizes, beside what the source declares. More than 48 KiB needs the
    /// entry's attribute for the most dynamic shared memory, which the driver sets from this field.
    pub shared_bytes: u32,
    /// The arguments of the entry.
    pub args: Vec<GridArg>,
}

impl Grid {
    /// What is compiled: [`PRELUDE`], then what [`Grid::body`] gives. The macros stand behind the prelude, so that they
    /// cannot change it.
    #[must_use]
    pub fn program(&self, source: &str) -> String {
        format!("{PRELUDE}{}", self.body(source))
    }

    /// The macros, then the kernel's source.
    #[must_use]
    pub fn body(&self, source: &str) -> String {
        let mut text = String::new();
        for (name, value) in &self.defines {
            // The text of a long formula comes in several lines.
            let value = value.replace('\n', " ");
            writeln!(text, "#define {name} {value}").expect("a string takes everything");
        }
        text + source
    }
}

/// One argument of an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum GridArg {
    /// Where the first element of the view of an input lies.
    Input(usize),
    /// Where the first element of the view of an output lies.
    Output(usize),
    /// Where memory begins that [`LaunchPlan::scratch`] gave.
    Scratch(usize),
    /// Where a kernel notes an index that points outside (`Fault *` of the prelude).
    Fault,
    /// Where all kernels of a rank note such: [`FAULTS_MAX`] records side by side, all zero where nothing was noted since the host
    /// was told.
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
    /// A struct of pointers, by value: where operands begin. They are inputs, outputs and scratch memory.
    Addresses(Vec<GridArg>),
}

/// A stack of products of operands of the launch: a (g, m, k), b (g, k, n), c (g, m, n), of any strides that the kernel's
/// contract allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// The input that is a.
    pub a: usize,
    /// The input that is b.
    pub b: usize,
    /// The output that is c.
    pub c: usize,
    /// What is done to c before it is rounded, and what is formed beside it.
    pub epilogue: Epilogue,
}

/// How a product ends. With one of these, c and what lies beside it are contiguous; sums over i are over all rows of the stack.
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
    /// c_ij = (a b)_ij + residual_ij, and + bias_j.
    Add {
        /// The input (n) that is added, if there is one.
        bias: Option<usize>,
        /// The input, like c, that is added.
        residual: usize,
    },
    /// before_ij = (a b)_ij + bias_j, and c = gelu(before) in its tanh form.
    BiasGelu {
        /// The input (n) that is added.
        bias: usize,
        /// The output, like c, that keeps what goes into gelu.
        before: usize,
    },
    /// c = a b of one matrix each, and sums_j = the sum of b_ij over i.
    SumsOfB {
        /// The output (n).
        sums: usize,
    },
}

impl LaunchPlan {
    /// An empty plan for a card that gives a block so many bytes of shared memory at most.
    #[must_use]
    pub fn new(shared_bytes_max: u32) -> LaunchPlan {
        LaunchPlan { steps: Vec::new(), scratch: Vec::new(), allowance: 0.0, shared_bytes_max }
    }

    /// The bytes of shared memory that a block has at most: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6, 8.9 and 12.0.
    #[must_use]
    pub fn shared_bytes_max(&self) -> u32 {
        self.shared_bytes_max
    }

    /// Adds a grid; none without blocks.
    pub fn grid(&mut self, grid: Grid) {
        debug_assert!(grid.threads.is_multiple_of(32) && (1..=1024).contains(&grid.threads), "{grid:?}");
        if !grid.blocks.contains(&0) {
            self.steps.push(Step::Grid(grid));
        }
    }

    /// Adds a stack of products.
    pub fn product(&mut self, product: Matmul) {
        self.steps.push(Step::Matmul(product));
    }

    /// Memory with arbitrary contents that all steps of the launch share, aligned to 256 bytes.
    pub fn scratch(&mut self, bytes: usize) -> GridArg {
        self.scratch.push(bytes);
        GridArg::Scratch(self.scratch.len() - 1)
    }

    /// Lets results be off, beyond the bound of the kernel, by so many units in the last place of their own dtype at the
    /// largest magnitude of the output: what is rounded to 16 bits on the way to tensor cores.
    pub fn allow(&mut self, units: f64) {
        self.allowance = units;
    }

    /// What [`LaunchPlan::allow`] was told, or 0.
    #[must_use]
    pub fn allowance(&self) -> f64 {
        self.allowance
    }

    /// The steps, in order.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Bytes of each piece of scratch memory.
    #[must_use]
    pub fn scratch_bytes(&self) -> &[usize] {
        &self.scratch
    }
}
