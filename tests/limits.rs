//! What cannot fit the memory is refused before it begins, and what has nothing to save ends at a signal with a word.

use crate::cli::{Folder, shardgrad, told};
use crate::endings::is_ignored;
use shardgrad::nn::hf::TensorWriter;
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// A model folder that writes for ever.
fn model(folder: &Folder) -> String {
    let dir = folder.path("model");
    World::run(Mesh::single(), |rank| {
        let config = Gpt2Config::new(256, 64, 16, 1, 2);
        Model::new(rank, Gpt2::new(&config), &Gpt2::plan(&config), 0)?.save(Path::new(&dir))
    })
    .unwrap();
    dir
}

#[test]
fn what_cannot_fit_is_refused_before_it_begins() {
    let folder = Folder::new("memory");
    let (data, out) = (folder.file("text", "abc ".repeat(3000)), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--batch", "2", "--seq", "8", "--steps", "1"];
    let with = |more: &[&str]| told(&[&train[..], more].concat());
    // More than a terabyte in weights, gradients and averages, on any machine that runs tests; twice that on two ranks.
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let (code, said) = with(&["--preset", "llama-70b", "--mesh", mesh]);
        assert_eq!(code, 2, "{said}");
        assert_eq!(said.lines().next().unwrap().matches("TiB").count(), 1, "{said}");
        let asked = format!("training llama-70b on mesh({mesh}) needs about ");
        for part in [asked.as_str(), " left", "help       take a smaller model", "--memory-limit BYTES"] {
            assert!(said.contains(part), "no `{part}` in: {said}");
        }
        assert!(!Path::new(&out).exists(), "nothing is written");
    }
    let (code, said) = with(&["--mesh", "dp=2", "--memory-limit", "100KB"]);
    assert!(code == 2 && said.contains("and --memory-limit allows 97.7 KiB"), "{said}");
    let (code, said) = with(&["--mesh", "dp=2", "--memory-limit", "1GB"]);
    assert_eq!(code, 0, "{said}");
    let model = model(&folder);
    for command in [&["eval", "--data", &data][..], &["generate", "--prompt", "a"]] {
        let limited = [command, &["--model", &model, "--memory-limit", "1KB"]].concat();
        let (code, said) = told(&limited);
        assert!(code == 2 && said.contains("on a rank, and --memory-limit allows 1000 B"), "{said}");
        assert!(shardgrad(&[command, &["--model", &model]].concat()).status.success());
    }
}

/// A training under a limit of the address space, in MiB: its exit code, what it prints as an error, how many steps are in its record,
/// and whether it leaves a model.
fn train_within(folder: &Folder, mesh: &str, mib: usize, more: &str) -> (Option<i32>, String, usize, bool) {
    let (data, out) = (folder.file("text", "The quick brown fox. ".repeat(500)), folder.path("out"));
    let _ = fs::remove_dir_all(&out);
    let script = format!(
        "ulimit -v {} && exec \"$0\" train --data {data} --out {out} --mesh {mesh} --threads 1 --steps 4 --batch 16 {more}",
        mib << 10
    );
    let mut command = Command::new("bash");
    // Without arenas of their own the threads fail at limits that are the same in every run.
    command.env("MALLOC_ARENA_MAX", "1").args(["-c", &script, env!("CARGO_BIN_EXE_shardgrad")]);
    let output = command.output().unwrap();
    let steps = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap_or_default().lines().count();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said, steps, Path::new(&format!("{out}/model/model.safetensors")).exists())
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_the_system_refuses_is_an_error_and_the_model_is_saved() {
    let folder = Folder::new("refused");
    let (mut refused, mut after_steps) = (0, 0);
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        for mib in (70..=190).step_by(10) {
            // The limit of a rank takes the place of the check, so that the run begins.
            let (code, said, steps, is_saved) = train_within(&folder, mesh, mib, "--memory-limit 1GB");
            let told = format!("{mesh} within {mib} MiB: {code:?} after {steps} steps, {said}");
            if code == Some(0) {
                assert!(is_saved && steps == 4, "{told}");
                continue;
            }
            assert!(code == Some(1) && said.contains("out of memory: "), "{told}");
            refused += 1;
            after_steps += usize::from(steps > 0);
            assert!(is_saved == (steps > 0), "{told}");
        }
    }
    assert!(refused >= 8, "{refused} runs of 52 were refused memory, {after_steps} of them after a step");
}

#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_the_address_space_counts_before_the_run() {
    let folder = Folder::new("space");
    let (code, said, steps, _) = train_within(&folder, "dp=2", 100, "");
    assert!(code == Some(2) && steps == 0, "{said}");
    for part in
        ["training tiny on mesh(dp=2) needs about ", "address space of this process (`ulimit -v`) has "]
    {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn memory_and_folder_are_looked_at_before_the_data_are_read() {
    let folder = Folder::new("early");
    // Bytes that are no text, and a token that is none: whoever reads them says so.
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
            let (code, said) = told(&run);
            assert_eq!(code, 2, "{said}");
            said
        };
        let said = with(&["--out", &out, "--memory-limit", "100KB"]);
        assert!(said.contains("and --memory-limit allows 97.7 KiB") && !Path::new(&out).exists(), "{said}");
        let said = with(&["--out", &taken]);
        assert!(said.contains(&format!("--out {taken} is a file")) && said.contains("--out DIR"), "{said}");
        let said = with(&["--out", &folder.path("read")]);
        assert!(said.contains(why), "{said}");
    }
    // Of data that are not there nothing is made.
    let none = folder.path("none");
    let (code, said) = told(&["train", "--out", &out, "--data", &none]);
    assert!(code == 2 && said.contains("there is no such file") && !Path::new(&out).exists(), "{said}");
}

#[test]
fn a_signal_ends_what_has_nothing_to_save_with_a_word() {
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
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), said.as_str()),
            (Some(code), &*format!("generate: stopped by {name}\n"))
        );
    }
}

#[test]
fn a_folder_that_is_left_out_of_the_data_is_named() {
    let folder = Folder::new("left-out");
    let data = folder.path("data");
    fs::create_dir_all(format!("{data}/model")).unwrap();
    fs::write(format!("{data}/text"), "The quick brown fox. ".repeat(100)).unwrap();
    fs::write(format!("{data}/model/text"), "A dog. ".repeat(100)).unwrap();
    let train = ["train", "--data", &data, "--out", &data, "--batch", "2", "--seq", "8", "--steps", "1"];
    let output = shardgrad(&train);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains(&format!("{data}/model")) && printed.contains("which the run replaces"),
        "{printed}"
    );
}
