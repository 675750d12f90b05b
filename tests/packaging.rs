//! Package metadata: Rust version, third-party licences, resolved features.

use crate::cli::Folder;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Parses the minor version of a text such as `1.95` or `rustc 1.95.0 (abc 2026-01-01)`.
fn minor(text: &str) -> Option<u32> {
    text.split("1.").nth(1)?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[test]
fn rust_version_is_consistent() {
    let stated = minor(env!("CARGO_PKG_RUST_VERSION")).unwrap();
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let used = String::from_utf8(Command::new(rustc).arg("--version").output().unwrap().stdout).unwrap();
    assert!(minor(&used).unwrap() >= stated, "{used} is older than 1.{stated}");
    for folder in ["kernels", "nccl", "dist", "tensor", "autograd", "nn", "testing", "."] {
        let manifest = fs::read_to_string(Path::new(ROOT).join(folder).join("Cargo.toml")).unwrap();
        assert!(manifest.contains("rust-version.workspace = true"), "{folder} states no rust-version");
    }
    let contributing = fs::read_to_string(Path::new(ROOT).join("CONTRIBUTING.md")).unwrap();
    assert!(contributing.contains(&format!("Rust 1.{stated} or newer")), "CONTRIBUTING.md says otherwise");
}

/// The kinds of dependencies that cargo compiles to test a crate.
const TESTED: &str = "normal,build,dev";

/// Returns the packages along some kinds of dependencies of a selection of crates, each with its sets of features.
fn resolved_features(edges: &str, selection: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["tree", "--offline", "--locked", "--edges", edges, "--prefix", "none"]);
    command.args(["--format", "{p}|{f}|"]).args(selection);
    let output = command.current_dir(ROOT).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut packages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let mut parts = line.split('|');
        // An empty line separates the trees of two packages.
        let (Some(package), Some(features)) = (parts.next(), parts.next()) else { continue };
        packages.entry(package.to_string()).or_default().insert(features.to_string());
    }
    packages
}

/// `cargo test -p CRATE` compiles a dependency a second time if it resolves other features than a build of the workspace.
#[test]
fn each_crate_resolves_the_features_of_the_workspace() {
    let workspace = resolved_features(TESTED, &["--workspace"]);
    let mut different = String::new();
    for krate in [
        "shardgrad",
        "shardgrad-kernels",
        "shardgrad-nccl",
        "shardgrad-dist",
        "shardgrad-tensor",
        "shardgrad-autograd",
        "shardgrad-nn",
        "shardgrad-testing",
    ] {
        let packages = resolved_features(TESTED, &["-p", krate]);
        assert!(packages.len() > 2, "cargo lists the dependencies of {krate}");
        for (package, sets) in packages {
            for features in sets.difference(&workspace[&package]) {
                let shared = &workspace[&package];
                let _ = writeln!(
                    different,
                    "-p {krate}: {package} has [{features}], in the workspace {shared:?}"
                );
            }
        }
    }
    assert!(
        different.is_empty(),
        "cargo compiles these packages twice; ask for the same features (see the end of [workspace.dependencies]):\n{different}"
    );
}

/// The libraries alone need few packages: what only the command line or ranks as processes need is behind the features `cli` and
/// `processes`.
#[test]
fn libraries_need_few_packages() {
    let libraries = resolved_features("normal", &["-p", "shardgrad", "--no-default-features"]);
    assert!(libraries.len() <= 24, "{:#?}", libraries.keys());
    for (feature, package) in [("cli", "clap "), ("processes", "snow ")] {
        let is_there = |packages: BTreeMap<String, _>| packages.keys().any(|name| name.starts_with(package));
        let with = ["-p", "shardgrad", "--no-default-features", "--features", feature];
        assert!(!is_there(libraries.clone()) && is_there(resolved_features("normal", &with)), "{feature}");
    }
}

