//! Batched matrix products on GPUs: by the device's library; sums over k = 0 are filled with zeros.

use super::{BATCHED_MATMUL, strides};
use crate::error::KernelError;
use crate::gpu::{Epilogue, Grid, GridArg, LaunchPlan, Matmul, type_name};
use crate::kernel::Launch;
use crate::op::gpu_rows::float;

/// The CUDA source.
pub(super) const SOURCE: &str = include_str!("gpu.cu");

pub(super) fn batched_matmul(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, c) = (float(BATCHED_MATMUL.name, launch)?, launch.outputs[0].view);
    let count = c.numel();
    if count == 0 {
        return Ok(());
    }
    if launch.inputs[0].view.shape[2] > 0 {
        plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue: Epilogue::Plain });
        return Ok(());
    }
    let [g_step, m_step, n_step] = strides(c);
    let layout = [c.shape[1], c.shape[2], g_step, m_step, n_step].map(|x| x as i64);
    plan.grid(Grid {
        entry: "zeros",
        defines: vec![("T", type_name(dtype).into())],
        blocks: [count.div_ceil(256) as u32, 1, 1],
        threads: 256,
        shared_bytes: 0,
        args: vec![GridArg::Output(0), GridArg::I64s(layout.into()), GridArg::I64(count as i64)],
    });
    Ok(())
}
