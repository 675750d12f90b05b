//! Plans that do not fit the mesh or the model are errors; one rule covers parameters of all shapes; wrapped layers keep
//! their rules and their names in files.

use crate::save_and_load::Folder;
use crate::support::{VOCAB, run};
use shardgrad_autograd::Noise;
use shardgrad_nn::checkpoint::TensorFile;
use shardgrad_nn::{
    Dropout, HfModel, Linear, Llama, LlamaConfig, LlamaKind, Model, ModelConfig, Module, ModuleLeaf, Param,
    Plan, module,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Rank, Result, Tensor, World};

/// The error of a function on rank 0 of a mesh.
fn error(mesh: &str, f: impl Fn(&Rank) -> Result<()> + Sync) -> Error {
    World::run(Mesh::parse(mesh).unwrap(), f).expect_err("it must fail")
}

#[test]
fn a_mesh_axis_that_the_plan_does_not_use_is_refused() {
    let model = |rank: &Rank, plan: &Plan| Model::new(rank, Linear::new(4, 2), plan, 1).map(|_| ());
    for (mesh, plan, axis) in [
        ("ddp=2", Plan::data_parallel("dp"), "ddp=2"),
        ("dp=2", Plan::new(), "dp=2"),
        ("dp=2,tp=2", Plan::new().store("weight", "tp@0"), "dp=2"),
    ] {
        let refused = error(mesh, |rank| model(rank, &plan));
        assert_eq!(refused.kind(), Kind::Config);
        assert_eq!(refused.message(), format!("the plan does not use the mesh axis {axis}"));
        assert!(refused.to_string().contains("Plan::copies"), "{refused}");
    }
    run("dp=2", |rank| model(rank, &Plan::copies("dp")));
    run("ddp=2,dp=2", |rank| model(rank, &Plan::data_parallel("dp").and(Plan::copies("ddp"))));
}

module! {
    /// A linear layer and dropout.
    struct Noisy { up: Linear, drop: Dropout }
}

#[test]
fn dropout_on_a_training_tape_without_random_numbers_is_refused() {
    let forward = |rank: &Rank, noise: Option<Option<Noise>>, training: bool| -> Result<()> {
        let noisy = Noisy { up: Linear::new(3, 2), drop: Dropout::new(0.5) };
        let model = Model::new(rank, noisy, &Plan::new(), 1)?;
        let tape = if training { model.tape() } else { model.inference_tape() };
        if let Some(noise) = noise {
            tape.set_noise(noise);
        }
        let x = tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32; 3])?);
        let _ = model.drop.forward(&model.up.forward(&x));
        Ok(())
    };
    let before_residual = |rank: &Rank| -> Result<()> {
        let noisy = Noisy { up: Linear::new(3, 2), drop: Dropout::new(0.5) };
        let model = Model::new(rank, noisy, &Plan::new(), 1)?;
        let tape = model.tape();
        let [x, r] =
            [3, 2].map(|d| Tensor::from_host(rank, &[1, d], &vec![1.0f32; d]).map(|t| tape.constant(t)));
        let _ = model.up.forward_with_residual(&x?, model.drop.then_add(&r?));
        Ok(())
    };
    for refused in [error("", |rank| forward(rank, None, true)), error("", before_residual)] {
        assert_eq!(refused.kind(), Kind::Config);
        assert_eq!(
            refused.message(),
            "dropout layer `drop` (p = 0.5) has no random numbers on a training tape and would drop nothing"
        );
        assert!(
            refused.to_string().contains("call tape.set_noise(Some(Noise { seed, step, first_row: 0 }))")
        );
        assert!(refused.site().is_some_and(|site| site.file().ends_with("training/plans.rs")), "{refused}");
    }
    let noise = Noise { seed: 1, step: 0, first_row: 0 };
    run("", |rank| forward(rank, Some(Some(noise)), true));
    run("", |rank| forward(rank, Some(None), true));
    run("", |rank| forward(rank, None, false));
}

module! {
    /// Parameters of 0 to 2 dims.
    struct Shapes { scalar: Param, short: Param, vector: Param, matrix: Param }
}

