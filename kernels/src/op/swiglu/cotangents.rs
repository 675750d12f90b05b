//! The gradient of SwiGLU on GPUs.

use super::BACKWARD;
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{flat, float};

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, n) = (float(BACKWARD.name, launch)?, launch.inputs[0].view.numel());
    let mut args: Vec<GridArg> = [0, 1, 2].map(GridArg::Input).into();
    args.extend([GridArg::Output(0), GridArg::Output(1), GridArg::I64(n as i64)]);
    plan.grid(flat(launch, dtype, "swiglu_backward", n, args));
    Ok(())
}
