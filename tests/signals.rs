//! Signals to `train`, `eval` and `generate`, and the end of the launcher: the saved state and the exit code.

use crate::cli::{Folder, exit_code_and_stderr};
use crate::memory_limits::model;
use crate::processes::{free_port, spawn_rank};
use crate::run_outcomes::{SMALL, end_of, files, signal, spawned, text, wait_for, wait_for_file};
use shardgrad_testing::sample;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Options of a run without an end.
const LONG: [&str; 4] = ["--steps", "1000000", "--eval-every", "0"];

/// Returns whether this process ignores a signal, as under `nohup` or in a background shell: runs that it starts ignore it too.
fn is_ignored(signal: &str) -> bool {
    let number =
        [("-HUP", 1), ("-INT", 2), ("-TERM", 15)].into_iter().find(|known| known.0 == signal).unwrap().1;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() >> (number - 1) & 1 == 1)
}

#[test]
fn signal_stops_a_run_and_saves_its_state() {
    let folder = Folder::new("stop-codes");
    let data = text(&folder, 50);
    let cases = [
        ("-INT", "SIGINT", 130),
        ("-TERM", "SIGTERM", 143),
        ("-HUP", "SIGHUP", 129),
        ("-USR1", "SIGUSR1", 138),
    ];
    let cases = cases.into_iter().chain([("-XCPU", "SIGXCPU", 152)]);
    for (sent, name, code) in cases.filter(|case| case.0 != "-HUP" || !is_ignored("-HUP")) {
        let out = folder.path(name);
        let args = [&["--data", &data, "--out", &out, "--save-every", "100000"], &LONG[..]].concat();
        let child = spawned(&args, Stdio::null(), Stdio::piped());
        wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
        // SLURM sends its signal twice within milliseconds; no number of them cuts the save short.
        for _ in 0..5 {
            signal(&child, sent);
        }
        let (ended, message) = end_of(child);
        assert_eq!(ended, Some(code), "{name}: {message}");
        let steps = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap().lines().count();
        let text = format!("stopped by {name} after step {steps}; the model and a checkpoint are saved");
        assert!(message.contains(&text), "{text} in {message}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file(), "{name}");
        assert!(Path::new(&out).join(format!("checkpoint-{steps}/trainer_state.json")).is_file(), "{name}");
    }
}

#[test]
fn signal_before_the_first_step_is_an_error() {
    let folder = Folder::new("stop-start");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    // The second rank is never started.
    let args = [&["train", "--data", &data, "--out", &out], &SMALL[..], &LONG].concat();
    let child = spawn_rank(0, 2, free_port(), &args);
    wait_for_file(&Path::new(&out).join(".lock"));
    signal(&child, "-TERM");
    let (code, message) = end_of(child);
    assert_eq!(code, Some(1), "{message}");
    assert!(
        message.contains("error: stopped by SIGTERM before the first step; nothing is saved\n"),
        "{message}"
    );
}

#[test]
fn signal_to_one_rank_stops_all_with_its_exit_code() {
    let folder = Folder::new("stop-ranks");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    let args = [&["train", "--data", &data, "--out", &out], &SMALL[..], &LONG, &["--threads", "1"]].concat();
    let port = free_port();
    let ranks = [0, 1].map(|rank| spawn_rank(rank, 2, port, &args));
    wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
    signal(&ranks[1], "-USR1");
    let ends = ranks.map(end_of);
    assert_eq!(ends.each_ref().map(|(code, _)| *code), [Some(138); 2], "{ends:?}");
    // Rank 0 alone prints the message.
    let [first, other] = ends.map(|(_, message)| message);
    assert!(
        first.contains("stopped by SIGUSR1 after step") && !other.contains("stopped by"),
        "{first}{other}"
    );
    assert!(Path::new(&out).join("model/model.safetensors").is_file());
}

#[test]
fn signal_during_the_last_evaluation_keeps_the_validation_loss() {
    let folder = Folder::new("stop-last");
    // Evaluating the validation data takes far longer than a step.
    let data = text(&folder, 1_000);
    for (sent, first) in [("-TERM", true), ("-INT", true), ("-TERM", false)] {
        let out = folder.path(&format!("out{sent}{first}"));
        // The whole run, or its last step after a checkpoint.
        let args = ["--data", &data, "--out", &out, "--save-every", "100000", "--resume"];
        if !first {
            let before = [&["train"], &SMALL[..], &args, &["--steps", "2", "--eval-every", "0"]].concat();
            let (code, message) = exit_code_and_stderr(&before);
            assert_eq!(code, 0, "{message}");
        }
        let args = [&args[..], &["--steps", "3", "--eval-every", "3"]].concat();
        let child = spawned(&args, Stdio::null(), Stdio::piped());
        let metrics = Path::new(&out).join("metrics.jsonl");
        // The record of a step is written before its evaluation begins.
        wait_for(&metrics, "\"step\":3,");
        signal(&child, sent);
        let (code, message) = end_of(child);
        assert_eq!(code, Some(0), "{sent}: {message}");
        assert!(
            message.contains("step 3 of 3 is done; saving the model"),
            "the signal came too late: {message}"
        );
        let metrics = fs::read_to_string(metrics).unwrap();
        let last = metrics.lines().nth(2).unwrap();
        assert!(metrics.lines().count() == 3 && last.contains("\"val_loss\":"), "{metrics}");
        for saved in ["model/model.safetensors", "checkpoint-3/trainer_state.json"] {
            assert!(Path::new(&out).join(saved).is_file(), "{saved}");
        }
    }
}

#[test]
fn second_sigint_two_seconds_later_ends_a_run_at_once() {
    let folder = Folder::new("stop-twice");
    // The last evaluation takes many times two seconds.
    let (data, out) = (text(&folder, 600_000), folder.path("out"));
    let args = ["--data", &data, "--out", &out, "--steps", "2", "--eval-every", "2"];
    let child = spawned(&args, Stdio::null(), Stdio::piped());
    wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
    signal(&child, "-INT");
    signal(&child, "-INT");
    wait_for_file(&Path::new(&out).join("model/model.safetensors"));
    thread::sleep(Duration::from_millis(2100));
    signal(&child, "-INT");
    let (code, message) = end_of(child);
    assert_eq!(code, Some(130), "{message}");
    assert!(
        message.ends_with("error: ended by a second SIGINT; the model after step 2 is saved\n"),
        "{message}"
    );
}

#[test]
fn write_beyond_the_file_size_limit_is_an_error() {
    let folder = Folder::new("stop-size");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    // A limit of 8 blocks: enough for the metrics of a few steps, not for the model.
    let run = "ulimit -f 8; exec \"$0\" \"$@\"";
    let args = ["train", "--data", &data, "--out", &out, "--steps", "3", "--eval-every", "0"];
    let output = Command::new("sh")
        .args(["-c", run, env!("CARGO_BIN_EXE_shardgrad")])
        .args(args)
        .args(SMALL)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("model.safetensors") && message.contains("File too large"), "{message}");
}

