//! Model code is written once, for any mesh: layers and models name no mesh axis, rank or collective, and read no layout.

use super::source::{Finding, Source, lines_found};
use super::tokens::{group, is_mark, is_path_mark, levels, line, without_attributes, word};
use proc_macro2::{Delimiter, TokenTree};

/// Folders of layers and models.
const MODEL_FOLDERS: [&str; 2] = ["nn/src/layer", "nn/src/model"];
/// Axis names, as they appear in string literals.
const AXES: [&str; 6] = ["dp", "fsdp", "tp", "pp", "cp", "ep"];
/// Methods of mesh, ranks and collectives.
const PARALLEL_METHODS: [&str; 7] =
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "Rank", "Mesh"];

/// Methods that read layouts, or whether a plan constrains a point.
const LAYOUT_METHODS: [&str; 10] = [
    "layout",
    "compute_layout",
    "dims",
    "partial",
    "replicate",
    "placement",
    "is_unsharded",
    "is_unconstrained",
    "is_identity",
    "to_layout",
];

/// Whether a file belongs to layers or models.
fn is_model_code(source: &Source) -> bool {
    MODEL_FOLDERS
        .iter()
        .any(|folder| source.path.strip_prefix(folder).is_some_and(|rest| rest.starts_with(['/', '.'])))
}

/// Layers and models do not choose by layout among forms of an op: the op itself does (`Op::decompose`).
pub(super) fn reads_no_layout(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !is_model_code(source) {
        return findings;
    }
    for level in &levels(&without_attributes(&source.product)) {
        for at in 1..level.len() {
            let is_method = is_mark(level, at - 1, '.') || at > 1 && is_path_mark(level, at - 2);
            let is_call = is_method && group(level, at + 1, Delimiter::Parenthesis).is_some();
            // Dropout, and the product of a layer with an adapter, are points of fused ops themselves.
            let is_point = ["nn/src/layer/dropout.rs", "nn/src/layer/linear/adapted.rs"]
                .contains(&source.path.as_str())
                && word(level, at).is_some_and(|name| name == "is_identity");
            let is_forbidden =
                |name: &String| is_call && !is_point && LAYOUT_METHODS.contains(&name.as_str());
            if let Some(name) = word(level, at).filter(is_forbidden) {
                let advice =
                    format!("`{name}` in model code; apply a fused op, which decomposes itself by layout");
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    }
    findings
}

/// Layers and models are written as if for one device; parallelism is data in a plan.
pub(super) fn one_model_source(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !is_model_code(source) {
        return findings;
    }
    for level in &levels(&without_attributes(&source.product)) {
        for tree in level {
            let found: Option<String> = match tree {
                TokenTree::Ident(ident) => {
                    Some(ident.to_string()).filter(|i| PARALLEL_METHODS.contains(&i.as_str()))
                }
                TokenTree::Literal(literal) => axis_in(&literal.to_string()),
                _ => None,
            };
            if let Some(found) = found {
                let advice = format!("`{found}` in model code; name a point here and let a plan shard it");
                findings.push(source.finding(line(tree), advice));
            }
        }
    }
    findings
}

/// Returns the first axis name that is a word of a string literal.
fn axis_in(literal: &str) -> Option<String> {
    let text = literal.find('"').map(|at| &literal[at..])?;
    text.split(|c: char| !c.is_alphanumeric() && c != '_').find(|w| AXES.contains(w)).map(str::to_string)
}

#[test]
fn calls_that_read_layouts_in_model_code_are_found() {
    for name in LAYOUT_METHODS {
        let text = format!(
            "//! x.{name}()\nfn f(x: &X) -> bool {{\n    g(x.{name}().ndim())\n}}\n/// x.{name}()\nfn g({name}: X) {{\n    h({name});\n    Value::{name}(x);\n}}"
        );
        assert_eq!(lines_found(reads_no_layout, "nn/src/layer/mlp.rs", &text), [3, 8], "{name}");
        assert_eq!(lines_found(reads_no_layout, "nn/src/model/gpt/mod.rs", &text), [3, 8]);
        assert!(lines_found(reads_no_layout, "nn/src/module/activation_point.rs", &text).is_empty());
    }
    let test = "#[cfg(test)] mod tests { fn f() { x.layout(); } }";
    assert!(lines_found(reads_no_layout, "nn/src/layer/mlp.rs", test).is_empty());
}

#[test]
fn mesh_names_in_model_code_are_found() {
    for name in PARALLEL_METHODS {
        let text = format!(
            "//! Speaks of {name}.\nfn f(x: &X) {{\n    x.{name}();\n}}\n/// {name}\nfn {name}2() {{}}"
        );
        assert_eq!(lines_found(one_model_source, "nn/src/layer/mlp.rs", &text), [3]);
        assert_eq!(lines_found(one_model_source, "nn/src/model/gpt/mod.rs", &text), [3]);
        assert_eq!(lines_found(one_model_source, "nn/src/layer.rs", &text), [3]);
        assert!(lines_found(one_model_source, "nn/src/plan/tensor.rs", &text).is_empty());
    }
    for axis in AXES {
        let text = format!(
            "/// \"{axis}\"\nconst A: &str =\n    \"{axis}\";\nconst B: &str = r\"[d@{axis}]\";\nlet {axis} = 'x';"
        );
        assert_eq!(lines_found(one_model_source, "nn/src/model/gpt.rs", &text), [3, 4]);
    }
    let fine =
        "fn f() { step(\"d{axis}pth\") }\n#[cfg(test)] mod tests { fn f() { Mesh::parse(\"dp=2\"); } }";
    assert!(lines_found(one_model_source, "nn/src/layer/mlp.rs", fine).is_empty());
}
