//! Comparison with Hugging Face `transformers`: recorded model folders and logits (`tests/hf/make_fixtures.py`).

use crate::cli::Folder;
use approx::abs_diff_eq;
use shardgrad::nn::ExpertsConfig;
use shardgrad::nn::checkpoint::{CONFIG_FILE, TensorFile, TensorWriter, WEIGHTS_FILE, Weights};
use shardgrad::nn::{Bert, HfModel, LanguageModel, LlamaConfig, ModelConfig};
use shardgrad::prelude::*;
use shardgrad_testing::max_difference;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAMES: [&str; 14] = [
    "gpt2",
    "gpt2-untied",
    "gpt2-f16",
    "llama",
    "llama-biased",
    "llama-bf16",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-normed",
];
/// Encoders; those without a language-model head last.
const ENCODERS: [&str; 3] = ["bert", "bert-untied", "bert-encoder"];
const MESHES: [&str; 5] = ["", "tp=2", "dp=2", "dp=2,tp=2", "tp=3"];
/// Models with experts, and meshes for them.
const EXPERTS: [&str; 3] = ["mixtral", "qwen3-moe", "qwen3-moe-normed"];
const EXPERT_MESHES: [&str; 3] = ["ep=2", "dp=2,ep=3", "ep=2,tp=2"];
const ROWS: usize = 3;
const SEQ: usize = 9;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/hf").join(name)
}

/// Loads a model of a folder in a dtype.
fn model(rank: &Rank, dir: &Path, dtype: DType) -> Result<(Model<LanguageModel>, Plan)> {
    let config = ModelConfig::read(dir)?;
    let plan = LanguageModel::plan(&config);
    let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, dtype)?;
    model.load(dir)?;
    Ok((model, plan))
}

/// Creates an integer tensor as in the script, from row and position.
fn table(rank: &Rank, plan: &Plan, number: impl Fn(usize, usize) -> usize) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, SEQ])?;
    let all: Vec<i64> = (0..ROWS * SEQ).map(|at| number(at / SEQ, at % SEQ) as i64).collect();
    Tensor::from_global(rank, &layout, &all)
}

/// Returns the token ids of the script.
fn ids(rank: &Rank, plan: &Plan, vocab: usize) -> Result<Tensor> {
    table(rank, plan, |r, t| (r * 7 + t * 5 + r * t * 3 + t * t) % vocab)
}

/// Returns the gathered logits `[rows, seq, vocab]` for the token ids of the script.
fn logits(dir: &Path, mesh: &str) -> Vec<f64> {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let (model, plan) = model(rank, dir, DType::F32)?;
        let ids = ids(rank, &plan, model.model_config().vocab_size())?;
        model.forward(&model.inference_tape().constant(ids)).tensor().to_f64()
    });
    ranks.unwrap_or_else(|e| panic!("{} on {mesh}: {e}", dir.display())).swap_remove(0)
}

fn expected(name: &str, tensor: &str) -> Vec<f64> {
    let file = TensorFile::open(&folder(name).join("expected.safetensors")).unwrap();
    let bytes = file.read(tensor).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

/// Returns the maximum difference relative to the largest element.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    max_difference(a, b) / b.iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

#[test]
fn logits_match_transformers_on_every_mesh() {
    for name in NAMES {
        let expected = expected(name, "logits");
        for mesh in MESHES.into_iter().chain(EXPERT_MESHES.into_iter().filter(|_| EXPERTS.contains(&name))) {
            let found = distance(&logits(&folder(name), mesh), &expected);
            assert!(found <= 2e-5, "{name} on {mesh}: logits differ by {found:e} of their scale");
        }
    }
}

/// The load-balancing (auxiliary) loss alone.
#[test]
fn load_balancing_loss_matches_transformers_on_every_mesh() {
    for name in EXPERTS {
        let ModelConfig::Llama(read) = ModelConfig::read(&folder(name)).unwrap() else { panic!("{name}") };
        let loss = |mesh: &str, output_router_logits| {
            let experts = read.experts.clone().map(|experts| ExpertsConfig {
                output_router_logits,
                router_aux_loss_coef: 1.0,
                ..experts
            });
            let config = ModelConfig::from(LlamaConfig { experts, ..read.clone() });
            let plan = LanguageModel::plan(&config);
            let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, DType::F64)?;
                model.load(&folder(name))?;
                let ids = model.inference_tape().constant(ids(rank, &plan, config.vocab_size())?);
                model.loss(&ids, &ids).item()
            });
            ranks.unwrap_or_else(|e| panic!("{name} on {mesh}: {e}"))[0]
        };
        for mesh in MESHES.into_iter().chain(EXPERT_MESHES) {
            let found = loss(mesh, true) - loss(mesh, false);
            let expected = expected(name, "balance")[0];
            assert!(
                abs_diff_eq!(found, expected, epsilon = 1e-5),
                "{name} on {mesh}: {found}, not {expected}"
            );
        }
    }
}

