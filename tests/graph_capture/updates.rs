//! Graph capture of the optimizer update: bitwise equal to an eager update for any step inputs, with one host synchronization per step.

use super::device::{CapturingDevice, DeviceCall};
use super::{Captured, Case, Lm, STEPS, config, read, settings};
use shardgrad::nn::optim::{LossScale, OptimizerState, OverflowCheck, ParamGroup};
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::ops::Range;
use std::sync::Arc;

fn grouped() -> AdamW {
    let slow = ParamGroup { lr_scale: Some(0.25), weight_decay: Some(0.0) };
    AdamW::new(3e-3).betas(0.8, 0.97).weight_decay(0.1).group("h.1.*", slow)
}

fn descent(nesterov: bool) -> Sgd {
    let sgd = Sgd::new(0.05).momentum(0.9).weight_decay(0.01);
    if nesterov { sgd.nesterov() } else { sgd }
}

/// An optimizer that synchronizes to learn whether the step is skipped, and delegates to AdamW.
#[derive(Debug)]
struct SynchronizingAdamW(AdamW);

impl Optimizer for SynchronizingAdamW {
    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn num_steps(&self) -> u64 {
        self.0.num_steps()
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Vec<Vec<f64>>> {
        self.0.hyperparameters(params, lr)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        if step.host_update()?.is_some() { self.0.apply_update(params, step) } else { Ok(()) }
    }

    fn count_step(&mut self, params: &[&Param]) {
        self.0.count_step(params);
    }

    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        self.0.param_state(param)
    }
}

#[test]
fn failed_replay_leaves_parameters_unchanged_or_marks_them_lost() {
    let config = ModelConfig::from(config(0.0));
    // Each step replays its pass, then its update.
    for (number, is_update) in [(5, false), (6, true)] {
        let world = World::new(Mesh::single())
            .threads(1)
            .on_device(Arc::new(CapturingDevice::failing_replay(number)));
        let ended = world.launch(|rank| {
            let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
            let settings = TrainerConfig { capture: true, ..settings() };
            let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
            let weights = |trainer: &Lm<'_>| {
                trainer.model().params().iter().map(|p| p.tensor().to_f64()).collect::<Result<Vec<_>>>()
            };
            trainer.step()?;
            trainer.step()?;
            let before = weights(&trainer)?;
            let error = trainer.step().unwrap_err();
            assert!(error.message().contains("replay: not now"), "{error}");
            let expected =
                error.details().iter().find(|(label, _)| *label == "lost").map(|(_, text)| text.to_string());
            if !is_update {
                assert_eq!((expected, weights(&trainer)?), (None, before));
                trainer.step()?;
                return weights(&trainer).map(drop);
            }
            let (count, first) = (before.len(), trainer.model().params()[0].name());
            let what = format!(
                "{count} parameters, beginning with `{first}`, may belong to no step; resume from the last saved model"
            );
            assert!(expected.is_some_and(|expected| expected.starts_with(&what)), "{error}");
            // Half-updated weights cannot be read.
            weights(&trainer).map(drop)
        });
        match is_update {
            false => drop(ended.unwrap()),
            true => assert!(ended.unwrap_err().message().contains("has no value: an update of it failed")),
        }
    }
}

#[test]
fn updates_of_all_optimizers_are_captured() {
    for clip in [None, Some(0.5), Some(1e9)] {
        let case = Case { settings: TrainerConfig { clip, ..settings() }, ..Case::new() };
        case.check_by(&Captured::all(1), grouped);
        case.check_by(&Captured::all(1), || descent(true));
    }
    Case::new().check_by(&Captured::all(1), || descent(false));
    let settings = TrainerConfig { dtype: DType::BF16, ..settings() };
    Case { settings, ..Case::new() }.check_by(&Captured::all(1), || descent(true));
}

