//! Every op file is in the list of ops, with cases, a module doc and a test.

use shardgrad_tensor::ops::OPS;
use std::path::Path;

/// Files of `ops/` without an op of the list: code that ops share, and redistribution, whose cases need a mesh.
const OTHERS: [&str; 5] = ["mod", "labels", "broadcast", "unary_backward", "redistribute"];

#[test]
fn every_op_file_has_cases_and_a_doc() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut files: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|f| f.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|f| !OTHERS.contains(&f.as_str()))
        .collect();
    files.sort();
    let mut names: Vec<&str> = OPS.iter().map(|e| e.name).collect();
    names.sort_unstable();
    assert_eq!(names, files, "ops/mod.rs lists every op file");
    for entry in OPS {
        assert!(!(entry.cases)().is_empty(), "{} has cases", entry.name);
        let text = std::fs::read_to_string(folder.join(format!("{}.rs", entry.name))).unwrap();
        let head = text.lines().next().unwrap();
        assert!(
            head.starts_with("//! ") && head.len() > 10,
            "the first line of {} says what the op computes: {head}",
            entry.name
        );
        assert!(text.contains("#[cfg(test)]"), "{} has a test against values computed by hand", entry.name);
    }
}
