//! `doctor`: cores, SIMD, memory limits and GPU libraries of this machine. It reads system files, queries the CPU and, with the feature
//! `cuda`, loads the libraries that the CUDA back end uses. It never fails.

use super::args::DoctorArgs;
use super::reproducibility::{of_machine, op_classes};
use serde_json::json;
#[cfg(feature = "cuda")]
use shardgrad::Error;
use shardgrad::Result;
use shardgrad::kernels::MatmulPrecision;
use shardgrad::kernels::cpu::gemm::rounds_to_bf16;
use shardgrad::kernels::cpu::simd::{LIMIT_VARIABLE, Level, level, limit};
use shardgrad::kernels::host_memory::{
    LimitSource, MemoryLimit, field, kib, memory_limits, read_system_file,
};
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// GPU and communication libraries to look for: label and file name.
const LIBRARIES: [(&str, &str); 6] = [
    ("NVIDIA driver", "libcuda.so"),
    ("NVIDIA management", "libnvidia-ml.so"),
    ("run-time compiler", "libnvrtc.so"),
    ("cuBLASLt", "libcublasLt.so"),
    ("NCCL", "libnccl.so"),
    ("MPI", "libmpi.so"),
];

/// The collected facts.
struct Findings {
    processor: String,
    cores: usize,
    memory_bytes: Option<[u64; 2]>,
    /// Memory limits of this process and of its control groups.
    limits: Vec<MemoryLimit>,
    driver: Option<String>,
    /// The files of each entry of [`LIBRARIES`].
    libraries: Vec<Vec<PathBuf>>,
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let found = look();
    if args.json {
        println!("{}", as_json(&found));
    } else {
        print!("{}", text(&found));
    }
    Ok(())
}

fn look() -> Findings {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (about_cpu, about_memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let folders = library_folders();
    Findings {
        processor: field(&about_cpu, "model name").unwrap_or("unknown").to_string(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: kib(&about_memory, "MemTotal")
            .zip(kib(&about_memory, "MemAvailable"))
            .map(|(a, b)| [a, b]),
        limits: memory_limits(&read_system_file)
            .into_iter()
            .filter(|memory_limit| memory_limit.source != LimitSource::Machine)
            .collect(),
        driver: read("/proc/driver/nvidia/version").lines().next().map(str::to_string),
        libraries: LIBRARIES.map(|(_, file)| files(&folders, file)).into(),
    }
}

/// Returns the search path of the loader and the usual folders of CUDA.
fn library_folders() -> Vec<PathBuf> {
    let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let arch = format!("{}-linux-gnu", env::consts::ARCH);
    let usual = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/lib/wsl/lib"];
    env::split_paths(&listed)
        .chain(homes.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64")))
        .chain(["/usr/lib", "/lib"].map(|lib| Path::new(lib).join(&arch)))
        .chain([Path::new("/usr/lib").join(&arch).join("openmpi/lib")])
        .chain(usual.map(PathBuf::from))
        .collect()
}

/// Returns the files of a library in some folders, links resolved, without duplicates.
fn files(folders: &[PathBuf], name: &str) -> Vec<PathBuf> {
    let entries = folders.iter().filter_map(|f| fs::read_dir(f).ok()).flatten().flatten();
    let ours = entries.filter(|e| {
        e.file_name()
            .to_str()
            .and_then(|n| n.strip_prefix(name))
            .is_some_and(|n| n.is_empty() || n.starts_with('.'))
    });
    let real: BTreeSet<PathBuf> = ours.filter_map(|e| e.path().canonicalize().ok()).collect();
    real.into_iter().collect()
}

/// Returns the name of an instruction set.
fn simd_name(level: Level) -> &'static str {
    match level {
        Level::Avx512 => "AVX-512",
        Level::Avx2 => "AVX2 with FMA",
        Level::Baseline => "the baseline of the target",
    }
}

/// Returns the input dtype of f32 matmuls on this CPU.
fn products(precision: MatmulPrecision) -> &'static str {
    if rounds_to_bf16(precision) { "bf16" } else { "f32" }
}

/// Describes the CUDA back end: a heading, and labeled lines.
#[cfg(not(feature = "cuda"))]
fn cuda() -> (String, Vec<(String, String)>) {
    ("not in this build (feature `cuda`); tensors are on the CPU".into(), Vec::new())
}

/// Describes the CUDA back end: a heading, and labeled lines.
#[cfg(feature = "cuda")]
fn cuda() -> (String, Vec<(String, String)>) {
    use shardgrad::kernels::cuda::{Report, SearchPaths};
    let paths = SearchPaths::from_env();
    let report = Report::new(&paths);
    let ready = report.libraries.iter().all(|(_, found)| found.is_ok()) && !report.devices.is_empty();
    let error_text = |error| Error::from(error).to_string();
    let mut lines: Vec<(String, String)> = Vec::new();
    for (name, found) in report.libraries {
        lines.push((format!("  {name}"), found.unwrap_or_else(error_text)));
    }
    for (number, card) in report.devices.into_iter().enumerate() {
        let described = card.map(|c| {
            let (architecture, gib) = (c.architecture(), c.memory_bytes as f64 / (1u64 << 30) as f64);
            format!("{}, {gib:.1} GiB, {architecture}, {} multiprocessors", c.name, c.multiprocessors)
        });
        lines.push((format!("  cuda:{number}"), described.unwrap_or_else(error_text)));
    }
    #[cfg(feature = "nccl")]
    {
        lines.push(("  NCCL".into(), nccl(&paths).unwrap_or_else(error_text)));
        let pinned = shardgrad::nccl::algorithm().map(|(name, value)| format!("{name}={value}"));
        lines.push(("  NCCL sums".into(), pinned.join(", ")));
    }
    (if ready { "ready" } else { "not ready" }.into(), lines)
}

/// Describes the NCCL that ranks with a card each use.
#[cfg(feature = "nccl")]
fn nccl(paths: &shardgrad::kernels::cuda::SearchPaths) -> Result<String, shardgrad::kernels::KernelError> {
    shardgrad::nccl::Nccl::open(paths).map(|library| library.describe())
}

/// Returns `false` without the CUDA back end, else its lines by label.
fn cuda_as_json() -> serde_json::Value {
    if cfg!(not(feature = "cuda")) {
        return json!(false);
    }
    let lines = cuda().1.into_iter().map(|(label, line)| (label.trim().to_string(), json!(line)));
    lines.collect::<serde_json::Map<String, serde_json::Value>>().into()
}

/// Formats a memory limit as JSON.
fn limit_as_json(memory_limit: &MemoryLimit) -> serde_json::Value {
    let by = match memory_limit.source {
        LimitSource::Machine => "machine",
        LimitSource::ControlGroup => "control group",
        LimitSource::AddressSpace => "ulimit -v",
        LimitSource::DataSize => "ulimit -d",
    };
    json!({"by": by, "bytes": memory_limit.max_bytes, "bytes_left": memory_limit.available_bytes})
}

fn as_json(found: &Findings) -> serde_json::Value {
    let libraries = LIBRARIES.iter().zip(&found.libraries);
    let libraries: serde_json::Map<String, serde_json::Value> =
        libraries.map(|((_, file), paths)| ((*file).to_string(), json!(paths))).collect();
    let ways = MatmulPrecision::EVERY.map(|p| (p.to_string(), json!(products(p))));
    let ways: serde_json::Map<String, serde_json::Value> = ways.into_iter().collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"), "rust_version": env!("CARGO_PKG_RUST_VERSION"),
        "os": env::consts::OS, "arch": env::consts::ARCH,
        "processor": found.processor, "cores": found.cores, "simd": simd_name(level()),
        "matmul_precision": ways, "simd_limit": limit().map(simd_name),
        "reproducibility": of_machine().into_iter().chain(op_classes()).collect::<BTreeMap<_, _>>(),
        "memory_bytes": found.memory_bytes.map(|m| m[0]), "memory_bytes_free": found.memory_bytes.map(|m| m[1]),
        "memory_limits": found.limits.iter().map(limit_as_json).collect::<Vec<_>>(),
        "back_ends": ["cpu", "null"], "cuda": cuda_as_json(), "driver": found.driver, "libraries": libraries,
    })
}

