//! `train --save-every` and `--resume`: a run that goes on leaves what one that never stopped leaves, byte for byte; what is not of
//! the same run is refused, and what was not finished is passed over.

use crate::cli::{Folder, shardgrad, told};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What all runs here are told.
pub(crate) const SMALL: [&str; 10] =
    ["--batch", "4", "--seq", "16", "--lr-schedule", "constant", "--warmup", "2", "--eval-every", "2"];

pub(crate) fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(60))
}

/// Runs `train` to its end.
pub(crate) fn train(args: &[&str]) {
    let (code, said) = told(&[&["train"], &SMALL[..], args].concat());
    assert_eq!(code, 0, "{args:?}: {said}");
}

/// Runs `train` to an end of another kind.
pub(crate) fn refused(args: &[&str]) -> String {
    let (code, said) = told(&[&["train"], &SMALL[..], args].concat());
    assert_eq!(code, 2, "{args:?}: {said}");
    said
}

/// The files of a folder, with their bytes.
pub(crate) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let entries = entries.map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// What the record of a run says of its steps, but for times.
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

/// The names of the checkpoints of a folder, and of what is not finished.
pub(crate) fn checkpoints(out: &Path) -> Vec<String> {
    let names = fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("checkpoint-")).collect();
    names.sort();
    names
}

/// Without the times and the step count that were asked for, which are noted too.
fn state(dir: &Path) -> Value {
    let mut state: Value =
        serde_json::from_str(&fs::read_to_string(dir.join("trainer_state.json")).unwrap()).unwrap();
    state["notes"].as_object_mut().unwrap().remove("steps");
    state
}

