//! Normalisation of rows on GPUs, with a mean (layer norm) or without (RMS norm).

use super::{BACKWARD, FORWARD};
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{Rows, float, reals};
use crate::op::rows::width;

/// The CUDA source, of layer norm and of RMS norm.
pub(in crate::op) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// The most threads per row that hold the row in registers; the backward also holds sums for the weights.
const HELD_THREADS_MAX: usize = 512;
const HELD_THREADS_MAX_BACKWARD: usize = 256;

/// Resident warps per multiprocessor for which the registers of the backward kernel are planned, with 48 KB of loads in flight. A thread
/// that holds more than `REGISTERS_FOR_16_WARPS` registers of 16-bit rows and their sums gets fewer warps, with more than
/// `REGISTERS_FOR_12_WARPS` fewer still; so do rows without vector loads.
const WARPS_16: usize = 16;
const REGISTERS_FOR_16_WARPS: usize = 72;
const WARPS_12: usize = 12;
const REGISTERS_FOR_12_WARPS: usize = 96;
const WARPS_8: usize = 8;
const WARPS_UNALIGNED: usize = 8;
/// Resident warps if rows are not held in registers.
const WARPS_NOT_HELD: usize = 32;
/// Multiprocessors to occupy at once, up to `RUN_MAX` rows per warp.
const MULTIPROCESSORS: usize = 128;
const RUN_MAX: usize = 64;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    forward_of(FORWARD.name, launch, plan)
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    backward_of(BACKWARD.name, launch, plan)
}

/// Plans the forward. Inputs: x, w, and b for layer norm; outputs: y, the mean for layer norm, rstd.
pub(in crate::op) fn forward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    let (d, rows) = (width(&launch.inputs[0]), launch.outputs[outputs - 1].view.numel());
    let split =
        Rows::new(launch, dtype, d, HELD_THREADS_MAX).define("CENTRED", inputs - 2).define("BLOCKS", 2);
    let mut args: Vec<GridArg> = (0..inputs).map(GridArg::Input).collect();
    args.extend((0..outputs).map(GridArg::Output));
    args.extend([GridArg::I64(rows as i64), GridArg::I32(d as i32)]);
    args.extend(reals(dtype, &[launch.scalars[0].real()]));
    plan.grid(split.grid("normalize", rows, args));
    Ok(())
}

/// Plans the backward. Inputs: x, w, the mean for layer norm, rstd, dy, and optionally the residual gradient r; outputs: dx, dw, and db for
/// layer norm.
pub(in crate::op) fn backward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    // The number of inputs before rstd equals the number of outputs.
    let (d, rows) = (width(&launch.inputs[0]), launch.inputs[outputs].view.numel());
    if d == 0 {
        return Ok(());
    }
    let split = Rows::new(launch, dtype, d, HELD_THREADS_MAX_BACKWARD);
    // A chunk of a 16-bit row is 4 registers, its sums are 8.
    let adds = inputs - outputs - 2;
    let held = split.held * (4 * (2 + adds) + 8 * (outputs - 1));
    let warps = match split.held {
        0 => WARPS_NOT_HELD,
        _ if !split.is_aligned => WARPS_UNALIGNED,
        _ if dtype.size() > 2 || held <= REGISTERS_FOR_16_WARPS => WARPS_16,
        _ if held <= REGISTERS_FOR_12_WARPS => WARPS_12,
        _ => WARPS_8,
    };
    let resident_blocks = (warps * 32 / split.block()).max(1);
    let is_wide = launch.outputs[1].dtype != dtype;
    let split = split.define("CENTRED", outputs - 2).define("BLOCKS", resident_blocks).define("ADDS", adds);
    let split = split.define("WIDE", usize::from(is_wide));
    let blocks = MULTIPROCESSORS * resident_blocks;
    let run = rows.div_ceil(blocks * split.of_block()).clamp(1, RUN_MAX);
    let parts = rows.div_ceil(run * split.of_block());
    let sums: Vec<GridArg> =
        (1..outputs).map(|_| plan.scratch(parts * d * dtype.accumulator().size())).collect();
    let mut args: Vec<GridArg> = (0..inputs).map(GridArg::Input).collect();
    args.push(GridArg::Output(0));
    args.extend(sums.iter().cloned());
    args.extend([GridArg::I64(rows as i64), GridArg::I32(d as i32), GridArg::I32(run as i32)]);
    plan.grid(split.other("normalize_backward", [parts, 1], split.block() as u32, args));
    let mut args: Vec<GridArg> =
        sums.into_iter().enumerate().flat_map(|(i, sums)| [sums, GridArg::Output(i + 1)]).collect();
    args.extend([GridArg::I32(d as i32), GridArg::I32(parts as i32)]);
    plan.grid(split.other("add_parts", [d.div_ceil(32), outputs - 1], 1024, args));
    Ok(())
}
