//! Input of the rules (files of the tree as text and tokens) and their findings.

use super::tokens::{self, Level};
use ignore::WalkBuilder;
use proc_macro2::TokenStream;
use std::fmt;
use std::path::Path;

/// A line that breaks a rule, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// The file, relative to the root of the workspace.
    pub(crate) path: String,
    /// The line, from 1.
    pub(crate) line: usize,
    /// What is wrong and how to fix it.
    pub(crate) advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.advice)
    }
}

/// One Rust file.
pub(crate) struct Source {
    /// The file, relative to the root of the workspace, with `/` between its parts.
    pub(crate) path: String,
    /// Its contents.
    pub(crate) text: String,
    /// Its tokens; empty if it does not lex (reported by the rule in `file_docs`).
    pub(crate) tokens: TokenStream,
    /// The tokens without test-only items.
    pub(crate) product: TokenStream,
    /// The levels of `tokens`, which nearly every rule reads.
    pub(crate) levels: Vec<Level>,
    /// The levels of `product`.
    pub(crate) product_levels: Vec<Level>,
}

impl Source {
    /// Parses a text into tokens.
    pub(crate) fn new(path: impl Into<String>, text: impl Into<String>) -> Source {
        let (path, text) = (path.into(), text.into());
        let tokens: TokenStream = text.parse().unwrap_or_default();
        let product = tokens::without_tests(&tokens);
        let (levels, product_levels) = (tokens::levels(&tokens), tokens::levels(&product));
        Source { path, text, tokens, product, levels, product_levels }
    }

    /// Creates a finding in this file.
    pub(crate) fn finding(&self, line: usize, advice: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line, advice: advice.into() }
    }

    /// Returns the folder of the crate (empty for the root package), if the file belongs to a library or binary.
    pub(crate) fn package(&self) -> Option<&str> {
        match self.path.find("src/") {
            Some(0) => Some(""),
            Some(at) if self.path[..at].matches('/').count() == 1 => Some(&self.path[..at - 1]),
            _ => None,
        }
    }
}

/// Returns the folder of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns every text file of the tree with its path, sorted by path; build outputs and files in `.gitignore` are skipped.
pub(crate) fn texts() -> Vec<(String, String)> {
    let mut walk = WalkBuilder::new(root());
    walk.hidden(false).ignore(false).parents(false).git_global(false).git_exclude(false).require_git(false);
    walk.filter_entry(|e| !matches!(e.file_name().to_str(), Some(".git" | "target")));
    let mut texts: Vec<(String, String)> = walk
        .build()
        .map(|entry| entry.expect("the tree can be listed"))
        .filter(|entry| entry.file_type().is_some_and(|t| t.is_file()))
        .filter_map(|entry| {
            let path = entry.path().strip_prefix(root()).expect("the walk stays below its root");
            let text = std::fs::read_to_string(entry.path()).ok()?;
            Some((path.to_str()?.replace('\\', "/"), text))
        })
        .collect();
    texts.sort();
    texts
}

/// Returns every Rust file of the tree.
pub(crate) fn sources() -> Vec<Source> {
    let rust = texts().into_iter().filter(|(path, _)| path.ends_with(".rs"));
    rust.map(|(path, text)| Source::new(path, text)).collect()
}

/// Fails with the findings, one per line, if there are any.
pub(crate) fn nothing_in(mut findings: Vec<Finding>) {
    findings.sort();
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(lines.is_empty(), "{} findings\n{}\n", lines.len(), lines.join("\n"));
}

/// Returns the lines that a rule finds in a given text.
pub(crate) fn lines_found(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
    rule(&Source::new(path, text)).iter().map(|f| f.line).collect()
}

#[test]
fn packages_are_derived_from_paths() {
    let package = |path: &str| Source::new(path, "").package().map(str::to_string);
    assert_eq!(package("src/cli/train.rs"), Some(String::new()));
    assert_eq!(package("kernels/src/cpu/mod.rs"), Some("kernels".to_string()));
    assert_eq!(package("tests/main.rs"), None);
}
