//! LoRA on a Hugging Face folder: adapters by pattern, trained alone, saved, and loaded into a new model.

use crate::cli::Folder;
use shardgrad::nn::{CastRule, Llama, LoadFilter, ModelConfig};
use shardgrad::prelude::*;
use std::path::Path;

const ROWS: usize = 6;
const TOKENS: usize = 8;

/// The model of the folder with new adapters.
fn adapted(rank: &Rank, base: &Path, seed: u64) -> Result<Model<Llama>> {
    let ModelConfig::Llama(config) = ModelConfig::read(base)? else { panic!("a Llama") };
    let llama = Llama::new(&config)
        .adapt("*.q_proj", |layer| Lora::new(layer, 2).alpha(4.0))
        .adapt("*.down_proj", |layer| Lora::new(layer, 2).alpha(4.0));
    let model = Model::with_dtype(rank, llama, &Plan::llama(), seed, DType::F64)?;
    model.load_filtered(base, CastRule::Widen, &LoadFilter::new().may_lack("*.lora_*"))?;
    Ok(model)
}

fn loss(model: &Model<Llama>, tape: &Tape) -> Result<Var> {
    let words = |shift: usize| -> Result<Var> {
        let rank = model.rank();
        let layout = Plan::llama().batch_layout(rank.mesh(), DType::I64, &[ROWS, TOKENS])?;
        let ids: Vec<i64> = (0..ROWS * TOKENS).map(|i| ((i + shift) % 5 + 2) as i64).collect();
        Ok(tape.constant(Tensor::from_global(rank, &layout, &ids)?))
    };
    Ok(model.loss(&words(0)?, &words(1)?))
}

/// Losses of steps of the adapters alone, and the loss of a new model with the saved adapters.
fn train(rank: &Rank, base: &Path, out: &Path) -> Result<Vec<f64>> {
    let model = adapted(rank, base, 1)?;
    assert_eq!(model.freeze_all_but("*.lora_*")?, 2 * 2 * 2);
    let before = model.param("model.layers.0.mlp.up_proj.weight")?.tensor().to_f64()?;
    let (mut optim, mut losses) = (AdamW::new(2e-2), Vec::new());
    for _ in 0..5 {
        let tape = model.tape();
        let loss = loss(&model, &tape)?;
        loss.backward()?;
        let gradients = tape.gradients();
        assert_eq!(gradients.len(), 8, "frozen weights have no gradient");
        optim.update(&model, gradients)?;
        losses.push(loss.item()?);
    }
    assert_eq!(model.param("model.layers.0.mlp.up_proj.weight")?.tensor().to_f64()?, before);
    model.save_adapters(out)?;
    let trained = loss(&model, &model.inference_tape())?.item()?;
    let other = adapted(rank, base, 2)?;
    assert_eq!(loss(&other, &other.inference_tape())?.item()?, losses[0], "new adapters add nothing");
    other.load_adapters(out)?;
    assert_eq!(loss(&other, &other.inference_tape())?.item()?, trained);
    losses.push(trained);
    Ok(losses)
}

#[test]
fn adapters_train_alike_on_every_mesh() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/hf/llama");
    let out = Folder::new("programs-lora");
    let losses = super::same_on(["dp=2", "tp=2", "tp=3", "dp=2,tp=2"], 1e-9, |rank| {
        train(rank, &base, &out.0.join(format!("adapters {}", rank.mesh())))
    });
    assert!(losses[5] < 0.9 * losses[0], "{losses:?}");
}
