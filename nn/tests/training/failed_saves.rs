//! Failing saves: the folder keeps the config and the weights of the model that it had before; sidecar files change
//! with the model.

use crate::save_and_load::Folder;
use crate::support::{Setup, run};
use shardgrad_autograd::Var;
use shardgrad_nn::checkpoint::{
    CONFIG_FILE, INDEX_FILE, SidecarFile, WEIGHTS_FILE, Weights, WeightsWriter, check_replaceable,
};
use shardgrad_nn::{
    Init, LanguageModel, Linear, Llama, LlamaConfig, LlamaKind, Model, ModelConfig, Param, Plan, RmsNorm,
    Sgd, Trainer, TrainerConfig, module,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Contents of the files of a folder.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

fn saved(name: &str) -> (Folder, BTreeMap<String, Vec<u8>>) {
    let folder = Folder::new(name);
    run("", |rank| Setup::new().model(rank)?.save(&folder.0));
    let before = files(&folder.0);
    (folder, before)
}

/// Saves a model of another family over the folder; with copies of a parameter that differ, if `differ`.
fn overwritten(mesh: &str, dir: &Path, bytes_max: u64, differ: bool) -> Result<(), Error> {
    let config = ModelConfig::Llama(LlamaConfig::new(LlamaKind::Llama, 11, 8, [12, 24], 2, [2, 1]));
    World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let model = Model::new(rank, LanguageModel::new(&config), &LanguageModel::plan(&config), 1)?;
        if differ {
            let norm = model.param("model.norm.weight")?;
            let own = vec![1.0 + rank.index() as f32; 12];
            norm.set_tensor(Tensor::from_local(rank, &norm.layout(), &own)?)?;
        }
        model.save_in_files(dir, bytes_max)
    })
    .map(drop)
}

#[test]
fn save_of_diverged_copies_keeps_old_model() {
    let (folder, before) = saved("differ");
    let error = overwritten("tp=2", &folder.0, u64::MAX, true).unwrap_err();
    assert_eq!(error.kind(), Kind::Diverged, "{error}");
    assert!(files(&folder.0) == before, "config and weights are unchanged");
    let nowhere = folder.0.join("new");
    assert_eq!(overwritten("tp=2", &nowhere, u64::MAX, true).unwrap_err().kind(), Kind::Diverged);
    assert!(!nowhere.exists(), "no folder is made for nothing");
}

#[test]
fn save_to_full_disk_keeps_old_model() {
    let (folder, before) = saved("full");
    for (bytes_max, blocked) in [(u64::MAX, WEIGHTS_FILE), (3000, INDEX_FILE)] {
        let blocked = folder.0.join(format!("{blocked}.tmp-{}", std::process::id()));
        fs::create_dir(&blocked).unwrap();
        let error = overwritten("dp=2", &folder.0, bytes_max, false).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert!(files(&folder.0) == before, "config and weights are unchanged");
        fs::remove_dir(&blocked).unwrap();
    }
    run("tp=2", |rank| {
        let ModelConfig::Gpt2(config) = ModelConfig::read(&folder.0)? else { panic!("a GPT-2") };
        let module = shardgrad_nn::Gpt2::new(&config);
        Model::with_dtype(rank, module, &Setup::new().plan, 0, DType::F64)?.load(&folder.0)
    });
    overwritten("dp=2", &folder.0, 3000, false).unwrap();
    assert!(matches!(ModelConfig::read(&folder.0).unwrap(), ModelConfig::Llama(_)));
    let files_left = files(&folder.0);
    assert!(
        !files_left.contains_key(WEIGHTS_FILE) && files_left.keys().all(|n| !n.contains("tmp")),
        "{:?}",
        files_left.keys()
    );
}

