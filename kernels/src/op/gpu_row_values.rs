//! GPU plans of kernels with one value per row: reductions of rows, and formulas of elements and the values of their rows.

use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::pointwise::gpu::{Formula, rows_map};
use crate::op::rows::no_float;

pub(in crate::op) use crate::op::pointwise::gpu::SOURCE as FORMULA_SOURCE;
pub(in crate::op) const SOURCE: &str = include_str!("gpu_row_values.cu");

/// Threads of a block; equal to the constants in the CUDA source.
const THREADS: usize = 256;
/// Longer rows have a block each, others a warp.
const WARP_MAX: usize = 1024;

/// A reduction of the elements x of a row, given a value of the row.
pub(in crate::op) enum RowValue {
    /// The number of elements that equal y.
    Ties,
    /// The sum of exp(x - m).
    SumExp,
}

/// Plans a reduction of every row.
pub(in crate::op) fn row_value(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    value: RowValue,
) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    if !x.dtype.is_float() {
        return no_float(kernel, x.dtype);
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
            ("EXP", if matches!(value, RowValue::SumExp) { "1" } else { "0" }.into()),
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

/// Plans an elementwise formula of x, whose rows have n elements, and of values of its row.
pub(in crate::op) fn row_formula(
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
