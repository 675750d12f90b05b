//! The recipes of docs/cookbook.md. The page shows the code of the files in this folder up to their tests.

mod accumulation;
mod clipping;
mod averages;
mod two_optimizers;
mod freezing;
mod hooks;
mod own_op;
mod own_plan;
mod checkpoints;
mod logs;

use shardgrad::prelude::*;

/// The most lines of code of a recipe, imports and comments aside.
const LINES_MAX: usize = 15;
/// Meshes whose numbers are compared with those of one rank.
const MESHES: [&str; 4] = ["dp=2", "dp=4", "tp=2", "dp=2,tp=2"];

/// Rows over dp, hidden units over tp.
fn plan() -> Plan {
    Plan::data_parallel("dp").and(Plan::tensor_parallel("tp").column_parallel("c_fc").row_parallel("c_proj"))
}

/// A small model, and a batch of 8 rows.
fn model_and_batch(rank: &Rank) -> Result<(Model<Mlp>, Tensor)> {
    let layout = plan().batch_layout(rank.mesh(), DType::F64, &[8, 4])?;
    Ok((
        Model::with_dtype(rank, Mlp::new(4, 8), &plan(), 1, DType::F64)?,
        Tensor::normal(rank, &layout, 7, 0, 1.0)?,
    ))
}

/// Runs a program on one rank and on meshes. Returns its numbers, which must not depend on the mesh.
fn on_meshes(program: impl Fn(&Rank) -> Result<Vec<f64>> + Sync) -> Vec<f64> {
    on_meshes_with(&MESHES, program)
}

fn on_meshes_with(meshes: &[&str], program: impl Fn(&Rank) -> Result<Vec<f64>> + Sync) -> Vec<f64> {
    let run = |mesh: &str| World::run(Mesh::parse(mesh)?, &program);
    let right = run("").unwrap().remove(0);
    for mesh in meshes {
        for found in run(mesh).unwrap_or_else(|e| panic!("{mesh}: {e}")) {
            crate::training_run::same(&right, &found, 1e-9, mesh);
        }
    }
    right
}

/// The code of a recipe: its file without the header and the tests.
fn code(file: &str) -> &str {
    let body = file.split_once("\n\n").expect("a header").1;
    body.split("\n#[test]").next().unwrap_or_default()
}

#[test]
fn page_shows_the_tested_code_in_few_lines() {
    let page = include_str!("../docs/cookbook.md");
    let blocks: Vec<&str> =
        page.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let files = [
        include_str!("cookbook/accumulation.rs"),
        include_str!("cookbook/clipping.rs"),
        include_str!("cookbook/averages.rs"),
        include_str!("cookbook/two_optimizers.rs"),
        include_str!("cookbook/freezing.rs"),
        include_str!("cookbook/hooks.rs"),
        include_str!("cookbook/own_op.rs"),
        include_str!("cookbook/own_plan.rs"),
        include_str!("cookbook/checkpoints.rs"),
        include_str!("cookbook/logs.rs"),
    ];
    assert_eq!(blocks.len(), files.len());
    for (block, file) in blocks.into_iter().zip(files) {
        // In the page a function is what a user would write.
        let code = code(file).replace("pub(super) fn", "fn");
        assert_eq!(block, code, "docs/cookbook.md differs from tests/cookbook/");
        let is_code = |line: &&str| {
            let line = line.trim();
            !(line.is_empty() || line.starts_with("//") || line.starts_with("use "))
        };
        let count = code.lines().filter(is_code).count();
        assert!(count <= LINES_MAX, "{count} lines:\n{code}");
    }
}
