//! Sums of squares of many operands on GPUs: one launch over all of them, one that combines the results of its thread blocks.

use super::SUM_SQUARES_MANY;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;

pub(super) const SOURCE: &str = include_str!("squares.cu");

/// Operands per launch: each takes three words of kernel arguments, of which 4096 bytes are allowed.
const COUNT: usize = 160;
/// Equals the constant in the CUDA source.
const THREADS: usize = 256;
/// Elements per thread block: a power of two of blocks of 256, and so a branch of the tree.
const BRANCH: usize = 1 << 14;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let Some(first) = launch.inputs.first() else { return Ok(()) };
    if !first.dtype.is_float() {
        return Err(KernelError::DType { kernel: SUM_SQUARES_MANY.name, dtype: first.dtype });
    }
    let mut done = 0;
    while done < launch.inputs.len() {
        let count = COUNT.min(launch.inputs.len() - done);
        many(launch, plan, done, count);
        done += count;
    }
    Ok(())
}

/// Plans `count` operands from number `from` on. Unused table entries repeat the first.
fn many(launch: &Launch<'_>, plan: &mut LaunchPlan, from: usize, count: usize) {
    let sizes = launch.inputs[from..from + count].iter().map(|x| x.view.numel());
    // An operand without elements has a thread block too, which stores 0.
    let mut firsts = vec![0];
    sizes.clone().for_each(|n| firsts.push(firsts[firsts.len() - 1] + n.div_ceil(BRANCH).max(1) as i64));
    let blocks = firsts[count] as usize;
    let parts = plan.scratch(blocks * DType::F64.size());
    let padded = |mut list: Vec<i64>, len: usize| {
        list.resize(len, list[0]);
        list
    };
    let tables = [firsts[..count].to_vec(), sizes.map(|n| n as i64).collect()];
    let operands = (0..COUNT).map(|i| GridArg::Input(from + if i < count { i } else { 0 }));
    let args = vec![
        GridArg::Addresses(operands.collect()),
        GridArg::I64s(tables.map(|list| padded(list, COUNT)).concat()),
        parts.clone(),
        GridArg::I32(count as i32),
    ];
    grid(plan, launch, "squares", blocks, args);
    let args =
        vec![parts, GridArg::Output(0), GridArg::I64s(padded(firsts, COUNT + 1)), GridArg::I64(from as i64)];
    grid(plan, launch, "join_squares", count, args);
}

fn grid(plan: &mut LaunchPlan, launch: &Launch<'_>, entry: &'static str, blocks: usize, args: Vec<GridArg>) {
    let blocks = u32::try_from(blocks).expect("fewer than 2^45 elements fit a device");
    let defines = vec![("S", type_name(launch.inputs[0].dtype).into()), ("COUNT", COUNT.to_string().into())];
    plan.grid(Grid {
        entry,
        defines,
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args,
    });
}
