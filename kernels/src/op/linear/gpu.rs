//! Linear layers on GPUs: epilogues of cuBLASLt where it fuses them, else separate kernels.

use super::MATMUL_GELU_GRAD;
use crate::error::KernelError;
use crate::gpu::{Epilogue, Grid, GridArg, LaunchPlan, Matmul, type_name};
use crate::kernel::{Kernel, Launch};
use crate::op::gpu_rows::float;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Equals the constant in the CUDA source.
const LANES: usize = 32;
const GROUPS: usize = 8;
const ROWS: usize = 256;
/// Bytes per load of a thread if columns are contiguous.
const VECTOR_BYTES: usize = 16;

/// Plans a product with an epilogue.
pub(super) fn ended(
    kernel: &Kernel,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    if float(kernel.name, launch)?.size() == 2 {
        // The product may be rounded before the epilogue, and once more between parts of the epilogue.
        let is_one = matches!(epilogue, Epilogue::Bias { .. } | Epilogue::Add { bias: None, .. });
        plan.allow_extra_ulps(if is_one { 1.0 } else { 2.0 });
    }
    plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue });
    Ok(())
}

/// Plans a product, the gelu gradient, and sums of columns as separate kernels: the cuBLASLt epilogue took 0.67 ms where this kernel takes
/// 0.24 (H100, cuBLASLt 13.1).
pub(super) fn gelu_grad(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, c) = (float(MATMUL_GELU_GRAD.name, launch)?, launch.outputs[0].view);
    if dtype.size() == 2 {
        plan.allow_extra_ulps(2.0);
    }
    let columns = c.shape[2];
    let rows = c.shape[0] * c.shape[1];
    if columns == 0 {
        return Ok(());
    }
    let vector = VECTOR_BYTES / dtype.size();
    let is_whole = |n: usize| n.is_multiple_of(vector);
    let fits = is_whole(columns) && is_whole(c.offset) && is_whole(launch.inputs[2].view.offset);
    let vector = if fits { vector } else { 1 };
    let defines = || vec![("T", type_name(dtype).into()), ("VEC", vector.to_string().into())];
    let blocks = rows.div_ceil(ROWS);
    let parts = plan.scratch(blocks * columns * dtype.accumulator().size());
    let grid = |entry, blocks: [usize; 2], args| Grid {
        entry,
        defines: defines(),
        blocks: [blocks[0] as u32, blocks[1] as u32, 1],
        threads: (LANES * GROUPS) as u32,
        shared_bytes: 0,
        args,
    };
    if rows > 0 {
        plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue: Epilogue::Plain });
        let args = vec![
            GridArg::Output(0),
            GridArg::Input(2),
            parts.clone(),
            GridArg::I64(rows as i64),
            GridArg::I64(columns as i64),
        ];
        plan.grid(grid("gelu_bias_backward", [columns.div_ceil(LANES * vector), blocks], args));
    }
    let args = vec![parts, GridArg::Output(1), GridArg::I64(blocks as i64), GridArg::I64(columns as i64)];
    plan.grid(grid("sum_column_parts", [columns.div_ceil(LANES), 1], args));
    Ok(())
}
