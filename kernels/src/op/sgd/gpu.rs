//! Gradient descent on GPUs: one pass.

use super::{Rates, STEP};
use crate::error::KernelError;
use crate::gpu::{GridArg, Plan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{flat, float, reals};

/// The kernels of this folder.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

pub(super) fn step(launch: &Launch<'_>, plan: &mut Plan) -> Result<(), KernelError> {
    let (dtype, n) = (float(STEP.name, launch)?, launch.inputs[0].view.numel());
    let Rates { lr, momentum, weight_decay, grad_scale, nesterov } = Rates::<f64>::new(launch.scalars);
    let mut args = vec![GridArg::Input(0), GridArg::Output(0), GridArg::Output(1), GridArg::I64(n as i64)];
    args.extend(reals(dtype, &[lr, momentum, weight_decay, grad_scale]));
    args.push(GridArg::I32(i32::from(nesterov)));
    plan.grid(flat(launch, dtype, "sgd", n, args));
    Ok(())
}
