//! Links and paths in documents exist, and no file contains an absolute path of a machine.

use super::source::{Finding, nothing_in, root, texts};

/// First folders of machine-specific absolute paths.
const MACHINE_FOLDERS: [&str; 8] = ["home", "root", "work", "Users", "mnt", "tmp", "scratch", "workspace"];

/// Folders whose paths are checked in code spans.
const FOLDERS: [&str; 11] =
    ["kernels", "dist", "tensor", "autograd", "nn", "testing", "src", "tests", "benches", "examples", "docs"];

/// Returns the link targets of a Markdown text outside of code, with their lines.
fn link_targets(text: &str) -> Vec<(usize, String)> {
    let mut targets = Vec::new();
    let mut in_code = false;
    for (at, row) in text.lines().enumerate() {
        if row.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        // Every second part between backticks is code.
        let prose: String = row.split('`').step_by(2).collect::<Vec<_>>().join("_");
        let inline = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        targets.extend(inline.map(|t| (at + 1, t.to_string())));
        if let Some((_, target)) = prose.strip_prefix('[').and_then(|r| r.split_once("]: ")) {
            targets.push((at + 1, target.trim().to_string()));
        }
    }
    targets
}

/// Resolves a relative link in `path` to a path from the root; `None` if it leaves the tree.
fn resolve(path: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Relative links point to a file or folder of the tree.
fn broken_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, target) in link_targets(text) {
        let file = target.split('#').next().unwrap_or_default();
        if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
            continue;
        }
        if file.starts_with('/') || !resolve(path, file).is_some_and(|f| exists(&f)) {
            let advice =
                format!("link to `{target}`, which is not in the tree; fix the link or add the file");
            findings.push(Finding { path: path.to_string(), line, advice });
        }
    }
    findings
}

/// Paths in code spans, such as `tensor/src/op.rs`, exist; paths with placeholders are skipped.
fn stale_paths(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, row) in text.lines().enumerate() {
        for span in row.split('`').skip(1).step_by(2) {
            let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
            let of_ours =
                FOLDERS.iter().any(|f| span.strip_prefix(f).is_some_and(|rest| rest.starts_with('/')));
            if plain && of_ours && !exists(span) {
                let advice = format!("`{span}` is not in the tree; name its replacement");
                findings.push(Finding { path: path.to_string(), line: at + 1, advice });
            }
        }
    }
    findings
}

/// No file contains a machine-specific absolute path.
fn machine_paths(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, row) in text.lines().enumerate() {
        for folder in MACHINE_FOLDERS {
            let start = format!("/{folder}/");
            let named = row
                .match_indices(&start)
                .any(|(i, _)| !row[..i].ends_with(|c: char| c.is_alphanumeric() || "_-./})>*~".contains(c)));
            if named {
                let advice = format!(
                    "`{start}` is a machine-specific path; use a relative path or a temporary folder"
                );
                findings.push(Finding { path: path.to_string(), line: at + 1, advice });
            }
        }
    }
    findings
}

#[test]
fn links_in_documents_lead_somewhere() {
    let exists = |file: &str| root().join(file).exists();
    let documents = texts().into_iter().filter(|(path, _)| path.ends_with(".md"));
    nothing_in(documents.flat_map(|(path, text)| broken_links(&path, &text, &exists)).collect());
}

/// ADRs and the changelog describe the past, so their paths may no longer exist.
#[test]
fn paths_in_documents_exist() {
    let exists = |file: &str| root().join(file).exists();
    let of_the_past = |path: &str| path.starts_with("docs/adr/") || path == "CHANGELOG.md";
    let documents = texts().into_iter().filter(|(path, _)| path.ends_with(".md") && !of_the_past(path));
    nothing_in(documents.flat_map(|(path, text)| stale_paths(&path, &text, &exists)).collect());
}

#[test]
fn no_file_names_a_machine() {
    nothing_in(texts().iter().flat_map(|(path, text)| machine_paths(path, text)).collect());
}

#[test]
fn a_broken_link_is_found() {
    let exists = |file: &str| ["README.md", "docs/glossary.md", "docs/adr"].contains(&file);
    let lines = |path: &str, text: &str| -> Vec<usize> {
        broken_links(path, text, &exists).iter().map(|f| f.line).collect()
    };
    let text = "[a](glossary.md#axis) [b](../README.md) [c](adr/)\n\
                [d](https://example.org/x) [e](#here) `[f](none.md)`\n\
                ```\n[g](none.md)\n```\n\
                [h](glossary.md), then [i](none.md)\n\
                ![j](none.svg \"title\")\n\
                [k]: none.md\n\
                [l](../../README.md) and [m](/README.md)";
    assert_eq!(lines("docs/x.md", text), [6, 7, 8, 9, 9]);
    assert_eq!(lines("x.md", "[a](docs/glossary.md) [b](glossary.md)"), [1]);
}

#[test]
fn a_stale_path_is_found() {
    let exists = |file: &str| ["tensor/src/op.rs", "nn/src/plan/"].contains(&file);
    let text = "`tensor/src/op.rs`, `nn/src/plan/`, `tensor/src/ops/<name>.rs`, `dist`, tensor/src/none.rs\n\
                `a`, `tensor/src/none.rs` and `runs/src/none.rs`\n`nn/src/none/`";
    assert_eq!(stale_paths("A.md", text, &exists).iter().map(|f| f.line).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn a_machine_path_is_found() {
    for folder in MACHINE_FOLDERS {
        let bad = [
            format!("see /{folder}/x"),
            format!("\"/{folder}/x\""),
            format!("a=/{folder}/x"),
            format!("/{folder}/x"),
        ];
        for text in bad {
            assert_eq!(machine_paths("a.toml", &text).len(), 1, "{text}");
        }
        let good = [
            format!("nn/{folder}/x"),
            format!("./{folder}/x"),
            format!("https://a.org/{folder}/x"),
            "/usr/lib".into(),
        ];
        for text in good {
            assert!(machine_paths("a.md", &text).is_empty(), "{text}");
        }
    }
}
