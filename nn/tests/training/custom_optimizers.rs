//! The trainer takes any optimizer: AdamW, SGD and a custom rule take the same steps on every mesh and on a pipeline; misuse
//! of the `Optimizer` trait and invalid hyperparameters are refused.

use crate::support::{MESHES, ROWS, Setup, batch, run, tokens_and_targets};
use approx::abs_diff_eq;
use shardgrad_autograd::Var;
use shardgrad_nn::checkpoint::RunState;
use shardgrad_nn::optim::{LossScale, OptimizerState, OverflowCheck, ParamGroup};
use shardgrad_nn::{
    AdamW, ControlFlags, Gpt2, Linear, LrScheduler, Model, Muon, Optimizer, Optimizers, Param, Plan, Sgd,
    StepArgs, Trainer, TrainerConfig,
};
use shardgrad_tensor::{DType, Elementwise, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::ops::Range;

/// signSGD: w = w - lr sign(g) (Bernstein et al., arXiv 1802.04434).
#[derive(Debug, Default)]
struct SignSgd {
    num_steps: u64,
}

impl Optimizer for SignSgd {
    fn lr(&self) -> f64 {
        1e-3
    }

    fn describe(&self) -> String {
        format!("signs after {} steps", self.num_steps)
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let Some((hyperparameters, _)) = step.host_update()? else { return Ok(()) };
        params.iter().zip(hyperparameters).try_for_each(|((param, gradient), row)| {
            param.set_tensor(param.tensor().sub(&gradient.sign().scale(row[0])))
        })
    }

    fn count_step(&mut self, _: &[&Param]) {
        self.num_steps += 1;
    }
}

/// Losses and gradient norms of some clipped steps on one rank of a mesh.
fn run_with(rank: &Rank, optim: impl Optimizer) -> Result<Vec<[f64; 2]>> {
    let plan = Plan::gpt2();
    let settings = TrainerConfig {
        dtype: DType::F64,
        microbatches: 2,
        seed: 5,
        clip: Some(1.0),
        ..TrainerConfig::new(ROWS)
    };
    let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, 0);
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
    let module = Gpt2::new(&Setup::new().config);
    let mut trainer = Trainer::new(rank, module, &plan, optim, settings, read, loss)?;
    let mut found = Vec::new();
    for step in 0..4 {
        trainer.check_consistent()?;
        let report = trainer.step()?;
        assert_eq!((report.lr, trainer.optim().num_steps()), (trainer.optim().lr(), step + 1));
        found.push([report.loss, report.grad_norm]);
    }
    // A control number that is not finite is named on every rank, if nothing else is wrong.
    let control = if rank.index() == 0 { f64::NAN } else { 1.0 };
    let control = ControlFlags::new().number("fine", 2.0).number("odd", control);
    let error = trainer.step_with(control).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFinite);
    let named = "step 5: control number `odd` sums to NaN over all ranks; the update was not applied";
    assert_eq!(error.message(), named);
    Ok(found)
}

#[test]
fn every_optimizer_matches_one_rank_on_every_mesh() {
    let on = |mesh: &str, which: usize| {
        let result = World::run(Mesh::parse(mesh).unwrap(), |rank| match which {
            0 => run_with(rank, Sgd::new(0.1).momentum(0.5).nesterov().weight_decay(0.1)),
            1 => run_with(rank, AdamW::new(0.01).weight_decay(0.1)),
            2 => run_with(
                rank,
                Optimizers::new().otherwise(AdamW::new(0.01)).on("h.*.c_*.weight", Muon::new(0.02)),
            ),
            _ => run_with(rank, SignSgd::default()),
        });
        let mut ranks = result.unwrap_or_else(|e| panic!("optimizer {which} on {mesh}: {e}"));
        let first = ranks.swap_remove(0);
        assert!(ranks.iter().all(|r| *r == first), "optimizer {which} on {mesh}: ranks disagree");
        first
    };
    for which in 0..4 {
        let alone = on("", which);
        assert!(alone[3][0] < alone[0][0], "optimizer {which}: {alone:?}");
        for mesh in MESHES.into_iter().chain(["pp=2"]) {
            let here = on(mesh, which);
            let [found, expected] = [&here, &alone].map(|steps| steps.as_flattened());
            assert!(
                abs_diff_eq!(found, expected, epsilon = 1e-8),
                "optimizer {which} on {mesh}: {here:?} {alone:?}"
            );
        }
    }
}

