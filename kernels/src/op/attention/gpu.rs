//! Attention on GPUs. 16-bit heads of up to 128 channels use tensor cores in tiles (`gpu/tile.cu`), all others plain arithmetic
//! (`gpu/plain.cu`).

use super::{ALLOWANCE, FORWARD, Problem};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::{Arg, Kernel, Launch};
use std::borrow::Cow;

/// The CUDA source of the forward: tensor cores if HEAD is defined, else plain arithmetic.
pub(super) const FORWARD_SOURCE: &str = concat!(
    include_str!("gpu/problem.cu"),
    "#ifdef HEAD\n",
    include_str!("../gpu_tensor_core.cu"),
    include_str!("gpu/tile.cu"),
    include_str!("gpu/forward.cu"),
    "#else\n",
    include_str!("gpu/plain.cu"),
    "#endif\n",
);
/// The CUDA source of the backward.
pub(super) const BACKWARD_SOURCE: &str = concat!(
    include_str!("gpu/problem.cu"),
    include_str!("gpu/deltas.cu"),
    "#ifdef HEAD\n",
    include_str!("../gpu_tensor_core.cu"),
    include_str!("gpu/tile.cu"),
    include_str!("gpu/backward.cu"),
    "#else\n",
    include_str!("gpu/plain.cu"),
    "#endif\n",
);

/// The operands of the forward, and of the backward, besides documents.
const FORWARD_OPERANDS: usize = 3;
const BACKWARD_OPERANDS: usize = 6;
/// Rows, or keys, per block of the tiled kernels.
const BLOCK: usize = 128;
/// Rows of a head are padded to a multiple of this in scratch memory: the longest step over rows, and the rows of a block of `row_deltas`.
const PADDING: usize = 64;

/// The kind of kernel of a launch.
#[derive(Clone, Copy, Debug)]
enum KernelKind {
    /// Tensor-core tiles whose rows have this many channels.
    Tiles(usize),
    /// Plain arithmetic: rows per warp, and pieces of 32 channels per row.
    Plain([usize; 2]),
}

impl KernelKind {
    /// Documents have plain kernels: their masks leave the tiles too few registers.
    fn new(dtype: DType, problem: &Problem, has_documents: bool) -> KernelKind {
        let (pieces, is_narrow) = (problem.c.div_ceil(32).max(1), dtype.size() == 2);
        match problem.c {
            // Maxima are those of scores before they are scaled.
            1..=128 if is_narrow && problem.scale > 0.0 && !has_documents => {
                KernelKind::Tiles(if pieces > 2 { 128 } else { 64 })
            }
            _ => KernelKind::Plain([(16 / pieces).clamp(1, 8), pieces]),
        }
    }

    /// Returns the rows, or keys, per block.
    fn block(self) -> usize {
        match self {
            KernelKind::Tiles(_) => BLOCK,
            KernelKind::Plain([rows, _]) => 4 * rows,
        }
    }

    /// Returns the shared memory of a block: `of_tiles` bytes for each channel of a row, and `more`.
    fn shared_bytes(self, dtype: DType, of_tiles: usize, more: usize) -> u32 {
        let bytes = match self {
            KernelKind::Tiles(head) => of_tiles * head + more,
            KernelKind::Plain([rows, _]) => (8 * rows + 33) * 32 * dtype.accumulator().size(),
        };
        bytes as u32
    }
}

/// The parameters of the launch being planned.
struct Planner<'a> {
    problem: Problem,
    dtype: DType,
    kind: KernelKind,
    defines: Vec<(&'static str, Cow<'static, str>)>,
    shape: &'a GridArg,
}

/// Returns whether rows can be read in vectors of 16 bytes: channels are contiguous, offset and other strides are multiples of 8, and rows
/// (the dims after sequences and after key heads) are so close that 32 bits count the bytes of 16 rows.
fn is_vector(arg: &Arg<'_>) -> bool {
    let (&inner, outer) = arg.view.strides.split_last().expect("heads have channels");
    let extents = &arg.view.shape;
    let apart = outer.iter().zip(extents).enumerate().all(|(d, (step, &extent))| {
        extent <= 1 || (step.is_multiple_of(8) && (d % 2 == 0 || *step < 1 << 26))
    });
    inner == 1 && apart && arg.view.offset.is_multiple_of(8) && extents[outer.len()].is_multiple_of(8)
}

