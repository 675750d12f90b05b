//! Module order: module lists are bottom-up. A module uses only itself, modules declared before it, and items of the module that declares it.
//! Test code may use any module.

use super::source::{Finding, Source};
use super::tokens::{any_word, group, is_mark, is_path_mark, is_word, levels, line, rebuild, word};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};

type Path = Vec<String>;

/// A module: its file, its child modules, its imported names, and its macros.
struct Module {
    file: String,
    tokens: TokenStream,
    children: Vec<String>,
    names: BTreeMap<String, Path>,
    /// The macros of a module with `#[macro_export]`.
    macros: Vec<String>,
}

/// The modules of a crate by path; the root has the empty path.
type Crate = BTreeMap<Path, Module>;

/// The files whose module lists start a crate.
fn is_crate_root(path: &str) -> bool {
    ["src/lib.rs", "src/main.rs", "tests/main.rs"]
        .iter()
        .any(|r| path == *r || path.ends_with(&format!("/{r}")))
}

/// Returns all crates of the tree, and findings for undeclared files under `src` and the root's `tests`.
fn crates(files: &[Source]) -> (Vec<Crate>, Vec<Finding>) {
    let by_path: BTreeMap<&str, &Source> = files.iter().map(|f| (f.path.as_str(), f)).collect();
    let mut crates = Vec::new();
    let mut reached = BTreeSet::new();
    for root in files.iter().filter(|f| is_crate_root(&f.path)) {
        let folder = root.path.rsplit_once('/').map_or("", |(folder, _)| folder).to_string();
        let mut modules = Crate::new();
        grow(&by_path, root, &root.product, &folder, Path::new(), &mut modules);
        reached.extend(modules.values().map(|m| m.file.clone()));
        crates.push(modules);
    }
    let names: BTreeSet<String> =
        files.iter().flat_map(|f| declared(&f.tokens)).map(|(name, _, _)| name).collect();
    let declared_for_tests = |file: &Source| {
        let whole = file.path.trim_end_matches("/mod.rs").trim_end_matches(".rs");
        names.contains(whole.rsplit('/').next().unwrap_or_default())
    };
    let in_crate = |f: &Source| f.package().is_some() || f.path.starts_with("tests/");
    let lost = files.iter().filter(|f| in_crate(f) && !reached.contains(&f.path));
    let findings = lost
        .filter(|f| !declared_for_tests(f))
        .map(|f| f.finding(1, "no module list names this file; declare it or delete it"))
        .collect();
    (crates, findings)
}

/// Adds a module and its children, whose files are in `folder`.
fn grow(
    files: &BTreeMap<&str, &Source>,
    source: &Source,
    tokens: &TokenStream,
    folder: &str,
    path: Path,
    modules: &mut Crate,
) {
    let mut children = Vec::new();
    for (name, body, _) in declared(tokens) {
        let child: Path = path.iter().chain([&name]).cloned().collect();
        let below = format!("{folder}/{name}");
        let candidates = [format!("{below}.rs"), format!("{below}/mod.rs")];
        if let Some(body) = body {
            grow(files, source, &body, &below, child, modules);
        } else if let Some(file) = candidates.iter().find_map(|c| files.get(c.as_str())) {
            grow(files, file, &file.product, &below, child, modules);
        }
        children.push(name);
    }
    let own = rebuild(tokens, &|level, at| {
        (is_word(level, at, "mod") && group(level, at + 2, Delimiter::Brace).is_some()).then_some(3)
    });
    let (names, macros) = (imports(&own), exported_macros(&own));
    modules.insert(path, Module { file: source.path.clone(), tokens: own, children, names, macros });
}

/// Returns the modules that a file or module body declares, with inline bodies, and their lines.
fn declared(tokens: &TokenStream) -> Vec<(String, Option<TokenStream>, usize)> {
    let level: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut found = Vec::new();
    for at in 0..level.len() {
        let (true, Some(name)) = (is_word(&level, at, "mod"), word(&level, at + 1)) else { continue };
        let body = group(&level, at + 2, Delimiter::Brace).map(|g| g.stream());
        if body.is_some() || is_mark(&level, at + 2, ';') {
            found.push((name, body, line(&level[at])));
        }
    }
    found
}

