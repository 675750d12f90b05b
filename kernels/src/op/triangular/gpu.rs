//! triu and tril on GPUs.

use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name};
use crate::kernel::Launch;
use crate::op::rows::width;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constants in the CUDA source.
const THREADS: usize = 256;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    let (cols, rows) = (width(x), x.view.shape[x.view.ndim() - 2]);
    let [upper, d, row_start, col_start] = [0, 1, 2, 3].map(|i| launch.scalars[i].int());
    let vector = 16 / x.dtype.size();
    let fits = [cols, x.view.offset, y.view.offset].iter().all(|n| n.is_multiple_of(vector));
    let vector = if fits { vector } else { 1 };
    let items = x.view.numel() / vector;
    let [numel, rows, cols] = [items, rows, cols / vector].map(|n| GridArg::I64(n as i64));
    plan.grid(Grid {
        entry: "triangle",
        defines: vec![
            ("S", bits_name(x.dtype).into()),
            ("VEC", vector.to_string().into()),
            ("UPPER", if upper == 1 { "1".into() } else { "0".into() }),
            ("INDEX", if u32::try_from(items).is_ok() { "u32".into() } else { "u64".into() }),
        ],
        blocks: [
            u32::try_from(items.div_ceil(THREADS)).expect("fewer than 2^39 elements fit a device"),
            1,
            1,
        ],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Output(0),
            numel,
            rows,
            cols,
            GridArg::I64(d + row_start - col_start),
        ],
    });
    Ok(())
}
