//! `train --save-every` and `--resume`: a resumed run is bitwise equal to an uninterrupted one; checkpoints of another run are refused, and
//! unfinished ones skipped.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use serde_json::Value;
use shardgrad_testing::sample;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Options of all runs here but for the preset.
pub(crate) const SHORT: [&str; 10] =
    ["--batch", "4", "--seq", "16", "--lr-schedule", "constant", "--warmup", "2", "--eval-every", "2"];

/// Returns the arguments of a short training run with these options, on the smallest preset unless they name a model.
pub(crate) fn short_run<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let names_model = args.iter().any(|arg| ["--preset", "--model"].contains(arg));
    let preset: &[&str] = if names_model { &[] } else { &["--preset", "nano"] };
    [&["train"], &SHORT[..], preset, args].concat()
}

pub(crate) fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(60))
}

/// Runs `train`, which must succeed.
pub(crate) fn train(args: &[&str]) {
    let (code, message) = exit_code_and_stderr(&short_run(args));
    assert_eq!(code, 0, "{args:?}: {message}");
}

/// Runs `train`, which must be refused; returns stderr.
pub(crate) fn refused(args: &[&str]) -> String {
    let (code, message) = exit_code_and_stderr(&short_run(args));
    assert_eq!(code, 2, "{args:?}: {message}");
    message
}

/// Returns the files of a folder, with their contents.
pub(crate) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let entries = entries.map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// Returns the metrics of a run without times.
pub(crate) fn record(out: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let entry = |line: &str| {
        let mut entry: Value = serde_json::from_str(line).unwrap();
        ["tokens_per_s", "seconds"]
            .iter()
            .for_each(|name| drop(entry.as_object_mut().unwrap().remove(*name)));
        entry
    };
    lines.lines().map(entry).collect()
}

/// Returns the names of the checkpoints of a folder, unfinished ones included.
pub(crate) fn checkpoints(out: &Path) -> Vec<String> {
    let names = fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("checkpoint-")).collect();
    names.sort();
    names
}

/// Returns the run state of a checkpoint without the `steps` option.
fn state(dir: &Path) -> Value {
    let mut state: Value =
        serde_json::from_str(&fs::read_to_string(dir.join("trainer_state.json")).unwrap()).unwrap();
    state["notes"].as_object_mut().unwrap().remove("steps");
    state
}

#[test]
fn resumed_run_is_bitwise_equal_to_an_uninterrupted_run() {
    let folder = Folder::new("resumed");
    let data = text(&folder);
    for (name, more) in [
        ("dp", &["--mesh", "dp=2", "--no-shuffle"][..]),
        ("tp", &["--mesh", "tp=2", "--microbatches", "2", "--dropout", "0.2"]),
        ("f16", &["--mesh", "dp=1", "--dtype", "f16"]),
        ("bf16", &["--mesh", "pp=2", "--dtype", "bf16", "--preset", "llama-nano"]),
    ] {
        let (whole, parts) = (folder.0.join(format!("{name}-whole")), folder.0.join(format!("{name}-parts")));
        let run = |out: &Path, steps: &str, last: &[&str]| {
            let out = out.to_str().unwrap();
            train(
                &[&["--data", &data, "--out", out, "--save-every", "2", "--steps", steps], more, last]
                    .concat(),
            );
        };
        run(&whole, "8", &[]);
        run(&parts, "4", &[]);
        assert_eq!(checkpoints(&parts), ["checkpoint-2", "checkpoint-4"]);
        run(&parts, "8", &["--resume"]);
        assert_eq!(checkpoints(&parts), ["checkpoint-6", "checkpoint-8"], "{name}");
        assert_eq!(checkpoints(&whole), checkpoints(&parts));
        assert_eq!(record(&parts), record(&whole), "{name}");
        for dir in ["model", "checkpoint-6", "checkpoint-8"] {
            let [mut left, mut right] = [&whole, &parts].map(|out| files(&out.join(dir)));
            if dir != "model" {
                assert_eq!(state(&whole.join(dir)), state(&parts.join(dir)), "{name}");
                for files in [&mut left, &mut right] {
                    files.remove("trainer_state.json");
                }
                assert!(left.contains_key("optimizer.safetensors"));
            }
            assert!(left == right, "{name}: {dir}");
        }
        let newest = parts.join("checkpoint-8");
        let output =
            shardgrad(&["eval", "--model", newest.to_str().unwrap(), "--data", &data, "--seq", "16"]);
        assert!(output.status.success(), "a checkpoint is a model folder");
        let drawn = fs::read_to_string(parts.join("loss.svg")).unwrap();
        assert_eq!(
            drawn.len(),
            fs::read_to_string(whole.join("loss.svg")).unwrap().len(),
            "all steps are drawn"
        );
    }
}

