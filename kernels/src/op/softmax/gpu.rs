//! Softmax on GPUs: a warp or a block per row, read once up to 8192 elements of 32 bits or 16384 of 16.

use super::{BACKWARD, FORWARD};
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{Rows, float};
use crate::op::rows::width;

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// The most threads that hold a row in registers: with more, two blocks do not fit a multiprocessor.
const HELD_THREADS_MAX: usize = 512;
const HELD_THREADS_MAX_BACKWARD: usize = 256;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(FORWARD.name, launch)?;
    gemv_row_major(
        "softmax",
        launch,
        plan,
        Rows::new(launch, dtype, width(&launch.inputs[0]), HELD_THREADS_MAX),
    );
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(BACKWARD.name, launch)?;
    let split = Rows::new(launch, dtype, width(&launch.inputs[0]), HELD_THREADS_MAX_BACKWARD);
    gemv_row_major("softmax_backward", launch, plan, split);
    Ok(())
}

fn gemv_row_major(entry: &'static str, launch: &Launch<'_>, plan: &mut LaunchPlan, split: Rows) {
    let (n, numel) = (width(&launch.inputs[0]), launch.inputs[0].view.numel());
    let rows = numel.checked_div(n).unwrap_or(0);
    let mut args: Vec<GridArg> = (0..launch.inputs.len()).map(GridArg::Input).collect();
    args.extend([GridArg::Output(0), GridArg::I64(rows as i64), GridArg::I32(n as i32)]);
    plan.grid(split.grid(entry, rows, args));
}
