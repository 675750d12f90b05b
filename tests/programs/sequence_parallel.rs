//! Sequence parallelism by plan on the library's Llama: no line of the model changes, and a rank keeps fewer activations.

use shardgrad::nn::{Llama, LlamaConfig, LlamaKind};
use shardgrad::prelude::*;

const ROWS: usize = 2;
const TOKENS: usize = 12;
const WORDS: usize = 19;

/// Losses of steps; the bytes that the first forward pass keeps for the backward pass.
fn train(rank: &Rank, plan: &Plan) -> Result<(Vec<f64>, usize)> {
    let config = LlamaConfig::new(LlamaKind::Llama, WORDS, TOKENS, [16, 24], 2, [4, 4]);
    let model = Model::with_dtype(rank, Llama::new(&config), plan, 1, DType::F64)?;
    let mut optim = AdamW::new(1e-2);
    let words = |shift: usize| -> Result<Tensor> {
        let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, TOKENS])?;
        let word = |i: usize| (((i + shift) * (i + shift) + 3 * i) % WORDS) as i64;
        Tensor::from_global(rank, &layout, &(0..ROWS * TOKENS).map(word).collect::<Vec<i64>>())
    };
    let (ids, targets) = (words(0)?, words(1)?);
    let (mut losses, mut kept) = (Vec::new(), 0);
    for step in 0..6 {
        let tape = model.tape();
        let loss = model.loss(&tape.constant(ids.clone()), &tape.constant(targets.clone()));
        if step == 0 {
            kept = tape.saved_bytes();
        }
        loss.backward()?;
        optim.update(&model, tape.gradients())?;
        losses.push(loss.item()?);
    }
    Ok((losses, kept))
}

#[test]
fn losses_are_those_of_one_rank_and_fewer_activations_are_kept() {
    let sequence = Plan::llama().and(Plan::sequence_parallel("tp"));
    let meshes = ["tp=2", "tp=3", "tp=4", "dp=2,tp=2"];
    let losses = super::same_on(meshes, 1e-9, |rank| Ok(train(rank, &sequence)?.0));
    assert!(losses[5] < losses[0], "{losses:?}");
    let kept = |plan: &Plan| {
        let kept = World::run(Mesh::parse("tp=4").unwrap(), |rank| Ok(train(rank, plan)?.1)).unwrap();
        kept.into_iter().max().unwrap()
    };
    let (with, without) = (kept(&sequence), kept(&Plan::llama()));
    assert!(3 * with < 2 * without, "{with} bytes, {without} without sequence parallelism");
}