/// Forwards the update of all but the first parameters to another optimizer, and its hyperparameters only if `forwards_hyperparameters`;
/// its state is not forwarded.
#[derive(Clone, Debug)]
pub(crate) struct Forwarding<O> {
    pub(crate) rule: O,
    pub(crate) left_out: usize,
    pub(crate) forwards_hyperparameters: bool,
}

impl<O: Optimizer> Optimizer for Forwarding<O> {
    fn lr(&self) -> f64 {
        self.rule.lr()
    }

    fn describe(&self) -> String {
        self.rule.describe()
    }

    fn num_steps(&self) -> u64 {
        self.rule.num_steps()
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Vec<Vec<f64>>> {
        match self.forwards_hyperparameters {
            true => self.rule.hyperparameters(params, lr),
            false => Ok(vec![vec![lr]; params.len()]),
        }
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        self.rule.apply_update(&params[self.left_out..], step)
    }

    fn count_step(&mut self, params: &[&Param]) {
        self.rule.count_step(params);
    }
}

#[test]
fn update_with_hyperparameters_of_other_parameters_is_refused() {
    fn step_with_one_left_out<O: Optimizer>(
        rule: fn() -> O,
        left_out: usize,
        forwards_hyperparameters: bool,
    ) -> Result<()> {
        let ran = World::run(Mesh::single(), |rank| {
            let model = Model::new(rank, Linear::new(3, 2), &Plan::new(), 1)?;
            let tape = model.tape();
            let x = tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32, 2.0, 3.0])?);
            model.forward(&x).square().sum().backward()?;
            Forwarding { rule: rule(), left_out, forwards_hyperparameters }
                .update(&model, tape.gradients())
                .map(drop)
        });
        ran.map(drop)
    }
    fn all<O: Optimizer>(rule: fn() -> O) {
        step_with_one_left_out(rule, 0, true).unwrap();
        for (left_out, forwards_hyperparameters, text) in [
            (1, true, "a step of 1 parameters needs"),
            (0, false, "Optimizer::hyperparameters was not called for parameter"),
        ] {
            let error = step_with_one_left_out(rule, left_out, forwards_hyperparameters).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().starts_with(text), "{error}");
        }
    }
    all(|| AdamW::new(0.1));
    all(|| Sgd::new(0.1));
}

/// The first parameter by one optimizer, the rest by another.
#[derive(Debug)]
struct Split(AdamW, Sgd);

impl Optimizer for Split {
    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn describe(&self) -> String {
        format!("{} and {}", self.0.describe(), self.1.describe())
    }

    fn num_steps(&self) -> u64 {
        self.0.num_steps()
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Vec<Vec<f64>>> {
        let (first, others) = params.split_at(1);
        Ok([self.0.hyperparameters(first, lr)?, self.1.hyperparameters(others, lr)?].concat())
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let (first, others) = params.split_at(1);
        self.0.apply_update(first, &step.for_params(0..1))?;
        self.1.apply_update(others, &step.for_params(1..params.len()))
    }

    fn count_step(&mut self, params: &[&Param]) {
        let (first, others) = params.split_at(1);
        self.0.count_step(first);
        self.1.count_step(others);
    }
}

#[test]
fn step_is_split_between_two_optimizers() {
    fn stepped(rank: &Rank, mut optim: impl Optimizer) -> Result<Vec<Vec<f64>>> {
        let model = Model::new(rank, Linear::new(3, 2), &Plan::new(), 1)?;
        let tape = model.tape();
        let x = tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32, 2.0, 3.0])?);
        model.forward(&x).square().sum().backward()?;
        optim.step(&model, tape.gradients(), StepArgs { clip: Some(0.5), ..StepArgs::new(0.01) })?;
        model.params().iter().map(|param| param.tensor().to_f64()).collect()
    }
    World::run(Mesh::single(), |rank| {
        let (adam, sgd) = (|| AdamW::new(0.1).weight_decay(0.1), || Sgd::new(0.1).momentum(0.5));
        let both = stepped(rank, Split(adam(), sgd()))?;
        assert_eq!(both, [stepped(rank, adam())?.swap_remove(0), stepped(rank, sgd())?.swap_remove(1)]);
        Ok(())
    })
    .unwrap();
}

