//! Layers with a fused residual: the epilogue of their last product adds it, with the same results as a separate addition.

use crate::support::{max_difference, run};
use shardgrad_autograd::{Noise, Var};
use shardgrad_nn::{
    Attention, Block, EncoderAttention, GatedMlp, GroupedQueryAttention, Init, Linear, Mlp, Model, Param,
    Plan, module,
};
use shardgrad_tensor::{DType, Layout, Mesh, Rank, Result, Tensor, Value, World};

module! {
    /// Every layer that ends in a product, with its input and a residual as parameters.
    struct Layers {
        x: Param, r: Param, linear: Linear, bare: Linear, mlp: Mlp, gated: GatedMlp, attn: Attention,
        grouped: GroupedQueryAttention, all: EncoderAttention,
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
        grouped: GroupedQueryAttention::new(WIDTH, [2, 3, 4], &[1.0, 0.1]),
        all: EncoderAttention::new(WIDTH, 3),
    }
}

const NAMES: [&str; 7] = ["linear", "bare", "mlp", "gated", "attn", "grouped", "all"];

/// residual + layer(x), fused into the layer or as a separate addition.
fn forward(m: &Layers, which: usize, fused: bool, [x, r]: [&Var; 2]) -> Var {
    match (which, fused) {
        (0, true) => m.linear.forward_with_residual(x, r),
        (1, true) => m.bare.forward_with_residual(x, r),
        (2, true) => m.mlp.forward_with_residual(x, r),
        (3, true) => m.gated.forward_with_residual(x, r),
        (4, true) => m.attn.forward_with(x, None, Some(r.into())),
        (5, true) => m.grouped.forward_with(x, None, Some(r.into())),
        (_, true) => m.all.forward_with_residual(x, None, r),
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
fn outcome(rank: &Rank, plan: &Plan, dtype: DType, which: usize, fused: bool) -> Result<Vec<f64>> {
    let model = Model::with_dtype(rank, layers(), plan, 3, dtype)?;
    let tape = model.tape();
    let y = forward(&model, which, fused, [&model.x.on_tape(&tape), &model.r.on_tape(&tape)]);
    y.square().mean().backward()?;
    let mut found = y.tensor().to_f64()?;
    for gradient in tape.gradients().values() {
        found.extend(gradient.to_f64()?);
    }
    Ok(found)
}

/// Bytes that kernels read and write in a forward pass.
fn traffic(mesh: &str, plan: &Plan, which: usize, fused: bool) -> u64 {
    let run = |rank: &Rank| {
        let model = Model::new(rank, layers(), plan, 3)?;
        let tape = model.tape();
        let at = [&model.x.on_tape(&tape), &model.r.on_tape(&tape)];
        // One-time moves are not counted.
        let _ = forward(&model, which, fused, at);
        let before = rank.backend().cost().bytes;
        let _ = forward(&model, which, fused, at);
        Ok(rank.backend().cost().bytes - before)
    };
    World::new(Mesh::parse(mesh).unwrap()).dry_run(0, run).unwrap()
}

#[test]
fn the_epilogue_adds_the_residual_without_extra_traffic() {
    for (which, name) in NAMES.iter().enumerate() {
        for dtype in [DType::F32, DType::F64] {
            run("", |rank| {
                let plan = Plan::new();
                let fused = outcome(rank, &plan, dtype, which, true)?;
                assert_eq!(fused, outcome(rank, &plan, dtype, which, false)?, "{name} {dtype}");
                Ok(())
            });
        }
        let [fused, separate] = [true, false].map(|fused| traffic("", &Plan::new(), which, fused));
        assert_eq!(separate - fused, 2 * BYTES, "{name}: the result is written and read once less");
    }
}

#[test]
fn sharding_decides_whether_the_residual_is_fused() {
    let rows = || {
        Plan::new().store("x", "dp@0").store("r", "dp@0").compute("*.weight", "dp~").compute("*.bias", "dp~")
    };
    let tensor = || {
        Plan::tensor_parallel("tp")
            .row_parallel("linear")
            .row_parallel("bare")
            .column_parallel("mlp.c_fc")
            .row_parallel("mlp.c_proj")
    };
    let sequence = || Plan::new().store("r", "tp@1");
    for (mesh, plan, is_fused) in [
        ("dp=2", rows(), [true, true, true]),
        ("tp=2", Plan::copies("tp"), [true, true, true]),
        ("tp=2", Plan::new().point("*.out", "tp="), [false, false, false]),
        ("tp=2", tensor(), [false, false, false]),
        ("tp=2", sequence(), [false, false, false]),
    ] {
        for (which, is_fused) in is_fused.into_iter().enumerate() {
            let what = format!("{} on {mesh} under\n{plan}", NAMES[which]);
            let alone = run("", |rank| outcome(rank, &Plan::new(), DType::F64, which, false)).remove(0);
            let split = run(mesh, |rank| outcome(rank, &plan, DType::F64, which, true)).remove(0);
            let far = max_difference(&split, &alone);
            assert!(far < 1e-12, "{what}: {far}");
            let [fused, separate] = [true, false].map(|fused| traffic(mesh, &plan, which, fused));
            assert_eq!(fused < separate, is_fused, "{what}: {fused} {separate}");
        }
    }
}

#[test]
fn dropout_comes_before_the_residual_addition() {
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
