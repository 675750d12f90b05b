//! Grouped matrix products on GPUs: each block finds the group of its tile, so that the host need not know the sizes of groups.

use super::{FORWARD, WEIGHT_GRAD};
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::gpu_rows::float;

pub(super) const SOURCE: &str = concat!(include_str!("../gpu_tile_product.cu"), include_str!("gpu.cu"));

/// Equals the constant in the CUDA source.
const TILE: usize = 64;
const THREADS: u32 = 256;

pub(super) fn product(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(FORWARD.name, launch)?;
    let (x, w) = (launch.inputs[0].view, launch.inputs[1].view);
    let (n, [v, k, m]) = (x.shape[0], [0, 1, 2].map(|d| w.shape[d]));
    if n * m == 0 {
        return Ok(());
    }
    // Each group, and the rows behind the last one, may end inside a tile.
    let tiles = n.div_ceil(TILE) + v;
    let numbers = [n, v, k, m, w.strides[0], w.strides[1], w.strides[2]];
    plan.grid(Grid {
        entry: "product",
        defines: vec![("T", type_name(dtype).into())],
        blocks: [tiles as u32, m.div_ceil(TILE) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Input(1),
            GridArg::Input(2),
            GridArg::Output(0),
            GridArg::I64s(numbers.map(|x| x as i64).to_vec()),
        ],
    });
    Ok(())
}

pub(super) fn gradient(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(WEIGHT_GRAD.name, launch)?;
    let (n, dw) = (launch.inputs[0].view.shape[0], launch.outputs[0].view);
    let [v, k, m] = [0, 1, 2].map(|d| dw.shape[d]);
    if v * k * m == 0 {
        return Ok(());
    }
    plan.grid(Grid {
        entry: "gradient",
        defines: vec![("T", type_name(dtype).into())],
        // Groups are along x, which allows the most blocks.
        blocks: [(v * k.div_ceil(TILE)) as u32, m.div_ceil(TILE) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Input(1),
            GridArg::Input(2),
            GridArg::Output(0),
            GridArg::I64s([n, v, k, m, 0, 0, 0].map(|x| x as i64).to_vec()),
        ],
    });
    Ok(())
}