/// Whether a process is running. A process that has ended and is not waited for is a zombie.
fn is_running(id: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[test]
fn ranks_whose_launcher_is_killed_save_and_stop() {
    let folder = Folder::new("stop-orphans");
    let data = text(&folder, 50);
    for launched in [true, false] {
        let out = folder.path(&format!("out{launched}"));
        let stderr_file = folder.path(&format!("said{launched}"));
        let args =
            [&["train", "--data", &data, "--out", &out], &SMALL[..], &LONG, &["--threads", "1"]].concat();
        // A shell acts as the launcher: it starts both ranks and waits.
        let run = "ulimit -t 100; for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank \"$0\" \"$@\" >/dev/null 2>\"$STDERR-$rank\" & echo $!; done; wait";
        let mut shell = Command::new("sh");
        shell.args(["-c", run, env!("CARGO_BIN_EXE_shardgrad")]).args(args);
        shell.envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        shell.env("MASTER_PORT", free_port().to_string()).env("STDERR", &stderr_file);
        if launched {
            shell.env("TORCHELASTIC_RUN_ID", "run");
        }
        let mut shell = shell.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(shell.stdout.take().unwrap()));
        let ranks: Vec<String> = lines.by_ref().take(2).map(Result::unwrap).collect();
        shell.kill().unwrap();
        shell.wait().unwrap();
        let kill = |with: &str| Command::new("kill").arg(with).args(&ranks).status().unwrap().success();
        let mut reason = "the end of its launcher";
        if !launched {
            // Ranks that were started by hand keep running without the shell.
            thread::sleep(Duration::from_millis(1200));
            assert!(kill("-0"), "the ranks run");
            assert!(kill("-TERM"));
            reason = "SIGTERM";
        }
        wait_for(Path::new(&format!("{stderr_file}-0")), &format!("stopped by {reason} after step"));
        let begun = Instant::now();
        while ranks.iter().any(|rank| is_running(rank)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "a rank still runs");
            thread::sleep(Duration::from_millis(20));
        }
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
    }
}

