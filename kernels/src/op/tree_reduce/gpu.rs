//! Tree reduction on GPUs: one program for each number of operands, in which the tree is unrolled.

use crate::dtype::DType;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::Launch;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constants in the CUDA source.
const THREADS: usize = 256;

/// `join` is the expression that combines two values, in CUDA C++ with the prelude.
pub(super) fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan, join: &'static str) {
    let (inputs, y) = (launch.inputs, &launch.outputs[0]);
    let numel = y.view.numel();
    let (value, join) = match y.dtype {
        DType::F64 => ("double", join),
        DType::I64 => ("i64", if join == "Sum" { "Wrapping" } else { join }),
        DType::U8 | DType::Bool => ("int", if join == "Sum" { "Wrapping" } else { join }),
        _ => ("float", join),
    };
    let vector = 16 / y.dtype.size();
    let offsets = inputs.iter().map(|x| x.view.offset).chain([y.view.offset]);
    let vector = if offsets.into_iter().all(|at| at.is_multiple_of(vector)) { vector } else { 1 };
    let names: Vec<String> = (0..inputs.len()).map(|i| format!("x{i}")).collect();
    let parameters: Vec<String> = names.iter().map(|name| format!("const S *{name}")).collect();
    let blocks = u32::try_from(numel.div_ceil(vector).div_ceil(THREADS))
        .expect("fewer than 2^39 elements fit a device");
    let mut args = vec![GridArg::Output(0), GridArg::I64(numel as i64)];
    args.extend((0..inputs.len()).map(GridArg::Input));
    plan.grid(Grid {
        entry: "tree_reduce",
        defines: vec![
            ("S", type_name(y.dtype).into()),
            ("V", value.into()),
            ("JOIN", join.into()),
            ("COUNT", inputs.len().to_string().into()),
            ("PARAMETERS", parameters.join(", ").into()),
            ("OPERANDS", format!("{{{}}}", names.join(", ")).into()),
            ("VEC", vector.to_string().into()),
        ],
        blocks: [blocks, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args,
    });
}
