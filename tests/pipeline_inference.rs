//! Pipeline parallelism without training: `eval` and `generate` give the losses, logits and tokens of one rank, and each rank needs
//! the memory of its stage only.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use approx::relative_eq;
use serde_json::Value as Json;
use shardgrad::nn::checkpoint::{TensorFile, TensorWriter};
use shardgrad::nn::{BertConfig, LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use shardgrad_testing::{max_difference, sample};
use std::path::Path;

/// A model of each family: GPT-2, Llama, and Llama with experts, all with tied embeddings.
const PRESETS: [&str; 3] = ["nano", "llama-nano", "mixtral-nano"];

/// Saves a newly initialized model into a folder and returns its path.
fn saved_model(folder: &Folder, name: &str, config: &ModelConfig) -> String {
    let path = folder.path(name);
    World::run(Mesh::single(), |rank| {
        Model::new(rank, LanguageModel::new(config), &LanguageModel::plan(config), 5)?.save(Path::new(&path))
    })
    .unwrap();
    path
}

fn saved_preset(folder: &Folder, preset: &str) -> String {
    saved_model(folder, preset, &ModelConfig::preset(preset).unwrap())
}

/// Returns the standard output of a command.
fn stdout(args: &[&str]) -> String {
    let output = shardgrad(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the loss and the logits of `eval`.
fn loss_and_logits(folder: &Folder, model: &str, source: &[&str], mesh: &str) -> (f64, Vec<f64>) {
    let logits = folder.path(&format!("{mesh}.safetensors"));
    let eval = ["eval", "--model", model, "--batch", "3", "--logits", &logits, "--json", "--mesh", mesh];
    let json: Json = serde_json::from_str(&stdout(&[&eval[..], source].concat())).unwrap();
    let bytes = TensorFile::open(Path::new(&logits)).unwrap().read("logits").unwrap();
    let logits = bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into());
    (json["loss"].as_f64().unwrap(), logits.collect())
}

/// Compares `eval` on pipelines, a sample with this number, with one rank, and bit for bit with the mesh without `pp`.
fn check_eval(folder: &Folder, model: &str, source: &[&str], number: usize) {
    let eval = |mesh: &str| loss_and_logits(folder, model, source, mesh);
    let (loss, logits) = eval("dp=1");
    assert!(loss > 0.0 && !logits.is_empty(), "{model}: {loss}");
    let meshes = [
        ("pp=2", "dp=1"),
        ("pp=4", "dp=1"),
        ("pp=2,tp=2", "tp=2"),
        ("dp=2,pp=2", "dp=2"),
        ("pp=2,cp=2", "cp=2"),
        ("dp=2,pp=2,tp=2", "dp=2,tp=2"),
    ];
    for (mesh, flat) in sample(number, meshes) {
        let (other, other_logits) = eval(mesh);
        assert!((other, &other_logits) == (eval(flat).0, &eval(flat).1), "{model} on {mesh}: other bits");
        assert!(relative_eq!(other, loss, max_relative = 1e-6), "{model} on {mesh}: {other}, not {loss}");
        let far = max_difference(&logits, &other_logits);
        assert!(far < 1e-5, "{model} on {mesh}: logits differ by {far}");
    }
}

#[test]
fn eval_on_a_pipeline_matches_one_rank() {
    let folder = Folder::new("pipelined-eval");
    // 14 windows of 16 tokens: several groups of batches on a pipeline, the last batch smaller.
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(6);
    let data = folder.file("text", &text[..14 * 16 + 1]);
    for (number, preset) in PRESETS.into_iter().enumerate() {
        let model = saved_preset(&folder, preset);
        check_eval(&folder, &model, &["--data", &data, "--split", "all", "--seq", "16"], number);
    }
}

/// An encoder, whose loss reads more arguments than the recording that is cut into stages.
#[test]
fn eval_of_an_encoder_on_a_pipeline_matches_one_rank() {
    let folder = Folder::new("pipelined-encoder");
    let config = ModelConfig::Bert(BertConfig::new(19, 8, [12, 10], 3, 2));
    let (model, rows) = (saved_model(&folder, "bert", &config), folder.path("rows.safetensors"));
    let names = ["input_ids", "labels"];
    let tensors = names.map(|name| (name.to_string(), DType::I64, vec![7, 8]));
    let mut file = TensorWriter::create(Path::new(&rows), &tensors).unwrap();
    let ids = (0..56).map(|i| (i * i * 3 + i + 1) % 19);
    let labels = (0..56).map(|i| if i % 5 == 1 { i % 19 } else { -100 });
    file.append(names[0], &ids.flat_map(i64::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    file.append(names[1], &labels.flat_map(i64::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    file.finish().unwrap();
    check_eval(&folder, &model, &["--tokens", &rows], 1);
}

#[test]
fn generate_on_a_pipeline_matches_one_rank() {
    let folder = Folder::new("pipelined-generate");
    for (number, preset) in PRESETS.into_iter().enumerate() {
        let model = saved_preset(&folder, preset);
        let tokens = |mesh: &str, sampling: &[&str]| {
            // The text grows beyond the 64 positions of these models.
            let prompt = "The quick brown fox jumps over the lazy dog, twice.";
            let generate = ["generate", "--model", &model, "--prompt", prompt, "--tokens", "24", "--json"];
            stdout(&[&generate[..], &["--dtype", "f64", "--mesh", mesh], sampling].concat())
        };
        for sampling in [&["--greedy"][..], &["--seed", "3", "--top-k", "40"]] {
            let one = tokens("dp=1", sampling);
            for mesh in sample(number, ["pp=2,tp=2", "pp=2", "dp=2,pp=2"]) {
                assert_eq!(tokens(mesh, sampling), one, "{preset} on {mesh}, {sampling:?}");
            }
        }
    }
}

#[test]
fn pipeline_rank_holds_the_parameters_of_its_stage_only() {
    let folder = Folder::new("pipelined-memory");
    let (model, data) = (saved_preset(&folder, "tiny"), folder.file("text", "abc ".repeat(100)));
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