/// Returns the source's `Problem`: extents, the mask, then the strides of the operands, 0 for missing ones.
fn shape(problem: &Problem, own: usize, launch: &Launch<'_>) -> GridArg {
    let Problem { t, g, r, c, s, causal, t_start, window, .. } = *problem;
    let (args, documents) = launch.inputs.split_at(own);
    let mask = match documents {
        [] => [i64::from(causal), t_start, window as i64],
        _ => {
            let (causal, window) = (launch.scalars[1].int(), launch.scalars[3].int());
            [if causal == 0 { 0 } else { 2 }, 0, if window == 0 { i64::MAX } else { window }]
        }
    };
    let mut words = [&[t, g, r, c, s].map(|n| n as i64)[..], &mask].concat();
    // q, k, v, o, lse, d_out.
    for (i, dims) in [5, 4, 4, 5, 4, 5].into_iter().enumerate() {
        match args.get(i) {
            Some(arg) => words.extend(arg.view.strides.iter().map(|&step| step as i64)),
            None => words.extend(std::iter::repeat_n(0, dims)),
        }
    }
    words.extend((0..4).map(|i| documents.get(i).map_or(0, |arg| arg.view.strides[0] as i64)));
    GridArg::I64s(words)
}

/// Returns the arguments of the entries for documents: none without documents.
fn document_args(own: usize, launch: &Launch<'_>) -> impl Iterator<Item = GridArg> {
    (own..launch.inputs.len()).map(GridArg::Input)
}

/// Returns the extra error in ulps of the outputs: [`ALLOWANCE`] in those of the operands.
fn allowance(launch: &Launch<'_>) -> f64 {
    let wide = launch.outputs[0].dtype != launch.inputs[0].dtype;
    let bits = if launch.inputs[0].dtype == DType::BF16 { 16 } else { 13 };
    if wide { ALLOWANCE * f64::from(1 << bits) } else { ALLOWANCE }
}

/// Returns a number in the accumulator.
fn real(dtype: DType, x: f64) -> GridArg {
    if dtype == DType::F64 { GridArg::F64(x) } else { GridArg::F32(x as f32) }
}

/// The query heads per key head that a program is compiled for; 0 stands for any number.
fn group(heads: usize) -> usize {
    if matches!(heads, 1 | 2 | 4 | 8) { heads } else { 0 }
}

fn defines(
    kind: KernelKind,
    problem: &Problem,
    own: usize,
    launch: &Launch<'_>,
) -> Vec<(&'static str, Cow<'static, str>)> {
    let dtype = launch.inputs[0].dtype;
    let number = |n: usize| Cow::from(n.to_string());
    let mut defines = vec![("T", type_name(dtype).into()), ("GROUP", number(group(problem.r)))];
    let is_wide = launch.outputs.first().is_some_and(|out| out.dtype != dtype);
    if is_wide {
        defines.push(("OUT", type_name(dtype.accumulator()).into()));
    }
    if launch.inputs.len() > own {
        defines.push(("DOCUMENTS", "1".into()));
    }
    match kind {
        KernelKind::Tiles(head) => {
            // lse, the fifth operand, is read without vectors.
            let vectors = launch.inputs[..own].iter().enumerate().all(|(i, arg)| i == 4 || is_vector(arg))
                && launch.outputs.iter().all(|out| out.view.offset.is_multiple_of(8));
            defines.push(("HEAD", number(head)));
            defines.push(("BRAIN", number(usize::from(dtype == DType::BF16))));
            defines.push(("VEC", number(usize::from(vectors))));
            if is_wide {
                defines.push(("OUT_IS_WIDE", "1".into()));
            }
        }
        KernelKind::Plain([rows, pieces]) => {
            defines.extend([("W", number(rows)), ("N", number(pieces))]);
        }
    }
    defines
}

