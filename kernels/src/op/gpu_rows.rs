//! How rows are shared out on GPUs: the macros and grids of sources that stand behind `gpu_rows.cu`.

use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, type_name};
use crate::kernel::{Launch, Scalar};
use std::borrow::Cow;

/// The most threads of a row: 128 registers each.
const THREADS: usize = 512;
/// Threads of a block whose warps have a row each.
const WARPS: usize = 128;
/// Threads of a block for runs of elements.
pub(crate) const FLAT: usize = 256;

/// Elements of 16 bytes.
pub(crate) fn width(dtype: DType) -> usize {
    16 / dtype.size()
}

/// Whether all operands begin at multiples of 16 bytes, in elements of `dtype`, and so do rows of n.
fn is_aligned(launch: &Launch<'_>, dtype: DType, n: usize) -> bool {
    let views = launch.inputs.iter().map(|arg| arg.view).chain(launch.outputs.iter().map(|arg| arg.view));
    n.is_multiple_of(width(dtype)) && views.into_iter().all(|v| v.offset.is_multiple_of(width(dtype)))
}

/// Numbers in the accumulator, rounded once.
pub(crate) fn reals(dtype: DType, numbers: &[f64]) -> Vec<GridArg> {
    let one = |&x: &f64| if dtype == DType::F64 { GridArg::F64(x) } else { GridArg::F32(x as f32) };
    numbers.iter().map(one).collect()
}

/// The dtype of the first input if it is a float.
pub(crate) fn float(kernel: &'static str, launch: &Launch<'_>) -> Result<DType, KernelError> {
    let dtype = launch.inputs[0].dtype;
    if dtype.is_float() { Ok(dtype) } else { Err(KernelError::DType { kernel, dtype }) }
}

/// Whole scalars of a launch.
pub(crate) fn ints(scalars: &[Scalar]) -> Vec<GridArg> {
    scalars.iter().map(|s| GridArg::I64(s.int())).collect()
}

/// How rows of one length are done.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    /// Threads of a row.
    threads: usize,
    /// Their macros.
    defines: Vec<(&'static str, Cow<'static, str>)>,
}

impl Rows {
    /// Rows of n elements of which a thread can hold so many chunks of 16 bytes in registers; rows that are longer than
    /// that are read anew in each pass. Threads and chunks are functions of the dtype and n.
    pub(crate) fn new(launch: &Launch<'_>, dtype: DType, n: usize, most_held: usize) -> Rows {
        let chunks = n.div_ceil(width(dtype)).max(1);
        // Two chunks of 16-bit numbers a thread, and four of wider ones, where there are threads enough.
        let each = if dtype.size() == 2 { 2 } else { 4 };
        let threads = chunks.div_ceil(each).next_power_of_two().clamp(32, THREADS);
        let held = Some(chunks.div_ceil(threads)).filter(|&held| held <= most_held).unwrap_or(0);
        let mut rows = Rows { threads, defines: defines(dtype, is_aligned(launch, dtype, n)) };
        let numbers = [("THREADS", threads), ("HELD", held), ("BLOCK", rows.block())];
        rows.defines.extend(numbers.map(|(name, x)| (name, x.to_string().into())));
        rows
    }

    /// Adds a macro.
    pub(crate) fn define(mut self, name: &'static str, value: usize) -> Rows {
        self.defines.push((name, value.to_string().into()));
        self
    }

    fn block(&self) -> usize {
        if self.threads == 32 { WARPS } else { self.threads }
    }

    /// Rows of a block.
    pub(crate) fn of_block(&self) -> usize {
        self.block() / self.threads
    }

    /// A grid for so many rows.
    pub(crate) fn grid(&self, entry: &'static str, rows: usize, args: Vec<GridArg>) -> Grid {
        let (blocks, defines) = ([rows.div_ceil(self.of_block()) as u32, 1, 1], self.defines.clone());
        Grid { entry, defines, blocks, threads: self.block() as u32, shared_bytes: 0, args }
    }

    /// A grid of another entry of the same program.
    pub(crate) fn other(&self, entry: &'static str, blocks: usize, threads: u32, args: Vec<GridArg>) -> Grid {
        let (blocks, defines) = ([blocks as u32, 1, 1], self.defines.clone());
        Grid { entry, defines, blocks, threads, shared_bytes: 0, args }
    }
}

fn defines(dtype: DType, aligned: bool) -> Vec<(&'static str, Cow<'static, str>)> {
    vec![("T", type_name(dtype).into()), ("ALIGNED", usize::from(aligned).to_string().into())]
}

/// The macros of a program for runs of elements, all of which begin and end at multiples of 16 bytes if they are aligned.
pub(crate) fn flat_defines(dtype: DType, is_aligned: bool) -> Vec<(&'static str, Cow<'static, str>)> {
    let mut defines = defines(dtype, is_aligned);
    defines.extend([("THREADS", "256".into()), ("HELD", "0".into()), ("BLOCK", "256".into())]);
    defines
}

/// A grid in which each thread has 16 bytes' worth of a run of n elements.
pub(crate) fn flat(
    launch: &Launch<'_>,
    dtype: DType,
    entry: &'static str,
    n: usize,
    args: Vec<GridArg>,
) -> Grid {
    let defines = flat_defines(dtype, is_aligned(launch, dtype, n));
    let blocks = [n.div_ceil(FLAT * width(dtype)) as u32, 1, 1];
    Grid { entry, defines, blocks, threads: FLAT as u32, shared_bytes: 0, args }
}
