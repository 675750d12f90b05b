//! Context parallelism by gather, by ring and by exchange: losses and gradients equal those of one rank, and the collectives of a step are
//! counted.

use crate::llama;
use crate::support::{Outcome, VOCAB, config, run};
use crate::traces::{counts, traced};
use approx::abs_diff_ne;
use shardgrad_autograd::{Noise, Var};
use shardgrad_nn::{
    Bert, BertConfig, BertHead, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, Model, ModelConfig, Plan,
};
use shardgrad_tensor::{DType, Kind, Mesh, Phase, Rank, Record, Result, Tensor, Value, World};
use shardgrad_testing::sample;

pub(crate) const ROWS: usize = 2;

/// Even, uneven and empty shards of 7 tokens, with and without data and tensor parallelism.
const MESHES: [&str; 8] =
    ["cp=2", "cp=3", "cp=4", "cp=9", "dp=2,cp=2", "cp=2,tp=2", "cp=3,tp=3", "dp=2,cp=3,tp=2"];

/// Gives a plan a form of context parallelism.
pub(crate) type WithForm = fn(Plan) -> Plan;

/// The forms of context parallelism, the gather first.
pub(crate) const FORMS: [(&str, WithForm); 3] =
    [("gather", |plan| plan), ("ring", Plan::ring), ("exchange", Plan::exchange)];

/// A model and the batches that it trains on.
pub(crate) struct TrainingCase {
    pub(crate) config: ModelConfig,
    pub(crate) seq: usize,
    pub(crate) recompute: bool,
    /// Whether dropout is on.
    pub(crate) noise: bool,
    /// For encoders: whether rows have padding and a mask.
    pub(crate) padded: bool,
}

impl TrainingCase {
    pub(crate) fn new(config: impl Into<ModelConfig>, seq: usize) -> TrainingCase {
        TrainingCase { config: config.into(), seq, recompute: false, noise: false, padded: false }
    }

    fn tensor(&self, rank: &Rank, plan: &Plan, number: impl Fn(usize, usize) -> i64) -> Result<Tensor> {
        let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, self.seq])?;
        let all: Vec<i64> = (0..ROWS * self.seq).map(|i| number(i / self.seq, i % self.seq)).collect();
        Tensor::from_global(rank, &layout, &all)
    }

    /// Ids, targets and, with padding, mask and types.
    pub(crate) fn arguments(&self, rank: &Rank, plan: &Plan) -> Result<Vec<Tensor>> {
        let token = |row: usize, t: usize| ((row * 7 + t * 5 + row * t * 3 + t * t) % VOCAB) as i64;
        let is_encoder = matches!(self.config, ModelConfig::Bert(_));
        let target = |row, t| match is_encoder && (row + t) % 3 == 0 {
            true => Bert::IGNORE_INDEX,
            false => token(row, t + 1),
        };
        let mut all = vec![self.tensor(rank, plan, token)?, self.tensor(rank, plan, target)?];
        if self.padded {
            let mask = |row, t| i64::from(t + 2 * row < self.seq);
            all.extend([self.tensor(rank, plan, mask)?, self.tensor(rank, plan, |_, t| (t % 2) as i64)?]);
        }
        Ok(all)
    }

    pub(crate) fn on(&self, rank: &Rank, plan: &Plan) -> Result<Outcome> {
        let module = LanguageModel::new(&self.config).recompute(self.recompute);
        let model = Model::with_dtype(rank, module, plan, 5, DType::F64)?;
        let tape = model.tape();
        tape.set_noise(self.noise.then_some(Noise { seed: 3, step: 7, first_row: 4 }));
        let x: Vec<Var> = self.arguments(rank, plan)?.into_iter().map(|x| tape.constant(x)).collect();
        let loss = model.loss_from_batch(&x).value();
        Outcome::of_loss(&model, &tape, &loss)
    }

    pub(crate) fn outcome(&self, mesh: &str) -> Outcome {
        self.outcome_by(&LanguageModel::plan(&self.config), mesh)
    }

    /// The results by a plan, on which all ranks must agree.
    pub(crate) fn outcome_by(&self, plan: &Plan, mesh: &str) -> Outcome {
        Outcome::of_ranks(run(mesh, |rank| self.on(rank, plan)), mesh)
    }

    /// Fails if the loss or a gradient on a mesh differs from one rank by more than f64 rounding.
    pub(crate) fn assert_matches_one_rank_on(&self, meshes: &[&str]) -> Outcome {
        self.assert_matches_one_rank_by(&FORMS[..1], meshes)
    }

    /// [`TrainingCase::assert_matches_one_rank_on`] for each form of the plan of the model.
    pub(crate) fn assert_matches_one_rank_by(&self, forms: &[(&str, WithForm)], meshes: &[&str]) -> Outcome {
        let alone = self.outcome("");
        for (name, gradient) in &alone.gradients {
            // A key bias shifts all scores of a query equally, so its gradient is zero.
            let is_zero = name.ends_with("k_proj.bias") || name.ends_with("key.bias");
            assert!(is_zero || gradient.iter().any(|g| g.abs() > 1e-9), "{name} is not reached");
        }
        for (form, with_form) in forms {
            let plan = with_form(LanguageModel::plan(&self.config));
            for mesh in meshes {
                let what = format!("{:?} by {form} on {mesh}", self.config);
                self.outcome_by(&plan, mesh).assert_within(1e-11, &alone, &what);
            }
        }
        alone
    }
}

