//! Programs that a user of the library writes, each in a file, on one rank and on four meshes: the numbers do not depend on the mesh, to
//! rounding in loops without a trainer, which sum in the order of the mesh.

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
use std::fs;
use std::path::Path;

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

/// The first line that declares a type parameter or names a lifetime. A lifetime that the compiler infers (`'_`) is none.
fn declares_generics(code: &str) -> Option<&str> {
    let declares = |line: &str| {
        let declared = ["fn ", "struct ", "enum ", "impl", "trait "].iter().any(|word| {
            let rest = line.trim_start().trim_start_matches("pub(super) ").strip_prefix(word);
            rest.is_some_and(|rest| {
                let name = rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
                name.starts_with('<')
            })
        });
        let names_lifetime = ["&'", "<'"].iter().any(|before| {
            line.split(before).skip(1).any(|rest| !rest.starts_with("_") && !rest.starts_with("static"))
        });
        declared || names_lifetime
    };
    code.lines().find(|line| declares(line))
}

#[test]
fn programs_need_no_generics_and_no_lifetimes() {
    for (folder, count) in [("programs", 14), ("cookbook", 10)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), count);
        for file in files {
            assert_eq!(declares_generics(&fs::read_to_string(&file).unwrap()), None, "{}", file.display());
        }
    }
    for planted in ["fn f<T>(x: T) {}", "impl<M: Module> Op for A<M> {}", "struct A { x: &'a Var }"] {
        assert_eq!(declares_generics(planted), Some(planted));
    }
    assert_eq!(declares_generics("fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {"), None);
}
