//! Planning of an op on some layouts: checks, dtypes, implicit redistribution steps and output layouts, without running the op.

use super::Op;
use super::canonical_sum::check_no_partial_argument;
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
    let key = op.plan_key();
    let plans = if context.sum_tree().is_some() { &context.canonical_plans } else { &context.plans };
    let cached = key.and_then(|key| plans.get(key, args, want));
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
            key.inspect(|key| plans.insert(*key, args, want, &inference));
            inference
        }
    };
    if inference.changes_inputs() && context.is_in_vjp() {
        if context.sum_tree().is_some() {
            check_no_partial_argument(op, rank, args.iter().copied()).map_err(|e| e.at(site))?;
        }
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
    use crate::execution::plan_cache::CachedPlan;
    use crate::methods::value::Value;
    use crate::op::{DTypes, ForwardContext, LocalTensors, PlanKey};
    use crate::ops::add::Add;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    /// Returns whether no plan was made between two states of the cache: a plan that was made again has another address.
    fn are_same(before: &[Rc<CachedPlan>], after: &[Rc<CachedPlan>]) -> bool {
        before.len() == after.len() && before.iter().zip(after).all(|(a, b)| Rc::ptr_eq(a, b))
    }

    #[test]
    fn plans_are_cached_by_layouts() {
        World::run(Mesh::single(), |rank| {
            let (context, rank_context) = (Context::of(rank), (rank, Context::of(rank)));
            let [x, y] = ["f32[4, 3]", "f32[3]"].map(|text| Layout::parse(text, rank.mesh()).unwrap());
            let add = |a: &Layout, b: &Layout| {
                plan(&Add::between(a.extents(), b.extents()), rank_context, &[a, b], &[], Location::caller())
            };
            let first = add(&x, &x)?;
            let plans = context.plans.plans();
            assert!(Rc::ptr_eq(&first, &add(&x, &x)?) && are_same(&plans, &context.plans.plans()));
            assert!(!Rc::ptr_eq(&first, &add(&x, &y)?));
            // A plan that was refused is refused again.
            for _ in 0..2 {
                assert_eq!(add(&y, &Layout::parse("f32[4]", rank.mesh())?).unwrap_err().kind(), Kind::Shape);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn the_second_step_of_products_and_fused_ops_makes_no_plan() {
        World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let tensor = |text| Tensor::full(rank, &Layout::parse(text, rank.mesh())?, 0.5);
            let (x, w, b) = (tensor("f32[2@dp, 4, 6]")?, tensor("f32[6, 6]")?, tensor("f32[6]")?);
            let qkv = tensor("f32[2@dp, 4, 3, 2, 3]")?;
            let [q, k, v] = [0, 1, 2].map(|i| qkv.select(2, i));
            let plans = &Context::of(rank).plans;
            // Each call makes its op anew, as the layers of a model do in every microbatch.
            let ops: [(&str, &dyn Fn() -> Tensor); 13] = [
                ("matmul", &|| x.matmul(&w)),
                ("matmul_nt", &|| x.matmul_nt(&w)),
                ("layer_norm", &|| x.layer_norm(&b, &b, 1e-5)),
                ("rms_norm", &|| x.rms_norm(&b, 1e-5)),
                ("linear", &|| x.linear(&w, Some(&b), None)),
                ("linear with residual", &|| x.linear(&w, Some(&b), Some(&x))),
                ("linear with residual, without bias", &|| x.linear(&w, None, Some(&x))),
                ("mlp", &|| x.mlp(&w, &b, &w, None, None)),
                ("mlp with last bias", &|| x.mlp(&w, &b, &w, Some(&b), None)),
                ("mlp with residual", &|| x.mlp(&w, &b, &w, Some(&b), Some(&x))),
                ("swiglu", &|| x.swiglu(&x)),
                ("attention", &|| q.attention(&k, &v, true)),
                ("qkv_packed_attention", &|| qkv.qkv_packed_attention(true, &[])),
            ];
            for (name, apply) in ops {
                let before = plans.plans();
                let _ = apply();
                let first = plans.plans();
                assert!(!are_same(&before, &first), "{name}: the first step makes a plan");
                let _ = apply();
                assert!(are_same(&first, &plans.plans()), "{name}: the second step makes a plan again");
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
