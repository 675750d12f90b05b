//! Damaged checkpoints and failing saves: `train --resume` resumes from the newest intact checkpoint, and a checkpoint that cannot be
//! written does not end the training.

use crate::cli::{Folder, exit_code_and_stderr};
use crate::processes;
use crate::resume::{checkpoints, files, record, refused, short_run, text, train};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Damages a file.
type Damage<'a> = &'a dyn Fn(&Path);

/// Copies a folder recursively.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let to = to.join(entry.file_name().unwrap());
        match entry.is_dir() {
            true => copy(&entry, &to),
            false => assert!(fs::copy(&entry, &to).is_ok()),
        }
    }
}

/// Flips a bit near the end of a file, in the data of its last tensor.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - 3;
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_newest_checkpoint_is_reported_and_an_older_one_is_resumed() {
    let folder = Folder::new("damage");
    let (data, whole) = (text(&folder), folder.path("whole"));
    let common = ["--data", &data, "--save-every", "2", "--keep", "3"];
    let run = |out: &str, more: &[&str]| {
        exit_code_and_stderr(&short_run(&[&common[..], &["--out", out], more].concat()))
    };
    let base = folder.0.join("base");
    train(&[&common[..], &["--out", base.to_str().unwrap(), "--steps", "4", "--mesh", "dp=1"]].concat());
    train(&[&common[..], &["--out", &whole, "--steps", "6", "--mesh", "dp=1"]].concat());
    let cut = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    let remove = |path: &Path| fs::remove_file(path).unwrap();
    let older = |path: &Path| {
        let other = path.with_file_name("../checkpoint-2").join(path.file_name().unwrap());
        assert!(fs::copy(other, path).is_ok());
    };
    let damages: [(&str, Damage<'_>, &str, &str); 9] = [
        ("trainer_state.json", &cut, "cannot be parsed as a run state", "dp=1"),
        ("config.json", &cut, "EOF", "dp=1"),
        ("optimizer.safetensors", &cut, "bytes follow the header", "dp=2"),
        ("model.safetensors", &cut, "bytes follow the header", "dp=1"),
        ("optimizer.safetensors", &remove, "no such file", "dp=1"),
        ("model.safetensors", &remove, "no such file", "tp=2"),
        ("optimizer.safetensors", &older, "is of step 2", "dp=1"),
        ("optimizer.safetensors", &flip, "is damaged: its checksum is", "tp=2"),
        ("model.safetensors", &flip, "is damaged: its checksum is", "dp=2"),
    ];
    for (i, (name, damage, why, mesh)) in damages.into_iter().enumerate() {
        let out = folder.path(&format!("out-{i}"));
        copy(&base, Path::new(&out));
        let newest = Path::new(&out).join("checkpoint-4");
        damage(&newest.join(name));
        let damaged = files(&newest);
        let more = ["--steps", "6", "--mesh", mesh];
        for exact in [
            &["--resume-exact"][..],
            &["--resume", "--resume-exact"],
            &["--resume", newest.to_str().unwrap()],
        ] {
            let (code, message) = run(&out, &[&more[..], exact].concat());
            assert_eq!(code, 2, "{name} {exact:?}: {message}");
            assert!(message.contains(name) && message.contains("--resume"), "{name}: {message}");
            assert!(files(&newest) == damaged && record(Path::new(&out)).len() == 4, "nothing changes");
        }
        let (code, message) = run(&out, &[&more[..], &["--resume"]].concat());
        assert_eq!(code, 0, "{name}: {message}");
        let line = message
            .lines()
            .find(|line| line.contains("checkpoint-4 is damaged: "))
            .unwrap_or_else(|| panic!("{message}"));
        assert!(line.contains(name), "{message}");
        assert!(message.contains(why), "{name}: {message}");
        assert!(line.ends_with(&format!("; resuming from {out}/checkpoint-2")), "{message}");
        assert!(message.contains("checkpoint-4 is renamed to "), "{message}");
        let left = ["checkpoint-2", "checkpoint-4", "checkpoint-4.damaged", "checkpoint-6"];
        assert_eq!(checkpoints(Path::new(&out)), left, "{name}");
        assert!(files(&Path::new(&out).join(left[2])) == damaged);
        assert_eq!(record(Path::new(&out)).len(), 6);
        if mesh == "dp=1" {
            let [found, expected] = [&out, &whole].map(|out| files(&Path::new(out).join("model")));
            assert!(found == expected, "{name}: the model is that of a run without damage");
        }
    }
}

#[test]
fn processes_resume_from_the_same_intact_checkpoint() {
    let folder = Folder::new("damage-processes");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=2", "--save-every", "2"];
    train(&[&common[..], &["--steps", "4"]].concat());
    flip(&Path::new(&out).join("checkpoint-4/optimizer.safetensors"));
    let args = short_run(&[&common[..], &["--steps", "6"]].concat());
    for output in processes::run_ranks(2, &[&args[..], &["--resume-exact"]].concat()) {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("optimizer.safetensors: tensor `"), "{message}");
    }
    let outputs = processes::run_ranks(2, &[&args[..], &["--resume"]].concat());
    for (rank, output) in outputs.iter().enumerate() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{message}");
        assert_eq!(message.matches("checkpoint-4 is damaged: ").count(), usize::from(rank == 0), "{message}");
    }
    assert_eq!(record(Path::new(&out)).len(), 6);
    assert!(checkpoints(Path::new(&out)).contains(&"checkpoint-4.damaged".to_string()));
}

