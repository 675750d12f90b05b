//! Adapters of a Hugging Face model: installed by pattern, sharded with their layers, trained alone, saved as PEFT saves them.

use crate::llama::config;
use crate::save_and_load::Folder;
use crate::support::{ROWS, batch, max_difference, run, tokens_and_targets, values};
use crate::traces::{counts, traced};
use approx::assert_abs_diff_eq;
use serde_json::{Value as Json, json};
use shardgrad_autograd::Var;
use shardgrad_nn::checkpoint::TensorFile;
use shardgrad_nn::{
    AdamW, Adaptable, Adapter, CastRule, Deterministic, Linear, Llama, LlamaKind, LoadFilter, Lora, Model,
    Module, Optimizer, Param, Plan, Trainer, TrainerConfig, module,
};
use shardgrad_tensor::{DType, Kind, Mesh, Phase, Rank, Record, Result, Tensor, Value as _, World};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

/// The plan that also shards the storage of all parameters over dp.
fn stored_as_shards() -> Plan {
    Plan::llama().store("*", "dp@0|@1|=")
}

/// A Llama with adapters in the query, value and down projections; without changes of its code.
fn adapted(kind: LlamaKind) -> Llama {
    let lora = |layer: &dyn Adaptable| Lora::new(layer, 3).alpha(6.0);
    Llama::new(&config(kind)).adapt("*.q_proj", lora).adapt("*.v_proj", lora).adapt("*.down_proj", lora)
}

fn model(rank: &Rank, plan: &Plan, seed: u64) -> Result<Model<Llama>> {
    Model::with_dtype(rank, adapted(LlamaKind::Llama), plan, seed, DType::F64)
}

/// A folder with the base model.
fn base(name: &str) -> Folder {
    let folder = Folder::new(name);
    run("", |rank| {
        let llama = Llama::new(&config(LlamaKind::Llama));
        Model::with_dtype(rank, llama, &Plan::llama(), 9, DType::F64)?.save(&folder.0)
    });
    folder
}

/// Loads the base model into an adapted one, whose adapters keep their initial values.
fn load_base(model: &Model<Llama>, dir: &Path) -> Result<()> {
    model.load_filtered(dir, CastRule::Widen, &LoadFilter::new().may_lack("*.lora_*")).map(drop)
}

fn loss_of(model: &Model<Llama>, plan: &Plan) -> Result<Var> {
    let tape = model.tape();
    let ids = tape.constant(batch(model.rank(), plan, 0..ROWS, 0)?);
    Ok(model.loss(&ids, &tape.constant(batch(model.rank(), plan, 0..ROWS, 1)?)))
}

/// Losses of three steps of training the adapters, and the adapters after them.
fn fine_tuned(
    mesh: &str,
    plan: &Plan,
    recompute: bool,
    base: &Path,
    out: Option<&Path>,
) -> (Vec<f64>, Vec<f64>) {
    run(mesh, |rank| {
        let llama = adapted(LlamaKind::Llama).recompute(recompute);
        let model = Model::with_dtype(rank, llama, plan, 5, DType::F64)?;
        load_base(&model, base)?;
        assert_eq!(model.freeze_all_but("*.lora_*")?, 2 * 3 * 2);
        let mut optim = AdamW::new(0.02);
        let mut losses = Vec::new();
        for _ in 0..3 {
            let loss = loss_of(&model, plan)?;
            losses.push(loss.tensor().item()?);
            loss.backward()?;
            optim.update(&model, loss.tape().gradients())?;
        }
        for param in model.params() {
            let is_adapter = param.name().contains(".lora_");
            assert_eq!(optim.state(param).is_some(), is_adapter, "{}", param.name());
        }
        if let Some(out) = out {
            model.save_adapters(out)?;
        }
        let mut trained = Vec::new();
        for param in model.params().iter().filter(|p| !p.is_frozen()) {
            trained.extend(param.tensor().to_f64()?);
        }
        Ok((losses, trained))
    })
    .swap_remove(0)
}

