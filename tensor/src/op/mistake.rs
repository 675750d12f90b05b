//! What is wrong in an op itself, told to whoever writes one.

use super::message::describe;
use super::{Local, Op, Pieces};
use crate::infer::Inference;
use crate::layout::Layout;
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;

fn mistake(op: &dyn Op, what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("{}: {what}", op.name()))
}

/// A signature that is none.
pub(super) fn unreadable(op: &dyn Op, why: &Error, site: &'static Location<'static>) -> Error {
    mistake(op, why.message())
        .detail("help", "give Op::signature as in `..m k, k n -> ..m n`; see Signature")
        .at(site)
}

/// Refuses an op of whose outputs none can be seen.
///
/// # Errors
/// `Kind::Unsupported`.
pub(super) fn check_shown(
    op: &dyn Op,
    (rank, args): (&Rank, &[&Layout]),
    inference: &Inference,
    site: &'static Location<'static>,
) -> Result<()> {
    let (made, saved) = (inference.outputs.len(), op.num_saved());
    if made > saved {
        return Ok(());
    }
    let error = mistake(op, &format!("{saved} of its {made} outputs are saved ones, so that none is left"));
    let help = "Op::num_saved counts the outputs that only the vjp reads, the last ones of the signature";
    Err(describe(error, op, rank, args, site).detail("help", help))
}

/// A step that the arguments of an op need, where none may be taken.
pub(super) fn closed(
    op: &dyn Op,
    (rank, args): (&Rank, &[&Layout]),
    site: &'static Location<'static>,
) -> Error {
    let error = Error::new(Kind::Layout, format!("{} implies a step inside a vjp", op.name()));
    let help = "a vjp moves nothing: declare the op linear in an argument (Op::linear_in) only if that holds, and form \
                cotangents of pending sums by linear ops";
    describe(error, op, rank, args, site).detail("help", help)
}

/// Whether there is a piece for each output of the op, of its dtype and shape. Most lie as new memory does.
#[inline]
pub(super) fn are_as_inferred(pieces: &Pieces, local: &Local<'_>) -> bool {
    let (inference, here) = (local.inference, local.rank.coordinates());
    let fits = |(i, (piece, layout)): (usize, (&Piece, &Layout))| {
        let view = inference.view(i, here);
        piece.dtype == layout.dtype() && (Arc::ptr_eq(&piece.view, view) || piece.view.shape == view.shape)
    };
    pieces.len() == inference.outputs.len() && pieces.iter().zip(&inference.outputs).enumerate().all(fits)
}

/// Refuses another number of pieces than the op has outputs, and pieces of another dtype or shape.
///
/// # Errors
/// `Kind::Unsupported`.
pub(super) fn check_pieces(pieces: &Pieces, op: &dyn Op, local: &Local<'_>) -> Result<()> {
    let (made, wanted) = (pieces.len(), local.inference.outputs.len());
    if made != wanted {
        let what = format!("its forward makes {made} output(s), its signature has {wanted}");
        return Err(of_forward(mistake(op, &what), op, local));
    }
    for (i, (piece, layout)) in pieces.iter().zip(&local.inference.outputs).enumerate() {
        let local_shape = layout.local_shape(local.rank.coordinates());
        if (piece.dtype, &piece.view.shape) != (layout.dtype(), &local_shape) {
            let (shape, wanted) = (piece.view.shape.as_slice(), local_shape.as_slice());
            let made = format!("{}{shape:?}", piece.dtype);
            let what =
                format!("its forward makes {made} of output {i}, which is {}{wanted:?}", layout.dtype());
            return Err(of_forward(mistake(op, &what).detail("output", layout.to_string()), op, local));
        }
    }
    Ok(())
}

/// A forward whose panics are told as errors of the op: what kernels demand of their operands stands in assertions.
///
/// # Errors
/// What the forward reports; `Kind::Panic`.
pub(super) fn guarded(op: &dyn Op, local: &Local<'_>, go: impl FnOnce() -> Result<Pieces>) -> Result<Pieces> {
    catch_unwind(AssertUnwindSafe(go)).unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        let Some(text) = text.or_else(|| cause.downcast_ref::<&str>().copied()) else { resume_unwind(cause) };
        let error = Error::new(Kind::Panic, format!("{}: its forward panicked: {text}", op.name()));
        Err(of_forward(error, op, local))
    })
}

fn of_forward(error: Error, op: &dyn Op, local: &Local<'_>) -> Error {
    let args: Vec<&Layout> = local.inputs.iter().collect();
    describe(error, op, local.rank, &args, local.site).detail(
        "help",
        "forward makes what the signature and Op::dtypes say: Local::output(i) is memory for output i",
    )
}

/// What a vjp asks for by number.
pub(super) fn numbered<'a, T>(list: &'a [T], i: usize, what: &str) -> &'a T {
    list.get(i).unwrap_or_else(|| {
        let text = format!("the vjp reads {what} {i} of {}", list.len());
        Error::new(Kind::Unsupported, text).detail("help", "arguments and outputs are counted from 0").raise()
    })
}

