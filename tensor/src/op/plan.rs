//! Planning of an op on some layouts: checks, dtypes, implicit redistribution steps and output layouts, without running the op.

use super::Op;
use super::error_text::{describe, refusal_error};
use super::validation::{check_visible_outputs, invalid_signature, step_in_vjp};
use crate::execution::context::Context;
use crate::execution::local_tensor::with_mapped;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use shardgrad_dist::{Error, Rank, Result};
use std::panic::Location;
use std::rc::Rc;

/// Plans an op on arguments of some layouts: dtypes, implicit redistribution steps and output layouts, from the cache if possible.
///
/// # Errors
/// `Kind::DType`, `Kind::Shape` or `Kind::Layout` with signature, arguments, rank and suggested repairs; `Kind::Unsupported` for an
/// invalid op.
pub fn plan(
    op: &dyn Op,
    (rank, context): (&Rank, &Context),
    args: &[&Layout],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Result<Rc<Inference>> {
    rank.check();
    let key = if want.is_empty() { op.plan_key() } else { None };
    let cached = key.and_then(|key| context.plans.get(key, args));
    let inference = match cached {
        Some(inference) => {
            debug_assert!(
                infer_checked(op, (rank, context), args, want, site)
                    .is_ok_and(|fresh| fresh.is_equivalent_to(&inference)),
                "bug: {op:?} on {args:?} has another plan than the cached plan of its type: Op::plan_key must be None"
            );
            inference
        }
        None => {
            let inference = infer_checked(op, (rank, context), args, want, site)?;
            inference.set_input_layouts(args);
            key.inspect(|key| context.plans.insert(*key, args, &inference));
            inference
        }
    };
    if inference.targets.iter().any(Option::is_some) && context.is_in_vjp() {
        return Err(step_in_vjp(op, (rank, args), site));
    }
    Ok(inference)
}

/// [`plan`] without the cache.
fn infer_checked(
    op: &dyn Op,
    (rank, context): (&Rank, &Context),
    args: &[&Layout],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Result<Rc<Inference>> {
    let signature = context.checked_signature(op.signature()).map_err(|e| invalid_signature(op, &e, site))?;
    // Borrowed and not moved: moving memory that was just written is slow.
    let outputs = with_mapped(args, |l| l.dtype(), |dtypes| op.dtypes(dtypes, signature.num_outputs()));
    let outputs = match &outputs {
        Ok(outputs) => outputs,
        Err(e) => {
            let named = Error::new(e.kind(), format!("{}: {}", op.name(), e.message()));
            let described = describe(named, op, rank, args, site);
            let details = e.details().iter();
            return Err(details.fold(described, |error, (label, text)| error.detail(label, text.as_str())));
        }
    };
    let inference = op
        .infer(context, args, outputs, want)
        .map_err(|refusal| refusal_error(op, rank, args, &refusal, site))?;
    check_visible_outputs(op, (rank, args), &inference, site)?;
    Ok(inference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::local_tensor::LocalTensor;
    use crate::op::{DTypes, ForwardContext, LocalTensors, PlanKey};
    use crate::ops::add::Add;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn plans_are_cached_by_layouts() {
        World::run(Mesh::single(), |rank| {
            let rank_context = (rank, Context::of(rank));
            let [x, y] = ["f32[4, 3]", "f32[3]"].map(|text| Layout::parse(text, rank.mesh()).unwrap());
            let add = |a: &Layout, b: &Layout| {
                plan(&Add::between(a.extents(), b.extents()), rank_context, &[a, b], &[], Location::caller())
            };
            let same = Rc::ptr_eq(&add(&x, &x)?, &add(&x, &x)?);
            assert!(same && !Rc::ptr_eq(&add(&x, &x)?, &add(&x, &y)?));
            // A plan that was refused is refused again.
            for _ in 0..2 {
                assert_eq!(add(&y, &Layout::parse("f32[4]", rank.mesh())?).unwrap_err().kind(), Kind::Shape);
            }
            Ok(())
        })
        .unwrap();
    }

    /// An op whose plan key ignores a field that its dtypes depend on.
    #[derive(Debug)]
    struct WrongPlanKey(DType);

    impl Op for WrongPlanKey {
        fn name(&self) -> &'static str {
            "wrong_plan_key"
        }

        fn signature(&self) -> &str {
            "..m -> ..m"
        }

        fn plan_key(&self) -> Option<PlanKey> {
            Some(PlanKey::of::<WrongPlanKey>("..m -> ..m"))
        }

        fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
            Ok([self.0].into_iter().collect())
        }

        fn forward(&self, _: &ForwardContext<'_>, _: &[&LocalTensor]) -> Result<LocalTensors> {
            unreachable!("the test only plans the op")
        }
    }

    #[test]
    fn a_wrong_plan_key_is_detected_in_debug_builds() {
        let planned = |dtypes: [DType; 2]| {
            World::run(Mesh::single(), |rank| {
                let x = Layout::parse("f32[4]", rank.mesh())?;
                let planned_dtypes = dtypes.map(|dtype| {
                    let rank_context = (rank, Context::of(rank));
                    plan(&WrongPlanKey(dtype), rank_context, &[&x], &[], Location::caller())
                        .map(|i| i.outputs[0].dtype())
                });
                planned_dtypes.into_iter().collect::<Result<Vec<_>>>()
            })
        };
        assert_eq!(planned([DType::F64; 2]).unwrap()[0], [DType::F64; 2]);
        let error = planned([DType::F64, DType::F32]).unwrap_err();
        assert!(error.kind() == Kind::Panic && error.message().contains("has another plan"), "{error}");
    }
}
