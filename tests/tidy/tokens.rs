//! Walking Rust tokens: nesting levels, test-only items, attributes.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// A sequence of sibling tokens: a stream, or the contents of a group.
pub(crate) type Level = Vec<TokenTree>;

/// Returns the levels of a stream: its own, then those of each group.
pub(crate) fn levels(tokens: &TokenStream) -> Vec<Level> {
    let mut all = Vec::new();
    let mut pending = vec![tokens.clone()];
    while let Some(stream) = pending.pop() {
        let level: Level = stream.into_iter().collect();
        let groups = level.iter().rev().filter_map(|tree| match tree {
            TokenTree::Group(group) => Some(group.stream()),
            _ => None,
        });
        pending.extend(groups);
        all.push(level);
    }
    all
}

/// Returns whether the token at `at` is this word.
pub(crate) fn is_word(level: &[TokenTree], at: usize, word: &str) -> bool {
    matches!(level.get(at), Some(TokenTree::Ident(ident)) if ident == word)
}

/// Returns the word at `at`, if there is one.
pub(crate) fn word(level: &[TokenTree], at: usize) -> Option<String> {
    match level.get(at) {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

/// Returns whether the token at `at` is this punctuation mark.
pub(crate) fn is_mark(level: &[TokenTree], at: usize, mark: char) -> bool {
    matches!(level.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == mark)
}

/// Returns whether there is a `::` at `at`.
pub(crate) fn is_path_mark(level: &[TokenTree], at: usize) -> bool {
    is_mark(level, at, ':') && is_mark(level, at + 1, ':')
}

/// Returns the group at `at`, if it has this delimiter.
pub(crate) fn group(level: &[TokenTree], at: usize, delimiter: Delimiter) -> Option<&Group> {
    match level.get(at) {
        Some(TokenTree::Group(group)) if group.delimiter() == delimiter => Some(group),
        _ => None,
    }
}

/// Returns the line of a token.
pub(crate) fn line(tree: &TokenTree) -> usize {
    tree.span().start().line
}

/// Returns whether a word of a stream, groups included, matches.
pub(crate) fn any_word(tokens: &TokenStream, fits: &dyn Fn(&str) -> bool) -> bool {
    levels(tokens).iter().flatten().any(|t| matches!(t, TokenTree::Ident(i) if fits(&i.to_string())))
}

/// Returns the attribute that starts at `at` (`#[..]`, not `#![..]`).
pub(crate) fn attribute(level: &[TokenTree], at: usize) -> Option<&Group> {
    if is_mark(level, at, '#') { group(level, at + 1, Delimiter::Bracket) } else { None }
}

/// Returns the stream without items, fields and arms marked `#[cfg(test)]` or `#[test]`.
pub(crate) fn without_tests(tokens: &TokenStream) -> TokenStream {
    rebuild(tokens, &|level, at| {
        let marks_test = |attribute: &Group| {
            let inside: Vec<TokenTree> = attribute.stream().into_iter().collect();
            let is_test = any_word(&attribute.stream(), &|w| w == "test");
            let is_not = any_word(&attribute.stream(), &|w| w == "not");
            is_word(&inside, 0, "test") || (is_word(&inside, 0, "cfg") && is_test && !is_not)
        };
        attribute(level, at).is_some_and(marks_test).then(|| item_length(&level[at..]))
    })
}

/// Returns the stream without attributes, doc comments included.
pub(crate) fn without_attributes(tokens: &TokenStream) -> TokenStream {
    rebuild(tokens, &|level, at| {
        let inner = is_mark(level, at, '#') && is_mark(level, at + 1, '!');
        if inner && group(level, at + 2, Delimiter::Bracket).is_some() {
            return Some(3);
        }
        attribute(level, at).map(|_| 2)
    })
}

/// Returns the stream without the token runs whose length `cut` returns at their first token.
pub(crate) fn rebuild(
    tokens: &TokenStream,
    cut: &dyn Fn(&[TokenTree], usize) -> Option<usize>,
) -> TokenStream {
    let level: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < level.len() {
        if let Some(length) = cut(&level, at) {
            at += length.max(1);
            continue;
        }
        kept.push(match &level[at] {
            TokenTree::Group(old) => {
                let mut new = Group::new(old.delimiter(), rebuild(&old.stream(), cut));
                new.set_span(old.span());
                TokenTree::Group(new)
            }
            other => other.clone(),
        });
        at += 1;
    }
    kept.into_iter().collect()
}

/// Returns the number of tokens of the item that starts here with its attributes: up to its braces, its `;`,
/// or, for a field, its `,`.
fn item_length(level: &[TokenTree]) -> usize {
    let mut at = 0;
    while attribute(level, at).is_some() {
        at += 2;
    }
    let mut name = at;
    if is_word(level, name, "pub") {
        name += 1 + usize::from(group(level, name + 1, Delimiter::Parenthesis).is_some());
    }
    let is_field =
        word(level, name).is_some() && is_mark(level, name + 1, ':') && !is_path_mark(level, name + 1);
    while at < level.len() {
        let ends = group(level, at, Delimiter::Brace).is_some() || is_mark(level, at, ';');
        if (is_field && is_mark(level, at, ',')) || (!is_field && ends) {
            return at + 1;
        }
        at += 1;
    }
    level.len()
}

#[test]
fn test_items_are_cut_and_nothing_else() {
    let text = "
        fn one() {}
        #[cfg(test)] fn gone() { lost }
        #[cfg(test)] mod gone;
        struct S { #[cfg(test)] gone: Vec<lost>, two: u8 }
        #[cfg(not(test))] fn three() {}
        #[cfg(all(test, unix))] mod gone { lost }
        #[test] fn gone() { lost }
        fn four() {}";
    let left = without_tests(&text.parse().expect("it lexes"));
    assert!(!any_word(&left, &|w| w == "gone" || w == "lost"), "{left}");
    for name in ["one", "two", "three", "four"] {
        assert!(any_word(&left, &|w| w == name), "{name} stays in {left}");
    }
}

#[test]
fn attributes_are_cut() {
    let left = without_attributes(
        &"#![a(x)] /// doc x\n #[b = \"x\"] fn f(#[x] y: u8) {}".parse().expect("it lexes"),
    );
    assert_eq!(left.to_string(), "fn f (y : u8) { }");
}
