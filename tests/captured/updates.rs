//! The update as captured work: whatever a step is told, its bits are those of one that is run, and the host waits at its end.

use super::device::{Addressed, Asked};
use super::{Case, Lm, STEPS, Told, config, read, settings};
use shardgrad::nn::optim::{GatedStep, Group, Kept, LossScale};
use shardgrad::nn::{LanguageModel, ModelConfig, StepReport};
use shardgrad::prelude::*;
use std::ops::Range;
use std::sync::Arc;

fn grouped() -> AdamW {
    let slow = Group { lr_scale: Some(0.25), weight_decay: Some(0.0) };
    AdamW::new(3e-3).betas(0.8, 0.97).weight_decay(0.1).group("h.1.*", slow)
}

fn descent(nesterov: bool) -> Sgd {
    let sgd = Sgd::new(0.05).momentum(0.9).weight_decay(0.01);
    if nesterov { sgd.nesterov() } else { sgd }
}

/// A rule that wants to know on the host whether its step is taken, and leaves the rest to another.
#[derive(Debug)]
struct Asks(AdamW);

impl Optimizer for Asks {
    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn num_steps(&self) -> u64 {
        self.0.num_steps()
    }

    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        self.0.rates(params, lr)
    }

    fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()> {
        if step.taken()?.is_some() { self.0.change(params, step) } else { Ok(()) }
    }

    fn count(&mut self, params: &[&Param]) {
        self.0.count(params);
    }

    fn kept(&self, param: &Param) -> Option<Kept> {
        self.0.kept(param)
    }
}

#[test]
fn a_replay_that_fails_leaves_parameters_as_they_are_or_says_that_they_are_lost() {
    let config = ModelConfig::from(config(0.0));
    // Each step replays its pass, then its update.
    for (number, is_update) in [(5, false), (6, true)] {
        let world = World::new(Mesh::single()).threads(1).on(Arc::new(Addressed::failing(number)));
        let ended = world.launch(|rank| {
            let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
            let settings = Settings { capture: true, ..settings() };
            let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
            let weights = |trainer: &Lm<'_>| {
                trainer.model().params().iter().map(|p| p.tensor().to_f64()).collect::<Result<Vec<_>>>()
            };
            trainer.step(&[])?;
            trainer.step(&[])?;
            let before = weights(&trainer)?;
            let error = trainer.step(&[]).unwrap_err();
            assert!(error.message().contains("replay: not now"), "{error}");
            let told =
                error.details().iter().find(|(label, _)| *label == "lost").map(|(_, text)| text.to_string());
            if !is_update {
                assert_eq!((told, weights(&trainer)?), (None, before));
                trainer.step(&[])?;
                return weights(&trainer).map(drop);
            }
            let (count, first) = (before.len(), trainer.model().params()[0].name());
            let what = format!(
                "{count} parameters, `{first}` first: they may be of no step; go on from the last model"
            );
            assert!(told.is_some_and(|told| told.starts_with(&what)), "{error}");
            // Nobody reads half of a step.
            weights(&trainer).map(drop)
        });
        match is_update {
            false => drop(ended.unwrap()),
            true => assert!(ended.unwrap_err().message().contains("was lost in an update that failed")),
        }
    }
}

#[test]
fn updates_of_all_rules_are_captured() {
    for clip in [None, Some(0.5), Some(1e9)] {
        let case = Case { settings: Settings { clip, ..settings() }, ..Case::new() };
        case.check_by(&Told::all(1), grouped);
        case.check_by(&Told::all(1), || descent(true));
    }
    Case::new().check_by(&Told::all(1), || descent(false));
    let settings = Settings { dtype: DType::BF16, ..settings() };
    Case { settings, ..Case::new() }.check_by(&Told::all(1), || descent(true));
}

#[test]
fn what_is_kept_of_parameters_is_found_where_it_lies() {
    // Averages that somebody holds stay as they are, and those of the optimizer lie elsewhere then; a parameter that begins late has
    // averages and corrections of its own.
    let held = |trainer: &mut Lm<'_>, step: usize, held: &mut Vec<Tensor>| {
        let kept = |param: &Param| trainer.optim().kept(param).map(|kept| kept.tensors);
        if step == 2 {
            held.extend(kept(&trainer.model().params()[3]).into_iter().flatten());
            let sum: f64 = held[0].to_f64()?.iter().sum();
            held.push(Tensor::from_host(trainer.rank(), &[1], &[sum])?);
        }
        if step == 5 {
            let sum: f64 = held[0].to_f64()?.iter().sum();
            assert_eq!(held.last().unwrap().to_f64()?, [sum], "what somebody holds does not change");
        }
        Ok(())
    };
    let case = Case { before: &held, ..Case::new() };
    // The pass is captured once, the update twice.
    case.check_by(&Told { captures: 3, ..Told::all(1) }, grouped);
    case.check_by(&Told { captures: 3, ..Told::all(1) }, || descent(false));
    let late = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        match step {
            0 => drop(trainer.model().freeze("h.0.*")?),
            2 => trainer.model().params().iter().for_each(|param| param.set_frozen(false)),
            _ => {}
        }
        Ok(())
    };
    Case { before: &late, ..Case::new() }.check_by(&Told::all(2), grouped);
}

