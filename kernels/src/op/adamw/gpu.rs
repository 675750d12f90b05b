//! AdamW on GPUs: one pass over many parameters.

use super::{STEP, grads};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan};
use crate::kernel::Launch;
use crate::op::gpu_rows::{FLAT, flat_defines, float, width};

/// The CUDA source.
pub(super) const SOURCE: &str = concat!(include_str!("../gpu_rows.cu"), include_str!("gpu.cu"));

/// Parameters per launch: each takes seven words of kernel arguments, of which 4096 bytes are allowed.
const COUNT: usize = 72;

pub(super) fn step(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let grads = grads(launch.inputs);
    if grads.is_empty() {
        return Ok(());
    }
    let dtype = float(STEP.name, launch)?;
    let n = |i: usize| grads[i].view.numel();
    let is_whole = |x: usize| x.is_multiple_of(width(dtype));
    let lies_well = |i: &usize| {
        let outputs = &launch.outputs[3 * i..3 * i + 3];
        is_whole(n(*i)) && is_whole(grads[*i].view.offset) && outputs.iter().all(|y| is_whole(y.view.offset))
    };
    let (well, badly): (Vec<usize>, Vec<usize>) = (0..grads.len()).filter(|&i| n(i) > 0).partition(lies_well);
    for (list, is_aligned) in [(well, true), (badly, false)] {
        for part in list.chunks(COUNT) {
            plan.grid(many(launch, dtype, part, is_aligned));
        }
    }
    Ok(())
}

/// Plans one launch for the parameters with these numbers. Unused table entries repeat the first.
fn many(launch: &Launch<'_>, dtype: DType, part: &[usize], is_aligned: bool) -> Grid {
    let sizes: Vec<usize> = part.iter().map(|&i| launch.inputs[i].view.numel()).collect();
    let mut blocks = 0i64;
    let first = sizes.iter().map(|n| {
        blocks += n.div_ceil(FLAT * width(dtype)) as i64;
        blocks - n.div_ceil(FLAT * width(dtype)) as i64
    });
    let first: Vec<i64> = first.collect();
    let padded = |list: Vec<i64>| {
        let rest = std::iter::repeat_n(list[0], COUNT - list.len());
        list.iter().copied().chain(rest).collect::<Vec<i64>>()
    };
    let sizes = sizes.iter().map(|n| *n as i64).collect();
    let rows = part.iter().map(|&i| launch.scalars[i].int()).collect();
    let numbers = [first, sizes, rows].map(padded).concat();
    let operand = |arg: &dyn Fn(usize) -> GridArg| {
        let list = part.iter().map(|&i| arg(i));
        list.chain(std::iter::repeat_n(arg(part[0]), COUNT - part.len())).collect::<Vec<GridArg>>()
    };
    let operands = [
        operand(&GridArg::Input),
        operand(&|i| GridArg::Output(3 * i)),
        operand(&|i| GridArg::Output(3 * i + 1)),
        operand(&|i| GridArg::Output(3 * i + 2)),
    ];
    let rates = grads(launch.inputs).len();
    let args = vec![
        GridArg::Addresses(operands.concat()),
        GridArg::I64s(numbers),
        GridArg::I32(part.len() as i32),
        GridArg::Input(rates),
        GridArg::Input(rates + 1),
    ];
    let mut defines = flat_defines(dtype, is_aligned);
    defines.push(("COUNT", COUNT.to_string().into()));
    let blocks = u32::try_from(blocks).expect("fewer than 2^39 elements fit a device");
    Grid { entry: "adamw", defines, blocks: [blocks, 1, 1], threads: FLAT as u32, shared_bytes: 0, args }
}
