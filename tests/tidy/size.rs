//! Files and functions that one can read at a sitting.

use super::source::{Finding, Source, every_file_keeps, lines_found};
use super::tokens::{each_level, group, is_mark, is_word, line, word};
use proc_macro2::Delimiter;

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// A file has at most [`FILE_LINES_MAX`] lines.
fn file_length(source: &Source) -> Vec<Finding> {
    let lines = source.text.lines().count();
    if lines <= FILE_LINES_MAX {
        return Vec::new();
    }
    let advice = format!("{lines} lines, at most {FILE_LINES_MAX}; move one subject into a file of its own");
    vec![source.finding(FILE_LINES_MAX + 1, advice)]
}

/// A function has at most [`FUNCTION_LINES_MAX`] lines, from `fn` to its closing brace; macro bodies count too.
fn function_length(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    each_level(&source.tokens, &mut |level| {
        for at in 0..level.len() {
            let name_at = at + 1 + usize::from(is_mark(level, at + 1, '$'));
            let (true, Some(name)) = (is_word(level, at, "fn"), word(level, name_at)) else { continue };
            let ends = (name_at..level.len())
                .take_while(|&i| !is_mark(level, i, ';'))
                .find_map(|i| group(level, i, Delimiter::Brace));
            let Some(body) = ends else { continue };
            let lines = body.span_close().end().line - line(&level[at]) + 1;
            if lines > FUNCTION_LINES_MAX {
                let advice =
                    format!("`{name}` has {lines} lines, at most {FUNCTION_LINES_MAX}; name a part of it");
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    });
    findings
}

#[test]
fn files_are_short() {
    every_file_keeps(file_length);
}

#[test]
fn functions_are_short() {
    every_file_keeps(function_length);
}

#[test]
fn a_long_file_is_found() {
    assert!(lines_found(file_length, "a.rs", &"//\n".repeat(FILE_LINES_MAX)).is_empty());
    assert_eq!(lines_found(file_length, "a.rs", &"//\n".repeat(FILE_LINES_MAX + 1)), [FILE_LINES_MAX + 1]);
}

#[test]
fn a_long_function_is_found() {
    // One line for `fn` and one for the closing brace.
    let body = |lines: usize| "    x();\n".repeat(lines - 2);
    for head in ["fn f() {", "fn f<F: Fn(u8) -> [u8; 3]>(x: F) -> u8 where F: Copy {", "const fn f() {"] {
        let text = |lines| format!("type P = fn(u8);\n{head}\n{}}}\n", body(lines));
        assert!(lines_found(function_length, "a.rs", &text(FUNCTION_LINES_MAX)).is_empty(), "{head}");
        assert_eq!(lines_found(function_length, "a.rs", &text(FUNCTION_LINES_MAX + 1)), [2], "{head}");
    }
    let in_macro =
        format!("macro_rules! m {{ ($n:ident) => {{\nfn $n() {{\n{}}}\n}} }}", body(FUNCTION_LINES_MAX + 1));
    assert_eq!(lines_found(function_length, "a.rs", &in_macro), [2]);
    let method = format!("impl A {{\nfn g(&self);\nfn f(&self) {{\n{}}}\n}}", body(FUNCTION_LINES_MAX + 1));
    assert_eq!(lines_found(function_length, "a.rs", &method), [3]);
}