#[test]
fn signal_ends_an_evaluation_before_the_last_step() {
    let folder = Folder::new("measuring");
    // Validation takes far longer than a step.
    let data = text(&folder, 40_000);
    for (sent, code) in [("-INT", 130), ("-HUP", 129)].into_iter().filter(|case| !is_ignored(case.0)) {
        let out = folder.path(&format!("out{sent}"));
        let args = ["--data", &data, "--out", &out, "--steps", "3", "--eval-every", "1"];
        let child = spawned(&args, Stdio::null(), Stdio::piped());
        // The metrics of a step are written before its validation, which takes far longer than this.
        wait_for(&Path::new(&out).join("metrics.jsonl"), "seconds");
        signal(&child, sent);
        let (ended, message) = end_of(child);
        assert_eq!(ended, Some(code), "{sent}: {message}");
        let parts = ["step 1 of 3 is done; saving the model", "after step 1; the model is saved"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
        assert!(metrics.lines().count() == 1 && !metrics.contains("val_loss"), "{metrics}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
    }
}

#[test]
fn sigstopped_run_continues() {
    let folder = Folder::new("stopped");
    let (data, out) = (text(&folder, 2000), folder.path("out"));
    // One stage waits while the other computes, almost all of the time.
    let long = ["train", "--batch", "16", "--seq", "64", "--mesh", "pp=2", "--microbatches", "1"];
    let more = ["--data", &data, "--out", &out, "--steps", "12", "--eval-every", "0", "--timeout", "4"];
    let mut run = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    let child =
        run.args([&long[..], &more].concat()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    for step in sample(1, ["\"step\":1,", "\"step\":4,"]) {
        wait_for(&Path::new(&out).join("metrics.jsonl"), step);
        std::thread::sleep(Duration::from_millis(60));
        signal(&child, "-STOP");
        std::thread::sleep(Duration::from_millis(4500));
        signal(&child, "-CONT");
    }
    let (code, message) = end_of(child);
    assert_eq!(code, Some(0), "{message}");
    assert!(Path::new(&out).join("model/model.safetensors").is_file());
}

#[test]
fn signal_in_the_first_step_leaves_an_earlier_run_unchanged() {
    let folder = Folder::new("first");
    let (data, out) = (text(&folder, 2000), folder.path("out"));
    let given = ["--data", &data, "--out", &out];
    assert_eq!(exit_code_and_stderr(&[&["train", "--steps", "1"], &given[..], &SMALL[..]].concat()).0, 0);
    let earlier = files(Path::new(&out));
    for there in [true, false] {
        if !there {
            fs::remove_dir_all(&out).unwrap();
        }
        // A step of this many rows takes longer than the signal.
        let long = ["train", "--batch", "96", "--seq", "64", "--mesh", "dp=2"];
        let mut run = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        run.args([&long[..], &given].concat()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // From this line on signals are handled.
        lines.find(|line| line.as_ref().unwrap().starts_with("training ")).unwrap().unwrap();
        signal(&child, "-INT");
        lines.for_each(drop);
        let (code, message) = end_of(child);
        assert_eq!(code, Some(1), "{message}");
        assert!(message.contains("stopped by SIGINT before the first step; nothing is saved"), "{message}");
        assert!(!there || files(Path::new(&out)) == earlier, "{message}");
        assert!(there || !Path::new(&out).join("model").exists());
    }
}

#[test]
fn signal_ends_eval_and_generate_with_a_message() {
    let folder = Folder::new("word");
    let model = model(&folder);
    let cases = [("-INT", "SIGINT", 130), ("-TERM", "SIGTERM", 143)];
    for (signal, name, code) in cases.into_iter().filter(|case| !is_ignored(case.0)) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardgrad"))
            .args(["generate", "--model", &model, "--prompt", "a", "--tokens", "100000000"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut written = child.stdout.take().unwrap();
        written.read_exact(&mut [0; 200]).unwrap();
        let reader = std::thread::spawn(move || std::io::copy(&mut written, &mut std::io::sink()));
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        reader.join().unwrap().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), message.as_str()),
            (Some(code), &*format!("generate: stopped by {name}\n"))
        );
    }
}