#[test]
fn resume_on_another_mesh_has_the_bits_of_one_rank_and_is_reported() {
    let folder = Folder::new("resumed-mesh");
    let data = text(&folder);
    for (preset, first, meshes) in [
        // Four heads are sharded unevenly over three ranks.
        ("nano", "dp=2,tp=2", &["dp=1", "pp=2", "tp=3,pp=2"][..]),
        ("llama-nano", "pp=2,cp=2", &["dp=2,cp=3"]),
        ("mixtral-nano", "tp=2,ep=2", &["ep=4"]),
    ] {
        let out = |name: &str| folder.path(&format!("{preset}-{name}"));
        let canonical = ["--deterministic", "mesh", "--sum-leaves", "12", "--state-hash", "1"];
        let common = ["--data", &data, "--preset", preset, "--save-every", "2"];
        let common = [&common[..], &canonical].concat();
        train(&[&common[..], &["--out", &out("whole"), "--steps", "4", "--mesh", "dp=1"]].concat());
        let whole = record(Path::new(&out("whole")));
        assert!(whole.len() == 4 && whole.iter().all(|step| step["state_hash"].is_string()), "{whole:?}");
        train(&[&common[..], &["--out", &out("first"), "--steps", "2", "--mesh", first]].concat());
        let from = out("first/checkpoint-2");
        for mesh in sample(0, meshes) {
            let to = out(mesh);
            let args =
                [&common[..], &["--out", &to, "--steps", "4", "--mesh", mesh, "--resume", &from]].concat();
            let (code, message) = exit_code_and_stderr(&short_run(&args));
            assert!(code == 0 && message.contains("resuming with a changed option: --mesh "), "{message}");
            let resumed = record(Path::new(&to));
            assert_eq!(resumed[2..], whole[2..], "{preset} on {first}, then on {mesh}");
            assert_eq!(checkpoints(Path::new(&to)), ["checkpoint-4"]);
        }
    }
}

#[test]
fn resume_of_another_run_is_refused_with_each_difference() {
    let folder = Folder::new("resumed-other");
    let (data, out) = (text(&folder), folder.path("out"));
    let other = folder.file("other", "the quick brown fox jumps over the lazy dog. ".repeat(60));
    let common = ["--out", &out, "--mesh", "dp=1", "--save-every", "2"];
    let run = |data: &str, more: &[&str]| refused(&[&["--data", data], &common[..], more].concat());
    for none in [&out, &folder.path("nowhere"), &folder.path("out/checkpoint-4")] {
        let message = run(&data, &["--resume", none]);
        assert!(
            message.contains("no checkpoint in") && message.contains("starts from scratch if"),
            "{message}"
        );
    }
    train(&[&["--data", &data, "--steps", "4"], &common[..]].concat());
    let before = files(&Path::new(&out).join("checkpoint-4"));
    for (data, more, parts) in [
        (&data, &["--seed", "7", "--batch", "8"][..], &["--seed 7 (checkpoint: 0)", "--batch 8"][..]),
        (&data, &["--seq", "8"], &["--seq 8 (checkpoint: 16)"]),
        (&data, &["--no-shuffle"], &["--no-shuffle true (checkpoint: false)"]),
        (&data, &["--param-dtype", "f64"], &["--param-dtype f64"]),
        (&data, &["--preset", "llama-nano"], &["config.json "]),
        (&other, &[], &["the data differs from that of the checkpoint"]),
    ] {
        // An option may be given once, so it replaces that of SHORT.
        let mut args = vec!["train", "--data", data];
        args.extend(SHORT);
        if !more.contains(&"--preset") {
            args.extend(["--preset", "nano"]);
        }
        for pair in more.chunks(2).filter(|pair| ["--batch", "--seq"].contains(&pair[0])) {
            let at = args.iter().position(|arg| *arg == pair[0]).unwrap();
            args[at + 1] = pair[1];
        }
        let rest = more.chunks(2).filter(|pair| !["--batch", "--seq"].contains(&pair[0])).flatten().copied();
        args.extend(common.iter().copied().chain(rest).chain(["--resume"]));
        let (code, message) = exit_code_and_stderr(&args);
        assert_eq!(code, 2, "{more:?}: {message}");
        parts
            .iter()
            .for_each(|part| assert!(message.contains(part), "{more:?} should mention `{part}`: {message}"));
    }
    // A new run does not mix its checkpoints with those of another.
    let message = run(&data, &["--steps", "2"]);
    assert!(message.contains("checkpoint-4 is of another run") && message.contains("--resume"), "{message}");
    let message = run(&data, &["--resume", &format!("{out}/checkpoint-2")]);
    assert!(message.contains("checkpoint-4 is of later steps"), "{message}");
    let message = refused(&["--data", &data, "--out", &out, "--keep", "3"]);
    assert!(message.contains("--keep has no effect without --save-every"), "{message}");
    assert_eq!(files(&Path::new(&out).join("checkpoint-4")), before);
}

