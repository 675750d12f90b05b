//! Mixed precision on the command line: parameter and save dtypes, loss scaling, communicated bytes.

use crate::cli::{Folder, shardgrad};
use approx::abs_diff_eq;
use serde_json::Value as Json;
use shardgrad::nn::checkpoint::TensorFile;
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(60))
}

/// Trains a few steps; returns the metrics.
fn train(folder: &Folder, more: &[&str]) -> Vec<Json> {
    let (data, out) = (text(folder), folder.path("out"));
    let common = ["train", "--data", &data, "--out", &out, "--batch", "4", "--seq", "8", "--eval-every", "0"];
    let output = shardgrad(&[&common[..], more].concat());
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
    metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the dtypes of the saved weights, and of `config.json`.
fn saved(folder: &Folder) -> (Vec<DType>, String) {
    let dir = folder.path("out/model");
    let file = TensorFile::open(&Path::new(&dir).join("model.safetensors")).unwrap();
    let mut dtypes: Vec<DType> = file.tensors().iter().map(|t| t.dtype).collect();
    dtypes.dedup();
    let config: Json =
        serde_json::from_slice(&fs::read(Path::new(&dir).join("config.json")).unwrap()).unwrap();
    (dtypes, config["torch_dtype"].as_str().unwrap_or_default().to_string())
}

#[test]
fn save_dtype_defaults_to_param_dtype() {
    let folder = Folder::new("mixed-saved");
    let bf16 = ["--dtype", "bf16", "--steps", "3", "--mesh", "dp=2"];
    let steps = train(&folder, &bf16);
    assert!(steps.iter().all(|s| s.get("loss_scale").is_none() && s.get("skipped").is_none()), "{steps:?}");
    assert_eq!(saved(&folder), (vec![DType::F32], "float32".to_string()));
    let narrow = train(&folder, &[&bf16[..], &["--param-dtype", "bf16"]].concat());
    assert_eq!(saved(&folder), (vec![DType::BF16], "bfloat16".to_string()));
    let wide = train(&folder, &["--steps", "3", "--mesh", "dp=2"]);
    let loss = |steps: &[Json]| steps[2]["loss"].as_f64().unwrap();
    assert!(abs_diff_eq!(loss(&steps), loss(&wide), epsilon = 0.02), "{steps:?} {wide:?}");
    assert_ne!(loss(&steps), loss(&narrow));
    train(&folder, &[&bf16[..], &["--save-dtype", "f16"]].concat());
    assert_eq!(saved(&folder), (vec![DType::F16], "float16".to_string()));
}

/// Returns whether a step was skipped.
fn skipped(step: &Json) -> bool {
    step["skipped"].as_bool().unwrap()
}

#[test]
fn f16_metrics_contain_the_loss_scale() {
    let folder = Folder::new("mixed-f16");
    let steps = train(&folder, &["--dtype", "f16", "--steps", "4", "--mesh", "dp=2,tp=2"]);
    assert_eq!(steps.len(), 4);
    assert!(steps.iter().all(|s| s["loss_scale"] == 65_536.0 && !skipped(s)), "{steps:?}");
    assert_eq!(saved(&folder).0, [DType::F32]);
}

/// Saves a model with large weights of both signs in the head after a small norm: logits are 0, and the gradient of the norm's output overflows.
fn large_head(dir: &str) {
    const WIDTH: usize = 8;
    let config = Gpt2Config { tie_word_embeddings: false, ..Gpt2Config::new(256, 8, WIDTH, 2, 2) };
    World::run(Mesh::single(), |rank| {
        let model = Model::new(rank, Gpt2::new(&config.clone().with_dropout(0.0)), &Plan::new(), 1)?;
        for param in model.params() {
            let mut data = param.tensor().to_f64()?;
            for (i, x) in data.iter_mut().enumerate() {
                *x = match param.name().as_str() {
                    "lm_head.weight" if i / WIDTH < 128 => 4000.0,
                    "lm_head.weight" => -4000.0,
                    "ln_f.weight" => 1.0 / 4096.0,
                    _ => *x,
                };
            }
            param.set_tensor(Tensor::from_host(rank, param.shape(), &data)?.cast(DType::F32))?;
        }
        model.save(Path::new(dir))
    })
    .unwrap();
}

#[test]
fn overflowing_steps_are_skipped_and_reported() {
    let folder = Folder::new("mixed-overflow");
    let model = folder.path("model");
    large_head(&model);
    for mesh in ["dp=2", "tp=2", "pp=2"] {
        let steps = train(&folder, &["--model", &model, "--dtype", "f16", "--steps", "16", "--mesh", mesh]);
        let first = steps.iter().position(|s| !skipped(s)).expect("a scale is found");
        assert!(first > 0, "{mesh}: {steps:?}");
        for (i, step) in steps[..=first].iter().enumerate() {
            assert_eq!(step["loss_scale"], 65_536.0 / f64::from(1 << i), "{mesh}: {steps:?}");
            assert_eq!(step["grad_norm"].is_null(), i < first, "{mesh}: {steps:?}");
        }
    }
}

#[test]
fn explain_counts_bf16_activations_and_f32_gradients() {
    let given = ["explain", "--preset", "tiny", "--mesh", "dp=2,tp=2", "--batch", "4", "--seq", "16"];
    let explain = |more: &[&str]| {
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(explain(&["--dtype", "bf16"]).contains(", batch 4 x 16, bf16 (parameters f32)\n"));
    let narrow = ["--dtype", "bf16", "--param-dtype", "bf16"];
    assert!(explain(&narrow).contains(", batch 4 x 16, bf16\n"));
    let moved = |more: &[&str], axes: &str, phase: &str| -> Vec<(String, u64)> {
        let lines = explain(&[more, &["--json"]].concat());
        let lines = lines.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
        let of = lines.filter(|l| l["kind"] == "collective" && l["axes"] == axes && l["phase"] == phase);
        of.map(|l| (l["dtype"].as_str().unwrap().to_string(), l["bytes"].as_u64().unwrap())).collect()
    };
    let bytes = |moved: &[(String, u64)]| moved.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let (wide, mixed) =
        (moved(&["--dtype", "f32"], "dp", "backward"), moved(&["--dtype", "bf16"], "dp", "backward"));
    assert_eq!(wide, mixed, "gradients are reduced in f32");
    // Gradients of biases and norms are partial sums in f32 and rounded after the reduction; those of products are reduced in bf16.
    let narrow = moved(&narrow, "dp", "backward");
    let of =
        |name: &str| bytes(&narrow.iter().filter(|(dtype, _)| dtype == name).cloned().collect::<Vec<_>>());
    assert!(of("f32") > 0 && of("bf16") > 0, "{narrow:?}");
    assert_eq!(of("f32") + 2 * of("bf16"), bytes(&wide), "{narrow:?}");
    let (wide, mixed) =
        (moved(&["--dtype", "f32"], "tp", "backward"), moved(&["--dtype", "bf16"], "tp", "backward"));
    assert!(!mixed.is_empty() && mixed.iter().all(|(dtype, _)| dtype == "bf16"), "{mixed:?}");
    assert_eq!(2 * bytes(&mixed), bytes(&wide), "activations are moved in bf16");
}