#[test]
fn adapters_of_a_loaded_model_train_alike_on_every_mesh() {
    let folder = base("lora-base");
    let out = Folder::new("lora-out");
    let alone = fine_tuned("", &Plan::llama(), false, &folder.0, Some(&out.0));
    assert!(alone.0[2] < alone.0[0] - 1e-3, "{:?}", alone.0);
    let meshes = [
        ("tp=2", Plan::llama(), false),
        ("dp=2,tp=2", Plan::llama(), true),
        ("tp=3", Plan::llama(), false),
        ("dp=2", stored_as_shards(), false),
        ("dp=2,tp=2", stored_as_shards(), true),
    ];
    for (mesh, plan, recompute) in meshes {
        let many = fine_tuned(mesh, &plan, recompute, &folder.0, None);
        assert!(max_difference(&many.0, &alone.0) < 1e-10, "{mesh}: {:?} {:?}", many.0, alone.0);
        assert!(max_difference(&many.1, &alone.1) < 1e-8, "{mesh}");
    }
    // The saved adapters, in a model of another seed on another mesh.
    for mesh in ["", "tp=2"] {
        let loaded = run(mesh, |rank| {
            let model = model(rank, &Plan::llama(), 77)?;
            load_base(&model, &folder.0)?;
            model.load_adapters(&out.0)?;
            let mut values = Vec::new();
            for param in model.params().iter().filter(|p| p.name().contains(".lora_")) {
                values.extend(param.tensor().to_f64()?);
            }
            Ok(values)
        });
        assert_eq!(loaded[0], alone.1, "{mesh}");
    }
}

#[test]
fn adapters_train_and_are_saved_in_pipeline_stages() {
    let (folder, plan) = (base("lora-stages"), Plan::llama());
    let train = |mesh: &str, deterministic: Deterministic| {
        let out = Folder::new(&format!("lora-{mesh}"));
        let losses = run(mesh, |rank| {
            let settings = TrainerConfig {
                dtype: DType::F64,
                microbatches: 2,
                deterministic,
                ..TrainerConfig::new(ROWS)
            };
            let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, 0);
            let loss = |model: &Llama, x: &[Var]| model.loss(&x[0], &x[1]);
            let llama = adapted(LlamaKind::Llama);
            let mut trainer = Trainer::new(rank, llama, &plan, AdamW::new(0.02), settings, read, loss)?;
            load_base(trainer.model(), &folder.0)?;
            trainer.model().freeze_all_but("*.lora_*")?;
            let losses: Vec<f64> = (0..3).map(|_| Ok(trainer.step()?.loss)).collect::<Result<_>>()?;
            trainer.model().save_adapters(&out.0)?;
            Ok(losses)
        });
        let file = TensorFile::open(&out.0.join("adapter_model.safetensors")).unwrap();
        let saved: Vec<Vec<u8>> = file.tensors().iter().map(|t| file.read(&t.name).unwrap()).collect();
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap());
        let saved: Vec<f64> = saved.concat().chunks(8).map(number).collect();
        (losses[0].clone(), saved)
    };
    let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let canonical = Deterministic::Mesh { batch_leaves: ROWS, sum_leaves: 8 };
    let [alone, staged] = ["", "pp=2"].map(|mesh| train(mesh, canonical));
    assert_eq!(bits(&staged.0), bits(&alone.0), "losses on one rank: {:?}", alone.0);
    assert!(bits(&staged.1) == bits(&alone.1), "adapters have other bits than on one rank");
    // To rounding: canonical sums refuse the partial sum of the layer and of its adapter, of which tensor parallelism shards the layer.
    let [alone, staged] = ["", "pp=2,tp=2"].map(|mesh| train(mesh, Deterministic::Run));
    assert!(max_difference(&staged.0, &alone.0) < 1e-10, "{:?} {:?}", staged.0, alone.0);
    assert!(max_difference(&staged.1, &alone.1) < 1e-8);
}

