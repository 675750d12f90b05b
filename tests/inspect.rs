//! `inspect`: contents and damage of model, checkpoint and run folders.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::resume::{text, train};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Returns the report of a folder, and the exit code.
fn report(dir: &Path) -> (Value, i32) {
    let output = shardgrad(&["inspect", dir.to_str().unwrap(), "--json"]);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (report, output.status.code().unwrap())
}

#[test]
fn inspect_lists_a_run_and_finds_damage() {
    let folder = Folder::new("inspect");
    let (data, out) = (text(&folder), folder.path("out"));
    train(&["--data", &data, "--out", &out, "--mesh", "dp=1", "--save-every", "2", "--steps", "4"]);
    let out = Path::new(&out);
    let (run, code) = report(out);
    assert_eq!((code, &run["type"], &run["sound"]), (0, &"run".into(), &true.into()), "{run}");
    let parts = run["parts"].as_array().unwrap();
    let types: Vec<&str> = parts.iter().map(|part| part["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["model", "checkpoint", "checkpoint"]);
    let (model, checkpoint) = (&parts[0], &parts[2]);
    assert_eq!(checkpoint["step"], 4);
    assert_eq!(checkpoint["options"]["batch"], "4");
    assert_eq!(model["config"]["model_type"], "gpt2");
    let tensors = |part: &Value| part["tensors"].as_array().unwrap().clone();
    assert!(tensors(model).iter().chain(&tensors(checkpoint)).all(|t| t["checksum"] == "verified"));
    // Weights, and for each two moments and a step count.
    assert_eq!(tensors(checkpoint).len(), 4 * tensors(model).len());
    let first = &tensors(model)[0];
    assert_eq!((&first["name"], &first["dtype"]), (&"transformer.wte.weight".into(), &"f32".into()));
    assert_eq!(first["bytes"].as_u64().unwrap(), 4 * 256 * first["shape"][1].as_u64().unwrap());
    assert!(run["files"].as_array().unwrap().iter().any(|file| file["name"] == "metrics.jsonl"));

    let output = shardgrad(&["inspect", out.to_str().unwrap()]);
    let message = String::from_utf8(output.stdout).unwrap();
    for part in [
        "out: run, sound",
        "checkpoint-4: checkpoint, sound",
        "transformer.h.*.attn.c_attn.weight",
        "model_type=gpt2",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }

    // Flip one byte of the last tensor of each file.
    for name in ["checkpoint-2/optimizer.safetensors", "model/model.safetensors"] {
        let path = out.join(name);
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, flipped).unwrap();
        for dir in [out, path.parent().unwrap()] {
            let (found, code) = report(dir);
            assert_eq!((code, &found["sound"]), (1, &false.into()), "{name}");
            let (code, message) = exit_code_and_stderr(&["inspect", dir.to_str().unwrap()]);
            assert!(code == 1 && message.contains("is damaged: 1 error(s), the first: "), "{message}");
            assert!(message.contains(name) && message.contains(": tensor `"), "{message}");
        }
        fs::write(&path, whole).unwrap();
    }
    for name in
        ["checkpoint-4/trainer_state.json", "checkpoint-4/model.safetensors", "checkpoint-4/config.json"]
    {
        let path = out.join(name);
        let whole = fs::read(&path).unwrap();
        for cut in [true, false] {
            match cut {
                true => fs::write(&path, &whole[..whole.len() / 2]).unwrap(),
                false => fs::remove_file(&path).unwrap(),
            }
            let (found, code) = report(out);
            let damage = found["parts"][2]["damage"].to_string();
            let is_missing_config = !cut && name.ends_with("config.json");
            assert_eq!(code, i32::from(!is_missing_config), "{name}: {found}");
            assert_eq!(damage.contains(name), !is_missing_config, "{damage}");
        }
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(report(out).1, 0);
}

#[test]
fn inspect_refuses_other_paths() {
    let folder = Folder::new("inspect-none");
    let file = folder.file("file", "text");
    for (path, why) in [
        (file, "is not a folder"),
        (folder.path("nowhere"), "does not exist"),
        (folder.path(""), "is not a model, checkpoint or run folder"),
    ] {
        let (code, message) = exit_code_and_stderr(&["inspect", &path]);
        assert!(code == 2 && message.contains(why) && message.contains("name a model folder"), "{message}");
    }
}
