//! Random models under random plans: linear layers, norms, activations and residuals, with a tied embedding. With `integers` every step is exact
//! in f64.

use super::bug::{self, Bug};
use proptest::prelude::*;
use shardgrad::nn::Init;
use shardgrad::prelude::*;
use std::collections::BTreeMap;

/// One random case.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) dp: usize,
    pub(crate) tp: usize,
    pub(crate) width: usize,
    pub(crate) hidden: usize,
    pub(crate) vocabulary: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) num_blocks: usize,
    pub(crate) split_hidden: bool,
    pub(crate) split_vocabulary: bool,
    pub(crate) store_sharded: bool,
    pub(crate) rounds: usize,
    pub(crate) seed: u64,
    pub(crate) integers: bool,
}

/// Random cases, uneven and empty shards among them.
pub(crate) fn strategy() -> impl Strategy<Value = Sample> {
    let sizes = (1usize..=3, 1usize..=3, 2usize..=6, 1usize..=7, 2usize..=9);
    let data = (1usize..=5, 1usize..=4, 1usize..=2, 1usize..=2, any::<u64>());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (sizes, data, flags).prop_map(
        |((dp, tp, width, hidden, vocabulary), (rows, columns, num_blocks, rounds, seed), flags)| Sample {
            dp,
            tp,
            width,
            hidden,
            vocabulary,
            rows,
            columns,
            num_blocks,
            rounds,
            seed,
            split_hidden: flags.0,
            split_vocabulary: flags.1,
            store_sharded: flags.2,
            integers: false,
        },
    )
}

/// The local shard of a parameter: its range of each dim, and its bits.
pub(crate) type Held = (Vec<std::ops::Range<usize>>, Vec<u64>);

/// Results of a run: gathered gradients and loss of the first step, and the parameters' bits after two steps.
#[derive(Clone, Debug)]
pub(crate) struct Trained {
    pub(crate) loss: f64,
    pub(crate) gradients: BTreeMap<String, Vec<f64>>,
    pub(crate) replicas: BTreeMap<String, Vec<Held>>,
}

module! {
    struct Block { norm: LayerNorm, up: Linear, gain: Param, down: Linear; bug: Bug, integers: bool }
}

module! {
    struct Net { table: Param, blocks: Vec<Block>; bug: Bug, integers: bool }
}

impl Block {
    fn forward(&self, x: &Var) -> Var {
        let h = if self.integers { x.clone() } else { self.norm.forward(x) };
        let h = if self.bug == Bug::Detached { h.detach() } else { h };
        let gain = self.gain.on(&h);
        let gain = if self.bug == Bug::Masked { gain.scale(0.0) } else { gain };
        let h = self.up.forward(&h.mul(&gain));
        let h = if self.integers { h.relu() } else { h.gelu() };
        x.add(&bug::down(&self.down, &bug::forward(&h, self.bug), self.bug))
    }
}

impl Net {
    fn loss(&self, ids: &Var, targets: &Var) -> Var {
        let table = self.table.on(ids);
        let mut x = table.embedding(ids);
        for block in &self.blocks {
            x = block.forward(&x);
        }
        let logits = x.matmul_nt(&table);
        if self.integers {
            return logits.mul(&logits).sum();
        }
        bug::mean(&shardgrad::nn::loss::cross_entropy(&logits, targets), self.bug)
    }
}

impl Sample {
    pub(crate) fn mesh(&self) -> Mesh {
        Mesh::new(&[("dp", self.dp), ("tp", self.tp)]).expect("a small mesh")
    }

    fn init(&self) -> Init {
        if self.integers { Init::Integers(1) } else { Init::Normal(0.5) }
    }

    fn net(&self, bug: Bug) -> Net {
        let (d, f) = (self.width, self.hidden);
        let block = |_| Block {
            norm: LayerNorm::new(d),
            up: Linear::new(d, f).init(self.init()),
            gain: Param::new(&[d]).init(if self.integers { Init::Integers(1) } else { Init::Uniform(1.0) }),
            down: Linear::new(f, d).init(self.init()),
            bug,
            integers: self.integers,
        };
        Net {
            table: Param::new(&[self.vocabulary, d]).init(self.init()),
            blocks: (0..self.num_blocks).map(block).collect(),
            bug,
            integers: self.integers,
        }
    }

