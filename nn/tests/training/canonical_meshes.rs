//! The same bits on every mesh, proved by a table: each row of `canonical_meshes.txt` is a run on a mesh, whose losses, gradient norms and
//! last state are those of one rank, or states why it is refused. Runs have clipping, rows of unequal numbers of labels and, unless attention
//! is fused, dropout; where tokens are sharded, rows are longer, so that leaves have several tokens.

use crate::canonical_sums::{Bits, Run, gpt2_with_dropout};
use crate::llama;
use crate::support::SEQ;
use shardgrad_nn::{
    Deterministic, ExpertsConfig, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, ModelConfig, Plan,
};
use shardgrad_tensor::{DType, Mesh, World};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Instant;

/// A head with the names of columns, and one run per line. `hsdp=3x2` is 3 ranks with copies times 2 with shards. A form is that of context
/// parallelism, or `sequence` for sequence parallelism.
const TABLE: &str = include_str!("canonical_meshes.txt");

/// The rows that run with every `cargo test`, and those that are refused.
const NUM_IN_GATE: usize = 11;

/// The steps of a run in the gate, and of a run with `SHARDGRAD_MESHES`.
const STEPS: [u64; 2] = [2, 100];

/// The tokens of a row where tokens are sharded.
const SHARDED_ROW_TOKENS: usize = 19;

/// The positions of models with such rows.
const SHARDED_ROW_POSITIONS: usize = 24;

/// A row of the table.
#[derive(Debug)]
struct Row {
    model: &'static str,
    dtype: DType,
    microbatches: usize,
    mesh: String,
    tokens: usize,
    plan: Plan,
    /// What the refusal says; `None` for a run with the bits of one rank.
    refusal: Option<String>,
}

fn config(model: &str, tokens: usize) -> ModelConfig {
    // A model of short rows has positions for them alone.
    let positions = |short: usize| if tokens > short { SHARDED_ROW_POSITIONS } else { short };
    let gpt2 = |attn_pdrop: f64| {
        let dropout = gpt2_with_dropout();
        Gpt2Config { attn_pdrop, n_positions: positions(dropout.n_positions), ..dropout }
    };
    let llama = |kind: LlamaKind, attention_dropout: f64| {
        let config = llama::config(kind);
        let max_position_embeddings = positions(config.max_position_embeddings);
        LlamaConfig { max_position_embeddings, attention_dropout, ..config }
    };
    match model {
        "gpt2" => gpt2(0.2).into(),
        // Without dropout of attention weights attention is one kernel.
        "gpt2-fused" => gpt2(0.0).into(),
        "llama" => llama(LlamaKind::Llama, 0.2).into(),
        "llama-fused" => llama(LlamaKind::Llama, 0.0).into(),
        // With norms of heads.
        "qwen3-fused" => llama(LlamaKind::Qwen3, 0.0).into(),
        "mixtral" | "mixtral-fused" => LlamaConfig {
            experts: Some(ExpertsConfig {
                output_router_logits: true,
                router_aux_loss_coef: 0.1,
                ..ExpertsConfig::new(4, 2, 9)
            }),
            ..llama(LlamaKind::Mixtral, if model == "mixtral" { 0.2 } else { 0.0 })
        }
        .into(),
        other => panic!("the table names no model {other}"),
    }
}

impl Row {
    fn parse(line: &'static str) -> Row {
        let words: Vec<&'static str> = line.split_whitespace().collect();
        let [model, dtype, microbatches, pipeline, rows, other, form] = words[..7] else { panic!("{line}") };
        let tokens = if form == "sequence" || other.contains("cp=") { SHARDED_ROW_TOKENS } else { SEQ };
        let (mut plan, mut axes) = (LanguageModel::plan(&config(model, tokens)), Vec::new());
        plan = match form {
            "exchange" => plan.exchange(),
            "ring" => plan.ring(),
            "sequence" => plan.and(Plan::sequence_parallel("tp")),
            _ => plan,
        };
        if let Some((schedule, ranks)) = pipeline.split_once('=') {
            plan = plan.pipeline_schedule(schedule);
            axes.push(format!("pp={ranks}"));
        }
        if let Some((form, ranks)) = rows.split_once('=') {
            let (copies, shards) = ranks.split_once('x').unwrap_or(("1", ranks));
            let stage = form.strip_prefix("zero").map(|stage| stage.parse().expect("a stage of ZeRO"));
            let (more, of_rows) = match (form, stage) {
                ("dp", _) => (Plan::new(), format!("dp={ranks}")),
                (_, Some(stage)) => (Plan::zero(stage, "dp"), format!("dp={ranks}")),
                _ => (Plan::fsdp("fsdp"), format!("dp={copies},fsdp={shards}")),
            };
            plan = plan.and(more);
            axes.push(of_rows);
        }
        axes.extend((other != "-").then(|| other.to_string()));
        let refusal = words[7..].join(" ");
        Row {
            model,
            dtype: if dtype == "bf16" { DType::BF16 } else { DType::F32 },
            microbatches: microbatches.parse().expect("a number of microbatches"),
            mesh: axes.join(","),
            tokens,
            plan,
            refusal: (refusal != "same").then_some(refusal),
        }
    }

