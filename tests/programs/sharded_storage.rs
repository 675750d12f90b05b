//! The three stages of ZeRO, and storage rules written by hand: the same losses, and a part of the numbers on each rank.

use shardgrad::prelude::*;

const WIDTH: usize = 12;

module! { struct Net { layers: Vec<Mlp>, scale: Param } }

/// Losses and norms of steps. Every rank stores at most `share` of the parameters and moments.
fn train(rank: &Rank, storage: &Plan, share: impl Fn(usize) -> f64) -> Result<Vec<f64>> {
    let tensor = Plan::tensor_parallel("tp").column_parallel("c_fc").row_parallel("c_proj");
    let plan = Plan::data_parallel("dp").and(tensor).and(storage.clone());
    let net = Net {
        layers: (0..3).map(|_| Mlp::new(WIDTH, 4 * WIDTH)).collect(),
        scale: Param::new(&[]).init(Init::Ones),
    };
    let model = Model::with_dtype(rank, net, &plan, 1, DType::F64)?;
    let mut optim = AdamW::new(1e-2);
    let layout = plan.batch_layout(rank.mesh(), DType::F64, &[12, WIDTH])?;
    let x = Tensor::normal(rank, &layout, 7, 0, 1.0)?;
    let mut found = Vec::new();
    for _ in 0..6 {
        let tape = model.tape();
        let x = tape.constant(x.clone());
        let y = model.layers.iter().fold(x.clone(), |x, layer| &x + layer.forward(&x));
        let loss = (y * model.scale.on(&x) + x.flip(1)).square().mean();
        loss.backward()?;
        let losses = vec![loss.tensor().clone()];
        let gradients = tape.gradients();
        for param in model.params() {
            let gradient = model.grad(&gradients, &param.name())?;
            assert_eq!(gradient.layout(), param.tensor().layout(), "gradients are sharded as parameters");
        }
        let report = optim.step(&model, gradients, StepArgs { losses, ..StepArgs::new(optim.lr()) })?;
        found.extend([report.loss, report.grad_norm]);
    }
    let mut stored = 0;
    for param in model.params() {
        stored += param.tensor().to_local_f64()?.len();
        for moment in optim.state(param).expect("every parameter was updated").moments {
            stored += moment.to_local_f64()?.len();
        }
    }
    let all = 3.0 * model.num_params() as f64;
    let size = |axis: &str| rank.mesh().axis(axis).map_or(1, |axis| rank.mesh().size(axis));
    let share = share(size("dp")) / size("tp") as f64;
    // Shards are uneven, and the scalar and the bias after a sum over `tp` are copies.
    assert!((stored as f64) < (share + 0.06) * all, "{stored} of {all} numbers, not {share}");
    Ok(found)
}

#[test]
fn every_stage_and_own_rules_take_the_steps_of_one_rank() {
    let meshes = ["dp=2", "dp=3", "dp=4", "dp=2,tp=2"];
    let whole = super::same_on(meshes, 1e-9, |rank| train(rank, &Plan::new(), |_| 1.0));
    assert!(whole[10] < whole[0], "{whole:?}");
    let by_hand = Plan::new().store("*", "dp@0|@1|=");
    for (name, storage) in [
        ("ZeRO 1", Plan::zero(1, "dp")),
        ("ZeRO 2", Plan::zero(2, "dp")),
        ("ZeRO 3", Plan::zero(3, "dp")),
        ("by hand", by_hand),
    ] {
        let found = super::same_on(meshes, 1e-9, |rank| train(rank, &storage, |dp| 1.0 / dp as f64));
        crate::training_run::same(&whole, &found, 1e-9, name);
    }
}