    fn plan(&self) -> Plan {
        // Without the rules below, all ranks of tp do the same work.
        let mut plan = Plan::copies("tp").and(Plan::data_parallel("dp"));
        if self.split_hidden {
            plan = plan.and(Plan::tensor_parallel("tp").column_parallel("*.up").row_parallel("*.down"));
        }
        if self.split_vocabulary {
            plan = plan.store("table", "tp@0");
        }
        if self.store_sharded {
            plan = plan.store("*.gain", "dp@0").compute("*.gain", "dp~");
        }
        plan
    }

    /// Trains two steps; returns the gradients of the first.
    pub(crate) fn train(&self, mesh: &Mesh, bug: Bug) -> Result<Trained> {
        let ranks = World::new(mesh.clone()).threads(1).launch(|rank| self.on_rank(rank, bug))?;
        let mut first = ranks[0].clone();
        for other in &ranks[1..] {
            for (name, pieces) in &other.replicas {
                first.replicas.get_mut(name).expect("all ranks hold all names").extend(pieces.clone());
            }
        }
        Ok(first)
    }

    fn on_rank(&self, rank: &Rank, bug: Bug) -> Result<Trained> {
        let plan = self.plan();
        let model = Model::with_dtype(rank, self.net(bug), &plan, self.seed, DType::F64)?;
        bug::initialise(&model, bug)?;
        let mut optim = AdamW::new(0.05);
        let mut seen: Option<(f64, BTreeMap<String, Vec<f64>>)> = None;
        for step in 0..2 {
            let tape = model.tape();
            let mut loss_sum = 0.0;
            for round in 0..self.rounds {
                let loss = model.loss(
                    &self.tokens(&tape, &plan, 2 * step + round, 0)?,
                    &self.tokens(&tape, &plan, 2 * step + round, 1)?,
                );
                loss_sum += loss.item()?;
                loss.backward()?;
            }
            let gradients = tape.gradients();
            if seen.is_none() {
                // A parameter without a gradient counts as zero.
                let gathered = |p: &Param| match gradients.get(&p.key()) {
                    Some(gradient) => Ok((p.name(), gradient.to_f64()?)),
                    None => Ok((p.name(), vec![0.0; p.numel()])),
                };
                seen = Some((loss_sum, model.params().iter().map(gathered).collect::<Result<_>>()?));
            }
            let lr = bug::rate(rank, 0.05, bug);
            let gradients = bug::skip(rank, &model, gradients, bug);
            // Drifting copies are for the invariants to find.
            optim.step(&model, gradients, StepArgs { copies_checked_every: 0, ..StepArgs::new(lr) })?;
        }
        let (loss, gradients) = seen.expect("two steps were taken");
        let bits = |p: &Param| -> Result<_> {
            let t = p.tensor();
            let shard = (0..t.layout().ndim()).map(|d| t.layout().range(d, rank.coordinates())).collect();
            Ok((p.name(), vec![(shard, t.to_local_f64()?.iter().map(|x| x.to_bits()).collect())]))
        };
        let replicas = model.params().iter().map(bits).collect::<Result<_>>()?;
        Ok(Trained { loss, gradients, replicas })
    }

    fn tokens(&self, tape: &Tape, plan: &Plan, draw: usize, shift: usize) -> Result<Var> {
        let rank = tape.rank();
        let layout = plan.batch_layout(rank.mesh(), DType::I64, &[self.rows, self.columns])?;
        let token =
            |i: usize| ((i + shift + 7 * draw) * 5 + i * i + self.seed as usize % 11) % self.vocabulary;
        let all: Vec<i64> = (0..self.rows * self.columns).map(|i| token(i) as i64).collect();
        Ok(tape.constant(Tensor::from_global(rank, &layout, &all)?))
    }
}
