//! Graph capture (CUDA graphs) of training steps: replayed steps are bitwise equal to eager ones, whatever changes between steps; steps that cannot
//! be captured run eagerly.

mod device;
mod updates;

use device::CapturingDevice;
use shardgrad::nn::checkpoint::RunState;
use shardgrad::nn::loss::IGNORE_INDEX;
use shardgrad::nn::optim::{LossScale, LrScheduler};
use shardgrad::nn::{Gpt2, Gpt2Config, LanguageModel, Loss, ModelConfig};
use shardgrad::prelude::*;
use shardgrad::tensor::{LocalMapLayouts, LocalTensor, local_map};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const ROWS: usize = 4;
const SEQ: usize = 8;
const VOCAB: usize = 19;
const STEPS: usize = 6;

/// The reports and final weights of a run, as bits.
#[derive(Debug, PartialEq)]
struct Run {
    steps: Vec<StepReport>,
    weights: Vec<Vec<u64>>,
}

/// Number of captures and replays, and why capture was given up.
#[derive(Debug, PartialEq)]
struct Captured {
    captures: usize,
    replays: usize,
    why_not: Option<String>,
}

impl Captured {
    /// Passes and updates, each captured `captures` times.
    fn all(captures: usize) -> Captured {
        Captured { captures: 2 * captures, replays: 2 * STEPS, why_not: None }
    }

    /// Captured passes without captured updates.
    fn none(captures: usize, why: &str) -> Captured {
        Captured { captures, replays: captures, why_not: Some(why.into()) }
    }
}

/// The tokens of a step.
fn tokens(rank: &Rank, step: u64, rows: Range<usize>, offset: usize) -> Result<Tensor> {
    let plan = Gpt2::plan(&config(0.0));
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
    let token = |row: usize, at: usize| ((at * at + 5 * row + 3 * step as usize) % VOCAB) as i64;
    let all: Vec<i64> = rows.flat_map(|row| (0..SEQ).map(move |at| token(row, at + offset))).collect();
    Tensor::from_global(rank, &layout, &all)
}

fn read(rank: &Rank, step: u64, rows: Range<usize>) -> Result<Vec<Tensor>> {
    Ok(vec![tokens(rank, step, rows.clone(), 0)?, tokens(rank, step, rows, 1)?])
}

fn config(dropout: f64) -> Gpt2Config {
    Gpt2Config { attn_pdrop: 0.0, ..Gpt2Config::new(VOCAB, SEQ, 12, 2, 2).with_dropout(dropout) }
}

fn settings() -> TrainerConfig {
    TrainerConfig {
        microbatches: 2,
        seed: 3,
        clip: Some(0.5),
        lr_scheduler: Some(LrScheduler::constant(3e-3).warmup(3)),
        ..TrainerConfig::new(ROWS)
    }
}

type Lm<'t> = Trainer<'t, LanguageModel>;

/// Sets the step and the loss scale of a trainer.
fn set_step(trainer: &mut Lm<'_>, step: u64, loss_scale: Option<LossScale>) {
    trainer.set_state(&RunState { step, loss_scale, ..RunState::default() });
}

type Read<'a> = dyn Fn(&Rank, u64, Range<usize>) -> Result<Vec<Tensor>> + Sync + 'a;
type LossFn<'a> = dyn Fn(&LanguageModel, &[Var]) -> Loss + Sync + 'a;
/// Called before a step, with tensors held over steps.
type Before<'a> = dyn Fn(&mut Lm<'_>, usize, &mut Vec<Tensor>) -> Result<()> + Sync + 'a;

/// A test case: model, precision, data, loss, and a function called before each step.
struct Case<'a> {
    settings: TrainerConfig,
    num_blocks: usize,
    dropout: f64,
    recompute: bool,
    mesh: &'a str,
    steps: usize,
    read: &'a Read<'a>,
    loss: &'a LossFn<'a>,
    before: &'a Before<'a>,
}

