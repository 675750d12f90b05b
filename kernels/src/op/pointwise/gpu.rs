//! One CUDA entry point for all elementwise kernels: the formula is a macro, so that each combination of formula, dtypes and operand
//! layouts is a separate program.
//!
//! Macros: `INPUTS`; for input n `S<n>`, its storage type, and `V<n>`, the type of the formula's argument; `Y`; `C`, `C0`, `C1`, the
//! scalars; `R`, the type of the formula; `ARGS`, `SCALARS`, `FORMULA`; `FORMULAS`, functions that it may call; `VEC` elements of a vector,
//! `DIMS` merged dims (padded with extents of 1), `INDEX`, the integer type of offsets.

use crate::dtype::DType;
use crate::gpu::{Grid, GridArg, LaunchPlan, padded_dims, type_name};
use crate::kernel::{ArgMut, Launch};
use crate::op::formula::FORMULAS;
use crate::op::pointwise::two_reals;
use crate::op::strided_iter::StridedIter;
use crate::strides::Strides;
use std::borrow::Cow;

/// The source of every elementwise kernel.
pub(crate) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block and vectors per thread; equal to the constants in the CUDA source.
const THREADS: usize = 256;
const UNROLL: usize = 2;
/// Bytes per load of a thread if elements are contiguous.
const VECTOR_BYTES: usize = 16;

/// One input of a formula.
#[derive(Clone, Debug)]
pub(crate) struct Input<'a> {
    /// The argument that holds its address.
    pub(crate) arg: GridArg,
    /// Its view.
    pub(crate) view: &'a Strides,
    /// Its dtype.
    pub(crate) dtype: DType,
    /// The storage type of an element.
    pub(crate) storage: &'static str,
    /// The type that the formula gets.
    pub(crate) value: &'static str,
}

/// A formula: the texts of patterns and of an expression that are valid in Rust and C++.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Formula {
    /// `[a, b]`: the names of the inputs.
    pub(crate) args: &'static str,
    /// `[c, _]`: the names of the scalars, or `_`.
    pub(crate) scalars: &'static str,
    /// The expression.
    pub(crate) text: &'static str,
}

/// The two scalars of a launch.
#[derive(Clone, Debug)]
pub(crate) struct Scalars {
    /// The C++ type of the arguments: `double` or `i64`.
    pub(crate) passed: &'static str,
    /// The arguments.
    pub(crate) args: [GridArg; 2],
    /// The type that the formula gets.
    pub(crate) values: [&'static str; 2],
}

impl Scalars {
    /// No scalars.
    pub(crate) fn none() -> Scalars {
        Scalars { passed: "i64", args: [GridArg::I64(0), GridArg::I64(0)], values: ["bool"; 2] }
    }
}

/// Returns an input that is read as a number: `Number<A>` or `Integer`.
fn number<'a>(arg: GridArg, dtype: DType, view: &'a Strides) -> Input<'a> {
    let value = match dtype {
        DType::F64 => "Number<double>",
        DType::I64 => "Integer",
        _ => "Number<float>",
    };
    Input { arg, view, dtype, storage: type_name(dtype), value }
}

/// Plans y = formula(inputs) for numbers of one dtype and a contiguous y.
pub(crate) fn numbers(plan: &mut LaunchPlan, launch: &Launch<'_>, formula: Formula) {
    let inputs = launch.inputs.iter().enumerate();
    let inputs: Vec<Input<'_>> = inputs.map(|(n, x)| number(GridArg::Input(n), x.dtype, x.view)).collect();
    numbers_of(plan, &inputs, launch, formula);
}

/// Plans y = formula(y, x) for numbers of one dtype and a contiguous y.
pub(crate) fn update(plan: &mut LaunchPlan, launch: &Launch<'_>, formula: Formula) {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    let inputs = [number(GridArg::Output(0), y.dtype, y.view), number(GridArg::Input(0), x.dtype, x.view)];
    numbers_of(plan, &inputs, launch, formula);
}

/// Plans y = formula(inputs) where x, the first input, and y are rows of `n` elements and the other inputs have one value per row, or per
/// element if n is 1; all are contiguous.
pub(crate) fn rows_map(plan: &mut LaunchPlan, launch: &Launch<'_>, n: usize, formula: Formula) {
    let rows = launch.outputs[0].view.numel() / n.max(1);
    let views: Vec<Strides> = (launch.inputs.iter().enumerate())
        .map(|(i, x)| {
            let strides = if i == 0 { [n, 1] } else { [1, 0] };
            Strides::new([rows, n][..].into(), strides[..].into(), x.view.offset)
        })
        .collect();
    let inputs = launch.inputs.iter().zip(&views).enumerate();
    let inputs: Vec<Input<'_>> =
        inputs.map(|(i, (x, view))| number(GridArg::Input(i), x.dtype, view)).collect();
    numbers_of(plan, &inputs, launch, formula);
}

