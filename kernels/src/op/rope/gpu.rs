//! RoPE on GPUs: a table of cosines and sines in scratch memory, then one pass.

use super::{Problem, ROPE};
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;
use crate::op::gpu_rows::float;

/// The CUDA source.
pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Frequencies per grid: kernel arguments have at most 4 KiB.
const PAIRS: usize = 256;

pub(super) fn rotate(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let (dtype, x) = (float(ROPE.name, launch)?, &launch.inputs[0]);
    // A plan depends on no contents: positions are read by the GPU.
    let (p, has_positions) = (Problem::new(x, None, launch.scalars), launch.inputs.len() > 1);
    if x.view.numel() == 0 {
        return Ok(());
    }
    let (half, width) = (p.c / 2, 16 / dtype.size());
    let offsets = [x.view.offset, launch.outputs[0].view.offset];
    let is_aligned = half.is_multiple_of(width) && offsets.iter().all(|o| o.is_multiple_of(width));
    let per = if is_aligned { width } else { 1 };
    let (heads, count) = (p.per_position / p.c, x.view.numel() / p.per_position);
    let number = |n: usize| n.to_string().into();
    let grid = |entry, blocks: usize, threads: usize, args| Grid {
        entry,
        defines: vec![
            ("T", type_name(dtype).into()),
            ("PER", number(per)),
            ("PAIRS", number(half.min(PAIRS))),
            ("POSITIONS", number(usize::from(has_positions))),
        ],
        blocks: [blocks as u32, 1, 1],
        threads: threads as u32,
        shared_bytes: 0,
        args,
    };
    let num_positions = if has_positions { count } else { p.t };
    let table = plan.scratch(num_positions * p.c * dtype.accumulator().size());
    for (i, part) in p.frequencies.chunks(PAIRS).enumerate() {
        let mut bits: Vec<i64> = part.iter().map(|f| f.real().to_bits().cast_signed()).collect();
        bits.resize(half.min(PAIRS), 0);
        let mut args = vec![GridArg::I64s(bits), table.clone(), GridArg::I64(p.first)];
        args.extend([half, i * PAIRS, part.len()].map(|n| GridArg::I32(n as i32)));
        args.extend(has_positions.then_some(GridArg::Input(1)));
        plan.grid(grid("cos_sin_table", num_positions, 128, args));
    }
    let mut args = vec![GridArg::Input(0), GridArg::Output(0), table];
    args.extend([num_positions, heads, half].map(|n| GridArg::I32(n as i32)));
    let threads = (heads * half / per).next_multiple_of(32).min(256);
    plan.grid(grid("rope", count, threads, args));
    Ok(())
}
