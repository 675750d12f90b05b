//! `inspect`: what folders of models, checkpoints and runs hold, and that damage of them is found.

use crate::cli::{Folder, shardgrad, told};
use crate::resume::{text, train};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The report of a folder, and the exit code.
fn report(dir: &Path) -> (Value, i32) {
    let output = shardgrad(&["inspect", dir.to_str().unwrap(), "--json"]);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (report, output.status.code().unwrap())
}

#[test]
fn a_run_is_shown_with_its_model_and_checkpoints_and_damage_is_found() {
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
    // Weights, and for each of them two moments and a number of steps.
    assert_eq!(tensors(checkpoint).len(), 4 * tensors(model).len());
    let first = &tensors(model)[0];
    assert_eq!((&first["name"], &first["dtype"]), (&"transformer.wte.weight".into(), &"f32".into()));
    assert_eq!(first["bytes"].as_u64().unwrap(), 4 * 256 * first["shape"][1].as_u64().unwrap());
    assert!(run["files"].as_array().unwrap().iter().any(|file| file["name"] == "metrics.jsonl"));

    let output = shardgrad(&["inspect", out.to_str().unwrap()]);
    let said = String::from_utf8(output.stdout).unwrap();
    for part in [
        "out: run, sound",
        "checkpoint-4: checkpoint, sound",
        "transformer.h.*.attn.c_attn.weight",
        "model_type=gpt2",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }

    // One byte of the last tensor of each file.
    for name in ["checkpoint-2/optimizer.safetensors", "model/model.safetensors"] {
        let path = out.join(name);
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, flipped).unwrap();
        for dir in [out, path.parent().unwrap()] {
            let (found, code) = report(dir);
            assert_eq!((code, &found["sound"]), (1, &false.into()), "{name}");
            let (code, said) = told(&["inspect", dir.to_str().unwrap()]);
            assert!(code == 1 && said.contains("is damaged: 1 fault(s), the first: "), "{said}");
            assert!(said.contains(name) && said.contains(": tensor `"), "{said}");
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
fn what_is_no_such_folder_is_misuse() {
    let folder = Folder::new("inspect-none");
    let file = folder.file("file", "text");
    for (path, why) in [
        (file, "is no folder"),
        (folder.path("nowhere"), "does not exist"),
        (folder.path(""), "holds no model, no checkpoint and no run"),
    ] {
        let (code, said) = told(&["inspect", &path]);
        assert!(code == 2 && said.contains(why) && said.contains("name the folder of a model"), "{said}");
    }
}
