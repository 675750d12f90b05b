//! Several optimizers by patterns on parameter names, and averages of weights: against single optimizers, over checkpoints on
//! other meshes, and what they refuse.

use crate::save_and_load::Folder;
use crate::support::{MESHES, Setup, max_difference, run};
use shardgrad_nn::checkpoint::{self, OPTIMIZER_FILE, RunState, TensorFile};
use shardgrad_nn::{
    AdamW, Ema, Linear, LrScheduler, Model, Muon, Optimizer, Optimizers, Param, Plan, Precision, Sgd,
    StepArgs,
};
use shardgrad_tensor::{DType, Error, Kind, Layout, Mesh, Rank, Result, Tensor, Value, World};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

fn schedule() -> LrScheduler {
    LrScheduler::constant(0.02).warmup(2).linear(6, 0.002)
}

/// Muon for the matrices of blocks, AdamW for the rest.
fn optimizers() -> Optimizers {
    Optimizers::new()
        .on("h.*.c_*.weight", Muon::new(0.02).weight_decay(0.1))
        .schedule(schedule())
        .on("wpe.weight", Sgd::new(0.5).momentum(0.9))
        .otherwise(AdamW::new(0.01))
}

#[test]
fn each_optimizer_steps_as_if_alone_but_for_the_common_norm() {
    let step = |rank: &Rank, optim: &mut dyn FnMut(&Model<Linear>, f64) -> Result<()>| {
        let plan = Plan::new().store("weight", "tp@1").store("*bias", "tp@0");
        let plan = if rank.mesh().num_ranks() == 1 { Plan::new() } else { plan };
        let model = Model::with_dtype(rank, Linear::new(3, 4), &plan, 1, DType::F64)?;
        for step in 0..3 {
            optim(&model, f64::from(step))?;
        }
        model.params().iter().map(|param| param.tensor().to_f64()).collect::<Result<Vec<_>>>()
    };
    let args = |lr: f64| StepArgs { clip: Some(0.5), ..StepArgs::new(lr) };
    let gradients = |model: &Model<Linear>, by: f64| {
        let tape = model.tape();
        let x = Tensor::from_host(model.rank(), &[1, 3], &[1.0f64 + by, 2.0, 3.0])?;
        model.forward(&tape.constant(x)).square().sum().backward()?;
        Ok::<_, Error>(tape.gradients())
    };
    for mesh in ["", "tp=2"] {
        run(mesh, |rank| {
            let mut both = Optimizers::new()
                .otherwise(AdamW::new(0.1).weight_decay(0.1))
                .on("*bias", Sgd::new(0.1).momentum(0.5))
                .schedule(schedule());
            let found = step(rank, &mut |model, by| {
                let rates = both.lrs();
                assert_eq!(rates, [0.1, schedule().lr(by as usize)]);
                both.step(model, gradients(model, by)?, args(both.lr())).map(drop)
            })?;
            // Each alone on a model whose other parameter is set to that of the run with both, so that norms agree.
            let mut weights: Vec<Vec<Vec<f64>>> = Vec::new();
            let mut again = Optimizers::new()
                .otherwise(AdamW::new(0.1).weight_decay(0.1))
                .on("*bias", Sgd::new(0.1).momentum(0.5))
                .schedule(schedule());
            let _ = step(rank, &mut |model, by| {
                weights.push(model.params().iter().map(|p| p.tensor().to_f64()).collect::<Result<_>>()?);
                again.step(model, gradients(model, by)?, args(1.0)).map(drop)
            })?;
            let (mut adam, mut sgd) = (AdamW::new(0.1).weight_decay(0.1), Sgd::new(0.1).momentum(0.5));
            for (which, optim) in [(0, true), (1, false)] {
                let alone = step(rank, &mut |model, by| {
                    let other = &model.params()[1 - which];
                    let numbers = &weights[by as usize][1 - which];
                    other.set_tensor(Tensor::from_global(rank, &other.layout(), numbers)?)?;
                    let gradients = gradients(model, by)?;
                    match optim {
                        true => adam.step(model, gradients, args(0.1)),
                        false => sgd.step(model, gradients, args(schedule().lr(by as usize))),
                    }
                    .map(drop)
                })?;
                assert_eq!(alone[which], found[which], "{mesh} parameter {which}");
            }
            Ok(())
        });
    }
}

