//! Each direct dependency is used, has a written reason, and there are few.

use super::source::{Finding, nothing_in, sources, texts};
use super::tokens::{each_level, word};
use proc_macro2::TokenStream;
use std::collections::{BTreeMap, BTreeSet};

/// At most this many direct dependencies in the default build, those of all our crates together.
const DIRECT_MAX: usize = 15;
/// Another workspace: programs of others to measure beside ours. What they are made of is no part of ours.
const PEERS: &str = "benches/peers/";
/// Where the reasons stand.
const REASONS: &str = "docs/adr/0013-dependencies.md";
/// How the line of a dev-dependency ends that only sets features of a package.
const FOR_FEATURES: &str = "# for its features";

/// One line of a manifest that asks for a crate from outside.
struct Wish {
    path: String,
    line: usize,
    name: String,
    /// The table that it stands in, without brackets.
    table: String,
    optional: bool,
    /// A dev-dependency that no code names, and that only sets features of a package.
    for_features: bool,
}

impl Wish {
    fn finding(&self, advice: String) -> Finding {
        Finding { path: self.path.clone(), line: self.line, advice }
    }
}

/// The crates from outside that a manifest of ours asks for.
fn wishes(path: &str, text: &str) -> Vec<Wish> {
    let mut table = String::new();
    let mut found = Vec::new();
    if path.starts_with(PEERS) {
        return found;
    }
    for (at, row) in text.lines().enumerate() {
        if let Some(head) = row.trim().strip_prefix('[') {
            table = head.trim_end_matches(']').to_string();
        }
        let name = row.split(['.', '=', ' ']).next().unwrap_or_default();
        let is_entry =
            table.ends_with("dependencies") && row.contains('=') && !row.starts_with(['#', '[', ' ']);
        if is_entry && !name.starts_with("shardgrad-") {
            let (path, name, table) = (path.to_string(), name.to_string(), table.clone());
            let for_features = table.ends_with("dev-dependencies") && row.ends_with(FOR_FEATURES);
            let optional = row.contains("optional = true");
            found.push(Wish { path, line: at + 1, name, table, optional, for_features });
        }
    }
    found
}

/// The crates of the default build are few.
fn too_many(wishes: &[Wish]) -> Vec<Finding> {
    let default = wishes.iter().filter(|w| w.table == "dependencies" && !w.optional);
    let names: BTreeMap<&str, &Wish> = default.map(|w| (w.name.as_str(), w)).collect();
    let over = names.values().skip(DIRECT_MAX);
    over.map(|w| {
        w.finding(format!(
            "`{}` is one of {} direct dependencies, at most {DIRECT_MAX}; do without one",
            w.name,
            names.len()
        ))
    })
    .collect()
}

/// Each has its reason in the decision record.
fn unexplained(wishes: &[Wish], reasons: &str) -> Vec<Finding> {
    let missing = wishes
        .iter()
        .filter(|w| w.table != "workspace.dependencies" && !reasons.contains(&format!("`{}`", w.name)));
    missing
        .map(|w| w.finding(format!("`{}` has no reason in {REASONS}; write one, or do without it", w.name)))
        .collect()
}

/// Each is named by the code of the package that asks for it, and by more than tests if it is more than a
/// dev-dependency. `named` tells whether a package (by its folder) names a crate, in tests too if the flag is set.
fn unused(wishes: &[Wish], named: &dyn Fn(&str, &str, bool) -> bool) -> Vec<Finding> {
    let asked: BTreeSet<&str> =
        wishes.iter().filter(|w| w.table != "workspace.dependencies").map(|w| w.name.as_str()).collect();
    let idle = wishes.iter().filter(|w| !w.for_features).filter(|w| match w.table.as_str() {
        "workspace.dependencies" => !asked.contains(w.name.as_str()),
        table => {
            let package = w.path.trim_end_matches("Cargo.toml").trim_end_matches('/');
            !named(package, &w.name.replace('-', "_"), table.ends_with("dev-dependencies"))
        }
    });
    idle.map(|w| w.finding(format!("no code uses `{}`; take it out of [{}]", w.name, w.table))).collect()
}

/// All wishes of the tree.
fn wishes_of_the_tree() -> Vec<Wish> {
    let manifests = texts().into_iter().filter(|(path, _)| path.ends_with("Cargo.toml"));
    manifests.flat_map(|(path, text)| wishes(&path, &text)).collect()
}

