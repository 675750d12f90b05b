//! Programs that a user of the library writes, each in a file, on one rank and on four meshes: the numbers do not depend on the mesh.

mod vision_transformer;
mod squared_relu;
mod linear_recurrence;
mod own_loop;
mod inspection;
mod resume_elsewhere;
mod fine_tuning;
mod logs;
mod sharded_storage;
mod sequence_parallel;
mod lora;
mod unequal_labels;
mod averaged_weights;
mod own_muon;

use crate::training_run::same;
use shardgrad::prelude::*;

/// Runs a program on one rank and on meshes. Returns its numbers; those of every rank of every mesh must be the same, up to the
/// relative difference `bound`.
fn same_on(meshes: [&str; 4], bound: f64, program: impl Fn(&Rank) -> Result<Vec<f64>> + Sync) -> Vec<f64> {
    let run = |mesh: &str| {
        World::run(Mesh::parse(mesh).unwrap(), &program).unwrap_or_else(|e| panic!("{mesh}: {e}"))
    };
    let right = run("").remove(0);
    for mesh in meshes {
        run(mesh).iter().for_each(|found| same(&right, found, bound, mesh));
    }
    right
}
