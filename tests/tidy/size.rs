//! Lists long files and functions as advice; never fails. A file holds one subject, however long.
//! `cargo test --test main tidy::size -- --nocapture` prints the list.

use super::source::{Finding, Source, lines_found};
use super::tokens::{group, is_mark, is_word, line, word};
use proc_macro2::Delimiter;

/// A longer file is listed.
const FILE_LINES_ADVISED: usize = 500;
/// A longer function is listed.
const FUNCTION_LINES_ADVISED: usize = 70;

/// Lists a file with more than [`FILE_LINES_ADVISED`] lines.
pub(super) fn file_length(source: &Source) -> Vec<Finding> {
    let lines = source.text.lines().count();
    if lines <= FILE_LINES_ADVISED {
        return Vec::new();
    }
    let advice = format!("{lines} lines; does the file have one subject?");
    vec![source.finding(FILE_LINES_ADVISED + 1, advice)]
}

/// Lists functions with more than [`FUNCTION_LINES_ADVISED`] lines, from `fn` to the closing brace; macro bodies count too.
pub(super) fn function_length(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for level in &source.levels {
        for at in 0..level.len() {
            let name_at = at + 1 + usize::from(is_mark(level, at + 1, '$'));
            let (true, Some(name)) = (is_word(level, at, "fn"), word(level, name_at)) else { continue };
            let ends = (name_at..level.len())
                .take_while(|&i| !is_mark(level, i, ';'))
                .find_map(|i| group(level, i, Delimiter::Brace));
            let Some(body) = ends else { continue };
            let lines = body.span_close().end().line - line(&level[at]) + 1;
            if lines > FUNCTION_LINES_ADVISED {
                let advice = format!("`{name}` has {lines} lines; should a part be a function?");
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    }
    findings
}

#[test]
fn a_long_file_is_found() {
    assert!(lines_found(file_length, "a.rs", &"//\n".repeat(FILE_LINES_ADVISED)).is_empty());
    assert_eq!(
        lines_found(file_length, "a.rs", &"//\n".repeat(FILE_LINES_ADVISED + 1)),
        [FILE_LINES_ADVISED + 1]
    );
}

#[test]
fn a_long_function_is_found() {
    // One line for `fn` and one for the closing brace.
    let body = |lines: usize| "    x();\n".repeat(lines - 2);
    for head in ["fn f() {", "fn f<F: Fn(u8) -> [u8; 3]>(x: F) -> u8 where F: Copy {", "const fn f() {"] {
        let text = |lines| format!("type P = fn(u8);\n{head}\n{}}}\n", body(lines));
        assert!(lines_found(function_length, "a.rs", &text(FUNCTION_LINES_ADVISED)).is_empty(), "{head}");
        assert_eq!(lines_found(function_length, "a.rs", &text(FUNCTION_LINES_ADVISED + 1)), [2], "{head}");
    }
    let in_macro = format!(
        "macro_rules! m {{ ($n:ident) => {{\nfn $n() {{\n{}}}\n}} }}",
        body(FUNCTION_LINES_ADVISED + 1)
    );
    assert_eq!(lines_found(function_length, "a.rs", &in_macro), [2]);
    let method =
        format!("impl A {{\nfn g(&self);\nfn f(&self) {{\n{}}}\n}}", body(FUNCTION_LINES_ADVISED + 1));
    assert_eq!(lines_found(function_length, "a.rs", &method), [3]);
}
