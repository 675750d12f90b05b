//! Rows of packed documents: losses and gradients equal those of one document a row, on one rank and in every form of context
//! parallelism, and a trainer gives the losses of one rank on every mesh, bit for bit with canonical sums.

use crate::context_parallel::{FORMS, ROWS, TrainingCase, bert, windowed};
use crate::support::{Outcome, VOCAB, config, run};
use crate::zero::mixtral;
use approx::{abs_diff_ne, assert_relative_eq};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    AdamW, Deterministic, LanguageModel, LlamaKind, Model, ModelConfig, Plan, Trainer, TrainerConfig,
    document_ids, zigzag_order,
};
use shardgrad_tensor::{DType, Rank, Result, Tensor, Value};
use shardgrad_testing::sample;
use std::ops::Range;

/// The documents of the rows of a batch, by their lengths.
const DOCUMENTS: [[usize; 3]; ROWS] = [[3, 1, 4], [2, 5, 1]];
const TOKENS: usize = 8;

/// Models of all families, without losses that depend on other tokens of a row.
fn models() -> [ModelConfig; 4] {
    [config().into(), windowed(LlamaKind::Qwen3).into(), mixtral().into(), bert().into()]
}

/// Token `at` of document `document` of row `row`, and its target.
fn token(row: usize, document: usize, at: usize) -> [i64; 2] {
    let id = |at: usize| ((row * 5 + document * 3 + at * at + at * 2) % VOCAB) as i64;
    [id(at), id(at + 1)]
}

/// The type of token `at` of a document.
fn token_type(at: i64) -> i64 {
    at % 2
}

/// The tensors of a batch of some rows of packed documents, in an order of tokens.
fn packed_batch(
    rank: &Rank,
    config: &ModelConfig,
    plan: &Plan,
    rows: Range<usize>,
    order: &[usize],
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), TOKENS])?;
    let column = |of: &dyn Fn(usize, i64, i64) -> i64| {
        let of_row = |row: usize| {
            let [segments, positions] = document_ids(&DOCUMENTS[row % ROWS]);
            order.iter().map(|&at| of(row, segments[at], positions[at])).collect::<Vec<_>>()
        };
        Tensor::from_global(rank, &layout, &rows.clone().flat_map(of_row).collect::<Vec<_>>())
    };
    let token = |i: usize| {
        move |row: usize, segment: i64, position: i64| token(row, segment as usize, position as usize)[i]
    };
    let mut all = vec![column(&token(0))?, column(&token(1))?];
    if matches!(config, ModelConfig::Bert(_)) {
        all.push(column(&|_, _, position| token_type(position))?);
    }
    all.extend([column(&|_, segment, _| segment)?, column(&|_, _, position| position)?]);
    Ok(all)
}

/// The outcome of a model on rows of packed documents, in an order of tokens.
fn packed(
    rank: &Rank,
    config: &ModelConfig,
    plan: &Plan,
    order: &[usize],
    recompute: bool,
) -> Result<Outcome> {
    let module = LanguageModel::new(config).recompute(recompute);
    let model = Model::with_dtype(rank, module, plan, 5, DType::F64)?;
    let tape = model.tape();
    let x = packed_batch(rank, config, plan, 0..ROWS, order)?;
    let x: Vec<Var> = x.into_iter().map(|x| tape.constant(x)).collect();
    let loss = model.loss_from_batch(&x).value();
    Outcome::of_loss(&model, &tape, &loss)
}

/// The outcome of the same documents, each as a row of its own.
fn one_document_a_row(rank: &Rank, config: &ModelConfig) -> Result<Outcome> {
    let model = Model::with_dtype(rank, LanguageModel::new(config), &Plan::new(), 5, DType::F64)?;
    let (tape, mut sum) = (model.tape(), 0.0);
    for (row, lengths) in DOCUMENTS.iter().enumerate() {
        for (document, &len) in lengths.iter().enumerate() {
            let column = |of: &dyn Fn(usize) -> i64| -> Result<Var> {
                let all: Vec<i64> = (0..len).map(of).collect();
                Ok(tape.constant(Tensor::from_host(rank, &[1, len], &all)?))
            };
            let mut x =
                vec![column(&|at| token(row, document, at)[0])?, column(&|at| token(row, document, at)[1])?];
            if matches!(config, ModelConfig::Bert(_)) {
                x.extend([column(&|_| 1)?, column(&|at| token_type(at as i64))?]);
            }
            let loss = model.loss_from_batch(&x).value().scale(len as f64 / (ROWS * TOKENS) as f64);
            sum += loss.item()?;
            loss.backward()?;
        }
    }
    Outcome::of_gradients(&model, &tape, sum, 0)
}