#[test]
fn an_adapter_adds_its_low_rank_product_times_alpha_over_rank() {
    run("", |rank| {
        let layers = vec![Linear::new(2, 3)].adapt("0", |layer| Lora::new(layer, 2).alpha(6.0));
        let model = Model::with_dtype(rank, layers, &Plan::new(), 1, DType::F64)?;
        let set = |name: &str, values: &[f64]| -> Result<()> {
            let param = model.param(name)?;
            param.set_tensor(Tensor::from_host(rank, param.shape(), values)?)
        };
        set("0.weight", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
        set("0.bias", &[0.5, 0.0, -0.5])?;
        set("0.lora_A.weight", &[1.0, 0.0, -1.0, 2.0])?;
        set("0.lora_B.weight", &[1.0, 0.0, 2.0, 0.0, 1.0, 1.0])?;
        let x = model.inference_tape().constant(Tensor::from_host(rank, &[1, 2], &[1.0f64, 2.0])?);
        // x w + b = [9.5, 12, 14.5]; x a = [-1, 4]; x a b = [-1, 4, 2], times 3.
        assert_eq!(model[0].forward(&x).tensor().to_f64()?, [6.5, 24.0, 20.5]);
        Ok(())
    });
}

#[test]
fn an_adapted_model_starts_as_its_base() {
    let folder = base("lora-start");
    let loss = |adapters: bool| {
        run("", |rank| {
            let plan = Plan::llama();
            if adapters {
                let model = model(rank, &plan, 5)?;
                load_base(&model, &folder.0)?;
                return loss_of(&model, &plan)?.tensor().item();
            }
            let model = Model::with_dtype(rank, Llama::new(&config(LlamaKind::Llama)), &plan, 5, DType::F64)?;
            model.load(&folder.0)?;
            loss_of(&model, &plan)?.tensor().item()
        })[0]
    };
    assert_abs_diff_eq!(loss(true), loss(false), epsilon = 1e-12);
}

#[test]
fn adapters_are_sharded_with_their_layers_and_add_no_collective_forward() {
    run("dp=2,tp=2", |rank| {
        let model = model(rank, &stored_as_shards(), 1)?;
        let layouts = |name: &str| -> Result<[String; 2]> {
            let param = model.param(&format!("model.layers.0.{name}"))?;
            let computed = param.compute_layout().unwrap_or_else(|| param.layout());
            Ok([param.layout().to_string(), computed.to_string()])
        };
        // Column parallel: a is a replica that each rank uses for its own heads. Row parallel: a is split as x is.
        assert_eq!(
            layouts("self_attn.q_proj.weight")?,
            ["f64[10@dp, 2@tp, 2, 4]", "f64[10, 2@tp, 2, 4] ~dp"]
        );
        assert_eq!(layouts("self_attn.q_proj.lora_A.weight")?, ["f64[10@dp, 3]", "f64[10, 3] ~dp ~tp"]);
        assert_eq!(
            layouts("self_attn.q_proj.lora_B.weight")?,
            ["f64[3@dp, 2@tp, 2, 4]", "f64[3, 2@tp, 2, 4] ~dp"]
        );
        assert_eq!(layouts("mlp.down_proj.lora_A.weight")?, ["f64[7@tp@dp, 3]", "f64[7@tp, 3] ~dp"]);
        assert_eq!(layouts("mlp.down_proj.lora_B.weight")?, ["f64[3@dp, 10]", "f64[3, 10] ~dp ~tp"]);
        Ok(())
    });
    let forward = |adapters: bool| {
        run("tp=2", |rank| {
            let plan = Plan::llama();
            let llama =
                if adapters { adapted(LlamaKind::Llama) } else { Llama::new(&config(LlamaKind::Llama)) };
            let model = Model::with_dtype(rank, llama, &plan, 1, DType::F64)?;
            let mut records = traced(rank, || loss_of(&model, &plan).map(drop))?;
            records.retain(|r| r.phase == Phase::Forward);
            Ok(counts(&records))
        })
        .swap_remove(0)
    };
    assert_eq!(forward(true), forward(false));
}

#[test]
fn frozen_weights_cost_no_gradient_and_no_arithmetic() {
    let step = |all: bool| {
        let run_step = |rank: &Rank| {
            let plan = Plan::llama();
            let model = model(rank, &plan, 1)?;
            if !all {
                model.freeze_all_but("*.lora_*")?;
            }
            let before = rank.backend().cost().flops;
            let loss = loss_of(&model, &plan)?;
            let forward = rank.backend().cost().flops - before;
            loss.backward()?;
            let gradients = values(&model, &loss.tape().gradients())?;
            let backward = rank.backend().cost().flops - before - forward;
            Ok((gradients.into_keys().collect::<Vec<_>>(), backward as f64 / forward as f64))
        };
        World::run(Mesh::single(), run_step).unwrap().swap_remove(0)
    };
    let ((every, full), (few, part)) = (step(true), step(false));
    assert!(every.len() > 20 && few.len() == 12 && few.iter().all(|name| name.contains(".lora_")), "{few:?}");
    assert!(full - part > 0.5, "backward over forward: {full}, of adapters alone {part}");
}

/// The files of the lines that the collectives of one step name, of the calls that move an adapter's parameters and of all others.
fn files_of_calls(mesh: &str, step: impl Fn(&Rank) -> Result<Var> + Sync) -> [BTreeSet<String>; 2] {
    let records = run(mesh, |rank| {
        traced(rank, || {
            let loss = step(rank)?;
            loss.backward()?;
            drop(loss.tape().gradients());
            Ok(())
        })
    })
    .swap_remove(0);
    [true, false].map(|of_adapters| {
        let has_adapter = |r: &&Record| r.members().any(|name| name.contains(".lora_"));
        let records = records.iter().filter(|r| r.phase != Phase::Control && has_adapter(r) == of_adapters);
        records.map(|r| r.site.file().rsplit('/').next().unwrap_or_default().to_string()).collect()
    })
}

#[test]
fn collectives_of_adapters_name_the_line_that_applied_the_layer() {
    for (mesh, plan) in [("tp=2", Plan::llama()), ("dp=2,tp=2", stored_as_shards())] {
        let [of_adapters, others] = files_of_calls(mesh, |rank| loss_of(&model(rank, &plan, 1)?, &plan));
        assert!(!of_adapters.is_empty() && !others.is_empty(), "{mesh}");
        for file in of_adapters.union(&others) {
            assert!(["llama.rs", "adapters.rs"].contains(&file.as_str()), "{mesh}: {file}");
        }
    }
    let plan = Plan::tensor_parallel("tp").column_parallel("0").row_parallel("1");
    let [of_adapters, _] = files_of_calls("tp=2", |rank| {
        let layers = vec![Linear::new(4, 2), Linear::new(2, 2)].adapt("*", |layer| Lora::new(layer, 2));
        let model = Model::new(rank, layers, &plan, 1)?;
        let x = model.tape().constant(Tensor::from_host(rank, &[1, 4], &[1.0f32; 4])?);
        Ok(model[1].forward(&model[0].forward(&x)).square().sum())
    });
    assert_eq!(of_adapters.into_iter().collect::<Vec<_>>(), ["adapters.rs"]);
}

module! {
    /// An adapter whose config has no rank and no alpha.
    struct Rescaling { factors: Param }
}

impl Adapter for Rescaling {
    fn forward(&self, _: &Var) -> Var {
        unreachable!("the test loads only")
    }

    fn peft_config(&self) -> Option<Vec<(&'static str, Json)>> {
        Some(vec![("peft_type", json!("LORA"))])
    }
}

#[test]
fn saved_adapters_have_the_names_and_the_config_of_peft() {
    let out = Folder::new("lora-peft");
    run("tp=2", |rank| model(rank, &Plan::llama(), 5)?.save_adapters(&out.0));
    let file = TensorFile::open(&out.0.join("adapter_model.safetensors")).unwrap();
    let layer = "base_model.model.model.layers.1";
    for (name, shape) in [
        ("self_attn.q_proj.lora_A.weight", [3, 10]),
        ("self_attn.q_proj.lora_B.weight", [16, 3]),
        ("self_attn.v_proj.lora_B.weight", [8, 3]),
        ("mlp.down_proj.lora_A.weight", [3, 7]),
    ] {
        assert_eq!(file.find(&format!("{layer}.{name}")).unwrap().shape, shape, "{name}");
    }
    assert_eq!(file.tensors().len(), 2 * 3 * 2);
    let config: Json =
        serde_json::from_str(&std::fs::read_to_string(out.0.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["peft_type"], &config["r"]), (&json!("LORA"), &json!(3)));
    assert_eq!(config["target_modules"], json!(["down_proj", "q_proj", "v_proj"]));
    assert_eq!(config["lora_alpha"].as_f64(), Some(6.0));
    let refused = World::run(Mesh::single(), |rank| {
        let other = Llama::new(&crate::llama::config(LlamaKind::Llama))
            .adapt("*.q_proj", |layer| Lora::new(layer, 2));
        Model::new(rank, other, &Plan::llama(), 1)?.load_adapters(&out.0)
    })
    .unwrap_err();
    assert_eq!(refused.kind(), Kind::Checkpoint);
    assert!(refused.message().ends_with("`r` of the adapters is 3, the model has 2"), "{refused}");
    let refused = World::run(Mesh::single(), |rank| {
        let other = Llama::new(&crate::llama::config(LlamaKind::Llama))
            .adapt("*.q_proj", |_| Rescaling { factors: Param::new(&[1]) });
        Model::new(rank, other, &Plan::llama(), 1)?.load_adapters(&out.0)
    })
    .unwrap_err();
    assert!(refused.message().ends_with("`r` of the adapters is 3, the model has null"), "{refused}");
}

#[test]
fn misuse_of_adapters_is_an_error() {
    let refused = |f: &(dyn Fn(&Rank) -> Result<()> + Sync)| World::run(Mesh::single(), f).unwrap_err();
    let layers = || vec![Linear::new(4, 2), Linear::new(2, 2)];
    let lora = |layer: &dyn Adaptable| Lora::new(layer, 2);
    let unmatched = refused(&|_| {
        let _ = layers().adapt("3", lora);
        Ok(())
    });
    assert_eq!(unmatched.message(), "no layer of the model that takes an adapter matches `3`");
    assert!(unmatched.to_string().contains("nearest") && unmatched.kind() == Kind::Config, "{unmatched}");
    let twice = refused(&|_| {
        let _ = layers().adapt("*", lora).adapt("1", lora);
        Ok(())
    });
    assert_eq!(twice.message(), "layer `1` already has an adapter");
    let stale = refused(&|rank| {
        let mut layers = layers().adapt("0", lora);
        let first = layers.remove(0).init(shardgrad_nn::Init::Ones);
        Model::new(rank, vec![first], &Plan::new(), 1).map(drop)
    });
    assert_eq!(
        stale.message(),
        "parameter `0.lora_A.weight` is sharded like a parameter that the model does not have"
    );
    let within = refused(&|rank| {
        let layers = vec![Linear::new(4, 2)].adapt("0", |layer| Lora::new(layer, 2).dropout(0.5));
        let model = Model::new(rank, layers, &Plan::new(), 1)?;
        let x = model.tape().constant(Tensor::from_host(rank, &[1, 4], &[1.0f32; 4])?);
        let _ = model[0].forward(&x);
        Ok(())
    });
    assert!(within.message().starts_with("dropout layer `0.lora_dropout`"), "{within}");
    assert!(within.site().is_some_and(|site| site.file().ends_with("training/adapters.rs")), "{within}");
    assert!(!within.to_string().contains("layer/"), "{within}");
    let folder = base("lora-misuse");
    let load = |filter: LoadFilter| {
        World::run(Mesh::single(), |rank| {
            model(rank, &Plan::llama(), 1)?.load_filtered(&folder.0, CastRule::Widen, &filter).map(drop)
        })
    };
    let missing = load(LoadFilter::new()).unwrap_err();
    assert!(missing.kind() == Kind::Checkpoint && missing.to_string().contains("lora_A.weight"), "{missing}");
    let idle = load(LoadFilter::new().may_lack("*.lora_*").leave_out("lm_haed.*")).unwrap_err();
    assert_eq!(idle.message(), "the pattern `lm_haed.*` of the load filter matches nothing");
}

#[test]
fn a_filter_leaves_parameters_out_of_a_load() {
    let folder = base("lora-filter");
    let norms = |filter: Option<LoadFilter>| {
        run("", |rank| {
            let llama = Llama::new(&config(LlamaKind::Llama));
            let model = Model::with_dtype(rank, llama, &Plan::llama(), 5, DType::F64)?;
            if let Some(filter) = filter.clone() {
                model.load_filtered(&folder.0, CastRule::Widen, &filter)?;
            }
            let value = |name: &str| model.param(name).map(Param::tensor)?.to_f64();
            Ok([value("model.layers.0.mlp.up_proj.weight")?, value("model.embed_tokens.weight")?])
        })
        .swap_remove(0)
    };
    let ([before, all], part) = (
        [norms(None), norms(Some(LoadFilter::new()))],
        norms(Some(LoadFilter::new().leave_out("embed_tokens.*"))),
    );
    assert!(part[0] == all[0] && part[0] != before[0]);
    assert!(part[1] == before[1] && part[1] != all[1]);
}
