//! The command line on processes with a fake GPU each: training steps over NCCL beside those of threads on the CPU, and the choice of the
//! GPU.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_shardgrad");

/// A folder with a fake machine of GPUs, deleted on drop. Dropping it fails the test if the fake reported a fault.
struct Machine(PathBuf);

impl Machine {
    /// Builds the libraries; `None`, with a message, without g++.
    fn new(name: &str, num_gpus: usize) -> Option<Machine> {
        let folder = std::env::temp_dir().join(format!("shardgrad-nccl-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/src");
        let flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o"];
        let (driver, source) = (folder.join("libcuda.so.1"), sources.join("cuda/fake/fake.cc"));
        let Ok(made) = Command::new("g++").args(flags).arg(&driver).arg(source).output() else {
            let _ = writeln!(std::io::stderr(), "skipped: no g++ for the fake GPU");
            return None;
        };
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        for name in ["libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
            symlink("libcuda.so.1", folder.join(name)).unwrap();
        }
        for name in ["shim.h", "shim.cc"] {
            fs::copy(sources.join("gpu/shim").join(name), folder.join(name)).unwrap();
        }
        // Compiled kernels are shared with other tests.
        let cache = std::env::current_exe().unwrap().with_file_name("shim");
        fs::create_dir_all(&cache).unwrap();
        symlink(cache, folder.join("cache")).unwrap();
        fs::write(folder.join("fake.txt"), format!("gpus={num_gpus}")).unwrap();
        Some(Machine(folder))
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        ["CUDA", "NVRTC", "CUBLASLT", "NCCL"].iter().for_each(|library| {
            command.env(format!("SHARDGRAD_{library}_PATH"), &self.0);
        });
        command.env_remove("CUDA_VISIBLE_DEVICES").env("SHARDGRAD_CACHE_DIR", &self.0);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command as processes, each one rank, with the variables of torchrun.
    fn run_ranks(&self, count: usize, args: &[&str]) -> Vec<Output> {
        let port = free_port().to_string();
        let start = |rank: usize| -> Child {
            let numbers =
                [("RANK", rank), ("WORLD_SIZE", count), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", count)];
            let mut command = self.command(args);
            command.envs(numbers.map(|(name, n)| (name, n.to_string())));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn().unwrap()
        };
        let started: Vec<Child> = (0..count).map(start).collect();
        started.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let faults = fs::read_to_string(self.0.join("faults.txt")).unwrap_or_default();
        let _ = fs::remove_dir_all(&self.0);
        assert!(faults.is_empty() || std::thread::panicking(), "the fake GPU reports: {faults}");
    }
}

/// A free port below the range of ephemeral ports.
fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(0) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The losses of a run.
fn losses(out: &str) -> Vec<f64> {
    let record = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
    let rows = record.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    rows.filter_map(|row| row["loss"].as_f64()).collect()
}

#[test]
fn training_on_processes_gives_the_losses_of_threads() {
    let Some(machine) = Machine::new("train", 4) else { return };
    let data = machine.0.join("text");
    fs::write(&data, "The quick brown fox jumps over the lazy dog. ".repeat(100)).unwrap();
    let meshes = [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (2, "fsdp=2"), (2, "cp=2"), (4, "dp=2,tp=2")];
    for (count, mesh) in meshes {
        let args = |out: &str, device: &str| -> Vec<String> {
            let data = data.to_str().unwrap();
            let given =
                ["train", "--data", data, "--seq", "16", "--batch", "4", "--mesh", mesh, "--threads", "1"];
            let kept = [
                "--eval-every",
                "2",
                "--steps",
                "2",
                "--warmup",
                "0",
                "--lr-schedule",
                "constant",
                "--out",
                out,
            ];
            given.iter().chain(&kept).chain(&["--device", device]).map(ToString::to_string).collect()
        };
        let out = |kind: &str| machine.0.join(format!("{kind}-{mesh}")).to_str().unwrap().to_string();
        let (threads, processes) = (out("threads"), out("processes"));
        let on_cpu = args(&threads, "cpu");
        let output =
            machine.command(&on_cpu.iter().map(String::as_str).collect::<Vec<&str>>()).output().unwrap();
        assert!(output.status.success(), "{mesh}: {}", stderr(&output));
        let on_gpus = args(&processes, "cuda");
        let on_gpus: Vec<&str> = on_gpus.iter().map(String::as_str).collect();
        for output in machine.run_ranks(count, &on_gpus) {
            assert!(output.status.success(), "{mesh}: {}", stderr(&output));
        }
        let (due, got) = (losses(&threads), losses(&processes));
        assert!(due.len() == 2 && got.len() == 2, "{mesh}: {due:?} {got:?}");
        let is_near = due.iter().zip(&got).all(|(due, got)| (due - got).abs() <= 1e-5);
        assert!(is_near, "{mesh}: {got:?}, of threads {due:?}");
    }
}

#[test]
fn processes_without_a_gpu_each_are_refused() {
    let Some(machine) = Machine::new("few", 1) else { return };
    let args = ["train", "--steps", "1", "--mesh", "dp=2", "--device", "cuda", "--out"];
    let out = machine.0.join("out");
    for output in machine.run_ranks(2, &[&args[..], &[out.to_str().unwrap()]].concat()) {
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let text = stderr(&output);
        assert!(
            text.contains("2 processes on this machine need a GPU each, and the driver reports 1"),
            "{text}"
        );
    }
}

#[test]
fn doctor_shows_the_library() {
    let Some(machine) = Machine::new("doctor", 1) else { return };
    let output = machine.command(&["doctor"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = format!("{} (2.28.9)", machine.0.join("libnccl.so.2").display());
    assert!(output.status.success() && text.contains(&line), "{text}");
}
