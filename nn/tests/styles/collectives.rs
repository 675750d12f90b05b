//! The collectives of a step in each style on one small model: golden lists in `collectives.txt`, and bytes by closed formulas.
//!
//! After a change that is meant to change them: `SHARDGRAD_UPDATE=1 cargo test -p shardgrad-nn --test styles collectives`. The formulas
//! hold for any number of calls.

use crate::combination::{Style, Task};
use crate::training::Training;
use shardgrad_nn::{
    ExpertsConfig, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, ModelConfig, Plan, Sgd,
};
use shardgrad_tensor::{DType, Mesh, Phase, Record, World};
use std::collections::BTreeMap;
use std::fmt::Write as _;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/styles/collectives.txt");

/// Microbatches of a step, and the rows of each.
const MICROBATCHES: usize = 2;
const ROWS: usize = 4;
const TOKENS: usize = 8;
const VOCABULARY: usize = 16;
const WIDTH: usize = 8;
const BLOCKS: usize = 2;
const EXPERTS: usize = 4;
const EXPERTS_PER_TOKEN: usize = 2;
/// Elements of the residual stream, and tokens, of all microbatches of a step.
const TOKENS_PER_STEP: usize = MICROBATCHES * ROWS * TOKENS;
const STREAM: usize = TOKENS_PER_STEP * WIDTH;

fn gpt2() -> ModelConfig {
    Gpt2Config::new(VOCABULARY, TOKENS, WIDTH, BLOCKS, 4).into()
}

fn mixtral() -> ModelConfig {
    LlamaConfig {
        experts: Some(ExpertsConfig::new(EXPERTS, EXPERTS_PER_TOKEN, 8)),
        ..LlamaConfig::new(LlamaKind::Mixtral, VOCABULARY, TOKENS, [WIDTH, 8], BLOCKS, [4, 2])
    }
    .into()
}

/// The parameters of GPT-2: those of its blocks, embeddings of tokens and positions, the last norm.
const BLOCK_WEIGHTS: usize = 12 * WIDTH * WIDTH;
const BLOCK_NORMS: usize = 4 * WIDTH;
const BLOCK_BIASES: usize = 9 * WIDTH;
const TABLE: usize = VOCABULARY * WIDTH;
const POSITIONS: usize = TOKENS * WIDTH;
const GPT2_PARAMS: usize =
    BLOCKS * (BLOCK_WEIGHTS + BLOCK_NORMS + BLOCK_BIASES) + TABLE + POSITIONS + 2 * WIDTH;

/// The parameters of Mixtral that are not in experts: projections of two key heads and four query heads, gates, norms and tables.
const MIXTRAL_SHARED: usize = BLOCKS * (3 * WIDTH * WIDTH + WIDTH * EXPERTS + 2 * WIDTH) + WIDTH + 2 * TABLE;

/// Bytes of a phase, an op and the axes of its groups.
type Bytes = BTreeMap<String, u64>;

