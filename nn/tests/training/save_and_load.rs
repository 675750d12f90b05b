//! Model folders: saved on one mesh, loaded on another.

use crate::llama;
use crate::support::{Setup, config, run};
use shardgrad_nn::checkpoint::{TensorFile, TensorWriter, Weights};
use shardgrad_nn::{
    CastRule, Gpt2, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, Model, ModelConfig, Module, Plan,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Result, World};
use std::path::{Path, PathBuf};

/// Temporary folder of one test, removed when dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("shardgrad-folders-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Folder(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn weights<M: Module>(model: &Model<M>) -> Result<Vec<Vec<f64>>> {
    model.params().iter().map(|p| p.tensor().to_f64()).collect()
}

/// Saves a model from a mesh.
fn save(mesh: &str, config: &ModelConfig, dir: &Path) -> Vec<Vec<f64>> {
    run(mesh, |rank| {
        let plan = LanguageModel::plan(config);
        let model = Model::with_dtype(rank, LanguageModel::new(config), &plan, 5, DType::F64)?;
        model.save(dir)?;
        // Complete when any rank returns: a rank other than the writer may read it now.
        assert_eq!(Weights::open(dir)?.tensors().count(), model.params().len());
        weights(&model)
    })
    .swap_remove(0)
}

/// Loads into a model that was initialized from another seed.
fn load(mesh: &str, dir: &Path, dtype: DType) -> Result<Vec<Vec<f64>>> {
    load_as(mesh, dir, dtype, CastRule::Widen)
}

fn load_as(mesh: &str, dir: &Path, dtype: DType, cast: CastRule) -> Result<Vec<Vec<f64>>> {
    let loaded = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let config = ModelConfig::read(dir)?;
        let plan = LanguageModel::plan(&config);
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 99, dtype)?;
        model.load_as(dir, cast)?;
        weights(&model)
    })?;
    Ok(loaded.into_iter().next().unwrap())
}

#[test]
fn model_saved_on_one_mesh_loads_on_another() {
    let tied = config();
    let untied = Gpt2Config { tie_word_embeddings: false, ..tied.clone() };
    let llama = LlamaConfig { dtype: DType::F64, ..llama::config(LlamaKind::Llama) };
    let in_f64 = |config: &Gpt2Config| Gpt2Config { dtype: DType::F64, ..config.clone() };
    for (name, config) in [
        ("tied", in_f64(&tied).into()),
        ("untied", in_f64(&untied).into()),
        ("llama", ModelConfig::from(llama)),
    ] {
        let folder = Folder::new(name);
        // Two groups of heads of the Llama over three ranks.
        let saved = save("tp=3", &config, &folder.0);
        for mesh in ["dp=2", "", "tp=2", "dp=2,tp=2"] {
            assert!(load(mesh, &folder.0, DType::F64).unwrap() == saved, "{name} on {mesh}");
        }
        let rounded: Vec<Vec<f64>> =
            saved.iter().map(|p| p.iter().map(|x| f64::from(*x as f32)).collect()).collect();
        assert!(load_as("tp=2", &folder.0, DType::F32, CastRule::Round).unwrap() == rounded);
        assert_eq!(ModelConfig::read(&folder.0).unwrap(), config);
        let file = TensorFile::open(&folder.0.join("model.safetensors")).unwrap();
        let (weight, shape) = match config {
            ModelConfig::Gpt2(_) => ("transformer.h.0.attn.c_attn.weight", [15, 45]),
            _ => ("model.layers.0.self_attn.q_proj.weight", [16, 10]),
        };
        let info = file.find(weight).unwrap();
        assert_eq!((info.dtype, info.shape.as_slice()), (DType::F64, &shape[..]));
        assert_eq!(file.get("lm_head.weight").is_some(), name != "tied");
    }
}

