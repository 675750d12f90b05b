//! Every file of a library or binary starts with a module doc. The lint `missing_docs` checks items.

use super::source::{Finding, Source, lines_found};

/// A file of a library or binary starts with a `//!` comment.
pub(super) fn file_heads(source: &Source) -> Vec<Finding> {
    match source.package().is_some() && !source.text.starts_with("//!") {
        true => vec![source.finding(1, "start the file with a `//!` comment that states its subject")],
        false => Vec::new(),
    }
}

#[test]
fn a_file_without_a_head_is_found() {
    assert_eq!(lines_found(file_heads, "nn/src/a.rs", "// A comment.\n/// Of f.\nfn f() {}"), [1]);
    assert!(lines_found(file_heads, "nn/src/a.rs", "//! A.\nfn f() {}").is_empty());
    assert!(lines_found(file_heads, "nn/tests/a.rs", "fn f() {}").is_empty());
}