/// `World` warns where [`IS_OPTIMIZED`](shardgrad::kernels::IS_OPTIMIZED) is false: in a package with the same build script as the kernels.
#[test]
fn kernels_state_whether_cargo_optimizes_them() {
    let folder = Folder::new("optimization");
    let root = Path::new(ROOT);
    fs::copy(root.join("kernels/build.rs"), folder.path("build.rs")).unwrap();
    fs::create_dir(folder.path("src")).unwrap();
    let kernels = fs::read_to_string(root.join("kernels/src/lib.rs")).unwrap();
    let constant = kernels.lines().find(|line| line.starts_with("pub const IS_OPTIMIZED: bool")).unwrap();
    fs::write(
        folder.path("src/main.rs"),
        format!("{constant}\nfn main() {{ print!(\"{{IS_OPTIMIZED}}\") }}"),
    )
    .unwrap();
    let manifest = "[package]\nname = \"optimization\"\nedition = \"2024\"\n[workspace]\n";
    fs::write(folder.path("Cargo.toml"), manifest).unwrap();
    for (options, is_optimized) in [
        (&[][..], "false"),
        (&["--config", "profile.dev.opt-level=1"], "true"),
        (&["--config", "profile.dev.package.optimization.opt-level=3"], "true"),
        (&["--release"], "true"),
        (&["--release", "--config", "profile.release.opt-level=0"], "false"),
    ] {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        cargo.args(["run", "--quiet", "--offline"]).args(options).current_dir(&folder.0);
        cargo.env("CARGO_TARGET_DIR", folder.path("target")).env_remove("CARGO_PROFILE_DEV_OPT_LEVEL");
        let output = cargo.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), is_optimized, "{options:?}");
    }
}

/// What docs.rs and crates.io show of each package: a description, a front page, and the items behind optional features.
#[test]
fn packages_have_a_front_page_and_all_features_on_docs_rs() {
    for (folder, features) in [
        ("kernels", &["cuda"][..]),
        ("nccl", &["cuda"]),
        ("dist", &["nccl"]),
        ("tensor", &["ndarray"]),
        ("autograd", &[]),
        ("nn", &[]),
        ("testing", &[]),
        (".", &["nccl", "ndarray"]),
    ] {
        let folder = Path::new(ROOT).join(folder);
        let manifest: toml::Table = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        let package = &manifest["package"];
        assert!(package["description"].as_str().is_some_and(|text| text.len() > 20), "{folder:?}");
        assert!(package.get("license").is_some(), "{folder:?}");
        assert!(folder.join(package["readme"].as_str().unwrap()).is_file(), "{folder:?}");
        let docs = package.get("metadata").map(|metadata| &metadata["docs"]["rs"]);
        let found = docs.map_or_else(Vec::new, |docs| docs["features"].as_array().unwrap().clone());
        assert_eq!(found, features.iter().map(|f| toml::Value::from(*f)).collect::<Vec<_>>(), "{folder:?}");
        let front = fs::read_to_string(folder.join("src/lib.rs")).unwrap();
        assert!(front.starts_with("//! "), "{folder:?}");
    }
}

#[test]
fn test_oracles_are_compiled_for_tests_only() {
    let is_oracle = |package: &String| package.starts_with("shardgrad-testing ");
    assert!(resolved_features("normal,build,dev", &["-p", "shardgrad"]).keys().any(is_oracle));
    assert!(!resolved_features("normal,build", &["-p", "shardgrad"]).keys().any(is_oracle));
    // `cargo build` compiles the default members.
    assert!(!resolved_features("normal,build", &[]).keys().any(is_oracle));
}

/// Optional features of a build.
const FEATURES: [&str; 3] = ["cuda", "ndarray", "tokenizers"];

/// Packages by name and version.
type Packages = BTreeMap<(String, String), Value>;

