//! The command line on processes with a fake GPU each: training steps over NCCL beside those of threads on the CPU, and the choice of the
//! GPU.

#[path = "../kernels/src/cuda/fake/libraries.rs"]
mod libraries;

use approx::abs_diff_eq;
use serde_json::Value;
use shardgrad::nn::{Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, ModelConfig};
use shardgrad::prelude::*;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_shardgrad");

/// A folder with a fake machine of GPUs, deleted on drop. Dropping it fails the test if the fake reported a fault.
struct Machine(PathBuf);

impl Machine {
    /// Installs the libraries; `None`, with a message, without g++.
    fn new(name: &str, num_gpus: usize) -> Option<Machine> {
        let folder = std::env::temp_dir().join(format!("shardgrad-nccl-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        libraries::install(&folder, &format!("gpus={num_gpus}")).then_some(Machine(folder))
    }

    /// Adds a folder with the same libraries for one rank, in which the fake refuses all calls of a function of NCCL.
    fn refusing(&self, call: &str) -> PathBuf {
        let folder = self.refusing_folder();
        fs::create_dir(&folder).unwrap();
        libraries::install(&folder, "gpus=2");
        fs::write(folder.join("refuse.txt"), format!("{call} 0 1000000 5\n")).unwrap();
        folder
    }

    fn refusing_folder(&self) -> PathBuf {
        self.0.join("refusing")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        use_libraries(&mut command, &self.0);
        let removed = ["CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "NCCL_PROTO"];
        for name in removed {
            command.env_remove(name);
        }
        command.env("SHARDGRAD_CACHE_DIR", &self.0);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command as processes, each one rank, with the variables of torchrun.
    fn run_ranks(&self, count: usize, args: &[&str]) -> Vec<Output> {
        self.run_ranks_with(count, args, |_, _| {})
    }

    /// [`Machine::run_ranks`], after `set_up` of the command of each rank.
    fn run_ranks_with(
        &self,
        count: usize,
        args: &[&str],
        set_up: impl Fn(usize, &mut Command),
    ) -> Vec<Output> {
        let started = self.start_ranks(count, args, set_up);
        started.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    }

    /// Starts the processes of [`Machine::run_ranks_with`].
    fn start_ranks(&self, count: usize, args: &[&str], set_up: impl Fn(usize, &mut Command)) -> Vec<Child> {
        let port = free_port().to_string();
        let start = |rank: usize| -> Child {
            let numbers =
                [("RANK", rank), ("WORLD_SIZE", count), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", count)];
            let mut command = self.command(args);
            command.envs(numbers.map(|(name, n)| (name, n.to_string())));
            set_up(rank, &mut command);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn().unwrap()
        };
        (0..count).map(start).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let of = |folder: &Path| fs::read_to_string(folder.join("faults.txt")).unwrap_or_default();
        let faults = of(&self.0) + &of(&self.refusing_folder());
        let _ = fs::remove_dir_all(&self.0);
        assert!(faults.is_empty() || std::thread::panicking(), "the fake GPU reports: {faults}");
    }
}

/// Lets a command open the libraries of a folder.
fn use_libraries(command: &mut Command, folder: &Path) {
    for library in ["CUDA", "NVRTC", "CUBLASLT", "NCCL"] {
        command.env(format!("SHARDGRAD_{library}_PATH"), folder);
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

/// A mesh and options of a training run.
struct Case(&'static str, &'static [&'static str]);

/// Each style of parallelism on two processes, and products on four. The preset starts from random weights, which each rank draws; the
/// others start from a file.
const CASES: [Case; 8] = [
    Case("dp=2", &[]),
    Case("tp=2", &["--preset", "tiny"]),
    Case("pp=2", &[]),
    Case("fsdp=2", &[]),
    Case("cp=2", &["--context", "ring"]),
    Case("ep=2", &["--experts", "exchange"]),
    Case("dp=2,tp=2", &[]),
    Case("fsdp=2,cp=2", &["--context", "ring"]),
];

/// Further ones, with `SHARDGRAD_NCCL=all`.
const MORE_CASES: [Case; 22] = [
    Case("dp=2", &["--zero", "1"]),
    Case("dp=2", &["--zero", "2"]),
    Case("dp=2", &["--dtype", "bf16"]),
    Case("tp=2", &["--sequence-parallel"]),
    Case("cp=2", &[]),
    Case("cp=2", &["--context", "exchange"]),
    Case("ep=2", &["--experts", "gather"]),
    Case("dp=4", &[]),
    Case("tp=4", &[]),
    Case("pp=4", &[]),
    Case("fsdp=4", &[]),
    Case("cp=4", &["--context", "ring"]),
    Case("ep=4", &["--experts", "exchange"]),
    Case("dp=2,fsdp=2", &[]),
    Case("dp=2,cp=2", &["--context", "ring"]),
    Case("dp=2,ep=2", &["--experts", "exchange"]),
    Case("fsdp=2,tp=2", &[]),
    Case("cp=2,tp=2", &["--context", "ring"]),
    Case("pp=2,dp=2", &[]),
    Case("pp=2,tp=2", &["--schedule", "zb-h1"]),
    Case("pp=2,fsdp=2", &[]),
    Case("pp=2,cp=2", &["--context", "ring"]),
];

impl Machine {
    /// Returns the folder of a small model: the fake GPU takes seconds for a step of a preset. It is a Mixtral for a mesh with an axis of
    /// experts, and has four blocks for stages. Its weights are so large that each layer counts in the loss.
    fn model(&self, mesh: &str) -> String {
        let dir = self.0.join(format!("model-{mesh}"));
        let config: ModelConfig = if mesh.contains("ep=") {
            let config = LlamaConfig::new(LlamaKind::Mixtral, 256, 16, [16, 32], 2, [4, 2]);
            LlamaConfig { initializer_range: 0.2, ..config }.into()
        } else {
            let num_blocks = if mesh.contains("pp=") { 4 } else { 2 };
            Gpt2Config { initializer_range: 0.2, ..Gpt2Config::new(256, 16, 16, num_blocks, 4) }.into()
        };
        let save = |rank: &Rank| {
            Model::new(rank, LanguageModel::new(&config), &LanguageModel::plan(&config), 0)?.save(&dir)
        };
        World::run(Mesh::single(), save).unwrap();
        dir.to_str().unwrap().to_string()
    }

    /// The text on which runs train.
    fn data(&self) -> String {
        let data = self.0.join("text");
        fs::write(&data, "The quick brown fox jumps over the lazy dog. ".repeat(100)).unwrap();
        data.to_str().unwrap().to_string()
    }

    /// Trains two steps on a mesh, as `count` processes or, with 0, on threads. Returns the metrics of the steps and the first output.
    fn train(&self, name: &str, count: usize, mesh: &str, options: &[&str]) -> (Vec<Value>, String) {
        let (data, model, out) = (self.data(), self.model(mesh), self.0.join(name));
        let fixed =
            "--seq 8 --batch 4 --threads 1 --eval-every 0 --steps 2 --warmup 0 --lr-schedule constant";
        let mut args = vec!["train", "--data", &data, "--out", out.to_str().unwrap(), "--mesh", mesh];
        args.extend(fixed.split(' ').chain(options.iter().copied()));
        if !options.contains(&"--preset") {
            args.extend(["--model", &model]);
        }
        let outputs = match count {
            0 => vec![self.command(&args).output().unwrap()],
            _ => self.run_ranks(count, &args),
        };
        outputs.iter().for_each(|output| assert!(output.status.success(), "{name}: {}", stderr(output)));
        let record = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let rows = record.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let rows: Vec<Value> = rows.filter(|row| row.get("loss").is_some()).collect();
        assert_eq!(rows.len(), 2, "{name}: {record}");
        (rows, String::from_utf8_lossy(&outputs[0].stdout).into_owned())
    }
}

/// The number of ranks of a mesh.
fn num_ranks(mesh: &str) -> usize {
    mesh.split(',').map(|axis| axis.split_once('=').unwrap().1.parse::<usize>().unwrap()).product()
}

/// Whether all combinations run.
fn has_all() -> bool {
    std::env::var("SHARDGRAD_NCCL").is_ok_and(|value| value == "all")
}

/// Loss, gradient norm and hash of the state after each step.
fn bits(rows: &[Value]) -> Vec<[Value; 3]> {
    let values = ["loss", "grad_norm", "state_hash"];
    rows.iter().map(|row| values.map(|name| row[name].clone())).collect()
}

#[test]
fn training_on_processes_gives_the_losses_of_threads() {
    let Some(machine) = Machine::new("train", 4) else { return };
    let more = if has_all() { &MORE_CASES[..] } else { &[] };
    for (number, Case(mesh, options)) in CASES.iter().chain(more).enumerate() {
        let on = |device| [*options, &["--device", device]].concat();
        let (due, _) = machine.train(&format!("threads-{number}"), 0, mesh, &on("cpu"));
        let (got, _) = machine.train(&format!("processes-{number}"), num_ranks(mesh), mesh, &on("cuda"));
        // Kernels of GPUs and NCCL add in other orders; 16-bit floats round.
        let limit = if options.contains(&"bf16") { 2e-2 } else { 1e-5 };
        let losses =
            |rows: &[Value]| rows.iter().map(|row| row["loss"].as_f64().unwrap()).collect::<Vec<f64>>();
        let is_near = abs_diff_eq!(losses(&due)[..], losses(&got)[..], epsilon = limit);
        assert!(is_near, "{mesh} {options:?}: {got:?}, of threads {due:?}");
    }
    let _ = writeln!(std::io::stderr(), "{} combinations over NCCL", CASES.len() + more.len());
}

#[test]
fn with_deterministic_transport_weights_have_the_bits_of_threads() {
    let Some(machine) = Machine::new("transport", 4) else { return };
    let train = |name: &str, count: usize, more: &[&str]| {
        let more = [&["--state-hash", "1"], more].concat();
        machine.train(name, count, "dp=4", &more)
    };
    let (due, _) = train("threads", 0, &["--device", "cuda:0"]);
    let (got, text) = train("tree", 4, &["--device", "cuda", "--deterministic", "transport"]);
    assert!(due[0]["state_hash"].is_string(), "{due:?}");
    assert_eq!(bits(&got), bits(&due));
    let line = "NCCL 2.28.9, NCCL_ALGO=Ring, NCCL_PROTO=Simple, sums in the order of threads";
    assert!(text.contains(line), "{text}");
    // The first line of the run records on what the bits depend.
    assert_eq!((due[0].get("nccl"), got[1].get("nccl")), (None, None));
    assert_eq!(got[0]["nccl"], line);
    // NCCL adds in another order.
    let (other, text) = train("plain", 4, &["--device", "cuda"]);
    assert_ne!(bits(&other), bits(&due));
    assert!(text.contains("NCCL_PROTO=Simple, sums by NCCL"), "{text}");
}

/// Pipelines and rings, whose messages NCCL carries; the later ones with `SHARDGRAD_NCCL=all`.
const MESSAGE_CASES: [Case; 14] = [
    Case("pp=2", &["--schedule", "1f1b"]),
    Case("dp=2,pp=2", &["--schedule", "zb-v"]),
    Case("pp=2", &["--schedule", "gpipe"]),
    Case("pp=2", &["--schedule", "interleaved"]),
    Case("pp=2", &["--schedule", "zb-h1"]),
    Case("pp=2", &["--schedule", "zb-h2"]),
    Case("pp=2", &["--schedule", "v-half"]),
    Case("pp=2", &["--schedule", "v-min"]),
    Case("pp=2", &["--schedule", "dualpipe-v"]),
    Case("pp=2", &["--schedule", "searched"]),
    Case("pp=4", &["--schedule", "1f1b"]),
    Case("dp=2,pp=2", &["--schedule", "interleaved"]),
    Case("pp=2,tp=2", &["--schedule", "1f1b"]),
    Case("cp=4", &["--context", "ring"]),
];

#[test]
fn training_with_messages_over_nccl_has_the_bits_of_threads() {
    let Some(machine) = Machine::new("messages", 4) else { return };
    let count = if has_all() { MESSAGE_CASES.len() } else { 2 };
    for (number, Case(mesh, options)) in MESSAGE_CASES[..count].iter().enumerate() {
        let on = |more: &[&'static str]| [*options, &["--state-hash", "1"], more].concat();
        let due = machine.train(&format!("threads-{number}"), 0, mesh, &on(&["--device", "cuda:0"])).0;
        let more = on(&["--device", "cuda", "--deterministic", "transport"]);
        let got = machine.train(&format!("processes-{number}"), num_ranks(mesh), mesh, &more).0;
        assert_eq!(bits(&got), bits(&due), "{mesh} {options:?}");
    }
    let _ = writeln!(std::io::stderr(), "{count} combinations of messages over NCCL");
}

/// How a process of a failed run ends: its exit code, and the line of its error.
type Ending = (Option<i32>, String);

/// Options of runs that end before their last step.
const LONG: &str = "train --mesh dp=2 --seq 16 --batch 4 --threads 1 --eval-every 0 --steps 100000";

impl Machine {
    /// Trains until a signal has been sent to rank 1. Returns how both ranks end.
    fn train_until(&self, signal: &str, device: &str) -> Vec<Ending> {
        let (data, model, out) = (self.data(), self.model("dp=2"), self.0.join(format!("{signal}-{device}")));
        let mut args: Vec<&str> = LONG.split(' ').collect();
        let is_stopped = signal == "-STOP";
        args.extend(["--timeout", if is_stopped { "4" } else { "60" }]);
        args.extend(["--data", &data, "--model", &model]);
        args.extend(["--out", out.to_str().unwrap(), "--device", device]);
        let started = self.start_ranks(2, &args, |_, _| {});
        let [mut first, mut second]: [Child; 2] = started.try_into().unwrap();
        let begun = Instant::now();
        while fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
            let is_running = first.try_wait().unwrap().is_none();
            if !is_running || begun.elapsed() > Duration::from_secs(120) {
                first.kill().unwrap();
                panic!("no step was taken: {}", stderr(&first.wait_with_output().unwrap()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        let sent = Command::new("kill").args([signal, &second.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let first = first.wait_with_output().unwrap();
        if is_stopped {
            second.kill().unwrap();
        }
        [first, second.wait_with_output().unwrap()].iter().map(ending).collect()
    }

    /// Trains with a rate at which the weights overflow in the first step. Returns how both ranks end.
    fn train_to_overflow(&self, device: &str) -> Vec<Ending> {
        let (data, model, out) = (self.data(), self.model("dp=2"), self.0.join(format!("overflow-{device}")));
        let mut args: Vec<&str> = LONG.split(' ').chain(["--warmup", "0", "--lr", "1e30"]).collect();
        args.extend(["--data", &data, "--model", &model]);
        args.extend(["--out", out.to_str().unwrap(), "--device", device]);
        self.run_ranks(2, &args).iter().map(ending).collect()
    }
}

/// How a rank ends. What differs from run to run is left out: which of many calls waits for too long, and the step in which a signal comes.
fn ending(output: &Output) -> Ending {
    let text = stderr(output);
    let error = text.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    // On a GPU all calls of the rank may be compared.
    let late = " waited more than 4s ";
    let error = if error.contains(late) { late } else { error.split(" after step ").next().unwrap() };
    (output.status.code(), error.to_string())
}

#[test]
fn failed_runs_over_nccl_end_with_the_codes_and_sentences_of_tcp() {
    let Some(machine) = Machine::new("failed", 2) else { return };
    let on_both = |run: &dyn Fn(&str) -> Vec<Ending>, due: [(Option<i32>, &str); 2]| {
        // The fake NCCL writes it when a communicator is made.
        let has_nccl = || fs::remove_file(machine.0.join("communicators.txt")).is_ok();
        let tcp = run("cpu");
        assert!(!has_nccl(), "a run on CPUs uses NCCL");
        let nccl = run("cuda");
        assert!(has_nccl(), "a run on GPUs does not use NCCL: {nccl:?}");
        assert_eq!(nccl, tcp);
        for ((code, error), (due_code, due)) in nccl.iter().zip(due) {
            assert!(
                *code == due_code && error.contains(due) && error.is_empty() == due.is_empty(),
                "{nccl:?}"
            );
        }
    };
    let lost = "rank 1's process ended (killed or crashed); rank 0 stops too";
    on_both(&|device| machine.train_until("-KILL", device), [(Some(1), lost), (None, "")]);
    on_both(&|device| machine.train_until("-STOP", device), [(Some(1), " waited more than 4s "), (None, "")]);
    // Rank 0 alone reports the signal.
    on_both(
        &|device| machine.train_until("-TERM", device),
        [(Some(143), "stopped by SIGTERM"), (Some(143), "")],
    );
    on_both(&|device| machine.train_to_overflow(device), [(Some(1), "step 2: the loss is NaN"); 2]);
}

#[test]
fn all_reduce_that_nccl_refuses_on_a_rank_ends_training_on_both() {
    let Some(machine) = Machine::new("refused", 2) else { return };
    let (data, out, own) = (machine.data(), machine.0.join("out"), machine.refusing("ncclAllReduce"));
    let mut args: Vec<&str> = LONG.split(' ').collect();
    args.extend(["--data", &data, "--out", out.to_str().unwrap(), "--device", "cuda"]);
    let outputs = machine.run_ranks_with(2, &args, |rank, command| {
        if rank == 1 {
            use_libraries(command, &own);
        }
    });
    let endings: Vec<Ending> = outputs.iter().map(ending).collect();
    let why = "ncclAllReduce: invalid usage (5): the fake refuses ncclAllReduce";
    let due = [format!("error: rank 1 failed: {why}; rank 0 stops too"), format!("error: {why}")];
    assert_eq!(endings, due.map(|error| (Some(1), error)));
}

#[test]
fn processes_that_see_the_same_gpu_are_refused_unless_they_name_it() {
    let Some(machine) = Machine::new("same", 2) else { return };
    let (data, model, out) = (machine.data(), machine.model("dp=2"), machine.0.join("out"));
    let args = |device: &'static str| {
        let args =
            ["train", "--steps", "1", "--mesh", "dp=2", "--seq", "8", "--batch", "2", "--eval-every", "0"];
        let files = ["--data", &data, "--model", &model, "--out", out.to_str().unwrap()];
        [&args[..], &files, &["--device", device]].concat()
    };
    let run = |device: &'static str, visible: [&str; 2]| {
        machine.run_ranks_with(2, &args(device), |rank, command| {
            command.env("CUDA_VISIBLE_DEVICES", visible[rank]);
        })
    };
    for output in run("cuda", ["0", "0"]) {
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let text = stderr(&output);
        let why = "ranks 0 and 1 have the same GPU, GPU-00000000-0000-0000-0000-000000000001 of host ";
        assert!(text.contains(why) && text.contains("--device cuda:0"), "{text}");
    }
    for (device, visible) in [("cuda:0", ["0", "0"]), ("cuda", ["0", "1"])] {
        for output in run(device, visible) {
            assert!(output.status.success(), "{device}: {}", stderr(&output));
        }
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
    let output = machine.command(&["doctor"]).env("NCCL_ALGO", "Tree").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = format!("{} (2.28.9)", machine.0.join("libnccl.so.2").display());
    assert!(output.status.success() && text.contains(&line), "{text}");
    assert!(text.contains("NCCL_ALGO=Tree, NCCL_PROTO=Simple"), "a set variable stays: {text}");
}
