//! Memory limits: runs that do not fit are refused before they start, failed allocations save the model.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use shardgrad::nn::checkpoint::TensorWriter;
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use shardgrad_testing::sample;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Saves a small model.
pub(crate) fn model(folder: &Folder) -> String {
    let dir = folder.path("model");
    World::run(Mesh::single(), |rank| {
        let config = Gpt2Config::new(256, 64, 16, 1, 2);
        Model::new(rank, Gpt2::new(&config), &Gpt2::plan(&config), 0)?.save(Path::new(&dir))
    })
    .unwrap();
    dir
}

#[test]
fn run_that_cannot_fit_memory_is_refused() {
    let folder = Folder::new("memory");
    let (data, out) = (folder.file("text", "abc ".repeat(3000)), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--batch", "2", "--seq", "8", "--steps", "1"];
    let with = |more: &[&str]| exit_code_and_stderr(&[&train[..], more].concat());
    // Weights, gradients and optimizer state exceed 1 TB, more than any test machine has.
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let (code, message) = with(&["--preset", "llama-70b", "--mesh", mesh]);
        assert_eq!(code, 2, "{message}");
        assert_eq!(message.lines().next().unwrap().matches("TiB").count(), 1, "{message}");
        let asked = format!("training llama-70b on mesh({mesh}) needs about ");
        for part in [asked.as_str(), " left", "help       use a smaller model", "--memory-limit BYTES"] {
            assert!(message.contains(part), "no `{part}` in: {message}");
        }
        assert!(!Path::new(&out).exists(), "nothing is written");
    }
    let (code, message) = with(&["--mesh", "dp=2", "--memory-limit", "100KB"]);
    assert!(code == 2 && message.contains("but --memory-limit is 97.7 KiB"), "{message}");
    let (code, message) = with(&["--mesh", "dp=2", "--memory-limit", "1GB"]);
    assert_eq!(code, 0, "{message}");
    let model = model(&folder);
    for command in [&["eval", "--data", &data][..], &["generate", "--prompt", "a"]] {
        let limited = [command, &["--model", &model, "--memory-limit", "1KB"]].concat();
        let (code, message) = exit_code_and_stderr(&limited);
        assert!(code == 2 && message.contains("per rank, but --memory-limit is 1000 B"), "{message}");
        assert!(shardgrad(&[command, &["--model", &model]].concat()).status.success());
    }
}

/// Trains under an address-space limit in MiB; returns exit code, stderr, number of steps in the metrics, and whether a model was saved.
fn train_within(folder: &Folder, mesh: &str, mib: usize, more: &str) -> (Option<i32>, String, usize, bool) {
    let (data, out) = (folder.file("text", "The quick brown fox. ".repeat(500)), folder.path("out"));
    let _ = fs::remove_dir_all(&out);
    let script = format!(
        "ulimit -v {} && exec \"$0\" train --data {data} --out {out} --mesh {mesh} --threads 1 --steps 4 --batch 16 {more}",
        mib << 10
    );
    let mut command = Command::new("bash");
    // With one malloc arena the failing limits are the same in every run.
    command.env("MALLOC_ARENA_MAX", "1").args(["-c", &script, env!("CARGO_BIN_EXE_shardgrad")]);
    let output = command.output().unwrap();
    let steps = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), message, steps, Path::new(&format!("{out}/model/model.safetensors")).exists())
}

#[cfg(target_os = "linux")]
#[test]
fn failed_allocation_is_an_error_and_the_model_is_saved() {
    let folder = Folder::new("refused");
    let (mut refused, mut after_steps, mut tried) = (0, 0, 0);
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        for mib in sample(0, (70..=190).step_by(10)) {
            // --memory-limit replaces the check, so that the run starts.
            let (code, message, steps, is_saved) = train_within(&folder, mesh, mib, "--memory-limit 1GB");
            let outcome = format!("{mesh} within {mib} MiB: {code:?} after {steps} steps, {message}");
            tried += 1;
            if code == Some(0) {
                assert!(is_saved && steps == 4, "{outcome}");
                // Larger limits say nothing new.
                break;
            }
            assert!(code == Some(1) && message.contains("out of memory: "), "{outcome}");
            refused += 1;
            after_steps += usize::from(steps > 0);
            assert!(is_saved == (steps > 0), "{outcome}");
        }
    }
    assert!(
        refused >= 8,
        "{refused} runs of {tried} were refused memory, {after_steps} of them after a step"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn address_space_limit_is_checked_before_the_run() {
    let folder = Folder::new("space");
    let (code, message, steps, _) = train_within(&folder, "dp=2", 100, "");
    assert!(code == Some(2) && steps == 0, "{message}");
    for part in
        ["training tiny on mesh(dp=2) needs about ", "address space of this process (`ulimit -v`) has "]
    {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn memory_and_folder_are_checked_before_data_is_read() {
    let folder = Folder::new("early");
    // Invalid UTF-8 and an invalid token id: reading them fails.
    let (latin, rows) = (folder.file("latin", [b"caf\xe9 ".as_slice(); 400].concat()), folder.path("rows"));
    let ids = [("input_ids".to_string(), DType::I64, vec![2, 9])];
    let mut writer = TensorWriter::create(Path::new(&rows), &ids).unwrap();
    writer.append("input_ids", &[0x7f; 2 * 9 * 8]).unwrap();
    writer.finish().unwrap();
    let (out, taken) = (folder.path("out"), folder.file("taken", ""));
    for (data, why) in [(["--data", &latin], "not UTF-8 text"), (["--tokens", &rows], "input_ids")] {
        let with = |more: &[&str]| {
            let run =
                [&["train", "--batch", "2", "--steps", "1", "--mesh", "dp=1"], &data[..], more].concat();
            let (code, message) = exit_code_and_stderr(&run);
            assert_eq!(code, 2, "{message}");
            message
        };
        let message = with(&["--out", &out, "--memory-limit", "100KB"]);
        assert!(message.contains("but --memory-limit is 97.7 KiB") && !Path::new(&out).exists(), "{message}");
        let message = with(&["--out", &taken]);
        assert!(
            message.contains(&format!("--out {taken} is a file")) && message.contains("--out DIR"),
            "{message}"
        );
        let message = with(&["--out", &folder.path("read")]);
        assert!(message.contains(why), "{message}");
    }
    // With missing data no folder is created.
    let none = folder.path("none");
    let (code, message) = exit_code_and_stderr(&["train", "--out", &out, "--data", &none]);
    assert!(code == 2 && message.contains("no such file") && !Path::new(&out).exists(), "{message}");
}

#[test]
fn skipped_data_folder_is_named() {
    let folder = Folder::new("left-out");
    let data = folder.path("data");
    fs::create_dir_all(format!("{data}/model")).unwrap();
    fs::write(format!("{data}/text"), "The quick brown fox. ".repeat(100)).unwrap();
    fs::write(format!("{data}/model/text"), "A dog. ".repeat(100)).unwrap();
    let train = ["train", "--data", &data, "--out", &data, "--batch", "2", "--seq", "8", "--steps", "1"];
    let output = shardgrad(&train);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains(&format!("{data}/model")) && printed.contains("which the run writes"),
        "{printed}"
    );
}