#[test]
fn save_that_would_overflow_keeps_old_model() {
    let (folder, before) = saved("rounded");
    let save = |mesh: &str, number: f64, dtype: DType| {
        let all = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let model = Setup::new().model(rank)?;
            let param = model.param("h.1.mlp.c_proj.weight")?;
            let layout = param.layout();
            let mut data = param.tensor().to_f64()?;
            *data.last_mut().unwrap() = number;
            param.set_tensor(Tensor::from_global(rank, &layout, &data)?)?;
            model.save_as(&folder.0, u64::MAX, dtype)?;
            model.non_finite_params()
        });
        all.map(|mut all| all.swap_remove(0))
    };
    for (mesh, number, dtype) in [
        ("", 7e4, DType::F16),
        ("dp=2", -7e4, DType::F16),
        ("tp=3", 1e39, DType::F32),
        ("pp=2", 1e39, DType::BF16),
    ] {
        let error = save(mesh, number, dtype).unwrap_err();
        let expected =
            format!("contain numbers that overflow {dtype}, beginning with `h.1.mlp.c_proj.weight`");
        assert!(error.kind() == Kind::NotFinite && error.message().ends_with(&expected), "{mesh}: {error}");
        // No other dtype has the range of f64, the dtype of the model.
        assert_eq!(error.details()[0].1, "save in the stored dtype (--save-dtype on the command line)");
        assert!(files(&folder.0) == before, "config and weights are unchanged");
    }
    // Numbers that are already infinite, and those that fit, are saved; `non_finite_params` names the parameter.
    for (mesh, number) in [("dp=2", f64::NAN), ("tp=3", f64::INFINITY)] {
        assert_eq!(save(mesh, number, DType::F16).unwrap(), ["h.1.mlp.c_proj.weight"]);
    }
    for (dtype, number) in [(DType::F16, 6.5e4), (DType::F64, 1e300)] {
        assert!(save("tp=3", number, dtype).unwrap().is_empty());
    }
}

/// The name of the first tensor comes late, as if a disk kept rank 0 busy.
#[test]
fn ranks_wait_longer_for_the_disk_of_rank_zero() {
    let folder = Folder::new("slow-disk");
    let saved = World::new(Mesh::parse("tp=3").unwrap()).timeout(Duration::from_secs(1)).launch(|rank| {
        let model = Setup::new().model(rank)?;
        let name = |name: &str| {
            if rank.index() == 0 && name == "wte.weight" {
                std::thread::sleep(Duration::from_millis(1800));
            }
            name.to_string()
        };
        model.save_weights_as(&folder.0, u64::MAX, DType::F32, &name)
    });
    assert!(saved.is_ok(), "{saved:?}");
    assert!(folder.0.join(WEIGHTS_FILE).is_file());
}

module! {
    /// Two layers, each a stage if there are two.
    struct Pair { up: Linear, down: Linear }
}

