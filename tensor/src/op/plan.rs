//! What an op will do to some layouts, before it is done.

use super::Op;
use super::message::{describe, refused};
use super::mistake::{check_shown, closed, unreadable};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::piece::listed;
use shardgrad_dist::{Error, Rank, Result};
use std::panic::Location;
use std::rc::Rc;

/// Dtypes, steps and output layouts of an op on some arguments of a rank, whose context is given too, or the error with
/// its repairs.
///
/// # Errors
/// `Kind::DType`, `Kind::Shape` or `Kind::Layout`, in the fixed form of messages.
pub fn plan(
    op: &dyn Op,
    (rank, context): (&Rank, &Context),
    args: &[&Layout],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Result<Rc<Inference>> {
    rank.check();
    let fixed = if want.is_empty() { op.fixed() } else { None };
    let known = fixed.and_then(|fixed| context.plans.find(fixed, args));
    let inference = match known {
        Some(inference) => {
            debug_assert!(
                inferred(op, (rank, context), args, want, site).is_ok_and(|fresh| fresh.is_as(&inference)),
                "bug: {op:?} on {args:?} is planned otherwise than one of its type before"
            );
            inference
        }
        None => {
            let inference = inferred(op, (rank, context), args, want, site)?;
            inference.settle(args);
            fixed.inspect(|fixed| context.plans.keep(*fixed, args, &inference));
            inference
        }
    };
    if inference.targets.iter().any(Option::is_some) && context.is_closed() {
        return Err(closed(op, (rank, args), site));
    }
    Ok(inference)
}

/// The same, always worked out.
fn inferred(
    op: &dyn Op,
    (rank, context): (&Rank, &Context),
    args: &[&Layout],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Result<Rc<Inference>> {
    let signature = context.checked_signature(op.signature()).map_err(|e| unreadable(op, &e, site))?;
    // Read where they lie, as in `run`.
    let outputs = listed(args, |l| l.dtype(), |dtypes| op.dtypes(dtypes, signature.num_outputs()));
    let outputs = match &outputs {
        Ok(outputs) => outputs,
        Err(e) => {
            let named = Error::new(e.kind(), format!("{}: {}", op.name(), e.message()));
            let described = describe(named, op, rank, args, site);
            let told = e.details().iter();
            return Err(told.fold(described, |error, (label, text)| error.detail(label, text.as_str())));
        }
    };
    let inference =
        op.infer(context, args, outputs, want).map_err(|refusal| refused(op, rank, args, &refusal, site))?;
    check_shown(op, (rank, args), &inference, site)?;
    Ok(inference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{DTypes, Fixed, Local, Pieces};
    use crate::ops::add::Add;
    use crate::piece::Piece;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn what_was_planned_once_is_found_again() {
        World::run(Mesh::single(), |rank| {
            let place = (rank, Context::of(rank));
            let [x, y] = ["f32[4, 3]", "f32[3]"].map(|text| Layout::parse(text, rank.mesh()).unwrap());
            let add = |a: &Layout, b: &Layout| {
                plan(&Add::between(a.extents(), b.extents()), place, &[a, b], &[], Location::caller())
            };
            let same = Rc::ptr_eq(&add(&x, &x)?, &add(&x, &x)?);
            assert!(same && !Rc::ptr_eq(&add(&x, &x)?, &add(&x, &y)?));
            // What is refused is refused again.
            for _ in 0..2 {
                assert_eq!(add(&y, &Layout::parse("f32[4]", rank.mesh())?).unwrap_err().kind(), Kind::Shape);
            }
            Ok(())
        })
        .unwrap();
    }

    /// An op that says of itself that its field does not matter.
    #[derive(Debug)]
    struct Liar(DType);

    impl Op for Liar {
        fn name(&self) -> &'static str {
            "liar"
        }

        fn signature(&self) -> &str {
            "..m -> ..m"
        }

        fn fixed(&self) -> Option<Fixed> {
            Some(Fixed::of::<Liar>("..m -> ..m"))
        }

        fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
            Ok([self.0].into_iter().collect())
        }

        fn forward(&self, _: &Local<'_>, _: &[&Piece]) -> Result<Pieces> {
            unreachable!("it is only planned")
        }
    }

    #[test]
    fn an_op_that_is_not_fixed_is_found_out() {
        let planned = |dtypes: [DType; 2]| {
            World::run(Mesh::single(), |rank| {
                let x = Layout::parse("f32[4]", rank.mesh())?;
                let made = dtypes.map(|dtype| {
                    let place = (rank, Context::of(rank));
                    plan(&Liar(dtype), place, &[&x], &[], Location::caller()).map(|i| i.outputs[0].dtype())
                });
                made.into_iter().collect::<Result<Vec<_>>>()
            })
        };
        assert_eq!(planned([DType::F64; 2]).unwrap()[0], [DType::F64; 2]);
        let error = planned([DType::F64, DType::F32]).unwrap_err();
        assert!(error.kind() == Kind::Panic && error.message().contains("is planned otherwise"), "{error}");
    }
}