#[test]
fn unfinished_checkpoints_are_skipped() {
    let folder = Folder::new("resumed-unfinished");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2", "--keep", "3"];
    train(&[&common[..], &["--steps", "4"]].concat());
    let newest = Path::new(&out).join("checkpoint-4");
    let whole = files(&newest);
    // As left by a killed save and an interrupted copy.
    fs::remove_file(newest.join("trainer_state.json")).unwrap();
    let half = Path::new(&out).join("checkpoint-6.tmp-4294967294");
    fs::create_dir(&half).unwrap();
    fs::write(half.join("model.safetensors"), "half").unwrap();
    fs::write(newest.join("model.safetensors"), "half").unwrap();
    fs::write(newest.join("optimizer.safetensors"), "half").unwrap();
    // --keep is taken from the resumed run.
    let last = [&common[..8], &["--steps", "6", "--resume"]].concat();
    let (code, message) = exit_code_and_stderr(&short_run(&last));
    assert_eq!(code, 0, "{message}");
    for path in [&half, &newest] {
        assert!(message.contains(&format!("skipping {}", path.display())), "{message}");
    }
    assert!(
        message.contains("metrics.jsonl: dropped 2 lines of metrics: later than step 2, or damaged"),
        "{message}"
    );
    assert_eq!(checkpoints(Path::new(&out)), ["checkpoint-2", "checkpoint-4", "checkpoint-6"]);
    let weights = |files: &BTreeMap<String, Vec<u8>>| files["model.safetensors"].clone();
    assert!(weights(&files(&newest)) == weights(&whole), "the same step again");
    assert_eq!(record(Path::new(&out)).len(), 6);
}

#[test]
fn resume_command_can_be_repeated_until_done() {
    let folder = Folder::new("resumed-again");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2", "--resume"];
    let given = |more: &[&str]| exit_code_and_stderr(&short_run(&[&common[..], more].concat()));
    let (code, message) = given(&["--steps", "4"]);
    assert!(
        code == 0 && message.contains(&format!("no checkpoint in {out} yet: starting from scratch")),
        "{message}"
    );
    assert!(!message.contains("resuming after"), "{message}");
    let left = || (files(&Path::new(&out).join("checkpoint-4")), files(&Path::new(&out).join("model")));
    let (before, lines) = (left(), record(Path::new(&out)));
    // Repeatedly, and with fewer steps than done.
    for steps in ["4", "4", "3"] {
        let (code, message) = given(&["--steps", steps]);
        let over = format!("nothing left to do: {out}/checkpoint-4 is of step 4, and --steps is {steps}");
        assert!(code == 0 && message.contains(&over), "{message}");
        let printed = shardgrad(&short_run(&[&["--steps", steps, "--json"], &common[..]].concat()));
        assert!(printed.status.success() && printed.stdout.is_empty());
        assert!(left() == before && record(Path::new(&out)) == lines);
    }
    let (code, message) = given(&["--steps", "4", "--seed", "7"]);
    assert!(code == 2 && message.contains("belongs to another run"), "{message}");
    let (code, message) = given(&["--steps", "6"]);
    assert!(code == 0 && record(Path::new(&out)).len() == 6, "{message}");
    // A folder named like a checkpoint that is not one is refused.
    let other = folder.0.join("other/checkpoint-2");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("config.json"), "of another program").unwrap();
    let message = refused(&["--data", &data, "--out", &folder.path("other"), "--resume"]);
    assert!(message.contains("is named like a checkpoint but is not one"), "{message}");
}