impl Case<'_> {
    fn new() -> Case<'static> {
        Case {
            settings: settings(),
            num_blocks: 2,
            dropout: 0.0,
            recompute: false,
            mesh: "",
            steps: STEPS,
            read: &read,
            loss: &|model, x| model.loss_from_batch(x),
            before: &|_, _, _| Ok(()),
        }
    }

    /// Runs the steps in a world.
    fn run(&self, world: World, capture: bool) -> Result<(Run, Option<String>)> {
        self.run_by(world, capture, || AdamW::new(3e-3).weight_decay(0.1))
    }

    /// As above, with another optimizer.
    fn run_by<O: Optimizer>(
        &self,
        world: World,
        capture: bool,
        optim: impl Fn() -> O + Sync,
    ) -> Result<(Run, Option<String>)> {
        let mut ranks = world.launch(|rank| {
            let config = Gpt2Config { n_layer: self.num_blocks, ..config(self.dropout) };
            let config = ModelConfig::from(config);
            let plan = LanguageModel::plan(&config);
            let model = LanguageModel::new(&config).recompute(self.recompute);
            let settings = TrainerConfig { capture, ..self.settings.clone() };
            let loss = |model: &LanguageModel, x: &[Var]| (self.loss)(model, x);
            let mut trainer = Trainer::new(rank, model, &plan, optim(), settings, self.read, loss)?;
            let (mut steps, mut held) = (Vec::new(), Vec::new());
            for step in 0..self.steps {
                (self.before)(&mut trainer, step, &mut held)?;
                steps.push(trainer.step()?);
            }
            let bits = |param: &Param| -> Result<Vec<u64>> {
                Ok(param.tensor().to_f64()?.iter().map(|x| x.to_bits()).collect())
            };
            let weights = trainer.model().params().iter().map(bits).collect::<Result<_>>()?;
            let why_not = trainer.capture_refusal().map(|e| e.message().to_string());
            Ok((Run { steps, weights }, why_not))
        })?;
        Ok(ranks.swap_remove(0))
    }

    fn world(&self) -> World {
        World::new(Mesh::parse(self.mesh).unwrap()).threads(1)
    }

    /// Compares captured steps with eager ones on the same device, and those with the CPU.
    fn check(&self, expected: &Captured) {
        self.check_by(expected, || AdamW::new(3e-3).weight_decay(0.1));
    }

    /// As above, with another optimizer.
    fn check_by<O: Optimizer>(&self, expected: &Captured, optim: impl Fn() -> O + Sync) {
        let device = CapturingDevice::default();
        let on = |device: &CapturingDevice| self.world().on_device(Arc::new(device.clone()));
        let (run, none) = self.run_by(on(&device), false, &optim).unwrap();
        assert_eq!((none, device.num_captures(), device.num_replays()), (None, 0, 0));
        assert_eq!(
            run,
            self.run_by(self.world(), false, &optim).unwrap().0,
            "the device computes like the CPU"
        );
        let (captured, why_not) = self.run_by(on(&device), true, &optim).unwrap();
        let (captures, replays) = (device.num_captures(), device.num_replays());
        assert_eq!(*expected, Captured { captures, replays, why_not });
        assert_eq!(captured, run);
        let losses: Vec<f64> = run.steps.iter().map(|s| s.loss).collect();
        assert!(losses.windows(2).all(|w| w[0] != w[1]), "{losses:?}");
    }
}

