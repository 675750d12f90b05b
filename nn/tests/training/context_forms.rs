//! Context parallelism by ring and by exchange: losses and gradients equal those of one rank, and the messages of a step are counted.

use crate::context_parallel::{ROWS, TrainingCase, trace_of_plan, windowed};
use crate::llama;
use crate::support::{Outcome, VOCAB, config, run};
use crate::traces::counts;
use shardgrad_nn::{
    BertConfig, BertHead, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, ModelConfig, Plan,
};
use shardgrad_tensor::{Kind, Mesh, Phase, Rank, Result, World};

/// Even, uneven and empty shards of 7 tokens, with and without data and tensor parallelism.
const MESHES: [&str; 7] = ["cp=2", "cp=3", "cp=4", "cp=9", "dp=2,cp=2", "cp=2,tp=2", "dp=2,cp=3,tp=2"];

/// Gives a plan a form of context parallelism.
pub(crate) type WithForm = fn(Plan) -> Plan;

/// The forms of context parallelism, the gather first.
pub(crate) const FORMS: [(&str, WithForm); 3] =
    [("gather", |plan| plan), ("ring", Plan::ring), ("exchange", Plan::exchange)];

pub(crate) fn assert_near(one: &Outcome, many: &Outcome, what: &str) {
    many.assert_within(1e-11, one, what);
}

/// The results on a mesh, on which all ranks agree.
pub(crate) fn outcome(mesh: &str, what: &str, f: impl Fn(&Rank) -> Result<Outcome> + Sync) -> Outcome {
    Outcome::of_ranks(run(mesh, f), what)
}

/// Three heads of 4 channels, 2 blocks.
pub(crate) fn bert() -> BertConfig {
    BertConfig {
        head: BertHead::MaskedLm,
        initializer_range: 0.3,
        ..BertConfig::new(VOCAB, 9, [12, 10], 2, 3)
    }
}

#[test]
fn models_match_one_rank_in_every_form() {
    let kinds = [LlamaKind::Llama, LlamaKind::Qwen3];
    let llamas = kinds.map(|kind| ModelConfig::from(windowed(kind)));
    let few_keys = ModelConfig::from(llama::few_keys(LlamaKind::Qwen3, 1));
    let all = [ModelConfig::from(config()), bert().into(), few_keys].into_iter().chain(llamas);
    for config in all {
        let case = TrainingCase::new(config.clone(), 7);
        let alone = case.outcome("");
        for (form, with_form) in &FORMS[1..] {
            let plan = with_form(LanguageModel::plan(&config));
            for mesh in MESHES {
                let what = format!("{form} on {mesh}");
                assert_near(&alone, &outcome(mesh, &what, |rank| case.on(rank, &plan)), &what);
            }
        }
    }
}

#[test]
fn ranks_without_heads_match_one_rank_in_every_form() {
    let heads = |heads| LlamaConfig {
        head_dim: 4,
        initializer_range: 0.3,
        ..LlamaConfig::new(LlamaKind::Qwen2, VOCAB, 8, [10, 7], 2, heads)
    };
    let models = [
        ModelConfig::from(config()),
        bert().into(),
        // Groups as large as their number, of one head, and larger than their number.
        heads([4, 2]).into(),
        heads([3, 3]).into(),
        heads([6, 2]).into(),
        heads([3, 1]).into(),
    ];
    for config in models {
        let case = TrainingCase::new(config.clone(), 7);
        let alone = case.outcome("");
        for (form, with_form) in FORMS {
            let plan = with_form(LanguageModel::plan(&config));
            for mesh in ["tp=4", "cp=2,tp=3", "cp=3,tp=4"] {
                let what = format!("{config:?} by {form} on {mesh}");
                assert_near(&alone, &outcome(mesh, &what, |rank| case.on(rank, &plan)), &what);
            }
        }
    }
}