#[test]
fn resume_without_an_intact_checkpoint_is_an_error() {
    let folder = Folder::new("damage-all");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2"];
    train(&[&common[..], &["--steps", "4"]].concat());
    for step in [2, 4] {
        flip(&Path::new(&out).join(format!("checkpoint-{step}/model.safetensors")));
    }
    for option in ["--resume", "--resume-exact"] {
        let message = refused(&[&common[..], &["--steps", "6", option]].concat());
        let expected = if option == "--resume" { "checkpoints in " } else { "model.safetensors: tensor `" };
        assert!(message.contains(expected), "{message}");
        assert_eq!(
            message.matches("is damaged: its checksum is").count(),
            if option == "--resume" { 2 } else { 1 }
        );
    }
    assert_eq!(checkpoints(Path::new(&out)), ["checkpoint-2", "checkpoint-4"]);
    assert_eq!(record(Path::new(&out)).len(), 4);
    // With --resume-exact a checkpoint folder without its state is an error, not a reason to resume from an older one.
    fs::remove_file(Path::new(&out).join("checkpoint-4/trainer_state.json")).unwrap();
    let message = refused(&[&common[..], &["--steps", "6", "--resume-exact"]].concat());
    assert!(message.contains("checkpoint-4 is damaged: it has no trainer_state.json"), "{message}");
}

#[test]
fn checkpoint_that_cannot_be_written_is_skipped_and_the_next_is_saved() {
    let folder = Folder::new("damage-blocked");
    let data = text(&folder);
    for mesh in ["dp=1", "dp=2", "pp=2"] {
        let out = folder.path(mesh);
        let common = ["--data", &data, "--out", &out, "--mesh", mesh, "--save-every", "2"];
        train(&[&common[..], &["--steps", "2"]].concat());
        let first = Path::new(&out).join("checkpoint-2");
        let before = files(&first);
        fs::write(Path::new(&out).join("checkpoint-4"), "in the way").unwrap();
        let (code, message) =
            exit_code_and_stderr(&short_run(&[&common[..], &["--steps", "6", "--resume"]].concat()));
        assert_eq!(code, 0, "{mesh}: {message}");
        let line = message
            .lines()
            .find(|line| line.starts_with("warning: checkpoint-4 was not saved: "))
            .unwrap_or_else(|| panic!("{message}"));
        assert!(line.contains("checkpoint-4: it is not a folder"), "{message}");
        assert!(line.ends_with("; training continues, the next checkpoint is in 2 steps"), "{message}");
        assert!(files(&first) == before && record(Path::new(&out)).len() == 6);
        assert_eq!(checkpoints(Path::new(&out)), ["checkpoint-2", "checkpoint-4", "checkpoint-6"]);
        assert!(Path::new(&out).join("checkpoint-6/trainer_state.json").is_file());
    }
}

#[test]
fn file_size_limit_skips_checkpoints_but_keeps_the_run_and_its_model() {
    let folder = Folder::new("damage-limit");
    let (data, sound) = (text(&folder), folder.path("sound"));
    let common = ["--data", &data, "--save-every", "2", "--steps"];
    train(&[&common[..], &["2", "--out", &sound]].concat());
    // The optimizer's file is more than twice as large as the weights; the limit is between the two.
    let size = |name: &str| fs::metadata(Path::new(&sound).join("checkpoint-2").join(name)).unwrap().len();
    let blocks = (size("model.safetensors") + size("optimizer.safetensors")) / 2 / 512;
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    for mesh in ["dp=1", "tp=2"] {
        let out = folder.path(mesh);
        let mut limited = Command::new("sh");
        limited.args(["-c", &script, env!("CARGO_BIN_EXE_shardgrad")]);
        limited.args(short_run(&[&common[..], &["6", "--out", &out, "--mesh", mesh]].concat()));
        let output = limited.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{mesh}: {message}");
        for step in [2, 4] {
            let start = format!("warning: checkpoint-{step} was not saved: ");
            let line = message.lines().find(|line| line.starts_with(&start));
            let line = line.unwrap_or_else(|| panic!("{mesh}: {message}"));
            assert!(line.contains("optimizer.safetensors: File too large"), "{message}");
            assert!(line.ends_with("; training continues, the next checkpoint is in 2 steps"), "{message}");
        }
        assert!(message.contains("error: cannot write ") && message.contains("checkpoint-6"), "{message}");
        assert!(message.contains("the model after step 6"), "{message}");
        assert!(checkpoints(Path::new(&out)).is_empty(), "failed saves leave nothing");
        assert_eq!(record(Path::new(&out)).len(), 6);
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
    }
}
