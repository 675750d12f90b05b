//! Whole training steps of the preset `tiny`.

use super::line::{Bench, Work, check};
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;

const ROWS: usize = 8;
const SEQ: usize = 64;
/// Steps that are measured, after as many whose losses are compared.
const STEPS: usize = 5;

/// Checks that the first losses are those of one rank, then measures.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let mut one: Option<Vec<f64>> = None;
    for mesh in ["", "dp=2", "tp=2", "dp=2,tp=2"] {
        let ranks = World::run(Mesh::parse(mesh)?, |rank| steps(bench, rank))?;
        let (losses, seconds) = &ranks[0];
        let one = one.get_or_insert_with(|| losses.clone());
        check("the loss of a training step", losses, one, 1e-5)?;
        let case = format!("tiny f32, {ROWS} x {SEQ} tokens");
        bench.tell("train_step", &case, mesh, *seconds, Work::Tokens((ROWS * SEQ) as f64));
    }
    Ok(())
}

fn steps(bench: &Bench, rank: &Rank) -> Result<(Vec<f64>, f64)> {
    let config = ModelConfig::preset("tiny").ok_or_else(|| Error::new(Kind::Config, "no preset `tiny`"))?;
    let plan = LanguageModel::plan(&config);
    let model = Model::new(rank, LanguageModel::new(&config), &plan, 0)?;
    let mut optim = AdamW::new(1e-3);
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, SEQ])?;
    let tokens = |shift: usize| -> Result<Tensor> {
        let ids: Vec<i64> = (0..ROWS * SEQ).map(|i| ((i + shift) * (i + shift) % 251) as i64).collect();
        Tensor::from_global(rank, &layout, &ids)
    };
    let (ids, targets) = (tokens(0)?, tokens(1)?);
    let mut step = || -> Result<f64> {
        let tape = model.tape();
        let loss = model.loss(&tape.constant(ids.clone()), &tape.constant(targets.clone()));
        loss.backward()?;
        optim.update(&model, tape.gradients())?;
        loss.item()
    };
    let losses = (0..STEPS).map(|_| step()).collect::<Result<Vec<f64>>>()?;
    // As many steps on every rank, whatever the clocks say.
    let sample = Bench { limit: std::time::Duration::ZERO, ..*bench };
    Ok((losses, sample.seconds(1, || step().map(|_| ()))?))
}