#[test]
fn steps_of_all_precisions_are_captured_once() {
    for (dtype, param_dtype) in
        [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
    {
        for recompute in [false, true] {
            let settings = TrainerConfig { dtype, param_dtype: Some(param_dtype), ..settings() };
            Case { settings, recompute, ..Case::new() }.check(&Captured::all(1));
        }
    }
    let whole = TrainerConfig { microbatches: 1, clip: None, ..settings() };
    Case { settings: whole, ..Case::new() }.check(&Captured::all(1));
    Case { mesh: "dp=1", ..Case::new() }.check(&Captured::all(1));
}

#[test]
fn captured_steps_divide_by_the_counts_of_their_own_batch() {
    // Each step has another number of labels, and so has each microbatch.
    let masked = |rank: &Rank, step: u64, rows: Range<usize>| {
        let mut all = read(rank, step, rows.clone())?;
        let labels = all[1].to_host::<i64>()?.into_iter().enumerate();
        let is_masked = |at: usize| (at + rows.start * SEQ) % 7 < 1 + step as usize % 5;
        let labels: Vec<i64> =
            labels.map(|(at, label)| if is_masked(at) { IGNORE_INDEX } else { label }).collect();
        all[1] = Tensor::from_host(rank, &[rows.len(), SEQ], &labels)?;
        Ok(all)
    };
    let loss = |model: &LanguageModel, x: &[Var]| {
        let loss = model.masked_loss(&x[0], &x[1]);
        loss.also_sum("targets", x[1].cast(DType::F32).sum())
    };
    for dtype in [DType::F32, DType::BF16] {
        let settings = TrainerConfig { dtype, ..settings() };
        let case = Case { settings, read: &masked, loss: &loss, ..Case::new() };
        case.check(&Captured::all(1));
        let (run, _) = case.run(case.world(), false).unwrap();
        assert!(run.steps.windows(2).all(|w| w[0].count != w[1].count), "{:?}", run.steps);
        assert!(run.steps.iter().all(|step| step.auxiliary("targets") != 0.0), "{:?}", run.steps);
    }
}

#[test]
fn steps_are_recaptured_when_addresses_or_shapes_change() {
    // A parameter with another handle is not updated in place, so its address changes.
    let held = |trainer: &mut Lm<'_>, step: usize, held: &mut Vec<Tensor>| {
        held.truncate(if step == 5 { 0 } else { 9 });
        if step == 2 {
            held.push(trainer.model().params()[3].tensor());
        }
        Ok(())
    };
    Case { before: &held, ..Case::new() }.check(&Captured::all(2));
    // Restored weights, at another step.
    let restored = |trainer: &mut Lm<'_>, step: usize, held: &mut Vec<Tensor>| {
        if step == 1 {
            held.extend(trainer.model().params().iter().map(Param::tensor));
        }
        if step == 4 {
            for (param, tensor) in trainer.model().params().iter().zip(held.drain(..)) {
                param.set_tensor(tensor)?;
            }
            set_step(trainer, 9, None);
        }
        Ok(())
    };
    Case { before: &restored, ..Case::new() }.check(&Captured::all(3));
    // An evaluation in between takes the memory of the captured step.
    let measured = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        if step == 3 {
            let held_out = read(trainer.rank(), 77, 0..ROWS)?;
            assert!(trainer.partial_loss(&held_out)?.sum.is_finite());
        }
        Ok(())
    };
    Case { before: &measured, ..Case::new() }.check(&Captured::all(2));
    let frozen = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        match step {
            1 => drop(trainer.model().freeze("h.0.*")?),
            3 => trainer.model().params().iter().for_each(|param| param.set_frozen(false)),
            _ => {}
        }
        Ok(())
    };
    Case { before: &frozen, ..Case::new() }.check(&Captured::all(3));
    // From step 3 on, microbatches have shorter rows.
    let shorter = |rank: &Rank, step: u64, rows: Range<usize>| {
        let seq = if step < 3 { SEQ } else { SEQ - 3 };
        let cut = |t: Tensor| t.slice(1, 0..seq).contiguous();
        read(rank, step, rows)?.into_iter().map(cut).collect()
    };
    Case { read: &shorter, ..Case::new() }.check(&Captured::all(2));
}

