//! Comparisons and selections as formulas of the elementwise source.

use crate::dtype::DType;
use crate::gpu::{GridArg, LaunchPlan, bits_name, bits_of, type_name};
use crate::kernel::{Arg, Launch};
use crate::op::pointwise::gpu::{Formula, Input, Scalars, map};

/// A boolean input.
fn compare_select<'a>(n: usize, x: &Arg<'a>) -> Input<'a> {
    Input { arg: GridArg::Input(n), view: x.view, dtype: x.dtype, storage: "u8", value: "bool" }
}

/// An input whose bits are copied.
fn bits<'a>(n: usize, x: &Arg<'a>) -> Input<'a> {
    let name = bits_name(x.dtype);
    Input { arg: GridArg::Input(n), view: x.view, dtype: x.dtype, storage: name, value: name }
}

/// An input that is compared.
fn compared<'a>(n: usize, x: &Arg<'a>) -> Input<'a> {
    let value = match x.dtype {
        DType::F64 => "double",
        DType::I64 => "i64",
        DType::U8 | DType::Bool => "u8",
        _ => "float",
    };
    Input { arg: GridArg::Input(n), view: x.view, dtype: x.dtype, storage: type_name(x.dtype), value }
}

/// y = the result of comparing a and b.
pub(super) fn compare(plan: &mut LaunchPlan, launch: &Launch<'_>, text: &'static str) {
    let inputs: Vec<Input<'_>> = launch.inputs.iter().enumerate().map(|(n, x)| compared(n, x)).collect();
    let formula = Formula { args: "[a, b]", scalars: "_", text };
    map(plan, &inputs, &launch.outputs[0], "u8", formula, Scalars::none());
}

/// y = a formula of booleans.
pub(super) fn table(plan: &mut LaunchPlan, launch: &Launch<'_>, args: &'static str, text: &'static str) {
    let inputs: Vec<Input<'_>> =
        launch.inputs.iter().enumerate().map(|(n, x)| compare_select(n, x)).collect();
    map(plan, &inputs, &launch.outputs[0], "u8", Formula { args, scalars: "_", text }, Scalars::none());
}

/// y = a where m is true, else b.
pub(super) fn choose(plan: &mut LaunchPlan, launch: &Launch<'_>) {
    let x = launch.inputs;
    let formula = Formula { args: "[m, a, b]", scalars: "_", text: "choose(m, a, b)" };
    let inputs = [compare_select(0, &x[0]), bits(1, &x[1]), bits(2, &x[2])];
    map(plan, &inputs, &launch.outputs[0], bits_name(x[1].dtype), formula, Scalars::none());
}

/// y = the first scalar where m equals the second, else x.
pub(super) fn masked_fill(plan: &mut LaunchPlan, launch: &Launch<'_>) {
    let (x, name) = (launch.inputs, bits_name(launch.inputs[0].dtype));
    let formula = Formula { args: "[x, m]", scalars: "[value, on]", text: "choose(m == on, value, x)" };
    let value = bits_of(x[0].dtype, launch.scalars[0].real());
    let args = [GridArg::I64(value), GridArg::I64(i64::from(launch.scalars[1].int() != 0))];
    let scalars = Scalars { passed: "i64", args, values: [name, "bool"] };
    map(plan, &[bits(0, &x[0]), compare_select(1, &x[1])], &launch.outputs[0], name, formula, scalars);
}
