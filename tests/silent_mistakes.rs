//! Mistakes of a training loop that would train something else, unnoticed: each is an error, whose sentences are quoted here.

use crate::cli::Folder;
use approx::abs_diff_eq;
use shardgrad::nn::loss::mse;
use shardgrad::nn::metric::correct;
use shardgrad::prelude::*;

module! { struct Net { up: Linear, drop: Dropout, down: Linear } }

const NO_NOISE: Option<Noise> = None;

/// A model of a plan, with a dropout layer.
fn model(rank: &Rank, plan: &Plan, seed: u64) -> Result<Model<Net>> {
    let net = Net { up: Linear::new(3, 4), drop: Dropout::new(0.5), down: Linear::new(4, 2) };
    Model::new(rank, net, plan, seed)
}

/// The mean square of the results for rows on a tape.
fn loss(model: &Model<Net>, tape: &Tape, rows: Tensor) -> Var {
    let x = model.up.forward(&tape.constant(rows)).gelu();
    model.down.forward(&model.drop.forward(&x)).square().mean()
}

/// The same four rows on every rank, split as the plan states.
fn rows(rank: &Rank, plan: &Plan) -> Result<Tensor> {
    Tensor::normal(rank, &plan.batch_layout(rank.mesh(), DType::F32, &[4, 3])?, 7, 0, 1.0)
}

/// Rows that differ by rank, whose layout states that they are copies.
fn own_rows(rank: &Rank) -> Result<Tensor> {
    Tensor::from_host(rank, &[1, 3], &[1.0 + rank.index() as f32, 2.0, 3.0])
}

/// One update on rows.
fn update(rank: &Rank, model: &Model<Net>, rows: Tensor) -> Result<()> {
    let tape = model.tape();
    tape.set_noise(NO_NOISE);
    loss(model, &tape, rows).backward()?;
    AdamW::new(0.1).update(model, tape.gradients())?;
    rank.check();
    Ok(())
}

/// The message of the error of a program on a mesh, and its lines of help. The error names a line of this file, or the whole program is
/// wrong.
fn refused(mesh: &str, program: impl Fn(&Rank) -> Result<()> + Sync) -> Vec<String> {
    let error = World::run(Mesh::parse(mesh).unwrap(), program).expect_err(mesh);
    assert!(error.site().is_none_or(|site| site.file().ends_with("silent_mistakes.rs")), "{error}");
    let help = error.details().iter().filter(|(label, _)| *label == "help").map(|(_, text)| text.clone());
    [error.message().to_string()].into_iter().chain(help).collect()
}

#[test]
fn ranks_that_compute_with_different_data() {
    let split = "the ranks of `dp` computed with different data: split the batch with Plan::data_parallel(\"dp\") and Plan::batch_layout, or pass the same data on every rank";
    let under = |plan: Plan| refused("dp=2", |rank| update(rank, &model(rank, &plan, 1)?, own_rows(rank)?));
    assert_eq!(
        under(Plan::copies("dp")),
        ["gradients of 4 of 4 parameters differ between ranks that hold copies, `up.weight` first", split]
    );
    assert_eq!(
        under(Plan::data_parallel("dp")),
        [
            "the loss differs between ranks that hold copies of it: all data but that of the first rank would be ignored",
            split
        ]
    );
}

#[test]
fn ranks_that_begin_with_different_parameters() {
    let equal = "build the model with the same seed on every rank, change parameters and set learning rates on every rank alike, or load one checkpoint";
    let under = |plan: Plan| {
        refused("dp=2", |rank| update(rank, &model(rank, &plan, rank.index() as u64)?, rows(rank, &plan)?))
    };
    let found = under(Plan::data_parallel("dp"));
    assert_eq!(found, ["copies of 2 of 4 parameters differ between ranks, `up.weight` first", equal]);
    let found = under(Plan::copies("dp"));
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found[2], format!("parameters differ too: {equal}"));
}

