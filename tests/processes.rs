//! Commands whose ranks are processes: the same numbers as with threads, and an end on all where one goes wrong. No launcher is
//! needed: a test sets the variables that one sets.

use crate::cli::Folder;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A port that nobody listens at, below those that the system gives out by itself.
pub(crate) fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(0) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Starts one rank.
pub(crate) fn start(rank: usize, count: usize, port: u16, args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    let told = [("RANK", rank), ("WORLD_SIZE", count), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", count)];
    command.envs(told.map(|(name, n)| (name, n.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a command on so many processes, to the end of all.
pub(crate) fn run(count: usize, args: &[&str]) -> Vec<Output> {
    let port = free_port();
    let started: Vec<Child> = (0..count).map(|rank| start(rank, count, port, args)).collect();
    started.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn well(outputs: &[Output]) {
    outputs.iter().for_each(|output| assert!(output.status.success(), "{}", said(output)));
}

/// The codes with which processes ended, and what they said.
pub(crate) fn ended(outputs: &[Output]) -> (Vec<Option<i32>>, Vec<String>) {
    (outputs.iter().map(|output| output.status.code()).collect(), outputs.iter().map(said).collect())
}

pub(crate) fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(100))
}

/// What does not depend on time in a record, and the weights.
fn left(out: &str) -> (Vec<String>, Vec<u8>) {
    let record = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
    let timeless = |line: &str| {
        let (before, rest) = line.split_once(",\"tokens_per_s\"").unwrap();
        format!("{before}{}", rest.split_once("\"val_loss\"").map_or("", |(_, loss)| loss))
    };
    let weights = fs::read(format!("{out}/model/model.safetensors")).unwrap();
    (record.lines().map(timeless).collect(), weights)
}

#[test]
fn training_on_processes_has_the_bits_of_training_on_threads() {
    let folder = Folder::new("processes");
    let data = text(&folder);
    for (count, mesh) in [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2,tp=2"), (4, "dp=4")] {
        let train = |out: &str, more: &[&str]| -> Vec<String> {
            let given =
                ["train", "--data", &data, "--seq", "16", "--batch", "8", "--mesh", mesh, "--threads", "1"];
            let kept = ["--eval-every", "2", "--save-every", "2", "--lr-schedule", "constant", "--out", out];
            given.iter().chain(&kept).chain(&["--warmup", "0"]).chain(more).map(ToString::to_string).collect()
        };
        let (threads, processes) = (folder.path(&format!("t-{mesh}")), folder.path(&format!("p-{mesh}")));
        let args = train(&threads, &["--steps", "4"]);
        well(&[Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(&args).output().unwrap()]);
        // Half of the steps, then the other half from the checkpoint.
        let parts: [&[&str]; 2] = [&["--steps", "2"], &["--steps", "4", "--resume"]];
        for part in parts {
            let args = train(&processes, part);
            let outputs = run(count, &args.iter().map(String::as_str).collect::<Vec<&str>>());
            well(&outputs);
            assert!(
                String::from_utf8_lossy(&outputs[0].stdout).contains("the model, as transformers reads it")
            );
            assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()), "the first rank tells");
        }
        assert!(left(&threads) == left(&processes), "{mesh}");
    }
    let model = folder.path("p-dp=2/model");
    let commands: [&[&str]; 2] = [
        &["eval", "--model", &model, "--data", &data, "--mesh", "tp=2", "--seq", "16", "--json"],
        &["generate", "--model", &model, "--prompt", "The", "--tokens", "8", "--mesh", "tp=2", "--json"],
    ];
    for args in commands {
        let threads = Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap();
        let outputs = run(2, args);
        well(&outputs);
        assert!(threads.status.success() && !threads.stdout.is_empty());
        assert_eq!([&outputs[0].stdout, &outputs[1].stdout], [&threads.stdout, &Vec::new()], "{args:?}");
    }
}

#[test]
fn a_process_that_is_killed_ends_the_run_on_all_others() {
    let folder = Folder::new("killed");
    let (data, out) = (text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--mesh", "dp=3", "--batch", "6", "--seq", "16"];
    let args = [&args[..], &["--steps", "100000", "--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let mut started: Vec<Child> = (0..3).map(|rank| start(rank, 3, port, &args)).collect();
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    started[1].kill().unwrap();
    let killed = Instant::now();
    let outputs: Vec<Output> = started.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    let (codes, told) = ended(&outputs);
    assert_eq!(codes, [Some(1), None, Some(1)], "{told:?}");
    // The first rank that is left reports what is known; the other one says why it ends, in a line.
    let short =
        |rank: usize| format!("error: rank 1's process ended (killed or crashed); rank {rank} stops too\n");
    assert!(told[0].contains(&short(0)) && told[0].contains("\n  last call  #"), "{}", told[0]);
    assert!(told[2].ends_with(&short(2)), "{}", told[2]);
}

#[test]
fn a_process_that_stands_still_is_named_when_a_wait_has_lasted_too_long() {
    let folder = Folder::new("still");
    let (data, out) = (text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--timeout", "4"];
    let args = [&args[..], &["--steps", "100000", "--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let [first, mut second] = [0, 1].map(|rank| start(rank, 2, port, &args));
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-STOP", &second.id().to_string()]).status().unwrap().success());
    let (codes, told) = ended(&[first.wait_with_output().unwrap()]);
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(codes, [Some(1)], "{told:?}");
    assert!(
        told[0].contains("rank 0 waited more than 4s in #") && told[0].contains("for rank 1"),
        "{told:?}"
    );
    assert!(told[0].contains("absent     no sign of life from rank 1 for "), "{told:?}");
    assert!(told[0].contains(" s; its last call was #") && !told[0].contains("computing since"), "{told:?}");
}

#[test]
fn a_signal_to_all_processes_is_reported_by_the_first() {
    let folder = Folder::new("interrupted");
    let (data, out) = (text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--steps", "100000"];
    let args = [&args[..], &["--eval-every", "0", "--threads", "1"]].concat();
    let port = free_port();
    let started = [0, 1].map(|rank| start(rank, 2, port, &args));
    let begun = Instant::now();
    while fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step was taken");
        thread::sleep(Duration::from_millis(20));
    }
    let ids = started.each_ref().map(|child| child.id().to_string());
    assert!(Command::new("kill").arg("-INT").args(&ids).status().unwrap().success());
    let (codes, told) = ended(&started.map(|child| child.wait_with_output().unwrap()));
    assert_eq!(codes, [Some(130); 2], "{told:?}");
    assert!(told[0].contains("error: stopped by SIGINT after step ") && told[1].is_empty(), "{told:?}");
}

#[test]
fn a_loss_that_is_not_finite_is_explained_by_the_first_process() {
    let folder = Folder::new("not-finite");
    let (data, out) = (text(&folder), folder.path("out"));
    let args = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "16", "--steps", "9"];
    let args =
        [&args[..], &["--eval-every", "0", "--threads", "1", "--warmup", "0", "--lr", "1e30"]].concat();
    let (codes, told) = ended(&run(2, &args));
    assert_eq!(codes, [Some(1); 2], "{told:?}");
    let line = |text: &str| text.lines().next().unwrap().to_string();
    assert!(
        told[0].starts_with("error: step 2: the loss is NaN") && told[0].contains("\n  first      "),
        "{told:?}"
    );
    assert_eq!(told[1], format!("{}\n", line(&told[0])));
}

#[test]
fn what_a_launcher_tells_wrong_is_misuse() {
    let folder = Folder::new("launcher");
    let (data, out) = (text(&folder), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--seq", "16", "--steps", "2", "--eval-every", "0"];
    let alone = |variables: &[(&str, &str)], more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        let output = command.args(train).args(more).envs(variables.iter().copied()).output().unwrap();
        (output.status.code(), said(&output))
    };
    let address = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")];
    let with = |rank, count| [&[("RANK", rank), ("WORLD_SIZE", count)], &address[..]].concat();
    for (variables, more, why) in [
        (with("0", "2")[..2].to_vec(), &[][..], "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        (with("2", "2"), &[], "RANK is 2, but WORLD_SIZE is 2"),
        (with("x", "2"), &[], "RANK is `x`, which is no count"),
        (vec![("JOB_COMPLETION_INDEX", "2")], &[], "but RANK, WORLD_SIZE and MASTER_ADDR are not set"),
        (with("0", "3"), &["--mesh", "dp=2"], "--mesh gives 2 rank(s), but 3 processes were started"),
    ] {
        let (code, told) = alone(&variables, more);
        assert!(code == Some(2) && told.contains(why), "{told}");
    }
    // Nobody else comes; somebody else listens.
    let port = free_port().to_string();
    let lonely = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let (code, told) = alone(&lonely, &["--timeout", "1"]);
    assert!(code == Some(1) && told.contains("rank 1 did not connect to rank 0 (127.0.0.1:"), "{told}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let first = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let (code, told) = alone(&first, &[]);
    assert!(
        code == Some(2) && told.contains("cannot listen at port") && told.contains("SHARDGRAD_PORT"),
        "{told}"
    );
}
