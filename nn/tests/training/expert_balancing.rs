//! Bias-based load balancing and shared experts: the bias changes the selection alone, every mesh moves it to the same bits, and the
//! load becomes even.

use crate::support::{max_difference, run};
use shardgrad_nn::checkpoint::{self, RunState};
use shardgrad_nn::{Init, MixtureOfExperts, Model, Plan, Sgd, expert_imbalance};
use shardgrad_tensor::{Contraction, DType, Indexing, Kind, Rank, Result, Tensor, Value};

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
    let folder = std::env::temp_dir().join(format!("shardgrad-expert-bias-{}", std::process::id()));
    let tokens =
        |rank: &Rank| Tensor::from_host(rank, &[EXPERTS], &[9.0f64, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0, 8.0]);
    run("ep=2", |rank| {
        let model = model(rank, layer().with_bias_balancing(STEP))?;
        model.update_bias(&tokens(rank)?)?;
        checkpoint::save_weights(&folder, &model, &Sgd::new(0.1), &RunState::default())
    });
    let loaded = run("dp=3", |rank| {
        let model = model(rank, layer().with_bias_balancing(STEP))?;
        checkpoint::load_weights(&folder, &model, &mut Sgd::new(0.1))?;
        model.param("e_score_correction_bias")?.tensor().to_f64()
    });
    std::fs::remove_dir_all(&folder).unwrap();
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
