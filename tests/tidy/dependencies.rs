//! Direct dependencies are few, used, and explained in an ADR.

use super::source::{Finding, Source, nothing_in, texts};
use super::tokens::{Level, word};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of direct dependencies in the default build, over all workspace crates.
const DIRECT_MAX: usize = 15;
/// Separate workspaces, for benchmarks against other frameworks and for fuzzing, whose dependencies do not count.
const OTHER_WORKSPACES: [&str; 2] = ["benches/peers/", "fuzz/"];
/// The ADR with the reasons.
const REASONS: &str = "docs/adr/0013-dependencies.md";
/// Comment that marks a dev-dependency that only sets features of a package.
const FOR_FEATURES: &str = "# for its features";

/// A line of a manifest with an external dependency.
struct Dependency {
    path: String,
    line: usize,
    name: String,
    /// The manifest table, without brackets.
    table: String,
    optional: bool,
    /// Whether it is a dev-dependency that only sets features of a package and is not named in code.
    for_features: bool,
}

impl Dependency {
    fn finding(&self, advice: String) -> Finding {
        Finding { path: self.path.clone(), line: self.line, advice }
    }
}

/// Returns the external dependencies of a manifest.
fn dependencies(path: &str, text: &str) -> Vec<Dependency> {
    let mut table = String::new();
    let mut found = Vec::new();
    if OTHER_WORKSPACES.iter().any(|folder| path.starts_with(folder)) {
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
            found.push(Dependency { path, line: at + 1, name, table, optional, for_features });
        }
    }
    found
}

/// Finds dependencies of the default build beyond the maximum.
fn too_many(dependencies: &[Dependency]) -> Vec<Finding> {
    let default = dependencies.iter().filter(|w| w.table == "dependencies" && !w.optional);
    let names: BTreeMap<&str, &Dependency> = default.map(|w| (w.name.as_str(), w)).collect();
    let over = names.values().skip(DIRECT_MAX);
    over.map(|w| {
        w.finding(format!(
            "`{}` is one of {} direct dependencies, at most {DIRECT_MAX}; remove one",
            w.name,
            names.len()
        ))
    })
    .collect()
}

/// Finds dependencies without a reason in the ADR.
fn unexplained(dependencies: &[Dependency], reasons: &str) -> Vec<Finding> {
    let missing = dependencies
        .iter()
        .filter(|w| w.table != "workspace.dependencies" && !reasons.contains(&format!("`{}`", w.name)));
    missing
        .map(|w| {
            w.finding(format!("`{}` has no reason in {REASONS}; add one, or remove the dependency", w.name))
        })
        .collect()
}

/// Finds dependencies that the code of their package does not name; a normal dependency must be named outside of tests. `named` returns
/// whether a package (by its folder) names a crate, in tests too if the flag is set.
fn unused(dependencies: &[Dependency], named: &dyn Fn(&str, &str, bool) -> bool) -> Vec<Finding> {
    let asked: BTreeSet<&str> = dependencies
        .iter()
        .filter(|w| w.table != "workspace.dependencies")
        .map(|w| w.name.as_str())
        .collect();
    let idle = dependencies.iter().filter(|w| !w.for_features).filter(|w| match w.table.as_str() {
        "workspace.dependencies" => !asked.contains(w.name.as_str()),
        table => {
            let package = w.path.trim_end_matches("Cargo.toml").trim_end_matches('/');
            !named(package, &w.name.replace('-', "_"), table.ends_with("dev-dependencies"))
        }
    });
    idle.map(|w| w.finding(format!("no code uses `{}`; remove it from [{}]", w.name, w.table))).collect()
}

/// Returns all external dependencies of the tree.
fn wishes_of_the_tree() -> Vec<Dependency> {
    let manifests = texts().into_iter().filter(|(path, _)| path.ends_with("Cargo.toml"));
    manifests.flat_map(|(path, text)| dependencies(&path, &text)).collect()
}

#[test]
fn dependencies_are_few_and_explained() {
    let dependencies = wishes_of_the_tree();
    assert!(dependencies.len() > 10, "the manifests were read");
    let reasons =
        texts().into_iter().find(|(path, _)| path == REASONS).expect("the record of dependencies exists").1;
    nothing_in(too_many(&dependencies).into_iter().chain(unexplained(&dependencies, &reasons)).collect());
}

