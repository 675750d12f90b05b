//! Context parallelism by ring and by exchange: losses and gradients equal those of one rank, also for rows of packed documents, and the
//! messages of a step are counted.

use crate::context_parallel::{ROWS, TrainingCase};
use crate::llama;
use crate::support::{Outcome, VOCAB, config, max_difference, run, values};
use crate::traces::{counts, traced};
use approx::relative_eq;
use shardgrad_autograd::Var;
use shardgrad_nn::optim::grad_norm;
use shardgrad_nn::{
    BertConfig, BertHead, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, Model, ModelConfig, Plan,
    document_ids, zigzag_order,
};
use shardgrad_tensor::{DType, Kind, Phase, Rank, Result, Tensor, Value, World};

/// Even, uneven and empty shards of 7 tokens, with and without data and tensor parallelism.
const MESHES: [&str; 7] = ["cp=2", "cp=3", "cp=4", "cp=9", "dp=2,cp=2", "cp=2,tp=2", "dp=2,cp=3,tp=2"];

/// Gives a plan a form of context parallelism.
type WithForm = fn(Plan) -> Plan;

/// The forms of context parallelism, the gather first.
const FORMS: [(&str, WithForm); 3] =
    [("gather", |plan| plan), ("ring", Plan::ring), ("exchange", Plan::exchange)];

/// Two groups of two heads; windows of 3 and of all tokens.
fn windowed(kind: LlamaKind) -> LlamaConfig {
    LlamaConfig { windows: vec![Some(3), None], ..llama::config(kind) }
}

fn assert_near(one: &Outcome, many: &Outcome, what: &str) {
    let near = |a: f64, b: f64| relative_eq!(a, b, epsilon = 1e-11, max_relative = 1e-11);
    assert!(near(one.loss, many.loss), "{what}: loss {}, alone {}", many.loss, one.loss);
    assert!(near(one.norm, many.norm), "{what}: norm {}, alone {}", many.norm, one.norm);
    assert_eq!(one.gradients.len(), many.gradients.len(), "{what}");
    for (name, gradient) in &one.gradients {
        let worst = max_difference(gradient, &many.gradients[name]);
        assert!(worst < 1e-11, "{what}: {name} differs by {worst:e}");
    }
}

/// The results on a mesh, on which all ranks agree.
fn outcome(mesh: &str, what: &str, f: impl Fn(&Rank) -> Result<Outcome> + Sync) -> Outcome {
    let mut ranks = run(mesh, f);
    let first = ranks.swap_remove(0);
    assert!(ranks.iter().all(|o| o.loss == first.loss && o.gradients == first.gradients), "{what}");
    first
}

#[test]
fn models_match_one_rank_in_every_form() {
    let bert = BertConfig {
        head: BertHead::MaskedLm,
        initializer_range: 0.3,
        ..BertConfig::new(VOCAB, 9, [12, 10], 2, 3)
    };
    let kinds = [LlamaKind::Llama, LlamaKind::Qwen3];
    let llamas = kinds.map(|kind| ModelConfig::from(windowed(kind)));
    let few_keys = ModelConfig::from(llama::few_keys(LlamaKind::Qwen3, 1));
    let all = [ModelConfig::from(config()), bert.into(), few_keys].into_iter().chain(llamas);
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
    let records = |with_form: WithForm, mesh: &str| {
        let config = ModelConfig::from(config());
        let (case, plan) = (TrainingCase::new(config.clone(), 8), with_form(Plan::gpt2()));
        run(mesh, |rank| {
            let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 5, DType::F64)?;
            let tape = model.tape();
            traced(rank, || {
                for _ in 0..2 {
                    let x: Vec<Var> =
                        case.arguments(rank, &plan)?.into_iter().map(|x| tape.constant(x)).collect();
                    model.loss_from_batch(&x).value().backward()?;
                }
                assert_eq!(tape.gradients().len(), model.params().len());
                Ok(())
            })
        })
        .swap_remove(0)
    };
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

/// The documents of the rows of a batch, by their lengths.
const DOCUMENTS: [[usize; 3]; ROWS] = [[3, 1, 4], [2, 5, 1]];
const TOKENS: usize = 8;

/// Ids, targets, segment ids and positions of token `at` of document `document` of row `row`.
fn token(row: usize, document: usize, at: usize) -> [i64; 2] {
    let id = |at: usize| ((row * 5 + document * 3 + at * at + at * 2) % VOCAB) as i64;
    [id(at), id(at + 1)]
}