/// A style, and the elements by formula: each moves 8 bytes.
struct StyleCase {
    name: &'static str,
    model: ModelConfig,
    mesh: &'static str,
    plan: Plan,
    elements: Vec<(&'static str, usize)>,
}

/// What a rank of n moves of an all-gather, a reduce-scatter or an all-to-all of x elements.
fn share(x: usize, n: usize) -> usize {
    x / n * (n - 1)
}

fn cases() -> Vec<StyleCase> {
    let (p, m, x) = (GPT2_PARAMS, MICROBATCHES, STREAM);
    let case = |name, mesh, plan, elements| StyleCase { name, model: gpt2(), mesh, plan, elements };
    let experts = |name, plan, elements| StyleCase { name, model: mixtral(), mesh: "ep=2", plan, elements };
    // A block has two partial sums, of attention and of the MLP; the embedding and the head have one more.
    let sums = (2 * BLOCKS + 1) * x;
    // Of a loss: the largest logit, the sum of exponentials and the logit of the target.
    let loss = 3 * TOKENS_PER_STEP;
    // Backward reads no biases and no embeddings, and the table is still there.
    let gathered_again = BLOCKS * (BLOCK_WEIGHTS + BLOCK_NORMS / 2) + WIDTH;
    let sharded = |gather: &'static str, again: &'static str, reduce: &'static str| {
        // The table is gathered for the embedding, and again for the head.
        vec![
            (gather, m * share(p + TABLE, 2)),
            (again, m * share(gathered_again, 2)),
            (reduce, m * share(p, 2)),
        ]
    };
    let fsdp = sharded("forward all_gather fsdp", "backward all_gather fsdp", "backward reduce_scatter fsdp");
    // The first of two pipeline stages holds one block, both embeddings, and half of the rows. The last stage holds the table too, whose
    // gradient crosses as shards.
    let stage = BLOCK_WEIGHTS + BLOCK_NORMS + BLOCK_BIASES + TABLE + POSITIONS;
    let block_again = BLOCK_WEIGHTS + BLOCK_NORMS / 2;
    let crossing = vec![
        ("forward send pp", x / 2),
        ("backward recv pp", (x + TABLE) / 2),
        ("backward send pp", TABLE / 2),
    ];
    let once = |gather: &'static str, reduce: &'static str| {
        [crossing.clone(), vec![(gather, share(stage, 2)), (reduce, m * share(stage, 2))]].concat()
    };
    let keys = 2 * BLOCKS * x;
    let pairs = EXPERTS_PER_TOKEN * TOKENS_PER_STEP * BLOCKS;
    let counts = m * BLOCKS * EXPERTS;
    vec![
        case("data", "dp=2", Plan::new(), vec![("backward all_reduce dp", 2 * share(p, 2))]),
        case(
            "ZeRO 1",
            "dp=2",
            Plan::zero(1, "dp"),
            vec![("forward all_gather dp", share(p, 2)), ("backward reduce_scatter dp", share(p, 2))],
        ),
        case(
            "ZeRO 2",
            "dp=2",
            Plan::zero(2, "dp"),
            vec![("forward all_gather dp", share(p, 2)), ("backward reduce_scatter dp", m * share(p, 2))],
        ),
        case(
            "ZeRO 3",
            "dp=2",
            Plan::zero(3, "dp"),
            sharded("forward all_gather dp", "backward all_gather dp", "backward reduce_scatter dp"),
        ),
        case("FSDP", "fsdp=2", Plan::new(), fsdp.clone()),
        case(
            "hybrid",
            "dp=2,fsdp=2",
            Plan::new(),
            [fsdp, vec![("backward all_reduce dp", 2 * share(p / 2, 2))]].concat(),
        ),
        case(
            "tensor",
            "tp=2",
            Plan::new(),
            vec![
                ("forward all_reduce tp", 2 * share(sums + loss, 2)),
                ("backward all_reduce tp", 2 * share(sums, 2)),
            ],
        ),
        case(
            "sequence",
            "tp=2",
            Plan::sequence_parallel("tp"),
            vec![
                ("forward reduce_scatter tp", share(sums, 2)),
                ("forward all_gather tp", share(sums, 2)),
                ("forward all_reduce tp", 2 * share(loss, 2)),
                ("backward reduce_scatter tp", share(sums, 2)),
                // The adjoints, and each gathered input again.
                ("backward all_gather tp", share(2 * sums, 2)),
                // Norms, positions and the biases after partial sums are used for the tokens of each rank.
                (
                    "backward all_reduce tp",
                    2 * share(POSITIONS + BLOCKS * (BLOCK_NORMS + 2 * WIDTH) + 2 * WIDTH, 2),
                ),
            ],
        ),
        case(
            "context by gather",
            "cp=2",
            Plan::new(),
            vec![
                ("forward all_gather cp", share(keys, 2)),
                ("backward reduce_scatter cp", share(keys, 2)),
                ("backward all_reduce cp", 2 * share(p, 2)),
            ],
        ),
        case(
            "context by ring",
            "cp=4",
            Plan::context_parallel("cp").ring(),
            vec![
                ("forward send cp", share(keys, 4)),
                ("forward recv cp", share(keys, 4)),
                // Keys and values again, and their cotangents.
                ("backward send cp", 2 * share(keys, 4)),
                ("backward recv cp", 2 * share(keys, 4)),
                ("backward all_reduce cp", 2 * share(p, 4)),
            ],
        ),
        case(
            "context by exchange",
            "cp=2",
            Plan::context_parallel("cp").exchange(),
            vec![
                ("forward all_to_all cp", share(4 * BLOCKS * x / 2, 2)),
                ("backward all_to_all cp", share(4 * BLOCKS * x / 2, 2)),
                ("backward all_reduce cp", 2 * share(p, 2)),
            ],
        ),
        experts(
            "experts by gather",
            Plan::expert_parallel("ep").gather_experts(),
            vec![
                ("forward all_gather ep", share(BLOCKS * (x + 2 * EXPERTS_PER_TOKEN * TOKENS_PER_STEP), 2)),
                ("forward reduce_scatter ep", share(BLOCKS * x, 2)),
                ("backward all_gather ep", share(BLOCKS * x, 2)),
                ("backward reduce_scatter ep", share(BLOCKS * (x + EXPERTS_PER_TOKEN * TOKENS_PER_STEP), 2)),
                ("backward all_reduce ep", 2 * share(MIXTRAL_SHARED, 2)),
            ],
        ),
        experts(
            "experts by exchange",
            Plan::expert_parallel("ep").exchange_experts(),
            vec![
                // Counts, rows and results.
                ("forward all_to_all ep", share(counts + pairs / 2 * 2 * WIDTH, 2)),
                // Counts, rows with cotangents and weights, and the cotangents of rows and weights.
                ("backward all_to_all ep", share(counts + pairs / 2 * (3 * WIDTH + 2), 2)),
                ("backward all_reduce ep", 2 * share(MIXTRAL_SHARED, 2)),
            ],
        ),
        case(
            "pipeline",
            "pp=2",
            Plan::new(),
            vec![
                ("forward send pp", x),
                // The cotangents of activations, and the gradient of the table that both stages hold.
                ("backward recv pp", x + TABLE),
                ("backward send pp", TABLE),
            ],
        ),
        case(
            "pipeline with ZeRO 2",
            "pp=2,dp=2",
            Plan::zero(2, "dp"),
            once("forward all_gather dp", "backward reduce_scatter dp"),
        ),
        case(
            "pipeline with FSDP",
            "pp=2,fsdp=2",
            Plan::new(),
            once("forward all_gather fsdp", "backward reduce_scatter fsdp"),
        ),
        case(
            "pipeline with FSDP by microbatch",
            "pp=2,fsdp=2",
            Plan::new().gathered_bytes_max(0),
            vec![
                ("forward all_gather fsdp", m * share(stage, 2)),
                ("backward all_gather fsdp", m * share(block_again, 2)),
                ("backward reduce_scatter fsdp", m * share(stage, 2)),
            ]
            .into_iter()
            .chain(crossing.clone())
            .collect(),
        ),
    ]
}

