//! Sorting on GPUs: tiles in shared memory, then merged in pairs.

use super::SORT;
use crate::error::KernelError;
use crate::gpu::{GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::gpu_sort::SortPlan;
use crate::op::rows::width;

pub(super) const SOURCE: &str = concat!(include_str!("../gpu_sort.cu"), include_str!("gpu.cu"));

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (x, values) = (&launch.inputs[0], &launch.outputs[0]);
    let (n, k) = (width(x), *values.view.shape.last().expect("as for x"));
    let rows = x.view.numel() / n.max(1);
    let sorting = SortPlan { rows, n, k, is_wide: x.dtype.size() == 8 };
    if !sorting.fits() {
        return Err(KernelError::Unsupported { kernel: SORT.name, device: "cuda" });
    }
    let descending = u8::from(launch.scalars[0].int() == 1).to_string();
    let wide = u8::from(sorting.is_wide).to_string();
    let defines =
        [("S", type_name(x.dtype).into()), ("DESCENDING", descending.into()), ("WIDE", wide.into())];
    let results = [GridArg::Output(0), GridArg::Output(1)];
    sorting.plan(plan, &defines, &[GridArg::Input(0)], Some(&results));
    Ok(())
}