/// Returns the paths that start at `at` (several for `{..}`), each with the name that `use` gives it.
fn paths_at(level: &[TokenTree], at: usize, prefix: &[String]) -> Vec<(String, Path)> {
    let mut path = prefix.to_vec();
    let mut at = at;
    while let Some(segment) = word(level, at) {
        if segment != "self" || path.is_empty() {
            path.push(segment);
        }
        if !is_path_mark(level, at + 1) {
            let alias = if is_word(level, at + 1, "as") { word(level, at + 2) } else { path.last().cloned() };
            return vec![(alias.unwrap_or_default(), path)];
        }
        at += 3;
    }
    let Some(branches) = group(level, at, Delimiter::Brace) else { return vec![(String::new(), path)] };
    let inside: Vec<TokenTree> = branches.stream().into_iter().collect();
    let commas = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ',');
    inside.split(commas).filter(|b| !b.is_empty()).flat_map(|b| paths_at(b, 0, &path)).collect()
}

/// Returns the names imported by the `use` items of a module.
fn imports(tokens: &TokenStream) -> BTreeMap<String, Path> {
    let level: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let uses = (0..level.len()).filter(|&at| is_word(&level, at, "use"));
    uses.flat_map(|at| paths_at(&level, at + 1, &[])).filter(|(name, _)| !name.is_empty()).collect()
}

/// Returns every path in a module that starts with `crate`, `super` or `self`, with its line.
fn references(module: &Module) -> Vec<(Path, usize)> {
    let mut found = Vec::new();
    for level in &levels(&module.tokens) {
        for at in 0..level.len() {
            let starts = ["crate", "super", "self"].iter().any(|w| is_word(level, at, w));
            let continues = at >= 2 && is_path_mark(level, at - 2);
            if starts && !continues && is_path_mark(level, at + 1) {
                found.extend(paths_at(level, at, &[]).into_iter().map(|(_, path)| (path, line(&level[at]))));
            }
        }
    }
    found
}

/// Returns the module that defines the item of a path, resolved in the module `from`.
fn home(modules: &Crate, from: &[String], path: &[String], hops_max: usize) -> Path {
    let mut at = from.to_vec();
    for (i, segment) in path.iter().enumerate() {
        let Some(module) = modules.get(&at) else { return at };
        match segment.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            name if module.children.iter().any(|c| c == name) => at.push(name.to_string()),
            name => {
                let Some(target) = module.names.get(name).filter(|_| hops_max > 0) else {
                    return exported_macro(modules, &at, name).unwrap_or(at);
                };
                let first = target.first().map_or("", String::as_str);
                let local =
                    ["crate", "self", "super"].contains(&first) || module.children.iter().any(|c| c == first);
                if !local || target.last().is_none() {
                    return at;
                }
                let rest: Path = target.iter().chain(&path[i + 1..]).cloned().collect();
                return home(modules, &at, &rest, hops_max - 1);
            }
        }
    }
    at
}

/// Returns the macros that a module defines, if it exports any.
fn exported_macros(tokens: &TokenStream) -> Vec<String> {
    if !any_word(tokens, &|w| w == "macro_export") {
        return Vec::new();
    }
    let level: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let rules = (0..level.len()).filter(|&at| is_word(&level, at, "macro_rules"));
    rules.filter_map(|at| word(&level, at + 2)).collect()
}

/// Returns the module of an exported macro, whose path is at the crate root.
fn exported_macro(modules: &Crate, at: &[String], name: &str) -> Option<Path> {
    let defines = |module: &Module| at.is_empty() && module.macros.iter().any(|m| m == name);
    modules.iter().find(|(_, module)| defines(module)).map(|(path, _)| path.clone())
}

