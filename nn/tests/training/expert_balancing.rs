//! Bias-based load balancing and shared experts: the bias changes the selection alone, every mesh moves it to the same bits, and the
//! load becomes even.

use crate::llama;
use crate::save_and_load::Folder;
use crate::support::{ROWS, SEQ, VOCAB, max_difference, run};
use shardgrad_autograd::Var;
use shardgrad_nn::checkpoint::{self, RunState};
use shardgrad_nn::{
    ExpertLoad, ExpertsConfig, Init, LanguageModel, LlamaConfig, LlamaKind, MixtureOfExperts, Model, Plan,
    Sgd, Trainer, TrainerConfig, expert_imbalance,
};
use shardgrad_tensor::{Contraction, DType, Indexing, Kind, Rank, Result, Tensor, Value};
use std::ops::Range;

const D: usize = 6;
const EXPERTS: usize = 8;
const STEP: f64 = 0.01;

fn layer() -> MixtureOfExperts {
    MixtureOfExperts::new(D, 5, EXPERTS, 2, true).init(Init::Normal(0.8))
}

fn model(rank: &Rank, layer: MixtureOfExperts) -> Result<Model<MixtureOfExperts>> {
    let plan = Plan::data_parallel("dp").and(Plan::expert_parallel("ep").exchange_experts());
    Model::with_dtype(rank, layer, &plan, 3, DType::F64)
}

fn rows(rank: &Rank) -> Result<Tensor> {
    let plan = Plan::data_parallel("dp").and(Plan::expert_parallel("ep"));
    Tensor::normal(rank, &plan.batch_layout(rank.mesh(), DType::F64, &[12, 8, D])?, 1, 0, 1.0)
}

#[test]
fn bias_moves_to_the_same_bits_on_every_mesh_and_balances_the_load() {
    let trained = |mesh: &str| {
        run(mesh, |rank| {
            let (model, x) = (model(rank, layer().with_bias_balancing(STEP))?, rows(rank)?);
            let mut imbalances = Vec::new();
            for _ in 0..100 {
                let routes = model.forward(&model.inference_tape().constant(x.clone())).1;
                assert_eq!(routes.tokens_per_expert().tensor().to_f64()?.iter().sum::<f64>(), 192.0);
                imbalances.push(routes.imbalance().item()?);
                model.update_bias(routes.tokens_per_expert().tensor())?;
            }
            Ok((imbalances, model.param("e_score_correction_bias")?.tensor().to_f64()?))
        })
    };
    let alone = trained("").swap_remove(0);
    let (first, last) = (alone.0[0], alone.0[99]);
    assert!(first > 1.25 && last < 1.0 + (first - 1.0) / 2.0, "imbalance {first} before and {last} after");
    assert!(alone.1.iter().any(|bias| *bias > 0.0) && alone.1.iter().any(|bias| *bias < 0.0));
    for mesh in ["dp=2", "ep=2", "ep=3", "ep=5", "dp=2,ep=2"] {
        for rank in trained(mesh) {
            assert_eq!(rank, alone, "{mesh}");
        }
    }
}

#[test]
fn bias_changes_the_selection_and_not_the_weights() {
    run("", |rank| {
        let (plain, biased) = (model(rank, layer())?, model(rank, layer().with_bias_balancing(STEP))?);
        let x = rows(rank)?;
        let tape = biased.tape();
        let x = tape.constant(x);
        // Zeros change nothing, neither values nor gradients.
        let of = |model: &Model<MixtureOfExperts>| -> Result<(Vec<f64>, Vec<f64>)> {
            let tape = model.tape();
            let (y, _) = model.forward(&tape.constant(rows(rank)?));
            y.square().sum().backward()?;
            let gradient =
                tape.gradients().remove(&model.param("gate.weight")?.key()).expect("of the router");
            Ok((y.tensor().to_f64()?, gradient.to_f64()?))
        };
        assert_eq!(of(&plain)?, of(&biased)?);
        let bias = biased.param("e_score_correction_bias")?;
        assert!(bias.is_frozen());
        let two: Vec<f64> = (0..EXPERTS).map(|e| if e == 1 || e == 6 { 2.0 } else { 0.0 }).collect();
        bias.set_tensor(Tensor::from_host(rank, &[EXPERTS], &two)?)?;
        let (y, routes) = biased.forward(&x);
        assert!(routes.index.tensor().to_host::<i64>()?.iter().all(|e| [1, 6].contains(e)));
        let shares = routes.scores.gather(2, &routes.index);
        let shares = shares.div(&shares.sum_dims(&[2]).expand(2, 2));
        let experts = &biased.experts;
        let [gate, up, down] = [&experts.gate_proj, &experts.up_proj, &experts.down_proj].map(|w| w.on(&x));
        let expected = x.experts(&routes.index, &shares, &gate, &up, &down);
        assert_eq!(y.tensor().to_f64()?, expected.tensor().to_f64()?);
        y.square().sum().backward()?;
        let gradients = tape.gradients();
        assert!(
            !gradients.contains_key(&bias.key())
                && gradients.contains_key(&biased.param("gate.weight")?.key())
        );
        Ok(())
    });
}