/// A folder that cannot be created, files that cannot be created or written, and one that cannot be renamed.
#[test]
fn every_rank_gets_the_write_error_and_training_continues() {
    let plan = Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down"))
        .and(Plan::pipeline_parallel("pp"));
    let temporary = |name: &str| format!("{name}.tmp-{}", std::process::id());
    let [first, second] = [1, 2].map(|i| temporary(&format!("model-0000{i}-of-00004.safetensors")));
    for mesh in ["", "dp=2", "tp=3", "pp=2", "pp=2,tp=2"] {
        for blocked in ["", &first, &second, &temporary(INDEX_FILE)] {
            let (bad, good) = (Folder::new("refused"), Folder::new("accepted"));
            fs::create_dir_all(bad.0.join(blocked)).unwrap();
            let dir = if blocked.is_empty() { Path::new("/proc/none") } else { &bad.0 };
            let world = World::new(Mesh::parse(mesh).unwrap()).timeout(Duration::from_secs(20));
            let errors = world.launch(|rank| {
                let module = Pair { up: Linear::new(4, 6), down: Linear::new(6, 2) };
                let read = |rank: &Rank, _: u64, rows: Range<usize>| {
                    let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows.len(), 4])?;
                    Ok(vec![Tensor::full(rank, &layout, 1.5)?])
                };
                let loss = |m: &Pair, x: &[Var]| m.down.forward(&m.up.forward(&x[0])).square().mean();
                let settings = TrainerConfig::new(4);
                let mut trainer = Trainer::new(rank, module, &plan, Sgd::new(0.1), settings, read, loss)?;
                trainer.step()?;
                let save = |dir| trainer.model().save_weights_as(dir, 1, DType::F32, &str::to_string);
                let refused = save(dir).unwrap_err();
                // The world still works.
                trainer.step()?;
                let save = |dir| trainer.model().save_weights_as(dir, 1, DType::F32, &str::to_string);
                save(&good.0)?;
                Ok(refused)
            });
            let errors = errors.unwrap_or_else(|e| panic!("{mesh}, {blocked:?}: {e}"));
            for error in &errors {
                assert!(
                    error.kind() == Kind::Io && error.message().starts_with("cannot "),
                    "{mesh}: {error}"
                );
                assert_eq!(error.to_string(), errors[0].to_string(), "{mesh}");
                assert_eq!(error.to_string().contains("rank       0 ("), errors.len() > 1, "{mesh}: {error}");
            }
            assert_eq!(files(&good.0).len(), 5, "{mesh}");
        }
    }
}

module! {
    /// A custom model.
    struct Own { up: Linear, norms: Vec<RmsNorm>, scale: Param }
}

impl Own {
    fn new(width: usize) -> Own {
        let scale = Param::new(&[3]).init(Init::Normal(1.0));
        Own { up: Linear::new(5, width), norms: vec![RmsNorm::new(width), RmsNorm::new(width)], scale }
    }
}

#[test]
fn weights_of_custom_model_round_trip() {
    let folder = Folder::new("own");
    let plan = Plan::new().store("up.weight", "tp@1");
    let values =
        |model: &Model<Own>| model.params().iter().map(|p| p.tensor().to_f64()).collect::<Result<Vec<_>>>();
    let saved = run("tp=2", |rank| {
        let model = Model::new(rank, Own::new(7), &plan, 1)?;
        model.save_weights(&folder.0)?;
        values(&model)
    });
    assert!(!folder.0.join(CONFIG_FILE).exists());
    for (mesh, dtype) in [("", DType::F32), ("tp=3", DType::F32), ("tp=2", DType::F64)] {
        let loaded = run(mesh, |rank| {
            let model = Model::with_dtype(rank, Own::new(7), &plan, 2, dtype)?;
            assert_eq!(model.load_weights(&folder.0)?.is_empty(), dtype == DType::F32);
            values(&model)
        });
        assert!(loaded[0] == saved[0], "{mesh}");
    }
    let error = World::run(Mesh::single(), |rank| {
        Model::new(rank, Own::new(8), &plan, 2)?.load_weights(&folder.0).map(drop)
    });
    assert_eq!(error.unwrap_err().kind(), Kind::Checkpoint);
}