#[test]
fn finished_run_restores_a_missing_model() {
    let folder = Folder::new("resumed-done");
    let (data, out) = (text(&folder), folder.path("out"));
    let (model, svg) = (Path::new(&out).join("model"), Path::new(&out).join("loss.svg"));
    let common = ["--data", &data, "--mesh", "dp=2", "--save-every", "2", "--keep", "9"];
    let given = |out: &str, more: &[&str]| {
        let (code, message) =
            exit_code_and_stderr(&short_run(&[&common[..], &["--out", out, "--resume"], more].concat()));
        assert_eq!(code, 0, "{message}");
        message
    };
    given(&out, &["--steps", "4"]);
    let (expected, lines) = (files(&model), record(Path::new(&out)));
    let writes = |step: usize| {
        format!(
            "nothing left to do except writing the model: {out}/checkpoint-4 is of step 4, and --steps is {step}"
        )
    };
    // As left by a full disk, a kill or a mistake.
    for lacking in ["", "model.safetensors", "config.json"] {
        match lacking {
            "" => fs::remove_dir_all(&model).unwrap(),
            name => fs::remove_file(model.join(name)).unwrap(),
        }
        fs::remove_file(&svg).unwrap();
        let message = given(&out, &["--steps", "4"]);
        assert!(message.contains(&writes(4)), "{lacking}: {message}");
        assert!(files(&model) == expected && svg.exists() && record(Path::new(&out)) == lines, "{lacking}");
        let message = given(&out, &["--steps", "4"]);
        assert!(message.contains("nothing left to do: "), "{message}");
    }
    // In another folder, and with a model of other steps beside an intermediate checkpoint.
    let named = format!("{out}/checkpoint-4");
    let other = folder.path("other");
    let (code, message) = exit_code_and_stderr(&short_run(
        &[&common[..], &["--out", &other, "--steps", "3", "--resume", &named]].concat(),
    ));
    assert!(code == 0 && message.contains(&writes(3)), "{message}");
    assert!(files(&Path::new(&other).join("model")) == expected);
    given(&out, &["--steps", "6"]);
    assert!(files(&model) != expected);
    for name in ["checkpoint-4", "checkpoint-6"] {
        fs::remove_dir_all(Path::new(&out).join(name)).unwrap();
    }
    given(&out, &["--steps", "6"]);
    fs::remove_dir_all(Path::new(&out).join("checkpoint-6")).unwrap();
    assert!(given(&out, &["--steps", "4"]).contains(&writes(4)));
    assert!(files(&model) == expected);
}