#[test]
fn an_update_that_asks_is_run_behind_a_captured_pass() {
    let why = "its optimizer: work that is being captured copies to the host";
    let told = Told { captures: 1, replays: STEPS, why_not: Some(why.into()) };
    Case::new().check_by(&told, || Asks(grouped()));
}

/// What steps told, and what followed each in bits: weights and averages.
type Steps = Vec<(String, Vec<Vec<u64>>)>;

/// Steps on one rank with control numbers; those that fail are told by their errors.
fn told_of_steps<O: Optimizer>(
    world: World,
    capture: bool,
    optim: impl Fn() -> O + Sync,
    before: impl Fn(&mut Lm<'_>, usize) -> Result<Vec<f64>> + Sync,
    read: impl Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + Sync,
) -> Steps {
    let mut ranks = world.launch(|rank| {
        let config = ModelConfig::from(config(0.0));
        let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
        let settings = Settings { capture, ..settings() };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
        let mut trainer = Trainer::new(rank, model, &plan, optim(), settings, &read, loss)?;
        let mut told = Vec::new();
        for step in 0..STEPS {
            let control = before(&mut trainer, step)?;
            let report = match trainer.step(&control) {
                Ok(StepReport { step, loss, grad_norm, control, .. }) => {
                    format!("{step} {loss:e} {grad_norm:e} {control:?}")
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
                let kept = trainer.optim().kept(param).into_iter().flat_map(|kept| kept.tensors);
                for tensor in std::iter::once(param.tensor()).chain(kept) {
                    all.push(bits(&tensor)?);
                }
            }
            all.push(vec![trainer.optim().num_steps()]);
            told.push((report, all));
        }
        Ok(told)
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

#[test]
fn a_step_that_is_not_taken_leaves_everything_as_it_was() {
    let odd = |_: &mut Lm<'_>, step: usize| Ok(vec![1.0, if step == 3 { f64::NAN } else { step as f64 }]);
    let check = |told: &dyn Fn(World, bool) -> Steps| {
        let device = Addressed::default();
        let on = |capture| told(World::new(Mesh::single()).threads(1).on(Arc::new(device.clone())), capture);
        let (run, captured) = (on(false), on(true));
        assert_eq!(captured, run);
        assert_eq!(run[3].0, "step 4: control number 1 is NaN over all ranks; the step was not taken");
        assert_eq!(run[3].1, run[2].1);
        assert_ne!(run[4].1, run[3].1);
        // Nothing is captured anew for it.
        assert_eq!((device.num_captures(), device.num_replays()), (2, 2 * STEPS));
    };
    check(&|world, capture| told_of_steps(world, capture, grouped, odd, read));
    check(&|world, capture| told_of_steps(world, capture, || descent(true), odd, read));
}

#[test]
fn the_host_waits_once_at_the_end_of_a_step() {
    for (capture, scaled) in [(true, false), (true, true), (false, false)] {
        let device = Addressed::default();
        let world = World::new(Mesh::single()).threads(1).on(Arc::new(device.clone()));
        let config = ModelConfig::from(config(0.0));
        let ended = world.launch(|rank| {
            let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
            let dtype = if scaled { DType::F16 } else { DType::F32 };
            let settings = Settings { capture, dtype, ..settings() };
            let mut trainer = Trainer::new(rank, model, &plan, grouped(), settings, read, loss)?;
            for step in 0..STEPS {
                if step < 2 {
                    super::go_on(&mut trainer, step as u64, Some(LossScale::new([4.0, 8.0][step], 0)));
                }
                device.take_asked();
                trainer.step(&[step as f64])?;
                let asked = device.take_asked();
                let downloads = asked.iter().filter(|asked| **asked == Asked::Download).count();
                assert_eq!((downloads, asked.last()), (1, Some(&Asked::Download)), "step {step}");
                let first = asked.iter().position(|asked| *asked == Asked::Replay);
                if capture {
                    let first = first.expect("a step is replayed");
                    assert_eq!(
                        asked[first..],
                        [Asked::Replay, Asked::Replay, Asked::Download],
                        "step {step}"
                    );
                } else {
                    assert_eq!(first, None);
                }
            }
            Ok(())
        });
        ended.unwrap();
        // The loss scale is part of the pass, and the update reads what that makes.
        let captures = if capture { if scaled { 4 } else { 2 } } else { 0 };
        assert_eq!(device.num_captures(), captures);
    }
}

/// Updates of all rules on a card, and a token that is none: the card has noted it, so that the step is not taken.
#[cfg(feature = "cuda")]
pub(super) fn on_the_card(card: &Arc<dyn shardgrad::kernels::BackendProvider>) {
    use super::{ROWS, SEQ, VOCAB};
    let world = || World::new(Mesh::single()).threads(1).on(card.clone());
    let run = |capture| Case::new().run_by(world(), capture, || descent(true)).unwrap();
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
            super::go_on(trainer, 4, None);
        }
        Ok(vec![step as f64])
    };
    let told = |capture| told_of_steps(world(), capture, grouped, before, outside);
    let (captured, run) = (told(true), told(false));
    assert_eq!(captured, run);
    assert!(run[3].0.contains("19") && run[3].1 == run[2].1, "{}", run[3].0);
    assert_ne!(run[4].1, run[3].1);
}
