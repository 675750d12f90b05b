//! Commands with one process per rank: the same bits as with threads, and errors on all ranks if one fails. The tests set the
//! environment variables of a launcher themselves.

use crate::cli::Folder;
use shardgrad_testing::sample;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A free port below the range of ephemeral ports.
pub(crate) fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(0) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Starts one rank of `count`, with the variables of torchrun.
pub(crate) fn spawn_rank(rank: usize, count: usize, port: u16, args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    let variables =
        [("RANK", rank), ("WORLD_SIZE", count), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", count)];
    command.envs(variables.map(|(name, n)| (name, n.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a command on `count` ranks and waits for all.
pub(crate) fn run_ranks(count: usize, args: &[&str]) -> Vec<Output> {
    let port = free_port();
    let started: Vec<Child> = (0..count).map(|rank| spawn_rank(rank, count, port, args)).collect();
    started.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn assert_success(outputs: &[Output]) {
    outputs.iter().for_each(|output| assert!(output.status.success(), "{}", stderr(output)));
}

/// The exit codes of processes, and their standard errors.
pub(crate) fn exit_codes_and_stderr(outputs: &[Output]) -> (Vec<Option<i32>>, Vec<String>) {
    (outputs.iter().map(|output| output.status.code()).collect(), outputs.iter().map(stderr).collect())
}

pub(crate) fn write_text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(100))
}

/// The metrics of a run without timings, and its weights.
fn losses_and_weights(out: &str) -> (Vec<String>, Vec<u8>) {
    let record = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
    let timeless = |line: &str| {
        let (before, rest) = line.split_once(",\"tokens_per_s\"").unwrap();
        format!("{before}{}", rest.split_once("\"val_loss\"").map_or("", |(_, loss)| loss))
    };
    let weights = fs::read(format!("{out}/model/model.safetensors")).unwrap();
    (record.lines().map(timeless).collect(), weights)
}

#[test]
fn training_on_processes_matches_threads_bit_for_bit() {
    let folder = Folder::new("processes");
    let data = write_text(&folder);
    let meshes = [(2, "dp=2"), (2, "tp=2"), (4, "dp=2,tp=2"), (4, "dp=4"), (2, "pp=2")];
    for (count, mesh) in sample(0, meshes) {
        let train = |out: &str, more: &[&str]| -> Vec<String> {
            let given =
                ["train", "--data", &data, "--seq", "16", "--batch", "8", "--mesh", mesh, "--threads", "1"];
            let kept = ["--eval-every", "2", "--save-every", "2", "--lr-schedule", "constant", "--out", out];
            let rest = ["--warmup", "0", "--preset", "nano"];
            given.iter().chain(&kept).chain(&rest).chain(more).map(ToString::to_string).collect()
        };
        let (threads, processes) = (folder.path(&format!("t-{mesh}")), folder.path(&format!("p-{mesh}")));
        let args = train(&threads, &["--steps", "4"]);
        assert_success(&[Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(&args).output().unwrap()]);
        // Half of the steps, then the other half resumed from the checkpoint.
        let parts: [&[&str]; 2] = [&["--steps", "2"], &["--steps", "4", "--resume"]];
        for part in parts {
            let args = train(&processes, part);
            let outputs = run_ranks(count, &args.iter().map(String::as_str).collect::<Vec<&str>>());
            assert_success(&outputs);
            assert!(
                String::from_utf8_lossy(&outputs[0].stdout).contains("the model, in Hugging Face format")
            );
            assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()), "only rank 0 prints");
        }
        assert!(losses_and_weights(&threads) == losses_and_weights(&processes), "{mesh}");
    }
    let model = folder.path("p-dp=2/model");
    let commands: [&[&str]; 2] = [
        &["eval", "--model", &model, "--data", &data, "--mesh", "tp=2", "--seq", "16", "--json"],
        &["generate", "--model", &model, "--prompt", "The", "--tokens", "8", "--mesh", "tp=2", "--json"],
    ];
    for args in commands {
        let threads = Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap();
        let outputs = run_ranks(2, args);
        assert_success(&outputs);
        assert!(threads.status.success() && !threads.stdout.is_empty());
        assert_eq!([&outputs[0].stdout, &outputs[1].stdout], [&threads.stdout, &Vec::new()], "{args:?}");
    }
}

#[test]
fn styles_on_processes_match_threads_bit_for_bit() {
    let folder = Folder::new("process-styles");
    let data = write_text(&folder);
    let styles = [
        // Uneven chunks: 17 tokens over three ranks.
        (3, "--mesh cp=3 --context ring --preset nano"),
        (4, "--mesh cp=2,tp=2 --context ring --preset llama-nano"),
        (2, "--mesh cp=2 --context exchange --preset nano"),
        (2, "--mesh dp=2 --zero 2 --preset nano"),
        (4, "--mesh pp=2,fsdp=2 --gathered-bytes-max 0 --preset nano"),
        (2, "--mesh tp=2 --sequence-parallel --preset nano"),
        (2, "--mesh ep=2 --experts exchange --preset mixtral-nano"),
    ];
    for (i, (count, options)) in sample(0, styles.into_iter().enumerate()) {
        let train = |out: &str| {
            let given = ["train", "--data", &data, "--seq", "17", "--batch", "4", "--microbatches", "2"];
            let steps = ["--steps", "2", "--eval-every", "2", "--threads", "1", "--out", out];
            given.into_iter().chain(steps).chain(options.split(' ')).map(String::from).collect::<Vec<_>>()
        };
        let [threads, processes] = ["t", "p"].map(|name| folder.path(&format!("{name}-{i}")));
        assert_success(&[Command::new(env!("CARGO_BIN_EXE_shardgrad"))
            .args(train(&threads))
            .output()
            .unwrap()]);
        let args = train(&processes);
        assert_success(&run_ranks(count, &args.iter().map(String::as_str).collect::<Vec<&str>>()));
        assert!(losses_and_weights(&threads) == losses_and_weights(&processes), "{options}");
    }
}

#[test]
fn killed_process_ends_the_run_on_all_others() {
    let folder = Folder::new("killed");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--mesh", "dp=3", "--batch", "6", "--seq", "16"];
    let args = [&args[..], &["--steps", "100000", "--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let mut started: Vec<Child> = (0..3).map(|rank| spawn_rank(rank, 3, port, &args)).collect();
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    started[1].kill().unwrap();
    let killed = Instant::now();
    let outputs: Vec<Output> = started.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    let (codes, messages) = exit_codes_and_stderr(&outputs);
    assert_eq!(codes, [Some(1), None, Some(1)], "{messages:?}");
    // The lowest surviving rank reports the details; the other rank prints one line.
    let short =
        |rank: usize| format!("error: rank 1's process ended (killed or crashed); rank {rank} stops too\n");
    assert!(messages[0].contains(&short(0)) && messages[0].contains("\n  last call  #"), "{}", messages[0]);
    assert!(messages[2].ends_with(&short(2)), "{}", messages[2]);
}

#[test]
fn timeout_names_a_stopped_process() {
    let folder = Folder::new("still");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--timeout", "4"];
    let args = [&args[..], &["--steps", "100000", "--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let [first, mut second] = [0, 1].map(|rank| spawn_rank(rank, 2, port, &args));
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-STOP", &second.id().to_string()]).status().unwrap().success());
    let (codes, messages) = exit_codes_and_stderr(&[first.wait_with_output().unwrap()]);
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(codes, [Some(1)], "{messages:?}");
    assert!(
        messages[0].contains("rank 0 waited more than 4s in #") && messages[0].contains("for rank 1"),
        "{messages:?}"
    );
    assert!(messages[0].contains("absent     no heartbeat from rank 1 for "), "{messages:?}");
    assert!(
        messages[0].contains(" s; its last call was #") && !messages[0].contains("computing since"),
        "{messages:?}"
    );
}

#[test]
fn signal_to_all_processes_is_reported_by_rank_zero() {
    let folder = Folder::new("interrupted");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--steps", "100000"];
    let args = [&args[..], &["--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let started = [0, 1].map(|rank| spawn_rank(rank, 2, port, &args));
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    let ids = started.each_ref().map(|child| child.id().to_string());
    assert!(Command::new("kill").arg("-INT").args(&ids).status().unwrap().success());
    let (codes, messages) = exit_codes_and_stderr(&started.map(|child| child.wait_with_output().unwrap()));
    assert_eq!(codes, [Some(130); 2], "{messages:?}");
    assert!(
        messages[0].contains("error: stopped by SIGINT after step ") && messages[1].is_empty(),
        "{messages:?}"
    );
}

#[test]
fn non_finite_loss_is_explained_by_rank_zero() {
    let folder = Folder::new("not-finite");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--steps", "9"];
    let args =
        [&args[..], &["--eval-every", "0", "--threads", "1", "--warmup", "0", "--lr", "1e30"]].concat();
    let (codes, messages) = exit_codes_and_stderr(&run_ranks(2, &args));
    assert_eq!(codes, [Some(1); 2], "{messages:?}");
    let line = |text: &str| text.lines().next().unwrap().to_string();
    assert!(
        messages[0].starts_with("error: step 2: the loss is NaN") && messages[0].contains("\n  first      "),
        "{messages:?}"
    );
    assert_eq!(messages[1], format!("{}\n", line(&messages[0])));
}

#[test]
fn invalid_launcher_variables_are_usage_errors() {
    let folder = Folder::new("launcher");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--seq", "16", "--steps", "2", "--eval-every", "0"];
    let alone = |variables: &[(&str, &str)], more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        let output = command.args(train).args(more).envs(variables.iter().copied()).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let address = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")];
    let with = |rank, count| [&[("RANK", rank), ("WORLD_SIZE", count)], &address[..]].concat();
    for (variables, more, why) in [
        (with("0", "2")[..2].to_vec(), &[][..], "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        (with("2", "2"), &[], "RANK is 2, but WORLD_SIZE is 2"),
        (with("x", "2"), &[], "RANK is `x`, which is not a whole number"),
        (vec![("JOB_COMPLETION_INDEX", "2")], &[], "but RANK, WORLD_SIZE and MASTER_ADDR are not set"),
    ] {
        let (code, message) = alone(&variables, more);
        assert!(code == Some(2) && message.contains(why), "{message}");
    }
    // Rank 0 is missing; then another program listens on the port.
    let port = free_port().to_string();
    let lonely = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let (code, message) = alone(&lonely, &["--timeout", "1"]);
    assert!(code == Some(1) && message.contains("rank 1 did not connect to rank 0 (127.0.0.1:"), "{message}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let first = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let (code, message) = alone(&first, &[]);
    assert!(
        code == Some(2) && message.contains("cannot listen on port") && message.contains("SHARDGRAD_PORT"),
        "{message}"
    );
}