#[test]
fn large_models_are_saved_as_sharded_files() {
    let (folder, setup) = (Folder::new("several"), Setup::new());
    let saved = run("dp=2,tp=2", |rank| {
        let model = setup.model(rank)?;
        model.save_in_files(&folder.0, 5000)?;
        weights(&model)
    })
    .swap_remove(0);
    assert!(!folder.0.join("model.safetensors").exists());
    let sizes: Vec<u64> = std::fs::read_dir(&folder.0)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
        .map(|e| e.metadata().unwrap().len())
        .collect();
    // The weight of the MLP, 900 numbers in f64, exceeds the largest file.
    assert!(sizes.len() > 5 && sizes.iter().all(|n| *n < 5000 + 3000), "{sizes:?}");
    assert!(load("tp=3", &folder.0, DType::F64).unwrap() == saved);
}

/// Copies the weights of a folder with a changed list of tensors.
fn rewritten(from: &Path, to: &Path, change: impl Fn(&mut Vec<(String, DType, Vec<usize>, Vec<u8>)>)) {
    let file = TensorFile::open(&from.join("model.safetensors")).unwrap();
    let entry = |t: &shardgrad_nn::checkpoint::TensorInfo| {
        (t.name.clone(), t.dtype, t.shape.clone(), file.read(&t.name).unwrap())
    };
    let mut tensors: Vec<_> = file.tensors().iter().map(entry).collect();
    change(&mut tensors);
    std::fs::create_dir_all(to).unwrap();
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let list: Vec<_> = tensors.iter().map(|(n, d, s, _)| (n.clone(), *d, s.clone())).collect();
    let mut writer = TensorWriter::create(&to.join("model.safetensors"), &list).unwrap();
    tensors.iter().for_each(|(name, .., bytes)| writer.append(name, bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn names_without_prefix_and_legacy_buffers_are_loaded() {
    let (folder, other) = (Folder::new("old"), Folder::new("old-names"));
    let saved = save("", &config().into(), &folder.0);
    rewritten(&folder.0, &other.0, |tensors| {
        for t in tensors.iter_mut() {
            t.0 = t.0.strip_prefix("transformer.").unwrap().to_string();
        }
        tensors.push(("h.0.attn.bias".into(), DType::U8, vec![4], vec![1; 4]));
        tensors.push(("h.1.attn.masked_bias".into(), DType::F32, vec![1], vec![0; 4]));
        tensors.push(("lm_head.weight".into(), DType::F32, vec![1], vec![0; 4]));
        tensors.reverse();
    });
    assert!(load("tp=2", &other.0, DType::F64).unwrap() == saved);
}

#[test]
fn load_error_lists_all_mismatches() {
    let (folder, other) = (Folder::new("fit"), Folder::new("unfit"));
    save("", &config().into(), &folder.0);
    rewritten(&folder.0, &other.0, |tensors| {
        tensors.retain(|t| !t.0.contains("wpe") && !t.0.contains("h.1.ln_1.bias"));
        let wide = tensors.iter_mut().find(|t| t.0.ends_with("h.0.attn.c_attn.weight")).unwrap();
        wide.2 = vec![45, 15];
        tensors.push(("score.weight".into(), DType::F32, vec![1], vec![0; 4]));
    });
    let error: Error = load("dp=2", &other.0, DType::F64).unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint);
    assert!(error.message().ends_with("4 tensor(s) do not fit the model"), "{error}");
    let detail = |label: &str| error.details().iter().find(|d| d.0 == label).unwrap().1.clone();
    assert_eq!(detail("missing"), "transformer.wpe.weight, transformer.h.1.ln_1.bias");
    assert_eq!(detail("unlike"), "transformer.h.0.attn.c_attn.weight is f64[45, 15], the model has [15, 45]");
    assert_eq!(detail("unknown"), "score.weight");
    run("", |rank| {
        let model = Model::with_dtype(rank, Gpt2::new(&Setup::new().config), &Plan::new(), 5, DType::F64)?;
        let before = weights(&model)?;
        let (weights_there, name) = (Weights::open(&other.0)?, |n: &str| format!("transformer.{n}"));
        assert!(model.load_weights_as(&weights_there, CastRule::Round, &name, &[]).is_err());
        assert!(weights(&model)? == before, "nothing was changed");
        Ok(())
    });
    assert_eq!(load("", Path::new("/nowhere/at/all"), DType::F32).unwrap_err().kind(), Kind::Checkpoint);
}

/// A float of a file is cast to the dtype of its parameter if the cast is exact; otherwise only with
/// `CastRule::Round`, which the returned counts report.
#[test]
fn load_rounds_weights_only_with_cast_rule_round() {
    let (folder, setup) = (Folder::new("narrow"), Setup::new());
    const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
    for file in FLOATS {
        run("tp=2", |rank| setup.model(rank)?.save_as(&folder.0, u64::MAX, file));
        for dtype in FLOATS {
            let wider = file == dtype || dtype == DType::F64 || dtype == DType::F32 && file != DType::F64;
            World::run(Mesh::parse("tp=2").unwrap(), |rank| {
                let ModelConfig::Gpt2(config) = ModelConfig::read(&folder.0)? else { panic!("a GPT-2") };
                let model = Model::with_dtype(rank, Gpt2::new(&config), &Gpt2::plan(&config), 99, dtype)?;
                let (before, count) = (weights(&model)?, model.params().len());
                let casts = |how: &str| match file == dtype {
                    true => String::new(),
                    false => format!("{count} tensors of {file} are {how} to {dtype}"),
                };
                match model.load(&folder.0) {
                    Ok(found) => assert_eq!((wider, found.to_string()), (true, casts("widened"))),
                    Err(error) => {
                        assert!(!wider && weights(&model)? == before, "{file} to {dtype}: {error}");
                        assert_eq!(error.kind(), Kind::Checkpoint);
                        let expected = format!("{count} tensor(s) do not fit the model");
                        assert!(error.message().ends_with(&expected), "{error}");
                        let [(label, named), (_, help)] = error.details() else { panic!("{error}") };
                        let first = format!("transformer.wte.weight is {file}, the parameter {dtype}, ");
                        assert!(*label == "narrower" && named.starts_with(&first), "{error}");
                        assert!(named.ends_with(&format!("and {} more", count - 3)), "{error}");
                        assert!(help.contains("--cast") && help.contains("CastRule::Round"), "{error}");
                        let found = model.load_as(&folder.0, CastRule::Round)?;
                        assert_eq!(found.to_string(), casts("rounded"));
                        assert!(weights(&model)? != before);
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn save_fails_on_all_ranks_if_folder_cannot_be_created() {
    let folder = Folder::new("file");
    std::fs::write(&folder.0, "a file").unwrap();
    let saved = World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        Setup::new().model(rank)?.save(&folder.0.join("below"))
    });
    assert_eq!(saved.unwrap_err().kind(), Kind::Io);
    std::fs::remove_file(&folder.0).unwrap();
}

#[test]
fn load_error_names_only_the_first_of_many_mismatches() {
    let folder = Folder::new("many");
    run("tp=2", |rank| {
        let model = Setup::new().model(rank)?;
        model.save_weights_as(&folder.0, u64::MAX, DType::F64, &|name| format!("other.{name}"))
    });
    let error = World::run(Mesh::single(), |rank| Setup::new().model(rank)?.load_weights(&folder.0));
    let error = error.unwrap_err();
    for (label, first) in [("missing", "wte.weight, "), ("unknown", "other.")] {
        let (_, listed) = error.details().iter().find(|(found, _)| *found == label).unwrap();
        assert_eq!(listed.matches(", ").count(), 20, "{error}");
        assert!(listed.starts_with(first) && listed.ends_with(", and 8 more"), "{error}");
    }
}