impl StyleCase {
    /// The collectives of the second step on rank 0: the first one also compares copies.
    fn records(&self) -> Vec<Record> {
        let (rows, model) = (MICROBATCHES * ROWS, self.model.clone());
        let task = Task { model, microbatches: MICROBATCHES, rows, tokens: TOKENS, vocabulary: VOCABULARY };
        let plan = LanguageModel::plan(&self.model).and(self.plan.clone());
        let style = Style { mesh: self.mesh.to_string(), plan, recompute: false };
        let training = Training { task: &task, style: &style, dtype: DType::F64 };
        let mut records = World::new(Mesh::parse(self.mesh).unwrap())
            .dry_run(0, |rank| {
                let mut trainer = training.trainer(rank, Sgd::new(0.1), None)?;
                trainer.step()?;
                rank.trace().take();
                trainer.step()?;
                Ok(rank.trace().take())
            })
            .unwrap();
        records.retain(|record| record.phase != Phase::Control);
        records
    }

    /// Phase, op and axes of a record.
    fn kind(&self, record: &Record) -> String {
        let axes = Mesh::parse(self.mesh).unwrap().names(record.axes);
        format!("{:?} {} {axes}", record.phase, record.op).to_lowercase()
    }

    /// The golden lines: what travels, with the number of elements of a call, of calls and of bytes. Blocks share lines.
    fn list(&self, records: &[Record]) -> String {
        let mut lines: BTreeMap<(String, &'static str, String, usize), (usize, u64)> = BTreeMap::new();
        for record in records {
            let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit()) && !part.is_empty();
            let path: Vec<&str> =
                record.path.split('.').map(|part| if is_number(&part) { "*" } else { part }).collect();
            let key = (self.kind(record), record.dtype.name(), path.join("."), record.numel());
            let line = lines.entry(key).or_default();
            *line = (line.0 + 1, line.1 + record.bytes);
        }
        let mut text = format!("# {}, {}\n", self.name, self.mesh);
        for ((kind, dtype, path, numel), (calls, bytes)) in lines {
            let _ = writeln!(text, "{kind} {dtype} {path}: {calls} x {numel}, {bytes} bytes");
        }
        text
    }

    fn bytes(&self, records: &[Record]) -> Bytes {
        let mut bytes = Bytes::new();
        for record in records.iter().filter(|record| record.bytes > 0) {
            *bytes.entry(self.kind(record)).or_default() += record.bytes;
        }
        bytes
    }
}

#[test]
fn collectives_of_each_style_are_the_golden_lists() {
    let lists: Vec<String> = cases().iter().map(|case| case.list(&case.records())).collect();
    let text = lists.join("\n");
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        std::fs::write(GOLDEN, &text).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap_or_default();
    let differs = text.lines().zip(golden.lines()).find(|(now, then)| now != then);
    assert!(text == golden, "collectives differ from {GOLDEN}, first now and there: {differs:?}");
}

#[test]
fn bytes_of_each_style_follow_closed_formulas() {
    let mut faults = Vec::new();
    for case in cases() {
        let formula: Bytes = case
            .elements
            .iter()
            .map(|(kind, elements)| ((*kind).to_string(), 8 * *elements as u64))
            .collect();
        let bytes = case.bytes(&case.records());
        if bytes != formula {
            faults.push(format!(
                "{} on {}:\n  counted    {bytes:?}\n  by formula {formula:?}",
                case.name, case.mesh
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