impl Planner<'_> {
    /// Returns a grid for `rows` rows, or keys, of each head.
    fn grid(&self, entry: &'static str, rows: usize, threads: usize, shared_bytes: u32) -> Grid {
        self.grid_of(entry, rows.div_ceil(self.kind.block()), threads, shared_bytes)
    }

    fn grid_of(&self, entry: &'static str, blocks: usize, threads: usize, shared_bytes: u32) -> Grid {
        let blocks = [blocks, self.problem.g, self.problem.b].map(|n| n as u32);
        let (defines, args) = (self.defines.clone(), vec![self.shape.clone()]);
        Grid { entry, defines, blocks, threads: threads as u32, shared_bytes, args }
    }
}

/// The most blocks along the second and the third dim of a grid.
const BLOCKS_MAX: usize = 65_535;

/// Returns an error for more sequences or heads than a grid has blocks.
fn check_grid(kernel: &'static str, problem: &Problem) -> Result<(), KernelError> {
    let Problem { b, g, .. } = *problem;
    if b.max(g) <= BLOCKS_MAX {
        return Ok(());
    }
    let why = format!(
        "{b} sequences with {g} key heads exceed the {BLOCKS_MAX} of each that a GPU launch supports"
    );
    Err(KernelError::Device { call: kernel, why, lost_gpu: None })
}

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (args, dtype) = (launch.inputs, launch.inputs[0].dtype);
    if !dtype.is_float() {
        return Err(KernelError::DType { kernel: FORWARD.name, dtype });
    }
    let problem = Problem::new(args, FORWARD_OPERANDS, launch.scalars);
    check_grid(FORWARD.name, &problem)?;
    let kind = KernelKind::new(dtype, &problem, args.len() > FORWARD_OPERANDS);
    let shape = shape(&problem, FORWARD_OPERANDS, launch);
    let defines = defines(kind, &problem, FORWARD_OPERANDS, launch);
    let planner = Planner { problem, dtype, kind, defines, shape: &shape };
    // 128 rows of q, 64 of k and 64 of v; four totals for each of 128 threads and two bounds.
    let shared_bytes = kind.shared_bytes(dtype, 512, 2064);
    let (entry, scale) = match kind {
        KernelKind::Tiles(_) => ("forward", problem.scale * std::f64::consts::LOG2_E),
        KernelKind::Plain(_) => ("forward_plain", problem.scale),
    };
    let mut grid = planner.grid(entry, problem.t * problem.r, 128, shared_bytes);
    grid.args.extend([0, 1, 2].map(GridArg::Input));
    grid.args.extend([GridArg::Output(0), GridArg::Output(1), real(dtype, scale)]);
    grid.args.extend(document_args(FORWARD_OPERANDS, launch));
    plan.grid(grid);
    if matches!(kind, KernelKind::Tiles(_)) {
        plan.allow_extra_ulps(allowance(launch));
    }
    Ok(())
}

/// Plans the backward into three outputs, or into one joined output.
pub(super) fn backward(
    kernel: &Kernel,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    let (args, dtype) = (launch.inputs, launch.inputs[0].dtype);
    if !dtype.is_float() {
        return Err(KernelError::DType { kernel: kernel.name, dtype });
    }
    let problem = Problem::new(args, BACKWARD_OPERANDS, launch.scalars);
    if problem.c == 0 {
        return Ok(());
    }
    check_grid(kernel.name, &problem)?;
    let kind = KernelKind::new(dtype, &problem, args.len() > BACKWARD_OPERANDS);
    let shape = shape(&problem, BACKWARD_OPERANDS, launch);
    let mut defines = defines(kind, &problem, BACKWARD_OPERANDS, launch);
    let is_joined = launch.outputs.len() == 1;
    if is_joined {
        defines.push(("JOINED", "1".into()));
    }
    let [dq, dk, dv] = if is_joined { [0; 3] } else { [0, 1, 2] };
    let step = backward_rows(kind, dtype, plan.shared_bytes_max());
    if matches!(kind, KernelKind::Tiles(_)) {
        defines.push(("BACKWARD_ROWS", step.to_string().into()));
    }
    let documents: Vec<GridArg> = document_args(BACKWARD_OPERANDS, launch).collect();
    let planner = Planner { problem, dtype, kind, defines, shape: &shape };
    let rows = problem.t * problem.r;
    let padded = rows.next_multiple_of(PADDING);
    let bytes = problem.b * problem.g * padded * dtype.accumulator().size();
    let numbers = [plan.scratch(bytes), plan.scratch(bytes)];
    plan.grid(planner.deltas(&numbers, padded));
    let mut keys = planner.backward_keys(&numbers, &[dk, dv], padded, step);
    let mut queries = planner.backward_queries(&numbers, &[dq], padded);
    for grid in [&mut keys, &mut queries] {
        grid.args.extend(documents.iter().cloned());
    }
    plan.grid(keys);
    plan.grid(queries);
    if matches!(kind, KernelKind::Tiles(_)) {
        plan.allow_extra_ulps(allowance(launch));
    }
    Ok(())
}

