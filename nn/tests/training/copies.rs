//! Ranks that compute with different data where the plan calls their work copies: an error in the first update, before any
//! parameter changes.

use crate::support::run;
use crate::traces::counts;
use shardgrad_autograd::Var;
use shardgrad_nn::{Linear, Model, Optimizer, Plan, Sgd, StepArgs, Trainer, TrainerConfig};
use shardgrad_tensor::{Error, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::ops::Range;

/// Rows that differ by rank, which no plan splits.
fn own_rows(rank: &Rank) -> Result<Tensor> {
    let first = 1.0 + rank.index() as f32;
    Tensor::from_host(rank, &[2, 2], &[first, 2.0, 3.0, 4.0])
}

/// One update of an own loop.
fn update(rank: &Rank, model: &Model<Linear>, optim: &mut Sgd, x: Tensor, every: u64) -> Result<()> {
    let tape = model.tape();
    model.forward(&tape.constant(x)).square().mean().backward()?;
    match every {
        100 => optim.update(model, tape.gradients()),
        every => {
            let args = StepArgs { copies_checked_every: every, ..StepArgs::new(0.1) };
            optim.step(model, tape.gradients(), args)
        }
    }?;
    rank.check();
    Ok(())
}

fn refused(f: impl Fn(&Rank) -> Result<()> + Sync) -> Error {
    World::run(Mesh::parse("dp=2").unwrap(), f).expect_err("it must fail")
}

#[test]
fn data_that_differ_by_rank_under_a_plan_of_copies_are_refused() {
    let error = refused(|rank| {
        let model = Model::new(rank, Linear::new(2, 1), &Plan::copies("dp"), 1)?;
        let before = model.param("weight")?.tensor().to_f64()?;
        let refused = update(rank, &model, &mut Sgd::new(0.1), own_rows(rank)?, 100);
        assert_eq!(model.param("weight")?.tensor().to_f64()?, before, "no parameter has changed");
        refused
    });
    assert_eq!(error.kind(), Kind::Diverged);
    assert_eq!(
        error.message(),
        "gradients of 2 of 2 parameters differ between ranks that hold copies, `weight` first"
    );
    let text = error.to_string();
    for part in [
        "weight, bias",
        "1 (dp=1) of mesh(dp=2) holds different bits than rank 0 (dp=0) of mesh(dp=2)",
        "the ranks of `dp` computed with different data: split the batch with Plan::data_parallel(\"dp\") and Plan::batch_layout",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(error.site().is_some_and(|site| site.file().ends_with("copies.rs")), "{text}");
}

#[test]
fn data_that_the_plan_does_not_split_are_refused() {
    // Every rank computes the loss of its own rows, but their layout says that the rows are copies.
    let error = refused(|rank| {
        let model = Model::new(rank, Linear::new(2, 1), &Plan::data_parallel("dp"), 1)?;
        update(rank, &model, &mut Sgd::new(0.1), own_rows(rank)?, 100)
    });
    assert_eq!(error.kind(), Kind::Diverged);
    assert_eq!(
        error.message(),
        "the loss differs between ranks that hold copies of it: all data but that of the first rank would be ignored"
    );
    assert!(error.to_string().contains("Plan::data_parallel(\"dp\") and Plan::batch_layout"), "{error}");
}

#[test]
fn trainers_compare_copies_too() {
    for plan in [Plan::copies("dp"), Plan::data_parallel("dp")] {
        let error = refused(|rank| {
            let read = |rank: &Rank, _: u64, _: Range<usize>| Ok(vec![own_rows(rank)?]);
            let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
            let config = TrainerConfig::new(2);
            let mut trainer =
                Trainer::new(rank, Linear::new(2, 1), &plan, Sgd::new(0.1), config, read, loss)?;
            trainer.step().map(drop)
        });
        assert_eq!(error.kind(), Kind::Diverged, "{error}");
        assert!(error.to_string().contains("Plan::data_parallel(\"dp\")"), "{error}");
    }
}

#[test]
fn copies_are_compared_in_the_first_update_and_at_intervals() {
    // Ranks part after the first update.
    let updates_until_refused = |every: u64| {
        let counts = run("dp=2", |rank| {
            let model = Model::new(rank, Linear::new(2, 1), &Plan::copies("dp"), 1)?;
            let mut optim = Sgd::new(0.1);
            for count in 0..6 {
                let x = if count == 0 {
                    Tensor::full(rank, own_rows(rank)?.layout(), 1.0)?
                } else {
                    own_rows(rank)?
                };
                if update(rank, &model, &mut optim, x, every).is_err() {
                    return Ok(count);
                }
            }
            Ok(6)
        });
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        counts[0]
    };
    assert_eq!([0, 1, 2, 3, 5].map(updates_until_refused), [6, 1, 2, 3, 5]);
    // A check is one more all-gather.
    run("dp=2", |rank| {
        let model = Model::new(rank, Linear::new(2, 1), &Plan::copies("dp"), 1)?;
        let mut optim = Sgd::new(0.1);
        rank.trace().enable();
        for expected in [&["control all_gather 1", "control all_reduce 1"][..], &["control all_reduce 1"]] {
            let x = Tensor::full(rank, own_rows(rank)?.layout(), 1.0)?;
            update(rank, &model, &mut optim, x, 100)?;
            assert_eq!(counts(&rank.trace().take()), expected);
        }
        // Another model on the rank has a first update of its own.
        let other = Model::new(rank, Linear::new(2, 1), &Plan::copies("dp"), 1)?;
        update(rank, &other, &mut optim, Tensor::full(rank, own_rows(rank)?.layout(), 1.0)?, 100)?;
        assert_eq!(counts(&rank.trace().take()), ["control all_gather 1", "control all_reduce 1"]);
        Ok(())
    });
}