#[test]
fn bias_update_needs_a_count_for_each_expert() {
    run("", |rank| {
        let tokens = Tensor::from_host(rank, &[3], &[1.0f64, 2.0, 3.0])?;
        let error = model(rank, layer().with_bias_balancing(STEP))?.update_bias(&tokens).unwrap_err();
        assert_eq!(error.kind(), Kind::Shape);
        assert!(error.message().contains("bias of 8 experts") && error.message().contains("[3]"), "{error}");
        model(rank, layer())?.update_bias(&tokens)
    });
}

#[test]
fn checkpoints_hold_the_bias() {
    let folder = Folder::new("expert-bias");
    let tokens =
        |rank: &Rank| Tensor::from_host(rank, &[EXPERTS], &[9.0f64, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0, 8.0]);
    run("ep=2", |rank| {
        let model = model(rank, layer().with_bias_balancing(STEP))?;
        model.update_bias(&tokens(rank)?)?;
        checkpoint::save_weights(&folder.0, &model, &Sgd::new(0.1), &RunState::default())
    });
    let loaded = run("dp=3", |rank| {
        let model = model(rank, layer().with_bias_balancing(STEP))?;
        checkpoint::load_weights(&folder.0, &model, &mut Sgd::new(0.1))?;
        model.param("e_score_correction_bias")?.tensor().to_f64()
    });
    assert!(
        loaded.iter().all(|bias| bias[..] == [-STEP, STEP, 0.0, 0.0, 0.0, 0.0, STEP, -STEP]),
        "{loaded:?}"
    );
}

#[test]
fn shared_experts_are_added_to_the_routed_ones() {
    let y = |mesh: &str, shared: bool| {
        let ranks = run(mesh, |rank| {
            let layer = if shared {
                MixtureOfExperts::new(D, 5, EXPERTS, 2, true).with_shared_experts(7)
            } else {
                layer()
            };
            let model = model(rank, layer.init(Init::Normal(0.8)))?;
            let x = model.inference_tape().constant(rows(rank)?);
            let own =
                model.shared_experts.as_ref().map(|mlp| mlp.forward(&x).tensor().to_f64()).transpose()?;
            Ok((model.forward(&x).0.tensor().to_f64()?, own))
        });
        ranks.into_iter().next().unwrap()
    };
    let ((routed, _), (both, own)) = (y("", false), y("", true));
    let sum: Vec<f64> = routed.iter().zip(own.unwrap()).map(|(a, b)| a + b).collect();
    assert_eq!(sum, both);
    for mesh in ["ep=3", "dp=2,ep=2"] {
        assert!(max_difference(&y(mesh, true).0, &both) < 1e-13, "{mesh}");
    }
}

#[test]
fn imbalance_is_the_largest_load_over_the_mean() {
    run("", |rank| {
        let tape = shardgrad_autograd::Tape::new(rank);
        let of = |tokens: [f64; 4]| {
            let tokens = tape.constant(Tensor::from_host(rank, &[4], &tokens)?);
            expert_imbalance(&tokens).item()
        };
        assert_eq!((of([3.0; 4])?, of([0.0, 0.0, 8.0, 0.0])?, of([2.0, 0.0, 5.0, 1.0])?), (1.0, 4.0, 2.5));
        Ok(())
    });
}

/// A trainer of a Mixtral whose experts are balanced by a bias.
fn trainer(rank: &Rank, plan: &Plan, microbatches: usize) -> Result<Trainer<'static, LanguageModel>> {
    let experts = ExpertsConfig { router_bias_update_rate: STEP, ..ExpertsConfig::new(4, 2, 7) };
    let config = LlamaConfig { experts: Some(experts), ..llama::config(LlamaKind::Mixtral) };
    let settings = TrainerConfig { microbatches, seed: 5, dtype: DType::F64, ..TrainerConfig::new(ROWS) };
    let of_batch = plan.clone();
    let read = move |rank: &Rank, step: u64, rows: Range<usize>| {
        let layout = of_batch.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
        let token = |row: usize, t: usize| ((row * 7 + t * 5 + step as usize * 3 + row * t) % VOCAB) as i64;
        let ids = |first: usize| -> Vec<i64> {
            rows.clone().flat_map(|row| (first..first + SEQ).map(move |t| token(row, t))).collect()
        };
        Ok(vec![Tensor::from_global(rank, &layout, &ids(0))?, Tensor::from_global(rank, &layout, &ids(1))?])
    };
    let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
    Trainer::new(rank, LanguageModel::new(&config.into()), plan, Sgd::new(0.1), settings, read, loss)
}

/// The biases of a model, where this rank has them.
fn biases(model: &Model<LanguageModel>) -> Result<Vec<(String, Vec<f64>)>> {
    let biases =
        model.params().iter().filter(|p| p.name().ends_with("e_score_correction_bias") && p.is_local());
    biases.map(|bias| Ok((bias.name(), bias.tensor().to_f64()?))).collect()
}