fn numbers_of(plan: &mut LaunchPlan, inputs: &[Input<'_>], launch: &Launch<'_>, formula: Formula) {
    let y = &launch.outputs[0];
    let scalars = match y.dtype {
        _ if formula.scalars == "_" => Scalars::none(),
        _ => {
            let args = two_reals(launch.scalars).map(GridArg::F64);
            Scalars { passed: "double", args, values: [inputs[0].value; 2] }
        }
    };
    map(plan, inputs, y, type_name(y.dtype), formula, scalars);
}

/// Plans y = formula(inputs) for a contiguous y with the storage type `storage`.
pub(crate) fn map(
    plan: &mut LaunchPlan,
    inputs: &[Input<'_>],
    y: &ArgMut<'_>,
    storage: &'static str,
    formula: Formula,
    scalars: Scalars,
) {
    let numel = y.view.numel();
    if numel == 0 {
        return;
    }
    let merged = merged(inputs);
    let vector = vector(inputs, &merged, y);
    let dims = padded_dims(&merged).in_vectors(vector);
    let count = dims.extents.len();
    let iter = dims.numbers()[..(1 + inputs.len()) * count].to_vec();
    let items = numel.div_ceil(vector);
    let blocks =
        u32::try_from(items.div_ceil(THREADS * UNROLL)).expect("fewer than 2^41 elements fit a device");
    let mut args: Vec<GridArg> = inputs.iter().map(|x| x.arg.clone()).collect();
    args.extend([GridArg::Output(0), GridArg::I64s(iter), GridArg::I64(numel as i64)]);
    args.extend(scalars.args.clone());
    let index = if u32::try_from(items).is_ok() { "u32" } else { "u64" };
    let mut defines = texts(inputs, storage, formula, &scalars);
    defines.extend([
        ("VEC", vector.to_string().into()),
        ("DIMS", count.to_string().into()),
        ("INDEX", index.into()),
    ]);
    let (blocks, threads) = ([blocks, 1, 1], THREADS as u32);
    plan.grid(Grid { entry: "map", defines, blocks, threads, shared_bytes: 0, args });
}

/// Returns the macros that depend on the formula and the types.
fn texts(
    inputs: &[Input<'_>],
    storage: &'static str,
    formula: Formula,
    scalars: &Scalars,
) -> Vec<(&'static str, Cow<'static, str>)> {
    let value = inputs[0].value;
    let mut defines = vec![("INPUTS", inputs.len().to_string().into())];
    for (x, (s, v)) in inputs.iter().zip([("S0", "V0"), ("S1", "V1"), ("S2", "V2"), ("S3", "V3")]) {
        defines.extend([(s, x.storage.into()), (v, x.value.into())]);
    }
    defines.extend([
        ("Y", storage.into()),
        ("R", value.into()),
        ("C", scalars.passed.into()),
        ("C0", scalars.values[0].into()),
        ("C1", scalars.values[1].into()),
        ("ARGS", formula.args.into()),
        ("SCALARS", formula.scalars.into()),
        ("FORMULA", formula.text.into()),
        ("FORMULAS", if value.starts_with("Number") { FORMULAS.into() } else { "".into() }),
    ]);
    defines
}

/// Returns extents and strides of all inputs, with dims merged that are mergeable in all of them; y is contiguous.
fn merged(inputs: &[Input<'_>]) -> Vec<(usize, [usize; 4])> {
    let view = |n: usize| inputs.get(n).unwrap_or(&inputs[0]).view;
    StridedIter::new([view(0), view(1), view(2), view(3)]).dims().to_vec()
}

/// Returns the elements of a vector: as many of the largest dtype as 16 bytes hold, if all contiguous operands are aligned to them, else 1.
fn vector(inputs: &[Input<'_>], merged: &[(usize, [usize; 4])], y: &ArgMut<'_>) -> usize {
    let size = inputs.iter().map(|x| x.dtype.size()).fold(y.dtype.size(), usize::max);
    let vector = VECTOR_BYTES / size;
    let ((inner, inner_steps), outer) = merged.split_last().expect("a iter has a dim");
    let fits = |n: usize, x: &Input<'_>| match inner_steps[n] {
        0 => true,
        1 => {
            x.view.offset.is_multiple_of(vector)
                && outer.iter().all(|(_, steps)| steps[n].is_multiple_of(vector))
        }
        _ => false,
    };
    let whole = outer.is_empty() || inner.is_multiple_of(vector);
    let aligned = whole && y.view.offset.is_multiple_of(vector);
    if aligned && inputs.iter().enumerate().all(|(n, x)| fits(n, x)) { vector } else { 1 }
}
