//! Layers around which there is a residual: it is added by their last product, and nothing else changes.

use crate::support::{far, run};
use shardgrad_autograd::{Noise, Var};
use shardgrad_nn::{
    Attention, Block, GatedMlp, GroupedAttention, Init, Linear, Mlp, Model, Param, Plan, SelfAttention,
    module,
};
use shardgrad_tensor::{DType, Layout, Mesh, Rank, Result, Tensor, Value, World};

module! {
    /// Every layer that ends in a product, something learnt that it reads, and something that is added to.
    struct Layers {
        x: Param, r: Param, linear: Linear, bare: Linear, mlp: Mlp, gated: GatedMlp, attn: Attention,
        grouped: GroupedAttention, all: SelfAttention,
    }
}

const WIDTH: usize = 12;
const SHAPE: [usize; 3] = [2, 4, WIDTH];
const BYTES: u64 = (2 * 4 * WIDTH * 4) as u64;

fn layers() -> Layers {
    let normal = Init::Normal(1.0);
    let param = || Param::new(&SHAPE).init(normal);
    Layers {
        x: param(),
        r: param(),
        linear: Linear::new(WIDTH, WIDTH),
        bare: Linear::new(WIDTH, WIDTH).without_bias(),
        mlp: Mlp::new(WIDTH, 20),
        gated: GatedMlp::new(WIDTH, 20, false),
        attn: Attention::new(WIDTH, 3),
        grouped: GroupedAttention::new(WIDTH, [2, 3, 4], &[1.0, 0.1]),
        all: SelfAttention::new(WIDTH, 3),
    }
}

const NAMES: [&str; 7] = ["linear", "bare", "mlp", "gated", "attn", "grouped", "all"];

/// residual + layer(x) by the layer, or by an addition behind it.
fn forward(m: &Layers, which: usize, joined: bool, [x, r]: [&Var; 2]) -> Var {
    match (which, joined) {
        (0, true) => m.linear.forward_onto(x, r),
        (1, true) => m.bare.forward_onto(x, r),
        (2, true) => m.mlp.forward_onto(x, r),
        (3, true) => m.gated.forward_onto(x, r),
        (4, true) => m.attn.attend_onto(x, None, r),
        (5, true) => m.grouped.attend_onto(x, None, r),
        (_, true) => m.all.forward_onto(x, None, r),
        (0, false) => r.add(&m.linear.forward(x)),
        (1, false) => r.add(&m.bare.forward(x)),
        (2, false) => r.add(&m.mlp.forward(x)),
        (3, false) => r.add(&m.gated.forward(x)),
        (4, false) => r.add(&m.attn.forward(x)),
        (5, false) => r.add(&m.grouped.forward(x)),
        (_, false) => r.add(&m.all.forward(x, None)),
    }
}

/// The result, and the gradients of all parameters, as one list.
fn outcome(rank: &Rank, plan: &Plan, dtype: DType, which: usize, joined: bool) -> Result<Vec<f64>> {
    let model = Model::with_dtype(rank, layers(), plan, 3, dtype)?;
    let tape = model.tape();
    let y = forward(&model, which, joined, [&model.x.on_tape(&tape), &model.r.on_tape(&tape)]);
    y.square().mean().backward()?;
    let mut found = y.tensor().to_f64()?;
    for gradient in tape.gradients().values() {
        found.extend(gradient.to_f64()?);
    }
    Ok(found)
}

/// Bytes that kernels read and write in a forward pass.
fn traffic(mesh: &str, plan: &Plan, which: usize, joined: bool) -> u64 {
    let run = |rank: &Rank| {
        let model = Model::new(rank, layers(), plan, 3)?;
        let tape = model.tape();
        let at = [&model.x.on_tape(&tape), &model.r.on_tape(&tape)];
        // What is moved once is not counted.
        let _ = forward(&model, which, joined, at);
        let before = rank.backend().cost().bytes;
        let _ = forward(&model, which, joined, at);
        Ok(rank.backend().cost().bytes - before)
    };
    World::new(Mesh::parse(mesh).unwrap()).dry_run(0, run).unwrap()
}

#[test]
fn the_last_product_adds_the_residual() {
    for (which, name) in NAMES.iter().enumerate() {
        for dtype in [DType::F32, DType::F64] {
            run("", |rank| {
                let plan = Plan::new();
                let joined = outcome(rank, &plan, dtype, which, true)?;
                assert_eq!(joined, outcome(rank, &plan, dtype, which, false)?, "{name} {dtype}");
                Ok(())
            });
        }
        let [joined, apart] = [true, false].map(|joined| traffic("", &Plan::new(), which, joined));
        assert_eq!(apart - joined, 2 * BYTES, "{name}: the result is written and read once less");
    }
}

#[test]
fn the_layout_of_a_residual_says_who_adds_it() {
    let rows = || {
        Plan::new().store("x", "dp@0").store("r", "dp@0").compute("*.weight", "dp~").compute("*.bias", "dp~")
    };
    let tensor = || Plan::tensor("tp").row("linear").row("bare").column("mlp.c_fc").row("mlp.c_proj");
    let sequence = || Plan::new().store("r", "tp@1");
    for (mesh, plan, is_joined) in [
        ("dp=2", rows(), [true, true, true]),
        ("tp=2", Plan::new(), [true, true, true]),
        ("tp=2", Plan::new().point("*.out", "tp="), [false, false, false]),
        ("tp=2", tensor(), [false, false, false]),
        ("tp=2", sequence(), [false, false, false]),
    ] {
        for (which, is_joined) in is_joined.into_iter().enumerate() {
            let what = format!("{} on {mesh} under\n{plan}", NAMES[which]);
            let alone = run("", |rank| outcome(rank, &Plan::new(), DType::F64, which, false)).remove(0);
            let split = run(mesh, |rank| outcome(rank, &plan, DType::F64, which, true)).remove(0);
            let far = far(&split, &alone);
            assert!(far < 1e-12, "{what}: {far}");
            let [joined, apart] = [true, false].map(|joined| traffic(mesh, &plan, which, joined));
            assert_eq!(joined < apart, is_joined, "{what}: {joined} {apart}");
        }
    }
}

#[test]
fn dropout_stands_before_the_addition() {
    let bytes = |p: f64, noise: bool| {
        let run = |rank: &Rank| {
            let block = Block::new(WIDTH, Attention::new(WIDTH, 3), Mlp::new(WIDTH, 24), 1e-5, p);
            let model = Model::new(rank, block, &Plan::new(), 1)?;
            let tape = model.tape();
            tape.set_noise(noise.then_some(Noise { seed: 1, step: 0, first_row: 0 }));
            let x = tape.constant(Tensor::zeros(rank, &Layout::invariant(rank.mesh(), DType::F32, &SHAPE))?);
            let before = rank.backend().cost().bytes;
            let _ = model.forward(&x);
            Ok(rank.backend().cost().bytes - before)
        };
        World::new(Mesh::single()).dry_run(0, run).unwrap()
    };
    assert_eq!(bytes(0.0, true), bytes(0.5, false), "nothing is drawn without noise");
    assert!(bytes(0.5, true) > bytes(0.0, true) + 4 * BYTES, "two additions, and dropout before them");
}
