//! Copies on GPUs: in vectors along the memory of y, or transposed in tiles.

use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name, padded_dims, type_name};
use crate::kernel::Launch;
use crate::op::walk::Walk;
use std::borrow::Cow;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads of a block and vectors of a thread, as in the source.
const THREADS: usize = 256;
const AT_ONCE: usize = 2;
/// Bytes that a thread loads or stores at once where elements lie side by side.
const VECTOR_BYTES: usize = 16;
/// Dims shorter than this are not transposed: most of a tile would be empty.
const TURNED_MIN: usize = 8;

type Defines = Vec<(&'static str, Cow<'static, str>)>;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    let walk = Walk::in_memory_order([y.view, x.view]);
    if walk.numel() == 0 {
        return Ok(());
    }
    let same = x.dtype == y.dtype;
    let name = |dtype| if same { bits_name(dtype) } else { type_name(dtype) };
    let compare_select = !same && y.dtype == DType::Bool;
    let defines: Defines = vec![
        ("FROM", name(x.dtype).into()),
        ("TO", name(y.dtype).into()),
        ("TRUTH", if compare_select { "1".into() } else { "0".into() }),
    ];
    let sizes = [y.dtype.size(), x.dtype.size()];
    let dims = walk.dims();
    let transposed = dims[..dims.len() - 1].iter().position(|&(_, [_, step])| step == 1);
    match (walk.steps(), transposed) {
        ([1, step], Some(transposed))
            if step > 1 && dims[transposed].0 >= TURNED_MIN && dims[dims.len() - 1].0 >= TURNED_MIN =>
        {
            plan.grid(turn(&walk, transposed, sizes, defines));
        }
        _ => plan.grid(straight(&walk, [y.view.offset, x.view.offset], sizes, defines)),
    }
    Ok(())
}

/// In vectors of as many elements as 16 bytes hold of the larger dtype, where both sides allow.
fn straight(walk: &Walk<2>, offsets: [usize; 2], sizes: [usize; 2], mut defines: Defines) -> Grid {
    let dims = walk.dims();
    let ((inner, steps), outer) = dims.split_last().expect("a walk has a dim");
    let vector = VECTOR_BYTES / sizes[0].max(sizes[1]);
    let aligned = |n: usize| {
        offsets[n].is_multiple_of(vector) && outer.iter().all(|(_, steps)| steps[n].is_multiple_of(vector))
    };
    let fits = steps[0] == 1
        && aligned(0)
        && (steps[1] == 0 || steps[1] == 1 && aligned(1))
        && (outer.is_empty() || inner.is_multiple_of(vector));
    let vector = if fits { vector } else { 1 };
    let items = walk.numel().div_ceil(vector);
    let padded = padded_dims(dims).in_vectors(vector);
    defines.extend([
        ("VEC", vector.to_string().into()),
        ("DIMS", padded.extents.len().to_string().into()),
        ("INDEX", if u32::try_from(items).is_ok() { "u32".into() } else { "u64".into() }),
    ]);
    let blocks =
        u32::try_from(items.div_ceil(THREADS * AT_ONCE)).expect("fewer than 2^41 elements fit a device");
    Grid {
        entry: "copy",
        defines,
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Output(0),
            GridArg::I64s(padded.numbers()),
            GridArg::I64(walk.numel() as i64),
        ],
    }
}

/// Tile after tile: rows of the dim `transposed` lie side by side in x, the innermost dim in y.
fn turn(walk: &Walk<2>, transposed: usize, sizes: [usize; 2], mut defines: Defines) -> Grid {
    let (rows, [row_step, _]) = walk.dims()[transposed];
    let (cols, [_, col_step]) = walk.dims()[walk.dims().len() - 1];
    let others = walk.without(transposed);
    let padded = padded_dims(others.dims());
    let tile = if sizes[1] == 8 { 32 } else { 64 };
    let (row_tiles, col_tiles) = (rows.div_ceil(tile), cols.div_ceil(tile));
    let blocks =
        u32::try_from(others.numel() * row_tiles * col_tiles).expect("fewer than 2^42 elements fit a device");
    defines.extend([
        ("VEC", "1".into()),
        ("DIMS", padded.extents.len().to_string().into()),
        ("INDEX", "u32".into()),
    ]);
    let mut numbers = [rows, cols, row_step, col_step, row_tiles, col_tiles].map(|n| n as i64).to_vec();
    numbers.extend(padded.numbers());
    Grid {
        entry: "turn",
        defines,
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![GridArg::Input(0), GridArg::Output(0), GridArg::I64s(numbers)],
    }
}
