//! A program that catches an error goes on: what was set for a scope is as before.

use shardgrad_autograd::{Program, Tape};
use shardgrad_dist::{Error, Kind, Mesh, Phase, Rank, Result, World};
use shardgrad_tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use shardgrad_tensor::{Context, DType, Layout, LocalTensor, Tensor, Value, unwind};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn run(mesh: &str, f: impl Fn(&Rank) -> Result<()> + Sync) {
    World::run(Mesh::parse(mesh).unwrap(), f).unwrap_or_else(|e| panic!("{mesh}: {e}"));
}

fn refuse<T>() -> Result<T> {
    Err(Error::new(Kind::Config, "refused"))
}

/// The message of the error with which `f` unwinds.
fn caught<T>(f: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).err().expect("an error unwinds");
    payload.downcast::<Error>().expect("an error of the library").message().to_string()
}

/// The identity, whose vjp is refused.
#[derive(Debug)]
struct RefusedVjp;

impl Op for RefusedVjp {
    fn name(&self) -> &'static str {
        "refused_vjp"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].clone()].into_iter().collect())
    }

    fn vjp(&self, _: &Vjp<'_>) -> Cotangents {
        unwind(refuse())
    }
}

#[test]
fn tape_records_again_after_no_grad_unwinds() {
    run("", |rank| {
        let (tape, w) = (Tape::new(rank), Tensor::from_host(rank, &[2], &[3.0, 5.0])?);
        let message = caught(|| tape.no_grad(|| tape.leaf(1, &w).reshape(&[3])));
        assert!(message.contains("reshape"), "{message}");
        tape.leaf(1, &w).square().sum().backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [6.0, 10.0]);
        Ok(())
    });
}

#[test]
fn tape_records_nodes_again_after_a_block_unwinds() {
    run("", |rank| {
        let (tape, w) = (Tape::new(rank), Tensor::from_host(rank, &[2], &[3.0, 5.0])?);
        let block = || tape.checkpoint(&[], |_| Ok(vec![tape.leaf(1, &w).reshape(&[3])]));
        assert!(caught(block).contains("reshape"));
        // No recording is left: a block may begin, and values can be read.
        let y = tape.checkpoint(&[], |_| Ok(vec![tape.leaf(1, &w).square().sum()]))?.remove(0);
        assert_eq!(y.item()?, 34.0);
        y.backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [6.0, 10.0]);
        let layouts = [Layout::invariant(rank.mesh(), DType::F64, &[2])];
        let program = || Program::record(rank, &layouts, None, |x| Ok(vec![x[0].reshape(&[3])]));
        assert!(caught(program).contains("reshape"));
        assert_eq!(Program::record(rank, &layouts, None, |x| Ok(x.to_vec()))?.outputs.len(), 1);
        Ok(())
    });
}

#[test]
fn ops_redistribute_again_after_a_vjp_unwinds() {
    run("dp=2", |rank| {
        let tape = Tape::new(rank);
        let w = Tensor::from_host(rank, &[2], &[3.0, 5.0])?;
        let x = tape.leaf(1, &w);
        let y = shardgrad_autograd::Var::apply_one(RefusedVjp, &[&x]).sum();
        assert_eq!(caught(|| y.backward()), "refused");
        let context = Context::of(rank);
        assert!(context.phase() == Phase::Forward && !context.is_in_vjp());
        // A partial sum is completed implicitly, which a vjp may not do.
        let sum = Tensor::full(rank, &Layout::parse("f64[2] +dp", rank.mesh())?, 1.5)?;
        assert_eq!(sum.square().to_f64()?, [2.25; 2]);
        let tape = Tape::new(rank);
        tape.leaf(1, &w).square().sum().backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [6.0, 10.0]);
        Ok(())
    });
}
