//! Errors of misuse of models and trainers carry the caller's line.

use crate::support::run;
use shardgrad_autograd::{Gradients, Var};
use shardgrad_nn::layer::Linear;
use shardgrad_nn::optim::ParamGroup;
use shardgrad_nn::{LrScheduler, Model, Optimizer, Plan, Sgd, StepArgs, Trainer, TrainerConfig};
use shardgrad_tensor::{Error, Kind, Layout, Mesh, Tensor, Value, World};

fn is_of_this_file(error: &Error) -> bool {
    error.site().is_some_and(|s| s.file() == file!())
}

#[test]
fn gradients_of_another_model_are_rejected() {
    for mesh in ["", "dp=2"] {
        run(mesh, |rank| {
            let plan = Plan::copies("dp");
            let [first, second] = [1, 2].map(|seed| Model::new(rank, Linear::new(3, 2), &plan, seed));
            let (first, second) = (first?, second?);
            let tape = first.tape();
            let x = tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32, 2.0, 3.0])?);
            first.forward(&x).square().sum().backward()?;
            let gradients = tape.gradients();
            let before = first.weight.tensor().to_f64()?;
            let error = Sgd::new(0.1).update(&second, gradients.clone()).unwrap_err();
            assert_eq!(error.message(), "2 of 2 gradients belong to no parameter of this model");
            assert!(error.kind() == Kind::Config && is_of_this_file(&error), "{error}");
            // Gradients of its own do not make up for them.
            second.forward(&tape.constant(x.tensor().clone())).square().sum().backward()?;
            let both = gradients.iter().map(|(key, g)| (*key, g.clone())).chain(tape.gradients()).collect();
            let error = Sgd::new(0.1).update(&second, both).unwrap_err();
            assert_eq!(error.message(), "2 of 4 gradients belong to no parameter of this model");
            // Nor is a step without any gradient taken.
            let error = Sgd::new(0.1).update(&second, tape.gradients()).unwrap_err();
            assert!(
                error.message().starts_with("none of the 2 trained parameters has a gradient"),
                "{error}"
            );
            assert!(error.kind() == Kind::Config && is_of_this_file(&error), "{error}");
            assert!(!Sgd::new(0.1).update(&first, gradients)?.skipped);
            assert_ne!(first.weight.tensor().to_f64()?, before);
            Ok(())
        });
    }
}

/// The error of the first step of a trainer, all of whose parameters are frozen or none.
fn step(is_frozen: bool, loss: fn(&Var) -> Var) -> Error {
    let ran = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let read = |rank: &shardgrad_tensor::Rank, _: u64, rows: std::ops::Range<usize>| {
            let layout = Layout::parse(&format!("f32[{}@dp, 3]", rows.len()), rank.mesh())?;
            Ok(vec![Tensor::full(rank, &layout, 1.0)?])
        };
        let forward = |model: &Linear, x: &[Var]| loss(&model.forward(&x[0]));
        let (plan, settings) =
            (Plan::data_parallel("dp"), TrainerConfig { microbatches: 2, ..TrainerConfig::new(4) });
        let mut trainer =
            Trainer::new(rank, Linear::new(3, 2), &plan, Sgd::new(0.1), settings, read, forward)?;
        if is_frozen {
            trainer.model().params().iter().for_each(|param| param.set_frozen(true));
        }
        trainer.step().map(|_| ())
    });
    ran.expect_err("the loss is rejected")
}

#[test]
fn an_invalid_loss_is_reported_with_the_line_of_the_step() {
    let wide = step(false, |y| y.square());
    assert!(wide.kind() == Kind::Shape && is_of_this_file(&wide), "{wide}");
    let frozen = step(true, |y| y.square().mean());
    assert!(frozen.kind() == Kind::Unsupported && is_of_this_file(&frozen), "{frozen}");
}

#[test]
fn an_optimizer_step_that_is_refused_names_the_line_of_the_step() {
    let refused = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let model = Model::new(rank, Linear::new(3, 2), &Plan::copies("dp"), 1)?;
        let (clip, lr) = (StepArgs { clip: Some(-1.0), ..StepArgs::new(0.1) }, StepArgs::new(f64::NAN));
        let group = ParamGroup { lr_scale: Some(0.5), ..ParamGroup::default() };
        let mut errors = vec![
            Sgd::new(0.1).step(&model, Gradients::new(), clip).unwrap_err(),
            Sgd::new(0.1).step(&model, Gradients::new(), lr).unwrap_err(),
            Sgd::new(0.1).group("wait", group).update(&model, Gradients::new()).unwrap_err(),
        ];
        let read = |rank: &shardgrad_tensor::Rank, _: u64, rows: std::ops::Range<usize>| {
            Ok(vec![Tensor::from_host(rank, &[rows.len(), 3], &vec![1.0f32; 3 * rows.len()])?])
        };
        let forward = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
        let schedule = LrScheduler::from_fn(|_| -1.0);
        let settings = TrainerConfig { lr_scheduler: Some(schedule), ..TrainerConfig::new(4) };
        let plan = Plan::copies("dp");
        let mut trainer =
            Trainer::new(rank, Linear::new(3, 2), &plan, Sgd::new(0.1), settings, read, forward)?;
        errors.push(trainer.step().unwrap_err());
        Ok(errors)
    });
    for error in refused.unwrap().into_iter().flatten() {
        assert!(error.kind() == Kind::Config && is_of_this_file(&error), "{error}");
    }
}

#[test]
fn out_of_memory_names_the_parameter_and_the_line_of_the_model() {
    let made = World::new(Mesh::single())
        .memory_limit(1 << 10)
        .launch(|rank| Model::new(rank, Linear::new(1024, 16), &Plan::new(), 1).map(|_| ()));
    let error = made.unwrap_err();
    assert!(error.kind() == Kind::OutOfMemory && is_of_this_file(&error), "{error}");
    let details: Vec<(&str, &str)> =
        error.details().iter().map(|(label, text)| (*label, text.as_str())).collect();
    assert!(details.contains(&("parameter", "weight: f32[1024, 16]")), "{error}");
    assert!(details.iter().any(|(label, _)| *label == "help"), "{error}");
}