fn text(found: &Findings) -> String {
    let mut text = String::new();
    let mut row = |label: &str, value: String| {
        let _ = writeln!(text, "{label:<18} {value}");
    };
    let (version, rust) = (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_RUST_VERSION"));
    row(
        "shardgrad",
        format!("{version}, for Rust {rust} or newer, {} {}", env::consts::OS, env::consts::ARCH),
    );
    row("processor", found.processor.clone());
    row("cores", format!("{} for this process", found.cores));
    let limited = if limit().is_some() { format!(", limited by {LIMIT_VARIABLE}") } else { String::new() };
    row("SIMD", format!("{} in use{limited}", simd_name(level())));
    let ways = MatmulPrecision::EVERY.map(|p| format!("{p}: {}", products(p)));
    row("f32 matmul", format!("--matmul-precision {}; on NVIDIA GPUs f32, TF32, bf16", ways.join(", ")));
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let memory = found.memory_bytes.map(|[all, free]| format!("{:.1} GiB, {:.1} free", gib(all), gib(free)));
    row("memory", memory.unwrap_or_else(|| "unknown".into()));
    for MemoryLimit { source, max_bytes, available_bytes } in &found.limits {
        let (max, left) = (gib(*max_bytes), gib(*available_bytes));
        row("  limit", format!("{max:.2} GiB for {source}, {left:.2} left"));
    }
    if found.limits.is_empty() {
        row("  limit", "none set by `ulimit` or a control group".into());
    }
    let each = [1, 2, 4].map(|n: usize| format!("{n} x {}", (found.cores / n).max(1)));
    row("ranks x threads", format!("{}; change with --threads", each.join(", ")));
    row("back ends", "cpu, null (shapes, bytes and costs only)".into());
    row("reproducibility", "bit for bit".into());
    of_machine().into_iter().for_each(|(level, what)| row(&format!("  {level}"), what));
    op_classes().into_iter().for_each(|(ops, cpus)| row("", format!("{ops}: {cpus}")));
    let (heading, lines) = cuda();
    row("CUDA", heading);
    lines.into_iter().for_each(|(label, line)| row(&label, line.replace('\n', "\n                    ")));
    row("  kernel module", found.driver.clone().unwrap_or_else(|| "not found".into()));
    for ((what, file), paths) in LIBRARIES.iter().zip(&found.libraries) {
        let paths: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
        let found = if paths.is_empty() { format!("no {file} found") } else { paths.join(", ") };
        row(&format!("  {what}"), found);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn libraries_are_listed_once() {
        let scratch = Scratch::new();
        for name in ["libnccl.so.2.20.5", "libnccl.so.2.20.5.txt", "libncclx.so", "libnccl.a"] {
            scratch.file(name, "no library");
        }
        std::os::unix::fs::symlink(scratch.path("libnccl.so.2.20.5"), scratch.path("libnccl.so")).unwrap();
        let found = files(&[scratch.path(""), scratch.path("no such folder")], "libnccl.so");
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["libnccl.so.2.20.5", "libnccl.so.2.20.5.txt"]);
    }
}