/// A trainer of the tiny model.
fn trainer<'t>(rank: &Rank, plan: &'t Plan, optim: impl Optimizer + 't) -> Result<Trainer<'t, Gpt2>> {
    let schedule = Some(LrScheduler::constant(0.01).warmup(2).linear(6, 0.001));
    let settings = TrainerConfig {
        dtype: DType::F64,
        microbatches: 2,
        seed: 5,
        lr_scheduler: schedule,
        clip: Some(1.0),
        ..TrainerConfig::new(ROWS)
    };
    let read = |rank: &Rank, step: u64, rows: Range<usize>| {
        let first = (step % 2) as usize;
        Ok(vec![batch(rank, plan, rows.clone(), first)?, batch(rank, plan, rows, 1)?])
    };
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
    Trainer::new(rank, Gpt2::new(&Setup::new().config), plan, optim, settings, read, loss)
}

#[test]
fn optimizer_state_transfers_between_trainers() {
    let plan = Plan::gpt2();
    for (mesh, adam) in [("", true), ("dp=2,tp=2", true), ("pp=2", true), ("pp=2", false), ("tp=2", false)] {
        run(mesh, |rank| {
            let new = || match adam {
                true => trainer(rank, &plan, AdamW::new(0.01).weight_decay(0.1)),
                false => trainer(rank, &plan, Sgd::new(0.01).momentum(0.9)),
            };
            let (mut uninterrupted, mut second) = (new()?, new()?);
            let reports: Vec<_> = (0..5).map(|_| uninterrupted.step()).collect::<Result<_>>()?;
            let mut first = new()?;
            first.step()?;
            first.step()?;
            let here = |t: &Trainer<'_, Gpt2>| -> Vec<Param> {
                t.model().params().iter().filter(|p| p.is_local()).cloned().collect()
            };
            let mut states: Vec<(Param, OptimizerState)> = Vec::new();
            for (from, to) in here(&first).iter().zip(here(&second)) {
                to.set_tensor(from.tensor())?;
                states.extend(first.optim().param_state(from).map(|state| (to, state)));
            }
            assert!(!states.is_empty());
            second.model_and_optim_mut().1.load_state(first.optim().num_steps(), states)?;
            second.set_state(&first.state());
            for report in &reports[2..] {
                assert_eq!(second.step()?, *report, "{mesh}");
            }
            let none = vec![(here(&second)[0].clone(), OptimizerState { num_steps: 1, tensors: Vec::new() })];
            assert_eq!(second.model_and_optim_mut().1.load_state(1, none).unwrap_err().kind(), Kind::Config);
            let mut signs = trainer(rank, &plan, SignSgd::default())?;
            assert_eq!(
                signs.model_and_optim_mut().1.load_state(1, Vec::new()).unwrap_err().kind(),
                Kind::Unsupported
            );
            Ok(())
        });
    }
}

