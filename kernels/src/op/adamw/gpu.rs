//! AdamW on GPUs: one pass.

use super::{Rates, STEP};
use crate::error::KernelError;
use crate::gpu::{GridArg, Plan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{flat, float, reals};

/// The kernels of this folder.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

pub(super) fn step(launch: &Launch<'_>, plan: &mut Plan) -> Result<(), KernelError> {
    let (dtype, n) = (float(STEP.name, launch)?, launch.inputs[0].view.numel());
    let Rates { keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale } =
        Rates::<f64>::new(launch.scalars);
    let mut args = vec![GridArg::Input(0)];
    args.extend([0, 1, 2].map(GridArg::Output));
    args.push(GridArg::I64(n as i64));
    let rates = [keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale];
    args.extend(reals(dtype, &rates));
    plan.grid(flat(launch, dtype, "adamw", n, args));
    Ok(())
}