#[test]
fn a_run_that_goes_on_leaves_what_one_that_never_stopped_leaves() {
    let folder = Folder::new("resumed");
    let data = text(&folder);
    for (name, more) in [
        ("one", &["--mesh", "dp=1", "--dropout", "0.1"][..]),
        ("dp", &["--mesh", "dp=2", "--no-shuffle"]),
        ("tp", &["--mesh", "tp=2", "--microbatches", "2", "--dropout", "0.2"]),
        ("pp", &["--mesh", "pp=2", "--dropout", "0.1"]),
        ("f16", &["--mesh", "dp=1", "--dtype", "f16"]),
        ("bf16", &["--mesh", "pp=2", "--dtype", "bf16", "--preset", "llama-tiny"]),
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
fn another_mesh_goes_on_to_rounding_and_is_told() {
    let folder = Folder::new("resumed-mesh");
    let data = text(&folder);
    let out = |name: &str| folder.path(name);
    let common = ["--data", &data, "--dtype", "f64", "--save-every", "3"];
    train(&[&common[..], &["--out", &out("whole"), "--steps", "6", "--mesh", "dp=1"]].concat());
    train(&[&common[..], &["--out", &out("first"), "--steps", "3", "--mesh", "dp=2,tp=2"]].concat());
    let from = out("first/checkpoint-3");
    // Four heads are not split over three ranks evenly, but they are split.
    for mesh in ["dp=1", "pp=2", "tp=3,pp=2"] {
        let to = out(mesh);
        let args = [&common[..], &["--out", &to, "--steps", "6", "--mesh", mesh, "--resume", &from]].concat();
        let (code, said) = told(&[&["train"], &SMALL[..], &args].concat());
        assert!(code == 0 && said.contains("resuming with a changed option: --mesh "), "{said}");
        let [expected, found] = ["whole", mesh].map(|name| record(Path::new(&out(name))));
        assert_eq!(found.len(), 6);
        for (a, b) in expected.iter().zip(&found) {
            let [a, b] = [a, b].map(|entry| entry["loss"].as_f64().unwrap());
            assert!(((a - b) / a).abs() < 1e-11, "{mesh}: {found:?}");
        }
        assert_eq!(checkpoints(Path::new(&to)), ["checkpoint-6"]);
    }
}

#[test]
fn what_is_not_the_same_run_is_refused_line_by_line() {
    let folder = Folder::new("resumed-other");
    let (data, out) = (text(&folder), folder.path("out"));
    let other = folder.file("other", "the quick brown fox jumps over the lazy dog. ".repeat(60));
    let common = ["--out", &out, "--mesh", "dp=1", "--save-every", "2"];
    let run = |data: &str, more: &[&str]| refused(&[&["--data", data], &common[..], more].concat());
    for none in [&out, &folder.path("nowhere"), &folder.path("out/checkpoint-4")] {
        let said = run(&data, &["--resume", none]);
        assert!(said.contains("there is no checkpoint in") && said.contains("begins anew where"), "{said}");
    }
    train(&[&["--data", &data, "--steps", "4"], &common[..]].concat());
    let before = files(&Path::new(&out).join("checkpoint-4"));
    for (data, more, parts) in [
        (&data, &["--seed", "7", "--batch", "8"][..], &["--seed 7 (checkpoint: 0)", "--batch 8"][..]),
        (&data, &["--seq", "8"], &["--seq 8 (checkpoint: 16)"]),
        (&data, &["--no-shuffle"], &["--no-shuffle true (checkpoint: false)"]),
        (&data, &["--param-dtype", "f64"], &["--param-dtype f64"]),
        (&data, &["--preset", "llama-tiny"], &["config.json "]),
        (&other, &[], &["the data are not those of the checkpoint"]),
    ] {
        // The later --batch counts.
        let mut args = vec!["train", "--data", data];
        args.extend(SMALL);
        for pair in more.chunks(2).filter(|pair| ["--batch", "--seq"].contains(&pair[0])) {
            let at = args.iter().position(|arg| *arg == pair[0]).unwrap();
            args[at + 1] = pair[1];
        }
        let rest = more.chunks(2).filter(|pair| !["--batch", "--seq"].contains(&pair[0])).flatten().copied();
        args.extend(common.iter().copied().chain(rest).chain(["--resume"]));
        let (code, said) = told(&args);
        assert_eq!(code, 2, "{more:?}: {said}");
        parts
            .iter()
            .for_each(|part| assert!(said.contains(part), "{more:?} should mention `{part}`: {said}"));
    }
    // Who begins anew does not mix runs, and says nothing is kept without being asked.
    let said = run(&data, &["--steps", "2"]);
    assert!(said.contains("checkpoint-4 is of another run") && said.contains("--resume"), "{said}");
    let said = run(&data, &["--resume", &format!("{out}/checkpoint-2")]);
    assert!(said.contains("checkpoint-4 is of later steps"), "{said}");
    let said = refused(&["--data", &data, "--out", &out, "--keep", "3"]);
    assert!(said.contains("--keep has no meaning without --save-every"), "{said}");
    assert_eq!(files(&Path::new(&out).join("checkpoint-4")), before);
}

#[test]
fn what_was_not_finished_is_passed_over() {
    let folder = Folder::new("resumed-unfinished");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2", "--keep", "3"];
    train(&[&common[..], &["--steps", "4"]].concat());
    let newest = Path::new(&out).join("checkpoint-4");
    let whole = files(&newest);
    // As a killed save, and a copy that broke off, leave them.
    fs::remove_file(newest.join("trainer_state.json")).unwrap();
    let half = Path::new(&out).join("checkpoint-6.tmp-4294967294");
    fs::create_dir(&half).unwrap();
    fs::write(half.join("model.safetensors"), "half").unwrap();
    fs::write(newest.join("model.safetensors"), "half").unwrap();
    fs::write(newest.join("optimizer.safetensors"), "half").unwrap();
    // How many stay is known without --keep.
    let last = [&common[..8], &["--steps", "6", "--resume"]].concat();
    let (code, said) = told(&[&["train"], &SMALL[..], &last].concat());
    assert_eq!(code, 0, "{said}");
    for path in [&half, &newest] {
        assert!(said.contains(&format!("passing over {}", path.display())), "{said}");
    }
    assert!(
        said.contains("metrics.jsonl: dropped 2 lines of metrics: later than step 2, or damaged"),
        "{said}"
    );
    assert_eq!(checkpoints(Path::new(&out)), ["checkpoint-2", "checkpoint-4", "checkpoint-6"]);
    let weights = |files: &BTreeMap<String, Vec<u8>>| files["model.safetensors"].clone();
    assert!(weights(&files(&newest)) == weights(&whole), "the same step again");
    assert_eq!(record(Path::new(&out)).len(), 6);
}

#[test]
fn one_command_is_given_again_until_the_run_is_done() {
    let folder = Folder::new("resumed-again");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2", "--resume"];
    let given = |more: &[&str]| told(&[&["train"], &SMALL[..], &common, more].concat());
    let (code, said) = given(&["--steps", "4"]);
    assert!(
        code == 0 && said.contains(&format!("there is no checkpoint in {out} yet: the run begins anew")),
        "{said}"
    );
    assert!(!said.contains("going on"), "{said}");
    let left = || (files(&Path::new(&out).join("checkpoint-4")), files(&Path::new(&out).join("model")));
    let (before, lines) = (left(), record(Path::new(&out)));
    // As often as somebody likes, and with fewer steps than were taken.
    for steps in ["4", "4", "3"] {
        let (code, said) = given(&["--steps", steps]);
        let over = format!("nothing is left to do: {out}/checkpoint-4 is of step 4, and --steps is {steps}");
        assert!(code == 0 && said.contains(&over), "{said}");
        let printed = shardgrad(&[&["train", "--steps", steps, "--json"], &SMALL[..], &common].concat());
        assert!(printed.status.success() && printed.stdout.is_empty());
        assert!(left() == before && record(Path::new(&out)) == lines);
    }
    let (code, said) = given(&["--steps", "4", "--seed", "7"]);
    assert!(code == 2 && said.contains("is of another run"), "{said}");
    let (code, said) = given(&["--steps", "6"]);
    assert!(code == 0 && record(Path::new(&out)).len() == 6, "{said}");
    // What has the name of a checkpoint and is none is in the way of a new run.
    let other = folder.0.join("other/checkpoint-2");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("config.json"), "of another program").unwrap();
    let said = refused(&["--data", &data, "--out", &folder.path("other"), "--resume"]);
    assert!(said.contains("has the name of a checkpoint and is none"), "{said}");
}

#[test]
fn a_run_whose_steps_are_done_leaves_its_model() {
    let folder = Folder::new("resumed-done");
    let (data, out) = (text(&folder), folder.path("out"));
    let (model, svg) = (Path::new(&out).join("model"), Path::new(&out).join("loss.svg"));
    let common = ["--data", &data, "--mesh", "dp=2", "--save-every", "2", "--keep", "9"];
    let given = |out: &str, more: &[&str]| {
        let (code, said) =
            told(&[&["train"], &SMALL[..], &common, &["--out", out, "--resume"], more].concat());
        assert_eq!(code, 0, "{said}");
        said
    };
    given(&out, &["--steps", "4"]);
    let (expected, lines) = (files(&model), record(Path::new(&out)));
    let writes = |step: usize| {
        format!(
            "nothing is left to do but to write the model: {out}/checkpoint-4 is of step 4, and --steps is {step}"
        )
    };
    // As a disk that was full, a kill and a slip leave it.
    for lacking in ["", "model.safetensors", "config.json"] {
        match lacking {
            "" => fs::remove_dir_all(&model).unwrap(),
            name => fs::remove_file(model.join(name)).unwrap(),
        }
        fs::remove_file(&svg).unwrap();
        let said = given(&out, &["--steps", "4"]);
        assert!(said.contains(&writes(4)), "{lacking}: {said}");
        assert!(files(&model) == expected && svg.exists() && record(Path::new(&out)) == lines, "{lacking}");
        let said = given(&out, &["--steps", "4"]);
        assert!(said.contains("nothing is left to do: "), "{said}");
    }
    // In another folder, and where a model of other steps lies beside a checkpoint that was left on the way.
    let named = format!("{out}/checkpoint-4");
    let other = folder.path("other");
    let (code, said) = told(
        &[&["train"], &SMALL[..], &common, &["--out", &other, "--steps", "3", "--resume", &named]].concat(),
    );
    assert!(code == 0 && said.contains(&writes(3)), "{said}");
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
fn a_checkpoint_under_another_name_or_behind_a_link_is_found() {
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
            // As a save that replaces it is killed between two names; no process has this number.
            fs::rename(place("checkpoint-2"), place("checkpoint-4.old.tmp-4294967294")).unwrap();
            fs::rename(place("checkpoint-4"), place("checkpoint-4.tmp-4294967294")).unwrap();
        } else {
            fs::rename(place("checkpoint-4"), &elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, place("checkpoint-4")).unwrap();
        }
        let last: &[&str] = if way.ends_with("named") { &["--resume", &named] } else { &["--resume"] };
        let args = [&common[..], &["--out", &out, "--steps", "6", "--keep", "1"], last].concat();
        let (code, said) = told(&[&["train"], &SMALL[..], &args].concat());
        assert_eq!(code, 0, "{way}: {said}");
        let completed =
            said.contains("checkpoint-4 lay whole under another name, as a killed save leaves it");
        assert_eq!(completed, way.starts_with("killed"), "{said}");
        // What was kept of it goes with its turn; what a link led to stays.
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
fn a_record_behind_a_link_goes_on_there_and_another_dropout_is_told() {
    let folder = Folder::new("resumed-link");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2"];
    train(&[&common[..], &["--steps", "2", "--dropout", "0.1"]].concat());
    let (link, there) = (Path::new(&out).join("metrics.jsonl"), folder.0.join("record"));
    fs::rename(&link, &there).unwrap();
    std::os::unix::fs::symlink(&there, &link).unwrap();
    let args = [&common[..], &["--steps", "4", "--dropout", "0.25", "--resume"]].concat();
    let (code, said) = told(&[&["train"], &SMALL[..], &args].concat());
    assert_eq!(code, 0, "{said}");
    for name in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        let told = format!(
            "resuming with a changed option: config.json \"{name}\": 0.25 (checkpoint: \"{name}\": 0.1)\n"
        );
        assert!(said.contains(&told), "{said}");
    }
    assert_eq!(fs::read_link(&link).unwrap(), there);
    assert!(record(Path::new(&out)).len() == 4 && fs::read_to_string(&there).unwrap().lines().count() == 4);
}

#[test]
fn who_is_stopped_or_killed_goes_on_with_the_same_bits() {
    let folder = Folder::new("resumed-signal");
    let data = text(&folder);
    let out = |name: &str| folder.path(name);
    let steps = |out: &str, more: &[&str]| -> Vec<String> {
        let all =
            [&["train"], &SMALL[..4], &["--data", &data, "--out", out, "--mesh", "dp=1"], more].concat();
        all.into_iter().map(String::from).collect()
    };
    // A rate that falls towards the last step, whichever part of the run that is in.
    let more = ["--steps", "60", "--save-every", "5", "--eval-every", "0"];
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
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        assert_eq!(record(Path::new(&to)), record(Path::new(&out("whole"))), "{signal}");
        for dir in ["model", "checkpoint-60"] {
            let [left, right] = [out("whole"), to.clone()].map(|out| files(&Path::new(&out).join(dir)));
            assert!(left == right, "{signal}: {dir}");
        }
    }
}
