//! Hooks on activation points, and gradients by parameter name: the same on every mesh, and no trace without hooks.

use crate::support::{MESHES, ROWS, Setup, batch, config, run, tokens_and_targets};
use approx::{abs_diff_eq, assert_abs_diff_eq};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    Deterministic, Gpt2, InferenceModel, Model, Plan, ResultRanks, Sgd, Trainer, TrainerConfig,
};
use shardgrad_tensor::{DType, Kind, Rank, Result, Tensor};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// What hooks saw: name, and the whole value.
type Seen = Vec<(String, Vec<f64>)>;

/// Watches the outputs of the second products of all MLPs through a step; returns the loss, values and gradients.
fn watched(rank: &Rank, setup: &Setup) -> Result<(f64, Seen, Seen)> {
    let model = setup.model(rank)?;
    let seen: [Rc<RefCell<Seen>>; 2] = Default::default();
    let [values, gradients] = seen.clone();
    let note = |seen: Rc<RefCell<Seen>>| {
        move |name: &str, tensor: &shardgrad_tensor::Tensor| {
            // Collective calls: every rank runs the hook.
            assert!(tensor.show()?.starts_with(&tensor.layout().to_string()));
            seen.borrow_mut().push((name.to_string(), tensor.to_f64()?));
            Ok(())
        }
    };
    assert_eq!(model.watch_values("h.*.mlp.c_proj.out", note(values))?, 2);
    assert_eq!(model.watch_gradients("h.*.mlp.c_proj.out", note(gradients))?, 2);
    let loss = setup.backward(&model, &model.tape())?.0;
    model.unwatch();
    let unwatched = setup.backward(&model, &model.tape())?.0;
    assert_abs_diff_eq!(loss, unwatched, epsilon = 1e-12);
    let [values, gradients] = seen.map(|seen| seen.take());
    Ok((loss, values, gradients))
}

fn assert_close(mesh: &str, got: &Seen, want: &Seen) {
    assert_eq!(got.len(), want.len(), "{mesh}");
    for ((name, got), (right, want)) in got.iter().zip(want) {
        assert_eq!(name, right, "{mesh}");
        assert!(abs_diff_eq!(got[..], want[..], epsilon = 1e-11), "{mesh}: {name}");
    }
}

#[test]
fn hooks_see_the_values_and_gradients_of_one_rank_on_every_mesh() {
    let (loss, values, gradients) = run("", |rank| watched(rank, &Setup::new())).remove(0);
    let names = |seen: &Seen| seen.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&values), ["h.0.mlp.c_proj.out", "h.1.mlp.c_proj.out"]);
    assert_eq!(names(&gradients), ["h.1.mlp.c_proj.out", "h.0.mlp.c_proj.out"]);
    assert!(gradients.iter().flat_map(|(_, g)| g).any(|g| *g != 0.0));
    for mesh in MESHES {
        for (got, v, g) in run(mesh, |rank| watched(rank, &Setup::new())) {
            assert!(abs_diff_eq!(got, loss, epsilon = 1e-11), "{mesh}: {got}");
            assert_close(mesh, &v, &values);
            assert_close(mesh, &g, &gradients);
        }
    }
}

#[test]
fn microbatches_and_recomputed_blocks_call_hooks_again() {
    let setup = Setup { microbatches: 2, ..Setup::new() };
    let (_, values, gradients) = run("", |rank| watched(rank, &setup)).remove(0);
    assert_eq!((values.len(), gradients.len()), (4, 4));
    let setup = Setup { recompute: true, ..Setup::new() };
    let (_, values, gradients) = run("", |rank| watched(rank, &setup)).remove(0);
    // The second forward pass of a block is part of its backward pass.
    assert_eq!((values.len(), gradients.len()), (4, 2));
}

#[test]
fn errors_of_hooks_end_the_pass() {
    let model = |rank: &Rank| -> Result<Model<Gpt2>> {
        let model = Setup::new().model(rank)?;
        let refuse = |name: &str, _: &shardgrad_tensor::Tensor| {
            Err(shardgrad_tensor::Error::new(Kind::Config, format!("seen {name}")))
        };
        model.watch_gradients("h.1.ln_1.out", refuse)?;
        Ok(model)
    };
    let step = |rank: &Rank| {
        let model = model(rank)?;
        Setup::new().backward(&model, &model.tape()).map(|_| ())
    };
    let error = shardgrad_tensor::World::run(shardgrad_tensor::Mesh::single(), step).unwrap_err();
    assert!(error.message().contains("seen h.1.ln_1.out"), "{error}");
}