#[test]
fn patterns_that_select_nothing_and_uncovered_parameters_are_refused() {
    World::run(Mesh::single(), |rank| {
        let model = Setup::new().model(rank)?;
        let refused = |optim: Optimizers| {
            let error = optim.check_params(model.params()).expect_err("it must fail");
            assert_eq!(error.kind(), Kind::Config);
            (error.message().to_string(), error.to_string())
        };
        let (message, text) =
            refused(Optimizers::new().on("h.*.c_fk.weight", Sgd::new(0.1)).otherwise(AdamW::new(0.1)));
        assert_eq!(message, "the optimizer on `h.*.c_fk.weight` has no parameter: no name matches");
        assert!(text.contains("c_fc.weight"), "{text}");
        let (message, _) =
            refused(Optimizers::new().on("h.*.c_fc.bias", Sgd::new(0.1)).on("*", Sgd::new(0.1)));
        let taken = "the optimizer on `h.*.c_fc.bias` has no parameter: later patterns take all 2 that match";
        assert_eq!(message, taken);
        let (message, text) = refused(Optimizers::new().on("h.*", Sgd::new(0.1)));
        assert_eq!(message, "no optimizer updates parameter `wte.weight`, nor 3 others: no pattern matches");
        assert!(text.contains(".otherwise("), "{text}");
        let (message, text) = refused(Optimizers::new().on("*", Muon::new(0.1)));
        assert!(message.starts_with("Muon updates matrices, but parameter `h.0.ln_1.weight`"), "{message}");
        assert!(text.contains("optimizer") && text.contains('*'), "{text}");
        for pattern in ["wte.*", "wpe.*", "ln_f.*"] {
            model.freeze(pattern)?;
        }
        Optimizers::new().on("h.*", Sgd::new(0.1)).check_params(model.params())?;
        let param = &model.params()[0];
        let error = optimizers().hyperparameters(&[param], 0.5).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.message().contains("is 0.5, but each has its own rate and schedule"), "{error}");
        Ok(())
    })
    .unwrap();
}

/// Parameters and averages by the bits of this rank, and as global numbers.
type End = (Vec<Vec<u8>>, Vec<Vec<f64>>);

/// Some steps of the tiny model with several optimizers and averages, from a checkpoint or the start, to a checkpoint.
fn end(rank: &Rank, from: Option<&Path>, steps: u64, to: Option<&Path>) -> Result<End> {
    let setup = Setup::new();
    let model = setup.model(rank)?;
    model.freeze("ln_f.bias")?;
    let (mut optim, mut ema) = (optimizers(), Ema::new(&model, 0.75));
    let first = match from {
        Some(dir) => checkpoint::load(dir, &model, &mut ema.with_optimizer(&mut optim))?.step,
        None => 0,
    };
    for _ in first..first + steps {
        let tape = model.tape();
        setup.backward(&model, &tape)?;
        optim.step(&model, tape.gradients(), StepArgs { clip: Some(1.0), ..StepArgs::new(1.0) })?;
        ema.update(&model)?;
    }
    if let Some(dir) = to {
        let state = RunState { step: first + steps, ..RunState::default() };
        checkpoint::save(dir, &model, &ema.with_optimizer(&mut optim), &state, &[])?;
    }
    assert_eq!(optim.num_steps(), first + steps);
    assert!(ema.average(model.param("ln_f.bias")?).is_none(), "a frozen parameter costs nothing");
    let averages = model.params().iter().filter_map(|param| ema.average(param));
    let tensors: Vec<Tensor> = model.params().iter().map(Param::tensor).chain(averages).collect();
    let bytes = tensors.iter().map(Tensor::local_bytes).collect::<Result<_>>()?;
    Ok((bytes, tensors.iter().map(Tensor::to_f64).collect::<Result<_>>()?))
}

