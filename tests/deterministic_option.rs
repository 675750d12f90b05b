//! `train --deterministic mesh` and `--state-hash`: the same metrics, bit for bit, for every number of ranks that share rows, tokens or
//! layers, of pipeline stages and of microbatches, also after a resumption on other ranks; hashes of equal weights on every mesh.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::processes::{assert_success, free_port, run_ranks, spawn_rank};
use crate::resume::{record, refused, short_run, text, train};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// The hashes of a run's steps.
fn hashes(record: &[Value]) -> Vec<Option<&str>> {
    record
        .iter()
        .map(|entry| entry.get("state_hash").map(|hash| hash.as_str().expect("hashes are texts")))
        .collect()
}

#[test]
fn metrics_have_the_same_bits_for_every_number_of_ranks_and_microbatches() {
    let folder = Folder::new("canonical-metrics");
    let data = text(&folder);
    let run = |name: &str, steps: &str, more: &[&str]| {
        let out = folder.0.join(name);
        let canonical =
            ["--deterministic", "mesh", "--state-hash", "1", "--dropout", "0.1", "--check-every", "1"];
        let options =
            ["--data", &data, "--out", out.to_str().unwrap(), "--steps", steps, "--save-every", "2"];
        train(&[&options[..], &canonical, more].concat());
        record(&out)
    };
    let alone = run("alone", "4", &["--mesh", "dp=1"]);
    assert!(hashes(&alone).iter().all(|hash| hash.is_some_and(|hash| hash.len() == 32)), "{alone:?}");
    assert!(alone.last().unwrap()["val_loss"].is_f64(), "{alone:?}");
    // Each option once; `nn/tests/training/canonical_meshes.txt` has the meshes.
    for (mesh, form) in [
        ("dp=2", &["--microbatches", "2"][..]),
        ("cp=2", &["--context", "gather"]),
        ("cp=2", &["--context", "exchange"]),
        ("tp=2", &["--sequence-parallel"]),
        ("pp=2,fsdp=2", &[]),
    ] {
        let name = format!("{mesh}{}", form.concat());
        assert_eq!(run(&name, "4", &[&["--mesh", mesh], form].concat()), alone, "{name}");
    }
    let odd = |mesh: &str| run(&format!("odd-{mesh}"), "3", &["--mesh", mesh, "--sum-leaves", "12"]);
    assert_eq!(odd("tp=3"), odd("tp=2"), "4 and 6 of 12 leaves for each rank");
    run("parts", "2", &["--mesh", "dp=4"]);
    assert_eq!(run("parts", "4", &["--mesh", "dp=2", "--resume"]), alone, "resumed on another mesh");
    let other = folder.0.join("parts");
    let other = refused(&["--data", &data, "--out", other.to_str().unwrap(), "--steps", "6", "--resume"]);
    assert!(
        other.contains("canonical over 4 leaves of the batch and 8 of other sums (version 1)"),
        "{other}"
    );
}

/// Starts processes that train, and kills them all (SIGKILL) once a checkpoint of a step exists.
fn train_and_kill(count: usize, args: &[&str], checkpoint: &Path) {
    let port = free_port();
    let mut started: Vec<Child> = (0..count).map(|rank| spawn_rank(rank, count, port, args)).collect();
    let begun = Instant::now();
    while !checkpoint.join("trainer_state.json").exists() {
        assert!(begun.elapsed() < Duration::from_secs(120), "no checkpoint at {}", checkpoint.display());
        let ended = started.iter_mut().any(|child| child.try_wait().unwrap().is_some());
        assert!(
            !ended,
            "{:?}",
            started.into_iter().map(|child| child.wait_with_output()).collect::<Vec<_>>()
        );
        thread::sleep(Duration::from_millis(5));
    }
    // std kills by SIGKILL.
    started.iter_mut().for_each(|child| child.kill().unwrap());
    assert!(started.iter_mut().all(|child| !child.wait().unwrap().success()));
}

