//! How runs of `train` end: a refused run leaves an earlier run unchanged, and a started run saves its model, whatever ends it.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) const SMALL: [&str; 6] = ["--batch", "4", "--seq", "16", "--mesh", "dp=2"];

pub(crate) fn text(folder: &Folder, repeats: usize) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(repeats))
}

/// Returns every file below a folder, with its contents.
pub(crate) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.flat_map(|path| match path.is_dir() {
        true => files(&path),
        false => BTreeMap::from([(path.display().to_string(), fs::read(&path).unwrap())]),
    });
    found.collect()
}

/// Starts `train`.
pub(crate) fn spawned(args: &[&str], stdout: Stdio, stderr: Stdio) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    command.arg("train").args(SMALL).args(args).stdout(stdout).stderr(stderr).spawn().unwrap()
}

/// Waits until a file contains a text.
pub(crate) fn wait_for(path: &Path, text: &str) {
    let began = Instant::now();
    while !fs::read_to_string(path).unwrap_or_default().contains(text) {
        assert!(began.elapsed() < Duration::from_secs(60), "{} never held {text}", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a file exists.
pub(crate) fn wait_for_file(path: &Path) {
    let began = Instant::now();
    while !path.is_file() {
        assert!(began.elapsed() < Duration::from_secs(60), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for a run; returns its exit code and stderr.
pub(crate) fn end_of(mut child: Child) -> (Option<i32>, String) {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("the run does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Sends a signal.
pub(crate) fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn refused_run_leaves_an_earlier_run_unchanged() {
    let folder = Folder::new("earlier");
    let (data, out) = (text(&folder, 200), folder.path("out"));
    let train = |more: &[&str]| {
        let all = [&["train", "--data", &data, "--out", &out, "--steps", "2"], &SMALL[..4], more].concat();
        exit_code_and_stderr(&all)
    };
    let (code, message) = train(&["--mesh", "tp=2"]);
    assert_eq!(code, 0, "{message}");
    let earlier = files(Path::new(&out));
    let (metrics, beyond) = (format!("{out}/metrics.jsonl"), folder.path("no/where"));
    let odd = format!("{out}/../out/metrics.jsonl");
    let plan = folder.file("rows.plan", "batch dp@0\ncompute * dp~\n");
    for (more, parts) in [
        (&["--mesh", "tp=2", "--plan", &plan][..], &["does not use the mesh axis tp=2"][..]),
        (&["--trace", &metrics], &["would replace a file of", "--trace FILE"]),
        (&["--trace", &odd], &["would replace a file of"]),
        (&["--trace", &data], &["would replace a file of"]),
        (&["--trace", "/dev/null"], &["/dev/null: it is a folder, a pipe or a device"]),
        (&["--trace", &beyond], &["No such file", "--trace FILE"]),
        (&["--model", &out], &["config.json", &format!("did you mean `{out}/model`?")]),
    ] {
        let (code, message) = train(more);
        assert!(code == 2 && parts.iter().all(|part| message.contains(part)), "{more:?}: {message}");
    }
    let other = File::options().write(true).open(format!("{out}/.lock")).unwrap();
    other.lock().unwrap();
    let (code, message) = train(&[]);
    assert!(
        code == 2 && message.contains("another run is writing to") && message.contains("--out DIR"),
        "{message}"
    );
    assert!(files(Path::new(&out)) == earlier, "nothing has changed");
    drop(other);
    // Training in place keeps the sidecar files of the model.
    let model = format!("{out}/model");
    let kept = ["tokenizer_config.json", "special_tokens_map.json"]
        .map(|name| folder.file(&format!("out/model/{name}"), name));
    let (code, message) = train(&["--model", &model]);
    assert_eq!(code, 0, "{message}");
    assert!(kept.iter().all(|path| path.ends_with(&fs::read_to_string(path).unwrap()) && !path.is_empty()));
    assert!(kept.iter().all(|path| fs::metadata(path).unwrap().len() > 0));
    // A file in the place of the model folder is refused before the first step.
    fs::remove_dir_all(&model).unwrap();
    fs::remove_file(&metrics).unwrap();
    fs::write(&model, "a file").unwrap();
    let (code, message) = train(&[]);
    assert!(
        code == 2 && message.contains("model: it is not a folder") && message.contains("--out DIR"),
        "{message}"
    );
    assert!(!Path::new(&metrics).exists());
}

#[test]
fn run_does_not_read_its_own_outputs() {
    let folder = Folder::new("inside");
    fs::create_dir_all(folder.path("texts")).unwrap();
    folder.file("texts/a.txt", "The quick brown fox jumps over the lazy dog. ".repeat(50));
    let (texts, out) = (folder.path("texts"), folder.path("texts/run"));
    let train = |read: [&str; 2]| {
        exit_code_and_stderr(&[&["train", "--out", &out, "--steps", "2"], &read[..], &SMALL].concat())
    };
    let losses = || -> Vec<String> {
        let (code, message) = train(["--data", &texts]);
        assert_eq!(code, 0, "{message}");
        let metrics = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
        metrics.lines().map(|line| line.split(',').nth(1).unwrap().to_string()).collect()
    };
    // The second run reads the same data, although the folder now contains outputs.
    let first = losses();
    assert!(first.len() == 2 && first[0].starts_with("\"loss\":"), "{first:?}");
    assert_eq!(losses(), first);
    let before = files(Path::new(&out));
    for (option, name) in [
        ("--data", "metrics.jsonl"),
        ("--data", "../run/loss.svg"),
        ("--data", "model/config.json"),
        ("--data", "model"),
        ("--tokens", "model/model.safetensors"),
    ] {
        let (code, message) = train([option, &format!("{out}/{name}")]);
        let parts = ["the run writes this file or folder and cannot read it", "--out DIR", name];
        assert!(code == 2 && parts.iter().all(|part| message.contains(part)), "{option} {name}: {message}");
    }
    assert!(files(Path::new(&out)) == before, "nothing has changed");
}

#[test]
fn run_continues_when_stdout_is_closed() {
    let folder = Folder::new("outlives");
    let data = text(&folder, 50);
    for (name, stdout, stderr) in
        [("gone", Stdio::piped(), Stdio::piped()), ("full", full(), Stdio::piped()), ("both", full(), full())]
    {
        let out = folder.path(name);
        let args = ["--data", &data, "--out", &out, "--steps", "3", "--json"];
        let mut child = spawned(&args, stdout, stderr);
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}: {message}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file(), "{name}");
        assert_eq!(
            message.matches("cannot write to stdout").count(),
            usize::from(name == "full"),
            "{message}"
        );
    }
    let refused = spawned(&["--data", "/no/such/file"], Stdio::null(), full()).wait().unwrap();
    assert_eq!(refused.code(), Some(2), "a full stderr is not a panic");
}

#[test]
fn paused_reader_delays_neither_steps_nor_save() {
    let folder = Folder::new("paused");
    let (data, out, fifo) = (text(&folder, 50), folder.path("out"), folder.path("fifo"));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut pipe = File::options().read(true).write(true).open(&fifo).unwrap();
    // Fill the pipe buffer of Linux, so that further writes block.
    pipe.write_all(&[b'.'; 1 << 16]).unwrap();
    let stdout = File::options().write(true).open(&fifo).unwrap();
    let args = ["--data", &data, "--out", &out, "--steps", "20", "--json", "--timeout", "1"];
    let mut child = spawned(&args, stdout.into(), Stdio::piped());
    wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":20,");
    wait_for_file(&Path::new(&out).join("model/model.safetensors"));
    assert!(child.try_wait().unwrap().is_none(), "it still has lines to print");
    let mut read = BufReader::new(pipe);
    read.read_exact(&mut [0; 1 << 16]).unwrap();
    let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
    for step in metrics.lines() {
        let mut line = String::new();
        read.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), step);
    }
    let (code, message) = end_of(child);
    assert_eq!((code, metrics.lines().count()), (Some(0), 20), "{message}");
}

#[test]
fn unreadable_data_after_good_steps_ends_the_run_with_a_saved_model() {
    let folder = Folder::new("unread");
    // Rows of 16 tokens, 4 per step: token 150 is in step 3; token 970 is in the validation split.
    for (bad, mesh, steps, saved) in
        [(150, "dp=1", 5, 2), (150, "tp=2", 5, 2), (970, "dp=2", 2, 2), (970, "pp=2", 2, 2)]
    {
        let tokens: Vec<u8> =
            (0..1000u16).flat_map(|i| if i == bad { 300 } else { i % 251 }.to_le_bytes()).collect();
        let (data, out) = (folder.file("ids.bin", tokens), folder.path(&format!("{bad}{mesh}")));
        let steps = steps.to_string();
        let given = ["train", "--data", &data, "--out", &out, "--no-shuffle", "--steps", &steps];
        let (code, message) = exit_code_and_stderr(&[&given[..], &SMALL[..4], &["--mesh", mesh]].concat());
        assert_eq!(code, 1, "{message}");
        assert!(message.contains(&format!("token {bad} is 300, outside the vocabulary 0..256")), "{message}");
        assert!(message.contains(&format!("the model after step {saved}, in {out}/model")), "{message}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
        let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), saved, "{mesh}");
        assert!(Path::new(&out).join("loss.svg").is_file());
    }
}

#[test]
fn shrunk_data_file_ends_the_run_with_a_saved_model() {
    let folder = Folder::new("shrinks");
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let data =
            folder.file("ids.bin", (0..20_000u16).flat_map(|i| (i % 251).to_le_bytes()).collect::<Vec<_>>());
        let out = folder.path(mesh);
        let args = ["--data", &data, "--out", &out, "--no-shuffle", "--steps", "5000", "--mesh", mesh];
        let given = [&["train"], &SMALL[..4], &args].concat();
        let mut run = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        let child = run.args(given).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let metrics = Path::new(&out).join("metrics.jsonl");
        wait_for(&metrics, "\"step\":3,");
        File::options().write(true).open(&data).unwrap().set_len(40).unwrap();
        let (code, message) = end_of(child);
        let steps = fs::read_to_string(metrics).unwrap().lines().count();
        assert_eq!(code, Some(1), "{mesh}: {message}");
        assert!(
            message.contains(&format!("the model after step {steps}, in {out}/model")),
            "{mesh}: {message}"
        );
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
    }
}

#[test]
fn non_finite_weights_leave_an_earlier_model_unchanged() {
    let folder = Folder::new("finite");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    let model = Path::new(&out).join("model");
    let train = |more: &[&str]| {
        exit_code_and_stderr(&[&["train", "--data", &data, "--out", &out], &SMALL[..4], more].concat())
    };
    let huge = |mesh, steps| train(&["--mesh", mesh, "--lr", "1e39", "--warmup", "0", "--steps", steps]);
    let (code, message) = huge("dp=2", "1");
    assert!(code == 1 && !model.exists() && !message.contains("kept"), "{message}");
    assert_eq!(train(&["--steps", "2"]).0, 0);
    let earlier = files(&model);
    for (mesh, steps) in [("dp=1", "1"), ("tp=2", "1"), ("pp=2", "1"), ("dp=2", "4")] {
        let (code, message) = huge(mesh, steps);
        assert_eq!(code, 1, "{mesh}: {message}");
        let parts = ["parameters are not finite, first `", "; the model is not saved", "model is unchanged"];
        assert!(parts.iter().all(|part| message.contains(part)), "{mesh}: {message}");
        assert!(files(&model) == earlier, "{mesh}: {message}");
    }
    // Weights of 1e5 overflow in f16 and are saved in f32 instead.
    for mesh in ["dp=1", "dp=2"] {
        let large = ["--mesh", mesh, "--lr", "1e5", "--warmup", "0", "--steps", "1", "--save-dtype", "f16"];
        let (code, message) = train(&large);
        let parts =
            ["overflow f16, beginning with `", "the weights are saved in f32", "the model after step 1"];
        assert!(code == 1 && parts.iter().all(|part| message.contains(part)), "{mesh}: {message}");
        assert!(fs::read_to_string(model.join("config.json")).unwrap().contains("float32"));
        assert!(files(&model) != earlier);
    }
    // 0/0 in the AdamW update would be NaN.
    let (code, message) = train(&["--eps", "1e-50"]);
    assert!(code == 2 && message.contains("is 0 in f32") && message.contains("use --eps"), "{message}");
    let (code, message) = train(&["--eps", "1e300"]);
    assert!(code == 2 && message.contains("is inf in f32") && message.contains("or less"), "{message}");
    assert_eq!(train(&["--eps", "1e-50", "--dtype", "f64", "--steps", "1"]).0, 0);
}

#[test]
fn failed_save_fails_the_run_but_plots_its_steps() {
    let folder = Folder::new("unsaved");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    // An obstacle that exists at the start is reported at the start.
    fs::create_dir(&out).unwrap();
    std::os::unix::fs::symlink(folder.path("nowhere"), format!("{out}/model")).unwrap();
    let given = ["--data", &data, "--out", &out, "--steps", "5000"];
    let (code, message) = exit_code_and_stderr(&[&["train"], &given[..], &SMALL[..]].concat());
    assert!(code == 2 && message.contains("it is a broken link"), "{message}");
    fs::remove_file(format!("{out}/model")).unwrap();
    let child = spawned(&given, Stdio::null(), Stdio::piped());
    wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
    fs::write(format!("{out}/model"), "a file").unwrap();
    signal(&child, "-TERM");
    let (code, message) = end_of(child);
    assert!(
        code == Some(1) && message.contains("cannot make the folder") && !message.contains("saved "),
        "{message}"
    );
    assert!(fs::read_to_string(format!("{out}/loss.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn model_folder_holds_its_sidecar_files_only() {
    let folder = Folder::new("companions");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    let train = |more: &[&str]| {
        exit_code_and_stderr(&[&["train", "--data", &data, "--steps", "1"], &SMALL[..], more].concat())
    };
    assert_eq!(train(&["--out", &folder.path("a")]).0, 0);
    let from = folder.path("a/model");
    let going = ["added_tokens.json", "generation_config.json", "chat_template.jinja"];
    going.iter().for_each(|name| drop(folder.file(&format!("a/model/{name}"), name)));
    assert_eq!(train(&["--model", &from, "--out", &out]).0, 0);
    let here = |name: &str| fs::read_to_string(format!("{out}/{name}")).ok();
    assert!(going.iter().all(|name| here(&format!("model/{name}")).as_deref() == Some(*name)));
    folder.file("out/model/tokenizer.json", "{}");
    folder.file("out/model/README.md", "mine");
    folder.file("out/schedule.txt", "of an earlier run");
    assert_eq!(train(&["--out", &out]).0, 0);
    assert!(going.iter().all(|name| here(&format!("model/{name}")).is_none()));
    assert!(here("model/tokenizer.json").is_none() && here("schedule.txt").is_none());
    assert_eq!(here("model/README.md").as_deref(), Some("mine"));
    // A link that a save would not replace, and a sidecar file outside the folder, are refused at the start.
    std::os::unix::fs::symlink("README.md", format!("{out}/model/vocab.txt")).unwrap();
    let (code, message) = train(&["--model", &from, "--out", &out]);
    assert!(
        code == 2 && message.contains("vocab.txt: it is a symlink, and saving does not replace it"),
        "{message}"
    );
    std::os::unix::fs::symlink(&data, format!("{from}/special_tokens_map.json")).unwrap();
    let (code, message) = train(&["--model", &from, "--out", &folder.path("other")]);
    assert!(
        code == 2 && message.contains("special_tokens_map.json: is a symlink out of its folder"),
        "{message}"
    );
}

#[test]
fn suggested_generate_command_works() {
    let folder = Folder::new("offered");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    for dtype in ["f32", "f64"] {
        let output = shardgrad(
            &[&["train", "--data", &data, "--out", &out, "--steps", "1", "--dtype", dtype], &SMALL[..]]
                .concat(),
        );
        let message = String::from_utf8(output.stdout).unwrap();
        let command = message.lines().find_map(|line| line.split_once(" -- ")).unwrap().1;
        let args = command.replace("\"fn \"", "fn");
        let args: Vec<&str> = args.split_whitespace().chain(["--tokens", "2"]).collect();
        let output = shardgrad(&args);
        assert!(output.status.success() && args[0] == "generate", "{args:?}: {output:?}");
    }
    // With 90 tokens the model cannot encode bytes, so no generate command is suggested.
    let ids = folder.file("ids.bin", (0..1000u16).flat_map(|i| (i % 90).to_le_bytes()).collect::<Vec<_>>());
    let dir = folder.path("small");
    World::run(Mesh::single(), |rank| {
        let config = Gpt2Config::new(90, 16, 8, 1, 2);
        Model::new(rank, Gpt2::new(&config), &Plan::new(), 1)?.save(Path::new(&dir))
    })
    .unwrap();
    let given = ["train", "--data", &ids, "--model", &dir, "--out", &out, "--steps", "1"];
    let output = shardgrad(&[&given[..], &SMALL[..]].concat());
    let message = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && message.contains("the model, in") && !message.contains("generate"),
        "{message}"
    );
}

#[test]
fn logits_are_not_written_over_inputs() {
    let folder = Folder::new("targets");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    let output =
        shardgrad(&[&["train", "--data", &data, "--out", &out, "--steps", "1"], &SMALL[..]].concat());
    assert!(output.status.success(), "{output:?}");
    let model = format!("{out}/model");
    let weights = format!("{model}/model.safetensors");
    let before = (fs::read(&weights).unwrap(), fs::read(&data).unwrap());
    for target in [&weights, &data, "/dev/null", &folder.path("no/where")] {
        let (code, message) = exit_code_and_stderr(&[
            "eval", "--model", &model, "--data", &data, "--seq", "16", "--logits", target,
        ]);
        assert!(code == 2 && message.contains("use another file with --logits FILE"), "{message}");
    }
    assert!(before == (fs::read(&weights).unwrap(), fs::read(&data).unwrap()));
}
