//! A run folder that is moved or removed during the run.

use crate::cli::{Folder, exit_code_and_stderr};
use crate::processes::{free_port, spawn_rank};
use crate::run_outcomes::{SMALL, end_of, files, signal, spawned, text, wait_for};
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

#[test]
fn run_with_a_moved_folder_saves_into_it_and_ends() {
    let folder = Folder::new("moved");
    let data = text(&folder, 50);
    // Ranks as threads, and as processes.
    for num_processes in [1, 2] {
        let [old, new] = ["old", "new"].map(|name| folder.path(&format!("{name}-{num_processes}")));
        let args = ["--data", &data, "--out", &old, "--steps", "1000000", "--eval-every", "0"];
        let args = [&["train"], &SMALL[..], &args, &["--save-every", "100000", "--threads", "1"]].concat();
        let port = free_port();
        let ranks: Vec<Child> =
            (0..num_processes).map(|rank| spawn_rank(rank, num_processes, port, &args)).collect();
        wait_for(&Path::new(&old).join("metrics.jsonl"), "\"step\":2,");
        fs::rename(&old, &new).unwrap();
        // Meanwhile another run uses the old path.
        let second = ["train", "--data", &data, "--out", &old, "--steps", "1", "--eval-every", "0"];
        let (code, message) = exit_code_and_stderr(&[&second[..], &SMALL].concat());
        assert_eq!(code, 0, "{message}");
        let ended: Vec<(Option<i32>, String)> = ranks.into_iter().map(end_of).collect();
        assert!(ended.iter().all(|(code, _)| *code == Some(1)), "{ended:?}");
        let message = &ended[0].1;
        assert!(message.contains(&format!("{old} was moved to {new} during the run")), "{message}");
        let steps = fs::read_to_string(format!("{new}/metrics.jsonl")).unwrap().lines().count();
        assert!(message.contains(&format!("the model after step {steps}, in {new}/model")), "{message}");
        assert!(Path::new(&new).join(format!("checkpoint-{steps}/trainer_state.json")).is_file());
        let metrics = fs::read_to_string(format!("{old}/metrics.jsonl")).unwrap();
        assert!(metrics.lines().count() == 1 && !Path::new(&old).join("checkpoint-1").exists(), "{metrics}");
    }
}

#[test]
fn run_with_a_removed_folder_ends() {
    let folder = Folder::new("removed");
    let data = text(&folder, 50);
    for is_replaced in [false, true] {
        let out = folder.path(&format!("out-{is_replaced}"));
        let args = ["--data", &data, "--out", &out, "--steps", "1000000", "--eval-every", "0"];
        let child = spawned(&args, Stdio::null(), Stdio::piped());
        wait_for(&Path::new(&out).join("metrics.jsonl"), "\"step\":2,");
        // Removed atomically: moved away first.
        let (made, gone) = (folder.path("made"), folder.path("gone"));
        if is_replaced {
            fs::create_dir(&made).unwrap();
            fs::write(format!("{made}/metrics.jsonl"), "of another run").unwrap();
        }
        pause(&child);
        fs::rename(&out, &gone).unwrap();
        fs::remove_dir_all(&gone).unwrap();
        if is_replaced {
            fs::rename(&made, &out).unwrap();
        }
        signal(&child, "-CONT");
        let (code, message) = end_of(child);
        assert_eq!(code, Some(1), "{message}");
        assert!(message.contains(&format!("{out} was removed during the run")), "{message}");
        if is_replaced {
            assert!(message.contains("nothing more is written") && !message.contains("saved "), "{message}");
            assert_eq!(files(Path::new(&out)).len(), 1, "{message}");
            continue;
        }
        let steps = fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap().lines().count();
        assert!(message.contains(&format!("the model after step {steps}, in {out}/model")), "{message}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file() && steps > 1);
    }
}

/// Stops a process with SIGSTOP and waits until it is stopped.
fn pause(child: &Child) {
    signal(child, "-STOP");
    let stat = format!("/proc/{}/stat", child.id());
    while !fs::read_to_string(&stat).unwrap().contains(") T ") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