#[test]
fn gradients_are_read_by_parameter_name() {
    for mesh in ["", "dp=2,tp=2"] {
        run(mesh, |rank| {
            let (setup, model) = (Setup::new(), Setup::new().model(rank)?);
            model.freeze("h.0.ln_1.weight")?;
            let tape = model.tape();
            setup.backward(&model, &tape)?;
            let gradients = tape.gradients();
            for name in ["wte.weight", "h.1.mlp.c_fc.weight"] {
                let (param, grad) = (model.param(name)?, model.grad(&gradients, name)?);
                assert_eq!(grad.shape().as_slice(), param.shape(), "{name}");
                assert!(grad.ptr_eq(&gradients[&param.key()]));
            }
            let error = model.grad(&gradients, "h.1.mlp.c_fc.wait").unwrap_err();
            assert!(error.kind() == Kind::Config && error.to_string().contains("h.1.mlp.c_fc.weight"));
            let error = model.grad(&gradients, "h.0.ln_1.weight").unwrap_err();
            assert_eq!(error.message(), "the parameter `h.0.ln_1.weight` has no gradient: it is frozen");
            let error = model.watch_values("h.*.mpl.c_fc.out", |_, _| Ok(())).unwrap_err();
            assert!(error.kind() == Kind::Config && error.to_string().contains("mlp.c_fc.out"), "{error}");
            Ok(())
        });
    }
}

/// A hook that notes what it sees.
fn note(seen: &Rc<RefCell<Seen>>) -> impl Fn(&str, &Tensor) -> Result<()> + 'static {
    let seen = seen.clone();
    move |name, tensor| {
        seen.borrow_mut().push((name.to_string(), tensor.to_f64()?));
        Ok(())
    }
}

/// A leaf for each row, and eight of other sums.
const CANONICAL: Deterministic = Deterministic::Mesh { batch_leaves: ROWS, sum_leaves: 8 };

/// Losses and norms of steps of a trainer, of which hooks at a pattern see the second, whose biases are not zero any more; and what this rank saw.
fn trained(
    rank: &Rank,
    plan: &Plan,
    pattern: &str,
    recompute: bool,
    deterministic: Deterministic,
) -> Result<(Vec<f64>, Seen, Seen)> {
    let settings = TrainerConfig {
        microbatches: 4,
        seed: 5,
        dtype: DType::F64,
        deterministic,
        ..TrainerConfig::new(ROWS)
    };
    let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, plan, rows, 0);
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
    let module = Gpt2::new(&config()).recompute(recompute);
    let mut trainer = Trainer::new(rank, module, plan, Sgd::new(0.1), settings, read, loss)?;
    let (values, gradients) = (Rc::default(), Rc::default());
    let mut numbers = Vec::new();
    for step in 0..4 {
        if step == 1 {
            trainer.model().watch_values(pattern, note(&values))?;
            trainer.model().watch_gradients(pattern, note(&gradients))?;
        }
        let report = trainer.step()?;
        trainer.model().unwatch();
        numbers.extend([report.loss, report.grad_norm]);
    }
    Ok((numbers, values.take(), gradients.take()))
}

/// Whether numbers have the bits of others, or are those to rounding without canonical sums.
fn is_same(numbers: &[f64], right: &[f64], deterministic: Deterministic) -> bool {
    match deterministic {
        Deterministic::Run => abs_diff_eq!(*numbers, *right, epsilon = 1e-11),
        Deterministic::Mesh { .. } => {
            numbers.iter().map(|x| x.to_bits()).eq(right.iter().map(|x| x.to_bits()))
        }
    }
}

/// Checks that the first ranks of the stages, between them, saw the right numbers, in the order of their schedules.
fn assert_seen_between_stages(mesh: &str, mut seen: Seen, right: &Seen, deterministic: Deterministic) {
    assert_eq!(seen.len(), right.len(), "{mesh}: calls of hooks");
    for (name, right) in right {
        let is_seen =
            |(other, numbers): &(String, Vec<f64>)| other == name && is_same(numbers, right, deterministic);
        let at = seen.iter().position(is_seen).unwrap_or_else(|| {
            let of_name = seen.iter().filter(|(other, _)| other == name);
            let first =
                |(_, numbers): &(String, Vec<f64>)| numbers.iter().copied().take(3).collect::<Vec<f64>>();
            panic!(
                "{mesh}: no rank saw {name} {:?}: {:?}",
                &right[..3],
                of_name.map(first).collect::<Vec<_>>()
            )
        });
        seen.swap_remove(at);
    }
}