#[test]
fn changed_loss_scale_is_recaptured() {
    let settings = TrainerConfig { dtype: DType::F16, ..settings() };
    let scaled = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        if step == 0 {
            // So large that gradients overflow at first.
            set_step(trainer, 0, Some(LossScale::new(2f64.powi(20), 0)));
        }
        if step == 5 {
            set_step(trainer, 5, Some(LossScale::new(4.0, 1999)));
        }
        Ok(())
    };
    let case = Case { settings, before: &scaled, ..Case::new() };
    let steps = case.run(case.world(), false).unwrap().0.steps;
    let scales: Vec<f64> = steps.iter().map(|s| s.loss_scale.unwrap()).collect();
    assert!(steps[0].skipped && !steps[4].skipped && scales[5] == 4.0, "{scales:?}");
    let mut changes = scales.clone();
    changes.dedup();
    let device = CapturingDevice::default();
    let run = |capture| case.run(case.world().on_device(Arc::new(device.clone())), capture).unwrap();
    let (captured, why_not) = run(true);
    assert_eq!((why_not, device.num_captures(), device.num_replays()), (None, 2 * changes.len(), 2 * STEPS));
    // Gradient norms of skipped steps are NaN, so reports are compared as text.
    assert_eq!(format!("{captured:?}"), format!("{:?}", run(false).0));
}

#[test]
fn dropout_uses_the_random_numbers_of_the_step() {
    for recompute in [false, true] {
        let expected = Captured::none(1, "the loss draws random numbers of the step (dropout)");
        Case { dropout: 0.3, recompute, ..Case::new() }.check(&expected);
    }
}

/// A graph calls no hook: steps with hooks run launch by launch, and those after them are captured again.
#[test]
fn steps_with_hooks_are_not_captured() {
    let num_calls = Arc::new(AtomicUsize::new(0));
    let watched = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        let num_calls = num_calls.clone();
        let count = move |_: &str, _: &Tensor| {
            num_calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        match step {
            2 => drop(trainer.model().watch_gradients("*.1.ln_1.out", count)?),
            4 => trainer.model().unwatch(),
            _ => {}
        }
        Ok(())
    };
    let case = Case { before: &watched, ..Case::new() };
    case.check(&Captured { captures: 4, replays: 8, why_not: None });
    // The CPU, the device without capture, and with it.
    assert_eq!(num_calls.load(Ordering::Relaxed), 3 * 2 * case.settings.microbatches);
}

#[test]
fn uncapturable_steps_run_eagerly() {
    let why = "graph capture: a graph cannot contain work that copies from the host";
    let flipped = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(&[x[0].flip(1), x[1].flip(1)]);
    Case { loss: &flipped, ..Case::new() }.check(&Captured::none(0, why));
    // A copy to the host in the middle of the backward pass.
    let late = |model: &LanguageModel, x: &[Var]| {
        let loss = model.loss_from_batch(x).value();
        let alike = [loss.layout().clone()];
        let layouts = LocalMapLayouts { inputs: &alike, outputs: &alike, cotangents: &alike };
        let forward = |_: &Rank, x: &[LocalTensor]| Ok([x[0].clone()].into_iter().collect());
        let backward = |rank: &Rank, _: &[LocalTensor], dy: &[LocalTensor]| {
            let numbers: Vec<f32> = dy[0].to_f64(rank)?.iter().map(|x| *x as f32).collect();
            Ok([LocalTensor::upload(rank, &dy[0].view.shape, &numbers)?].into_iter().collect())
        };
        Loss::mean(local_map("late", &[&loss], layouts, forward, backward).remove(0))
    };
    let why = "graph capture: a graph cannot contain work that copies to the host";
    Case { loss: &late, ..Case::new() }.check(&Captured::none(0, why));
    let views = |rank: &Rank, step: u64, rows: Range<usize>| {
        let all = read(rank, step, 0..ROWS)?;
        Ok(all.iter().map(|t| t.slice(0, rows.clone())).collect())
    };
    Case { read: &views, ..Case::new() }
        .check(&Captured::none(0, "an argument of the loss is a view of other memory"));
    // On the CPU, and with several ranks.
    let case = Case::new();
    assert_eq!(case.run(case.world(), true).unwrap().1.unwrap(), "capture: no kernel for this back end");
    let two = Case { mesh: "dp=2", ..Case::new() };
    assert_eq!(
        two.run(two.world(), true).unwrap().1.unwrap(),
        "graph capture supports a world of one rank only"
    );
}

