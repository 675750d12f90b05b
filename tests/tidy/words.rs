//! Words that mean unfinished work, hidden state or a room without a name.

use super::source::{Finding, Source, lines_found};
use super::tokens::{any_word, attribute, is_mark, is_word, line, word};
use proc_macro2::{TokenStream, TokenTree};

const UNFINISHED: [&str; 3] = ["TODO", "FIXME", "XXX"];
const ROOMS: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "misc"];
const LOCKS: [&str; 6] = ["Mutex", "RwLock", "RefCell", "Cell", "UnsafeCell", "Condvar"];

/// The text with literals blanked: code, comments and docs stay where they are.
fn without_literals(source: &Source) -> String {
    let mut bytes = source.text.clone().into_bytes();
    for level in &source.levels {
        for tree in level {
            let TokenTree::Literal(literal) = tree else { continue };
            let range = literal.span().byte_range();
            // A doc comment is a literal that is written as a comment.
            if !source.text[range.clone()].starts_with('/') {
                bytes[range].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// No comment, doc or name speaks of unfinished work, and no doc example is left out.
pub(super) fn unfinished(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Nearly all files, whose text need not be read word by word.
    if !UNFINISHED.iter().chain(&["```ignore"]).any(|w| source.text.contains(w)) {
        return findings;
    }
    for (at, text) in without_literals(source).lines().enumerate() {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        for found in words.filter(|w| UNFINISHED.contains(w)) {
            let advice =
                format!("`{found}` left behind; finish it, or open an issue and say here what holds today");
            findings.push(source.finding(at + 1, advice));
        }
        if text.contains("```ignore") {
            findings.push(
                source.finding(
                    at + 1,
                    "a doc example that is not compiled; make it compile, or mark it `text`",
                ),
            );
        }
    }
    findings
}

/// No test is switched off.
pub(super) fn ignored_tests(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for level in &source.levels {
        for at in 0..level.len() {
            let Some(inside) = attribute(level, at).map(proc_macro2::Group::stream) else { continue };
            let first: Vec<TokenTree> = inside.clone().into_iter().take(1).collect();
            let conditional = is_word(&first, 0, "cfg_attr") && any_word(&inside, &|w| w == "ignore");
            if is_word(&first, 0, "ignore") || conditional {
                let advice = "a test that does not run; mend it, delete it, or let it print what it skips";
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    }
    findings
}

/// No thread-local, no `static mut`, no static with a lock, a cell or an atomic in it.
pub(super) fn hidden_state(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let advice = "state that a result could depend on; keep it in a value that the caller holds (ADR 6)";
    for level in &source.product_levels {
        for at in 0..level.len() {
            let local = is_word(level, at, "thread_local") && is_mark(level, at + 1, '!');
            let lifetime = at > 0 && is_mark(level, at - 1, '\'');
            if local || (is_word(level, at, "static") && !lifetime && is_mutable_static(&level[at..])) {
                findings.push(source.finding(line(&level[at]), advice));
            }
        }
    }
    findings
}

/// Whether the item `static ..` that starts here can change after it is made.
fn is_mutable_static(item: &[TokenTree]) -> bool {
    let declared: TokenStream =
        item.iter().skip(1).take_while(|t| !is_mark(&[(*t).clone()], 0, '=')).cloned().collect();
    let is_item = is_word(item, 1, "mut") || is_mark(item, 2, ':');
    is_item && any_word(&declared, &|w| w == "mut" || LOCKS.contains(&w) || w.starts_with("Atomic"))
}

/// A module is named after what is in it.
pub(super) fn room_names(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let advice = |name: &str| format!("a module named `{name}` says nothing; name it after what is in it");
    let parts = source.path.trim_end_matches(".rs").split('/').filter(|p| ROOMS.contains(p));
    findings.extend(parts.map(|name| source.finding(1, advice(name))));
    for level in &source.levels {
        for at in 0..level.len() {
            let name =
                word(level, at + 1).filter(|w| is_word(level, at, "mod") && ROOMS.contains(&w.as_str()));
            findings.extend(name.map(|name| source.finding(line(&level[at]), advice(&name))));
        }
    }
    findings
}

#[test]
fn unfinished_work_is_found() {
    for word in UNFINISHED {
        let text = format!(
            "//! {word}: one\nfn f() {{\n    // two ({word})\n    let s = \"{word}\"; /* {word} */\n}}\n"
        );
        assert_eq!(lines_found(unfinished, "a.rs", &text), [1, 3, 4], "{text}");
        assert!(
            lines_found(unfinished, "a.rs", &format!("// A{word} {word}S\nlet é = r#\"{word}\"#;"))
                .is_empty()
        );
    }
    assert_eq!(lines_found(unfinished, "a.rs", "/// ```ignore\n/// x\n/// ```\nfn f() {}"), [1]);
}

#[test]
fn ignored_tests_are_found() {
    let text = "#[test]\n#[ignore]\nfn a() {}\n#[ignore = \"slow\"]\nfn b() {}\n#[cfg_attr(miri, ignore)]\nfn c() {}\n\
                #[must_use] fn d() { ignore::walk() }";
    assert_eq!(lines_found(ignored_tests, "a.rs", text), [2, 4, 6]);
}

#[test]
fn hidden_state_is_found() {
    let bad = [
        "thread_local! { static X: u8 = 1; }",
        "static mut X: u8 = 1;",
        "pub static X: Mutex<u8> = Mutex::new(1);",
        "static X: LazyLock<Mutex<Vec<u8>>> = LazyLock::new(Mutex::default);",
        "fn f() { static X: std::sync::atomic::AtomicUsize = AtomicUsize::new(1); }",
    ];
    for text in bad {
        assert_eq!(lines_found(hidden_state, "a.rs", text), [1], "{text}");
    }
    let good = [
        "static X: [u8; 2] = [1, 2];",
        "fn f(x: &'static Mutex<u8>) -> Mutex<u8> { Mutex::new(1) }",
        "static X: OnceLock<Level> = OnceLock::new();",
        "#[cfg(test)] mod tests { static X: AtomicUsize = AtomicUsize::new(1); }",
    ];
    for text in good {
        assert!(lines_found(hidden_state, "a.rs", text).is_empty(), "{text}");
    }
}

#[test]
fn rooms_without_a_name_are_found() {
    for name in ROOMS {
        assert_eq!(lines_found(room_names, &format!("nn/src/{name}.rs"), ""), [1]);
        assert_eq!(lines_found(room_names, &format!("nn/src/{name}/mod.rs"), ""), [1]);
        assert_eq!(lines_found(room_names, "nn/src/lib.rs", &format!("//! A.\nmod {name} {{}}")), [2]);
    }
    assert!(lines_found(room_names, "nn/src/module/param.rs", "mod utilities;").is_empty());
}
