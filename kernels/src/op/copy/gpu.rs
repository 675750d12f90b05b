//! Copies on GPUs: in vectors along the memory of y, or transposed in tiles.

use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name, padded_dims, type_name};
use crate::kernel::Launch;
use crate::op::strided_iter::StridedIter;
use std::borrow::Cow;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block and vectors per thread; equal to the constants in the CUDA source.
const THREADS: usize = 256;
const UNROLL: usize = 2;
/// Bytes per load or store of a thread if elements are contiguous.
const VECTOR_BYTES: usize = 16;
/// Dims shorter than this are not transposed: most of a tile would be empty.
const TRANSPOSE_MIN: usize = 8;

type Defines = Vec<(&'static str, Cow<'static, str>)>;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    let iter = StridedIter::in_memory_order([y.view, x.view]);
    if iter.numel() == 0 {
        return Ok(());
    }
    let same = x.dtype == y.dtype;
    let name = |dtype| if same { bits_name(dtype) } else { type_name(dtype) };
    let to_bool = !same && y.dtype == DType::Bool;
    let defines: Defines = vec![
        ("FROM", name(x.dtype).into()),
        ("TO", name(y.dtype).into()),
        ("TO_BOOL", if to_bool { "1".into() } else { "0".into() }),
    ];
    let sizes = [y.dtype.size(), x.dtype.size()];
    let dims = iter.dims();
    let transposed = dims[..dims.len() - 1].iter().position(|&(_, [_, step])| step == 1);
    match (iter.steps(), transposed) {
        ([1, step], Some(transposed))
            if step > 1 && dims[transposed].0 >= TRANSPOSE_MIN && dims[dims.len() - 1].0 >= TRANSPOSE_MIN =>
        {
            plan.grid(plan_transpose(&iter, transposed, sizes, defines));
        }
        _ => plan.grid(plan_vectors(&iter, [y.view.offset, x.view.offset], sizes, defines)),
    }
    Ok(())
}

/// Plans a copy in vectors: as many elements as 16 bytes hold of the larger dtype, if both sides allow.
fn plan_vectors(iter: &StridedIter<2>, offsets: [usize; 2], sizes: [usize; 2], mut defines: Defines) -> Grid {
    let dims = iter.dims();
    let ((inner, steps), outer) = dims.split_last().expect("a iter has a dim");
    let vector = VECTOR_BYTES / sizes[0].max(sizes[1]);
    let aligned = |n: usize| {
        offsets[n].is_multiple_of(vector) && outer.iter().all(|(_, steps)| steps[n].is_multiple_of(vector))
    };
    let fits = steps[0] == 1
        && aligned(0)
        && (steps[1] == 0 || steps[1] == 1 && aligned(1))
        && (outer.is_empty() || inner.is_multiple_of(vector));
    let vector = if fits { vector } else { 1 };
    let items = iter.numel().div_ceil(vector);
    let padded = padded_dims(dims).in_vectors(vector);
    defines.extend([
        ("VEC", vector.to_string().into()),
        ("DIMS", padded.extents.len().to_string().into()),
        ("INDEX", if u32::try_from(items).is_ok() { "u32".into() } else { "u64".into() }),
    ]);
    let blocks =
        u32::try_from(items.div_ceil(THREADS * UNROLL)).expect("fewer than 2^41 elements fit a device");
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
            GridArg::I64(iter.numel() as i64),
        ],
    }
}

/// Plans a transposition in tiles: the dim `transposed` is contiguous in x, the innermost dim in y.
fn plan_transpose(iter: &StridedIter<2>, transposed: usize, sizes: [usize; 2], mut defines: Defines) -> Grid {
    let (rows, [row_step, _]) = iter.dims()[transposed];
    let (cols, [_, col_step]) = iter.dims()[iter.dims().len() - 1];
    let others = iter.without_dim_and_innermost(transposed);
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
        entry: "transpose",
        defines,
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![GridArg::Input(0), GridArg::Output(0), GridArg::I64s(numbers)],
    }
}