#[test]
fn failed_capture_is_retried_once() {
    let case = Case::new();
    let run = case.run(case.world(), false).unwrap().0;
    // A failure in the middle of the pass, or of the update; then only the pass is replayed.
    for (kernel, failing_captures, expected) in [
        ("layer_norm_backward", 1, Captured { captures: 2, replays: 2 * (STEPS - 1), why_not: None }),
        ("layer_norm_backward", 2, Captured::none(0, "launch: not now")),
        ("adamw", 1, Captured { captures: 2, replays: 2 * STEPS - 1, why_not: None }),
        (
            "adamw",
            2,
            Captured {
                captures: 1,
                replays: STEPS,
                why_not: Some("the optimizer cannot be captured: launch: not now".into()),
            },
        ),
    ] {
        let device = CapturingDevice::failing_capture(failing_captures, kernel);
        let (captured, why_not) = case.run(case.world().on_device(Arc::new(device.clone())), true).unwrap();
        assert_eq!(captured, run);
        let (captures, replays) = (device.num_captures(), device.num_replays());
        assert_eq!(Captured { captures, replays, why_not }, expected);
    }
}

#[test]
fn capture_is_given_up_when_parameters_move_every_step() {
    let copied = |trainer: &mut Lm<'_>, _: usize, held: &mut Vec<Tensor>| {
        *held = trainer.model().params().iter().map(Param::tensor).collect();
        Ok(())
    };
    // More recaptures in a row than allowed.
    let expected = Captured {
        captures: 65,
        replays: 65,
        why_not: Some("the graph had to be captured again in each step".into()),
    };
    Case { steps: 36, before: &copied, ..Case::new() }.check(&expected);
}

#[test]
fn replayed_step_reports_the_same_errors_as_an_eager_step() {
    let expected = |case: &Case<'_>, capture: bool| {
        let world = case.world().on_device(Arc::new(CapturingDevice::default()));
        let error = case.run(world, capture).unwrap_err();
        (error.kind(), error.message().to_string(), error.to_string())
    };
    // A NaN weight and an invalid token, after good steps.
    let broken = |trainer: &mut Lm<'_>, step: usize, _: &mut Vec<Tensor>| {
        if step == 3 {
            let param = &trainer.model().params()[5];
            let mut numbers = param.tensor().to_f64()?;
            numbers[1] = f64::NAN;
            param.set_tensor(Tensor::from_host(trainer.rank(), param.shape(), &numbers)?.cast(DType::F32))?;
        }
        Ok(())
    };
    let case = Case { before: &broken, ..Case::new() };
    assert_eq!(expected(&case, true), expected(&case, false));
    assert_eq!(expected(&case, true).0, Kind::NotFinite);
    let outside = |rank: &Rank, step: u64, rows: Range<usize>| {
        let mut all = read(rank, step, rows)?;
        if step == 3 {
            all[0] = Tensor::from_host(rank, &all[0].shape(), &[VOCAB as i64; ROWS / 2 * SEQ])?;
        }
        Ok(all)
    };
    let case = Case { read: &outside, ..Case::new() };
    // A device reports the error at the next synchronization, without the op.
    let (kind, message, _) = expected(&case, true);
    assert_eq!((kind, message), (Kind::Data, expected(&case, false).1));
}

/// Trains with a loss closure that keeps a tensor.
fn losses_kept_by_closure(turns: bool) -> Result<Vec<f64>> {
    let world = World::new(Mesh::single()).threads(1).on_device(Arc::new(CapturingDevice::default()));
    let mut ranks = world.launch(|rank| {
        let config = ModelConfig::from(config(0.0));
        let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
        let kept: RefCell<Vec<Tensor>> = RefCell::default();
        let loss = |model: &LanguageModel, x: &[Var]| {
            let loss = model.loss_from_batch(x).value();
            kept.borrow_mut().push(loss.scale(2.0).tensor().clone());
            if turns { loss.reshape(&[1]).flip(0).sum() } else { loss }
        };
        let settings = TrainerConfig { capture: true, microbatches: 1, ..settings() };
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
        let mut doubled = Vec::new();
        for _ in 0..STEPS {
            let loss = trainer.step()?.loss;
            assert_eq!(kept.borrow().len(), 1);
            doubled.push(kept.borrow()[0].to_f64()?[0] / loss);
        }
        Ok(doubled)
    })?;
    Ok(ranks.swap_remove(0))
}