/// Direct dependencies are used.
pub(super) fn unused_dependencies(tree: &[Source]) -> Vec<Finding> {
    let mut words: BTreeMap<(&str, bool), BTreeSet<String>> = BTreeMap::new();
    for source in tree {
        let first = source.path.split('/').next().unwrap_or_default();
        let package = if ["src", "tests", "benches", "examples"].contains(&first) { "" } else { first };
        let mut note = |levels: &[Level], in_tests: bool| {
            let words = words.entry((package, in_tests)).or_default();
            for level in levels {
                words.extend((0..level.len()).filter_map(|at| word(level, at)));
            }
        };
        note(&source.levels, true);
        if source.package().is_some() {
            note(&source.product_levels, false);
        }
    }
    let named = |package: &str, name: &str, in_tests| {
        words.get(&(package, in_tests)).is_some_and(|words| words.contains(name))
    };
    unused(&wishes_of_the_tree(), &named)
}

const PLANTED: &str = "[package]\nname = \"x\"\n[workspace.dependencies]\nhalf = \"2\"\nidle = \"1\"\n[dependencies]\n\
                       shardgrad-nn.workspace = true\nhalf.workspace = true\n# note = 1\nserde-x = { optional = true }\n\
                       [dev-dependencies]\ninsta = \"1\"\n[features]\nhalf = []";

#[test]
fn manifests_are_read() {
    let found: Vec<(usize, String)> =
        dependencies("k/Cargo.toml", PLANTED).into_iter().map(|w| (w.line, w.name)).collect();
    let names = [(4, "half"), (5, "idle"), (8, "half"), (10, "serde-x"), (12, "insta")];
    assert_eq!(found, names.map(|(line, name)| (line, name.to_string())));
    assert!(dependencies("benches/peers/k/Cargo.toml", PLANTED).is_empty());
    assert_eq!(dependencies("benches/Cargo.toml", PLANTED).len(), 5);
}

#[test]
fn other_workspaces_are_excluded() {
    let manifest = |path: &str| texts().into_iter().find(|(p, _)| p == path).expect("the manifest exists").1;
    let excluded = OTHER_WORKSPACES.map(|folder| format!("\"{}\"", folder.trim_end_matches('/'))).join(", ");
    assert!(manifest("Cargo.toml").contains(&format!("exclude = [{excluded}]")));
    for folder in OTHER_WORKSPACES {
        assert!(manifest(&format!("{folder}Cargo.toml")).contains("[workspace]"));
    }
}

#[test]
fn a_dependency_without_a_reason_or_a_use_is_found() {
    let dependencies = dependencies("k/Cargo.toml", PLANTED);
    let lines = |findings: Vec<Finding>| findings.iter().map(|f| f.line).collect::<Vec<_>>();
    assert_eq!(lines(unexplained(&dependencies, "`half`, insta")), [10, 12]);
    assert_eq!(lines(unused(&dependencies, &|package, name, _| package == "k" && name != "insta")), [5, 12]);
    assert_eq!(lines(unused(&dependencies, &|_, name, _| name != "serde_x")), [5, 10]);
    assert_eq!(lines(unused(&dependencies, &|_, name, in_tests| in_tests || name != "half")), [5, 8]);
}

#[test]
fn only_dev_dependencies_may_be_for_features_alone() {
    let manifest = |table: &str| format!("[{table}]\nlibc.workspace = true {FOR_FEATURES}\n");
    let found = |table| unused(&dependencies("k/Cargo.toml", &manifest(table)), &|_, _, _| false).len();
    assert_eq!((found("dev-dependencies"), found("dependencies")), (0, 1));
}

#[test]
fn one_dependency_too_many_is_found() {
    let list = |count: usize| (10..10 + count).map(|i| format!("d{i} = \"1\"\n")).collect::<String>();
    let found =
        |count| too_many(&dependencies("Cargo.toml", &format!("[dependencies]\n{}", list(count)))).len();
    assert_eq!((found(DIRECT_MAX), found(DIRECT_MAX + 1)), (0, 1));
    let elsewhere = format!("[dev-dependencies]\n{}", list(DIRECT_MAX + 5));
    assert!(too_many(&dependencies("Cargo.toml", &elsewhere)).is_empty());
}