/// A module uses only modules declared before it in their common module list.
pub(super) fn module_order(files: &[Source]) -> Vec<Finding> {
    let (crates, mut findings) = crates(files);
    for modules in &crates {
        for (path, module) in modules {
            for (reference, line) in references(module) {
                let target = home(modules, path, &reference, 8);
                let shared = path.iter().zip(&target).take_while(|(a, b)| a == b).count();
                if shared == path.len() || shared == target.len() {
                    continue;
                }
                let list = &modules[&path[..shared]];
                let place = |name: &String| list.children.iter().position(|c| c == name);
                let (user, used) = (&path[shared], &target[shared]);
                if place(used) > place(user) {
                    let advice = format!(
                        "`{}` uses `{used}`, which {} declares after `{user}`; declare `{used}` first, or move what \
                         both need into an earlier module",
                        path.join("::"),
                        list.file
                    );
                    findings.push(Finding { path: module.file.clone(), line, advice });
                }
            }
        }
    }
    findings.sort();
    findings.dedup();
    findings
}

fn planted(files: &[(&str, &str)]) -> Vec<String> {
    let sources: Vec<Source> = files.iter().map(|(path, text)| Source::new(*path, *text)).collect();
    module_order(&sources).iter().map(|f| format!("{}:{}", f.path, f.line)).collect()
}

#[test]
fn upward_use_is_found_in_every_spelling() {
    let lib = "mod low;\npub mod high;\npub use high::{self as top, Thing};\nmod shapes { pub fn f() {} }";
    let upward = [
        "use crate::high::X;",
        "use crate::{low, high::X};",
        "fn f() { crate::high::g(); }",
        "fn f() { vec![super::high::g()]; }",
        "use crate::Thing;",
        "use crate::top::X;",
        "macro_rules! m { () => { $crate::high::g() } }",
        "use super::shapes::f;",
        "mod inner { use super::super::high; }",
    ];
    for text in upward {
        let low = format!("//! Low.\n{text}\n");
        let files = [("k/src/lib.rs", lib), ("k/src/low.rs", &low), ("k/src/high.rs", "")];
        assert_eq!(planted(&files), ["k/src/low.rs:2"], "{text}");
    }
}

#[test]
fn downward_uses_and_tests_pass() {
    let lib = "mod low;\nmod high;\npub use low::Base;\n#[cfg(test)] mod checks;\nuse crate::high::X;";
    let low =
        "use std::fmt;\nuse crate::low::A;\nuse self::B;\n#[cfg(test)] mod tests { use crate::high::X; }";
    let high = "use crate::{Base, low::{self, A}};\nfn crate_high(x: &crate::low::A) {}";
    let files = [
        ("k/src/lib.rs", lib),
        ("k/src/low.rs", low),
        ("k/src/high.rs", high),
        ("k/src/checks.rs", "use crate::high;"),
    ];
    assert_eq!(planted(&files), [""; 0]);
}

#[test]
fn module_order_holds_in_nested_lists_and_for_macros() {
    let files = [
        ("k/src/lib.rs", "mod op;\nmod macros;"),
        ("k/src/macros.rs", "#[macro_export]\nmacro_rules! each { () => {} }"),
        ("k/src/op/mod.rs", "pub mod add;\npub mod mul;\npub fn shared() {}"),
        ("k/src/op/add.rs", "use super::shared;\nuse crate::op::mul;"),
        ("k/src/op/mul.rs", "use super::add;\ncrate::each!();"),
    ];
    assert_eq!(planted(&files), ["k/src/op/add.rs:2", "k/src/op/mul.rs:2"]);
}

#[test]
fn undeclared_file_is_found() {
    assert_eq!(
        planted(&[("k/src/lib.rs", "mod a;"), ("k/src/a.rs", ""), ("k/src/b.rs", "")]),
        ["k/src/b.rs:1"]
    );
    let tests =
        [("tests/main.rs", "mod a;"), ("tests/a/mod.rs", "mod b;"), ("tests/a/b.rs", ""), ("tests/c.rs", "")];
    assert_eq!(planted(&tests), ["tests/c.rs:1"]);
}
