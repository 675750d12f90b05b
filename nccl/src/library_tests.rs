//! Finding and opening the library: files, versions, optional features, and errors that say what to do.

use crate::library::Nccl;
use shardgrad_kernels::KernelError;
use shardgrad_kernels::cuda::SearchPaths;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that is deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("shardgrad-nccl-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds a library with these functions, each of which returns 0; `false`, with a message, without g++.
fn build(file: &Path, version: i32, functions: &[&str]) -> bool {
    let text =
        format!("extern \"C\" int ncclGetVersion(int *version) {{ return *version = {version}, 0; }}\n");
    compile(file, text + &returning_zero(functions))
}

/// The source of functions that return 0.
fn returning_zero(functions: &[&str]) -> String {
    functions.iter().map(|name| format!("extern \"C\" int {name}() {{ return 0; }}\n")).collect()
}

/// Compiles a library; returns false, with a message, without g++.
fn compile(file: &Path, text: String) -> bool {
    let source = file.with_extension("cc");
    fs::write(&source, text).unwrap();
    let Ok(done) = Command::new("g++").args(["-shared", "-fPIC", "-o"]).arg(file).arg(&source).output()
    else {
        let _ = writeln!(std::io::stderr(), "skipped: no g++");
        return false;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    true
}

fn named(path: &Path) -> SearchPaths {
    SearchPaths { named: vec![("SHARDGRAD_NCCL_PATH", path.to_path_buf())], ..SearchPaths::default() }
}

/// The functions that every version has.
fn all() -> Vec<&'static str> {
    let used = crate::functions::signatures().into_iter().map(|(name, _)| name);
    used.chain(["ncclGetErrorString", "ncclGetLastError"]).collect()
}

fn why(paths: &SearchPaths) -> String {
    match Nccl::open(paths) {
        Err(KernelError::Library { library: "NCCL", why, help }) => {
            assert!(help.contains("nvidia-nccl-cu13") && help.contains("SHARDGRAD_NCCL_PATH"), "{help}");
            why
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn variable_then_python_packages_name_the_file() {
    let folder = Folder::new("order");
    let package = folder.0.join("env/lib/python3.12/site-packages/nvidia/nccl/lib");
    fs::create_dir_all(&package).unwrap();
    let (own, wheel) = (folder.0.join("libnccl.so.2"), package.join("libnccl.so.2"));
    if !build(&own, 21_803, &all()) || !build(&wheel, 23_007, &[&all()[..], &["ncclCommRegister"]].concat()) {
        return;
    }
    let paths = SearchPaths { environments: vec![folder.0.join("env")], ..named(&folder.0) };
    let nccl = Nccl::open(&paths).unwrap();
    assert_eq!((nccl.version(), nccl.describe()), (21_803, format!("{} (2.18.3)", own.display())));
    let nccl = Nccl::open(&SearchPaths { named: Vec::new(), ..paths }).unwrap();
    assert_eq!(nccl.describe(), format!("{} (2.30.7, buffer registration)", wheel.display()));
}

#[test]
fn missing_old_and_incomplete_libraries_are_errors() {
    let folder = Folder::new("errors");
    let file = |name: &str| folder.0.join(name);
    assert!(why(&named(&folder.0)).contains("which contains no libnccl.so"));
    assert!(why(&named(&file("nothing"))).contains("SHARDGRAD_NCCL_PATH"));
    if !build(&file("old.so"), 21_708, &all()) || !build(&file("part.so"), 21_800, &all()[1..]) {
        return;
    }
    assert!(why(&named(&file("old.so"))).ends_with("old.so is version 2.17.8, and 2.18 or newer is needed"));
    assert!(why(&named(&file("part.so"))).ends_with("part.so has no function ncclGetUniqueId"));
}

#[test]
fn version_that_is_refused_has_the_text_of_the_library() {
    let folder = Folder::new("refused-version");
    let file = folder.0.join("refused.so");
    let text = "extern \"C\" int ncclGetVersion(int *) { return 3; }\n\
                extern \"C\" const char *ncclGetErrorString(int) { return \"internal error\"; }\n\
                extern \"C\" const char *ncclGetLastError(void *) { return \"no memory\"; }\n";
    let used: Vec<&str> = crate::functions::signatures().into_iter().map(|(name, _)| name).collect();
    if compile(&file, text.to_string() + &returning_zero(&used)) {
        let wanted = "does not report its version: ncclGetVersion: internal error (3): no memory";
        assert!(why(&named(&file)).ends_with(wanted), "{}", why(&named(&file)));
    }
}

#[test]
fn real_library_reports_its_version() {
    let paths = SearchPaths::from_env();
    let Ok(nccl) = Nccl::open(&paths) else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: no NCCL on this machine (VIRTUAL_ENV, SHARDGRAD_NCCL_PATH)"
        );
        return;
    };
    assert!(nccl.version() >= 21_800, "{}", nccl.describe());
}