/// Zeroes the values at padding positions.
fn without_padding(mut x: Vec<f64>) -> Vec<f64> {
    let width = x.len() / (ROWS * SEQ);
    for (at, row) in x.chunks_exact_mut(width).enumerate() {
        if at % SEQ >= SEQ - 2 * (at / SEQ) {
            row.fill(0.0);
        }
    }
    x
}

/// Returns the gathered outputs of an encoder by name.
fn encoded(name: &str, mesh: &str) -> Vec<(&'static str, Vec<f64>)> {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let (model, plan) = model(rank, &folder(name), DType::F32)?;
        let LanguageModel::Bert(bert) = &*model else { panic!("{name} is an encoder") };
        let vocab = bert.config().vocab_size;
        let tape = model.inference_tape();
        let is_real = |r: usize, t: usize| t < SEQ - 2 * r;
        let ids = tape.constant(ids(rank, &plan, vocab)?);
        let mask = tape.constant(table(rank, &plan, |r, t| usize::from(is_real(r, t)))?);
        let types = tape.constant(table(rank, &plan, |r, t| usize::from(t > 3 + r))?);
        let asked = |r, t| (r + t) % 3 == 0 && is_real(r, t);
        let asked = |r, t| if asked(r, t) { ((t * 11 + r) % vocab) as i64 } else { Bert::IGNORE_INDEX };
        let labels: Vec<i64> = (0..ROWS * SEQ).map(|at| asked(at / SEQ, at % SEQ)).collect();
        let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, SEQ])?;
        let labels = tape.constant(Tensor::from_global(rank, &layout, &labels)?);
        let (mask, types) = (Some(&mask), Some(&types));
        let hidden = bert.hidden_states(&ids, mask, types);
        let mut found = vec![("hidden", without_padding(hidden.tensor().to_f64()?))];
        if bert.head.is_some() {
            found.push(("logits", without_padding(bert.forward(&ids, mask, types).tensor().to_f64()?)));
            found.push(("loss", vec![bert.loss(&ids, &labels, mask, types).item()?]));
        } else {
            found.push(("pooled", bert.pool(&hidden).tensor().to_f64()?));
        }
        Ok(found)
    });
    ranks.unwrap_or_else(|e| panic!("{name} on {mesh}: {e}")).swap_remove(0)
}

#[test]
fn padded_encoder_outputs_match_transformers_on_every_mesh() {
    for name in ENCODERS {
        for mesh in MESHES {
            for (tensor, found) in encoded(name, mesh) {
                let found = distance(&found, &expected(name, tensor));
                assert!(found <= 2e-5, "{name} on {mesh}: {tensor} differs by {found:e} of its scale");
            }
        }
    }
}

