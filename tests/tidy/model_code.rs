//! Model code is written once, for any mesh: layers and models name no mesh axis, rank or collective.

use super::source::{Finding, Source, lines_found};
use super::tokens::{each_level, line, without_attributes};
use proc_macro2::TokenTree;

/// Folders of layers and models.
const MODEL_FOLDERS: [&str; 2] = ["nn/src/layer", "nn/src/model"];
/// Axis names, as they appear in string literals.
const AXES: [&str; 5] = ["dp", "tp", "pp", "cp", "ep"];
/// Methods of mesh, ranks and collectives.
const PARALLEL_METHODS: [&str; 7] =
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "Rank", "Mesh"];

/// Layers and models are written as if for one device; parallelism is data in a plan.
pub(super) fn one_model_source(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !MODEL_FOLDERS
        .iter()
        .any(|folder| source.path.strip_prefix(folder).is_some_and(|rest| rest.starts_with(['/', '.'])))
    {
        return findings;
    }
    each_level(&without_attributes(&source.product), &mut |level| {
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
    });
    findings
}

/// Returns the first axis name that is a word of a string literal.
fn axis_in(literal: &str) -> Option<String> {
    let text = literal.find('"').map(|at| &literal[at..])?;
    text.split(|c: char| !c.is_alphanumeric() && c != '_').find(|w| AXES.contains(w)).map(str::to_string)
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
