//! Compiles programs for the host, once each, into a cache next to the test binary; files are named by a hash of the source.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

const HEADER: &str = include_str!("shim.h");
const RUNTIME: &str = include_str!("shim.cc");
/// Contraction is off: kernels call fma explicitly.
const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-w",
];

/// Returns whether g++ is on the path. Every case asks, so the compiler is not started.
pub(crate) fn compiler_is_found() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("g++").is_file())
}

/// Returns the shared library of a program (macros and source, without the prelude), with exported functions for these entries.
pub(super) fn library(body: &str, entries: &[&str]) -> Result<PathBuf, String> {
    let folder = folder()?;
    let header = build_cached(&folder, &[HEADER, crate::gpu::PRELUDE], "hpp.gch", |to| {
        // The compiler uses `x.hpp.gch` where a source includes `x.hpp`.
        let text = to.with_extension("txt");
        write(&text, &format!("{HEADER}\n#line 1 \"prelude.cuh\"\n{}", crate::gpu::PRELUDE))?;
        compile(&folder, &["-x", "c++-header", path_str(&text)?, "-o", path_str(to)?])
    })?;
    let runtime = build_cached(&folder, &[HEADER, RUNTIME], "o", |to| {
        write(&folder.join("shim.h"), HEADER)?;
        let text = to.with_extension("cc");
        write(&text, RUNTIME)?;
        compile(&folder, &["-O2", "-c", path_str(&text)?, "-o", path_str(to)?])
    })?;
    let mut text = format!("#include \"{}\"\n{body}\n", path_str(&header.with_extension(""))?);
    entries.iter().for_each(|entry| text += &format!("SHIM_ENTRY({entry})\n"));
    build_cached(&folder, &[&text], "so", |to| {
        let source = to.with_extension("cc");
        write(&source, &text)?;
        // Never unloaded: otherwise every launch would link the program and its libraries again.
        let stays = "-Wl,-z,nodelete";
        compile(&folder, &["-shared", stays, path_str(&source)?, path_str(&runtime)?, "-o", path_str(to)?])
    })
}

/// Returns the cache folder of compiled programs.
pub(super) fn folder() -> Result<PathBuf, String> {
    let binary = std::env::current_exe().map_err(|e| e.to_string())?;
    let folder = binary.parent().expect("a binary has a folder").join("shim");
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    Ok(folder)
}

/// Returns the cached file of these sources. If it is missing, `make` writes it under another name first, so that no test reads a
/// partial file.
fn build_cached(
    folder: &Path,
    texts: &[&str],
    extension: &str,
    make: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let mut hasher = DefaultHasher::new();
    (texts, FLAGS).hash(&mut hasher);
    let stem = format!("{:016x}", hasher.finish());
    let path = folder.join(format!("{stem}.{extension}"));
    if !path.exists() {
        let own = format!("{stem}-{}-{:?}", std::process::id(), std::thread::current().id());
        let draft = folder.join(format!("{}.{extension}", own.replace(['(', ')'], "")));
        make(&draft)?;
        std::fs::rename(&draft, &path).map_err(|e| e.to_string())?;
    }
    Ok(path)
}

fn compile(folder: &Path, args: &[&str]) -> Result<(), String> {
    let output = Command::new("g++").args(FLAGS).args(args).current_dir(folder).output();
    let output = output.map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(text.lines().filter(|l| l.contains("error")).take(8).collect::<Vec<_>>().join("\n"))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| e.to_string())
}

fn path_str(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("{} is not valid UTF-8", path.display()))
}
