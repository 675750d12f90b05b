//! Mutation tests: each patch of `tests/mutants` still applies, and docs/mutants.md is up to date. `.ci/mutants` applies the patches one at a
//! time and runs the test that must fail.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const PAGE: &str = "tests/mutants/README.md";
/// Minimum number of patches.
const COUNT_MIN: usize = 40;

/// One planted bug.
#[derive(Debug)]
struct Mutant {
    name: String,
    class: String,
    test: String,
    file: String,
    /// The original text of each hunk.
    old: Vec<String>,
}

fn read(name: &str, text: &str) -> Mutant {
    let of = |label: &str| text.lines().find_map(|l| l.strip_prefix(label)).unwrap_or_default().to_string();
    let mut old: Vec<String> = Vec::new();
    for line in text.lines() {
        match line.chars().next() {
            Some('@') => old.push(String::new()),
            Some(' ' | '-') if !line.starts_with("---") && !old.is_empty() => {
                let last = old.last_mut().expect("a hunk has begun");
                *last += &line[1..];
                *last += "\n";
            }
            _ => {}
        }
    }
    let (class, test, file) = (of("Class: "), of("Killed by: "), of("+++ b/"));
    Mutant { name: name.to_string(), class, test, file, old }
}

fn mutants() -> Vec<Mutant> {
    let folder = Path::new(ROOT).join("tests/mutants");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .filter_map(|f| f.unwrap().file_name().to_str()?.strip_suffix(".patch").map(str::to_string))
        .collect();
    names.sort();
    names.iter().map(|n| read(n, &fs::read_to_string(folder.join(format!("{n}.patch"))).unwrap())).collect()
}

/// Returns why a patch cannot be applied, if so.
fn fault(mutant: &Mutant, code: &str) -> Option<String> {
    let Mutant { name, class, test, old, .. } = mutant;
    if class.is_empty() || test.is_empty() || old.is_empty() {
        return Some(format!("{name} lacks `Class: `, `Killed by: ` or a change"));
    }
    let lost = old.iter().find(|text| !code.contains(text.as_str()));
    lost.map(|text| format!("{name} does not apply any more; it expects\n{text}"))
}

#[test]
fn every_mutant_patch_applies() {
    let all = mutants();
    assert!(all.len() >= COUNT_MIN, "{} planted bugs", all.len());
    let faults: Vec<String> = all
        .iter()
        .filter_map(|m| fault(m, &fs::read_to_string(Path::new(ROOT).join(&m.file)).unwrap_or_default()))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn mutant_patch_that_does_not_apply_is_found() {
    let text = "Class: c\nKilled by: t\n\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n";
    let mutant = read("m", text);
    assert_eq!((mutant.file.as_str(), mutant.old.as_slice()), ("x", &["a\nb\n".to_string()][..]));
    assert_eq!(fault(&mutant, "0\na\nb\n"), None);
    assert!(fault(&mutant, "a\n\nb\n").is_some());
    assert!(fault(&read("m", "Class: c\n@@\n a\n"), "a\n").is_some());
}

const HEAD: &str = "\
# Planted bugs

A check that has never failed proves nothing. So bugs of the kinds that frameworks have shipped are planted, and a test
must find each of them.

Some are values in the tests: ops with one part replaced (`tensor/tests/ops/broken_ops.rs`, `autograd/tests/fuzz.rs`),
layers, plans and updates that are wrong (`tests/invariants`), wrong declarations and planners
(`tensor/tests/algebra.rs`, `tensor/tests/planner.rs`). They run with every `cargo test`.

The others are patches in `tests/mutants`. There is no switch in the code for them: `.ci/mutants` copies the tree,
plants one at a time, and runs the test that the patch names; one that passes in spite of the bug ends the run with an
error. `cargo test` sees to it that each patch still fits the code. This page is written by
`SHARDGRAD_UPDATE=1 cargo test --test main mutants`.
";

fn page() -> String {
    let mut classes: BTreeMap<String, Vec<Mutant>> = BTreeMap::new();
    for mutant in mutants() {
        classes.entry(mutant.class.clone()).or_default().push(mutant);
    }
    let mut page = HEAD.to_string();
    for (class, mutants) in classes {
        let _ = write!(
            page,
            "\n## {}{}\n\n| bug | in | killed by |\n|---|---|---|\n",
            class[..1].to_uppercase(),
            &class[1..]
        );
        for Mutant { name, file, test, .. } in mutants {
            let _ = writeln!(page, "| {} | `{file}` | `cargo test {test}` |", name.replace('_', " "));
        }
    }
    page
}

#[test]
fn mutants_page_is_up_to_date() {
    let (path, page) = (Path::new(ROOT).join(PAGE), page());
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(page == kept, "{PAGE} is out of date; run: SHARDGRAD_UPDATE=1 cargo test --test main mutants");
}
