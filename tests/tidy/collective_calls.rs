//! Collectives are called in `dist` and in a few listed files only.

use super::source::{Finding, Source, lines_found};
use super::tokens::{group, is_mark, line, word};
use proc_macro2::Delimiter;

/// Files, and folders that end in `/`, that may call a collective. A new one needs a reason in ADR 11.
const ALLOWED_CALLERS: [&str; 6] = [
    "tensor/src/tensor/redistribute.rs",
    "tensor/src/training_step/control.rs",
    "tensor/src/training_step/consistency.rs",
    "tensor/src/training_step/matrix_owners.rs",
    "tensor/src/training_step/canonical_sum.rs",
    "autograd/src/pipeline/run.rs",
];
const COLLECTIVES: [&str; 9] = [
    "all_reduce",
    "all_reduce_async",
    "all_reduce_canonical",
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_async",
    "all_to_all",
    "send",
    "recv",
];

/// Outside `dist` and tests, only the listed files call collectives.
pub(super) fn collective_calls(source: &Source) -> Vec<Finding> {
    let is_allowed =
        ALLOWED_CALLERS.iter().any(|d| source.path == *d || (d.ends_with('/') && source.path.starts_with(d)));
    if is_allowed || source.package().is_none_or(|package| package == "dist") {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for level in &source.product_levels {
        for at in 1..level.len() {
            let called =
                is_mark(level, at - 1, '.') && group(level, at + 1, Delimiter::Parenthesis).is_some();
            let name = word(level, at).filter(|w| called && COLLECTIVES.contains(&w.as_str()));
            if let Some(name) = name {
                let advice = format!(
                    "`{name}` in a file that may not call collectives; state a layout and let `redistribute` move the bytes, or add the \
                     file to ALLOWED_CALLERS in tests/tidy/collective_calls.rs and its reason to ADR 11"
                );
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    }
    findings
}

/// The listed files exist.
pub(super) fn listed_callers(tree: &[Source]) -> Vec<Finding> {
    let stale = ALLOWED_CALLERS.iter().filter(|d| !tree.iter().any(|s| s.path.starts_with(*d)));
    let advice = |d: &&str| format!("`{d}` does not exist; remove it from the list");
    stale
        .map(|d| Finding { path: "tests/tidy/collective_calls.rs".into(), line: 1, advice: advice(d) })
        .collect()
}

#[test]
fn collective_in_another_file_is_found() {
    for name in COLLECTIVES {
        let text = format!(
            "//! x.{name}()\nfn f(r: &Rank) {{\n    r.{name}(1)?;\n}}\n#[cfg(test)] fn g() {{ r.{name}(1) }}"
        );
        for path in ["nn/src/optim/adamw.rs", "autograd/src/tape.rs", "src/train/mod.rs"] {
            assert_eq!(lines_found(collective_calls, path, &text), [3], "{path}");
        }
        for path in ["dist/src/rank.rs", "tensor/src/tensor/redistribute.rs", "tests/comm.rs"] {
            assert!(lines_found(collective_calls, path, &text).is_empty(), "{path}");
        }
    }
}