/// Windows changed since the config was read are saved, or the save is refused and writes nothing.
#[test]
fn config_without_file_representation_is_refused() {
    let save = |kind, name: &str, windows: Vec<Option<usize>>| {
        let folder = Folder::new(name);
        let mut config = LlamaConfig { windows, ..crate::llama::config(kind) };
        config.extra_fields.insert("sliding_window".to_string(), serde_json::json!(2));
        config.extra_fields.insert("use_sliding_window".to_string(), serde_json::json!(true));
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            Model::new(rank, Llama::new(&config), &Plan::llama(), 1)?.save(&folder.0)
        })
        .map_err(|error| {
            assert!(!folder.0.exists(), "{error}");
            error
        })?;
        let ModelConfig::Llama(read) = ModelConfig::read(&folder.0)? else { panic!("a llama") };
        Ok::<_, Error>([0, 1].map(|layer| read.window(layer)))
    };
    assert_eq!(save(LlamaKind::Mistral, "all", vec![Some(3); 2]).unwrap(), [Some(3); 2]);
    assert_eq!(save(LlamaKind::Mistral, "none", Vec::new()).unwrap(), [None; 2]);
    assert_eq!(save(LlamaKind::Qwen2, "last", vec![None, Some(4)]).unwrap(), [None, Some(4)]);
    assert_eq!(save(LlamaKind::Llama, "llama-none", Vec::new()).unwrap(), [None; 2]);
    for (kind, name, windows) in [
        (LlamaKind::Qwen2, "sizes", vec![Some(4), Some(3)]),
        (LlamaKind::Mistral, "one", vec![Some(4), None]),
        (LlamaKind::Llama, "llama", vec![Some(4); 2]),
    ] {
        let error = save(kind, name, windows).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
        assert_eq!(error.message(), "config.json: cannot represent this model");
        assert!(error.details()[0].1.starts_with("`windows` is [Some(4), "), "{error}");
    }
}

