//! `unsafe` is used in a few listed files only. Clippy checks that each use has a `SAFETY:` comment.

use super::source::{Finding, Source, lines_found};
use super::tokens::{group, is_mark, is_word, line};
use proc_macro2::Delimiter;

/// Files, and folders that end in `/`, that may contain `unsafe`.
const ALLOWED: [&str; 20] = [
    "kernels/src/spin_lock.rs",
    "kernels/src/buffer.rs",
    "kernels/src/buffer/",
    "kernels/src/cpu/job.rs",
    "kernels/src/cpu/pool.rs",
    "kernels/src/cpu/simd/",
    "kernels/src/cpu/gemm.rs",
    "kernels/src/cpu/gemm/epilogue.rs",
    "kernels/src/cpu/gemm/leaves.rs",
    "kernels/src/cuda/library.rs",
    "kernels/src/cuda/compile.rs",
    "kernels/src/cuda/driver.rs",
    "kernels/src/cuda/launch.rs",
    "kernels/src/cuda/cublaslt.rs",
    "kernels/src/cuda/graph.rs",
    "kernels/src/gpu/shim/load.rs",
    "nccl/src/functions.rs",
    "nccl/src/library.rs",
    "nccl/src/communicator.rs",
    "benches/peers/gemm/src/main.rs",
];

/// Returns whether a file may contain `unsafe`.
fn is_allowed(path: &str) -> bool {
    ALLOWED.iter().any(|a| path == *a || (a.ends_with('/') && path.starts_with(a)))
}

/// Other files contain no `unsafe`.
pub(super) fn unsafe_place(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for level in &source.levels {
        let words = (0..level.len()).filter(|&at| is_word(level, at, "unsafe") && !is_allowed(&source.path));
        let advice = "`unsafe` outside of the list in tests/tidy/unsafety.rs; write it safely, or argue for the file in an ADR";
        findings.extend(words.map(|at| source.finding(line(&level[at]), advice)));
    }
    findings
}

/// Every crate root forbids `unsafe`, except those of `kernels` and `nccl`.
pub(super) fn forbids_unsafe(source: &Source) -> Vec<Finding> {
    let is_root = ["src/lib.rs", "src/main.rs"].iter().any(|r| source.path.ends_with(r));
    if !is_root || source.package().is_none_or(|package| ["kernels", "nccl"].contains(&package)) {
        return Vec::new();
    }
    let mut forbidden = false;
    for level in &source.levels {
        forbidden |= (0..level.len()).any(|at| {
            let inside =
                group(level, at + 2, Delimiter::Bracket).map(|g| g.stream().to_string().replace(' ', ""));
            is_mark(level, at, '#')
                && is_mark(level, at + 1, '!')
                && inside.as_deref() == Some("forbid(unsafe_code)")
        });
    }
    if forbidden {
        Vec::new()
    } else {
        vec![source.finding(1, "add `#![forbid(unsafe_code)]` below the crate's doc")]
    }
}

/// The listed places exist.
pub(super) fn listed_places(tree: &[Source]) -> Vec<Finding> {
    let stale = ALLOWED.iter().filter(|a| !tree.iter().any(|s| s.path.starts_with(*a)));
    let advice = |a: &&str| format!("`{a}` does not exist; remove it from the list");
    stale.map(|a| Finding { path: "tests/tidy/unsafety.rs".into(), line: 1, advice: advice(a) }).collect()
}

#[test]
fn the_record_names_the_same_places() {
    let record = include_str!("../../docs/adr/0012-unsafe-budget.md");
    let rows = record.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let listed: Vec<&str> = rows.map(|(place, _)| place).collect();
    assert_eq!(listed, ALLOWED, "docs/adr/0012-unsafe-budget.md beside tests/tidy/unsafety.rs");
}

#[test]
fn unsafe_elsewhere_is_found() {
    let text =
        "//! unsafe in words\nfn f() { unsafe { g() } }\nunsafe impl Send for A {}\nm!(unsafe fn h() {});";
    assert_eq!(lines_found(unsafe_place, "tensor/src/a.rs", text), [3, 2, 4]);
    assert_eq!(lines_found(unsafe_place, "kernels/src/cpu/mod.rs", text).len(), 3);
    assert!(lines_found(unsafe_place, "kernels/src/cpu/simd/avx2.rs", text).is_empty());
    assert!(lines_found(unsafe_place, "nn/src/lib.rs", "#![forbid(unsafe_code)]").is_empty());
}

#[test]
fn a_crate_that_does_not_forbid_unsafe_is_found() {
    assert_eq!(lines_found(forbids_unsafe, "nn/src/lib.rs", "//! #![forbid(unsafe_code)]\n"), [1]);
    assert_eq!(lines_found(forbids_unsafe, "src/main.rs", "#![deny(unsafe_code)]"), [1]);
    assert!(lines_found(forbids_unsafe, "nn/src/lib.rs", "//! Doc.\n#![forbid(unsafe_code)]").is_empty());
    assert!(lines_found(forbids_unsafe, "kernels/src/lib.rs", "").is_empty());
}