#[test]
fn moved_optimizer_state_is_recaptured() {
    // Optimizer state with another handle is not updated in place, so its address changes; a parameter that is unfrozen later has its own
    // state and bias corrections.
    let held = |trainer: &mut Lm<'_>, step: usize, held: &mut Vec<Tensor>| {
        let kept = |param: &Param| trainer.optim().param_state(param).map(|kept| kept.tensors);
        if step == 2 {
            held.extend(kept(&trainer.model().params()[3]).into_iter().flatten());
            let sum: f64 = held[0].to_f64()?.iter().sum();
            held.push(Tensor::from_host(trainer.rank(), &[1], &[sum])?);
        }
        if step == 5 {
            let sum: f64 = held[0].to_f64()?.iter().sum();
            assert_eq!(held.last().unwrap().to_f64()?, [sum], "held tensors do not change");
        }
        Ok(())
    };
    let case = Case { before: &held, ..Case::new() };
    // The pass is captured once, the update twice.
    case.check_by(&Captured { captures: 3, ..Captured::all(1) }, grouped);
    case.check_by(&Captured { captures: 3, ..Captured::all(1) }, || descent(false));
    let late = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        match step {
            0 => drop(trainer.model().freeze("h.0.*")?),
            2 => trainer.model().params().iter().for_each(|param| param.set_frozen(false)),
            _ => {}
        }
        Ok(())
    };
    Case { before: &late, ..Case::new() }.check_by(&Captured::all(2), grouped);
}

#[test]
fn update_that_synchronizes_runs_eagerly_after_a_captured_pass() {
    let why = "the optimizer cannot be captured: graph capture: a graph cannot contain work that copies to the host";
    let expected = Captured { captures: 1, replays: STEPS, why_not: Some(why.into()) };
    Case::new().check_by(&expected, || SynchronizingAdamW(grouped()));
}

/// The report of each step, and the bits of weights and optimizer state after it.
type Steps = Vec<(String, Vec<Vec<u64>>)>;

