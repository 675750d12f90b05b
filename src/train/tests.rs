//! Rows that ask for unequally many tokens: the loss of a step is the mean over all of them, however the batch is cut.

use super::*;
use crate::data::scratch::Scratch;
use crate::data::{Order, TokenFile, Vocabulary};
use shardgrad::nn::hf::TensorWriter;
use shardgrad::nn::{BertConfig, ModelConfig};
use std::sync::Arc;

const ROWS: usize = 4;
const SEQ: usize = 3;
const NONE: i64 = -100;

/// Four rows that ask for 1, 3, 2 and no token.
fn rows(dir: &Scratch, config: &ModelConfig) -> Sampler {
    let path = dir.path("rows.safetensors");
    let columns: [(&str, [i64; ROWS * SEQ]); 2] = [
        ("input_ids", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]),
        ("labels", [NONE, 7, NONE, 1, 2, 3, 4, NONE, 5, NONE, NONE, NONE]),
    ];
    let entries = columns.map(|(name, _)| (name.to_string(), DType::I64, vec![ROWS, SEQ]));
    let mut writer = TensorWriter::create(&path, &entries).unwrap();
    for (name, numbers) in columns {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        writer.append(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    Sampler::of_tokens(
        Arc::new(TokenFile::open(&path, &Vocabulary::new(config)).unwrap()),
        Order::InFileOrder,
    )
}

#[test]
fn a_token_that_is_asked_for_weighs_the_same_in_every_microbatch() {
    let (dir, config) = (Scratch::new(), ModelConfig::Bert(BertConfig::new(8, SEQ, [6, 5], 2, 2)));
    let (rows, plan) = (rows(&dir, &config), LanguageModel::plan(&config));
    let outcome = |mesh: &str, microbatches: usize, chunk: usize| {
        let all = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let recipe = Recipe {
                steps: 3,
                batch: ROWS,
                seq: SEQ,
                microbatches,
                schedule: Schedule::constant(0.1),
                optim: AdamW::new(0.1),
                clip: None,
                seed: 1,
                precision: Precision::of(DType::F64),
            };
            let mut trainer = recipe.trainer(rank, LanguageModel::new(&config), &plan, &rows)?;
            let mut found = Vec::new();
            for _ in 0..recipe.steps {
                let report = trainer.step(&[])?;
                found.extend([report.loss, report.grad_norm]);
            }
            found.push(mean_loss(trainer.rank(), &plan, &rows, chunk, |x| trainer.loss_part(x))?);
            Ok(found)
        });
        all.unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
    };
    let whole = outcome("dp=1", 1, ROWS);
    for (mesh, microbatches, chunk) in [("dp=1", 2, 1), ("dp=1", 4, 3), ("dp=2", 2, 2), ("pp=2", 4, 1)] {
        let cut = outcome(mesh, microbatches, chunk);
        let far = whole.iter().zip(&cut).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
        assert!(far < 1e-10, "{mesh}, {microbatches} microbatches: {cut:?} instead of {whole:?}");
    }
}