fn dropped(p: f64) -> Gpt2Config {
    Gpt2Config { embd_pdrop: p, attn_pdrop: p, resid_pdrop: p, ..config() }
}

/// Two groups of two heads; windows of 3 and of all tokens.
pub(crate) fn windowed(kind: LlamaKind) -> LlamaConfig {
    LlamaConfig { windows: vec![Some(3), None], ..llama::config(kind) }
}

/// Three heads of 4 channels, 2 blocks.
fn bert_with(head: BertHead) -> BertConfig {
    BertConfig { head, initializer_range: 0.3, ..BertConfig::new(VOCAB, 9, [12, 10], 2, 3) }
}

pub(crate) fn bert() -> BertConfig {
    bert_with(BertHead::MaskedLm)
}

/// A Qwen2 with these numbers of query and key heads.
fn with_heads(heads: [usize; 2]) -> LlamaConfig {
    LlamaConfig {
        head_dim: 4,
        initializer_range: 0.3,
        ..LlamaConfig::new(LlamaKind::Qwen2, VOCAB, 8, [10, 7], 2, heads)
    }
}

#[test]
fn models_match_one_rank_in_every_form() {
    let of = |config: ModelConfig| TrainingCase::new(config, 7);
    let meshes = [0, 1].map(|number| sample(number, MESHES).collect::<Vec<_>>());
    of(config().into()).assert_matches_one_rank_by(&FORMS, &MESHES);
    of(bert().into()).assert_matches_one_rank_by(&FORMS, &meshes[0]);
    TrainingCase { padded: true, ..of(bert().into()) }.assert_matches_one_rank_on(&meshes[1]);
    let untied = Gpt2Config { tie_word_embeddings: false, ..config() };
    TrainingCase::new(untied, 8).assert_matches_one_rank_on(&["cp=2", "cp=4,tp=2"]);
    // More ranks than key heads: every rank of `tp` has all keys.
    of(llama::few_keys(LlamaKind::Qwen3, 1).into()).assert_matches_one_rank_by(&FORMS, &meshes[1]);
    for (number, kind) in LlamaKind::ALL.into_iter().enumerate() {
        let forms =
            if [LlamaKind::Llama, LlamaKind::Qwen3].contains(&kind) { &FORMS[..] } else { &FORMS[..1] };
        of(windowed(kind).into()).assert_matches_one_rank_by(forms, &meshes[number % 2]);
    }
}

#[test]
fn ranks_without_heads_match_one_rank_in_every_form() {
    // Groups as large as their number, of one head, and larger than their number.
    let llamas = [[4, 2], [3, 3], [6, 2], [3, 1]].map(|heads| ModelConfig::from(with_heads(heads)));
    let configs = [config().into(), bert().into()].into_iter().chain(llamas);
    for (number, config) in configs.enumerate() {
        let meshes: Vec<&str> = sample(number, ["tp=4", "cp=2,tp=3", "cp=3,tp=4"]).collect();
        TrainingCase::new(config, 7).assert_matches_one_rank_by(&FORMS, &meshes);
    }
}

