//! The start of runs with several processes: options and inputs must be equal on all ranks, and a failure of one rank ends the start
//! on all at once.

use crate::cli::Folder;
use crate::processes::{assert_success, exit_codes_and_stderr, free_port, spawn_rank, stderr, write_text};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// Runs one process per rank with the arguments `args` and its `own`. Returns exit codes and standard errors. Asserts that no rank
/// waited for the timeout of a minute.
fn run<'a>(ranks: &[usize], args: &[&'a str], own: &[&[&'a str]]) -> (Vec<Option<i32>>, Vec<String>) {
    let (port, begun, count) = (free_port(), Instant::now(), ranks.iter().max().unwrap() + 1);
    let spawn = |(rank, own): (&usize, &&[&'a str])| spawn_rank(*rank, count, port, &[args, own].concat());
    let started: Vec<Child> = ranks.iter().zip(own).map(spawn).collect();
    let outputs: Vec<Output> = started.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(begun.elapsed() < Duration::from_secs(50), "{:?}", begun.elapsed());
    exit_codes_and_stderr(&outputs)
}

fn train<'a>(data: &'a str, out: &'a str) -> Vec<&'a str> {
    [
        "train",
        "--data",
        data,
        "--out",
        out,
        "--seq",
        "16",
        "--batch",
        "4",
        "--steps",
        "2",
        "--eval-every",
        "0",
    ]
    .into()
}

#[test]
fn different_options_or_data_are_an_error_with_both_values() {
    let folder = Folder::new("unlike");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let other = folder.file("other", fs::read_to_string(&data).unwrap().replacen("fox", "cat", 1));
    let args = train(&data, &out);
    for (own, why) in [
        (["--lr", "0.1"], "ranks got different options: --lr is 0.002 on rank 0, 0.1 on rank 1"),
        (
            ["--save-every", "5"],
            "ranks got different options: --save-every is not given on rank 0, 5 on rank 1",
        ),
        (
            ["--no-shuffle", "--json"],
            "ranks got different options: --no-shuffle is false on rank 0, true on rank 1",
        ),
        (["--mesh", "tp=2"], "ranks got different meshes: mesh(dp=2) on rank 0, mesh(tp=2) on rank 1"),
    ] {
        let (codes, messages) = run(&[0, 1], &args, &[&[], &own]);
        assert_eq!(codes, [Some(2); 2], "{messages:?}");
        assert!(
            messages.iter().all(|text| text.contains(&format!("error: {why}\n"))),
            "{why} in {messages:?}"
        );
    }
    for mesh in ["dp=2", "pp=2"] {
        let args = ["train", "--out", &out, "--seq", "16", "--batch", "4", "--steps", "2", "--mesh", mesh];
        let (codes, messages) = run(&[0, 1], &args, &[&["--data", &data], &["--data", &other]]);
        assert_eq!(codes, [Some(2); 2], "{messages:?}");
        let why = "error: ranks got different inputs: the hash of the data is ";
        assert!(messages.iter().all(|text| text.contains(why)), "{messages:?}");
    }
    assert!(!fs::exists(format!("{out}/metrics.jsonl")).unwrap(), "a step was taken");
}

#[test]
fn different_checkpoints_or_models_are_an_error() {
    let folder = Folder::new("unlike-start");
    let (data, out, other) = (write_text(&folder), folder.path("out"), folder.path("other"));
    let args = [&train(&data, &out)[..], &["--save-every", "1", "--mesh", "dp=2"]].concat();
    let shardgrad =
        |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap();
    assert_success(&[shardgrad(&args)]);
    let resumed = [
        "train",
        "--data",
        &data,
        "--seq",
        "16",
        "--batch",
        "4",
        "--save-every",
        "1",
        "--resume",
        "--eval-every",
        "0",
    ];
    for (steps, next) in [("3", "3 (checkpoint with hash "), ("2", "none on rank 0, 1 on rank 1")] {
        let args = [&resumed[..], &["--steps", steps]].concat();
        let (codes, messages) = run(&[0, 1], &args, &[&["--out", &out], &["--out", &other]]);
        assert_eq!(codes, [Some(2); 2], "{messages:?}");
        let why = format!("error: ranks got different starting points: the next step is {next}");
        assert!(messages.iter().all(|text| text.contains(&why)), "{messages:?}");
    }
    // Equal checkpoints on both, and no step left.
    let (codes, messages) =
        run(&[0, 1], &[&resumed[..], &["--steps", "2", "--out", &out]].concat(), &[&[], &[]]);
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    let (one, two) = (format!("{out}/model"), folder.path("two"));
    fs::create_dir(&two).unwrap();
    fs::copy(format!("{one}/config.json"), format!("{two}/config.json")).unwrap();
    let mut weights = fs::read(format!("{one}/model.safetensors")).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    fs::write(format!("{two}/model.safetensors"), weights).unwrap();
    let args = ["generate", "--prompt", "The", "--tokens", "2", "--mesh", "tp=2"];
    let (codes, messages) = run(&[0, 1], &args, &[&["--model", &one], &["--model", &two]]);
    assert_eq!(codes, [Some(2); 2], "{messages:?}");
    let why = "error: ranks got different inputs: the hash of the weights is ";
    assert!(messages.iter().all(|text| text.contains(why)), "{messages:?}");
}

#[test]
fn logits_are_written_if_all_ranks_compute_them() {
    let folder = Folder::new("unlike-logits");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = [&train(&data, &out)[..], &["--mesh", "dp=1"]].concat();
    assert_success(&[Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap()]);
    let (model, logits, other) = (format!("{out}/model"), folder.path("logits"), folder.path("other"));
    let args = ["eval", "--data", &data, "--model", &model, "--seq", "16", "--mesh", "tp=2"];
    for (own, why) in [
        ([&["--logits", &*logits][..], &[]], "--logits is given on rank 0, not given on rank 1"),
        ([&[], &["--logits", &*logits][..]], "--logits is not given on rank 0, given on rank 1"),
    ] {
        let (codes, messages) = run(&[0, 1], &args, &own);
        assert_eq!(codes, [Some(2); 2], "{messages:?}");
        let why = format!("error: ranks got different options: {why}\n");
        assert!(messages.iter().all(|text| text.contains(&why)), "{messages:?}");
    }
    // Paths may differ, and rank 0 alone writes.
    let (codes, messages) = run(&[0, 1], &args, &[&["--logits", &logits], &["--logits", &other]]);
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    assert!(fs::exists(logits).unwrap() && !fs::exists(other).unwrap());
}

#[test]
fn invalid_arguments_of_one_rank_end_all_others_at_once() {
    let folder = Folder::new("refuses");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let args = train(&data, &out);
    let none: &[&str] = &[];
    for (rank, own, why) in [
        (1, &["--bad"][..], "unexpected argument '--bad' found"),
        (0, &["--lr", "-1"], "invalid value '-1' for '--lr <RATE>': must be a number above 0"),
        (1, &["--warmup", "9"], "some options contradict each other"),
        (2, &["--mesh", "dp=2"], "--mesh has 2 rank(s), but 3 processes were started"),
    ] {
        let mut each = [none; 3];
        each[rank] = own;
        let (codes, messages) = run(&[0, 1, 2], &args, &each);
        assert_eq!(codes, [Some(2); 3], "{messages:?}");
        for (at, text) in messages.iter().enumerate() {
            let expected =
                if at == rank { why.to_string() } else { format!("rank {rank} refused to start: {why}") };
            assert!(text.contains(&format!("error: {expected}")), "{expected} in {text}");
            assert!(at == rank || !text.contains("Usage:"), "{text}");
        }
    }
    let args = ["train", "--out", &out, "--seq", "16", "--steps", "2", "--data"];
    let (codes, messages) = run(&[0, 1], &args, &[&[&data], &["/no/such/text"]]);
    assert_eq!(codes, [Some(2); 2], "{messages:?}");
    assert!(
        messages[0].contains("error: rank 1 refused to start: /no/such/text: no such file"),
        "{messages:?}"
    );
}

#[test]
fn two_processes_with_one_rank_end_the_start_on_all() {
    let folder = Folder::new("twins");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let (args, port, begun) = (train(&data, &out), free_port(), Instant::now());
    let [zero, mut one, mut twin] = [0, 1, 1].map(|rank| spawn_rank(rank, 3, port, &args));
    // Rank 2 comes last: a world that is complete before the second rank 1 comes would start without it.
    while one.try_wait().unwrap().is_none() && twin.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(50), "no rank 1 was refused");
        std::thread::sleep(Duration::from_millis(5));
    }
    let two = spawn_rank(2, 3, port, &args);
    let outputs = [zero, one, twin, two].map(|child| child.wait_with_output().unwrap());
    assert!(begun.elapsed() < Duration::from_secs(50), "{:?}", begun.elapsed());
    let (codes, messages) = exit_codes_and_stderr(&outputs);
    assert_eq!(codes, [Some(2); 4], "{messages:?}");
    assert!(
        messages.iter().all(|text| text.contains("error: two processes were started as rank 1")),
        "{messages:?}"
    );
}

#[test]
fn long_wait_is_reported_and_a_killed_process_ends_it() {
    let folder = Folder::new("waits");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let port = free_port();
    let [mut zero, mut one] = [0, 1].map(|rank| spawn_rank(rank, 3, port, &train(&data, &out)));
    let mut lines = BufReader::new(zero.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.next().unwrap();
    assert_eq!(line, format!("waiting for rank 2 to connect to rank 0 (127.0.0.1:{port}) (5 s so far)"));
    one.kill().unwrap();
    let killed = Instant::now();
    let rest: Vec<String> = lines.collect();
    let why = "error: rank 1's process ended before all ranks had connected";
    assert!(rest.iter().any(|line| line == why), "{rest:?}");
    assert_eq!((zero.wait().unwrap().code(), one.wait().unwrap().code()), (Some(1), None));
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
}

#[test]
fn long_arguments_are_truncated_in_messages() {
    let long = "é".repeat(10_000);
    let shown = format!("{}...", "é".repeat(80));
    for args in [
        &["train", "--lr", &long][..],
        &["train", &format!("--mesh={long}")],
        &["train", "--data", &long],
        &["eval", "--model", &long],
        &[&long],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap();
        let message = stderr(&output);
        assert!(output.status.code() == Some(2) && message.contains(&shown), "{message}");
        assert!(message.chars().count() < 1000, "{message}");
    }
}
