//! Every public item says what it is. Stricter than the compiler's lint: items need not be reachable.

use super::source::{Finding, Source, every_file_keeps, lines_found};
use proc_macro2::Span;
use syn::{Attribute, Fields, ImplItem, Item, TraitItem, Visibility};

/// A Rust file parses, and, in a library or binary, starts with a `//!` that says what is in it.
fn file_heads(source: &Source) -> Vec<Finding> {
    match syn::parse_file(&source.text) {
        Err(error) => vec![source.finding(error.span().start().line, format!("does not parse: {error}"))],
        Ok(file) if source.package().is_some() && !is_documented(&file.attrs) => {
            vec![source.finding(1, "start the file with a `//!` that says what is in it")]
        }
        Ok(_) => Vec::new(),
    }
}

/// Every `pub` item, field, variant and method of a library or binary has a doc comment.
fn public_items(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let (Some(_), Ok(file)) = (source.package(), syn::parse_file(&source.text)) {
        let mut report = |what: &str, name: String, span: Span| {
            let advice = format!(
                "public {what} `{name}` has no doc comment; say what it is, its units and its errors"
            );
            findings.push(source.finding(span.start().line, advice));
        };
        items(&file.items, &mut report);
    }
    findings
}

type Report<'a> = &'a mut dyn FnMut(&str, String, Span);

/// Reports what lacks a doc among items of one module.
fn items(list: &[Item], report: Report<'_>) {
    for item in list {
        match item {
            Item::Fn(i) => check(&i.vis, &i.attrs, ("fn", &i.sig.ident), report),
            Item::Const(i) => check(&i.vis, &i.attrs, ("const", &i.ident), report),
            Item::Static(i) => check(&i.vis, &i.attrs, ("static", &i.ident), report),
            Item::Type(i) => check(&i.vis, &i.attrs, ("type", &i.ident), report),
            Item::Union(i) => check(&i.vis, &i.attrs, ("union", &i.ident), report),
            Item::Struct(i) => {
                check(&i.vis, &i.attrs, ("struct", &i.ident), report);
                fields(&i.fields, false, report);
            }
            Item::Enum(i) => {
                check(&i.vis, &i.attrs, ("enum", &i.ident), report);
                for variant in i.variants.iter().filter(|_| is_public(&i.vis)) {
                    check(&i.vis, &variant.attrs, ("variant", &variant.ident), report);
                    fields(&variant.fields, true, report);
                }
            }
            Item::Trait(i) => {
                check(&i.vis, &i.attrs, ("trait", &i.ident), report);
                i.items.iter().filter(|_| is_public(&i.vis)).for_each(|t| trait_item(t, report));
            }
            Item::Macro(i) => exported_macro(i, report),
            Item::Impl(i) if i.trait_.is_none() && !is_for_tests(&i.attrs) => {
                i.items.iter().for_each(|m| impl_item(m, report));
            }
            Item::Mod(i) if !is_for_tests(&i.attrs) => {
                let Some((_, inside)) = &i.content else { continue };
                check(&i.vis, &i.attrs, ("mod", &i.ident), report);
                items(inside, report);
            }
            _ => {}
        }
    }
}

/// Reports an exported macro without a doc.
fn exported_macro(item: &syn::ItemMacro, report: Report<'_>) {
    let exported = item.attrs.iter().any(|a| a.path().is_ident("macro_export"));
    if let Some(name) = item.ident.as_ref().filter(|_| exported && !is_documented(&item.attrs)) {
        report("macro", name.to_string(), name.span());
    }
}

/// Reports a method or constant of a type without a doc.
fn impl_item(item: &ImplItem, report: Report<'_>) {
    match item {
        ImplItem::Fn(i) => check(&i.vis, &i.attrs, ("method", &i.sig.ident), report),
        ImplItem::Const(i) => check(&i.vis, &i.attrs, ("const", &i.ident), report),
        _ => {}
    }
}

