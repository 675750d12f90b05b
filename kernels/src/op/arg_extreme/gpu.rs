//! argmax and argmin on GPUs.

use super::ARG_EXTREME;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::rows::width;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constants in the CUDA source.
const THREADS: usize = 256;
/// Longer rows have a block each, others a warp.
const WARP_MAX: usize = 1024;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let x = &launch.inputs[0];
    if !x.dtype.is_float() {
        return Err(KernelError::DType { kernel: ARG_EXTREME.name, dtype: x.dtype });
    }
    let n = width(x).max(1);
    let rows = x.view.numel() / n;
    let threads_of_row = if n > WARP_MAX { THREADS } else { 32 };
    let blocks = rows.div_ceil(THREADS / threads_of_row);
    plan.grid(Grid {
        entry: "arg_extreme",
        defines: vec![
            ("T", type_name(x.dtype).into()),
            ("LARGEST", if launch.scalars[0].int() != 0 { "1".into() } else { "0".into() }),
            ("WIDTH", threads_of_row.to_string().into()),
        ],
        blocks: [u32::try_from(blocks).expect("fewer than 2^31 rows fit a device"), 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![GridArg::Input(0), GridArg::Output(0), GridArg::I64(rows as i64), GridArg::I64(n as i64)],
    });
    Ok(())
}
