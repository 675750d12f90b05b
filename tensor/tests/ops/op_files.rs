//! Every op is in the list of ops: a file with cases, a module doc and a test, or a row of a table, whose form includes them.

use shardgrad_tensor::ops::{OPS, OpModule};
use std::path::Path;

/// Files of `ops/` without an op of the list: code that ops share, and redistribution, whose cases need a mesh.
const OTHERS: [&str; 8] = [
    "mod",
    "labels",
    "reduced_dims",
    "shard_candidates",
    "broadcast",
    "attention_mask",
    "unary_row",
    "redistribute",
];
/// Files of `ops/` that are tables of ops. The compiler reports a row that is not in the list, as unused.
const TABLES: [&str; 1] = ["unary"];

#[test]
fn every_op_has_cases_and_a_doc() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut files: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        // The folder of an op holds its parts.
        .filter(|path| path.is_file())
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|f| !OTHERS.contains(&f.as_str()) && !TABLES.contains(&f.as_str()))
        .collect();
    files.sort();
    let (rows, listed): (Vec<&OpModule>, Vec<&OpModule>) =
        OPS.iter().partition(|e| e.source.starts_with("/// "));
    let mut names: Vec<&str> = listed.iter().map(|e| e.name).collect();
    names.sort_unstable();
    assert_eq!(names, files, "ops/mod.rs lists every op file");
    for entry in listed {
        assert!(!(entry.cases)().is_empty(), "{} has cases", entry.name);
        let head = entry.source.lines().next().unwrap();
        assert!(
            head.starts_with("//! ") && head.len() > 10,
            "the first line of {} says what the op computes: {head}",
            entry.name
        );
        assert!(
            entry.source.contains("#[cfg(test)]"),
            "{} has a test against values computed by hand",
            entry.name
        );
    }
    for entry in rows {
        let head = entry.source.lines().next().unwrap();
        assert!(head.len() > 10, "the first line of {} says what the op computes: {head}", entry.name);
        let names: Vec<&str> = (entry.cases)().iter().map(|case| case.op.name()).collect();
        assert!(
            names.iter().all(|name| *name == entry.name),
            "the kernel of {} has its name, not {names:?}",
            entry.name
        );
    }
}
