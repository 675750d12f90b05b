//! Ops without data: on the null back end the rule, the shapes and the collectives are the same.

use crate::rows::{cases, standards};
use shardgrad_dist::{Mesh, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::ops::OPS;
use shardgrad_tensor::{Layout, Tensor, op};
use std::panic::Location;

/// Layouts of the results of every case with its arguments pending or whole, and the number of collectives.
fn shapes(
    rank: &shardgrad_dist::Rank,
    standards: &[Vec<shardgrad_tensor::check::Standard>],
) -> shardgrad_dist::Result<Vec<String>> {
    let mut lines = Vec::new();
    for (entry, standards) in OPS.iter().zip(standards) {
        for (case, standard) in cases(entry).iter().zip(standards) {
            for mark in ["", " +a", " ~b"] {
                let layout = |g: &shardgrad_tensor::check::Global| {
                    let plain = Layout::invariant(rank.mesh(), g.dtype, &g.shape).to_string();
                    // Truth values have no sum.
                    let mark = if g.dtype == DType::Bool && mark == " +a" { "" } else { mark };
                    Layout::parse(&format!("{plain}{mark}"), rank.mesh())
                };
                let args: Vec<Tensor> = standard
                    .inputs
                    .iter()
                    .map(|g| g.place(rank, &layout(g)?))
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
fn shapes_and_collectives_are_the_same_without_data() {
    let standards = standards(OPS);
    let mesh = || Mesh::parse("a=2,b=2").unwrap();
    let real = World::new(mesh())
        .threads(1)
        .launch(|rank| {
            rank.trace().enable();
            shapes(rank, &standards)
        })
        .unwrap();
    for (index, real) in real.iter().enumerate() {
        assert_eq!(*real, World::new(mesh()).dry_run(index, |rank| shapes(rank, &standards)).unwrap());
    }
}
