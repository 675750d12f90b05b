//! Every op file is on the list, with cases and a doc.

use shardgrad_tensor::ops::OPS;
use std::path::Path;

/// Files of `ops/` that hold no op of the list: what ops share, and redistribution, whose cases need a mesh.
const OTHERS: [&str; 5] = ["mod", "labels", "broadcast", "pointwise", "redistribute"];

#[test]
fn every_op_file_has_cases_and_a_doc() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut files: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|f| f.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|f| !OTHERS.contains(&f.as_str()))
        .collect();
    files.sort();
    let names: Vec<&str> = OPS.iter().map(|e| e.name).collect();
    assert_eq!(names, files, "ops/mod.rs lists every op file, in alphabetical order");
    for entry in OPS {
        assert!(!(entry.cases)().is_empty(), "{} has cases", entry.name);
        let text = std::fs::read_to_string(folder.join(format!("{}.rs", entry.name))).unwrap();
        let head = text.lines().next().unwrap();
        assert!(head.starts_with("//! ") && head.len() > 10, "{} says what it computes: {head}", entry.name);
        assert!(text.contains("#[cfg(test)]"), "{} has a test worked by hand", entry.name);
    }
}
