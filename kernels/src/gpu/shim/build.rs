//! Compiles programs for the host, once each, into a cache next to the test binary; files are named by a hash of the source.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

const HEADER: &str = include_str!("shim.h");
const RUNTIME: &str = include_str!("shim.cc");
const COUNTERS: &str = include_str!("counters.cc");
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

/// Calls a function before each access to memory, as a thread sanitizer does; `shim.cc` has these functions.
const INSTRUMENTED: [&str; 6] = [
    "-fsanitize=thread",
    "--param",
    "tsan-instrument-func-entry-exit=0",
    "--param",
    "tsan-distinguish-volatile=1",
    "-DSHIM_INSTRUMENTED",
];

/// Returns the shared library of a program (macros and source, without the prelude), with exported functions for these entries; of an
/// instrumented one, also with counters of its memory traffic.
pub(super) fn library(body: &str, entries: &[&str], is_instrumented: bool) -> Result<PathBuf, String> {
    let folder = folder()?;
    let flags = if is_instrumented { &INSTRUMENTED[..] } else { &[] };
    let flags_text = flags.join(" ");
    let header = build_cached(&folder, &[HEADER, crate::gpu::PRELUDE, &flags_text], "hpp.gch", |to| {
        // The compiler uses `x.hpp.gch` where a source includes `x.hpp`.
        let text = to.with_extension("txt");
        write(&text, &format!("{HEADER}\n#line 1 \"prelude.cuh\"\n{}", crate::gpu::PRELUDE))?;
        let args = ["-x", "c++-header", path_str(&text)?, "-o", path_str(to)?];
        compile(&folder, &[flags, &args].concat())
    })?;
    let object = |text: &str, define: &str| {
        build_cached(&folder, &[HEADER, text, define], "o", |to| {
            // At once: a compiler that another thread or process has started may be reading it.
            let header = folder.join(format!("{}.h", own_stem("shim")));
            write(&header, HEADER)?;
            std::fs::rename(&header, folder.join("shim.h")).map_err(|e| e.to_string())?;
            let source = to.with_extension("cc");
            write(&source, text)?;
            compile(&folder, &["-O2", define, "-c", path_str(&source)?, "-o", path_str(to)?])
        })
    };
    // The static shared memory of the program lies between the first two.
    let begin = object(RUNTIME, "-DSHIM_BOUND=shim_static_begin")?;
    let end = object(RUNTIME, "-DSHIM_BOUND=shim_static_end")?;
    let mut runtime = vec![object(RUNTIME, "-DSHIM")?];
    if is_instrumented {
        runtime.push(object(COUNTERS, "-DSHIM")?);
    }
    let mut text = format!("#include \"{}\"\n{body}\n", path_str(&header.with_extension(""))?);
    entries.iter().for_each(|entry| text += &format!("SHIM_ENTRY({entry})\n"));
    build_cached(&folder, &[&text, HEADER, RUNTIME, COUNTERS, &flags_text], "so", |to| {
        let source = to.with_extension("cc");
        write(&source, &text)?;
        // Linked without the flags of the instrumentation, which would link the runtime of the sanitizer.
        let program = if is_instrumented { to.with_extension("o") } else { source.clone() };
        if is_instrumented {
            compile(&folder, &[flags, &["-c", path_str(&source)?, "-o", path_str(&program)?]].concat())?;
        }
        // Never unloaded: otherwise every launch would link the program and its libraries again.
        let mut args =
            vec!["-shared", "-Wl,-z,nodelete", path_str(&begin)?, path_str(&program)?, path_str(&end)?];
        args.extend(runtime.iter().map(|file| path_str(file)).collect::<Result<Vec<_>, _>>()?);
        compile(&folder, &[&args[..], &["-o", path_str(to)?]].concat())
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
        let draft = folder.join(format!("{}.{extension}", own_stem(&stem)));
        make(&draft)?;
        std::fs::rename(&draft, &path).map_err(|e| e.to_string())?;
    }
    Ok(path)
}

/// Returns the name of a file that only this thread writes.
fn own_stem(stem: &str) -> String {
    let own = format!("{stem}-{}-{:?}", std::process::id(), std::thread::current().id());
    own.replace(['(', ')'], "")
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
