//! Ops in a dry run without data: on the null back end layouts, shapes and collectives are the same.

use crate::layouts::{cases, references};
use shardgrad_dist::{Mesh, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::ops::OPS;
use shardgrad_tensor::{Layout, Tensor, op};
use std::panic::Location;

/// The layouts of the results of every case with partial and replicated arguments, and the number of collectives.
fn shapes(
    rank: &shardgrad_dist::Rank,
    references: &[Vec<shardgrad_testing::op_check::Reference>],
) -> shardgrad_dist::Result<Vec<String>> {
    let mut lines = Vec::new();
    for (entry, references) in OPS.iter().zip(references) {
        for (case, reference) in cases(entry).iter().zip(references) {
            for mark in ["", " +a", " ~b"] {
                let layout = |g: &shardgrad_testing::GlobalTensor| {
                    let plain = Layout::invariant(rank.mesh(), g.dtype, &g.shape).to_string();
                    // Bools have no sum.
                    let mark = if g.dtype == DType::Bool && mark == " +a" { "" } else { mark };
                    Layout::parse(&format!("{plain}{mark}"), rank.mesh())
                };
                let args: Vec<Tensor> = reference
                    .inputs
                    .iter()
                    .map(|g| g.distribute(rank, &layout(g)?))
                    .collect::<shardgrad_dist::Result<_>>()?;
                let refs: Vec<&Tensor> = args.iter().collect();
                let outputs = op::apply(&*case.op, &refs, &[], Location::caller())?;
                let layouts: Vec<String> = outputs.iter().map(|t| t.layout().to_string()).collect();
                lines.push(format!(
                    "{}: {} {}",
                    entry.name,
                    layouts.join(" "),
                    rank.trace().num_collectives()
                ));
            }
        }
    }
    Ok(lines)
}

#[test]
fn dry_run_has_the_same_layouts_and_collectives() {
    let references = references(OPS);
    let mesh = || Mesh::parse("a=2,b=2").unwrap();
    let real = World::new(mesh())
        .threads(1)
        .launch(|rank| {
            rank.trace().enable();
            shapes(rank, &references)
        })
        .unwrap();
    for (index, real) in real.iter().enumerate() {
        assert_eq!(*real, World::new(mesh()).dry_run(index, |rank| shapes(rank, &references)).unwrap());
    }
}