#[test]
fn hooks_in_a_pipelined_trainer_see_what_one_rank_sees() {
    let plan = |schedule| Plan::gpt2().pipeline_schedule(schedule);
    let cases = [
        ("pp=2", "1f1b", false, CANONICAL),
        ("pp=2", "zb-h1", false, CANONICAL),
        ("pp=3", "gpipe", false, CANONICAL),
        ("pp=2,tp=2", "zb-v", false, CANONICAL),
        // Four stages cut recomputed blocks; hooks see microbatches with rows of both ranks.
        ("pp=2", "interleaved", true, Deterministic::Run),
        ("dp=2,pp=2", "1f1b", false, Deterministic::Run),
    ];
    // Points between layers; a point inside of fused ops; all points.
    for pattern in ["h.*.mlp.c_proj.out", "h.1.*", "*"] {
        for (mesh, schedule, recompute, promise) in cases {
            let of_mesh =
                |mesh: &str| run(mesh, |rank| trained(rank, &plan(schedule), pattern, recompute, promise));
            let (right, values, gradients) = of_mesh("").remove(0);
            assert!(!values.is_empty() && values.len() % 4 == 0 && gradients.len() % 4 == 0);
            let ranks = run(mesh, |rank| {
                let mesh = rank.mesh();
                let is_first = mesh.axes().all(|axis| mesh.name(axis) == "pp" || rank.coordinate(axis) == 0);
                Ok((is_first, trained(rank, &plan(schedule), pattern, recompute, promise)?))
            });
            let (mut all_values, mut all_gradients) = (Vec::new(), Vec::new());
            for (is_first, (numbers, values, gradients)) in ranks {
                let is_same = is_same(&numbers, &right, promise);
                assert!(is_same, "{mesh} {schedule} {pattern}: {numbers:?} {right:?}");
                if is_first {
                    all_values.extend(values);
                    all_gradients.extend(gradients);
                }
            }
            assert_seen_between_stages(mesh, all_values, &values, promise);
            assert_seen_between_stages(mesh, all_gradients, &gradients, promise);
        }
    }
}

#[test]
fn hooks_change_no_bit_of_other_steps_on_a_pipeline() {
    let plain = |rank: &Rank| {
        let plan = Plan::gpt2();
        let settings =
            TrainerConfig { microbatches: 4, seed: 5, dtype: DType::F64, ..TrainerConfig::new(ROWS) };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, 0);
        let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
        let mut trainer =
            Trainer::new(rank, Gpt2::new(&config()), &plan, Sgd::new(0.1), settings, read, loss)?;
        (0..4).map(|_| trainer.step().map(|report| report.loss)).collect::<Result<Vec<f64>>>()
    };
    // This point is at the end of an op that is not fused.
    let watched = run("pp=2", |rank| trained(rank, &Plan::gpt2(), "h.0.ln_1.out", false, Deterministic::Run))
        .remove(0)
        .0;
    let right = run("pp=2", plain).remove(0);
    assert_eq!(watched.iter().step_by(2).copied().collect::<Vec<f64>>(), right);
}

#[test]
fn hooks_see_inference_in_stages() {
    let infer = |rank: &Rank| {
        let plan = Plan::gpt2();
        let arguments = |rank: &Rank| Ok(vec![batch(rank, &plan, 0..ROWS, 0)?.layout().clone()]);
        let forward = |model: &Gpt2, x: &[Var]| Ok(vec![model.forward(&x[0])]);
        let model =
            InferenceModel::new(rank, Gpt2::new(&config()), &plan, 5, DType::F64, arguments, forward)?;
        let (seen, microbatch) = (Rc::default(), vec![batch(model.rank(), &plan, 0..ROWS, 0)?]);
        model.model().watch_values("h.*.mlp.c_proj.out", note(&seen))?;
        model.forward(&[microbatch], ResultRanks::AllStages, forward)?;
        Ok(seen.take())
    };
    let right = run("", infer).remove(0);
    assert_eq!(right.len(), 2);
    assert_seen_between_stages("pp=2", run("pp=2", infer).concat(), &right, Deterministic::Run);
}