#[test]
fn packed_documents_equal_one_document_a_row_in_every_form() {
    let in_order: Vec<usize> = (0..TOKENS).collect();
    for (number, config) in models().into_iter().enumerate() {
        let apart = run("", |rank| one_document_a_row(rank, &config)).remove(0);
        for (form, with_form) in FORMS {
            let plan = with_form(LanguageModel::plan(&config));
            for mesh in sample(number, ["", "cp=2", "cp=3", "cp=9", "dp=2,cp=2", "cp=2,tp=2"]) {
                for order in [&in_order, &zigzag_order(TOKENS, 3)] {
                    let what = format!("{form} on {mesh}, {config:?}");
                    let ranks = run(mesh, |rank| packed(rank, &config, &plan, order, false));
                    Outcome::of_ranks(ranks, &what).assert_within(1e-11, &apart, &what);
                }
            }
            let again = run("cp=2", |rank| packed(rank, &config, &plan, &in_order, true));
            Outcome::of_ranks(again, form).assert_within(1e-11, &apart, form);
        }
    }
}

#[test]
fn documents_are_not_ignored() {
    let config = ModelConfig::from(config());
    let apart = run("", |rank| one_document_a_row(rank, &config)).remove(0);
    let order: Vec<usize> = (0..TOKENS).rev().collect();
    let reversed = run("", |rank| packed(rank, &config, &Plan::gpt2(), &order, false)).remove(0);
    reversed.assert_within(1e-11, &apart, "the order of tokens does not matter");
    // The same rows as one document.
    let plain = TrainingCase::new(config, TOKENS).outcome("");
    assert!(abs_diff_ne!(plain.loss, apart.loss, epsilon = 1e-3), "documents have an effect");
}

/// Losses and gradient norms of three steps of a trainer on packed documents.
fn numbers(config: &ModelConfig, plan: &Plan, mesh: &str, deterministic: Deterministic) -> Vec<f64> {
    let order = zigzag_order(TOKENS, 2);
    let ranks = run(mesh, |rank| {
        let read = |rank: &Rank, _: u64, rows: Range<usize>| packed_batch(rank, config, plan, rows, &order);
        let settings = TrainerConfig {
            microbatches: 2,
            dtype: DType::F64,
            clip: Some(0.5),
            deterministic,
            ..TrainerConfig::new(2 * ROWS)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let mut trainer =
            Trainer::new(rank, LanguageModel::new(config), plan, AdamW::new(0.01), settings, read, loss)?;
        let reports = (0..3).map(|_| trainer.step()).collect::<Result<Vec<_>>>()?;
        Ok(reports.iter().flat_map(|report| [report.loss, report.grad_norm]).collect::<Vec<f64>>())
    });
    assert!(ranks.iter().all(|numbers| *numbers == ranks[0]), "{mesh}: ranks disagree");
    ranks.into_iter().next().unwrap()
}

#[test]
fn a_trainer_on_packed_documents_gives_the_losses_of_one_rank_in_every_style() {
    let canonical = Deterministic::Mesh { batch_leaves: 2 * ROWS, sum_leaves: 8 };
    for config in models() {
        let family = LanguageModel::plan(&config);
        let [plain, same] =
            [Deterministic::Run, canonical].map(|promise| numbers(&config, &family, "", promise));
        assert!(plain[4] < plain[0], "{plain:?}");
        let zero = family.clone().and(Plan::zero(2, "dp")).ring();
        let sequence = family.clone().and(Plan::sequence_parallel("tp"));
        // To rounding: a ring adds in the order of its ranks, and canonical sums refuse the partial sums that sequence parallelism makes of
        // cotangents of positions.
        let mut cases = vec![(family.clone().ring(), "pp=2,cp=2"), (zero, "dp=2,cp=3")];
        // The plan has no rules for BERT.
        if !matches!(config, ModelConfig::Bert(_)) {
            cases.push((sequence, "dp=2,tp=2"));
        }
        for (plan, mesh) in cases {
            for (plain, many) in plain.iter().zip(numbers(&config, &plan, mesh, Deterministic::Run)) {
                assert_relative_eq!(*plain, many, max_relative = 1e-10);
            }
        }
        let exchange = family.clone().exchange().pipeline_schedule("zb-h1");
        let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let many = numbers(&config, &exchange, "pp=2,fsdp=2,cp=2", canonical);
        assert_eq!(bits(&many), bits(&same), "{many:?}, on one rank {same:?}");
    }
}
