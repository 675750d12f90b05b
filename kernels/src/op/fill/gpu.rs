//! Fill on GPUs: in vectors along the memory of y.

use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name, bits_of, padded_dims};
use crate::kernel::Launch;
use crate::op::strided_iter::StridedIter;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constants in the CUDA source.
const THREADS: usize = 256;

pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let y = &launch.outputs[0];
    let iter = StridedIter::in_memory_order([y.view]);
    let numel = iter.numel();
    if numel == 0 {
        return Ok(());
    }
    let ((inner, [step]), outer) = iter.dims().split_last().expect("a iter has a dim");
    let vector = 16 / y.dtype.size();
    let fits = *step == 1
        && y.view.offset.is_multiple_of(vector)
        && (outer.is_empty() || inner.is_multiple_of(vector))
        && outer.iter().all(|(_, [step])| step.is_multiple_of(vector));
    let vector = if fits { vector } else { 1 };
    let items = numel.div_ceil(vector);
    let padded = padded_dims(iter.dims()).in_vectors(vector);
    let blocks = u32::try_from(items.div_ceil(THREADS)).expect("fewer than 2^40 elements fit a device");
    plan.grid(Grid {
        entry: "fill",
        defines: vec![
            ("S", bits_name(y.dtype).into()),
            ("VEC", vector.to_string().into()),
            ("DIMS", padded.extents.len().to_string().into()),
            ("INDEX", if u32::try_from(items).is_ok() { "u32".into() } else { "u64".into() }),
        ],
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Output(0),
            GridArg::I64s(padded.numbers()),
            GridArg::I64(numel as i64),
            GridArg::I64(bits_of(y.dtype, launch.scalars[0].real())),
        ],
    });
    Ok(())
}
