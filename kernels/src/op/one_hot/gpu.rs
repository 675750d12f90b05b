//! One-hot encoding on GPUs.

use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name, bits_of};
use crate::kernel::Launch;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constants in the CUDA source.
const THREADS: usize = 256;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (index, y) = (&launch.inputs[0], &launch.outputs[0]);
    let (rows, cols) =
        (index.view.numel(), *y.view.shape.last().expect("the contract asks for a dim of columns"));
    let [v_start, v_global] = [0, 1].map(|i| GridArg::I64(launch.scalars[i].int()));
    let vector = 16 / y.dtype.size();
    let vector = if cols.is_multiple_of(vector) && y.view.offset.is_multiple_of(vector) { vector } else { 1 };
    let is_empty = cols == 0;
    let items = if is_empty { rows } else { rows * cols / vector };
    let args = if is_empty {
        vec![GridArg::Input(0), GridArg::Fault, GridArg::I64(rows as i64), v_global]
    } else {
        let extents = [rows, cols / vector].map(|n| GridArg::I64(n as i64));
        let one = GridArg::I64(bits_of(y.dtype, 1.0));
        let [rows, cols] = extents;
        vec![GridArg::Input(0), GridArg::Output(0), GridArg::Fault, rows, cols, v_start, v_global, one]
    };
    plan.grid(Grid {
        entry: if is_empty { "check" } else { "one_hot" },
        defines: vec![
            ("S", bits_name(y.dtype).into()),
            ("VEC", vector.to_string().into()),
            ("INDEX", if u32::try_from(items).is_ok() { "u32".into() } else { "u64".into() }),
        ],
        blocks: [
            u32::try_from(items.div_ceil(THREADS)).expect("fewer than 2^39 elements fit a device"),
            1,
            1,
        ],
        threads: THREADS as u32,
        shared_bytes: 0,
        args,
    });
    Ok(())
}
