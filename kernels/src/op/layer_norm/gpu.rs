//! Normalisation of rows on GPUs, with a mean (layer norm) or without (RMS norm).

use super::{BACKWARD, FORWARD};
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{Rows, float, reals};
use crate::op::rows::width;

/// The CUDA source, of layer norm and of RMS norm.
pub(in crate::op) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// Threads that hold a row in registers at most: those of the gradient hold sums for the weights too.
const HOLDING: usize = 512;
const HOLDING_BACKWARD: usize = 256;

/// Warps of a multiprocessor that the gradient's registers are meant for, with 48 KB on their way: a thread that holds more than
/// `SOME` registers of 16-bit rows and their sums needs more of them, with more than `MANY` more still, as with single elements.
const WARPS: usize = 16;
const SOME: usize = 72;
const WARPS_OF_MORE: usize = 12;
const MANY: usize = 96;
const WARPS_OF_MOST: usize = 8;
const WARPS_OF_SINGLES: usize = 8;
/// The plan if rows are not held in registers.
const WARPS_UNHELD: usize = 32;
/// Multiprocessors that all have a block at the same time, up to this many rows for each warp.
const MULTIPROCESSORS: usize = 128;
const LONGEST_RUN: usize = 64;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    forward_of(FORWARD.name, launch, plan)
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    backward_of(BACKWARD.name, launch, plan)
}

/// x, w and, with a centre, b; y, the mean if there is a centre, and rstd.
pub(in crate::op) fn forward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    let (d, rows) = (width(&launch.inputs[0]), launch.outputs[outputs - 1].view.numel());
    let split = Rows::new(launch, dtype, d, HOLDING).define("CENTRED", inputs - 2).define("BLOCKS", 2);
    let mut args: Vec<GridArg> = (0..inputs).map(GridArg::Input).collect();
    args.extend((0..outputs).map(GridArg::Output));
    args.extend([GridArg::I64(rows as i64), GridArg::I32(d as i32)]);
    args.extend(reals(dtype, &[launch.scalars[0].real()]));
    plan.grid(split.grid("normalize", rows, args));
    Ok(())
}

/// x, w, the mean if there is a centre, rstd, dy and, maybe, what is added to dx; dx, dw and, with a centre, db.
pub(in crate::op) fn backward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    // rstd stands behind as many inputs as there are outputs.
    let (d, rows) = (width(&launch.inputs[0]), launch.inputs[outputs].view.numel());
    if d == 0 {
        return Ok(());
    }
    let split = Rows::new(launch, dtype, d, HOLDING_BACKWARD);
    // A chunk of a 16-bit row is 4 registers, its sums are 8.
    let adds = inputs - outputs - 2;
    let held = split.held * (4 * (2 + adds) + 8 * (outputs - 1));
    let warps = match split.held {
        0 => WARPS_UNHELD,
        _ if !split.is_aligned => WARPS_OF_SINGLES,
        _ if dtype.size() > 2 || held <= SOME => WARPS,
        _ if held <= MANY => WARPS_OF_MORE,
        _ => WARPS_OF_MOST,
    };
    let at_once = (warps * 32 / split.block()).max(1);
    let is_wide = launch.outputs[1].dtype != dtype;
    let split = split.define("CENTRED", outputs - 2).define("BLOCKS", at_once).define("ADDS", adds);
    let split = split.define("WIDE", usize::from(is_wide));
    let blocks = MULTIPROCESSORS * at_once;
    let run = rows.div_ceil(blocks * split.of_block()).clamp(1, LONGEST_RUN);
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