#[test]
fn one_rule_of_storage_covers_parameters_of_all_shapes() {
    let layouts = |rule: &str| {
        run("dp=2", |rank| {
            let shapes: [&[usize]; 4] = [&[], &[1], &[4], &[1, 4]];
            let [scalar, short, vector, matrix] = shapes.map(Param::new);
            let plan = Plan::new().store("*", rule);
            let model = Model::new(rank, Shapes { scalar, short, vector, matrix }, &plan, 1)?;
            Ok(model.params().iter().map(|p| p.layout().to_string()).collect::<Vec<_>>())
        })
        .swap_remove(0)
    };
    assert_eq!(layouts("dp@0|="), ["f32[]", "f32[1]", "f32[4@dp]", "f32[1, 4]"]);
    assert_eq!(layouts("dp@1|="), ["f32[]", "f32[1]", "f32[4]", "f32[1, 4@dp]"]);
    assert_eq!(layouts("dp@0|@1|="), ["f32[]", "f32[1]", "f32[4@dp]", "f32[1, 4@dp]"]);
}

/// A part of a model whose children have other names, by their path in the model and their name.
struct Renamed<'a> {
    model: &'a dyn Module,
    path: String,
    rename: fn(&str, &str) -> String,
}

impl<'a> Renamed<'a> {
    fn new(model: &'a dyn Module, rename: fn(&str, &str) -> String) -> Renamed<'a> {
        Renamed { model, path: String::new(), rename }
    }
}

impl Module for Renamed<'_> {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        let rename = self.rename;
        self.model.children(&mut |name, model| {
            let path = format!("{}.{name}", self.path);
            visit(&rename(&path, name), &Renamed { model, path, rename });
        });
    }

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        self.model.leaf()
    }
}

impl HfModel for Renamed<'_> {
    fn model_config(&self) -> ModelConfig {
        ModelConfig::Llama(config())
    }

    fn hf_name(&self, name: &str) -> String {
        name.to_string()
    }

    fn ignored_on_load(&self) -> &'static [&'static str] {
        &[]
    }
}

fn config() -> LlamaConfig {
    LlamaConfig { head_dim: 4, ..LlamaConfig::new(LlamaKind::Llama, VOCAB, 8, [10, 8], 2, [4, 2]) }
}

#[test]
fn the_plan_of_a_family_refuses_layers_of_other_names() {
    for (mesh, from, to) in
        [("tp=2", "q_proj", "wq"), ("", "down_proj", "w2"), ("tp=2", "embed_tokens", "wte")]
    {
        let refused = error(mesh, |rank| {
            let llama = Llama::new(&config());
            let rename: fn(&str, &str) -> String = match from {
                "q_proj" => |_, name| name.replace("q_proj", "wq"),
                "down_proj" => |_, name| name.replace("down_proj", "w2"),
                _ => |_, name| name.replace("embed_tokens", "wte"),
            };
            Model::new(rank, Renamed::new(&llama, rename), &Plan::llama(), 1).map(|_| ())
        });
        assert_eq!(
            (refused.kind(), refused.message()),
            (Kind::Config, "1 rule(s) of the plan match nothing in the model"),
            "{to}"
        );
        let text = refused.to_string();
        assert!(
            text.contains(&format!("{from}.weight tp@")) && text.contains("of a model family by name"),
            "{text}"
        );
    }
    run("", |rank| {
        let model = Model::new(rank, Llama::new(&config()), &Plan::llama(), 1)?;
        let unmatched = model.unmatched_rules();
        assert!(unmatched.contains(&"store *.mlp.up_proj.bias tp@0".to_string()), "{unmatched:?}");
        assert!(
            unmatched
                .iter()
                .all(|rule| rule.contains("bias") || rule.contains("lm_head") || rule.contains("mask")),
            "{unmatched:?}"
        );
        Ok(())
    });
}

#[test]
fn the_plan_of_a_family_refuses_a_layer_of_another_name_in_one_block() {
    let rename: fn(&str, &str) -> String = |path, name| match path {
        ".model.layers.1.self_attn.q_proj" => "wq".to_string(),
        _ => name.to_string(),
    };
    let model = |rank: &Rank, plan: &Plan| -> Result<String> {
        let llama = Llama::new(&config());
        let model = Model::new(rank, Renamed::new(&llama, rename), plan, 1)?;
        Ok(model.param("model.layers.1.self_attn.wq.weight")?.layout().to_string())
    };
    for mesh in ["tp=2", ""] {
        let refused = error(mesh, |rank| model(rank, &Plan::llama()).map(|_| ()));
        assert_eq!(
            (refused.kind(), refused.message()),
            (
                Kind::Config,
                "the plan shards some blocks of the model, but not all of the parameters of model.layers.1"
            )
        );
        let text = refused.to_string();
        assert!(
            text.contains(
                "store *.self_attn.q_proj.weight tp@1|@2: matches model.layers.0.self_attn.q_proj.weight"
            ),
            "{text}"
        );
        let copies = "Plan::store(\"model.layers.1.self_attn.wq.weight\", \"tp=\")";
        assert!(text.contains(copies), "{text}");
    }
    for (word, layout) in [("tp=", "f32[10, 2, 2, 4]"), ("tp@1", "f32[10, 2@tp, 2, 4]")] {
        let plan = Plan::llama().store("model.layers.1.self_attn.wq.weight", word);
        assert_eq!(run("tp=2", |rank| model(rank, &plan))[0], layout);
    }
}