    fn run(&self) -> Run {
        let deterministic = Deterministic::Mesh { batch_leaves: 24, sum_leaves: 8 };
        let config = config(self.model, self.tokens);
        Run { dtype: self.dtype, tokens: self.tokens, deterministic, ..Run::new(config) }
    }

    fn bits(&self, steps: u64) -> Bits {
        self.run().train_as(&self.plan, &self.mesh, self.microbatches, steps, [None, None])
    }

    /// What the error of a trainer on the mesh, or of its first step, says.
    fn refusal_found(&self) -> String {
        let run = self.run();
        let world = World::new(Mesh::parse(&self.mesh).unwrap());
        let trained =
            world.launch(|rank| run.trainer(rank, &self.plan, self.microbatches)?.step().map(|_| ()));
        trained.map_or_else(|error| error.to_string(), |_| "nothing is refused".to_string())
    }
}

fn rows() -> Vec<Row> {
    TABLE.lines().skip(1).map(Row::parse).collect()
}

/// The rows to run and their steps, each with its number, from 1: those of the gate, or with `SHARDGRAD_MESHES` all, or the numbers in
/// it, as in `3,17`.
fn selected_rows() -> (Vec<(usize, Row)>, u64) {
    let rows = (1..).zip(rows()).filter(|(_, row)| row.refusal.is_none());
    match std::env::var("SHARDGRAD_MESHES").as_deref() {
        Err(_) => (rows.take(NUM_IN_GATE).collect(), STEPS[0]),
        Ok("all") => (rows.collect(), STEPS[1]),
        Ok(numbers) => {
            let number =
                |text: &str| -> usize { text.parse().expect("SHARDGRAD_MESHES has numbers of rows") };
            let numbers: Vec<usize> = numbers.split(',').map(number).collect();
            (rows.filter(|(number, _)| numbers.contains(number)).collect(), STEPS[1])
        }
    }
}

#[test]
fn canonical_meshes_have_the_bits_of_one_rank() {
    let (rows, steps) = selected_rows();
    assert!(!rows.is_empty(), "SHARDGRAD_MESHES has no number of a row that has the bits of one rank");
    let mut alone: BTreeMap<(&str, &str, usize), Bits> = BTreeMap::new();
    let mut others = Vec::new();
    for (number, row) in &rows {
        let started = Instant::now();
        let one = alone.entry((row.model, row.dtype.name(), row.tokens)).or_insert_with(|| {
            let run = row.run();
            run.train_as(&LanguageModel::plan(&run.config), "", 1, steps, [None, None])
        });
        let (alone, is_same) = (started.elapsed().as_secs_f64(), row.bits(steps) == *one);
        if !is_same {
            others.push(row);
        }
        if steps == STEPS[1] {
            let Row { model, dtype, microbatches, mesh, .. } = row;
            let (seconds, hash) = (started.elapsed().as_secs_f64(), one.1);
            let dtype = dtype.name();
            let text = format!("{number}: {model} {dtype} {microbatches} {mesh}: {hash:?}, same: {is_same}");
            let _ = writeln!(std::io::stderr(), "{text}, {seconds:.1} s, {alone:.1} s of them on one rank");
        }
    }
    assert!(others.is_empty(), "other bits than on one rank: {others:#?}");
    let hashes: Vec<_> = alone.values().map(|(_, hash)| hash).collect();
    assert!((1..hashes.len()).all(|i| !hashes[..i].contains(&hashes[i])), "the runs differ: {hashes:?}");
}

#[test]
fn meshes_of_the_table_without_canonical_sums_are_refused_for_the_stated_reason() {
    let refused: Vec<Row> = rows().into_iter().filter(|row| row.refusal.is_some()).collect();
    for row in &refused {
        let (found, stated) = (row.refusal_found(), row.refusal.as_deref().unwrap_or_default());
        assert!(found.contains(stated), "{}: stated `{stated}`, found: {found}", row.mesh);
    }
    assert!(!refused.is_empty());
}
