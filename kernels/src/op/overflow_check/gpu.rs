//! Control word and overflow check on GPUs: a few numbers, by one thread block.

use crate::error::KernelError;
use crate::gpu::{FAULTS_MAX, Grid, GridArg, LaunchPlan};
use crate::kernel::Launch;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Equals the constant in the CUDA source.
const THREADS: u32 = 256;

pub(super) fn control_word(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let [num_sums, num_extras] = [0, 1].map(|i| launch.inputs[i].view.numel() as i64);
    let [num_groups, group_len] = [2, 3].map(|i| launch.scalars[i].int());
    let num_terms = num_sums - num_groups * group_len;
    let args = vec![
        GridArg::Input(0),
        GridArg::Input(1),
        GridArg::Output(0),
        GridArg::I64s(vec![launch.scalars[0].int(), num_terms, num_extras, num_groups, group_len]),
        GridArg::F64(launch.scalars[1].real()),
        GridArg::Faults,
        GridArg::I32(FAULTS_MAX as i32),
    ];
    plan.grid(block("control_word", args));
    Ok(())
}

pub(super) fn overflow_check(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let len = launch.inputs[0].view.numel() as i64;
    let [checked, position] = [0, 1].map(|i| launch.scalars[i].int());
    let places = GridArg::I64s(vec![len, checked, position]);
    plan.grid(block(
        "overflow_check",
        vec![GridArg::Input(0), GridArg::Input(1), GridArg::Output(0), places],
    ));
    Ok(())
}

fn block(entry: &'static str, args: Vec<GridArg>) -> Grid {
    Grid { entry, defines: Vec::new(), blocks: [1; 3], threads: THREADS, shared_bytes: 0, args }
}