#[test]
fn tensors_kept_by_the_loss_closure_are_of_the_last_step() {
    assert_eq!(losses_kept_by_closure(false).unwrap(), [2.0; STEPS]);
    let error = losses_kept_by_closure(true).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    let text = "graph capture failed, and 4 bytes that it allocated are still held: drop them";
    assert_eq!(error.message(), text);
    let cause = ("cause", "graph capture: a graph cannot contain work that copies from the host");
    assert!(error.details().iter().any(|(label, text)| (*label, text.as_ref()) == cause), "{error}");
}

/// A case for the fake GPU, which takes most of a second for a step of one block.
#[cfg(feature = "cuda")]
fn small() -> Case<'static> {
    Case { num_blocks: 1, ..Case::new() }
}

/// Slow: every kernel of a step is compiled by g++ for the fake GPU, which then runs it.
#[cfg(feature = "cuda")]
#[test]
fn steps_on_the_fake_gpu_are_captured() {
    let folder = crate::cli::Folder::new("captured");
    let Some(gpu) = crate::fake_gpu::open(&folder) else { return };
    let same = |case: &Case<'_>, why: Option<&str>| {
        let run = |capture| case.run(case.world().on_device(gpu.provider.clone()), capture).unwrap();
        let (captured, expected) = run(true);
        assert_eq!(expected.as_deref(), why);
        assert_eq!(captured, run(false).0);
    };
    // Captured once, and replayed for the batches of two more steps.
    same(&Case { steps: 3, ..small() }, None);
    let changed = |trainer: &mut Lm<'_>, step: usize, held: &mut Vec<Tensor>| {
        match step {
            1 => held.push(trainer.model().params()[3].tensor()),
            2 => drop(trainer.model().freeze("h.0.*")?),
            3 => held.clear(),
            4 => set_step(trainer, 4, Some(LossScale::new(8.0, 0))),
            _ => {}
        }
        Ok(())
    };
    // Losses are scaled in f16 only.
    for dtype in [DType::BF16, DType::F16] {
        let settings = TrainerConfig { dtype, ..settings() };
        same(&Case { settings, recompute: true, before: &changed, steps: 5, ..small() }, None);
    }
    let why = "the loss draws random numbers of the step (dropout)";
    same(&Case { dropout: 0.3, steps: 2, ..small() }, Some(why));
    let flipped = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(&[x[0].flip(1), x[1].flip(1)]);
    same(
        &Case { loss: &flipped, steps: 2, ..small() },
        Some("graph capture: a graph cannot contain work that copies from the host"),
    );
    updates::on_gpu(&gpu.provider);
}

/// The driver refuses the end of a capture, or the instantiation of the graph: once, of the pass or of the update; or always.
#[cfg(feature = "cuda")]
#[test]
fn captures_that_the_fake_gpu_refuses_change_no_step() {
    let folder = crate::cli::Folder::new("capture-refused");
    let Some(gpu) = crate::fake_gpu::open(&folder) else { return };
    let case = Case { steps: 3, ..small() };
    let run = |capture| case.run(case.world().on_device(gpu.provider.clone()), capture).unwrap();
    let (expected, _) = run(false);
    for (call, code) in [("cuStreamEndCapture", 901), ("cuGraphInstantiateWithFlags", 2)] {
        for (skipped, times) in [(0, 1), (1, 1), (0, 99), (1, 99)] {
            gpu.refuse(call, skipped, times, code);
            let (captured, why_not) = run(true);
            assert_eq!(captured, expected, "{call} {skipped} {times}");
            assert_eq!(why_not.is_some(), times > 1, "{call} {skipped} {times}: {why_not:?}");
        }
        gpu.refuse(call, 0, 0, 0);
    }
}
