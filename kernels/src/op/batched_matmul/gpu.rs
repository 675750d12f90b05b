//! Batched matrix products on GPUs: by the device's library, else in plain arithmetic; sums over k = 0 are filled with zeros.

use super::{BATCHED_MATMUL, strides};
use crate::error::KernelError;
use crate::gpu::{Epilogue, Grid, GridArg, LaunchPlan, Matmul, type_name};
use crate::kernel::Launch;
use crate::op::gpu_rows::float;

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_tile_product.cu"), include_str!("gpu.cu"));

/// Equals the constants in the CUDA source.
const THREADS: usize = 256;
#[cfg(any(test, feature = "cuda"))]
const TILE: usize = 64;

pub(super) fn batched_matmul(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    float(BATCHED_MATMUL.name, launch)?;
    let count = launch.outputs[0].view.numel();
    if count == 0 {
        return Ok(());
    }
    if launch.inputs[0].view.shape[2] > 0 {
        plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue: Epilogue::Plain });
        return Ok(());
    }
    let args = vec![GridArg::Output(0), layout(launch), GridArg::I64(count as i64)];
    plan.grid(grid("zeros", [count.div_ceil(THREADS), 1], launch, args)?);
    Ok(())
}

#[cfg(any(test, feature = "cuda"))]
pub(super) fn tiled(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let [g, m, n] = [0, 1, 2].map(|d| launch.outputs[0].view.shape[d]);
    let args = vec![GridArg::Input(0), GridArg::Input(1), GridArg::Output(0), layout(launch)];
    // Matrices are along x, which allows the most blocks.
    plan.grid(grid("tiled", [g * m.div_ceil(TILE), n.div_ceil(TILE)], launch, args)?);
    Ok(())
}

/// Returns the source's `Layout`.
fn layout(launch: &Launch<'_>) -> GridArg {
    let ([a, b], c) = ([0, 1].map(|i| launch.inputs[i].view), launch.outputs[0].view);
    let extents = [c.shape[1], c.shape[2], a.shape[2]];
    let words = [extents, strides(a), strides(b), strides(c)];
    GridArg::I64s(words.concat().into_iter().map(|x| x as i64).collect())
}

fn grid(
    entry: &'static str,
    [x, y]: [usize; 2],
    launch: &Launch<'_>,
    args: Vec<GridArg>,
) -> Result<Grid, KernelError> {
    let dtype = float(BATCHED_MATMUL.name, launch)?;
    let is_deep = launch.inputs[0].view.strides[2] == 1;
    Ok(Grid {
        entry,
        defines: vec![("T", type_name(dtype).into()), ("DEEP", u8::from(is_deep).to_string().into())],
        blocks: [x as u32, y as u32, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args,
    })
}
