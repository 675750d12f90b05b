//! Attention layers: the tokens that a token attends to, and the fused op against attention op by op.

use crate::support::{max_difference, run};
use approx::abs_diff_eq;
use shardgrad_autograd::Noise;
use shardgrad_nn::{Attention, EncoderAttention, GroupedQueryAttention, Init, Model, Param, Plan, module};
use shardgrad_tensor::{DType, Mesh, Rank, Result, Tensor, Value, World};

#[test]
fn attention_is_causal_or_bidirectional() {
    run("tp=2", |rank| {
        let plan = Plan::new().store("c_attn.weight", "tp@2").store("c_proj.weight", "tp@0");
        let values: Vec<f64> = (0..24).map(|i| f64::from(i * i % 7) - 3.0).collect();
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for causal in [true, false] {
            let model = Model::with_dtype(rank, Attention::new(8, 2).causal(causal), &plan, 1, DType::F64)?;
            let tape = model.tape();
            let forward = |tokens: usize| -> Result<Vec<f64>> {
                let x = Tensor::from_host(rank, &[1, tokens, 8], &values[..8 * tokens])?;
                model.forward(&tape.constant(x)).tensor().to_f64()
            };
            let y = forward(3)?;
            // The first token as a sequence of its own.
            let alone = forward(1)?;
            assert_eq!(abs_diff_eq!(y[..8], alone[..], epsilon = 1e-12), causal);
            first.push(y[..8].to_vec());
            last.push(y[16..].to_vec());
        }
        assert_ne!(first[0], first[1]);
        assert_eq!(last[0], last[1], "the last token attends to all tokens either way");
        Ok(())
    });
}

/// The result and all gradients of attention on joint or separate q, k and v, and the bytes that kernels moved.
fn attention_results(rank: &Rank, is_joint: bool) -> Result<(Vec<Tensor>, u64)> {
    let model = Model::new(rank, Attention::new(12, 3), &Plan::new(), 1)?;
    let tape = model.tape();
    let numbers: Vec<f32> = (0..2 * 4 * 12u16).map(|i| f32::from(i * 37 % 19) / 8.0 - 1.0).collect();
    let x = tape.constant(Tensor::from_host(rank, &[2, 4, 12], &numbers)?);
    let y = if is_joint {
        model.forward(&x)
    } else {
        let qkv = model.c_attn.forward(&x).unbind(2);
        model.c_proj.forward(&qkv[0].attention(&qkv[1], &qkv[2], true))
    };
    y.square().mean().backward()?;
    let mut found: Vec<Tensor> = tape.gradients().into_values().collect();
    found.push(y.tensor().clone());
    Ok((found, rank.backend().cost().bytes))
}

#[test]
fn attention_on_joint_qkv_matches_separate_qkv_and_moves_fewer_bytes() {
    run("", |rank| {
        let (joined, apart) = (attention_results(rank, true)?.0, attention_results(rank, false)?.0);
        assert_eq!(joined.len(), 5);
        for (x, y) in joined.iter().zip(&apart) {
            assert_eq!(x.to_f64()?, y.to_f64()?);
        }
        Ok(())
    });
    let [joined, apart] = [true, false].map(|is_joint| {
        let bytes = |rank: &Rank| Ok(attention_results(rank, is_joint)?.1);
        World::new(Mesh::single()).dry_run(0, bytes).unwrap()
    });
    assert_eq!(apart - joined, 2 * 3 * 2 * 4 * 12 * 4, "q, k and v are not copied");
}

module! {
    /// Every attention layer, and their input as a parameter.
    struct Layers { x: Param, joint: Attention, grouped: GroupedQueryAttention, encoder: EncoderAttention }
}

/// The sum of the results of all layers, fused or op by op, and the gradients of all parameters.
fn layer_results(
    mesh: &str,
    plan: &Plan,
    (is_causal, window): (bool, Option<usize>),
    is_fused: bool,
) -> Vec<f64> {
    // A probability so small that nothing is dropped or scaled; only the code path differs.
    let p = if is_fused { 0.0 } else { 1e-300 };
    let mut ranks = run(mesh, |rank| {
        let layers = Layers {
            x: Param::new(&[2, 5, 12]).init(Init::Normal(1.0)),
            joint: Attention::new(12, 3).causal(is_causal).dropout(p),
            grouped: GroupedQueryAttention::new(12, [2, 2, 4], &[1.0, 0.1]).sliding_window(window).dropout(p),
            encoder: EncoderAttention::new(12, 3).dropout(p),
        };
        let model = Model::with_dtype(rank, layers, plan, 3, DType::F64)?;
        let tape = model.tape();
        tape.set_noise(Some(Noise { seed: 1, step: 0, first_row: 0 }));
        let x = model.x.on_tape(&tape);
        let y = model.joint.forward(&x).add(&model.grouped.forward(&x)).add(&model.encoder.forward(&x, None));
        y.square().mean().backward()?;
        let mut found = y.tensor().to_f64()?;
        for gradient in tape.gradients().values() {
            found.extend(gradient.to_f64()?);
        }
        Ok(found)
    });
    ranks.swap_remove(0)
}

#[test]
fn fused_attention_matches_attention_op_by_op_in_every_layer() {
    let rows = Plan::new().store("x", "dp@0").compute("*.weight", "dp~").compute("*.bias", "dp~");
    let heads = Plan::new()
        .store("c_attn.weight", "tp@2")
        .store("*_proj.weight", "tp@1")
        .store("c_proj.weight", "tp@0")
        .store("o_proj.weight", "tp@0");
    for (mesh, plan) in [("", Plan::new()), ("dp=2", rows), ("tp=2", heads)] {
        for masks in [(true, None), (false, Some(2))] {
            let [fused, unfused] = [true, false].map(|is_fused| layer_results(mesh, &plan, masks, is_fused));
            let far = max_difference(&fused, &unfused);
            assert!(far < 1e-12, "{mesh} {masks:?}: {far}");
            assert_ne!(fused, unfused, "another code path rounds differently");
        }
    }
}