#[test]
fn parameter_group_without_match_is_refused() {
    let group = ParamGroup { lr_scale: Some(0.1), weight_decay: None };
    for mesh in ["", "pp=2", "tp=2"] {
        run(mesh, |rank| {
            let plan = Plan::gpt2();
            for (pattern, fits) in
                [("h.1.mlp.c_fc.wieght", false), ("h.9.mlp.c_fc.*", false), ("h.*.c_fc.weight", true)]
            {
                let adam = AdamW::new(0.1).group("wte.weight", group).group(pattern, group);
                let sgd = Sgd::new(0.1).group(pattern, group);
                for made in [trainer(rank, &plan, adam).map(drop), trainer(rank, &plan, sgd).map(drop)] {
                    assert_eq!(made.is_ok(), fits, "{mesh} {pattern}");
                    let Err(error) = made else { continue };
                    assert_eq!(error.kind(), Kind::Config, "{error}");
                    let [("group", expected)] = error.details() else { panic!("{error}") };
                    assert!(expected.starts_with(pattern) && expected.contains("mlp.c_fc.weight"), "{error}");
                }
            }
            Ok(())
        });
    }
    // A custom loop gets the error in its first step.
    run("", |rank| {
        let model = Model::new(rank, Gpt2::new(&Setup::new().config), &Plan::gpt2(), 1)?;
        let tape = model.tape();
        let ids = tape.constant(batch(rank, &Plan::gpt2(), 0..ROWS, 0)?);
        model.loss(&ids, &ids).backward()?;
        let error = AdamW::new(0.1).group("wt", group).update(&model, tape.gradients()).unwrap_err();
        assert!(
            error.message().contains("1 parameter group(s) of the optimizer match no parameter"),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn hyperparameters_that_produce_nan_are_refused() {
    type Make = fn() -> String;
    let made: [(Make, &str); 12] = [
        (|| format!("{:?}", AdamW::new(f64::NAN)), "the learning rate is NaN"),
        (|| format!("{:?}", AdamW::new(0.1).betas(1.0, 0.9)), "beta1 is 1"),
        (|| format!("{:?}", AdamW::new(0.1).betas(0.9, -0.1)), "beta2 is -0.1"),
        (|| format!("{:?}", AdamW::new(0.1).eps(0.0)), "eps is 0"),
        (|| format!("{:?}", AdamW::new(0.1).eps(f64::INFINITY)), "eps is inf"),
        (|| format!("{:?}", AdamW::new(0.1).weight_decay(-0.5)), "the weight decay is -0.5"),
        (|| format!("{:?}", Sgd::new(-0.1)), "the learning rate is -0.1"),
        (|| format!("{:?}", Sgd::new(0.1).momentum(1.5)), "the momentum is 1.5"),
        (|| format!("{:?}", Sgd::new(0.1).weight_decay(f64::NAN)), "the weight decay is NaN"),
        (
            || {
                format!(
                    "{:?}",
                    Sgd::new(0.1).group("x", ParamGroup { lr_scale: Some(-1.0), weight_decay: None })
                )
            },
            "the lr_scale of a group is -1",
        ),
        (
            || {
                format!(
                    "{:?}",
                    AdamW::new(0.1).group("x", ParamGroup { lr_scale: None, weight_decay: Some(-1.0) })
                )
            },
            "the weight_decay of a group is -1",
        ),
        (|| format!("{:?}", AdamW::new(f64::INFINITY)), "the learning rate is inf"),
    ];
    for (make, expected) in made {
        let error = World::run(Mesh::single(), |_| Ok(make())).unwrap_err();
        assert_eq!(error.kind(), Kind::Config, "{error}");
        assert!(error.message().starts_with(expected), "{error}");
        assert!(error.site().is_some_and(|site| site.file().ends_with("optimizers.rs")), "{error}");
    }
    let _ = (AdamW::new(0.0).betas(0.0, 0.999).weight_decay(0.0), Sgd::new(0.0).momentum(1.0));
    for (eps, fits) in [(1e300, false), (1e-60, false), (1e-8, true)] {
        let refused = World::run(Mesh::single(), |rank| {
            let model = Model::new(rank, Gpt2::new(&Setup::new().config), &Plan::gpt2(), 1)?;
            AdamW::new(0.1).eps(eps).check_params(model.params())
        });
        assert_eq!(refused.is_ok(), fits, "{eps}");
        let wide = World::run(Mesh::single(), |rank| {
            AdamW::new(0.1).eps(eps).check_params(Setup::new().model(rank)?.params())
        });
        assert!(wide.is_ok(), "{eps} is a number of f64");
    }
    // A NaN learning rate of a schedule is found before any parameter changes.
    run("tp=2", |rank| {
        let plan = Plan::gpt2();
        let settings = TrainerConfig {
            lr_scheduler: Some(LrScheduler::from_fn(|step| if step == 1 { f64::NAN } else { 0.1 })),
            ..TrainerConfig::new(ROWS)
        };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| Ok(vec![batch(rank, &plan, rows, 0)?]);
        let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[0]);
        let module = Gpt2::new(&Setup::new().config);
        let mut trainer = Trainer::new(rank, module, &plan, AdamW::new(0.1), settings, read, loss)?;
        trainer.step()?;
        let error = trainer.step().unwrap_err();
        let expected = "the learning rate of step 2 is NaN, which is not a finite number of at least 0";
        assert_eq!((error.kind(), error.message()), (Kind::Config, expected));
        Ok(())
    });
}

#[test]
fn invalid_step_arguments_are_refused_before_parameters_change() {
    type Change = fn(&mut StepArgs);
    let lr = "the learning rate of step 1 is";
    let clip = "the largest gradient norm (clip) is";
    let changes: [(Change, &str); 12] = [
        (|args| args.lr = -0.1, lr),
        (|args| args.lr = f64::NAN, lr),
        (|args| args.lr = f64::INFINITY, lr),
        (|args| args.clip = Some(-1.0), clip),
        (|args| args.clip = Some(0.0), clip),
        (|args| args.clip = Some(f64::NAN), clip),
        (|args| args.clip = Some(f64::NEG_INFINITY), clip),
        (|args| args.loss_scale = Some(0.0), "the loss scale is 0"),
        (|args| args.loss_scale = Some(-1.0), "the loss scale is -1"),
        (|args| args.loss_scale = Some(f64::NAN), "the loss scale is NaN"),
        (|args| args.loss_scale = Some(f64::INFINITY), "the loss scale is inf"),
        (|args| args.loss_divisor = 0, "the loss divisor is 0"),
    ];
    run("dp=2", |rank| {
        let (setup, mut optim) = (Setup::new(), Sgd::new(0.1));
        let model = setup.model(rank)?;
        let weights =
            || -> Result<Vec<Vec<u8>>> { model.params().iter().map(|p| p.tensor().to_bytes()).collect() };
        let mut take = |args: StepArgs| {
            let tape = model.tape();
            setup.backward(&model, &tape)?;
            optim.step(&model, tape.gradients(), args)
        };
        let before = weights()?;
        for (change, expected) in changes {
            let mut args = StepArgs::new(0.1);
            change(&mut args);
            let error = take(args).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert!(error.message().starts_with(expected), "{error}");
            assert_eq!(error.details()[0].0, "help", "{error}");
        }
        assert!(weights()? == before, "a step that was refused moved weights");
        // A zero learning rate, an infinite clip and a small loss scale are valid.
        assert!(!take(StepArgs::new(0.0))?.skipped && weights()? == before);
        let loose = StepArgs { clip: Some(f64::INFINITY), loss_scale: Some(0.5), ..StepArgs::new(0.0) };
        assert!(!take(loose)?.skipped && weights()? == before);
        Ok(())
    });
}

/// A trainer of the tiny model with this configuration.
fn descending(rank: &Rank, settings: TrainerConfig) -> Result<Trainer<'static, Gpt2>> {
    let read = |rank: &Rank, _: u64, rows: Range<usize>| Ok(vec![batch(rank, &Plan::gpt2(), rows, 0)?]);
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[0]);
    let module = Gpt2::new(&Setup::new().config);
    Trainer::new(rank, module, &Plan::gpt2(), Sgd::new(0.1), settings, read, loss)
}

#[test]
fn microbatches_that_do_not_divide_rows_are_refused_quickly() {
    // The search for a divisor of the last ones once took hours.
    for (rows, microbatches, nearest) in
        [(12, 5, 4), (12, 7, 6), (12, 100, 12), (12, 0, 1), (7, 4, 1), (7, 5, 7), (0, 3, 1), (1 << 40, 3, 2)]
    {
        run("", |rank| {
            let settings = TrainerConfig { microbatches, ..TrainerConfig::new(rows) };
            let error = descending(rank, settings).map(drop).unwrap_err();
            let expected = format!("{microbatches} microbatches do not divide a batch of {rows} rows");
            assert_eq!((error.kind(), error.message()), (Kind::Config, expected.as_str()));
            assert_eq!(error.details()[0].1, format!("use {nearest} microbatches"));
            Ok(())
        });
    }
}

#[test]
fn trainer_refuses_invalid_clip_schedule_and_loss_scale() {
    run("", |rank| {
        let made = |settings: TrainerConfig| descending(rank, settings);
        for clip in [-1.0, 0.0, f64::NAN] {
            let error =
                made(TrainerConfig { clip: Some(clip), ..TrainerConfig::new(ROWS) }).map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert!(error.message().contains("(clip) is"), "{error}");
        }
        for schedule in [LrScheduler::constant(-0.1), LrScheduler::constant(0.1).cosine(0, -1.0)] {
            let error = made(TrainerConfig { lr_scheduler: Some(schedule), ..TrainerConfig::new(ROWS) })?
                .step()
                .unwrap_err();
            assert!(error.message().starts_with("the learning rate of step 1 is -"), "{error}");
        }
        for scale in [0.0, -1.0, f64::NAN] {
            let mut trainer = made(TrainerConfig { dtype: DType::F16, ..TrainerConfig::new(ROWS) })?;
            let before = trainer.state();
            trainer.set_state(&RunState { loss_scale: Some(LossScale::new(scale, 0)), ..trainer.state() });
            let error = trainer.step().unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert!(error.message().starts_with("the loss scale is"), "{error}");
            assert_eq!(trainer.model().non_finite_params()?, Vec::<String>::new());
            trainer.set_state(&before);
            trainer.step()?;
        }
        Ok(())
    });
}

#[test]
fn ranks_with_different_optimizers_are_detected() {
    let result = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        run_with(rank, Sgd::new(0.1).momentum(if rank.index() == 0 { 0.5 } else { 0.6 }))
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Diverged);
    assert!(error.to_string().contains("optimizer"), "{error}");
}
