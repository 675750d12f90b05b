//! The hash of weights and optimizer state: the same on every mesh for the same bits, another one after a change of one bit.

use crate::save_and_load::Folder;
use crate::support::{ROWS, config, run, tokens_and_targets};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    AdamW, Gpt2Config, LanguageModel, ModelConfig, Muon, Optimizer, Optimizers, Plan, Sgd, StateHash,
    Trainer, TrainerConfig, checkpoint, state_hash,
};
use shardgrad_tensor::{DType, Kind, OverflowCheck, Rank, Result, Tensor};
use std::ops::Range;
use std::path::Path;

fn model_config() -> ModelConfig {
    Gpt2Config { initializer_range: 0.3, ..config() }.into()
}

/// The plan of the model with more rules.
fn plan(more: Plan) -> Plan {
    LanguageModel::plan(&model_config()).and(more)
}

fn trainer<'t>(
    rank: &Rank,
    plan: &'t Plan,
    optim: impl Optimizer + 't,
    dtype: DType,
) -> Result<Trainer<'t, LanguageModel>> {
    let read =
        move |rank: &Rank, step: u64, rows: Range<usize>| tokens_and_targets(rank, plan, rows, step as usize);
    let settings = TrainerConfig { microbatches: 2, dtype, ..TrainerConfig::new(ROWS) };
    let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
    Trainer::new(rank, LanguageModel::new(&model_config()), plan, optim, settings, read, loss)
}

/// Hashes of all ranks, which must agree.
fn agreed(mesh: &str, hash: impl Fn(&Rank) -> Result<StateHash> + Sync) -> StateHash {
    let hashes = run(mesh, hash);
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{mesh}: {hashes:?}");
    hashes[0]
}

/// Meshes with what is added to the plan, among them ones that divide neither heads, width nor vocabulary.
fn meshes() -> Vec<(&'static str, Plan)> {
    let pipeline = || Plan::pipeline_parallel("pp");
    vec![
        ("dp=2", Plan::new()),
        ("tp=2", Plan::new()),
        ("tp=3", Plan::new()),
        ("dp=2,tp=2", Plan::new()),
        ("cp=2", Plan::new()),
        ("fsdp=3", Plan::new()),
        ("dp=2", Plan::zero(1, "dp")),
        ("dp=4", Plan::zero(2, "dp")),
        ("dp=2,tp=2", Plan::zero(3, "dp")),
        ("pp=2", pipeline()),
        ("pp=2,tp=2", pipeline()),
        ("pp=2,dp=2", pipeline().and(Plan::zero(1, "dp"))),
    ]
}

/// Compares the hashes of initial weights and of a resumed state on all meshes with those of one rank.
fn check_hashes<O: Optimizer>(folder: &Path, optim: impl Fn() -> O + Sync, dtype: DType) {
    let alone = plan(Plan::new());
    let hashes = run("", |rank| {
        let mut trainer = trainer(rank, &alone, optim(), dtype)?;
        let mut hashes = vec![trainer.state_hash()?];
        for _ in 0..2 {
            trainer.step()?;
            hashes.push(trainer.state_hash()?);
        }
        checkpoint::save(folder, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
        Ok(hashes)
    });
    let [first, second, last] = hashes[0][..] else { panic!("three hashes") };
    assert!(first != second && second != last && last != first, "each step changes the hash: {hashes:?}");
    for (mesh, more) in meshes() {
        let plan = plan(more);
        let hash_from = |dir: Option<&Path>| {
            agreed(mesh, |rank| {
                let mut trainer = trainer(rank, &plan, optim(), dtype)?;
                dir.map(|dir| trainer.resume(dir)).transpose()?;
                trainer.state_hash()
            })
        };
        assert_eq!(hash_from(None), first, "{:?} on {mesh}: initial weights", optim());
        assert_eq!(hash_from(Some(folder)), last, "{:?} on {mesh}: resumed", optim());
    }
}

#[test]
fn hash_of_a_resumed_state_is_the_same_on_every_mesh() {
    let folder = Folder::new("state-hash");
    check_hashes(&folder.0.join("adamw"), || AdamW::new(0.1), DType::F32);
    check_hashes(&folder.0.join("sgd"), || Sgd::new(0.1).momentum(0.9), DType::BF16);
    let muon = || Optimizers::new().on("*.c_fc.weight", Muon::new(0.1)).otherwise(AdamW::new(0.1));
    check_hashes(&folder.0.join("muon"), muon, DType::F32);
}

#[test]
fn hash_changes_with_one_bit_of_a_weight_or_of_optimizer_state() {
    let plan = plan(Plan::zero(1, "dp"));
    for mesh in ["", "tp=2", "dp=3"] {
        let hashes = run(mesh, |rank| {
            let mut trainer = trainer(rank, &plan, AdamW::new(0.1), DType::F32)?;
            trainer.step()?;
            let mut hashes = vec![trainer.state_hash()?];
            let (model, optim) = trainer.model_and_optim_mut();
            let param = model.param("h.1.attn.c_attn.bias")?.clone();
            // The lowest bit of one element, on the ranks that hold it.
            let flipped = |tensor: &Tensor| {
                let mut bits: Vec<u32> =
                    tensor.local_bytes()?.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
                let held = tensor.layout().range(0, rank.coordinates());
                if held.contains(&0) && !bits.is_empty() {
                    bits[0] ^= 1;
                }
                let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
                Tensor::from_local(tensor.rank(), tensor.layout(), &values)
            };
            let value = param.tensor();
            param.set_tensor(flipped(&value)?)?;
            hashes.push(state_hash(model, optim)?);
            param.set_tensor(value)?;
            hashes.push(state_hash(model, optim)?);
            let mut state = optim.param_state(&param).expect("it was updated");
            let num_steps = optim.num_steps();
            state.tensors[1] = flipped(&state.tensors[1])?;
            optim.load_state(num_steps, vec![(param.clone(), state.clone())])?;
            hashes.push(state_hash(model, optim)?);
            state.num_steps += 1;
            optim.load_state(num_steps, vec![(param.clone(), state)])?;
            hashes.push(state_hash(model, optim)?);
            Ok(hashes)
        });
        assert!(hashes.iter().all(|of_rank| *of_rank == hashes[0]), "{mesh}: {hashes:?}");
        let [plain, weight, back, moment, count] = hashes[0][..] else { panic!("five hashes") };
        assert_eq!(plain, back, "{mesh}");
        assert!(weight != plain && moment != plain && count != moment, "{mesh}: {hashes:?}");
    }
}

/// An optimizer that states no names of its state.
#[derive(Debug)]
struct Nameless;

impl Optimizer for Nameless {
    fn lr(&self) -> f64 {
        0.1
    }

    fn describe(&self) -> String {
        "nameless".to_string()
    }

    fn num_steps(&self) -> u64 {
        0
    }

    fn apply_update(&mut self, _: &[(&shardgrad_nn::Param, Tensor)], _: &OverflowCheck) -> Result<()> {
        Ok(())
    }

    fn count_step(&mut self, _: &[&shardgrad_nn::Param]) {}
}

#[test]
fn optimizer_without_names_of_its_state_is_refused() {
    run("", |rank| {
        let plan = plan(Plan::new());
        let error = trainer(rank, &plan, Nameless, DType::F32)?.state_hash().unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.message().contains("does not implement `state_names`"), "{error}");
        Ok(())
    });
}
