//! Models of `transformers`: folders that it wrote, with the logits that it computed, recorded by `tests/hf/make_fixtures.py`.

use shardgrad::nn::hf::{CONFIG_FILE, TensorFile, WEIGHTS_FILE};
use shardgrad::nn::{Family, LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAMES: [&str; 7] = ["gpt2", "gpt2-untied", "llama", "llama-biased", "mistral", "qwen2", "qwen3"];
const ROWS: usize = 3;
const SEQ: usize = 9;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/hf").join(name)
}

fn model(rank: &Rank, dir: &Path) -> Result<(Model<LanguageModel>, Plan)> {
    let config = ModelConfig::read(dir)?;
    let plan = LanguageModel::plan(&config);
    let model = Model::new(rank, LanguageModel::new(&config), &plan, 0)?;
    model.load(dir)?;
    Ok((model, plan))
}

/// The tokens of the script.
fn ids(rank: &Rank, plan: &Plan, vocab: usize) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, SEQ])?;
    let token = |r: usize, t: usize| ((r * 7 + t * 5 + r * t * 3 + t * t) % vocab) as i64;
    let all: Vec<i64> = (0..ROWS).flat_map(|r| (0..SEQ).map(move |t| token(r, t))).collect();
    Tensor::from_global(rank, &layout, &all)
}

/// Logits of the tokens of the script, `[rows, seq, vocab]`, whole.
fn logits(dir: &Path, mesh: &str) -> Vec<f64> {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let (model, plan) = model(rank, dir)?;
        let ids = ids(rank, &plan, model.describe().vocab_size())?;
        model.forward(&model.inference().constant(ids)).tensor().to_f64()
    });
    ranks.unwrap_or_else(|e| panic!("{} on {mesh}: {e}", dir.display())).swap_remove(0)
}

fn expected(name: &str) -> Vec<f64> {
    let file = TensorFile::open(&folder(name).join("expected.safetensors")).unwrap();
    let bytes = file.read("logits").unwrap();
    bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

/// The largest difference in units of the largest number.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale
}

#[test]
fn logits_are_those_of_transformers_on_every_mesh() {
    for name in NAMES {
        let expected = expected(name);
        for mesh in ["", "tp=2", "dp=2", "dp=2,tp=2", "tp=3"] {
            let found = distance(&logits(&folder(name), mesh), &expected);
            assert!(found <= 2e-5, "{name} on {mesh}: logits differ by {found:e} of their scale");
        }
    }
}

/// What is written can be read by `transformers` as what was read: the same tensors, and the same fields in config.json,
/// but for the older names that theta and dtype have in it.
#[test]
fn folders_are_written_back_as_they_were_read() {
    for name in NAMES {
        let (from, to) = (folder(name), Scratch::new(name));
        World::run(Mesh::parse("dp=2,tp=2").unwrap(), |rank| model(rank, &from)?.0.save(&to.0)).unwrap();
        let [before, after] = [&from, &to.0].map(|dir| TensorFile::open(&dir.join(WEIGHTS_FILE)).unwrap());
        assert_eq!(before.tensors().len(), after.tensors().len(), "{name}");
        for tensor in before.tensors() {
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

/// Losses, gradient norms and weights of a training too, against the transformers that is installed, if one is.
#[test]
fn training_is_that_of_transformers_where_it_is_installed() {
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
    let told = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(done.status.success(), "{}\n{}", told[0], told[1]);
    assert_eq!(told[0].lines().count(), 2 * NAMES.len(), "{}", told[0]);
}

/// A folder for one test, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("shardgrad-hf-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Scratch(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
