//! Normalisation of rows on GPUs: with (layer norm) or without (root mean square) a centre.

use super::{BACKWARD, FORWARD};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{GridArg, Plan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{Rows, float, reals};
use crate::op::rows::width;

/// The kernels of this folder, and those of root-mean-square normalisation.
pub(in crate::op) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// Chunks that a thread holds: 4 of x alone; 4 in f32, else 2, where sums for the weights are held too.
const HELD: usize = 4;
const HELD_BACKWARD: [usize; 2] = [4, 2];

/// Runs of rows that are added up: about so many blocks where a block has a row, and of at most so many rows.
const RUNS: usize = 512;
const LONGEST_RUN: usize = 64;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut Plan) -> Result<(), KernelError> {
    forward_of(FORWARD.name, launch, plan)
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut Plan) -> Result<(), KernelError> {
    backward_of(BACKWARD.name, launch, plan)
}

/// x, w and, with a centre, b; y, the mean if there is a centre, and rstd.
pub(in crate::op) fn forward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut Plan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    let (d, rows) = (width(&launch.inputs[0]), launch.outputs[outputs - 1].view.numel());
    let split = Rows::new(launch, dtype, d, HELD).define("CENTRED", inputs - 2);
    let mut args: Vec<GridArg> = (0..inputs).map(GridArg::Input).collect();
    args.extend((0..outputs).map(GridArg::Output));
    args.extend([GridArg::I64(rows as i64), GridArg::I32(d as i32)]);
    args.extend(reals(dtype, &[launch.scalars[0].real()]));
    plan.grid(split.grid("normalize", rows, args));
    Ok(())
}

/// x, w, the mean if there is a centre, rstd, dy; dx, dw and, with a centre, db.
pub(in crate::op) fn backward_of(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut Plan,
) -> Result<(), KernelError> {
    let dtype = float(kernel, launch)?;
    let (inputs, outputs) = (launch.inputs.len(), launch.outputs.len());
    let (d, rows) = (width(&launch.inputs[0]), launch.inputs[inputs - 2].view.numel());
    if d == 0 {
        return Ok(());
    }
    let most = HELD_BACKWARD[usize::from(dtype != DType::F32)];
    let split = Rows::new(launch, dtype, d, most).define("CENTRED", outputs - 2);
    let run = (rows / (RUNS * split.of_block())).clamp(1, LONGEST_RUN);
    let parts = rows.div_ceil(run);
    let sums: Vec<GridArg> =
        (1..outputs).map(|_| plan.scratch(parts * d * dtype.accumulator().size())).collect();
    let mut args: Vec<GridArg> = (0..inputs).map(GridArg::Input).collect();
    args.push(GridArg::Output(0));
    args.extend(sums.iter().cloned());
    args.extend([GridArg::I64(rows as i64), GridArg::I32(d as i32), GridArg::I32(run as i32)]);
    plan.grid(split.grid("normalize_backward", parts, args));
    for (i, sums) in sums.into_iter().enumerate() {
        let args = vec![sums, GridArg::Output(i + 1), GridArg::I32(d as i32), GridArg::I32(parts as i32)];
        plan.grid(split.other("add_parts", d.div_ceil(32), 1024, args));
    }
    Ok(())
}