/// Returns the third-party packages of the binary with a feature, for Linux on x86-64. `None` if cargo does not have them offline.
fn third_parties(feature: Option<&str>) -> Option<Packages> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["metadata", "--locked", "--offline", "--format-version", "1"];
    let platform = ["--filter-platform", "x86_64-unknown-linux-gnu"];
    let with: Vec<&str> = feature.iter().flat_map(|name| ["--features", *name]).collect();
    let mut command = Command::new(cargo);
    let output = command.args(arguments).args(platform).args(with).current_dir(ROOT).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    if feature.is_some() && message.contains("offline") {
        return None;
    }
    assert!(output.status.success(), "{message}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|p| (text(&p["id"]), p)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|n| (text(&n["id"]), n)).collect();
    // From the root package along normal dependencies.
    let mut reached = BTreeSet::new();
    let mut pending = vec![text(&metadata["resolve"]["root"])];
    while let Some(id) = pending.pop() {
        if reached.insert(id.clone()) {
            let normal = |d: &Value| list(&d["dep_kinds"]).iter().any(|k| k["kind"].is_null());
            pending.extend(list(&nodes[&id]["deps"]).iter().filter(|d| normal(d)).map(|d| text(&d["pkg"])));
        }
    }
    let foreign = reached.iter().map(|id| &packages[id]).filter(|p| !p["source"].is_null());
    Some(foreign.map(|p| ((text(&p["name"]), text(&p["version"])), p.clone())).collect())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

/// Returns the licence text of a package: MIT if offered, else the available one.
fn licence(package: &Value) -> Option<String> {
    let manifest = text(&package["manifest_path"]);
    let folder = Path::new(&manifest).parent()?;
    let mut files: Vec<String> = fs::read_dir(folder)
        .ok()?
        .filter_map(|f| f.ok()?.file_name().into_string().ok())
        .filter(|name| {
            ["LICENSE", "LICENCE", "COPYING", "UNLICENSE"].iter().any(|l| name.to_uppercase().starts_with(l))
        })
        .collect();
    files.sort_by_key(|name| {
        (!name.to_uppercase().contains("MIT"), name.to_uppercase().contains("APACHE"), name.clone())
    });
    // Several licences at once need all texts.
    let due = if text(&package["license"]).contains(" AND ") { files.len() } else { 1 };
    let found: Vec<String> =
        files.iter().take(due).filter_map(|f| fs::read_to_string(folder.join(f)).ok()).collect();
    // Some packages contain only a broken link in place of the file.
    let found = Some(found.join("\n\n")).filter(|text| text.lines().count() > 5)?;
    Some(found.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim().to_string())
}

/// Returns the page; `None` if cargo lacks packages of a feature.
fn notices() -> Option<String> {
    let plain = third_parties(None)?;
    let mut packages: BTreeMap<(String, String), (Value, Vec<&str>)> =
        plain.iter().map(|(id, package)| (id.clone(), (package.clone(), Vec::new()))).collect();
    for feature in FEATURES {
        for (id, package) in third_parties(Some(feature))? {
            if !plain.contains_key(&id) {
                packages.entry(id).or_insert((package, Vec::new())).1.push(feature);
            }
        }
    }
    let mut page = String::from(
        "# Third-party notices\n\nThe `shardgrad` binary contains code of these packages (Linux on x86-64); where features are \
         named, only if it\nwas built with one of them. Written by `SHARDGRAD_UPDATE=1 cargo test --test main notices`; a test \
         compares it with the\nlock file.\n\n\
         | package | version | feature | licence | source |\n|---|---|---|---|---|\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for ((name, version), (package, features)) in &packages {
        let source = format!("https://crates.io/crates/{name}/{version}");
        let features = features.join(", ");
        let _ =
            writeln!(page, "| {name} | {version} | {features} | {} | {source} |", text(&package["license"]));
        let licence = licence(package).unwrap_or_else(|| {
            format!(
                "{}: the package holds no text of its own; see {}",
                text(&package["license"]),
                text(&package["repository"])
            )
        });
        texts.entry(licence).or_default().push(name.clone());
    }
    let mut blocks: Vec<(String, String)> =
        texts.into_iter().map(|(t, names)| (names.join(", "), t)).collect();
    blocks.sort();
    for (names, licence) in blocks {
        let _ = write!(page, "\n## {names}\n\n```text\n{licence}\n```\n");
    }
    Some(page)
}

#[allow(clippy::print_stdout, reason = "a test that is skipped says so")]
#[test]
fn third_party_notices_match_the_lock_file() {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("skipped: the notices are those of Linux on x86-64, and cargo may lack other packages here");
        return;
    }
    let Some(page) = notices() else {
        println!("skipped: cargo lacks packages of some features here; `cargo fetch --locked` brings them");
        return;
    };
    let path = Path::new(ROOT).join("THIRD_PARTY.md");
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let different = page.lines().zip(kept.lines()).find(|(new, old)| new != old);
    assert!(
        page == kept,
        "THIRD_PARTY.md is out of date, first at {different:?}; run: SHARDGRAD_UPDATE=1 cargo test --test main notices"
    );
}