/// Reports an item of a public trait without a doc.
fn trait_item(item: &TraitItem, report: Report<'_>) {
    let public = Visibility::Public(Default::default());
    match item {
        TraitItem::Fn(i) => check(&public, &i.attrs, ("method", &i.sig.ident), report),
        TraitItem::Const(i) => check(&public, &i.attrs, ("const", &i.ident), report),
        TraitItem::Type(i) => check(&public, &i.attrs, ("type", &i.ident), report),
        _ => {}
    }
}

/// Reports named fields without a doc: the public ones, or all of a public variant.
fn fields(fields: &Fields, all: bool, report: Report<'_>) {
    for field in fields {
        let Some(name) = &field.ident else { continue };
        let vis = if all { &Visibility::Public(Default::default()) } else { &field.vis };
        check(vis, &field.attrs, ("field", name), report);
    }
}

/// Reports an item if it is public, not for tests, and has no doc.
fn check(vis: &Visibility, attrs: &[Attribute], item: (&str, &syn::Ident), report: Report<'_>) {
    if is_public(vis) && !is_documented(attrs) && !is_for_tests(attrs) {
        report(item.0, item.1.to_string(), item.1.span());
    }
}

fn is_public(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

fn is_documented(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|a| a.path().is_ident("doc"))
}

fn is_for_tests(attrs: &[Attribute]) -> bool {
    let names_test = |a: &Attribute| matches!(&a.meta, syn::Meta::List(l) if l.tokens.to_string() == "test");
    attrs.iter().any(|a| a.path().is_ident("cfg") && names_test(a))
}

#[test]
fn files_say_what_is_in_them() {
    every_file_keeps(file_heads);
}

#[test]
fn public_items_are_documented() {
    every_file_keeps(public_items);
}

#[test]
fn a_file_without_a_head_or_that_does_not_parse_is_found() {
    assert_eq!(lines_found(file_heads, "nn/src/a.rs", "// A comment.\n/// Of f.\nfn f() {}"), [1]);
    assert_eq!(lines_found(file_heads, "nn/src/a.rs", "//! A.\nfn f( {}"), [2]);
    assert!(lines_found(file_heads, "nn/src/a.rs", "//! A.\nfn f() {}").is_empty());
}

#[test]
fn an_undocumented_public_item_of_any_kind_is_found() {
    let bad = [
        "pub fn f() {}",
        "pub const A: u8 = 1;",
        "pub static A: u8 = 1;",
        "pub type A = u8;",
        "pub struct A;",
        "pub enum A {}",
        "pub trait A {}",
        "pub mod a {}",
        "#[macro_export]\nmacro_rules! m { () => {} }",
        "/// A.\npub struct A { pub b: u8, c: u8 }",
        "struct A { pub b: u8 }",
        "/// A.\npub enum A { B }",
        "/// A.\npub enum A {\n    /// B.\n    B { c: u8 },\n}",
        "/// A.\npub trait A { fn b(); }",
        "/// A.\npub trait A { type B; }",
        "impl A { pub fn b() {} }",
        "impl A { pub const B: u8 = 1; }",
        "mod a { pub fn f() {} }",
    ];
    for text in bad {
        assert_eq!(lines_found(public_items, "nn/src/a.rs", text).len(), 1, "{text}");
        assert!(lines_found(public_items, "tests/a.rs", text).is_empty(), "{text}");
    }
    let good = "/// A.\npub struct A(pub u8);\npub(crate) fn f() {}\nimpl B for A { fn c() {} }\npub use x::Y;\n\
                enum D { E { f: u8 } }\n#[cfg(test)] mod tests { pub fn f() {} }\nmacro_rules! m { () => {} }\n\
                #[cfg(test)] pub fn g() {}\npub mod file;";
    assert!(lines_found(public_items, "nn/src/a.rs", good).is_empty());
}