#[test]
fn an_axis_that_the_plan_does_not_use() {
    let found = refused("ddp=2", |rank| model(rank, &Plan::data_parallel("dp"), 1).map(drop));
    assert_eq!(
        found,
        [
            "the plan does not use the mesh axis ddp=2",
            "name an axis of the plan in the mesh, shard rows over ddp with Plan::data_parallel(\"ddp\"), or state with Plan::copies(\"ddp\") that all its ranks do the same work"
        ]
    );
}

#[test]
fn dropout_that_drops_nothing() {
    let found = refused("", |rank| {
        let (plan, model) = (Plan::new(), model(rank, &Plan::new(), 1)?);
        loss(&model, &model.tape(), rows(rank, &plan)?).backward()
    });
    assert_eq!(
        found,
        [
            "dropout layer `drop` (p = 0.5) has no random numbers on a training tape and would drop nothing",
            "call tape.set_noise(Some(Noise { seed, step, first_row: 0 })) before the forward pass of each step; to train without dropout, call tape.set_noise(None)"
        ]
    );
}

#[test]
fn the_plan_of_a_family_for_layers_of_other_names() {
    let found = refused("tp=2", |rank| model(rank, &Plan::llama(), 1).map(drop));
    assert!(found[0].ends_with(" rule(s) of the plan match nothing in the model"), "{found:?}");
    assert!(
        found[1].ends_with(" of a model family by name: keep the names of the family, or write a plan with rules for your names (Plan::store); a layer without a rule is a copy on every rank"),
        "{found:?}"
    );
}

#[test]
fn regathered_points_that_the_model_does_not_have() {
    let found = refused("tp=2", |rank| model(rank, &Plan::new().regather("h.*.ln_1.out"), 1).map(drop));
    assert_eq!(found[0], "`regather h.*.ln_1.out` of the plan matches no point of the model");
}

#[test]
fn sequence_parallelism_of_a_family_for_layers_of_other_names() {
    let plan = Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down");
    let found =
        refused("tp=2", |rank| model(rank, &plan.clone().and(Plan::sequence_parallel("tp")), 1).map(drop));
    assert_eq!(found[0], "6 rule(s) of the plan match nothing in the model");
    assert!(
        found[1].starts_with("this plan shards the residual stream of a model family by name"),
        "{found:?}"
    );
}

#[test]
fn a_step_without_gradients() {
    let sentences = [
        "none of the 4 trained parameters has a gradient: the step would change nothing",
        "call `loss.backward()` before `tape.gradients()`, on the tape of the loss; the tape returns its gradients once",
    ];
    for mesh in ["", "dp=2"] {
        let plan = Plan::data_parallel("dp");
        let taken_early = refused(mesh, |rank| {
            let model = model(rank, &plan, 1)?;
            let tape = model.tape();
            tape.set_noise(NO_NOISE);
            let loss = loss(&model, &tape, rows(rank, &plan)?);
            let gradients = tape.gradients();
            loss.backward()?;
            AdamW::new(0.1).update(&model, gradients).map(drop)
        });
        let of_another_tape = refused(mesh, |rank| {
            let model = model(rank, &plan, 1)?;
            let tape = model.tape();
            tape.set_noise(NO_NOISE);
            loss(&model, &tape, rows(rank, &plan)?).backward()?;
            AdamW::new(0.1).update(&model, model.tape().gradients()).map(drop)
        });
        assert_eq!([taken_early, of_another_tape], [sentences; 2]);
    }
}

