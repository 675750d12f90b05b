//! Tests of the loss over rows with different numbers of targets, which is the mean over all targets for any microbatches; and of abandoned
//! evaluations.

use super::*;
use crate::data::scratch::Scratch;
use crate::data::{Corpus, RowOrder, Sampler, Split, TokenFile, Vocabulary};
use approx::{abs_diff_eq, relative_eq};
use shardgrad::nn::checkpoint::TensorWriter;
use shardgrad::nn::{BertConfig, ModelConfig, PartialLoss};
use shardgrad::tensor::training_step::control::world_sum;
use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

/// Rows of the file, not divisible by the batch: steps have different numbers of targets too.
const ROWS: usize = 6;
const BATCH: usize = 4;
const SEQ: usize = 3;
const NONE: i64 = -100;

/// Writes rows with 1, 3, 2, 0, 3 and 3 targets; optionally with an attention mask.
fn rows(dir: &Scratch, config: &ModelConfig, masked: bool) -> Sampler {
    let path = dir.path("rows.safetensors");
    let mut columns: Vec<(&str, [i64; ROWS * SEQ])> = vec![
        ("input_ids", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 6, 1, 2, 7, 7]),
        ("labels", [NONE, 7, NONE, 1, 2, 3, 4, NONE, 5, NONE, NONE, NONE, 1, 3, 5, 7, 2, 4]),
    ];
    if masked {
        columns.push(("attention_mask", [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]));
    }
    let entry = |(name, _): &(&str, _)| (name.to_string(), DType::I64, vec![ROWS, SEQ]);
    let entries: Vec<_> = columns.iter().map(entry).collect();
    let mut writer = TensorWriter::create(&path, &entries).unwrap();
    for (name, numbers) in columns {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        writer.append(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    Sampler::of_tokens(
        Arc::new(TokenFile::open(&path, &Vocabulary::new(config)).unwrap()),
        RowOrder::Sequential,
    )
}

fn train_config(microbatches: usize) -> TrainConfig {
    TrainConfig {
        steps: 3,
        batch: BATCH,
        seq: SEQ,
        microbatches,
        deterministic: Deterministic::Run,
        schedule: LrScheduler::constant(0.1),
        optim: AdamW::new(0.1),
        clip: None,
        seed: 1,
        precision: Precision::of(DType::F64),
        capture: false,
    }
}

/// Returns the mean loss over the labels of the whole batch of a step, computed by the model in one piece; `None` on pipelines.
fn mean_of_all(
    trainer: &Trainer<'_, LanguageModel>,
    plan: &Plan,
    rows: &Sampler,
    step: u64,
) -> Result<Option<f64>> {
    if trainer.pipeline_schedule().is_some() {
        return Ok(None);
    }
    let first = Sampler::rows_of_step(step, BATCH as u64).start;
    let read = |own: Range<usize>| rows.batch(first + own.start as u64..first + own.end as u64);
    let part = trainer.partial_loss(&batch(trainer.rank(), plan, [BATCH, SEQ], read)?)?;
    let numbers = [part.sum, part.count.expect("the labels are masked")];
    let sums = world_sum(trainer.rank(), &numbers, Location::caller())?;
    Ok(Some(sums[0] / sums[1]))
}

#[test]
fn every_target_weighs_the_same_in_every_microbatch() {
    let (dir, config) = (Scratch::new(), ModelConfig::Bert(BertConfig::new(8, SEQ, [6, 5], 2, 2)));
    let plan = LanguageModel::plan(&config);
    let outcome = |masked: bool, mesh: &str, microbatches: usize, chunk: usize| {
        let rows = rows(&dir, &config, masked);
        let all = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let train_config = train_config(microbatches);
            let prefetcher = Prefetcher::new(&train_config, &plan, &rows);
            let mut trainer = train_config.trainer(rank, LanguageModel::new(&config), &prefetcher)?;
            let mut found = Vec::new();
            for step in 0..train_config.steps {
                let mean = mean_of_all(&trainer, &plan, &rows, step as u64)?;
                let report = trainer.step()?;
                assert_eq!(
                    report.count,
                    rows.num_targets(Sampler::rows_of_step(step as u64, 4))?.map(|n| n as f64)
                );
                let far = mean.map_or(0.0, |mean| (report.loss - mean).abs());
                assert!(far < 1e-12, "{mesh}, step {step}: {report:?}, not {mean:?}");
                found.extend([report.loss, report.grad_norm]);
            }
            let part = |x: &[Tensor]| trainer.partial_loss(x);
            match mean_loss(trainer.rank(), &plan, &rows, chunk, || false, part)? {
                Evaluation::Loss(loss) => found.push(loss),
                other => panic!("{other:?}"),
            }
            Ok(found)
        });
        all.unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
    };
    // On dp=3 a rank has no row of microbatches of one or two rows.
    let cuts = [
        ("dp=1", 2, 1),
        ("dp=1", 4, 3),
        ("dp=2", 2, 2),
        ("pp=2", 4, 1),
        ("dp=3", 4, 2),
        ("dp=3,pp=2", 2, 1),
        ("cp=2", 2, 1),
        ("dp=2,cp=4", 1, 3),
        ("pp=2,cp=2", 2, 2),
        // The last batch of the evaluation is smaller than the others.
        ("dp=1", 1, 4),
        ("dp=2", 2, 4),
        ("dp=3", 4, 5),
        ("cp=2", 2, 4),
        ("pp=2", 2, 4),
        ("dp=2,pp=2", 1, 5),
    ];
    for (masked, (mesh, microbatches, chunk)) in
        [false, true].into_iter().flat_map(|masked| cuts.map(|cut| (masked, cut)))
    {
        let whole = outcome(masked, "dp=1", 1, ROWS);
        let cut = outcome(masked, mesh, microbatches, chunk);
        let near = relative_eq!(cut[..], whole[..], epsilon = 0.0, max_relative = 1e-10);
        assert!(near, "{mesh}, {microbatches} microbatches: {cut:?} instead of {whole:?}");
    }
}

