//! Ops in f32, bf16 and f16: dtypes of the results, and values up to rounding.

use crate::layouts::{cases, references};
use approx::abs_diff_eq;
use shardgrad_dist::{Mesh, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::op::DTypes;
use shardgrad_tensor::ops::{Input, OPS};
use shardgrad_tensor::{Layout, Tensor, op};
use shardgrad_testing::GlobalTensor;
use std::panic::Location;

#[test]
fn narrower_floats_agree_up_to_rounding() {
    let references = references(OPS);
    World::run(Mesh::single(), |rank| {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 0.04), (DType::F16, 0.005)] {
            // A cast is made for one dtype.
            for (entry, references) in OPS.iter().zip(&references).filter(|(e, _)| e.name != "cast") {
                for (case, reference) in cases(entry).iter().zip(references) {
                    let is_far = |input: &Input| matches!(input, Input::Offset(_, x) if *x != 0.0);
                    let is_far = case.inputs.iter().any(is_far);
                    if is_far && dtype.size() == 2 {
                        // 16-bit floats cannot represent fractions of numbers that large.
                        continue;
                    }
                    let tolerance = if is_far { 1e-3 } else { tolerance };
                    let narrow = |g: &GlobalTensor| GlobalTensor {
                        dtype: if g.dtype.is_float() { dtype } else { g.dtype },
                        ..g.clone()
                    };
                    let inputs: Vec<GlobalTensor> = reference.inputs.iter().map(narrow).collect();
                    let whole = |g: &GlobalTensor| {
                        g.distribute(rank, &Layout::invariant(rank.mesh(), g.dtype, &g.shape))
                    };
                    let args: Vec<Tensor> = inputs.iter().map(whole).collect::<Result<_>>()?;
                    let refs: Vec<&Tensor> = args.iter().collect();
                    let outputs = op::apply(&*case.op, &refs, Location::caller())?;
                    let given: DTypes = inputs.iter().map(|g| g.dtype).collect();
                    let ruled = case.op.dtypes(&given, outputs.len())?;
                    for (i, (y, want)) in outputs.iter().zip(&reference.outputs).enumerate() {
                        assert_eq!(y.dtype(), ruled[i], "{:?} output {i}", case.op);
                        for (got, want) in y.to_f64()?.iter().zip(&want.data) {
                            let epsilon = tolerance * (1.0 + want.abs());
                            let near = got == want || abs_diff_eq!(got, want, epsilon = epsilon);
                            assert!(near, "{:?} in {dtype}, output {i}: {got} instead of {want}", case.op);
                        }
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}
