//! Random numbers on GPUs, with the bits of the CPU.

use super::{Place, seed};
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::{ArgMut, Launch};

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Equals the constant in the CUDA source.
const THREADS: usize = 256;
const PER_THREAD: usize = 4;

/// y = a + (b - a) u for uniform u.
pub(super) fn uniform(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let s = launch.scalars;
    draw(super::UNIFORM.name, launch, plan, ("0", 0), [s[2].real(), s[3].real(), 0.0])
}

/// y = a + b n for normal n.
pub(super) fn normal(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let s = launch.scalars;
    draw(super::NORMAL.name, launch, plan, ("1", 0), [s[2].real(), s[3].real(), 0.0])
}

/// y = x / (1 - p) if a uniform number is at least p, else 0 (dropout).
pub(super) fn dropout(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let p = launch.scalars[0].real();
    // A uniform number is k / 2^24, so that it is at least p exactly if k is at least this.
    draw(super::DROPOUT.name, launch, plan, ("2", 1), [0.0, 1.0 - p, (p * 16_777_216.0).ceil()])
}

/// Plans a launch. `kind` is the macro KIND and the index of the key among the scalars; then a, b and the threshold.
fn draw(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    (kind, at): (&'static str, usize),
    [a, b, threshold]: [f64; 3],
) -> Result<(), KernelError> {
    let y: &ArgMut<'_> = &launch.outputs[0];
    if !y.dtype.is_float() {
        return Err(KernelError::DType { kernel, dtype: y.dtype });
    }
    let (key, stream) = seed(&launch.scalars[at..]);
    let first_pair = if at == 0 { 4 } else { 3 };
    let place = Place::new(&y.view.shape, &launch.scalars[first_pair..]);
    let (numel, dims) = (y.view.numel(), place.dims.len().next_power_of_two().max(4));
    let padded = |fill: i64, of: fn(&(u64, u64, u64)) -> u64| {
        let padding = std::iter::repeat_n(fill, dims - place.dims.len());
        padding.chain(place.dims.iter().map(move |dim| of(dim).cast_signed())).collect::<Vec<i64>>()
    };
    let walk = [padded(1, |dim| dim.0), padded(0, |dim| dim.1), padded(0, |dim| dim.2)].concat();
    let blocks =
        u32::try_from(numel.div_ceil(PER_THREAD * THREADS)).expect("fewer than 2^41 elements fit a device");
    plan.grid(Grid {
        entry: "draw",
        defines: vec![
            ("T", type_name(y.dtype).into()),
            ("KIND", kind.into()),
            ("DIMS", dims.to_string().into()),
            ("INDEX", if u32::try_from(numel).is_ok() { "u32".into() } else { "u64".into() }),
        ],
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            // Only dropout has an input.
            if launch.inputs.is_empty() { GridArg::Output(0) } else { GridArg::Input(0) },
            GridArg::Output(0),
            GridArg::I64s(walk),
            GridArg::I64(numel as i64),
            GridArg::I64(key.cast_signed()),
            GridArg::I64(stream.cast_signed()),
            GridArg::F64(a),
            GridArg::F64(b),
            GridArg::I32(threshold as i32),
        ],
    });
    Ok(())
}