#[test]
fn dependencies_are_few_and_explained() {
    let wishes = wishes_of_the_tree();
    assert!(wishes.len() > 10, "the manifests were read");
    let reasons =
        texts().into_iter().find(|(path, _)| path == REASONS).expect("the record of dependencies exists").1;
    nothing_in(too_many(&wishes).into_iter().chain(unexplained(&wishes, &reasons)).collect());
}

#[test]
fn dependencies_are_used() {
    let mut words: BTreeSet<(String, String, bool)> = BTreeSet::new();
    for source in sources() {
        let first = source.path.split('/').next().unwrap_or_default();
        let package = if ["src", "tests", "benches", "examples"].contains(&first) { "" } else { first };
        let mut note = |tokens: &TokenStream, in_tests: bool| {
            each_level(tokens, &mut |level| {
                let found = (0..level.len()).filter_map(|at| word(level, at));
                words.extend(found.map(|w| (package.to_string(), w, in_tests)));
            });
        };
        note(&source.tokens, true);
        if source.package().is_some() {
            note(&source.product, false);
        }
    }
    let named =
        |package: &str, name: &str, in_tests| words.contains(&(package.into(), name.into(), in_tests));
    nothing_in(unused(&wishes_of_the_tree(), &named));
}

const PLANTED: &str = "[package]\nname = \"x\"\n[workspace.dependencies]\nhalf = \"2\"\nidle = \"1\"\n[dependencies]\n\
                       shardgrad-nn.workspace = true\nhalf.workspace = true\n# note = 1\nserde-x = { optional = true }\n\
                       [dev-dependencies]\ninsta = \"1\"\n[features]\nhalf = []";

#[test]
fn manifests_are_read() {
    let found: Vec<(usize, String)> =
        wishes("k/Cargo.toml", PLANTED).into_iter().map(|w| (w.line, w.name)).collect();
    let names = [(4, "half"), (5, "idle"), (8, "half"), (10, "serde-x"), (12, "insta")];
    assert_eq!(found, names.map(|(line, name)| (line, name.to_string())));
    assert!(wishes("benches/peers/k/Cargo.toml", PLANTED).is_empty());
    assert_eq!(wishes("benches/Cargo.toml", PLANTED).len(), 5);
}

#[test]
fn peers_are_another_workspace() {
    let manifest = |path: &str| texts().into_iter().find(|(p, _)| p == path).expect("the manifest exists").1;
    assert!(manifest("Cargo.toml").contains(&format!("exclude = [\"{}\"]", PEERS.trim_end_matches('/'))));
    assert!(manifest(&format!("{PEERS}Cargo.toml")).contains("[workspace]"));
}

#[test]
fn a_dependency_without_a_reason_or_a_use_is_found() {
    let wishes = wishes("k/Cargo.toml", PLANTED);
    let lines = |findings: Vec<Finding>| findings.iter().map(|f| f.line).collect::<Vec<_>>();
    assert_eq!(lines(unexplained(&wishes, "`half`, insta")), [10, 12]);
    assert_eq!(lines(unused(&wishes, &|package, name, _| package == "k" && name != "insta")), [5, 12]);
    assert_eq!(lines(unused(&wishes, &|_, name, _| name != "serde_x")), [5, 10]);
    assert_eq!(lines(unused(&wishes, &|_, name, in_tests| in_tests || name != "half")), [5, 8]);
}

#[test]
fn only_dev_dependencies_may_be_for_features_alone() {
    let manifest = |table: &str| format!("[{table}]\nlibc.workspace = true {FOR_FEATURES}\n");
    let found = |table| unused(&wishes("k/Cargo.toml", &manifest(table)), &|_, _, _| false).len();
    assert_eq!((found("dev-dependencies"), found("dependencies")), (0, 1));
}

#[test]
fn one_dependency_too_many_is_found() {
    let list = |count: usize| (10..10 + count).map(|i| format!("d{i} = \"1\"\n")).collect::<String>();
    let found = |count| too_many(&wishes("Cargo.toml", &format!("[dependencies]\n{}", list(count)))).len();
    assert_eq!((found(DIRECT_MAX), found(DIRECT_MAX + 1)), (0, 1));
    let elsewhere = format!("[dev-dependencies]\n{}", list(DIRECT_MAX + 5));
    assert!(too_many(&wishes("Cargo.toml", &elsewhere)).is_empty());
}
