//! Rows that ask for unequally many tokens: the loss of a step is the mean over all of them, however the batch is cut. And
//! measurements that are given up.

use super::*;
use crate::data::scratch::Scratch;
use crate::data::{Corpus, Order, Split, TokenFile, Vocabulary};
use shardgrad::nn::hf::TensorWriter;
use shardgrad::nn::{BertConfig, ModelConfig};
use shardgrad::tensor::control::world_sum;
use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

/// Rows of the file, which the batches do not divide: steps ask for unequally many tokens too.
const ROWS: usize = 6;
const BATCH: usize = 4;
const SEQ: usize = 3;
const NONE: i64 = -100;

/// Rows that ask for 1, 3, 2, no, 3 and 3 tokens; with a mask that hides some inputs, if asked for.
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
        Order::InFileOrder,
    )
}

fn recipe(microbatches: usize) -> Recipe {
    Recipe {
        steps: 3,
        batch: BATCH,
        seq: SEQ,
        microbatches,
        schedule: Schedule::constant(0.1),
        optim: AdamW::new(0.1),
        clip: None,
        seed: 1,
        precision: Precision::of(DType::F64),
        capture: false,
    }
}

/// The mean over the labels of the whole batch of a step, which the model itself counts; stages hold no such program.
fn mean_of_all(
    trainer: &Trainer<'_, LanguageModel>,
    plan: &Plan,
    rows: &Sampler,
    step: u64,
) -> Result<Option<f64>> {
    if trainer.schedule().is_some() {
        return Ok(None);
    }
    let first = Sampler::step(step, BATCH as u64).start;
    let read = |own: Range<usize>| rows.batch(first + own.start as u64..first + own.end as u64);
    let part = trainer.loss_part(&batch(trainer.rank(), plan, [BATCH, SEQ], None, read)?)?;
    Ok(Some(world_sum(trainer.rank(), &[part], Location::caller())?[0]))
}

#[test]
fn a_token_that_is_asked_for_weighs_the_same_in_every_microbatch() {
    let (dir, config) = (Scratch::new(), ModelConfig::Bert(BertConfig::new(8, SEQ, [6, 5], 2, 2)));
    let plan = LanguageModel::plan(&config);
    let outcome = |masked: bool, mesh: &str, microbatches: usize, chunk: usize| {
        let rows = rows(&dir, &config, masked);
        let all = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let recipe = recipe(microbatches);
            let ahead = Ahead::new(&recipe, &plan, &rows);
            let mut trainer = recipe.trainer(rank, LanguageModel::new(&config), &ahead)?;
            let mut found = Vec::new();
            for step in 0..recipe.steps {
                let mean = mean_of_all(&trainer, &plan, &rows, step as u64)?;
                let report = trainer.step(&[])?;
                let far = mean.map_or(0.0, |mean| (report.loss - mean).abs());
                assert!(far < 1e-12, "{mesh}, step {step}: {report:?}, not {mean:?}");
                found.extend([report.loss, report.grad_norm]);
            }
            let part = |x: &[Tensor]| trainer.loss_part(x);
            match mean_loss(trainer.rank(), &plan, &rows, chunk, || false, part)? {
                Measured::Loss(loss) => found.push(loss),
                other => panic!("{other:?}"),
            }
            Ok(found)
        });
        all.unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
    };
    // On dp=3 a rank has no row of a microbatch of one or two.
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
        // The last piece of a measurement is smaller than the others.
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
        let near = whole.iter().zip(&cut).all(|(a, b)| ((a - b) / a).abs() < 1e-10);
        assert!(
            near && whole.len() == cut.len(),
            "{mesh}, {microbatches} microbatches: {cut:?} instead of {whole:?}"
        );
    }
}

