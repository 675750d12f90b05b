//! Validation of op implementations: errors for the author of an op.

use super::error_text::describe;
use super::{ForwardContext, LocalTensors, Op};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;

fn invalid_op(op: &dyn Op, what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("{}: {what}", op.name()))
}

/// The error for a signature that does not parse.
pub(super) fn invalid_signature(op: &dyn Op, why: &Error, site: &'static Location<'static>) -> Error {
    invalid_op(op, why.message())
        .detail("help", "write Op::signature as in `..m k, k n -> ..m n`; see Signature")
        .at(site)
}

/// Refuses an op without visible outputs.
///
/// # Errors
/// `Kind::Unsupported`.
pub(super) fn check_visible_outputs(
    op: &dyn Op,
    (rank, args): (&Rank, &[&Layout]),
    inference: &Inference,
    site: &'static Location<'static>,
) -> Result<()> {
    let (outputs, saved) = (inference.outputs.len(), op.num_saved());
    if outputs > saved {
        return Ok(());
    }
    let error = invalid_op(
        op,
        &format!("{saved} of its {outputs} outputs are saved for backward, so that no output is visible"),
    );
    let help = "Op::num_saved counts the last outputs of the signature, which only the vjp reads";
    Err(describe(error, op, rank, args, site).detail("help", help))
}

/// The error for an op inside of a vjp whose arguments need a redistribution step.
pub(super) fn step_in_vjp(
    op: &dyn Op,
    (rank, args): (&Rank, &[&Layout]),
    site: &'static Location<'static>,
) -> Error {
    let error = Error::new(Kind::Layout, format!("{} needs a redistribution step inside a vjp", op.name()));
    let help = "a vjp must not communicate: declare the op linear in an argument (Op::linear_in) only if it is, and compute \
                cotangents of partial sums by linear ops";
    describe(error, op, rank, args, site).detail("help", help)
}

/// Whether the local outputs of a forward have the inferred number, dtypes and shapes. Most have the inferred view itself.
#[inline]
pub(super) fn matches_inference(outputs: &LocalTensors, local: &ForwardContext<'_>) -> bool {
    let (inference, here) = (local.inference, local.rank.coordinates());
    let fits = |(i, (output, layout)): (usize, (&LocalTensor, &Layout))| {
        let view = inference.view(i, here);
        output.dtype == layout.dtype() && (Arc::ptr_eq(&output.view, view) || output.view.shape == view.shape)
    };
    outputs.len() == inference.outputs.len() && outputs.iter().zip(&inference.outputs).enumerate().all(fits)
}

/// Refuses local outputs of another number, dtype or shape than inferred.
///
/// # Errors
/// `Kind::Unsupported`.
pub(super) fn check_outputs(outputs: &LocalTensors, op: &dyn Op, local: &ForwardContext<'_>) -> Result<()> {
    let (got, expected) = (outputs.len(), local.inference.outputs.len());
    if got != expected {
        let what = format!("its forward returns {got} output(s), but its signature has {expected}");
        return Err(invalid_forward(invalid_op(op, &what), op, local));
    }
    for (i, (output, layout)) in outputs.iter().zip(&local.inference.outputs).enumerate() {
        let local_shape = layout.local_shape(local.rank.coordinates());
        if (output.dtype, &output.view.shape) != (layout.dtype(), &local_shape) {
            let (shape, expected) = (output.view.shape.as_slice(), local_shape.as_slice());
            let got = format!("{}{shape:?}", output.dtype);
            let what = format!(
                "its forward returns {got} as output {i}, but {}{expected:?} was inferred",
                layout.dtype()
            );
            return Err(invalid_forward(
                invalid_op(op, &what).detail("output", layout.to_string()),
                op,
                local,
            ));
        }
    }
    Ok(())
}

/// Runs a forward and turns its panics into errors of the op: kernels check their operands by assertions.
///
/// # Errors
/// The errors of the forward; `Kind::Panic`.
pub(super) fn catch_panics(
    op: &dyn Op,
    local: &ForwardContext<'_>,
    go: impl FnOnce() -> Result<LocalTensors>,
) -> Result<LocalTensors> {
    catch_unwind(AssertUnwindSafe(go)).unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        let Some(text) = text.or_else(|| cause.downcast_ref::<&str>().copied()) else { resume_unwind(cause) };
        let error = Error::new(Kind::Panic, format!("{}: its forward panicked: {text}", op.name()));
        Err(invalid_forward(error, op, local))
    })
}

/// Adds arguments and help to an error about the forward of an op.
fn invalid_forward(error: Error, op: &dyn Op, local: &ForwardContext<'_>) -> Error {
    let args: Vec<&Layout> = local.inputs.iter().collect();
    describe(error, op, local.rank, &args, local.site).detail(
        "help",
        "forward must return the outputs that the signature and Op::dtypes state: ForwardContext::output(i) allocates output i",
    )
}

/// Element `i` of a list that a vjp reads; unwinds with an error if there is none.
pub(super) fn get_or_raise<'a, T>(list: &'a [T], i: usize, what: &str) -> &'a T {
    list.get(i).unwrap_or_else(|| {
        let text = format!("the vjp reads {what} {i}, but there are {}", list.len());
        Error::new(Kind::Unsupported, text).detail("help", "arguments and outputs count from 0").raise()
    })
}

/// The error for a value that a vjp reads although it is not saved for backward.
pub(super) fn not_saved(what: &str, i: usize) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("the vjp reads {what} {i}, which Op::saved_for_backward does not name"),
    )
    .detail("help", "name the index of each argument and output that the vjp reads in Op::saved_for_backward")
}

