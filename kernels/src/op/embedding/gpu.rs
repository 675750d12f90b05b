//! Embedding on GPUs: gather and scatter-add along dim v of a table (1, v, d).

pub(super) use crate::op::index::gpu::{GATHER_SOURCE, SCATTER_ADD_SOURCE};

use super::{BACKWARD, FORWARD};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Arg, Launch};
use crate::op::index::gpu::IndexLaunch;
use crate::strides::Strides;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (table, index) = (&launch.inputs[0], &launch.inputs[1]);
    let picked = launch.outputs[0].view;
    rows(launch, FORWARD.name, index, (table.view, picked), table.dtype)?.gather(plan, 0, 1);
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (index, dy) = (&launch.inputs[0], &launch.inputs[1]);
    let table = launch.outputs[0].view;
    rows(launch, BACKWARD.name, index, (table, dy.view), dy.dtype)?.scatter_add(plan, 0, 1);
    Ok(())
}

fn rows(
    launch: &Launch<'_>,
    kernel: &'static str,
    index: &Arg<'_>,
    (table, picked): (&Strides, &Strides),
    dtype: DType,
) -> Result<IndexLaunch, KernelError> {
    if !dtype.is_float() {
        return Err(KernelError::DType { kernel, dtype });
    }
    Ok(IndexLaunch {
        dtype,
        extents: [1, index.view.numel(), table.shape[0], table.shape[1]],
        is_shared: true,
        starts: [launch.scalars[0].int(), launch.scalars[1].int()],
        offsets: [table.offset, picked.offset],
    })
}
