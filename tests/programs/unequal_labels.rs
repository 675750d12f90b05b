//! Fine-tuning on rows with unequal counts of labels, some without any: loss and gradients are the mean over all labels.

use crate::cli::Folder;
use approx::abs_diff_eq;
use shardgrad::nn::Deterministic;
use shardgrad::prelude::*;
use std::ops::Range;
use std::path::Path;

const ROWS: usize = 8;
const TOKENS: usize = 6;
const WORDS: usize = 11;
const WIDTH: usize = 8;
/// A token without a label.
const IGNORED: i64 = -100;
/// The first token with a label in each row, so that rows have 6, 0, 1, 3, 0, 0, 5 and 2 labels.
const FIRST_LABEL: [usize; ROWS] = [0, 6, 5, 3, 6, 6, 1, 4];
const LABELS: f64 = 17.0;

module! { struct Block { norm: RmsNorm, attn: Attention, mlp: Mlp } }
module! { struct Reader { words: Embedding, blocks: Vec<Block>, norm: RmsNorm, head: Linear } }

impl Reader {
    fn new() -> Reader {
        let block = || Block {
            norm: RmsNorm::new(WIDTH),
            attn: Attention::new(WIDTH, 2),
            mlp: Mlp::new(WIDTH, 4 * WIDTH),
        };
        Reader {
            words: Embedding::new(WORDS, WIDTH),
            blocks: vec![block(), block()],
            norm: RmsNorm::new(WIDTH),
            head: Linear::new(WIDTH, WORDS),
        }
    }

    fn forward(&self, words: &Var) -> Var {
        let x = self.blocks.iter().fold(self.words.forward(words), |x, block| {
            let x = &x + block.attn.forward(&block.norm.forward(&x));
            &x + block.mlp.forward(&x)
        });
        self.head.forward(&self.norm.forward(&x))
    }
}

fn plan() -> Plan {
    let heads = Plan::new()
        .store("attn.c_attn.weight", "tp@2")
        .store("attn.c_attn.bias", "tp@1")
        .store("attn.c_proj.weight", "tp@0");
    let tensor = Plan::tensor_parallel("tp").column_parallel("mlp.c_fc").row_parallel("mlp.c_proj");
    Plan::data_parallel("dp").and(tensor).and(heads).and(Plan::pipeline_parallel("pp"))
}

fn word(row: usize, token: usize) -> i64 {
    ((row * 5 + token * token * 3 + row * token) % WORDS) as i64
}

/// Words and labels of rows; a label is the next word.
fn read(rank: &Rank, rows: Range<usize>) -> Result<Vec<Tensor>> {
    let layout = plan().batch_layout(rank.mesh(), DType::I64, &[rows.len(), TOKENS])?;
    let at = |i: usize| (rows.start + i / TOKENS, i % TOKENS);
    let numbers = |number: &dyn Fn(usize, usize) -> i64| -> Vec<i64> {
        (0..rows.len() * TOKENS).map(|i| number(at(i).0, at(i).1)).collect()
    };
    let label =
        |row: usize, token: usize| if token < FIRST_LABEL[row] { IGNORED } else { word(row, token + 1) };
    [numbers(&word), numbers(&label)].iter().map(|all| Tensor::from_global(rank, &layout, all)).collect()
}

/// The mean cross-entropy over the labels of all rows, from logits, by hand.
fn loss_by_hand(logits: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (i, z) in logits.chunks(WORDS).enumerate() {
        let (row, token) = (i / TOKENS, i % TOKENS);
        if token >= FIRST_LABEL[row] {
            let log_sum: f64 = z.iter().map(|z| z.exp()).sum::<f64>().ln();
            sum += log_sum - z[word(row, token + 1) as usize];
        }
    }
    sum / LABELS
}

/// Loads weights, freezes the embedding, and takes steps. Returns losses, norms, and the accuracy of each step, and the logits
/// after them.
fn fine_tune(
    rank: &Rank,
    weights: &Path,
    microbatches: usize,
    deterministic: Deterministic,
) -> Result<Vec<f64>> {
    let config = TrainerConfig {
        microbatches,
        dtype: DType::F64,
        clip: Some(0.5),
        deterministic,
        ..TrainerConfig::new(ROWS)
    };
    let loss = |model: &Reader, x: &[Var]| {
        let (logits, labels) = (model.forward(&x[0]), &x[1]);
        let (right, count) = CrossEntropy::MASKED.correct(&logits, labels);
        CrossEntropy::MASKED.loss(&logits, labels).also_weighted("accuracy", right, count)
    };
    let read_rows = |rank: &Rank, _: u64, rows: Range<usize>| read(rank, rows);
    let mut trainer = Trainer::new(rank, Reader::new(), &plan(), AdamW::new(1e-2), config, read_rows, loss)?;
    trainer.model().load_weights(weights)?;
    trainer.model().freeze("words.*")?;
    let mut found = Vec::new();
    for _ in 0..4 {
        let words = read(trainer.rank(), 0..ROWS)?;
        let logits = trainer.infer(&words[..1], |model, x| model.forward(&x[0]))?.to_f64()?;
        let report = trainer.step()?;
        assert_eq!(report.count, Some(LABELS));
        let right = loss_by_hand(&logits);
        let near = abs_diff_eq!(report.loss, right, epsilon = 1e-12 * right);
        assert!(near, "{} instead of {right}", report.loss);
        found.extend([report.loss, report.grad_norm, report.auxiliary("accuracy")]);
    }
    let words = read(trainer.rank(), 0..ROWS)?;
    found.extend(trainer.infer(&words[..1], |model, x| model.forward(&x[0]))?.to_f64()?);
    Ok(found)
}

#[test]
fn every_label_counts_once_on_every_mesh_and_in_microbatches() {
    let folder = Folder::new("programs-unequal-labels");
    let weights = folder.0.join("pretrained");
    World::run(Mesh::single(), |rank| {
        Model::with_dtype(rank, Reader::new(), &plan(), 3, DType::F64)?.save_weights(&weights)
    })
    .unwrap();
    let meshes = ["dp=2", "tp=2", "pp=2", "dp=2,tp=2"];
    // Of four microbatches, the third has no label. In both modes: sums that follow the mesh are over microbatches, which differ.
    let run = Deterministic::Run;
    let whole = super::same_on(meshes, 1e-9, |rank| fine_tune(rank, &weights, 1, run));
    let parts = super::same_on(meshes, 1e-9, |rank| fine_tune(rank, &weights, 4, run));
    crate::training_run::same(&whole, &parts, 1e-9, "4 microbatches");
    assert!(whole[9] < whole[0], "{whole:?}");
    let canonical = Deterministic::Mesh { batch_leaves: ROWS, sum_leaves: 8 };
    let bits = |mesh: &str, microbatches: usize| {
        let ranks = World::run(Mesh::parse(mesh)?, |rank| fine_tune(rank, &weights, microbatches, canonical));
        Ok::<_, Error>(ranks?.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    let alone = bits("", 1).unwrap();
    for mesh in meshes {
        for microbatches in [1, 4] {
            let found = bits(mesh, microbatches).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            let is_same = found.chunks(alone.len()).all(|rank| rank == alone);
            assert!(is_same, "{mesh} in {microbatches} microbatches: other bits than on one rank");
        }
    }
}