/// A value that a vjp reads and that is not kept for it.
pub(super) fn unkept(what: &str, i: usize) -> Error {
    Error::new(Kind::Unsupported, format!("the vjp reads {what} {i}, which Op::keeps does not name"))
        .detail("help", "name in Op::keeps what the vjp reads, by its number")
}

/// Looks whether the vjp of an op gave the cotangents of all wanted arguments. Without one, a parameter would stay as it is and
/// nobody would know why.
///
/// # Errors
/// `Kind::Unsupported` with op and argument.
pub fn check_given(op: &dyn Op, cotangents: &[Option<Tensor>], wanted: &[bool]) -> Result<()> {
    let is_lost = |i: &usize| wanted[*i] && cotangents.get(*i).is_none_or(Option::is_none);
    let Some(i) = (0..wanted.len()).find(is_lost) else { return Ok(()) };
    Err(mistake(op, &format!("the vjp gives no cotangent of argument {i}"))
        .detail("help", "give one for each argument that is wanted, zeros where nothing flows, or declare it not differentiable"))
}

/// Checks that the vjp of an op gave each cotangent in the dual layout of its argument. A pending cotangent of a 16-bit argument may
/// be in the accumulator: its parts, which may be far larger than their sum, are then rounded after the ranks have added them.
///
/// # Errors
/// `Kind::Layout` with op and argument.
pub fn check_lawful(op: &dyn Op, cotangents: &[Option<Tensor>], args: &[Layout]) -> Result<()> {
    let strays = |(i, (given, layout)): (usize, (&Option<Tensor>, &Layout))| {
        let given = given.as_ref().filter(|given| !is_lawful(given.layout(), layout))?;
        Some((i, given.layout().clone(), layout.clone()))
    };
    let Some((i, given, layout)) = cotangents.iter().zip(args).enumerate().find_map(strays) else {
        return Ok(());
    };
    let text = format!("{}: the vjp gives {given} as the cotangent of argument {i}", op.name());
    Err(Error::new(Kind::Layout, text)
        .detail("argument", layout.to_string())
        .detail("expected", layout.dual().to_string())
        .detail("help", "Vjp::goal(i) is the layout that the cotangent of argument i must have"))
}

/// Whether a layout is that of a cotangent of an argument.
fn is_lawful(given: &Layout, argument: &Layout) -> bool {
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
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::op::unary::SCALE;
    use shardgrad_kernels::{DType, Scalar};
    use std::rc::Rc;

    /// An op that says of itself what a test wants.
    #[derive(Clone, Debug)]
    struct Mine {
        signature: &'static str,
        num_saved: usize,
        num_dtypes: Option<usize>,
        forward: fn(&Local<'_>, &[&Piece]) -> Result<Pieces>,
    }

    impl Op for Mine {
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

        fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
            (self.forward)(local, x)
        }
    }

    const RIGHT: Mine = Mine {
        signature: "..m -> ..m",
        num_saved: 0,
        num_dtypes: None,
        forward: |local, x| local.launch(&SCALE, x, &[Scalar::Real(2.0)]),
    };

    /// The error of an op on some arguments of `f32[4@dp, 8]`.
    fn error(op: Mine, count: usize) -> Error {
        let ran = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4@dp, 8]", rank.mesh())?)?;
            let _ = Tensor::apply_one(Rc::new(op.clone()), &vec![&x; count]);
            Ok(())
        });
        ran.expect_err("the op is wrong")
    }

    #[test]
    fn what_is_wrong_in_an_op_is_told_by_its_name_with_the_line() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[3.0f32])?;
            assert_eq!(Tensor::apply_one(Rc::new(RIGHT), &[&x]).to_f64()?, [6.0]);
            Ok(())
        })
        .unwrap();
        let told: [(Mine, usize, &str); 8] = [
            (Mine { signature: "this is none", ..RIGHT }, 1, "mine: `this is none` is no signature"),
            (RIGHT, 2, "mine: 2 argument(s) for a signature of 1"),
            (Mine { num_saved: 1, ..RIGHT }, 1, "mine: 1 of its 1 outputs are saved ones"),
            (Mine { num_dtypes: Some(2), ..RIGHT }, 1, "mine: 2 dtype(s) for 1 output(s)"),
            (
                Mine {
                    signature: "..m d -> ..m, ..m",
                    forward: |l, _| Ok([l.output(0)?].into_iter().collect()),
                    ..RIGHT
                },
                1,
                "mine: its forward makes 1 output(s), its signature has 2",
            ),
            (
                Mine {
                    forward: |_, x| Ok([x[0].viewed(x[0].view.narrow(0, 0, 1))].into_iter().collect()),
                    ..RIGHT
                },
                1,
                "mine: its forward makes f32[1, 8] of output 0, which is f32[2, 8]",
            ),
            (Mine { signature: "..m d -> ..m", ..RIGHT }, 1, "mine: its forward panicked"),
            (
                Mine { signature: "..m -> ..m, ..m", ..RIGHT },
                1,
                "mine: its forward panicked: a launch has the outputs of its contract",
            ),
        ];
        for (op, count, text) in told {
            let error = error(op, count);
            assert!(error.message().starts_with(text), "{text}: {error}");
            assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
        }
    }
}