/// No error, because a loop may need no report; but a loss that was not passed must not pass for 0.
#[test]
fn a_loss_that_is_not_passed_is_unknown() {
    for mesh in ["", "dp=2"] {
        World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let plan = Plan::data_parallel("dp");
            let (model, mut optim) = (model(rank, &plan, 1)?, Sgd::new(0.1));
            let mut step = |is_passed: bool, factor: f64| {
                let tape = model.tape();
                tape.set_noise(NO_NOISE);
                let loss = loss(&model, &tape, rows(rank, &plan)?).scale(factor);
                loss.backward()?;
                let losses = if is_passed { vec![loss.tensor().clone()] } else { Vec::new() };
                let report =
                    optim.step(&model, tape.gradients(), StepArgs { losses, ..StepArgs::new(0.1) })?;
                Ok::<_, Error>((report.loss, loss.item()?, report.skipped))
            };
            let (reported, loss, skipped) = step(true, 1.0)?;
            assert!(abs_diff_eq!(reported, loss, epsilon = 1e-6) && !skipped, "{mesh}: {reported}");
            let (reported, _, skipped) = step(false, 1.0)?;
            assert!(reported.is_nan() && !skipped, "{mesh}: {reported}");
            // One rank of a pipeline passes the loss; all report it, 0 too.
            let (reported, _, skipped) = step(rank.index() == 0, 0.0)?;
            assert!(reported == 0.0 && !skipped, "{mesh}: {reported}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn training_and_checkpoints_while_averages_are_in_place() {
    let folder = Folder::new("silent-mistakes-averages");
    let run = folder.0.join("run");
    let sentences = |why: &str| {
        let text = format!("averages are in place of the parameters, `up.weight` first: {why}");
        [text, "drop the result of Ema::swap_in first".to_string()]
    };
    let state = RunState::default();
    for mesh in ["", "dp=2"] {
        let plan = Plan::data_parallel("dp");
        let updated = refused(mesh, |rank| {
            let model = model(rank, &plan, 1)?;
            let (ema, weight) = (Ema::new(&model, 0.5), model.param("up.weight")?);
            let own = weight.tensor().to_f64()?;
            let refused = {
                let _averages = ema.swap_in(&model)?;
                drop(ema.swap_in(&model)?);
                update(rank, &model, rows(rank, &plan)?)
            };
            assert_eq!(weight.tensor().to_f64()?, own);
            update(rank, &model, rows(rank, &plan)?)?;
            assert_ne!(weight.tensor().to_f64()?, own);
            refused
        });
        assert_eq!(updated, sentences("an update would be lost when the parameters come back"));
        let saved = refused(mesh, |rank| {
            let model = model(rank, &plan, 1)?;
            let ema = Ema::new(&model, 0.5);
            checkpoint::save_weights(&run, &model, &AdamW::new(0.1), &state)?;
            let _averages = ema.swap_in(&model)?;
            checkpoint::save_weights(&run, &model, &AdamW::new(0.1), &state)
        });
        assert_eq!(saved, sentences("a run that resumes from this checkpoint would train them"));
        let loaded = refused(mesh, |rank| {
            let model = model(rank, &plan, 1)?;
            let ema = Ema::new(&model, 0.5);
            let _averages = ema.swap_in(&model)?;
            checkpoint::load_weights(&run, &model, &mut AdamW::new(0.1)).map(drop)
        });
        assert_eq!(loaded, sentences("loaded parameters would be lost when the others come back"));
    }
}

#[test]
fn predictions_compared_with_the_targets_of_other_rows() {
    let column = |rank: &Rank| -> Result<Var> {
        Ok(Tape::new(rank).constant(Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?))
    };
    let found = refused("", |rank| {
        let predictions = column(rank)?;
        let targets = predictions.constant(Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?);
        mse(&predictions, &targets).item().map(drop)
    });
    let help = "bring both to one shape, as with `.reshape(&[2, 1])`";
    assert_eq!(found, ["mse of a prediction [2, 1] and a target [2]: the shapes differ", help]);
    let found = refused("", |rank| {
        let logits = column(rank)?;
        let targets = logits.constant(Tensor::from_host(rank, &[2, 1], &[0i64, 0])?);
        correct(&logits, &targets).sum().item().map(drop)
    });
    let help = "bring both to one shape, as with `.reshape(&[2])`";
    assert_eq!(found, ["the rows of the logits [2] and the targets [2, 1]: the shapes differ", help]);
}