/// Returns the rows per step of `backward_keys`: for heads of 128 channels 64 if a block has enough shared memory, else 32.
fn backward_rows(kind: KernelKind, dtype: DType, shared_bytes_max: u32) -> usize {
    match kind {
        KernelKind::Plain(_) => 0,
        KernelKind::Tiles(head) if head > 64 && backward_keys_bytes(kind, dtype, 64) <= shared_bytes_max => {
            64
        }
        KernelKind::Tiles(_) => 32,
    }
}

/// Returns the shared memory of `backward_keys`: 128 keys of k and v, two tiles of `step` rows of q and d_out, two of lse and delta.
fn backward_keys_bytes(kind: KernelKind, dtype: DType, step: usize) -> u32 {
    kind.shared_bytes(dtype, 4 * BLOCK + 8 * step, 16 * step)
}

impl Planner<'_> {
    /// Plans delta and lse of each row, in the order (b, g, t, r), into `numbers`.
    fn deltas(&self, [lse, delta]: &[GridArg; 2], padded: usize) -> Grid {
        let factor = if matches!(self.kind, KernelKind::Tiles(_)) { std::f64::consts::LOG2_E } else { 1.0 };
        let mut grid = self.grid_of("row_deltas", padded / PADDING, 128, 0);
        grid.args.extend([3, 4, 5].map(GridArg::Input));
        grid.args.extend([delta.clone(), lse.clone(), real(self.dtype, factor), GridArg::I32(padded as i32)]);
        grid
    }

    /// Adds the arguments q, k, v, d_out, the results of [`Planner::deltas`], and the outputs.
    fn operands(&self, grid: &mut Grid, numbers: &[GridArg; 2], outputs: &[usize], padded: usize) {
        grid.args.extend([0, 1, 2, 5].map(GridArg::Input));
        grid.args.extend(numbers.iter().cloned());
        grid.args.extend(outputs.iter().map(|&i| GridArg::Output(i)));
        grid.args.push(real(self.dtype, self.problem.scale));
        if matches!(self.kind, KernelKind::Tiles(_)) {
            grid.args.push(real(self.dtype, self.problem.scale * std::f64::consts::LOG2_E));
        }
        grid.args.push(GridArg::I32(padded as i32));
    }

    fn backward_keys(&self, numbers: &[GridArg; 2], outputs: &[usize], padded: usize, step: usize) -> Grid {
        let (entry, threads) = match self.kind {
            KernelKind::Tiles(64) => ("backward_keys", 128),
            KernelKind::Tiles(_) => ("backward_keys", 256),
            KernelKind::Plain(_) => ("backward_keys_plain", 128),
        };
        let shared_bytes = backward_keys_bytes(self.kind, self.dtype, step);
        let mut grid = self.grid(entry, self.problem.s, threads, shared_bytes);
        self.operands(&mut grid, numbers, outputs, padded);
        grid
    }

    fn backward_queries(&self, numbers: &[GridArg; 2], outputs: &[usize], padded: usize) -> Grid {
        // 128 rows of q and d_out, two tiles of k and v.
        let (entry, step) = match self.kind {
            KernelKind::Tiles(64) => ("backward_queries", 64),
            KernelKind::Tiles(_) => ("backward_queries", 32),
            KernelKind::Plain(_) => ("backward_queries_plain", 0),
        };
        let shared_bytes = self.kind.shared_bytes(self.dtype, 4 * BLOCK + 8 * step, 0);
        let mut grid = self.grid(entry, self.problem.t * self.problem.r, 128, shared_bytes);
        self.operands(&mut grid, numbers, outputs, padded);
        grid
    }
}