#[test]
fn an_exchange_without_the_config_matches_one_rank_or_is_refused() {
    let heads = |heads| LlamaConfig {
        head_dim: 4,
        initializer_range: 0.3,
        ..LlamaConfig::new(LlamaKind::Qwen2, VOCAB, 8, [10, 7], 2, heads)
    };
    let plan = Plan::llama().exchange();
    for [query, key] in [[4, 2], [6, 2], [3, 3], [3, 1], [8, 4]] {
        let case = TrainingCase::new(heads([query, key]), 7);
        let alone = case.outcome("");
        for (mesh, tp) in [("cp=2,tp=3", 3), ("cp=3,tp=4", 4)] {
            let what = format!("{query} query and {key} key heads on {mesh}");
            let is_refused = tp > key && query / key <= key;
            match World::run(Mesh::parse(mesh).unwrap(), |rank| case.on(rank, &plan)) {
                Ok(ranks) => {
                    assert!(!is_refused, "{what}");
                    ranks.iter().for_each(|many| assert_near(&alone, many, &what));
                }
                // Queries are sharded by groups and keys are copies, which `LanguageModel::plan` avoids.
                Err(error) => {
                    assert!(is_refused && error.kind() == Kind::Layout, "{what}: {error}");
                    assert!(error.to_string().contains("label `g` is sharded as @tp@cp"), "{what}: {error}");
                }
            }
        }
    }
}

#[test]
fn activation_checkpointing_gives_the_same_bits_in_every_form() {
    for (form, with_form) in FORMS {
        let plan = with_form(Plan::llama());
        let [kept, again] = [false, true].map(|recompute| {
            let case = TrainingCase { recompute, ..TrainingCase::new(windowed(LlamaKind::Llama), 7) };
            outcome("cp=3", form, |rank| case.on(rank, &plan))
        });
        assert_eq!((kept.loss, &kept.gradients), (again.loss, &again.gradients), "{form}");
        assert!(again.saved_bytes < kept.saved_bytes, "{form}");
    }
}

#[test]
fn exchange_supports_dropout_on_attention_weights_and_ring_refuses_it() {
    let dropped = Gpt2Config { attn_pdrop: 0.3, ..config() };
    let case = TrainingCase { noise: true, ..TrainingCase::new(dropped, 7) };
    let alone = case.outcome("");
    let exchange = outcome("cp=2", "dropout", |rank| case.on(rank, &Plan::gpt2().exchange()));
    assert_near(&alone, &exchange, "dropout by exchange");
    let mesh = shardgrad_tensor::Mesh::parse("cp=2").unwrap();
    let error = World::run(mesh, |rank| case.on(rank, &Plan::gpt2().ring()).map(drop)).unwrap_err();
    assert!(error.kind() == Kind::Layout && error.to_string().contains("gather"), "{error}");
}

#[test]
fn a_block_moves_what_its_form_says() {
    // Two microbatches of two blocks.
    let records =
        |with_form: WithForm, mesh: &str| trace_of_plan(&config().into(), &with_form(Plan::gpt2()), mesh);
    let ring = records(Plan::ring, "cp=2");
    assert_eq!(
        counts(&ring),
        [
            "backward all_reduce 28",
            // k and v, then dk and dv.
            "backward recv 8",
            "backward send 8",
            "forward recv 4",
            "forward send 4"
        ]
    );
    // Rows, tokens, heads and channels: half of k and v each time.
    let chunk = ROWS * 8 * 15;
    assert!(ring.iter().filter(|r| r.op == "send").all(|r| r.numel() == chunk && r.phase != Phase::Control));
    let exchange = records(Plan::exchange, "cp=2");
    assert_eq!(
        counts(&exchange),
        ["backward all_reduce 28", "backward all_to_all 16", "forward all_to_all 16"]
    );
    let points: Vec<&str> =
        exchange.iter().filter(|r| r.op == "all_to_all").map(|r| r.path.as_str()).take(4).collect();
    assert_eq!(points, ["h.0.attn.queries", "h.0.attn.keys", "h.0.attn.values", "h.0.attn.heads"]);
}