#[test]
fn run_that_is_killed_twice_and_resumed_on_other_meshes_of_processes_ends_with_the_same_hash() {
    let folder = Folder::new("canonical-killed");
    let data = text(&folder);
    let args = |out: &str, mesh: &str| -> Vec<String> {
        let model = ["--preset", "mixtral-nano", "--data", &data, "--out", out, "--mesh", mesh];
        let canonical = ["--deterministic", "mesh", "--sum-leaves", "4", "--state-hash", "1"];
        let steps = ["--dropout", "0.1", "--threads", "1", "--steps", "8", "--save-every", "2", "--resume"];
        short_run(&[&model[..], &canonical, &steps].concat()).into_iter().map(String::from).collect()
    };
    let (whole, parts) = (folder.path("whole"), folder.path("parts"));
    let undisturbed = args(&whole, "dp=1");
    let (code, message) = exit_code_and_stderr(&undisturbed.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(code, 0, "{message}");
    for (mesh, checkpoint) in [("dp=2,tp=2", "checkpoint-2"), ("tp=4", "checkpoint-4")] {
        let args = args(&parts, mesh);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        train_and_kill(4, &args, &Path::new(&parts).join(checkpoint));
    }
    let rest = args(&parts, "pp=2,ep=2");
    let ranks = run_ranks(4, &rest.iter().map(String::as_str).collect::<Vec<_>>());
    assert_success(&ranks);
    let printed = String::from_utf8_lossy(&ranks[0].stdout).into_owned();
    assert!(
        printed.contains("resuming after step ") && !printed.contains("resuming after step 8"),
        "{printed}"
    );
    let [whole, parts] = [&whole, &parts].map(|out| record(Path::new(out)));
    assert_eq!((whole.len(), hashes(&whole)[7].map(str::len)), (8, Some(32)));
    assert_eq!(parts, whole, "every loss, norm, validation loss and hash");
}

#[test]
fn meshes_without_canonical_sums_and_idle_options_are_refused() {
    let folder = Folder::new("canonical-refused");
    let data = text(&folder);
    let out = folder.path("out");
    let mesh = |more: &[&str]| refused(&[&["--data", &data, "--out", &out, "--steps", "4"], more].concat());
    let text = mesh(&["--deterministic", "mesh", "--mesh", "cp=2", "--context", "ring"]);
    assert!(text.contains("ring attention over the mesh axis cp=2 adds terms in an order"), "{text}");
    let text = mesh(&["--deterministic", "mesh", "--mesh", "tp=3"]);
    assert!(text.contains("tp=3 cannot share 8 leaves of sums") && text.contains("use 12 leaves"), "{text}");
    let text = mesh(&["--deterministic", "mesh", "--mesh", "dp=2", "--batch-leaves", "1"]);
    assert!(text.contains("use 2 leaves"), "{text}");
    let text = mesh(&["--batch-leaves", "4"]);
    assert!(text.contains("--batch-leaves has no effect without --deterministic mesh"), "{text}");
    let text = mesh(&["--sum-leaves", "4"]);
    assert!(text.contains("--sum-leaves has no effect without --deterministic mesh"), "{text}");
}

#[test]
fn hashes_come_at_their_interval_and_after_the_last_step() {
    let folder = Folder::new("state-hash");
    let (data, out) = (text(&folder), folder.0.join("out"));
    let options = ["--data", &data, "--out", out.to_str().unwrap(), "--steps", "5", "--state-hash", "2"];
    train(&[&options[..], &["--mesh", "pp=2"]].concat());
    let record = record(&out);
    assert!(hashes(&record).iter().map(Option::is_some).eq([false, true, false, true, true]), "{record:?}");
}

#[test]
fn runs_have_the_same_bits_on_every_instruction_set() {
    let folder = Folder::new("instruction-sets");
    // Few tokens, for validation too: without AVX2 a fused multiply-add is a call.
    let data = folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(12));
    let run = |preset: &str, limit: &str, more: &[&str]| {
        let out = folder.0.join(format!("{preset}{}-{limit}", more.concat()));
        let out_text = out.to_str().unwrap();
        let args = ["train", "--preset", preset, "--data", &data, "--out", out_text, "--mesh", "tp=2"];
        let steps = ["--steps", "2", "--batch", "2", "--seq", "12", "--eval-every", "2", "--state-hash", "1"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        command.args([&args[..], &steps, more].concat()).env("SHARDGRAD_CPU_ISA", limit);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (record(&out), String::from_utf8(output.stdout).unwrap())
    };
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx512f") {
        let _ = writeln!(std::io::stderr(), "skipped: AVX-512, which this CPU does not have");
    }
    for (preset, more) in [
        ("nano", &["--dropout", "0.1"][..]),
        ("llama-nano", &["--deterministic", "mesh"]),
        ("nano", &["--dtype", "bf16"]),
        ("nano", &["--dtype", "f16"]),
    ] {
        let [(avx512, text), (avx2, _), (baseline, _)] =
            ["avx512", "avx2", "baseline"].map(|limit| run(preset, limit, more));
        assert!(avx512 == avx2 && avx2 == baseline, "{preset} {more:?}: {avx512:?} {avx2:?} {baseline:?}");
        assert!(text.contains("  machine   x86-64 with AVX-512, AVX2 or neither; powers"), "{text}");
    }
    // Without a limit, products of bf16 may use other instructions; ops of f32 may not.
    let of_seed = |limit| run("nano", limit, &["--seed", "1"]).0;
    assert_eq!(of_seed(""), of_seed("avx2"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    let output = command.args(["doctor"]).env("SHARDGRAD_CPU_ISA", "sse9").output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && message.contains("SHARDGRAD_CPU_ISA=sse9 is not one of"),
        "{message}"
    );
}

#[test]
fn first_lines_and_doctor_state_the_levels_of_reproducibility() {
    let folder = Folder::new("levels");
    let (data, out) = (text(&folder), folder.path("out"));
    let printed = |args: &[&str]| {
        let output = shardgrad(args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let train = ["--data", &data, "--out", &out, "--steps", "2", "--mesh", "dp=2"];
    let plain = printed(&short_run(&train));
    let canonical = ["--deterministic", "mesh", "--mesh", "cp=2"];
    let canonical = printed(&short_run(&[&train[..train.len() - 2], &canonical].concat()));
    for level in [
        "run       yes",
        "resume    yes",
        "transport yes",
        "mesh      no, another one agrees",
        "machine   x86-64",
    ] {
        assert!(plain.contains(&format!("\n  {level}")), "{level}: {plain}");
    }
    for level in [
        "resume    yes, on any such mesh",
        "mesh      yes, any of dp, fsdp, ep, pp, tp and cp (without a ring) whose ranks",
    ] {
        assert!(canonical.contains(&format!("\n  {level}")), "{level}: {canonical}");
    }
    let doctor = printed(&["doctor"]);
    for line in ["run", "resume", "transport", "mesh", "machine"] {
        assert!(doctor.lines().any(|found| found.starts_with(&format!("  {line} "))), "{line}: {doctor}");
    }
    assert!(doctor.contains("ops of f32 and f16: "), "{doctor}");
    let json: Value = serde_json::from_str(&printed(&["doctor", "--json"])).unwrap();
    assert!(json["reproducibility"]["mesh"].as_str().unwrap().contains("--deterministic mesh"), "{json}");
}