/// The outcome of a model on rows of packed documents, in an order of tokens.
fn packed(
    rank: &Rank,
    config: &ModelConfig,
    plan: &Plan,
    order: &[usize],
    recompute: bool,
) -> Result<Outcome> {
    let mut columns: [Vec<i64>; 4] = Default::default();
    for (row, lengths) in DOCUMENTS.iter().enumerate() {
        let [segments, positions] = document_ids(lengths);
        for &at in order {
            let [id, target] = token(row, segments[at] as usize, positions[at] as usize);
            [id, target, segments[at], positions[at]]
                .into_iter()
                .zip(&mut columns)
                .for_each(|(x, column)| column.push(x));
        }
    }
    let module = LanguageModel::new(config).recompute(recompute);
    let model = Model::with_dtype(rank, module, plan, 5, DType::F64)?;
    let tape = model.tape();
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[ROWS, TOKENS])?;
    let x = columns.iter().map(|column| Ok(tape.constant(Tensor::from_global(rank, &layout, column)?)));
    let loss = model.loss_from_batch(&x.collect::<Result<Vec<Var>>>()?).value();
    let (saved_bytes, value) = (tape.saved_bytes(), loss.item()?);
    loss.backward()?;
    let gradients = tape.gradients();
    let norm = grad_norm(rank, model.params(), &gradients)?;
    Ok(Outcome { loss: value, norm, gradients: values(&model, &gradients)?, saved_bytes })
}

/// The outcome of the same documents, each as a row of its own.
fn one_document_a_row(rank: &Rank, config: &ModelConfig) -> Result<Outcome> {
    let model = Model::with_dtype(rank, LanguageModel::new(config), &Plan::new(), 5, DType::F64)?;
    let (tape, mut sum) = (model.tape(), 0.0);
    for (row, lengths) in DOCUMENTS.iter().enumerate() {
        for (document, &len) in lengths.iter().enumerate() {
            let column = |i: usize| (0..len).map(|at| token(row, document, at)[i]).collect::<Vec<i64>>();
            let x = |i| -> Result<Var> { Ok(tape.constant(Tensor::from_host(rank, &[1, len], &column(i))?)) };
            let loss =
                model.loss_from_batch(&[x(0)?, x(1)?]).value().scale(len as f64 / (ROWS * TOKENS) as f64);
            sum += loss.item()?;
            loss.backward()?;
        }
    }
    let gradients = tape.gradients();
    let norm = grad_norm(rank, model.params(), &gradients)?;
    Ok(Outcome { loss: sum, norm, gradients: values(&model, &gradients)?, saved_bytes: 0 })
}

#[test]
fn packed_documents_equal_one_document_a_row_in_every_form() {
    let in_order: Vec<usize> = (0..TOKENS).collect();
    for config in [ModelConfig::from(config()), windowed(LlamaKind::Qwen3).into()] {
        let apart = run("", |rank| one_document_a_row(rank, &config)).remove(0);
        for (form, with_form) in FORMS {
            let plan = with_form(LanguageModel::plan(&config));
            for mesh in ["", "cp=2", "cp=3", "cp=9", "dp=2,cp=2", "cp=2,tp=2"] {
                for order in [&in_order, &zigzag_order(TOKENS, 3)] {
                    let what = format!("{form} on {mesh}");
                    let together = outcome(mesh, &what, |rank| packed(rank, &config, &plan, order, false));
                    assert_near(&apart, &together, &what);
                }
            }
            let again = outcome("cp=2", form, |rank| packed(rank, &config, &plan, &in_order, true));
            assert_near(&apart, &again, form);
        }
    }
}

#[test]
fn documents_are_not_ignored() {
    let config = ModelConfig::from(config());
    let apart = run("", |rank| one_document_a_row(rank, &config)).remove(0);
    let order: Vec<usize> = (0..TOKENS).rev().collect();
    let reversed = run("", |rank| packed(rank, &config, &Plan::gpt2(), &order, false)).remove(0);
    assert_near(&apart, &reversed, "the order of tokens does not matter");
    // The same rows as one document.
    let plain = TrainingCase::new(config, TOKENS).outcome("");
    assert!((plain.loss - apart.loss).abs() > 1e-3, "documents have an effect");
}
