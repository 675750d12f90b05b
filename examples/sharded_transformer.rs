//! The model of `transformer.rs` with pipeline, data and tensor parallelism (3D parallelism): only the mesh, the plan and the number of
//! microbatches differ.
//! `cargo run --release --example sharded_transformer -- --mesh pp=2,dp=2,tp=2`

#![allow(clippy::print_stdout, reason = "an example talks to people")]

use shardgrad::prelude::*;
use std::ops::Range;

const VOCAB: usize = 16;
const HALF: usize = 12;
const ROWS: usize = 32;

module! {
    struct Block { ln_1: LayerNorm, q: Linear, k: Linear, v: Linear, o: Linear, ln_2: LayerNorm, up: Linear, down: Linear }
}

impl Block {
    fn new(d: usize, heads: usize) -> Block {
        let split = || Linear::general(&[d], &[heads, d / heads]);
        Block {
            ln_1: LayerNorm::new(d),
            q: split(),
            k: split(),
            v: split(),
            o: Linear::general(&[heads, d / heads], &[d]),
            ln_2: LayerNorm::new(d),
            up: Linear::new(d, 4 * d),
            down: Linear::new(4 * d, d),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        let y = self.ln_1.forward(x);
        let (q, k, v) = (self.q.forward(&y), self.k.forward(&y), self.v.forward(&y));
        let x = x.add(&self.o.forward(&q.attention(&k, &v, true)));
        let y = self.ln_2.forward(&x);
        x.add(&self.down.forward(&self.up.forward(&y).gelu()))
    }
}

module! {
    struct Repeater { tokens: Embedding, positions: Embedding, blocks: Vec<Block>, norm: LayerNorm, head: Linear }
}

impl Repeater {
    fn forward(&self, ids: &Var) -> Var {
        let x = self.tokens.forward(ids).add(&self.positions.first_rows(ids, ids.shape()[1]));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        self.head.forward(&self.norm.forward(&x))
    }
}

/// Returns token `t` of row `row` of a step: random, the second half repeats the first.
fn token(step: u64, row: usize, t: usize) -> i64 {
    let place = (step as usize * ROWS + row) * HALF + t % HALF;
    (shardgrad::nn::module::name::random_key(place as u64, "token") % VOCAB as u64) as i64
}

/// Returns a batch: some columns of some rows of a step.
fn tokens(rank: &Rank, plan: &Plan, step: u64, rows: Range<usize>, columns: Range<usize>) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), columns.len()])?;
    let all = rows.flat_map(|row| columns.clone().map(move |t| token(step, row, t)));
    Tensor::from_global(rank, &layout, &all.collect::<Vec<_>>())
}

fn main() -> Result<()> {
    let mesh = std::env::args().skip(1).last().unwrap_or("pp=2,dp=2,tp=2".into());
    let tensor = Plan::tensor_parallel("tp")
        .column_parallel("q")
        .column_parallel("k")
        .column_parallel("v")
        .row_parallel("o")
        .column_parallel("up")
        .row_parallel("down");
    let plan =
        Plan::pipeline_parallel("pp").and(Plan::data_parallel("dp")).and(tensor.column_parallel("head"));
    World::run(Mesh::parse(&mesh)?, |rank| {
        let d = 64;
        let model = Repeater {
            tokens: Embedding::new(VOCAB, d),
            positions: Embedding::new(2 * HALF, d),
            blocks: vec![Block::new(d, 4), Block::new(d, 4)],
            norm: LayerNorm::new(d),
            head: Linear::new(d, VOCAB),
        };
        let read = |rank: &Rank, step, rows: Range<usize>| {
            let inputs = tokens(rank, &plan, step, rows.clone(), 0..2 * HALF - 1)?;
            Ok(vec![inputs, tokens(rank, &plan, step, rows, HALF..2 * HALF)?])
        };
        let loss = |model: &Repeater, x: &[Var]| {
            // The loss covers the second half: each token is predicted from those before it.
            let logits = model.forward(&x[0]).slice(1, HALF - 1..2 * HALF - 1);
            cross_entropy(&logits, &x[1]).mean()
        };
        let settings = TrainerConfig { seed: 1, microbatches: 4, ..TrainerConfig::new(ROWS) };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
        for step in 0..=300 {
            let report = trainer.step()?;
            if step % 50 == 0 && rank.index() == 0 {
                println!("step {step:3}  loss {:.4}", report.loss);
            }
        }
        Ok(())
    })?;
    Ok(())
}