/// Legacy BERT files name the weight and bias of a norm gamma and beta.
#[test]
fn encoders_with_legacy_tensor_names_load() {
    for name in ["bert", "bert-untied", "bert-encoder"] {
        let (from, to) = (folder(name), Folder::new(&format!("hf-older-{name}")));
        std::fs::create_dir_all(&to.0).unwrap();
        std::fs::copy(from.join(CONFIG_FILE), to.0.join(CONFIG_FILE)).unwrap();
        let file = TensorFile::open(&from.join(WEIGHTS_FILE)).unwrap();
        let older = |n: &str| {
            n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        };
        let entries: Vec<_> =
            file.tensors().iter().map(|t| (older(&t.name), t.dtype, t.shape.clone())).collect();
        let renamed = file.tensors().iter().filter(|t| older(&t.name) != t.name).count();
        assert!(renamed > 4, "{name}");
        let mut writer = TensorWriter::create(&to.0.join(WEIGHTS_FILE), &entries).unwrap();
        for (tensor, (older, ..)) in file.tensors().iter().zip(&entries) {
            writer.append(older, &file.read(&tensor.name).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let (new, old) = (model(rank, &from, DType::F32)?.0, model(rank, &to.0, DType::F32)?.0);
            for (a, b) in new.params().iter().zip(old.params()) {
                assert!(a.tensor().to_bytes()? == b.tensor().to_bytes()?, "{name}: {}", a.name());
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Without a mask another attention kernel runs.
#[test]
fn attention_mask_of_ones_changes_nothing() {
    World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        let (model, plan) = model(rank, &folder("bert"), DType::F32)?;
        let LanguageModel::Bert(bert) = &*model else { panic!("an encoder") };
        let ids = model.inference_tape().constant(ids(rank, &plan, bert.config().vocab_size)?);
        let ones = ids.constant(table(rank, &plan, |_, _| 1)?);
        let none = ids.constant(table(rank, &plan, |_, _| 0)?);
        let plain = bert.forward(&ids, None, None).tensor().to_f64()?;
        let masked = bert.forward(&ids, Some(&ones), Some(&none)).tensor().to_f64()?;
        assert!(distance(&plain, &masked) < 1e-6);
        Ok(())
    })
    .unwrap();
}

/// Saved folders have the same tensors and config.json fields as the loaded ones, except legacy names of rope_theta and dtype.
#[test]
fn model_folders_round_trip() {
    for name in NAMES.into_iter().chain(ENCODERS) {
        let (from, to) = (folder(name), Folder::new(&format!("hf-saved-{name}")));
        let dtype = ModelConfig::read(&from).unwrap().dtype();
        World::run(Mesh::parse("dp=2,tp=2").unwrap(), |rank| model(rank, &from, dtype)?.0.save(&to.0))
            .unwrap();
        let [before, after] = [&from, &to.0].map(|dir| TensorFile::open(&dir.join(WEIGHTS_FILE)).unwrap());
        // An untied head has its own bias; the other bias is unused.
        let unused = |tensor: &str| name == "bert-untied" && tensor == "cls.predictions.bias";
        let read: Vec<_> = before.tensors().iter().filter(|t| !unused(&t.name)).collect();
        assert_eq!(read.len(), after.tensors().len(), "{name}");
        for tensor in read {
            let found = after.find(&tensor.name).unwrap();
            assert_eq!((&found.shape, found.dtype), (&tensor.shape, tensor.dtype), "{name} {}", tensor.name);
            assert!(
                before.read(&tensor.name).unwrap() == after.read(&tensor.name).unwrap(),
                "{name}: {} has other bytes",
                tensor.name
            );
        }
        let [read, written] = [&from, &to.0].map(|dir| -> serde_json::Value {
            serde_json::from_str(&std::fs::read_to_string(dir.join(CONFIG_FILE)).unwrap()).unwrap()
        });
        if name.starts_with("gpt2") {
            continue;
        }
        for (field, value) in read.as_object().unwrap() {
            match field.as_str() {
                "dtype" => assert_eq!(&written["torch_dtype"], value),
                "rope_parameters" => assert_eq!(written["rope_theta"], value["rope_theta"]),
                _ => assert_eq!(&written[field], value, "{name}: {field}"),
            }
        }
        assert_eq!(ModelConfig::read(&to.0).unwrap(), ModelConfig::read(&from).unwrap(), "{name}");
    }
}

/// 16-bit files load into f32 and save back unchanged.
#[test]
fn half_precision_files_round_trip_through_f32() {
    for name in ["gpt2-f16", "llama-bf16"] {
        let (from, to) = (folder(name), Folder::new(&format!("hf-through-{name}")));
        let dtype = ModelConfig::read(&from).unwrap().dtype();
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            model(rank, &from, DType::F32)?.0.save_as(&to.0, 2000, dtype)
        })
        .unwrap();
        assert_eq!(ModelConfig::read(&to.0).unwrap().dtype(), dtype);
        let [before, after] = [&from, &to.0].map(|dir| Weights::open(dir).unwrap());
        assert!(std::fs::read_dir(&to.0).unwrap().count() > 5, "several files");
        for tensor in before.tensors() {
            assert_eq!(after.get(&tensor.name).unwrap().dtype, dtype);
            assert!(
                before.read(&tensor.name).unwrap() == after.read(&tensor.name).unwrap(),
                "{}",
                tensor.name
            );
        }
    }
}

/// Compares losses, gradient norms and weights of a training with an installed transformers.
#[test]
fn training_matches_transformers_if_installed() {
    let python =
        |args: &[&str]| Command::new("python3").args(args).env("PYTHONDONTWRITEBYTECODE", "1").output();
    let probe = "import torch, transformers; assert transformers.__version__ >= '5'";
    if !python(&["-c", probe]).is_ok_and(|found| found.status.success()) {
        let line = b"skipped: python3 has no torch or no transformers; see tests/hf/compare.py\n";
        std::io::stdout().write_all(line).unwrap();
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/compare.py");
    let (script, binary) = (script.display().to_string(), env!("CARGO_BIN_EXE_shardgrad"));
    let done = python(&[&script, "--mesh", "dp=2,tp=2", "--mesh", "tp=3", binary]).unwrap();
    let outputs = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(done.status.success(), "{}\n{}", outputs[0], outputs[1]);
    assert_eq!(outputs[0].lines().count(), 2 * (NAMES.len() + ENCODERS.len() - 1), "{}", outputs[0]);
}
