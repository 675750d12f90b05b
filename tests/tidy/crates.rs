//! Crate order: each crate imports only the crates listed for it.

use super::source::{Finding, Source, lines_found, nothing_in, texts};
use super::tokens::line;
use proc_macro2::TokenTree;

/// Each crate, and the workspace crates it may import. The root package may import all.
const IMPORTS: [(&str, &[&str]); 7] = [
    ("kernels", &[]),
    ("nccl", &["kernels"]),
    ("dist", &["kernels", "nccl"]),
    ("tensor", &["kernels", "dist"]),
    ("autograd", &["dist", "tensor"]),
    ("nn", &["tensor", "autograd"]),
    (TESTING, &["kernels", "dist", "tensor", "autograd"]),
];

/// The crate of test oracles, which crates above `dist` may import as a dev-dependency.
const TESTING: &str = "testing";
/// Crates whose tests do not import the test oracles.
const BELOW_TESTING: [&str; 3] = ["kernels", "nccl", "dist"];

/// Returns the crates that a listed crate may import.
fn allowed(package: &str) -> Option<&'static [&'static str]> {
    IMPORTS.iter().find(|(name, _)| *name == package).map(|(_, allowed)| *allowed)
}

/// Returns advice for a forbidden import.
fn refusal(package: &str, imported: &str) -> Option<String> {
    let allowed = allowed(package)?;
    let fine = imported == package || allowed.contains(&imported);
    let may = if allowed.is_empty() { "no workspace crate".to_string() } else { allowed.join(", ") };
    (!fine).then(|| {
        format!(
            "`{package}` may import {may}, not `{imported}`; move the code to a crate that may import both"
        )
    })
}

/// A source file names only the crates that its crate may import.
pub(super) fn crate_order(source: &Source) -> Vec<Finding> {
    let Some(package) = source.package() else { return Vec::new() };
    let mut findings = Vec::new();
    for level in &source.levels {
        for tree in level {
            let TokenTree::Ident(ident) = tree else { continue };
            let name = ident.to_string();
            let Some(imported) = name.strip_prefix("shardgrad_") else { continue };
            if let Some(advice) = refusal(package, imported) {
                findings.push(source.finding(line(tree), advice));
            }
        }
    }
    findings
}

/// A manifest lists only the crates that its crate may import, also as dev-dependencies; the test oracles only as a
/// dev-dependency.
fn manifest_order(path: &str, text: &str) -> Vec<Finding> {
    let package = path.strip_suffix("/Cargo.toml").unwrap_or("");
    let mut findings = Vec::new();
    let mut table = "";
    for (at, row) in text.lines().enumerate() {
        if row.starts_with('[') {
            table = row.trim_end();
        }
        let lists = table.ends_with("dependencies]") && table != "[workspace.dependencies]";
        let Some(name) = row.strip_prefix("shardgrad-").filter(|_| lists) else { continue };
        let imported = name.split(['.', '=', ' ']).next().unwrap_or_default();
        let advice = match imported {
            TESTING if table != "[dev-dependencies]" => {
                Some("only tests use `shardgrad-testing`; list it under [dev-dependencies]".to_string())
            }
            TESTING if !BELOW_TESTING.contains(&package) => None,
            _ => refusal(package, imported),
        };
        if let Some(advice) = advice {
            findings.push(Finding { path: path.to_string(), line: at + 1, advice });
        }
    }
    findings
}

#[test]
fn manifests_import_downwards() {
    let manifests = texts().into_iter().filter(|(path, _)| path.ends_with("Cargo.toml"));
    nothing_in(manifests.flat_map(|(path, text)| manifest_order(&path, &text)).collect());
}

#[test]
fn upward_import_is_found() {
    let text = "//! A crate.\nuse shardgrad_tensor::Tensor;\nfn f() { shardgrad_nn::g() }";
    assert_eq!(lines_found(crate_order, "kernels/src/a.rs", text), [2, 3]);
    assert_eq!(lines_found(crate_order, "dist/src/a/b.rs", text), [2, 3]);
    assert_eq!(lines_found(crate_order, "autograd/src/a.rs", text), [3]);
    assert_eq!(lines_found(crate_order, "nn/src/a.rs", "use shardgrad_kernels::DType;"), [1]);
    assert!(lines_found(crate_order, "nn/src/a.rs", text).is_empty());
    assert!(lines_found(crate_order, "src/a.rs", text).is_empty());
}

#[test]
fn upward_dependency_is_found() {
    let text = "[package]\nname = \"x\"\n[dependencies]\nshardgrad-nn.workspace = true\n[dev-dependencies]\n\
                shardgrad-kernels = { path = \"x\" }\n[features]\nshardgrad-nn = []";
    let lines = |path: &str| manifest_order(path, text).iter().map(|f| f.line).collect::<Vec<_>>();
    assert_eq!(lines("tensor/Cargo.toml"), [4]);
    assert_eq!(lines("autograd/Cargo.toml"), [4, 6]);
    assert!(lines("Cargo.toml").is_empty());
}

#[test]
fn test_oracles_outside_of_dev_dependencies_are_found() {
    let text = "[dependencies]\nshardgrad-testing.workspace = true\n[dev-dependencies]\nshardgrad-testing.workspace = true";
    let lines = |path: &str| manifest_order(path, text).iter().map(|f| f.line).collect::<Vec<_>>();
    assert_eq!((lines("tensor/Cargo.toml"), lines("Cargo.toml")), (vec![2], vec![2]));
    assert_eq!(lines("dist/Cargo.toml"), [2, 4]);
}