#[test]
fn check_replaceable_refuses_what_a_save_would_refuse() {
    let (folder, _) = saved("replaceable");
    check_replaceable(&folder.0).unwrap();
    std::os::unix::fs::symlink("anywhere", folder.0.join("tokenizer.json")).unwrap();
    check_replaceable(&folder.0).unwrap();
    for name in [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, "model-00001-of-00002.safetensors"] {
        let path = folder.0.join(name);
        let _ = fs::remove_file(&path);
        fs::create_dir(&path).unwrap();
        let error = check_replaceable(&folder.0).unwrap_err();
        assert!(
            error.message().ends_with(&format!("{name}: it is a folder, and saving does not replace it")),
            "{error}"
        );
        fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink(folder.0.join("elsewhere"), &path).unwrap();
        let error = check_replaceable(&folder.0).unwrap_err();
        assert!(
            error.message().ends_with(&format!("{name}: it is a symlink, and saving does not replace it")),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
    }
}

/// Nothing of the claimed size is allocated: the largest here would take thousands of terabytes.
#[test]
fn config_of_larger_model_than_weights_is_refused_on_read() {
    let (folder, _) = saved("claims");
    let path = folder.0.join(CONFIG_FILE);
    let text = fs::read_to_string(&path).unwrap();
    for (field, value, expected) in [
        ("n_layer", "2", "`n_layer` is 4000, but the files have 2 blocks"),
        ("vocab_size", "11", "`vocab_size` is 16777215, but the files have transformer.wte.weight [11, 15]"),
        ("n_positions", "8", "`n_positions` is 16777215, but the files have transformer.wpe.weight [8, 15]"),
        ("n_embd", "15", "`n_embd` is 16777215, but the files have transformer.wte.weight [11, 15]"),
    ] {
        let claim = if field == "n_layer" { "4000" } else { "16777215" };
        let (from, to) = (format!("\"{field}\": {value}"), format!("\"{field}\": {claim}"));
        assert!(text.contains(&from), "{text}");
        fs::write(&path, text.replacen(&from, &to, 1)).unwrap();
        let error = ModelConfig::read(&folder.0).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        assert!(error.message().contains(CONFIG_FILE), "{error}");
        assert_eq!(error.details()[0], ("field", expected.to_string()));
    }
}

/// Saves a tensor of two bytes with sidecar files; the save stops at a file that is removed before it is renamed.
fn save_with_sidecar_files(
    dir: &Path,
    byte: u8,
    companions: &[SidecarFile<'_>],
    taken: Option<&str>,
) -> Result<()> {
    let entries = [("t".to_string(), DType::U8, vec![2])];
    let mut writer = WeightsWriter::create(dir, Some("{}"), &entries, 100)?.with_sidecars(companions)?;
    writer.append("t", &[byte; 2])?;
    if let Some(name) = taken {
        fs::remove_file(dir.join(format!("{name}.tmp-{}", std::process::id()))).unwrap();
    }
    writer.finish()
}

#[test]
fn sidecar_files_are_replaced_with_the_model() {
    let (folder, from) = (Folder::new("sidecars"), Folder::new("sidecar-sources"));
    let dir = &folder.0;
    [dir, &from.0].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
    for name in ["tokenizer.json", "merges.txt"] {
        fs::write(from.0.join(name), format!("{name} of the new")).unwrap();
    }
    let [tokens, merges] =
        ["tokenizer.json", "merges.txt"].map(|name| File::open(from.0.join(name)).unwrap());
    let new = [("tokenizer.json", Some(&tokens)), ("merges.txt", Some(&merges)), ("vocab.txt", None)]
        .map(|(name, file)| SidecarFile { name, file });
    let read = || Weights::open(dir).and_then(|weights| weights.read("t"));

    save_with_sidecar_files(dir, 1, &[], None).unwrap();
    for name in ["tokenizer.json", "vocab.txt", "README.md"] {
        fs::write(dir.join(name), format!("{name} of the old, which is longer")).unwrap();
    }
    let before = files(dir);
    // A sidecar that cannot be copied or replaced leaves everything unchanged.
    let blocked = dir.join(format!("merges.txt.tmp-{}", std::process::id()));
    fs::create_dir(&blocked).unwrap();
    assert_eq!(save_with_sidecar_files(dir, 2, &new, None).unwrap_err().kind(), Kind::Io);
    assert!(files(dir) == before && read().unwrap() == [1, 1]);
    fs::remove_dir(&blocked).unwrap();
    std::os::unix::fs::symlink("README.md", dir.join("merges.txt")).unwrap();
    for error in [new[1].check(dir).unwrap_err(), save_with_sidecar_files(dir, 2, &new, None).unwrap_err()] {
        assert!(
            error.message().ends_with("merges.txt: it is a symlink, and saving does not replace it"),
            "{error}"
        );
    }
    fs::remove_file(dir.join("merges.txt")).unwrap();
    assert!(files(dir) == before && read().unwrap() == [1, 1]);
    // With only some of the files renamed there is no readable model.
    for taken in ["tokenizer.json", "merges.txt"] {
        save_with_sidecar_files(dir, 2, &new, Some(taken)).unwrap_err();
        let error = read().unwrap_err();
        assert!(error.message().contains("contains a save that was interrupted"), "{error}");
        assert!(!files(dir).contains_key(WEIGHTS_FILE));
        save_with_sidecar_files(dir, 1, &[], None).unwrap();
        for name in ["tokenizer.json", "vocab.txt"] {
            fs::write(dir.join(name), &before[name]).unwrap();
        }
    }
    fs::write(dir.join("merges.txt.tmp-4294967295"), "half").unwrap();
    save_with_sidecar_files(dir, 3, &new, None).unwrap();
    assert_eq!(read().unwrap(), [3, 3]);
    let found = files(dir);
    assert!(found.keys().eq(["README.md", CONFIG_FILE, "merges.txt", WEIGHTS_FILE, "tokenizer.json"]));
    assert!(["tokenizer.json", "merges.txt"].iter().all(|name| found[*name].ends_with(b" of the new")));
    // Unchanged sidecars keep the replacement atomic.
    let error = save_with_sidecar_files(dir, 4, &new, Some(WEIGHTS_FILE)).unwrap_err();
    assert!(error.to_string().contains("the old model is unchanged"), "{error}");
    assert_eq!((read().unwrap(), files(dir)), (vec![3, 3], found));
    save_with_sidecar_files(dir, 5, &new.map(|one| SidecarFile { file: None, ..one }), None).unwrap();
    assert!(files(dir).keys().eq(["README.md", CONFIG_FILE, WEIGHTS_FILE]));
}