#[test]
fn prefetched_rows_do_not_change_with_the_file() {
    let (dir, config) = (Scratch::new(), ModelConfig::Bert(BertConfig::new(8, SEQ, [6, 5], 2, 2)));
    let (rows, plan) = (rows(&dir, &config, false), LanguageModel::plan(&config));
    for mesh in ["dp=1", "dp=2", "cp=2", "pp=2"] {
        let whole = std::fs::read(dir.path("rows.safetensors")).unwrap();
        let cut = || {
            let file = std::fs::File::options().write(true).open(dir.path("rows.safetensors")).unwrap();
            file.set_len(whole.len() as u64 - 200).unwrap();
        };
        let taken = |cuts: bool| {
            let all = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let train_config = train_config(4);
                let prefetcher = Prefetcher::new(&train_config, &plan, &rows);
                let mut trainer = train_config.trainer(rank, LanguageModel::new(&config), &prefetcher)?;
                prefetcher.read(trainer.rank(), 0)?;
                prefetcher.read(trainer.rank(), 1)?;
                world_sum(rank, &[0.0], Location::caller())?;
                if cuts && rank.index() == 0 {
                    cut();
                }
                world_sum(rank, &[0.0], Location::caller())?;
                trainer.check_consistent()?;
                let losses = [trainer.step()?.loss, trainer.step()?.loss];
                Ok((losses, prefetcher.read(trainer.rank(), 2).is_err()))
            });
            let all = all.unwrap_or_else(|e| panic!("{mesh}: {e}"));
            // A rank reads its own rows only.
            assert_eq!(all.iter().any(|(_, has_failed)| *has_failed), cuts, "{mesh}");
            all[0].0
        };
        let expected = taken(false);
        assert_eq!(taken(true), expected, "{mesh}");
        // In place: the file stays open.
        std::fs::write(dir.path("rows.safetensors"), &whole).unwrap();
    }
}

#[test]
fn smaller_last_eval_batch_is_weighted_by_its_rows() {
    // The loss of a row is the mean of its token ids: 1.5, 5.5, 9.5, ..
    let numbers: Vec<u8> = (0..29).collect();
    let corpus = Arc::new(Corpus::new("t".into(), numbers));
    let windows = Sampler::of_text(corpus, Split::All, 4, RowOrder::Sequential).unwrap();
    assert_eq!(windows.num_windows(), 7);
    let mean = (0..7).map(|row| 4.0 * f64::from(row) + 1.5).sum::<f64>() / 7.0;
    for mesh in ["", "dp=2", "dp=3", "dp=5", "dp=2,tp=2", "dp=2,cp=2"] {
        for rows_max in [1, 2, 3, 4, 5, 6, 7, 100] {
            let measured = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let part = |x: &[Tensor]| {
                    let tokens = x[0].shape().iter().product::<usize>() as f64;
                    let sum = x[0].cast(DType::F64).sum().local_contribution()? / tokens;
                    Ok(PartialLoss { sum, count: None })
                };
                let plan = Plan::llama();
                match mean_loss(rank, &plan, &windows, rows_max, || false, part)? {
                    Evaluation::Loss(loss) => Ok(loss),
                    other => panic!("{other:?}"),
                }
            });
            let near = |loss: &f64| abs_diff_eq!(*loss, mean, epsilon = 1e-12);
            let measured = measured.unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert!(measured.iter().all(near), "{mesh}, {rows_max} rows at a time: {measured:?}, not {mean}");
        }
    }
}

/// Evaluates 8 windows, two per batch; returns the result and the number of batches of each rank.
fn measured(mesh: &str, stop: impl Fn(usize, usize) -> bool + Sync) -> Vec<(String, usize)> {
    let corpus = Arc::new(Corpus::new("t".into(), vec![1; 33]));
    let windows = Sampler::of_text(corpus, Split::All, 4, RowOrder::Sequential).unwrap();
    let plan = Plan::tensor_parallel("tp");
    let one = |rank: &Rank| {
        let (asked, parts) = (Cell::new(0), Cell::new(0));
        let stop = || {
            asked.set(asked.get() + 1);
            stop(rank.index(), asked.get())
        };
        let part = |_: &[Tensor]| {
            parts.set(parts.get() + 1);
            Ok(PartialLoss { sum: 1.0, count: None })
        };
        let measured = mean_loss(rank, &plan, &windows, 2, stop, part)?;
        Ok((format!("{measured:?}"), parts.get()))
    };
    World::run(Mesh::parse(mesh).unwrap(), one).unwrap()
}

#[test]
fn stop_request_on_one_rank_stops_all_at_the_same_batch() {
    assert_eq!(measured("", |_, _| false), [("Loss(1.0)".to_string(), 4)]);
    let given_up = ("Abandoned(None)".to_string(), 2);
    for mesh in ["", "tp=2"] {
        let last = Mesh::parse(mesh).unwrap().num_ranks() - 1;
        let ranks = measured(mesh, |rank, asked| rank == last && asked == 3);
        assert!(ranks.len() == last + 1 && ranks.iter().all(|rank| *rank == given_up), "{ranks:?}");
    }
}
