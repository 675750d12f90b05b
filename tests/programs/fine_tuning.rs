//! Fine-tuning a Hugging Face folder from the command line.

use crate::cli::{Folder, exit_code_and_stderr};
use serde_json::Value;
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// Loss, gradient norm and hash of the state of each step in the log of a run.
fn steps(run: &str) -> Vec<[Value; 3]> {
    let lines = fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
    let step = |line| {
        let line: Value = serde_json::from_str(line).unwrap();
        ["loss", "grad_norm", "state_hash"].map(|name| line[name].clone())
    };
    lines.lines().map(step).collect()
}

#[test]
fn losses_and_weights_have_the_same_bits_on_every_mesh() {
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
            "--deterministic",
            "mesh",
            "--state-hash",
            "1",
            "--out",
            &out,
        ]);
        assert_eq!(code, 0, "{mesh}: {message}");
        let events = Log::event_files(Path::new(&out));
        assert_eq!(events.len(), 1, "{mesh}: TensorBoard reads the run");
        (steps(&out), out)
    };
    let (right, out) = train("dp=1");
    assert!(right.len() == 6 && right[5][0].as_f64() < right[0][0].as_f64(), "{right:?}");
    assert!(right.iter().all(|step| step[2].is_string()), "{right:?}");
    for mesh in ["dp=2", "tp=2", "pp=2", "dp=2,tp=2"] {
        assert_eq!(train(mesh).0, right, "{mesh}");
    }
    // The result is a folder that `eval` and transformers read.
    let saved = format!("{out}/model");
    let eval = ["eval", "--model", &saved, "--data", &data, "--seq", "8"];
    let (code, message) = exit_code_and_stderr(&eval);
    assert_eq!(code, 0, "{message}");
}