#[test]
fn a_trainer_moves_the_biases_and_reports_the_load_alike_on_every_mesh() {
    const STEPS: usize = 4;
    let trained = |mesh: &str, plan: &Plan, microbatches: usize| {
        run(mesh, |rank| {
            let mut trainer = trainer(rank, plan, microbatches)?;
            let mut loads = Vec::new();
            for _ in 0..STEPS {
                loads.push(ExpertLoad::of(&trainer.step()?).expect("the model has experts"));
            }
            Ok((loads, biases(trainer.model())?))
        })
    };
    let plan = Plan::llama_moe();
    let (loads, alone) = trained("", &plan, 1).swap_remove(0);
    let names: Vec<&str> = loads[0].layers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["model.layers.0.mlp", "model.layers.1.mlp"]);
    // The biases move by the signs of the loads of all steps.
    for (layer, (name, bias)) in alone.iter().enumerate() {
        let mut expected = vec![0.0; 4];
        for load in &loads {
            let tokens = &load.layers[layer].1;
            assert_eq!(tokens.iter().sum::<f64>(), (ROWS * SEQ * 2) as f64);
            let mean = (ROWS * SEQ * 2) as f64 / 4.0;
            for (bias, tokens) in expected.iter_mut().zip(tokens) {
                *bias += STEP * if *tokens == mean { 0.0 } else { (mean - tokens).signum() };
            }
        }
        assert_eq!(*bias, expected, "{name}");
    }
    let sequence = plan.clone().and(Plan::sequence_parallel("tp"));
    for (mesh, plan, microbatches) in [
        ("", &plan, 2),
        ("dp=2", &plan, 1),
        ("ep=2", &plan, 2),
        ("fsdp=3", &plan, 1),
        ("ep=2,tp=2", &sequence, 1),
        ("dp=2,ep=2", &plan, 1),
        ("cp=2", &plan, 1),
        ("pp=2", &plan, 2),
        ("pp=2,ep=2", &plan, 2),
    ] {
        let mut found = Vec::new();
        for (of_rank, biases) in trained(mesh, plan, microbatches) {
            assert_eq!(of_rank, loads, "{mesh}");
            found.extend(biases);
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found.dedup();
        assert_eq!(found, alone, "{mesh}");
    }
}

#[test]
fn a_resumed_run_continues_with_its_biases() {
    let folder = Folder::new("balanced-experts");
    let plan = Plan::llama_moe();
    let straight = run("ep=2", |rank| {
        let mut trainer = trainer(rank, &plan, 1)?;
        for step in 0..4 {
            if step == 2 {
                checkpoint::save(&folder.0, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
            }
            trainer.step()?;
        }
        biases(trainer.model())
    });
    let resumed = run("dp=2", |rank| {
        let mut trainer = trainer(rank, &plan, 1)?;
        trainer.resume(&folder.0)?;
        assert!(biases(trainer.model())?.iter().any(|(_, bias)| bias.iter().any(|b| *b != 0.0)));
        trainer.step()?;
        trainer.step()?;
        biases(trainer.model())
    });
    assert_eq!(straight[0], resumed[0]);
}

#[test]
fn a_loss_without_token_counts_cannot_balance_by_a_trainer() {
    run("", |rank| {
        let read = |rank: &Rank, _: u64, _: Range<usize>| Ok(vec![rows(rank)?]);
        let loss = |model: &MixtureOfExperts, x: &[Var]| model.forward(&x[0]).0.square().mean();
        let settings = TrainerConfig { dtype: DType::F64, ..TrainerConfig::new(12) };
        let layer = layer().with_bias_balancing(STEP);
        let mut trainer = Trainer::new(rank, layer, &Plan::new(), Sgd::new(0.1), settings, read, loss)?;
        let error = trainer.step().unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.message().contains("the loss does not report `tokens_per_expert`"), "{error}");
        Ok(())
    });
    run("", |rank| {
        let read = |rank: &Rank, _: u64, _: Range<usize>| Ok(vec![rows(rank)?]);
        let loss = |model: &MixtureOfExperts, x: &[Var]| {
            let (y, routing) = model.forward(&x[0]);
            routing.report_in(y.square().mean())
        };
        let settings = TrainerConfig { dtype: DType::F64, ..TrainerConfig::new(12) };
        let layer = layer().with_bias_balancing(STEP);
        let mut trainer = Trainer::new(rank, layer, &Plan::new(), Sgd::new(0.1), settings, read, loss)?;
        let report = trainer.step()?;
        assert_eq!(report.auxiliary_vector("tokens_per_expert").iter().sum::<f64>(), 192.0);
        assert!(
            trainer.model().param("e_score_correction_bias")?.tensor().to_f64()?.iter().any(|b| *b != 0.0)
        );
        Ok(())
    });
}