#[test]
fn blocks_may_share_parameters_under_the_plan_of_a_family() {
    /// Replaces the parameters of block 1 by those of block 0.
    type Share = fn(&mut Llama);
    let query: Share = |llama| {
        let [first, second] = &mut llama.model.layers[..] else { unreachable!("two blocks") };
        second.self_attn.q_proj.weight = first.self_attn.q_proj.weight.clone();
    };
    let attention: Share = |llama| {
        let [first, second] = &mut llama.model.layers[..] else { unreachable!("two blocks") };
        let (first, second) = (&first.self_attn, &mut second.self_attn);
        second.q_proj.weight = first.q_proj.weight.clone();
        second.k_proj.weight = first.k_proj.weight.clone();
        second.v_proj.weight = first.v_proj.weight.clone();
        second.o_proj.weight = first.o_proj.weight.clone();
    };
    let renames: [fn(&str, &str) -> String; 2] = [
        |_, name| name.to_string(),
        // The first name of a shared parameter is that of block 0.
        |path, name| if path == ".model.layers.1.self_attn.q_proj" { "wq" } else { name }.to_string(),
    ];
    let whole =
        run("", |rank| Ok(Model::new(rank, Llama::new(&config()), &Plan::llama(), 1)?.params().len()))[0];
    for (share, num_shared) in [(query, 1), (attention, 4)] {
        for rename in renames {
            run("tp=2", |rank| {
                let mut llama = Llama::new(&config());
                share(&mut llama);
                let model = Model::new(rank, Renamed::new(&llama, rename), &Plan::llama(), 1)?;
                assert_eq!(model.params().len(), whole - num_shared);
                let layout = model.param("model.layers.0.self_attn.q_proj.weight")?.layout();
                assert_eq!(layout.to_string(), "f32[10, 2@tp, 2, 4]");
                Ok(())
            });
        }
    }
}

#[test]
fn a_wrapped_layer_keeps_its_layout_and_its_name_in_files() {
    let folder = Folder::new("wrapped");
    let wrap: fn(&str, &str) -> String = |_, name| match name {
        "q_proj" | "down_proj" => format!("{name}.base"),
        _ => name.to_string(),
    };
    let saved = run("tp=2", |rank| {
        let llama = Llama::new(&config());
        let model = Model::with_dtype(rank, Renamed::new(&llama, wrap), &Plan::llama(), 1, DType::F64)?;
        let layout = |name: &str| Ok::<_, Error>(model.param(name)?.layout().to_string());
        assert_eq!(layout("model.layers.0.self_attn.q_proj.base.weight")?, "f64[10, 2@tp, 2, 4]");
        assert_eq!(layout("model.layers.1.mlp.down_proj.base.weight")?, "f64[8@tp, 10]");
        model.save(&folder.0)?;
        model.param("model.layers.1.mlp.down_proj.base.weight")?.tensor().to_f64()
    })
    .swap_remove(0);
    let file = TensorFile::open(&folder.0.join("model.safetensors")).unwrap();
    assert!(file.get("model.layers.0.self_attn.q_proj.weight").is_some());
    assert!(file.tensors().iter().all(|t| !t.name.contains("base")));
    run("", |rank| {
        let plain = Model::with_dtype(rank, Llama::new(&config()), &Plan::llama(), 2, DType::F64)?;
        plain.load(&folder.0)?;
        assert_eq!(plain.param("model.layers.1.mlp.down_proj.weight")?.tensor().to_f64()?, saved);
        let llama = Llama::new(&config());
        let wrapped = Model::with_dtype(rank, Renamed::new(&llama, wrap), &Plan::llama(), 3, DType::F64)?;
        wrapped.load(&folder.0)?;
        assert_eq!(
            wrapped.param("down_proj.base.weight").map(|_| ()).map_err(|e| e.kind()),
            Err(Kind::Config)
        );
        assert_eq!(wrapped.param("model.layers.1.mlp.down_proj.base.weight")?.tensor().to_f64()?, saved);
        Ok(())
    });
}
