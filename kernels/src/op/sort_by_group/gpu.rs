//! Sort by group on GPUs: a stable sort of rows by group, then a search for the starts.

use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_sort::SortPlan;

pub(super) const SOURCE: &str = concat!(include_str!("../gpu_sort.cu"), include_str!("gpu.cu"));

/// Equals the constant in the CUDA source.
const THREADS: usize = 256;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (n, v) = (launch.inputs[0].view.numel(), launch.outputs[3].view.numel() - 1);
    let sorting = SortPlan { rows: 1, n, k: n, is_wide: false };
    assert!(sorting.fits() && u32::try_from(v).is_ok(), "groups and rows are counted in 32 bits");
    let mut numbers = vec![n as i64, v as i64];
    numbers.extend(launch.scalars.iter().map(|s| s.int()));
    let numbers = GridArg::I64s(numbers);
    let defines = [("WIDE", "0".into())];
    let keys = [GridArg::Input(0), GridArg::Fault, numbers.clone()];
    sorting.plan(plan, &defines, &keys, Some(&[0, 1, 2].map(GridArg::Output)));
    plan.grid(Grid {
        entry: "find_starts",
        defines: defines.to_vec(),
        blocks: [(v + 1).div_ceil(THREADS) as u32, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![GridArg::Input(0), GridArg::Output(0), GridArg::Output(3), numbers],
    });
    Ok(())
}
