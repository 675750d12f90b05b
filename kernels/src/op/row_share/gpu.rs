//! Values of rows on GPUs, and formulas of elements and values of their rows.

use super::no_float;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::pointwise::gpu::{Formula, rows_map};

pub(super) use crate::op::pointwise::gpu::SOURCE as FORMULA_SOURCE;
pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads of a block, as in the source.
const THREADS: usize = 256;
/// Rows that are longer than this have a block each, others a warp.
const WARP_MAX: usize = 1024;

/// c = how many elements equal y (`"0"`), or s = the sum of exp(x - m) (`"1"`).
pub(super) fn row_value(
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    exp: &'static str,
) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    if !x.dtype.is_float() {
        return no_float(if exp == "1" { super::EXP_SUM.name } else { super::TIES.name }, x.dtype);
    }
    let (rows, n) = (y.view.numel(), launch.scalars[0].int() as usize);
    let vector = 16 / x.dtype.size();
    let vector = if n.is_multiple_of(vector) && x.view.offset.is_multiple_of(vector) { vector } else { 1 };
    let threads_of_row = if n > WARP_MAX { THREADS } else { 32 };
    let blocks = rows.div_ceil(THREADS / threads_of_row);
    plan.grid(Grid {
        entry: "row_value",
        defines: vec![
            ("S", type_name(x.dtype).into()),
            ("A", type_name(y.dtype).into()),
            ("WIDTH", threads_of_row.to_string().into()),
            ("VEC", vector.to_string().into()),
            ("EXP", exp.into()),
        ],
        blocks: [u32::try_from(blocks).expect("fewer than 2^31 rows fit a device"), 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Input(1),
            GridArg::Output(0),
            GridArg::I64(rows as i64),
            GridArg::I64(n as i64),
        ],
    });
    Ok(())
}

/// A formula of x, whose last dim is a row, and of values of its row.
pub(super) fn shares(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    args: &'static str,
    text: &'static str,
) -> Result<(), KernelError> {
    let x = &launch.inputs[0];
    if !x.dtype.is_float() {
        return no_float(kernel, x.dtype);
    }
    let n = launch.scalars.first().map_or(1, |n| n.int() as usize);
    rows_map(plan, launch, n, Formula { args, scalars: "_", text });
    Ok(())
}
