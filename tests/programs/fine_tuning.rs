//! Fine-tuning a Hugging Face folder from the command line.

use crate::cli::{Folder, exit_code_and_stderr};
use serde_json::Value;
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// The losses in the log of a run.
fn losses(run: &str) -> Vec<f64> {
    let lines = fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
    let loss = |line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    lines.lines().map(loss).collect()
}

#[test]
fn losses_do_not_depend_on_the_mesh() {
    let folder = Folder::new("programs-fine-tuning");
    let model = format!("{}/tests/data/hf/llama", env!("CARGO_MANIFEST_DIR"));
    let vocab = shardgrad::nn::ModelConfig::read(Path::new(&model)).unwrap().vocab_size();
    let ids: Vec<u8> =
        (0..2000u32).flat_map(|i| ((i * i % 17 % vocab as u32) as u16).to_le_bytes()).collect();
    let data = folder.file("ids.bin", ids);
    let train = |mesh: &str| {
        let out = folder.path(mesh);
        let (code, message) = exit_code_and_stderr(&[
            "train",
            "--model",
            &model,
            "--data",
            &data,
            "--mesh",
            mesh,
            "--steps",
            "6",
            "--batch",
            "4",
            "--seq",
            "8",
            "--lr",
            "1e-2",
            "--warmup",
            "1",
            "--eval-every",
            "0",
            "--out",
            &out,
        ]);
        assert_eq!(code, 0, "{mesh}: {message}");
        let events = Log::event_files(Path::new(&out));
        assert_eq!(events.len(), 1, "{mesh}: TensorBoard reads the run");
        (losses(&out), out)
    };
    let (right, out) = train("dp=1");
    assert!(right.len() == 6 && right[5] < right[0], "{right:?}");
    for mesh in ["dp=2", "tp=2", "pp=2", "dp=2,tp=2"] {
        crate::training_run::same(&right, &train(mesh).0, 1e-4, mesh);
    }
    // The result is a folder that `eval` and transformers read.
    let saved = format!("{out}/model");
    let eval = ["eval", "--model", &saved, "--data", &data, "--seq", "8"];
    let (code, message) = exit_code_and_stderr(&eval);
    assert_eq!(code, 0, "{message}");
}