/// Runs steps on one rank with control flags; a failed step is reported by its error.
fn step_outcomes<O: Optimizer>(
    world: World,
    capture: bool,
    optim: impl Fn() -> O + Sync,
    before: impl Fn(&mut Lm<'_>, usize) -> Result<ControlFlags> + Sync,
    read: impl Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + Sync,
) -> Steps {
    let mut ranks = world.launch(|rank| {
        let config = ModelConfig::from(config(0.0));
        let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
        let settings = TrainerConfig { capture, ..settings() };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let mut trainer = Trainer::new(rank, model, &plan, optim(), settings, &read, loss)?;
        let mut expected = Vec::new();
        for step in 0..STEPS {
            let control = before(&mut trainer, step)?;
            let report = match trainer.step_with(control) {
                Ok(StepReport { loss, grad_norm, control, .. }) => {
                    format!("{loss:e} {grad_norm:e} {control:?}")
                }
                Err(error) => {
                    assert!(trainer.rescue().is_ok(), "weights are those of the step before");
                    error.message().to_string()
                }
            };
            let bits =
                |t: &Tensor| -> Result<Vec<u64>> { Ok(t.to_f64()?.iter().map(|x| x.to_bits()).collect()) };
            let mut all = Vec::new();
            for param in trainer.model().params() {
                let kept = trainer.optim().param_state(param).into_iter().flat_map(|kept| kept.tensors);
                for tensor in std::iter::once(param.tensor()).chain(kept) {
                    all.push(bits(&tensor)?);
                }
            }
            all.push(vec![trainer.optim().num_steps()]);
            expected.push((report, all));
        }
        Ok(expected)
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

#[test]
fn skipped_step_leaves_everything_unchanged() {
    let odd = |_: &mut Lm<'_>, step: usize| {
        let number = if step == 3 { f64::NAN } else { step as f64 };
        Ok(ControlFlags::new().flag("set", true).number("odd", number))
    };
    let check = |expected: &dyn Fn(World, bool) -> Steps| {
        let device = CapturingDevice::default();
        let on = |capture| {
            expected(World::new(Mesh::single()).threads(1).on_device(Arc::new(device.clone())), capture)
        };
        let (run, captured) = (on(false), on(true));
        assert_eq!(captured, run);
        assert_eq!(
            run[3].0,
            "step 4: control number `odd` sums to NaN over all ranks; the update was not applied"
        );
        assert_eq!(run[3].1, run[2].1);
        assert_ne!(run[4].1, run[3].1);
        // A skipped step is not recaptured.
        assert_eq!((device.num_captures(), device.num_replays()), (2, 2 * STEPS));
    };
    check(&|world, capture| step_outcomes(world, capture, grouped, odd, read));
    check(&|world, capture| step_outcomes(world, capture, || descent(true), odd, read));
}

#[test]
fn host_synchronizes_once_per_step() {
    for (capture, scaled) in [(true, false), (true, true), (false, false)] {
        let device = CapturingDevice::default();
        let world = World::new(Mesh::single()).threads(1).on_device(Arc::new(device.clone()));
        let config = ModelConfig::from(config(0.0));
        let ended = world.launch(|rank| {
            let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
            let dtype = if scaled { DType::F16 } else { DType::F32 };
            let settings = TrainerConfig { capture, dtype, ..settings() };
            let mut trainer = Trainer::new(rank, model, &plan, grouped(), settings, read, loss)?;
            for step in 0..STEPS {
                if step < 2 {
                    super::set_step(&mut trainer, step as u64, Some(LossScale::new([4.0, 8.0][step], 0)));
                }
                device.take_calls();
                trainer.step_with(ControlFlags::new().number("step", step as f64))?;
                let calls = device.take_calls();
                let downloads = calls.iter().filter(|call| **call == DeviceCall::Download).count();
                assert_eq!((downloads, calls.last()), (1, Some(&DeviceCall::Download)), "step {step}");
                let first = calls.iter().position(|call| *call == DeviceCall::Replay);
                if capture {
                    let first = first.expect("a step is replayed");
                    assert_eq!(
                        calls[first..],
                        [DeviceCall::Replay, DeviceCall::Replay, DeviceCall::Download],
                        "step {step}"
                    );
                } else {
                    assert_eq!(first, None);
                }
            }
            Ok(())
        });
        ended.unwrap();
        // A changed loss scale recaptures the pass, and the update, which reads its results.
        let captures = if capture { if scaled { 4 } else { 2 } } else { 0 };
        assert_eq!(device.num_captures(), captures);
    }
}

/// Updates of all optimizers on a GPU, and an invalid token, whose error makes the device skip the step.
#[cfg(feature = "cuda")]
pub(super) fn on_gpu(gpu: &Arc<dyn shardgrad::kernels::BackendProvider>) {
    use super::{ROWS, SEQ, VOCAB, small};
    let world = || World::new(Mesh::single()).threads(1).on_device(gpu.clone());
    let run = |capture| Case { steps: 3, ..small() }.run_by(world(), capture, || descent(true)).unwrap();
    let (captured, why_not) = run(true);
    assert_eq!((captured, why_not), (run(false).0, None));
    let outside = |rank: &Rank, step: u64, rows: Range<usize>| {
        let mut all = read(rank, step, rows)?;
        if step == 3 {
            all[0] = Tensor::from_host(rank, &all[0].shape(), &[VOCAB as i64; ROWS / 2 * SEQ])?;
        }
        Ok(all)
    };
    let before = |trainer: &mut Lm<'_>, step: usize| {
        if step == 4 {
            super::set_step(trainer, 4, None);
        }
        Ok(ControlFlags::new().number("step", step as f64))
    };
    let expected = |capture| step_outcomes(world(), capture, grouped, before, outside);
    let (captured, run) = (expected(true), expected(false));
    assert_eq!(captured, run);
    assert!(run[3].0.contains("19") && run[3].1 == run[2].1, "{}", run[3].0);
    assert_ne!(run[4].1, run[3].1);
}
