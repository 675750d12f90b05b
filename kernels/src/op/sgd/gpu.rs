//! SGD on GPUs: one pass.

use super::STEP;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{FLAT, flat_defines, float, width};

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

pub(super) fn step(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, grad) = (float(STEP.name, launch)?, launch.inputs[0].view);
    let (n, width) = (grad.numel(), width(dtype));
    let offsets = launch.outputs.iter().map(|y| y.view.offset);
    let is_aligned = offsets.chain([n, grad.offset]).all(|x| x.is_multiple_of(width));
    plan.grid(Grid {
        entry: "sgd",
        defines: flat_defines(dtype, is_aligned),
        blocks: [n.div_ceil(FLAT * width) as u32, 1, 1],
        threads: FLAT as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Output(0),
            GridArg::Output(1),
            GridArg::I64(n as i64),
            GridArg::Input(1),
            GridArg::Input(2),
            GridArg::I32(i32::from(launch.scalars[0].int() != 0)),
        ],
    });
    Ok(())
}