#[test]
fn rows_that_were_read_are_those_of_their_step_whatever_becomes_of_the_file() {
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
                let recipe = recipe(4);
                let ahead = Ahead::new(&recipe, &plan, &rows);
                let mut trainer = recipe.trainer(rank, LanguageModel::new(&config), &ahead)?;
                ahead.read(trainer.rank(), 0)?;
                ahead.read(trainer.rank(), 1)?;
                world_sum(rank, &[0.0], Location::caller())?;
                if cuts && rank.index() == 0 {
                    cut();
                }
                world_sum(rank, &[0.0], Location::caller())?;
                trainer.check_alike()?;
                let losses = [trainer.step(&[])?.loss, trainer.step(&[])?.loss];
                assert_eq!(ahead.read(trainer.rank(), 2).is_err(), cuts, "{mesh}");
                Ok(losses)
            });
            all.unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
        };
        let expected = taken(false);
        assert_eq!(taken(true), expected, "{mesh}");
        // In place: the file stays open.
        std::fs::write(dir.path("rows.safetensors"), &whole).unwrap();
    }
}

#[test]
fn a_smaller_last_piece_weighs_by_its_rows() {
    // The loss of a row is the mean of its tokens: 1.5, 5.5, 9.5, ..
    let numbers: Vec<u8> = (0..29).collect();
    let corpus = Arc::new(Corpus::new("t".into(), numbers));
    let windows = Sampler::of_text(corpus, Split::All, 4, Order::InFileOrder).unwrap();
    assert_eq!(windows.num_windows(), 7);
    let mean = (0..7).map(|row| 4.0 * f64::from(row) + 1.5).sum::<f64>() / 7.0;
    for mesh in ["", "dp=2", "dp=3", "dp=5", "dp=2,tp=2", "dp=2,cp=2"] {
        for rows_max in [1, 2, 3, 4, 5, 6, 7, 100] {
            let measured = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let part = |x: &[Tensor]| {
                    let tokens = x[0].shape().iter().product::<usize>() as f64;
                    Ok(x[0].cast(DType::F64).sum().local_part_once()? / tokens)
                };
                let plan = Plan::llama();
                match mean_loss(rank, &plan, &windows, rows_max, || false, part)? {
                    Measured::Loss(loss) => Ok(loss),
                    other => panic!("{other:?}"),
                }
            });
            let near = |loss: &f64| (loss - mean).abs() < 1e-12;
            let measured = measured.unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert!(measured.iter().all(near), "{mesh}, {rows_max} rows at a time: {measured:?}, not {mean}");
        }
    }
}

/// What each rank measured of 8 windows, two at a time, and how many pieces it went through.
fn measured(mesh: &str, stop: impl Fn(usize, usize) -> bool + Sync) -> Vec<(String, usize)> {
    let corpus = Arc::new(Corpus::new("t".into(), vec![1; 33]));
    let windows = Sampler::of_text(corpus, Split::All, 4, Order::InFileOrder).unwrap();
    let plan = Plan::tensor("tp");
    let one = |rank: &Rank| {
        let (asked, parts) = (Cell::new(0), Cell::new(0));
        let stop = || {
            asked.set(asked.get() + 1);
            stop(rank.index(), asked.get())
        };
        let part = |_: &[Tensor]| {
            parts.set(parts.get() + 1);
            Ok(1.0)
        };
        let measured = mean_loss(rank, &plan, &windows, 2, stop, part)?;
        Ok((format!("{measured:?}"), parts.get()))
    };
    World::run(Mesh::parse(mesh).unwrap(), one).unwrap()
}

#[test]
fn a_rank_that_is_told_to_stop_stops_all_at_the_same_place() {
    assert_eq!(measured("", |_, _| false), [("Loss(1.0)".to_string(), 4)]);
    let given_up = ("Abandoned(None)".to_string(), 2);
    for mesh in ["", "tp=2"] {
        let last = Mesh::parse(mesh).unwrap().num_ranks() - 1;
        let ranks = measured(mesh, |rank, asked| rank == last && asked == 3);
        assert!(ranks.len() == last + 1 && ranks.iter().all(|rank| *rank == given_up), "{ranks:?}");
    }
}