/// Checks that the vjp of an op returned a cotangent for each requested argument. Otherwise a parameter would silently not train.
///
/// # Errors
/// `Kind::Unsupported` with op and argument.
pub fn check_cotangents_present(
    op: &dyn Op,
    cotangents: &[Option<Tensor>],
    needs_input_grad: &[bool],
) -> Result<()> {
    let is_missing = |i: &usize| needs_input_grad[*i] && cotangents.get(*i).is_none_or(Option::is_none);
    let Some(i) = (0..needs_input_grad.len()).find(is_missing) else { return Ok(()) };
    Err(invalid_op(op, &format!("the vjp returns no cotangent for argument {i}"))
        .detail("help", "return a cotangent for each requested argument (zeros if the gradient is 0), or declare the argument not differentiable"))
}

/// Checks that the vjp of an op returned each cotangent in the dual layout of its argument.
///
/// A partial cotangent of a 16-bit argument may be in the accumulator dtype: its terms, which may be far larger than their sum, are
/// then rounded after the all-reduce.
///
/// # Errors
/// `Kind::Layout` with op and argument.
pub fn check_cotangent_layouts(op: &dyn Op, cotangents: &[Option<Tensor>], args: &[Layout]) -> Result<()> {
    let mismatch = |(i, (given, layout)): (usize, (&Option<Tensor>, &Layout))| {
        let given = given.as_ref().filter(|given| !is_cotangent_layout(given.layout(), layout))?;
        Some((i, given.layout().clone(), layout.clone()))
    };
    let Some((i, given, layout)) = cotangents.iter().zip(args).enumerate().find_map(mismatch) else {
        return Ok(());
    };
    let text = format!("{}: the vjp returns {given} as the cotangent of argument {i}", op.name());
    Err(Error::new(Kind::Layout, text)
        .detail("argument", layout.to_string())
        .detail("expected", layout.dual().to_string())
        .detail("help", "Vjp::cotangent_layout(i) is the layout that the cotangent of argument i must have"))
}

/// Whether a layout is valid for the cotangent of an argument.
fn is_cotangent_layout(given: &Layout, argument: &Layout) -> bool {
    let (dtype, own) = (given.dtype(), argument.dtype());
    if dtype == own {
        return given.is_dual_of(argument);
    }
    let is_wide = dtype == own.accumulator() && !given.partial().is_empty();
    is_wide && given.is_dual_of(&argument.with_dtype(dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::DTypes;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::op::unary::SCALE;
    use shardgrad_kernels::{DType, Scalar};

    /// An op whose declarations a test chooses.
    #[derive(Clone, Debug)]
    struct TestOp {
        signature: &'static str,
        num_saved: usize,
        num_dtypes: Option<usize>,
        forward: fn(&ForwardContext<'_>, &[&LocalTensor]) -> Result<LocalTensors>,
    }

    impl Op for TestOp {
        fn name(&self) -> &'static str {
            "mine"
        }

        fn signature(&self) -> &str {
            self.signature
        }

        fn num_saved(&self) -> usize {
            self.num_saved
        }

        fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
            Ok((0..self.num_dtypes.unwrap_or(num_outputs)).map(|_| inputs[0]).collect())
        }

        fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
            (self.forward)(local, x)
        }
    }

    const VALID: TestOp = TestOp {
        signature: "..m -> ..m",
        num_saved: 0,
        num_dtypes: None,
        forward: |local, x| local.launch(&SCALE, x, &[Scalar::Real(2.0)]),
    };

    /// The error of an op on some arguments of `f32[4@dp, 8]`.
    fn error(op: TestOp, count: usize) -> Error {
        let ran = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4@dp, 8]", rank.mesh())?)?;
            let _ = Tensor::apply_one(op.clone(), &vec![&x; count]);
            Ok(())
        });
        ran.expect_err("the op is wrong")
    }

    #[test]
    fn errors_in_an_op_name_the_op_and_the_line() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[3.0f32])?;
            assert_eq!(Tensor::apply_one(VALID, &[&x]).to_f64()?, [6.0]);
            Ok(())
        })
        .unwrap();
        let cases: [(TestOp, usize, &str); 8] = [
            (TestOp { signature: "this is none", ..VALID }, 1, "mine: `this is none` is not a signature"),
            (VALID, 2, "mine: 2 argument(s) for a signature of 1"),
            (TestOp { num_saved: 1, ..VALID }, 1, "mine: 1 of its 1 outputs are saved for backward"),
            (TestOp { num_dtypes: Some(2), ..VALID }, 1, "mine: 2 dtype(s) for 1 output(s)"),
            (
                TestOp {
                    signature: "..m d -> ..m, ..m",
                    forward: |l, _| Ok([l.output(0)?].into_iter().collect()),
                    ..VALID
                },
                1,
                "mine: its forward returns 1 output(s), but its signature has 2",
            ),
            (
                TestOp {
                    forward: |_, x| Ok([x[0].with_view(x[0].view.narrow(0, 0, 1))].into_iter().collect()),
                    ..VALID
                },
                1,
                "mine: its forward returns f32[1, 8] as output 0, but f32[2, 8] was inferred",
            ),
            (TestOp { signature: "..m d -> ..m", ..VALID }, 1, "mine: its forward panicked"),
            (
                TestOp { signature: "..m -> ..m, ..m", ..VALID },
                1,
                "mine: its forward panicked: a launch has the outputs of its contract",
            ),
        ];
        for (op, count, text) in cases {
            let error = error(op, count);
            assert!(error.message().starts_with(text), "{text}: {error}");
            assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
        }
    }
}