#[test]
fn state_and_averages_resume_on_any_mesh() {
    let folder = Folder::new("several-optimizers");
    let half = folder.0.join("checkpoint-2");
    let alone = run("", |rank| end(rank, None, 4, None)).swap_remove(0);
    run("dp=2,tp=2", |rank| end(rank, None, 2, Some(&half)));
    let file = TensorFile::open(&half.join(OPTIMIZER_FILE)).unwrap();
    let has = |kind: &str, name: &str| {
        file.tensors().iter().any(|t| t.name.starts_with(kind) && t.name.ends_with(name))
    };
    assert!(
        has("momentum_buffer.", ".c_fc.weight") && has("momentum_buffer.", ".wpe.weight"),
        "of Muon and SGD"
    );
    assert!(
        has("exp_avg.", ".wte.weight") && has("exp_avg_sq.", ".wte.weight") && has("ema.", ".wte.weight")
    );
    assert!(!has("exp_avg.", ".wpe.weight") && !has("", "ln_f.bias"));
    for mesh in ["dp=2,tp=2", "", "tp=3", "dp=3"] {
        let resumed = run(mesh, |rank| end(rank, Some(&half), 2, None));
        if mesh == "dp=2,tp=2" {
            let uninterrupted = run(mesh, |rank| end(rank, None, 4, None));
            assert!(resumed == uninterrupted, "a resumed run has the same bits");
        }
        for ((_, found), i) in resumed.iter().zip(0..) {
            for (found, expected) in found.iter().zip(&alone.1) {
                let worst = max_difference(found, expected);
                assert!(worst < 1e-10, "{mesh} rank {i}: {worst:e}");
            }
        }
    }
    let refused = World::run(Mesh::single(), |rank| {
        let model = Setup::new().model(rank)?;
        checkpoint::load(&half, &model, &mut optimizers()).map(drop)
    });
    let error = refused.expect_err("the averages of the checkpoint would be lost");
    assert!(error.kind() == Kind::Checkpoint && error.to_string().contains("ema"), "{error}");
}

#[test]
fn several_optimizers_match_one_rank_on_every_mesh() {
    let alone = run("", |rank| end(rank, None, 4, None)).swap_remove(0);
    for mesh in MESHES {
        for (_, found) in run(mesh, |rank| end(rank, None, 4, None)) {
            for (found, expected) in found.iter().zip(&alone.1) {
                assert!(max_difference(found, expected) < 1e-10, "{mesh}");
            }
        }
    }
}

#[test]
fn averages_match_hand_computed_values_and_swap_back_after_a_panic() {
    run("tp=2", |rank| {
        for precision in [Precision::of(DType::F64), Precision::of(DType::BF16)] {
            let plan = Plan::new().store("weight", "tp@1");
            let model = Model::with_precision(rank, Linear::new(1, 2).without_bias(), &plan, 1, precision)?;
            let weight = model.param("weight")?;
            let set = |x: f64| weight.set_tensor(Tensor::full(rank, &weight.layout(), x)?);
            set(1.0)?;
            let mut ema = Ema::new(&model, 0.75);
            for x in [2.0, 2.015625] {
                set(x)?;
                ema.update(&model)?;
            }
            // 1, then 1.25, then 0.9375 + 0.50390625, which bf16 rounds to 1.4375.
            let average = ema.average(weight).expect("it is trained");
            assert_eq!(average.dtype(), weight.layout().dtype().accumulator());
            assert_eq!(average.to_f64()?, [1.44140625; 2]);
            let rounded = if weight.layout().dtype() == DType::BF16 { 1.4375 } else { 1.44140625 };
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let _averages = ema.swap_in(&model).unwrap();
                assert_eq!(weight.tensor().to_f64().unwrap(), [rounded; 2]);
                std::panic::resume_unwind(Box::new("an evaluation that fails"));
            }));
            assert!(panicked.is_err());
            assert_eq!(weight.tensor().to_f64()?, [2.015625; 2]);
            // Training after the swap does not change the average.
            drop(ema.swap_in(&model)?);
            let tape = model.tape();
            let x = tape.constant(Tensor::full(
                rank,
                &Layout::invariant(rank.mesh(), precision.dtype, &[1, 1]),
                1.0,
            )?);
            model.forward(&x).square().sum().backward()?;
            AdamW::new(0.5).update(&model, tape.gradients())?;
            assert_eq!(ema.average(weight).expect("it is trained").to_f64()?, [1.44140625; 2]);
            let other = Model::with_precision(rank, Linear::new(1, 2).without_bias(), &plan, 1, precision)?;
            assert_eq!(ema.update(&other).unwrap_err().kind(), Kind::Config);
        }
        Ok(())
    });
}
