//! Pipeline parallelism without training: `eval` gives the losses and logits of one rank, and each rank needs the memory of its
//! stage only.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::max_difference::max_abs_diff;
use serde_json::Value as Json;
use shardgrad::nn::hf::TensorFile;
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::path::Path;

/// A model of each family: GPT-2, Llama, and Llama with experts, all with tied embeddings.
const PRESETS: [&str; 3] = ["tiny", "llama-tiny", "mixtral-tiny"];

/// Saves a newly initialized model into a folder and returns its path.
fn saved_model(folder: &Folder, preset: &str) -> String {
    let (config, path) = (ModelConfig::preset(preset).unwrap(), folder.path(preset));
    World::run(Mesh::single(), |rank| {
        Model::new(rank, LanguageModel::new(&config), &LanguageModel::plan(&config), 5)?
            .save(Path::new(&path))
    })
    .unwrap();
    path
}

/// Returns the standard output of a command.
fn stdout(args: &[&str]) -> String {
    let output = shardgrad(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn eval_on_a_pipeline_matches_one_rank() {
    let folder = Folder::new("pipelined-eval");
    // 14 windows of 16 tokens: several groups of batches on a pipeline, the last batch smaller.
    let data = folder.file("text", &"The quick brown fox jumps over the lazy dog. ".repeat(6)[..14 * 16 + 1]);
    for preset in PRESETS {
        let model = saved_model(&folder, preset);
        let eval = |mesh: &str| {
            let logits = folder.path(&format!("{preset}-{mesh}.safetensors"));
            let source = ["eval", "--model", &model, "--data", &data, "--split", "all", "--seq", "16"];
            let text = stdout(
                &[&source[..], &["--batch", "3", "--logits", &logits, "--json", "--mesh", mesh]].concat(),
            );
            let loss = serde_json::from_str::<Json>(&text).unwrap()["loss"].as_f64().unwrap();
            let file = TensorFile::open(Path::new(&logits)).unwrap();
            let bytes = file.read("logits").unwrap();
            let logits = bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into());
            (loss, logits.collect::<Vec<f64>>())
        };
        let (loss, logits) = eval("dp=1");
        assert!(loss > 0.0 && logits.len() == 3 * 16 * 256, "{preset}: {loss}");
        for mesh in ["pp=2", "pp=4"] {
            assert!(eval(mesh) == (loss, logits.clone()), "{preset} on {mesh}: other bits");
        }
        for mesh in ["pp=2,tp=2", "dp=2,pp=2", "pp=2,cp=2"] {
            let (other, other_logits) = eval(mesh);
            assert!((other - loss).abs() < 1e-6 * loss, "{preset} on {mesh}: {other}, not {loss}");
            let far = max_abs_diff(&logits, &other_logits);
            assert!(far < 1e-5, "{preset} on {mesh}: logits differ by {far}");
        }
    }
}

#[test]
fn pipeline_rank_holds_the_parameters_of_its_stage_only() {
    let folder = Folder::new("pipelined-memory");
    let (model, data) = (saved_model(&folder, "tiny"), folder.file("text", "abc ".repeat(100)));
    let weights = std::fs::metadata(Path::new(&model).join("model.safetensors")).unwrap().len();
    // Two thirds of the weights: too little for one rank, enough for a stage and its activations.
    let limit = (weights * 2 / 3).to_string();
    let eval =
        ["eval", "--model", &model, "--data", &data, "--seq", "8", "--batch", "1", "--memory-limit", &limit];
    let (code, message) = exit_code_and_stderr(&eval);
    assert!(code == 2 && message.contains("per rank, but --memory-limit is"), "{message}");
    let (code, message) = exit_code_and_stderr(&[&eval[..], &["--mesh", "pp=2"]].concat());
    assert_eq!(code, 0, "{message}");
}
