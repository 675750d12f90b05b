//! The terms of a cross-entropy on GPUs: one block per row, one pass.

use super::{BACKWARD, FORWARD};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{Rows, float, ints};
use crate::op::rows::{row_len, width};

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

pub(super) fn terms(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    float(FORWARD.name, launch)?;
    let (z, rows) = (&launch.inputs[0], launch.inputs[1].view.numel());
    gemv_row_major("cross_entropy", launch, plan, (z.dtype, width(z), rows));
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (z, rows) = (&launch.outputs[0], launch.inputs[0].view.numel());
    if !z.dtype.is_float() {
        return Err(KernelError::DType { kernel: BACKWARD.name, dtype: z.dtype });
    }
    gemv_row_major("cross_entropy_backward", launch, plan, (z.dtype, row_len(z.view), rows));
    Ok(())
}

fn gemv_row_major(
    entry: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    (dtype, n, rows): (DType, usize, usize),
) {
    let mut args: Vec<GridArg> = (0..launch.inputs.len()).map(GridArg::Input).collect();
    args.extend((0..launch.outputs.len()).map(GridArg::Output));
    args.extend([GridArg::Fault, GridArg::I64(rows as i64), GridArg::I32(n as i32)]);
    args.extend(ints(launch.scalars));
    plan.grid(Rows::new(launch, dtype, n, 0).grid(entry, rows, args));
}