#[test]
fn an_exchange_without_the_config_matches_one_rank_or_is_refused() {
    let plan = Plan::llama().exchange();
    for [query, key] in [[4, 2], [6, 2], [3, 3], [3, 1], [8, 4]] {
        let case = TrainingCase::new(with_heads([query, key]), 7);
        let alone = case.outcome("");
        for (mesh, tp) in [("cp=2,tp=3", 3), ("cp=3,tp=4", 4)] {
            let what = format!("{query} query and {key} key heads on {mesh}");
            let is_refused = tp > key && query / key <= key;
            match World::run(Mesh::parse(mesh).unwrap(), |rank| case.on(rank, &plan)) {
                Ok(ranks) => {
                    assert!(!is_refused, "{what}");
                    ranks.iter().for_each(|many| many.assert_within(1e-11, &alone, &what));
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
fn long_rows_can_be_sharded_unevenly() {
    let long = Gpt2Config { n_positions: 65, ..config() };
    TrainingCase::new(long, 65).assert_matches_one_rank_on(&["cp=2", "cp=4"]);
    let long = LlamaConfig {
        max_position_embeddings: 65,
        windows: vec![Some(20), None],
        ..windowed(LlamaKind::Mistral)
    };
    TrainingCase::new(long, 65).assert_matches_one_rank_on(&["cp=2", "cp=4"]);
}

#[test]
fn activation_checkpointing_gives_the_same_bits_in_every_form() {
    for config in [ModelConfig::from(config()), windowed(LlamaKind::Llama).into()] {
        for (form, with_form) in FORMS {
            let plan = with_form(LanguageModel::plan(&config));
            for mesh in ["cp=3", "cp=4", "cp=2,tp=2"] {
                let [kept, again] = [false, true].map(|recompute| {
                    TrainingCase { recompute, ..TrainingCase::new(config.clone(), 7) }.outcome_by(&plan, mesh)
                });
                let what = format!("{config:?} by {form} on {mesh}");
                assert_eq!((kept.loss, &kept.gradients), (again.loss, &again.gradients), "{what}");
                assert!(again.saved_bytes < kept.saved_bytes, "{what}");
            }
        }
    }
}

#[test]
fn dropout_masks_match_one_rank() {
    let bert = BertConfig { hidden_dropout_prob: 0.3, attention_probs_dropout_prob: 0.3, ..bert() };
    let llama = LlamaConfig { attention_dropout: 0.3, ..windowed(LlamaKind::Qwen2) };
    for config in [ModelConfig::from(dropped(0.3)), llama.into(), bert.into()] {
        let text = |noise| TrainingCase { noise, ..TrainingCase::new(config.clone(), 7) };
        let noisy = text(true).assert_matches_one_rank_on(&["cp=2", "cp=9", "dp=2,cp=2", "cp=2,tp=2"]);
        assert!(
            abs_diff_ne!(noisy.loss, text(false).outcome("").loss, epsilon = 1e-3),
            "dropout has an effect"
        );
    }
}

#[test]
fn exchange_supports_dropout_on_attention_weights_and_ring_refuses_it() {
    let dropped = Gpt2Config { attn_pdrop: 0.3, ..config() };
    let case = TrainingCase { noise: true, ..TrainingCase::new(dropped, 7) };
    let alone = case.outcome("");
    case.outcome_by(&Plan::gpt2().exchange(), "cp=2").assert_within(1e-11, &alone, "dropout by exchange");
    let mesh = Mesh::parse("cp=2").unwrap();
    let error = World::run(mesh, |rank| case.on(rank, &Plan::gpt2().ring()).map(drop)).unwrap_err();
    assert!(error.kind() == Kind::Layout && error.to_string().contains("gather"), "{error}");
}

/// Forward and backward of a step of two microbatches, on the first rank, by the plan of the model.
pub(crate) fn trace(config: &ModelConfig, mesh: &str) -> Vec<Record> {
    trace_of_plan(config, &LanguageModel::plan(config), mesh)
}

/// [`trace`] by another plan.
pub(crate) fn trace_of_plan(config: &ModelConfig, plan: &Plan, mesh: &str) -> Vec<Record> {
    let text = TrainingCase::new(config.clone(), 8);
    run(mesh, |rank| {
        let model = Model::with_dtype(rank, LanguageModel::new(config), plan, 5, DType::F64)?;
        let tape = model.tape();
        traced(rank, || {
            for _ in 0..2 {
                let x: Vec<Var> = text.arguments(rank, plan)?.into_iter().map(|x| tape.constant(x)).collect();
                model.loss_from_batch(&x).value().backward()?;
            }
            assert_eq!(tape.gradients().len(), model.params().len());
            Ok(())
        })
    })
    .swap_remove(0)
}

#[test]
fn a_block_all_gathers_keys_and_values_and_reduce_scatters_their_gradients() {
    let gpt2 = ModelConfig::from(config());
    // Two microbatches of two blocks, and 28 parameters once.
    let records = trace(&gpt2, "cp=2");
    assert_eq!(
        counts(&records),
        ["backward all_reduce 28", "backward reduce_scatter 8", "forward all_gather 8"]
    );
    let moved = |phase, op| -> Vec<(&str, usize)> {
        let of = records.iter().filter(move |r| r.phase == phase && r.op == op);
        of.map(|r| (r.path.as_str(), r.numel())).collect()
    };
    // Rows, tokens, heads and channels.
    let all = ROWS * 8 * 15;
    let forward = ["h.0.attn.keys", "h.0.attn.values", "h.1.attn.keys", "h.1.attn.values"];
    assert_eq!(moved(Phase::Forward, "all_gather")[..4], forward.map(|path| (path, all)));
    let backward = ["h.1.attn.values", "h.1.attn.keys", "h.0.attn.values", "h.0.attn.keys"];
    assert_eq!(moved(Phase::Backward, "reduce_scatter")[..4], backward.map(|path| (path, all)));
    // One reduction of each gradient, over rows and tokens together.
    let both = trace(&gpt2, "dp=2,cp=2");
    assert_eq!(counts(&both), counts(&records));
    // In addition to the all-reduces of tensor parallelism in blocks and vocabulary.
    let split = trace(&gpt2, "cp=2,tp=2");
    let [of_cp, of_tp]: [Vec<Record>; 2] = ["cp", "tp"].map(|name| {
        let of = |r: &&Record| Mesh::parse("cp=2,tp=2").unwrap().names(r.axes) == name;
        split.iter().filter(of).cloned().collect()
    });
    assert_eq!(counts(&of_cp), counts(&records));
    assert_eq!(counts(&of_tp), ["backward all_reduce 10", "forward all_reduce 16"]);
    assert!(trace(&gpt2, "cp=1").is_empty());
    let llama = trace(&windowed(LlamaKind::Llama).into(), "cp=2");
    assert_eq!(
        counts(&llama),
        ["backward all_reduce 21", "backward reduce_scatter 8", "forward all_gather 8"],
        "keys are gathered after rotation, key heads only"
    );
    assert!(llama.iter().filter(|r| r.op == "all_gather").all(|r| r.numel() == ROWS * 8 * 2 * 4));
}

#[test]
fn a_block_sends_chunks_by_ring_and_exchanges_heads() {
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

#[test]
fn attention_of_all_queries_on_sharded_keys_is_an_error_that_suggests_a_gather() {
    let error = World::run(Mesh::parse("cp=2").unwrap(), |rank| {
        let tokens = Plan::context_parallel("cp").ring().point("queries", "cp~");
        TrainingCase::new(config(), 8).on(rank, &tokens).map(drop)
    })
    .unwrap_err();
    assert_eq!(error.kind(), Kind::Layout);
    assert!(error.message().contains("attention"), "{error}");
    assert!(error.details().iter().any(|(_, text)| text.contains("gather")), "{error}");
}

#[test]
fn the_pooler_on_sharded_tokens_is_an_error_that_suggests_a_gather() {
    let (config, plan) = (bert_with(BertHead::Pooler), Plan::bert());
    let error = World::run(Mesh::parse("cp=2").unwrap(), |rank| {
        let model = Model::with_dtype(rank, Bert::new(&config), &plan, 5, DType::F64)?;
        let ids = TrainingCase::new(config.clone(), 7).arguments(rank, &plan)?.remove(0);
        let ids = model.inference_tape().constant(ids);
        model.pool(&model.hidden_states(&ids, None, None)).tensor().to_f64()
    })
    .unwrap_err();
    assert!(error.kind() == Kind::Layout && error.to_string().contains("gather"), "{error}");
}
