//! Grouped matrix products on GPUs: each block finds the group of its tile, so that the host need not know the sizes of groups. 16-bit
//! numbers use tensor cores (`tensor.cu`), all others plain arithmetic (`gpu.cu`).

use super::{FORWARD, WEIGHT_GRAD};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::gpu_rows::float;
use crate::strides::Strides;
use std::borrow::Cow;

/// The CUDA source: tensor cores if BRAIN is defined, else plain arithmetic.
pub(super) const SOURCE: &str = concat!(
    "#ifdef BRAIN\n",
    include_str!("../gpu_tensor_core.cu"),
    include_str!("tensor.cu"),
    "#else\n",
    include_str!("../gpu_tile_product.cu"),
    include_str!("gpu.cu"),
    "#endif\n",
);

/// Equals the constants in the CUDA sources.
const TILE_PLAIN: usize = 64;
const TILE_TENSOR: usize = 128;
const THREADS: u32 = 256;
/// Two stages of two tiles of 128 by 32 elements.
const SHARED_BYTES_TENSOR: u32 = 32 << 10;
/// Elements of a chunk of 16 bytes.
const CHUNK: usize = 8;

pub(super) fn product(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(FORWARD.name, launch)?;
    let (x, w, y) = (launch.inputs[0].view, launch.inputs[1].view, launch.outputs[0].view);
    let (n, [v, k, m]) = (x.shape[0], [0, 1, 2].map(|d| w.shape[d]));
    if n * m == 0 {
        return Ok(());
    }
    let [per_group, down, right] = [0, 1, 2].map(|d| w.strides[d]);
    let is_deep = down == 1 && right != 1;
    // Matrices are read along the dim in which they are contiguous.
    let (near, step, length) = if is_deep { (down, right, k) } else { (right, down, m) };
    let is_chunked = near == 1 && [step, per_group, length, w.offset].iter().all(|x| x.is_multiple_of(CHUNK));
    let vectors = [is_row_major_in_chunks(x, k), is_chunked, is_row_major_in_chunks(y, m)];
    let tile = tile(dtype);
    // Each group, and the rows behind the last one, may end inside a tile.
    let blocks = [n.div_ceil(tile) + v, m.div_ceil(tile)];
    let numbers = [n, v, k, m, per_group, down, right];
    plan.grid(grid("product", blocks, numbers, defines(dtype, vectors, is_deep)));
    Ok(())
}

pub(super) fn gradient(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let dtype = float(WEIGHT_GRAD.name, launch)?;
    let (x, dy, dw) = (launch.inputs[0].view, launch.inputs[1].view, launch.outputs[0].view);
    let (n, [v, k, m]) = (x.shape[0], [0, 1, 2].map(|d| dw.shape[d]));
    if v * k * m == 0 {
        return Ok(());
    }
    let vectors =
        [is_row_major_in_chunks(x, k), is_row_major_in_chunks(dy, m), is_row_major_in_chunks(dw, m)];
    let tile = tile(dtype);
    // Groups are along x, which allows the most blocks.
    let blocks = [v * k.div_ceil(tile), m.div_ceil(tile)];
    plan.grid(grid("gradient", blocks, [n, v, k, m, 0, 0, 0], defines(dtype, vectors, false)));
    Ok(())
}

fn tile(dtype: DType) -> usize {
    if dtype.size() == 2 { TILE_TENSOR } else { TILE_PLAIN }
}

/// Returns whether each row of a contiguous operand consists of aligned chunks.
fn is_row_major_in_chunks(view: &Strides, row: usize) -> bool {
    row.is_multiple_of(CHUNK) && view.offset.is_multiple_of(CHUNK)
}

fn defines(dtype: DType, vectors: [bool; 3], is_deep: bool) -> Vec<(&'static str, Cow<'static, str>)> {
    let flag = |is_set: bool| Cow::from(if is_set { "1" } else { "0" });
    let mut defines = vec![("T", type_name(dtype).into())];
    if dtype.size() == 2 {
        defines.push(("BRAIN", flag(dtype == DType::BF16)));
        defines.push(("DEEP", flag(is_deep)));
        defines.extend(["LEFT_VEC", "RIGHT_VEC", "OUT_VEC"].into_iter().zip(vectors.map(flag)));
    }
    defines
}

/// Returns a grid with the source's `Layout`.
fn grid(
    entry: &'static str,
    [x, y]: [usize; 2],
    layout: [usize; 7],
    defines: Vec<(&'static str, Cow<'static, str>)>,
) -> Grid {
    let shared_bytes = if defines.len() > 1 { SHARED_BYTES_TENSOR } else { 0 };
    let mut args: Vec<GridArg> = (0..3).map(GridArg::Input).collect();
    args.extend([GridArg::Output(0), GridArg::I64s(layout.map(|x| x as i64).to_vec())]);
    Grid { entry, defines, blocks: [x as u32, y as u32, 1], threads: THREADS, shared_bytes, args }
}
