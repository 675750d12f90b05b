//! Distribution of rows over threads on GPUs: macros and grids for the sources that include `gpu_rows.cu`.

use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::{Launch, Scalar};
use crate::op::rows;
use std::borrow::Cow;

/// The most threads per row.
const THREADS: usize = 512;
/// The most chunks of 16 bytes that a thread holds of each operand: enough loads are in flight then.
const HELD: usize = 4;
/// Threads per block whose warps have a row each.
const WARPS: usize = 128;
/// Threads per block for flat runs of elements.
pub(crate) const FLAT: usize = 256;

/// Returns the number of elements in a chunk of 16 bytes.
pub(crate) fn width(dtype: DType) -> usize {
    16 / dtype.size()
}

/// Returns whether all operands, and rows of n, are aligned to 16 bytes, in elements of `dtype`.
fn is_aligned(launch: &Launch<'_>, dtype: DType, n: usize) -> bool {
    let views = launch.inputs.iter().map(|arg| arg.view).chain(launch.outputs.iter().map(|arg| arg.view));
    n.is_multiple_of(width(dtype)) && views.into_iter().all(|v| v.offset.is_multiple_of(width(dtype)))
}

/// Returns numbers in the accumulator, rounded once.
pub(crate) fn reals(dtype: DType, numbers: &[f64]) -> Vec<GridArg> {
    let one = |&x: &f64| if dtype == DType::F64 { GridArg::F64(x) } else { GridArg::F32(x as f32) };
    numbers.iter().map(one).collect()
}

/// Returns the dtype of the first input if it is a float.
pub(crate) fn float(kernel: &'static str, launch: &Launch<'_>) -> Result<DType, KernelError> {
    let dtype = launch.inputs[0].dtype;
    if dtype.is_float() { Ok(dtype) } else { Err(KernelError::DType { kernel, dtype }) }
}

/// Returns the integer scalars of a launch.
pub(crate) fn ints(scalars: &[Scalar]) -> Vec<GridArg> {
    scalars.iter().map(|s| GridArg::I64(s.int())).collect()
}

/// How rows of one length are distributed.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    /// Threads per row.
    threads: usize,
    /// Chunks of 16 bytes that a thread holds in registers; 0: rows are read again in each pass.
    pub(crate) held: usize,
    /// Whether chunks are aligned, so that they are loaded as vectors.
    pub(crate) is_aligned: bool,
    /// The macros of the source.
    defines: Vec<(&'static str, Cow<'static, str>)>,
}

impl Rows {
    /// Distributes rows of n elements. Rows are held in registers if at most `held_threads_max` threads suffice; longer rows are read
    /// again in each pass. Threads and chunks depend only on the dtype and n.
    pub(crate) fn new(launch: &Launch<'_>, dtype: DType, n: usize, held_threads_max: usize) -> Rows {
        let chunks = n.div_ceil(width(dtype)).max(1);
        let threads = chunks.div_ceil(HELD).next_multiple_of(32).min(THREADS);
        let held = chunks.div_ceil(threads);
        let held = if threads <= held_threads_max && held <= HELD { held } else { 0 };
        let is_aligned = is_aligned(launch, dtype, n);
        let mut rows = Rows { threads, held, is_aligned, defines: defines(dtype, is_aligned) };
        let numbers = [("THREADS", threads), ("HELD", held), ("BLOCK", rows.block())];
        rows.defines.extend(numbers.map(|(name, x)| (name, x.to_string().into())));
        rows
    }

    /// Adds a macro.
    pub(crate) fn define(mut self, name: &'static str, value: usize) -> Rows {
        self.defines.push((name, value.to_string().into()));
        self
    }

    /// Returns the threads per block.
    pub(crate) fn block(&self) -> usize {
        if self.threads == 32 { WARPS } else { self.threads }
    }

    /// Returns the rows per block.
    pub(crate) fn of_block(&self) -> usize {
        self.block() / self.threads
    }

    /// Returns a grid for `rows` rows.
    pub(crate) fn grid(&self, entry: &'static str, rows: usize, args: Vec<GridArg>) -> Grid {
        let (blocks, defines) = ([rows.div_ceil(self.of_block()) as u32, 1, 1], self.defines.clone());
        Grid { entry, defines, blocks, threads: self.block() as u32, shared_bytes: 0, args }
    }

    /// Returns a grid of another entry point of the same program.
    pub(crate) fn other(
        &self,
        entry: &'static str,
        blocks: [usize; 2],
        threads: u32,
        args: Vec<GridArg>,
    ) -> Grid {
        let (blocks, defines) = ([blocks[0] as u32, blocks[1] as u32, 1], self.defines.clone());
        Grid { entry, defines, blocks, threads, shared_bytes: 0, args }
    }
}

/// Plans a kernel from x to y along rows of x, with the source's entry point of its name: a row of at most `warp_max` elements has a warp,
/// a longer one a block of 256 threads, as many as in the source. Macros: T, storage type; `flag`, whether the first scalar is not 0;
/// WIDTH, threads per row.
pub(crate) fn plan_along_rows(
    kernel: &'static str,
    flag: &'static str,
    warp_max: usize,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    const THREADS: usize = 256;
    let dtype = float(kernel, launch)?;
    let n = rows::width(&launch.inputs[0]).max(1);
    let rows = launch.inputs[0].view.numel() / n;
    let threads_of_row = if n > warp_max { THREADS } else { 32 };
    let blocks = rows.div_ceil(THREADS / threads_of_row);
    plan.grid(Grid {
        entry: kernel,
        defines: vec![
            ("T", type_name(dtype).into()),
            (flag, u8::from(launch.scalars[0].int() != 0).to_string().into()),
            ("WIDTH", threads_of_row.to_string().into()),
        ],
        blocks: [u32::try_from(blocks).expect("fewer than 2^31 rows fit a device"), 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![GridArg::Input(0), GridArg::Output(0), GridArg::I64(rows as i64), GridArg::I64(n as i64)],
    });
    Ok(())
}

fn defines(dtype: DType, aligned: bool) -> Vec<(&'static str, Cow<'static, str>)> {
    vec![("T", type_name(dtype).into()), ("ALIGNED", usize::from(aligned).to_string().into())]
}

/// Returns the macros of a program for flat runs of elements, which all begin and end at multiples of 16 bytes if aligned.
pub(crate) fn flat_defines(dtype: DType, is_aligned: bool) -> Vec<(&'static str, Cow<'static, str>)> {
    let mut defines = defines(dtype, is_aligned);
    defines.extend([("THREADS", "256".into()), ("HELD", "0".into()), ("BLOCK", "256".into())]);
    defines
}

/// Returns a grid in which each thread has 16 bytes of a run of n elements.
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