#[test]
fn checkpoint_under_a_temporary_name_or_symlink_is_found() {
    let folder = Folder::new("resumed-names");
    let (data, whole) = (text(&folder), folder.path("whole"));
    let common = ["--data", &data, "--mesh", "dp=1", "--save-every", "2", "--lr", "0.01"];
    train(&[&common[..], &["--out", &whole, "--steps", "6"]].concat());
    let expected = files(&Path::new(&whole).join("checkpoint-6"));
    for way in ["killed", "killed-named", "link", "link-named"] {
        let out = folder.path(way);
        let place = |name: &str| Path::new(&out).join(name);
        train(&[&common[..], &["--out", &out, "--steps", "4"]].concat());
        let named = place("checkpoint-4").display().to_string();
        let elsewhere = folder.0.join(format!("{way}-elsewhere"));
        if way.starts_with("killed") {
            // As left by a replacing save that was killed between two renames; no process has this id.
            fs::rename(place("checkpoint-2"), place("checkpoint-4.old.tmp-4294967294")).unwrap();
            fs::rename(place("checkpoint-4"), place("checkpoint-4.tmp-4294967294")).unwrap();
        } else {
            fs::rename(place("checkpoint-4"), &elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, place("checkpoint-4")).unwrap();
        }
        let last: &[&str] = if way.ends_with("named") { &["--resume", &named] } else { &["--resume"] };
        let args = [&common[..], &["--out", &out, "--steps", "6", "--keep", "1"], last].concat();
        let (code, message) = exit_code_and_stderr(&short_run(&args));
        assert_eq!(code, 0, "{way}: {message}");
        let completed = message
            .contains("checkpoint-4 was complete under a temporary name after a killed save; restored");
        assert_eq!(completed, way.starts_with("killed"), "{message}");
        // Old checkpoints are deleted; the target of a link stays.
        assert_eq!(checkpoints(Path::new(&out)), ["checkpoint-6"], "{way}");
        assert_eq!(elsewhere.join("trainer_state.json").exists(), way.starts_with("link"));
        let found = files(&place("checkpoint-6"));
        assert!(
            ["model.safetensors", "optimizer.safetensors"].iter().all(|name| found[*name] == expected[*name])
        );
        assert_eq!(record(Path::new(&out)), record(Path::new(&whole)), "{way}");
    }
}

#[test]
fn resume_follows_a_metrics_symlink_and_reports_a_changed_dropout() {
    let folder = Folder::new("resumed-link");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2"];
    train(&[&common[..], &["--steps", "2", "--dropout", "0.1"]].concat());
    let (link, there) = (Path::new(&out).join("metrics.jsonl"), folder.0.join("record"));
    fs::rename(&link, &there).unwrap();
    std::os::unix::fs::symlink(&there, &link).unwrap();
    let args = [&common[..], &["--steps", "4", "--dropout", "0.25", "--resume"]].concat();
    let (code, message) = exit_code_and_stderr(&short_run(&args));
    assert_eq!(code, 0, "{message}");
    for name in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        let expected = format!(
            "resuming with a changed option: config.json \"{name}\": 0.25 (checkpoint: \"{name}\": 0.1)\n"
        );
        assert!(message.contains(&expected), "{message}");
    }
    assert_eq!(fs::read_link(&link).unwrap(), there);
    assert!(record(Path::new(&out)).len() == 4 && fs::read_to_string(&there).unwrap().lines().count() == 4);
}

#[test]
fn interrupted_run_resumes_bitwise_equal() {
    let folder = Folder::new("resumed-signal");
    let data = text(&folder);
    let out = |name: &str| folder.path(name);
    let steps = |out: &str, more: &[&str]| -> Vec<String> {
        let all =
            [&["train"], &SHORT[..4], &["--data", &data, "--out", out, "--mesh", "dp=1"], more].concat();
        all.into_iter().map(String::from).collect()
    };
    // The learning rate decays over the whole run, not over a part of it.
    let more = ["--steps", "40", "--save-every", "5", "--eval-every", "0"];
    let whole: Vec<String> = steps(&out("whole"), &more);
    assert!(Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(&whole).output().unwrap().status.success());
    for signal in ["-INT", "-KILL"] {
        let to = out(signal);
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardgrad"))
            .args(steps(&to, &more))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while !Path::new(&to).join("checkpoint-10").is_dir() {
            assert!(began.elapsed() < Duration::from_secs(60), "no checkpoint came");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let code = child.wait().unwrap().code();
        assert!(code == Some(130) || code.is_none() || code == Some(0), "{code:?}");
        let output = shardgrad(
            &steps(&to, &[&more[..], &["--resume"]].concat()).iter().map(String::as_str).collect::<Vec<_>>(),
        );
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{message}");
        assert_eq!(record(Path::new(&to)), record(Path::new(&out("whole"))), "{signal}");
        for dir in ["model", "checkpoint-40"] {
            let [left, right] = [out("whole"), to.clone()].map(|out| files(&Path::new(&out).join(dir)));
            assert!(left == right, "{signal}: {dir}");
        }
    }
}
